"""Rank the next item of each user among the whole catalogue: the protocol of the ranker and of the baselines.

The next item is that of the event right after a user's trained ones. No negatives are sampled: every item competes.
"Unseen" ranks leave out the items of the user's history, as a request that denies them does; the next item itself
stays in, even if the user had it before. Where people use things again these say little: a next item that its user
had before is then the only one of its kind left. So a model is judged by the ranks among all items if most of the next
items are repeats, and by the unseen ones if not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from npu_gr.train.data import Bools, InteractionLog, NextItem
from npu_gr.train.metrics import F64, rank_of

MANY_REPEATS = 0.5  # share of repeats above which unseen items say too little to judge by


def sample_targets(targets: Sequence[NextItem], num_users: int, seed: int) -> Sequence[NextItem]:
    """Draw at most so many of the targets at random; keep their order."""
    if len(targets) <= num_users:
        return targets
    chosen = np.random.default_rng(seed).choice(len(targets), num_users, replace=False)
    return [targets[index] for index in sorted(chosen.tolist())]


class NextItemRanks(NamedTuple):
    """Rank of each next item, from 0; ties count half. n = users."""

    overall: F64  # [n] among all items
    unseen: F64  # [n] among the items that are not in the user's history; [0] = not measured
    is_repeat: Bools  # [n] whether the user had the next item before

    @property
    def repeat_ratio(self) -> float:
        """Share of the next items that their users had before; 0 of none."""
        return float(self.is_repeat.mean()) if len(self.is_repeat) else 0.0

    @property
    def judges_all(self) -> bool:
        """Whether a model is judged by the ranks among all items, not by the unseen ones."""
        return self.repeat_ratio > MANY_REPEATS

    @property
    def judged(self) -> F64:
        """The ranks that a model is judged by."""
        return self.overall if self.judges_all else self.unseen


NO_RANKS = NextItemRanks(np.empty(0), np.empty(0), np.empty(0, np.bool_))


def rank_next_items(log: InteractionLog, targets: Sequence[NextItem], scores: Iterable[F64]) -> NextItemRanks:
    """Rank the targets under some model's scores.

    Args:
        log: with the users' histories.
        targets: the next items to rank.
        scores: [num_items] for each target, in order.
    """
    overall = np.empty(len(targets))
    unseen = np.empty(len(targets))
    is_repeat = np.zeros(len(targets), np.bool_)
    for index, (target, row) in enumerate(zip(targets, scores, strict=True)):
        item = int(log.items[target.event])
        overall[index] = rank_of(row, item)
        history = log.items[log.starts[target.user] : target.event]
        is_repeat[index] = item in history
        others = row.copy()
        others[history[history != item]] = -np.inf
        unseen[index] = rank_of(others, item)
    return NextItemRanks(overall, unseen, is_repeat)
