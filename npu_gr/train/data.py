"""Users' histories as item rows and action indices, what of them is trained on, and batches of equal-length windows.

Every protocol trains on the oldest events of every user, so a split is one number a user:

  user-time      all but the newest fifth of a user's events: every judged user is known, other users' later events are
  time           events before a global instant, which cuts off the newest fifth of the log: nothing later is known,
                 and most judged users are new
  leave-one-out  all but a user's last event

A user's events after the trained ones are judged (AUC); the first of them is the next item (HR@10, NDCG@10).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npu_gr.core.errors import DataError
from npu_gr.core.request import I64
from npu_gr.features.interactions import Interactions, ItemValues

Bools = npt.NDArray[np.bool_]
Split = Literal["user-time", "time", "leave-one-out"]
TEST_RATIO = 0.2  # that the time splits keep for the test


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Log:
    """Events by user, each user's oldest first. n = events, u = users."""

    items: I64  # [n] item rows
    actions: I64  # [n] indices into action_values
    times: I64  # [n] unix seconds
    starts: I64  # [u + 1] where each user's events begin
    num_trained: I64  # [u] how many of them, from the oldest, are trained on
    item_ids: I64  # [num_items] external id of each row
    action_values: tuple[float, ...]  # rising

    @property
    def num_users(self) -> int:
        """How many users."""
        return len(self.num_trained)

    @property
    def num_items(self) -> int:
        """How many items, those never interacted with included."""
        return len(self.item_ids)

    @property
    def users(self) -> I64:
        """[n] user of each event."""
        return np.repeat(np.arange(self.num_users), np.diff(self.starts))

    @property
    def trained(self) -> Bools:
        """[n] whether each event is trained on."""
        place = np.arange(len(self.items)) - np.repeat(self.starts[:-1], np.diff(self.starts))
        trained: Bools = place < np.repeat(self.num_trained, np.diff(self.starts))
        return trained

    @property
    def values(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """[n] action value of each event."""
        return np.array(self.action_values)[self.actions]

    def next_items(self) -> list[tuple[int, int]]:
        """(user, index of the event right after the trained ones), of users that have both."""
        at = self.starts[:-1] + self.num_trained
        asked = (self.num_trained > 0) & (at < self.starts[1:])
        return [(int(user), int(at[user])) for user in np.flatnonzero(asked)]

    def only_trained(self, split: Split) -> Log:
        """The trained part, split again: for choosing settings without a look at the test part."""
        return _split(self, self.trained, split)


def build_log(interactions: Interactions, features: Sequence[ItemValues], split: Split) -> Log:
    """The log in the model's terms: rows are the sorted ids of all items that interact or have features.

    Raises:
        DataError: nothing is left to train or to test on.
    """
    ids = np.unique(np.concatenate([interactions.items, *(np.fromiter(f.of_item, np.int64) for f in features)]))
    order = np.argsort(interactions.users, kind="stable")  # in time order already
    action_values, actions = np.unique(interactions.values, return_inverse=True)
    num_users = len(interactions.user_names)
    log = Log(
        items=np.searchsorted(ids, interactions.items[order]),
        actions=actions[order].astype(np.int64),
        times=interactions.timestamps[order],
        starts=np.searchsorted(interactions.users[order], np.arange(num_users + 1)),
        num_trained=np.zeros(num_users, np.int64),
        item_ids=ids,
        action_values=tuple(action_values.tolist()),
    )
    return _split(log, np.ones(len(log.items), np.bool_), split)


def to_train_on(users: npt.NDArray[np.integer], times: I64, split: Split) -> Bools:
    """[n] which events a split trains on, of events whose order is that of time for every user."""
    if split == "time":
        return times < (np.quantile(times, 1 - TEST_RATIO, method="lower") if len(times) else 0)
    counts = np.bincount(users)
    tested = np.ceil(counts * TEST_RATIO).astype(np.int64) if split == "user-time" else np.minimum(counts, 1)
    by_user = np.argsort(users, kind="stable")
    place = np.empty(len(users), np.int64)
    place[by_user] = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    trained: Bools = place < (counts - tested)[users]
    return trained


def _split(log: Log, kept: Bools, split: Split) -> Log:
    """`log` with the kept events only, of which the oldest are trained on."""
    users, times = log.users[kept], log.times[kept]
    counts = np.bincount(users, minlength=log.num_users)
    num_trained = np.bincount(users[to_train_on(users, times, split)], minlength=log.num_users)
    if not 0 < num_trained.sum() < len(times):
        raise DataError(
            f"{len(times)} interactions: the {split} split leaves {num_trained.sum()} to train on and "
            f"{len(times) - num_trained.sum()} to test on; both must be more than 0"
        )
    return Log(
        items=log.items[kept],
        actions=log.actions[kept],
        times=times,
        starts=np.concatenate([[0], np.cumsum(counts)]),
        num_trained=num_trained,
        item_ids=log.item_ids,
        action_values=log.action_values,
    )


class Window(NamedTuple):
    """A run of one user's events."""

    start: int  # index of its first event in the log
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Windows side by side, padded at the end. B = windows, N = tokens of the longest."""

    items: Tensor  # int64 [B, N] item rows; 0 in the padding
    actions: Tensor  # int64 [B, N]
    times: Tensor  # int64 [B, N] unix seconds
    valid: Tensor  # bool [B, N] False = padding
    events: Tensor  # int64 [B, N] index in the log, for looking up more about an event


def windows(log: Log, window_tokens: int, random: np.random.Generator) -> list[Window]:
    """The trained events, cut into runs of at most `window_tokens` with another phase a call."""
    found = []
    for start, trained in zip(log.starts.tolist(), log.num_trained.tolist(), strict=False):
        phase = int(random.integers(1, window_tokens + 1)) if trained > window_tokens else window_tokens
        cuts = [0, *range(phase, trained, window_tokens), trained]
        found += [Window(start + a, b - a) for a, b in pairwise(cuts) if b > a]
    return found


def batches(
    log: Log, parts: list[Window], batch_tokens: int, random: np.random.Generator | None = None
) -> Iterator[Batch]:
    """Windows of similar length together, padded to at most `batch_tokens` tokens; in random order if asked."""
    parts = sorted(parts, key=lambda window: window.num_tokens)
    groups: list[list[Window]] = [[]]
    for window in parts:
        if groups[-1] and (len(groups[-1]) + 1) * window.num_tokens > batch_tokens:
            groups.append([])
        groups[-1].append(window)
    if random is not None:
        random.shuffle(groups)
    yield from (_batch(log, group) for group in groups if group)


def _batch(log: Log, group: list[Window]) -> Batch:
    length = max(window.num_tokens for window in group)
    starts, lengths = np.array(group).T[:, :, None]
    valid = np.arange(length) < lengths
    events = np.where(valid, starts + np.arange(length), starts)
    return Batch(
        items=torch.from_numpy(np.where(valid, log.items[events], 0)),
        actions=torch.from_numpy(log.actions[events]),
        times=torch.from_numpy(log.times[events]),
        valid=torch.from_numpy(valid),
        events=torch.from_numpy(events),
    )
