"""The next item is ranked among all items, and among those that the user has not had.

It never leaves itself out.
"""

from __future__ import annotations

import numpy as np

from npu_gr.train.data import InteractionLog, NextItem
from npu_gr.train.next_item import rank_next_items


def test_the_history_counts_overall_and_not_unseen() -> None:
    #  user 0 had items 4, 3 and takes 1; user 1 had item 2 twice and takes it again
    log = InteractionLog(
        items=np.array([4, 3, 1, 2, 2, 2]),
        actions=np.zeros(6, np.int64),
        times=np.arange(6),
        starts=np.array([0, 3, 6]),
        num_trained=np.array([2, 2]),
        item_ids=np.arange(5) * 10,
        action_values=(1.0,),
    )
    targets = log.next_items()
    assert targets == [NextItem(0, 2), NextItem(1, 5)]
    scores = [np.array([0.0, 1.0, 2.0, 3.0, 1.0]), np.array([5.0, 4.0, 3.0, 2.0, 1.0])]
    ranks = rank_next_items(log, targets, scores)
    assert ranks.overall.tolist() == [2.5, 2.0]  # items 2 and 3 above, item 4 ties: half a place
    assert ranks.unseen.tolist() == [1.0, np.inf]  # a repeat is never answered
    assert ranks.is_repeat.tolist() == [False, True]
    assert (ranks.repeat_ratio, ranks.evaluates_all) == (0.5, True)
    assert ranks.evaluated is ranks.overall
    again = rank_next_items(log, targets[:1], scores[:1])
    assert not again.evaluates_all
    assert again.evaluated is again.unseen
    assert scores[0].tolist() == [0.0, 1.0, 2.0, 3.0, 1.0]
