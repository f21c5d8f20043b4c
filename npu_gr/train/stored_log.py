"""A log that is larger than memory: its events in mapped files, and a sample of its users.

    items.npy  actions.npy  times.npy    int64 [n] events by user, each user's oldest first

A training reads batches from the files: 24 bytes an event on the disk, and in memory what the
kernel caches. What looks at a log as a whole (the choice of tasks, the first embeddings, the
validation, the score blend, the baselines, the evaluation) looks at the sample, which is a log of
arrays with the same items and actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.train.data import (
    BLOCK_EVENTS,
    TEST_RATIO,
    InteractionLog,
    Split,
    blocks_of_users,
    events_of,
)

COLUMNS = ("items", "actions", "times")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredLog:
    """The events of a dataset in mapped files."""

    log: InteractionLog  # nothing of it is trained on
    made_from: str  # digests of the dataset's events
    most_events: int  # about the events of the sample

    def split(self, split: Split) -> InteractionLog:
        """Decide which events are trained on."""
        counts = np.diff(self.log.starts)
        if split == "leave-one-out":
            num_trained = counts - np.minimum(counts, 1)
        elif split == "user-time":
            num_trained = counts - np.ceil(counts * TEST_RATIO).astype(np.int64)
        else:
            num_trained = _before(self.log, _cut(self.log.times))
        if not 0 < num_trained.sum() < len(self.log.items):
            raise DataError(
                f"{len(self.log.items)} interactions: the {split} split leaves "
                f"{num_trained.sum()} to train on; both parts must have events"
            )
        return replace(self.log, num_trained=num_trained)

    def sample(self, log: InteractionLog, seed: int) -> tuple[InteractionLog, I64]:
        """Read the events of users drawn at random: a log of arrays, and the users, ascending.

        Args:
            log: Result of `split`.
            seed: Seed of the draw.
        """
        order = np.random.default_rng(seed).permutation(log.num_users)
        total = np.cumsum(np.diff(log.starts)[order])
        users = np.sort(order[: max(1, int(np.searchsorted(total, self.most_events, "right")))])
        return events_of(log, users), users


def sampled(what: str, sample: InteractionLog, whole: InteractionLog) -> str:
    """Say in one line what was made of a sample of the users, and of how many."""
    return (
        f"the events were read from files; {what} are of a sample: {sample.num_users:,} of "
        f"{whole.num_users:,} users with {len(sample.items):,} of {len(whole.items):,} events"
    )


def _blocks(column: I64) -> Iterator[I64]:
    for first in range(0, len(column), BLOCK_EVENTS):
        yield column[first : first + BLOCK_EVENTS]


def _cut(times: I64) -> int:
    """Find the instant before which `to_train_on` trains: a quantile of all times, exactly."""
    wanted = int(np.floor((len(times) - 1) * (1 - TEST_RATIO)))  # so many are smaller, or equal
    low, high = int(times.min()), int(times.max())
    while low < high:
        middle = (low + high) // 2
        if sum(int((block <= middle).sum()) for block in _blocks(times)) > wanted:
            high = middle
        else:
            low = middle + 1
    return low


def _before(log: InteractionLog, cut: int) -> I64:
    """Count each user's events before an instant, [users]."""
    found = np.zeros(log.num_users, np.int64)
    for users in blocks_of_users(log, BLOCK_EVENTS):
        starts = log.starts[users.start : users.stop + 1]
        before = np.concatenate([[0], np.cumsum(log.times[starts[0] : starts[-1]] < cut)])
        found[users] = np.diff(before[starts - starts[0]])
    return found
