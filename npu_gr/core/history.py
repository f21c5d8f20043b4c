"""Users and their behaviours (events) in requests, reports of reads, and writes to the store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.arrays import I16, I64, holds_any, smallest
from npu_gr.core.errors import StoreFault, Unprocessable
from npu_gr.core.feature_schema.columns import NO_COLUMNS, Columns, OneRow


class UserKey(NamedTuple):
    """A user of a tenant. Never logged, never a metric label."""

    tenant: str
    user: str


class HistorySource(StrEnum):
    """Where the behaviours of a request came from; in answers, and a metric label."""

    REQUEST = "request"  # in the request, complete or as a delta on a cached prefix
    STORE = "store"
    LAST_KNOWN = "last_known"  # the store failed; the last history that this instance had
    NOTHING = "nothing"  # the store failed, and this instance had none


class HistoryOrigin(NamedTuple):
    """The source of behaviours, and the fault of the store if it failed."""

    source: HistorySource
    fault: StoreFault | None = None
    sorted_events: int = 0  # events that came after newer ones and got sorted

    @property
    def is_degraded(self) -> bool:
        """Whether the store failed."""
        return self.fault is not None


FROM_REQUEST = HistoryOrigin(HistorySource.REQUEST)


FROM_STORE = HistoryOrigin(HistorySource.STORE)


class UserFeaturesSource(StrEnum):
    """Where user features came from that were not in the request.

    In answers, and a metric label.
    """

    SOURCE = "source"  # fetched now
    REMEMBERED = "remembered"  # from the cache, still fresh
    LAST_KNOWN = "last_known"  # the source failed; from the cache, expired
    NOTHING = "nothing"  # the source failed, and the cache had none


class UserFeaturesOrigin(NamedTuple):
    """The source of user features, and its fault if it failed or returned invalid values."""

    source: UserFeaturesSource
    fault: StoreFault | None = None


class Events(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Behaviours, oldest first, with external item ids. n = number of events."""

    items: I64  # [n] external item ids
    actions: I16  # [n] action indices of the model
    timestamps: I64  # [n] unix seconds
    origin: HistoryOrigin = FROM_REQUEST
    features: Columns = NO_COLUMNS  # of each event

    def __post_init__(self) -> None:
        assert self.items.shape == self.actions.shape == self.timestamps.shape

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, part: slice) -> Events:
        return self.take(part)

    def take(self, rows: Any) -> Events:
        """Select events by slice, mask or indices."""
        return Events(
            self.items[rows],
            self.actions[rows],
            self.timestamps[rows],
            self.origin,
            self.features.take(rows),
        )

    def __add__(self, newer: Events) -> Events:
        join = np.concatenate
        return Events(
            join((self.items, newer.items)),
            join((self.actions, newer.actions)),
            join((self.timestamps, newer.timestamps)),
            newer.origin,
            self.features.followed_by(newer.features, len(self), len(newer)),
        )

    def coming_from(self, origin: HistoryOrigin) -> Events:
        """Return the same behaviours with another origin."""
        return msgspec.structs.replace(self, origin=origin)

    def copy(self) -> Events:
        """Copy the arrays, since a slice would keep the full history in memory."""
        arrays = self.items.copy(), self.actions.copy(), self.timestamps.copy()
        return Events(*arrays, features=self.features.copy())

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return (
            self.items.nbytes + self.actions.nbytes + self.timestamps.nbytes + self.features.nbytes
        )

    @classmethod
    def make(
        cls, items: npt.ArrayLike, actions: npt.ArrayLike, timestamps: npt.ArrayLike
    ) -> Events:
        """Copy three integer rows of equal length into arrays."""
        return cls(
            np.array(items, np.int64), np.array(actions, np.int16), np.array(timestamps, np.int64)
        )

    @classmethod
    def empty(cls) -> Events:
        """Make an empty history."""
        return cls.make([], [], [])

    def fingerprint(self, first_index: int = 0) -> str:
        """Hash all events to 32 hex digits (xxh3-128).

        Args:
            first_index: Index of the first event in the user's full history, part of the hash.
        """
        digest = xxhash.xxh3_128(len(self).to_bytes(8, "little"))
        if first_index:
            digest.update(first_index.to_bytes(8, "little"))
        for row in (self.items, self.actions, self.timestamps):
            bytes_of: Any = row if row.flags.c_contiguous else np.ascontiguousarray(row)
            digest.update(bytes_of)
        self.features.digested(digest.update)
        return digest.hexdigest()


class HistoryRef(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """The history of a request.

    events  base
    given   absent   `events` are the full history
    given   given    `events` continue the prefix that `base` names
    absent  given    the prefix that `base` names is the full history
    absent  absent   it is in the history store
    """

    events: Events | None = None
    base: str | None = None  # fingerprint of an earlier answer
    user_features: OneRow | None = None  # part of the prefix; None for those of the base, if any


class HistoryReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How the behaviours of a request were read."""

    # of the newest events, including unknown items; the `base` of a later delta
    fingerprint: str
    num_tokens: int  # read by the model
    read_events: int = 0  # read by the model: fewer than there are if the answer is degraded
    cut_tokens: int = 0  # events older than the model's window
    unknown_items: int = 0  # events in the window with an item unknown to the model, skipped
    # user.name or event.name: features of the model that the history lacks
    missing_features: tuple[str, ...] = ()
    origin: HistoryOrigin = FROM_REQUEST  # where the behaviours came from
    # None if they were in the request or its base, or if there are none
    user_features: UserFeaturesOrigin | None = None

    def log_fields(self) -> dict[str, Any]:
        """Return the access log's fields about the history."""
        source, fault, sorted_events = self.origin
        of_user = self.user_features
        return {
            "features_source": of_user.source.value if of_user and of_user.fault else None,
            "features_fault": of_user.fault.value if of_user and of_user.fault else None,
            "history_tokens": self.num_tokens,
            "read_events": self.read_events,
            "sorted_events": sorted_events or None,
            "history_source": source.value if fault else None,
            "history_fault": fault.value if fault else None,
        }


@dataclass(slots=True)
class StoreHealth:
    """The state of a store; updated by the store, read by any thread."""

    free_bytes: int | None = None  # free on its file system; None if it has no local file
    disk_bytes: int | None = None  # size of that file system
    damaged: int | None = None  # damaged places found at start; None if not checked
    # unix seconds of the oldest erasure that is not overwritten yet, if any
    erased_at: float | None = None
    # runs by result: ok, held (by a reader), failed
    overwrites: Counter[str] = field(default_factory=Counter)


class Mode(StrEnum):
    """How a write treats the stored behaviours of the user."""

    APPEND = "append"  # add the new ones, in time order
    # add those that are missing, in time order (idempotent)
    MERGE = "merge"
    REPLACE = "replace"  # delete the stored ones first


class Write(NamedTuple):
    """Behaviours of one user for the history store."""

    user: UserKey
    events: Events
    mode: Mode = Mode.APPEND
    key: str | None = None  # idempotency key of an append
    # names of the items, for a service; without them it gets the ids
    items: tuple[str | int, ...] | None = None


class Written(NamedTuple):
    """The result of a write."""

    num_events: int  # stored events of the user
    num_added: int  # new events
    num_filled: int = 0  # existing events that a merge gave features
    num_late: int = 0  # new events that came after newer ones of the user

    @property
    def changes(self) -> bool:
        """Whether the stored history changed."""
        return bool(self.num_added or self.num_filled)


OnUnsorted = Literal["reject", "sort"]


def count_late(times: I64, newest: int | None = None) -> int:
    """Count the times that are before an earlier one of the row, or before `newest`."""
    is_behind = newest is not None and len(times) > 0 and smallest(times) < newest
    if not is_behind and not holds_any(times[1:] < times[:-1]):
        return 0  # an append in order, as most are
    if newest is not None:
        times = np.concatenate([np.array([newest], np.int64), times])
    return int(np.count_nonzero(times < np.maximum.accumulate(times)))


def in_time_order(events: Events) -> Events:
    """Sort events by time; those of equal times keep their order."""
    times = events.timestamps
    if not holds_any(times[1:] < times[:-1]):
        return events
    return events.take(np.argsort(times, kind="stable"))


def oldest_first(events: Events, policy: OnUnsorted, field: str, base: int = 0) -> Events:
    """Reject or sort events that are out of time order (`service.unsorted_history`), stably.

    Args:
        events: Events of the request, after those of its base.
        policy: "reject" to raise an error, "sort" to sort them.
        field: Field name in messages.
        base: Number of events at the beginning that are those of the base, in order.

    Returns:
        The events in order; their origin has the number of events that were out of order.

    Raises:
        Unprocessable: they are out of order and rejected; the message has the index in the request.
    """
    times = events.timestamps[max(base - 1, 0) :]
    earlier = times[1:] < times[:-1]
    if not holds_any(earlier):
        return events
    if policy == "reject":
        at = int(earlier.argmax()) + 1
        index = at - (base > 0)
        last = "" if index else ", the last of base"
        raise Unprocessable(
            f"{field}.timestamps: {times[at]} at index {index} is before {times[at - 1]}{last}; "
            "send the oldest event first, or set service.unsorted_history: sort"
        )
    origin = HistoryOrigin(HistorySource.REQUEST, sorted_events=count_late(times))
    return in_time_order(events).coming_from(origin)
