"""What a baseline is: something simple that a trained model has to beat, measured by the model's own protocol.

Every baseline learns items from the trained events alone; to score an event it may read, like the ranker, all events of
the user before it, those after the trained ones included.
"""

from __future__ import annotations

from typing import Protocol

from npu_gr.train.data import InteractionLog
from npu_gr.train.metrics import F64


class Baseline(Protocol):
    """A baseline, fitted to the trained events of a log."""

    name: str

    def liking(self, log: InteractionLog) -> F64 | None:
        """Score how much the user likes the item of each event of the log, from the user's events before it.

        Returns:
            float64 [n]; None = the baseline does not predict ratings.
        """
        ...

    def next_items(self, log: InteractionLog, user: int) -> F64:
        """Score each item as the one after the user's trained events, float64 [num_items]."""
        ...
