"""An interaction log in the models' terms, its split into training and test, and its batches.

Every split trains on the oldest events of each user, so a split is one number per user,
`num_trained`:

  user-time      train on all but the newest fifth of the user's events. The model knows every
                 tested user, and events of other users that came later than the tested ones.
  time           train on the events before one instant, which cuts off the newest fifth of the
                 log. The model knows nothing later, and most tested users are new to it.
  leave-one-out  train on all but the user's last event.

A user's events after the trained ones are tested (AUC); the first of them is the next item (HR@10,
NDCG@10):

    events of a user   0 1 2 3 4 | 5 6 7        num_trained = 5
                       trained     tested       the next item is that of event 5
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.names import value_name
from npu_gr.dataset.times import ORDER_S
from npu_gr.history_store.interactions import (
    FeatureColumn,
    Impressions,
    Interactions,
    ItemValues,
)
from npu_gr.train.metrics import F64

Bools = npt.NDArray[np.bool_]
Split = Literal["user-time", "time", "leave-one-out"]
BLOCK_EVENTS = 1 << 22  # that are in memory at a time where a pass reads a whole log
TEST_RATIO = 0.2  # share of the events that the two time splits keep for the test
TESTED: dict[Split, str] = {
    "user-time": "the newest fifth of each user's events",
    "time": "the newest fifth of the log",
    "leave-one-out": "the last event of each user",
}


def evaluation_title(split: Split, num_trained: int, num_served: int) -> str:
    """Say in one line which events evaluated the model, and what the served model was trained on.

    Args:
        split: The split of the evaluation.
        num_trained: Events that the evaluated model was trained on.
        num_served: Events that the served model was trained on; equal = they are one model.
    """
    evaluated = f"evaluated on {TESTED[split]} by a model of {num_trained:,} events; served: "
    return evaluated + (
        "that model" if num_served == num_trained else f"refitted on all {num_served:,}"
    )


class NextItem(NamedTuple):
    """The item that a model should predict from a user's trained events."""

    user: int
    event: int  # index in the log; the events of the user before it are the history


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShownItems:
    """Impressions: items that were shown just before an event, without a behaviour.

    m = impressions, n = events.
    """

    events: I64  # [m] ascending: index of the event, whose earlier events are the history
    items: I64  # [m] item rows
    positions: I64  # [m] place among the shown items; -1 = not known
    of_events: I64  # [n] the same of each event's own item

    def of_kept(self, kept: Bools) -> ShownItems:
        """Keep the impressions of some events: bool [n]."""
        place = np.cumsum(kept) - 1
        there = kept[self.events]
        return ShownItems(
            events=place[self.events[there]],
            items=self.items[there],
            positions=self.positions[there],
            of_events=self.of_events[kept],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InteractionLog:
    """Events by user, each user's oldest first. n = events, u = users."""

    items: I64  # [n] item rows
    actions: I64  # [n] indices into action_values
    times: I64  # [n] unix seconds
    starts: I64  # [u + 1] user i has the events starts[i] .. starts[i + 1] - 1
    num_trained: I64  # [u] events of each user that are trained on: the oldest
    item_ids: I64  # [num_items] external id of each row, ascending
    action_values: tuple[float, ...]  # value of each action, e.g. a rating; ascending
    # name of each action, which has no order; none = its value is its name
    action_names: tuple[str, ...] = ()
    columns: tuple[FeatureColumn, ...] = ()  # features of the users and of the events
    shown: ShownItems | None = None  # impressions; None = the log has none
    item_key: bytes = b""  # key of the items' ids; empty = they have none

    @property
    def num_users(self) -> int:
        """Number of users, those without events included."""
        return len(self.num_trained)

    @property
    def num_items(self) -> int:
        """Number of items, those without events included."""
        return len(self.item_ids)

    @property
    def users(self) -> I64:
        """User of each event, int64 [n]."""
        return np.repeat(np.arange(self.num_users), np.diff(self.starts))

    @property
    def trained(self) -> Bools:
        """Whether each event is trained on, bool [n]."""
        place = np.arange(len(self.items)) - np.repeat(self.starts[:-1], np.diff(self.starts))
        trained: Bools = place < np.repeat(self.num_trained, np.diff(self.starts))
        return trained

    @property
    def names_of_actions(self) -> tuple[str, ...]:
        """Name of each action as requests name it; a rating is named by its plain text."""
        return self.action_names or tuple(map(value_name, self.action_values))

    @property
    def values(self) -> F64:
        """Action value of each event, float64 [n]."""
        return np.array(self.action_values)[self.actions]

    def next_items(self) -> list[NextItem]:
        """List the first event after the trained ones, of users with trained and later events."""
        first_tested = self.starts[:-1] + self.num_trained
        has_both = (self.num_trained > 0) & (first_tested < self.starts[1:])
        return [NextItem(int(user), int(first_tested[user])) for user in np.flatnonzero(has_both)]

    @property
    def has_times(self) -> bool:
        """Whether the times are seconds; else they are row numbers, or places in a user's list."""
        return len(self.times) > 0 and int(self.times.max()) >= ORDER_S

    @property
    def has_repeats(self) -> bool:
        """Whether a user has an item again in the trained events."""
        pairs = np.sort(self.users[self.trained] * self.num_items + self.items[self.trained])
        return bool((pairs[1:] == pairs[:-1]).any())

    def only_trained(self, split: Split) -> InteractionLog:
        """Split the trained part again, to choose settings without looking at the test part.

        Raises:
            DataError: nothing is left to train or to test on.
        """
        return _split(self, self.trained, split)

    def without_last(self) -> InteractionLog:
        """Hold out each user's last trained event too: leave-one-out again, without a copy.

        Raises:
            DataError: nothing is left to train on.
        """
        num_trained = np.maximum(self.num_trained - 1, 0)
        if not num_trained.any():
            raise DataError(f"{len(self.items)} interactions: no user has two trained events")
        return replace(self, num_trained=num_trained)

    def all_trained(self) -> InteractionLog:
        """Train on every event: nothing is left to test on."""
        return replace(self, num_trained=np.diff(self.starts))


def build_log(
    interactions: Interactions, features: Sequence[ItemValues], split: Split
) -> InteractionLog:
    """Number the users, items and actions of a log, and split its events.

    Item rows are the sorted ids of items with events or features.

    Args:
        interactions: The whole log, in time order.
        features: Side features of items; items without events get a row too.
        split: Rule that decides which events are trained on.

    Raises:
        DataError: nothing is left to train or to test on.
    """
    ids = np.unique(
        np.concatenate([interactions.items, *(np.fromiter(f.of_item, np.int64) for f in features)])
    )
    log = number_log(interactions, ids)
    return _split(log, np.ones(len(log.items), np.bool_), split)


def number_log(interactions: Interactions, ids: I64) -> InteractionLog:
    """Number the users, items and actions of a log; no event is trained on yet.

    Args:
        interactions: The whole log, in time order.
        ids: int64 [num_items] ids of the rows, ascending; every item of an event is one.
    """
    # stable: each user's events stay in time order
    order = np.argsort(interactions.users, kind="stable")
    # an action has the same index in every model of a dataset, even if this log lacks some actions
    if interactions.action_names:
        action_values = np.arange(len(interactions.action_names), dtype=np.float64)
        actions = interactions.values.astype(np.int64)
    else:
        action_values, actions = np.unique(interactions.values, return_inverse=True)
    num_users = len(interactions.user_names)
    log = InteractionLog(
        items=np.searchsorted(ids, interactions.items[order]),
        actions=actions[order].astype(np.int64),
        times=interactions.timestamps[order],
        starts=np.searchsorted(interactions.users[order], np.arange(num_users + 1)),
        num_trained=np.zeros(num_users, np.int64),
        item_ids=ids,
        action_values=tuple(action_values.tolist()),
        action_names=interactions.action_names,
        columns=tuple(column.of_events(order) for column in interactions.columns),
        item_key=interactions.item_key,
    )
    if interactions.impressions is not None:
        log = replace(log, shown=_shown(log, interactions.impressions, order))
    return log


def blocks_of_users(log: InteractionLog, block_events: int) -> Iterator[slice]:
    """Cut the users into runs of about so many events each, at least one user."""
    first = 0
    while first < log.num_users:
        most = int(np.searchsorted(log.starts, log.starts[first] + block_events, "right")) - 1
        until = min(max(first + 1, most), log.num_users)
        yield slice(first, until)
        first = until


def trained_blocks(log: InteractionLog) -> Iterator[tuple[I64, I64]]:
    """Yield the users and the places in the log of the trained events, a block at a time."""
    for block in blocks_of_users(log, BLOCK_EVENTS):
        counts = log.num_trained[block]
        users = np.repeat(np.arange(block.start, block.stop), counts)
        first = np.repeat(log.starts[block] - (np.cumsum(counts) - counts), counts)
        yield users, first + np.arange(len(users))


def count_trained(log: InteractionLog, column: I64, most: int) -> I64:
    """Count the trained events by a column, [n] values in 0 .. most - 1: int64 [most].

    A block of the events is in memory at a time.
    """
    total = np.zeros(most, np.int64)
    for _, events in trained_blocks(log):
        total += np.bincount(column[events], minlength=most)
    return total


def events_of(log: InteractionLog, users: I64) -> InteractionLog:
    """Read the events of some users into memory; the users are numbered anew, in their order.

    Features of users and events, and impressions, are left out.

    Args:
        log: Log of all users.
        users: int64 [u] the users, each once.
    """
    counts = np.diff(log.starts)[users]
    starts = np.concatenate([[0], np.cumsum(counts)])
    places = np.repeat(log.starts[users] - starts[:-1], counts) + np.arange(starts[-1])
    return replace(
        log,
        items=np.asarray(log.items[places]),
        actions=np.asarray(log.actions[places]),
        times=np.asarray(log.times[places]),
        starts=starts,
        num_trained=log.num_trained[users],
        columns=(),
        shown=None,
    )


def to_train_on(users: npt.NDArray[np.integer], times: I64, split: Split) -> Bools:
    """Decide which events a split trains on, bool [n].

    Args:
        users: [n] user of each event, in any order of users; each user's events oldest first.
        times: int64 [n] unix seconds.
        split: Rule to apply.
    """
    if split == "time":
        return times < (np.quantile(times, 1 - TEST_RATIO, method="lower") if len(times) else 0)
    counts = np.bincount(users)
    tested = (
        np.ceil(counts * TEST_RATIO).astype(np.int64)
        if split == "user-time"
        else np.minimum(counts, 1)
    )
    by_user = np.argsort(users, kind="stable")
    place = np.empty(len(users), np.int64)
    place[by_user] = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    trained: Bools = place < (counts - tested)[users]
    return trained


def _split(log: InteractionLog, kept: Bools, split: Split) -> InteractionLog:
    """Keep some of the events, and decide which of them are trained on."""
    users = log.users[kept]
    times = log.times[kept]
    counts = np.bincount(users, minlength=log.num_users)
    num_trained = np.bincount(users[to_train_on(users, times, split)], minlength=log.num_users)
    if not 0 < num_trained.sum() < len(times):
        raise DataError(
            f"{len(times)} interactions: the {split} split leaves {num_trained.sum()} to train on "
            f"and {len(times) - num_trained.sum()} to test on; both must be more than 0"
        )
    return InteractionLog(
        items=log.items[kept],
        actions=log.actions[kept],
        times=times,
        starts=np.concatenate([[0], np.cumsum(counts)]),
        num_trained=num_trained,
        item_ids=log.item_ids,
        action_values=log.action_values,
        action_names=log.action_names,
        columns=tuple(column.of_events(kept) for column in log.columns),
        shown=None if log.shown is None else log.shown.of_kept(kept),
        item_key=log.item_key,
    )


def _shown(log: InteractionLog, impressions: Impressions, order: I64) -> ShownItems | None:
    """Put each impression just before the user's next event, or before the last one.

    Items without a row are left out. None = no impression is left.
    """
    row = np.searchsorted(log.item_ids, impressions.items)
    row = row.clip(max=max(len(log.item_ids) - 1, 0))
    there = log.item_ids[row] == impressions.items
    users, times = impressions.users[there].astype(np.int64), impressions.timestamps[there]
    # one sorted number for each user and time: the rank of the time, over all of them
    rank = np.unique(np.concatenate([log.times, times]), return_inverse=True)[1]
    most = len(rank) + 1
    keys = log.users * most + rank[: len(log.times)]
    events = np.searchsorted(keys, users * most + rank[len(log.times) :])
    events = np.minimum(events, log.starts[users + 1] - 1)
    by_event = np.argsort(events, kind="stable")
    own = impressions.of_events
    found = ShownItems(
        events=events[by_event],
        items=row[there][by_event],
        positions=impressions.positions[there][by_event].astype(np.int64),
        of_events=(np.full(len(order), -1) if own is None else own[order].astype(np.int64)),
    )
    return found if len(found.events) else None


class Window(NamedTuple):
    """A run of one user's events."""

    start: int  # index of its first event in the log
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Windows side by side, padded at the end. B = windows, N = tokens of the longest window."""

    items: Tensor  # int64 [B, N] item rows; 0 in the padding
    actions: Tensor  # int64 [B, N]
    times: Tensor  # int64 [B, N] unix seconds
    valid: Tensor  # bool [B, N] False = padding
    events: Tensor  # int64 [B, N] index of each event in the log
    # bool [B, N] events whose losses count, at least one; None = all
    counted: Tensor | None = None

    @property
    def terms(self) -> Tensor:
        """Whether each event's losses count, bool [B, N]."""
        return self.valid if self.counted is None else self.counted


def windows(
    log: InteractionLog, window_tokens: int, random: np.random.Generator, only: I64 | None = None
) -> I64:
    """Cut the trained events of each user into windows of at most `window_tokens` events.

    The length of a user's first window is random, so every epoch cuts at other places.

    Args:
        log: Log to cut.
        window_tokens: Most events of a window.
        random: Generator of the first windows' lengths.
        only: int64 [users] the users to cut, each once; None = all.

    Returns:
        int64 [windows, 2]: a `Window` in each row.
    """
    starts, trained = log.starts[:-1], log.num_trained
    if only is not None:
        starts, trained = starts[only], trained[only]
    first = np.full(len(trained), window_tokens)
    is_cut = trained > window_tokens
    first[is_cut] = random.integers(1, window_tokens + 1, int(is_cut.sum()))
    counts = (trained > 0) + -(-np.maximum(trained - first, 0) // window_tokens)
    users = np.repeat(np.arange(len(trained)), counts)
    place = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    ends = np.minimum(first[users] + place * window_tokens, trained[users])
    begins = np.where(place == 0, 0, first[users] + (place - 1) * window_tokens)
    return np.stack([starts[users] + begins, ends - begins], axis=1)


class Batches(Sequence[Batch]):
    """Batches of windows, each made when it is read: an epoch of them is never in memory."""

    def __init__(self, log: InteractionLog, parts: I64, groups: list[tuple[int, int]]) -> None:
        """Store the arguments.

        Args:
            log: The log that the windows were cut from.
            parts: int64 [windows, 2] a `Window` in each row.
            groups: First row and last row + 1 of each batch.
        """
        self._log = log
        self._parts = parts
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, place: int) -> Batch: ...
    @overload
    def __getitem__(self, place: slice) -> Batches: ...
    def __getitem__(self, place: int | slice) -> Batch | Batches:
        if isinstance(place, slice):
            return Batches(self._log, self._parts, self._groups[place])
        return _batch(self._log, self._parts[slice(*self._groups[place])])


def batches(
    log: InteractionLog,
    parts: I64 | list[Window],
    batch_tokens: int,
    random: np.random.Generator | None = None,
) -> Batches:
    """Batch windows of similar length.

    Args:
        log: The log that the windows were cut from.
        parts: Windows to batch.
        batch_tokens: Most tokens of a batch, padding included; a window longer than this is a batch
            of its own.
        random: Generator that shuffles the batches; None = shortest windows first.
    """
    found = np.asarray(parts, np.int64).reshape(-1, 2)
    found = found[np.argsort(found[:, 1], kind="stable")]
    groups: list[tuple[int, int]] = []
    first = 0
    for place, num_tokens in enumerate(found[:, 1]):
        if place > first and (place - first + 1) * num_tokens > batch_tokens:
            groups.append((first, place))
            first = place
    if len(found):
        groups.append((first, len(found)))
    if random is not None:
        random.shuffle(groups)
    return Batches(log, found, groups)


def _batch(log: InteractionLog, group: I64) -> Batch:
    length = int(group[:, 1].max())
    starts, lengths = group.T[:, :, None]
    valid = np.arange(length) < lengths
    events = np.where(valid, starts + np.arange(length), starts)
    return Batch(
        items=torch.from_numpy(np.where(valid, log.items[events], 0)),
        actions=torch.from_numpy(log.actions[events]),
        times=torch.from_numpy(log.times[events]),
        valid=torch.from_numpy(valid),
        events=torch.from_numpy(events),
    )


MAX_APART = 2  # an item follows another if it comes at most so many events later


class Augmentation:
    """Draws random variations of trained events, against overfitting to short histories.

        skip    leave an event out, so the items around it follow each other
        swap    replace an item by another one that followed the item before it, in any history

    A decoder soon memorises histories of ten items. On such logs, counts of item pairs (Markov
    transitions) are the strongest baseline. Swaps are drawn from these counts, so the decoder
    learns them too.

    Source: item dropout and substitution of correlated items as in CoSeRec (arXiv:2108.06479),
    which adds a contrastive loss; here the varied histories are simply trained on.
    """

    def __init__(self, log: InteractionLog, skip_ratio: float, swap_ratio: float) -> None:
        """Count which items follow which in the trained events, if some are to be swapped.

        Args:
            log: The log to vary, or a sample of its users. An event after an item that no event
                of the sample follows is not swapped.
            skip_ratio: Share of the events to leave out, 0 .. 1.
            swap_ratio: Share of the events that get another item, 0 .. 1. A user's first event
                keeps its item.
        """
        self._skip_ratio = skip_ratio
        self._swap_ratio = swap_ratio
        if not swap_ratio:
            return
        users, trained = log.users, log.trained
        near = [
            (apart, trained[apart:] & (users[apart:] == users[:-apart]))
            for apart in range(1, MAX_APART + 1)
        ]
        leads = np.concatenate([log.items[:-apart][both] for apart, both in near])
        follows = np.concatenate([log.items[apart:][both] for apart, both in near])
        self._follows = follows[np.argsort(leads, kind="stable")]
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(leads, minlength=log.num_items))])

    def draw(self, log: InteractionLog, random: np.random.Generator) -> InteractionLog:
        """Draw a variation of a log: the trained events, some left out, some with other items.

        Returns the log itself if both ratios are 0.
        """
        if not self._skip_ratio and not self._swap_ratio:
            return log
        users, trained = log.users, log.trained
        items = np.array(log.items)
        swapped = random.random(len(items)) < self._swap_ratio
        if self._swap_ratio:
            at = np.flatnonzero(trained & (np.diff(users, prepend=-1) == 0) & swapped)
            first = self._starts[log.items[at - 1]]
            counts = self._starts[log.items[at - 1] + 1] - first
            place = first + (random.random(len(at)) * counts).astype(np.int64)
            items[at[counts > 0]] = self._follows[place[counts > 0]]
        kept = trained & (random.random(len(items)) >= self._skip_ratio)
        num_kept = np.bincount(users[kept], minlength=log.num_users)
        return replace(
            log,
            shown=None,
            items=items[kept],
            actions=log.actions[kept],
            times=log.times[kept],
            starts=np.concatenate([[0], np.cumsum(num_kept)]),
            num_trained=num_kept,
        )
