"""Users and their behaviours: how they come with a request, how they were read, how they are written to the store.

`oldest_first` rejects or sorts rows of a request that run backwards in time
(`service.unsorted_history`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.arrays import I16, I64, holds_any
from npu_gr.core.errors import StoreFault, Unprocessable
from npu_gr.core.feature_schema.columns import NO_COLUMNS, Columns, OneRow


class UserKey(NamedTuple):
    """A user of a tenant. Never logged, never a metric label."""

    tenant: str
    user: str


class HistorySource(StrEnum):
    """Where the behaviours of a request came from; in answers, and a metric label."""

    REQUEST = "request"  # the request brought them, whole or on a known prefix
    STORE = "store"
    LAST_KNOWN = "last_known"  # the store failed: what this instance last knew of the user
    NOTHING = "nothing"  # the store failed, and nothing was known: no behaviours


class HistoryOrigin(NamedTuple):
    """The source of behaviours, and the fault of the store if it should have been the source."""

    source: HistorySource
    fault: StoreFault | None = None
    sorted_events: int = 0  # of a request: how many stood later than newer ones; they were sorted

    @property
    def is_degraded(self) -> bool:
        """Whether the store should have been the source, and was not."""
        return self.fault is not None


FROM_REQUEST = HistoryOrigin(HistorySource.REQUEST)


FROM_STORE = HistoryOrigin(HistorySource.STORE)


class UserFeaturesSource(StrEnum):
    """Where features of a user came from that no request brought.

    In answers, and a metric label.
    """

    SOURCE = "source"  # fetched now
    REMEMBERED = "remembered"  # fetched before, and still fresh
    LAST_KNOWN = "last_known"  # the source failed: what it said before
    NOTHING = "nothing"  # the source failed, and nothing was known: they are missing


class UserFeaturesOrigin(NamedTuple):
    """The source of a user's features, and its fault if it failed, or said what does not fit the model."""

    source: UserFeaturesSource
    fault: StoreFault | None = None


class Events(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Behaviours, oldest first, with the caller's own item ids. n = number of events."""

    items: I64  # [n] external item ids
    actions: I16  # [n] action ids as the model's config names them
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
        """Return some events: a slice, a mask, indices."""
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
        """Return a copy of the request's own: a slice would keep the longer history alive that it was cut from."""
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
        """Copy three integer rows of the same length into arrays.

        Numpy must be able to read them.
        """
        return cls(
            np.array(items, np.int64), np.array(actions, np.int16), np.array(timestamps, np.int64)
        )

    @classmethod
    def empty(cls) -> Events:
        """Make a history without behaviours."""
        return cls.make([], [], [])

    def fingerprint(self, first_index: int = 0) -> str:
        """Hash every event into 32 hex digits (xxh3-128): histories are equal if and only if theirs are.

        Args:
            first_index: of the first event in the user's whole history; the same events elsewhere
                are another history.
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
    """How a request names its history.

    events  base
    given   absent   `events` are the whole history
    given   given    `events` continue the prefix that `base` names
    absent  given    the prefix that `base` names is the whole history
    absent  absent   the history store has it
    """

    events: Events | None = None
    base: str | None = None  # the fingerprint in an earlier answer
    user_features: OneRow | None = None  # part of the prefix; None = those of the base, or none


class HistoryReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How the behaviours of a request were read."""

    # of the newest events, with those that the model lacks; the `base` of a later delta
    fingerprint: str
    num_tokens: int  # that the model read
    cut_tokens: int = 0  # events of the whole history in front of the window
    unknown_items: int = 0  # events of the window left out because the model lacks their item
    # user.name or event.name: of the model, and nowhere in the history
    missing_features: tuple[str, ...] = ()
    origin: HistoryOrigin = FROM_REQUEST  # where the behaviours came from
    # None = of the request, of its base, or of nobody
    user_features: UserFeaturesOrigin | None = None

    def log_fields(self) -> dict[str, Any]:
        """Return what the access log says of the history: its length, and how it was degraded."""
        source, fault, sorted_events = self.origin
        of_user = self.user_features
        return {
            "features_source": of_user.source.value if of_user and of_user.fault else None,
            "features_fault": of_user.fault.value if of_user and of_user.fault else None,
            "history_tokens": self.num_tokens,
            "sorted_events": sorted_events or None,
            "history_source": source.value if fault else None,
            "history_fault": fault.value if fault else None,
        }


@dataclass(slots=True)
class StoreHealth:
    """What a store says of itself; kept up to date by the store, read from any thread."""

    free_bytes: int | None = None  # that its file system has left; None = it has no file here
    disk_bytes: int | None = None  # size of that file system
    damaged: int | None = None  # places that the check at the start found; None = there was none
    # unix seconds of the oldest erasure that is not overwritten yet; None = all are
    erased_at: float | None = None
    # runs by their result: ok, held (by a reader), failed
    overwrites: Counter[str] = field(default_factory=Counter)


class Mode(StrEnum):
    """What a write does with the behaviours that the store has of the user."""

    APPEND = "append"  # the new ones come behind them
    # only those that are not there are added, in time order: a second time changes nothing
    MERGE = "merge"
    REPLACE = "replace"  # the new ones come in their place


class Write(NamedTuple):
    """Behaviours of one user for the history store."""

    user: UserKey
    events: Events
    mode: Mode = Mode.APPEND
    key: str | None = None  # idempotency key of an append


class Written(NamedTuple):
    """What a write did."""

    num_events: int  # that the store now keeps of the user
    num_added: int  # of those that came
    num_filled: int = 0  # of those that a merge found there: how many gained features

    @property
    def changes(self) -> bool:
        """Whether the store keeps another history than before."""
        return bool(self.num_added or self.num_filled)


OnUnsorted = Literal["reject", "sort"]


def oldest_first(events: Events, policy: OnUnsorted, field: str, base: int = 0) -> Events:
    """Refuse or sort events that run backwards; of equal times the order stays.

    Args:
        events: as they came.
        policy: what becomes of them.
        field: their name in messages.
        base: so many of them, at the beginning, stand in order, and were there before the request.

    Returns:
        The events. Their origin counts those of the request that stood later than newer ones.

    Raises:
        Unprocessable: they run backwards, and are to be rejected; the message has the index in the
            request.
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
            f"{field}.timestamps: {times[at]} at index {index} is before {times[at - 1]}{last}: "
            "send the oldest event "
            "first, or set service.unsorted_history: sort"
        )
    late = int(np.count_nonzero(times < np.maximum.accumulate(times)))
    order = np.argsort(events.timestamps, kind="stable")
    origin = HistoryOrigin(HistorySource.REQUEST, sorted_events=late)
    return events.take(order).coming_from(origin)
