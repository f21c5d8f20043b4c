"""The validation of a ranker: the last trained event of each user, which nothing is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from npu_gr.train.data import InteractionLog, NextItem
from npu_gr.train.next_item import sample_targets
from npu_gr.train.rank.options import TrainOptions


class HeldOutEvents(NamedTuple):
    """A log whose validation is not trained on."""

    log: InteractionLog
    targets: Sequence[NextItem]  # the validation's next items


def hold_out(log: InteractionLog, options: TrainOptions) -> HeldOutEvents:
    """Keep the last trained event of each user who has another one, of a large log of some users, for the validation.

    Args:
        log: to train on.
        options: the most users, and the seed that draws them.
    """
    last = log.starts[:-1] + log.num_trained - 1
    users = np.flatnonzero(log.num_trained > 1)
    every = [NextItem(user, event) for user, event in zip(users.tolist(), last[users].tolist(), strict=True)]
    targets = sample_targets(every, options.validation_users, options.seed)
    num_trained = log.num_trained.copy()
    num_trained[[user for user, _ in targets]] -= 1
    return HeldOutEvents(replace(log, num_trained=num_trained), targets)
