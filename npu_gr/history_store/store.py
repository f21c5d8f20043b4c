"""The interface and settings of a history store, the record of an event, and merges."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError, StoreFailed, StoreFault, Unprocessable
from npu_gr.core.feature_schema.columns import Columns, widened
from npu_gr.core.history import (
    Events,
    StoreHealth,
    UserKey,
    Write,
    Written,
    count_late,
    in_time_order,
)
from npu_gr.core.names import key_fingerprint
from npu_gr.core.secret import SecretUrl
from npu_gr.core.settings import Count, Seconds, SecondsOrZero
from npu_gr.core.tls import TlsFiles

EVENT = np.dtype([("item", "<i8"), ("action", "<i2"), ("timestamp", "<i8")])  # packed: 18 bytes

NO_ITEMS: I64 = np.empty(0, np.int64)

MAX_EVENTS = 8_388_608  # for each user, so that a value of Redis stays under its 512 MiB limit
MAX_FEATURE_BYTES = 65_536  # for each event
MAX_REPLICAS = 16

FailurePolicy = Literal["fail", "last_known", "nothing"]


Option = bool | int | float | str | list[str] | dict[str, str]


class FeatureStoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of user features that requests do not bring."""

    entry: str  # feast, or package.module:name of a function or a class
    # keyword arguments: of the class, of feast, of each call of the function
    options: dict[str, Option] = {}
    timeout_s: Seconds = 0.01  # of one call, the wait for its place included
    max_calls: Count = 32  # calls at a time; also the number of threads of a blocking source
    max_queue: Count = 1024  # waiting calls; the next one fails at once
    max_failures: Count = 5  # in a row; then calls fail at once, except one every `retry_s`
    retry_s: Seconds = 0.05
    # how long features are cached: those that a signal has fetched serve the rank after it
    fresh_s: SecondsOrZero = 30.0
    # how old cached features may be when the source fails; 0 = they are not used
    stale_s: SecondsOrZero = 3600.0
    max_users: Count = 100_000  # users whose features are cached


class HistoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store of users' behaviours (events)."""

    kind: Literal["embedded", "redis", "none"] = "embedded"
    path: str = "history.db"  # embedded: the file; its folder is created
    # redis://HOST:PORT/0, unix:///PATH, redis-cluster://HOST,HOST, redis-sentinel://HOST,HOST/0#MASTER;
    # rediss... is over TLS; None = redis://127.0.0.1:6379/0
    url: SecretUrl | None = None
    tls: TlsFiles | None = None  # of rediss://
    # redis: how many replicas must have an append before it is acknowledged (WAIT)
    wait_replicas: Annotated[int, msgspec.Meta(ge=0, le=MAX_REPLICAS)] = 0
    # older events are deleted
    max_events_per_user: Annotated[int, msgspec.Meta(ge=1, le=MAX_EVENTS)] = 65_536
    # 4 bytes a number, 8 a name, with as many names as any event of the write has
    max_feature_bytes_per_event: Annotated[int, msgspec.Meta(ge=0, le=MAX_FEATURE_BYTES)] = 1024
    # of a call; redis: also to connect, and to ask again after a failover
    timeout_s: Seconds = 1.0
    # how long a request waits for its history before it uses the one that this instance last knew:
    # a small part of the SLO objectives. If none is known, it waits for most of its time limit.
    read_timeout_s: Seconds = 0.025
    max_calls: Count = 64  # reads at a time, and as many appends and erasures
    max_queue: Count = 1024  # waiting calls of each; the next one fails at once
    max_failures: Count = 5  # in a row; then calls fail at once, except one every `retry_s`
    retry_s: Seconds = 0.05
    # a request whose history cannot be read: fail = 503 | last_known = use the history that this
    # instance last knew, or 503 if it knows none | nothing = the same, but with an empty history
    # if it knows none
    on_failure: FailurePolicy = "last_known"
    idempotency_s: Seconds = 86_400.0  # how long an append's idempotency key is remembered
    max_idempotency_keys: Count = 256  # for each user; then the oldest is forgotten
    check_s: SecondsOrZero = 1.0  # embedded: time for the damage check at start; 0 = no check

    def __post_init__(self) -> None:
        if self.tls is not None and not str(self.url).startswith("rediss"):
            raise ValueError("tls: needs a url that begins with rediss")

    @property
    def redis_url(self) -> SecretUrl:
        """Where Redis is."""
        return self.url or SecretUrl("redis://127.0.0.1:6379/0")


class StoredHistory(NamedTuple):
    """The newest events of a user."""

    events: Events
    first_index: int  # index of `events[0]` among all events that the user ever had
    older_items: I64 | None = (
        None  # [n] items of all stored events before `events`; None = not read
    )


class IdempotencyKey(NamedTuple):
    """An idempotency key as a store keeps it: digests of a fixed size."""

    key: bytes  # 16 bytes
    events: bytes  # 16 bytes, digest of the events that came with the key

    @classmethod
    def make(cls, key: str, events: Events) -> IdempotencyKey:
        """Digest a client's key and the events that came with it."""
        text = key.encode("utf-8", "surrogatepass")
        digest = bytes.fromhex(in_time_order(events).fingerprint())
        return cls(hashlib.blake2b(text, digest_size=16).digest(), digest)


class HistoryStore(Protocol):
    """Behaviours by user, in time order. A store that fails raises StoreFailed."""

    @property
    def health(self) -> StoreHealth:
        """Health of the store."""
        ...

    async def append(self, user: UserKey, events: Events, key: str | None = None) -> Written:
        """Add events in time order, after stored ones of equal times; durable when it returns.

        Args:
            user: User of the events.
            events: Events in any order; equal ones are kept.
            key: Idempotency key. If the store remembers it for this user, nothing is appended.

        Returns:
            The result; `num_events` is that of the first append with the key.

        Raises:
            Unprocessable: the key was used for other events, or the features take too many bytes.
        """
        ...

    async def write_many(
        self, batch: Sequence[Write]
    ) -> list[Written | StoreFailed | Unprocessable]:
        """Do many writes, those of one user in the given order; durable when it returns.

        Returns:
            The result of each write, or its error: a failed write changes nothing, and the others
            are done.

        Raises:
            StoreFailed: no write was done, for a reason that concerns the whole store.
        """
        ...

    async def read(self, user: UserKey, last: int, all_items: bool = False) -> StoredHistory:
        """Read the newest `last` >= 0 events, oldest first; none for an unknown user.

        Args:
            user: The user.
            last: Number of events.
            all_items: Also read the items of all older events.
        """
        ...

    async def actions(self) -> tuple[str, ...]:
        """Read the names of actions by number; empty until the first names are written."""
        ...

    async def name_actions(self, names: Sequence[str]) -> tuple[str, ...]:
        """Store the names of actions; durable when it returns.

        Args:
            names: List of names, by number. They are stored if they begin with the names stored
                before.

        Returns:
            The names that are stored now; not `names` if these do not begin with them.
        """
        ...

    async def item_key(self, mine: str) -> str:
        """Remember the fingerprint of the key of the items' ids, if the store is new.

        Args:
            mine: Fingerprint of the served models, see `key_fingerprint`; "" = they have no key.

        Returns:
            The fingerprint of the stored ids; "" = they have no key.
        """
        ...

    async def erase(self, user: UserKey) -> bool:
        """Erase the user, durably.

        Returns:
            True if no byte of the user is left in the store's local files. False: no call finds the
            user any more, and the store overwrites the remaining bytes as soon as it can.
        """
        ...

    async def close(self) -> None:
        """Finish the acknowledged writes, then close the files or connections."""
        ...


def pack(events: Events) -> bytes:
    """Convert events to EVENT records, without their features."""
    records = np.empty(len(events), EVENT)
    records["item"] = events.items
    records["action"] = events.actions
    records["timestamp"] = events.timestamps
    return records.tobytes()


def unpack(data: bytes) -> Events:
    """Convert EVENT records to events."""
    records = np.frombuffer(data, EVENT)
    return Events.make(records["item"], records["action"], records["timestamp"])


def checked(
    results: Iterable[Written | StoreFailed | Unprocessable],
) -> list[Written | StoreFailed | Unprocessable]:
    """Return the results of `write_many`, or raise StoreFailed if the whole store failed."""
    made = list(results)
    failures = [
        one for one in made if isinstance(one, StoreFailed) and one.fault is not StoreFault.CORRUPT
    ]
    if failures and len(failures) == len(made):
        raise failures[0]
    return made


def key_bytes(user: UserKey) -> bytes:
    """Make the key of a (tenant, user) pair.

    The tenant's length comes first, so that ("a", "bc") and ("ab", "c") differ. Lone surrogates are
    allowed.
    """
    tenant, name = (part.encode("utf-8", "surrogatepass") for part in user)
    return len(tenant).to_bytes(4, "big") + tenant + name


class Merged(NamedTuple):
    """A history after a merge."""

    events: Events  # the newest `max_events` of both, oldest first
    num_added: int  # number of them that were not stored before
    num_filled: int  # number of stored events that gained features
    num_late: int  # number of new events that came after newer ones
    is_append: bool  # the added events come last, and the stored ones are unchanged

    @property
    def changes(self) -> bool:
        """Whether the history differs from the stored one."""
        return bool(self.num_added or self.num_filled)


def merge(stored: Events, events: Events, max_events: int) -> Merged:
    """Merge events into a stored history, in time order; with equal times stored events come first.

    Two events are the same if item, action and time are equal. If the same event occurs several
    times, the result has as many of it as the side with more. A stored event gains the features
    that it lacks; a stored value stays. A second merge of the same events changes nothing, however
    much later it comes.

    Args:
        stored: Events that the store has of the user.
        events: Events to merge, in any order.
        max_events: Most events of a user. Older ones, which the store has deleted, do not come
            back.
    """
    same = _places(stored, events)
    is_new = same < 0
    stored, num_filled = _filled(stored, events, same)
    if len(stored) >= max_events:
        is_new &= events.timestamps > stored.timestamps.min()
    new = events.take(is_new)
    newest = int(stored.timestamps.max()) if len(stored) else None
    num_late = count_late(new.timestamps, newest)
    new = in_time_order(new)
    if not len(new) or newest is None or new.timestamps[0] >= newest:
        added = new[-max_events:]
        both = (stored + added)[-max_events:]
        return Merged(both, len(added), num_filled, num_late, is_append=not num_filled)
    both = stored + new
    order = np.argsort(both.timestamps, kind="stable")[-max_events:]
    num_added = int((order >= len(stored)).sum())
    return Merged(both.take(order), num_added, num_filled, num_late, is_append=False)


def _places(stored: Events, events: Events) -> I64:
    """Find the index of each event among the stored ones, or -1.

    The m-th of several equal events matches the m-th of the stored ones.
    """
    places = np.full(len(events), -1, np.int64)
    if len(stored):
        known: defaultdict[bytes, deque[int]] = defaultdict(deque)
        for place, row in enumerate(_rows(stored)):
            known[row].append(place)
        for place, row in enumerate(_rows(events)):
            if known.get(row):
                places[place] = known[row].popleft()
    return places


def _filled(stored: Events, events: Events, same: I64) -> tuple[Events, int]:
    """Add missing features to stored events; return the events and how many gained any."""
    given = events.features
    if not given or not (same >= 0).any():
        return stored, 0
    known = stored.features
    gains = np.zeros(len(stored), np.bool_)
    from_, to = np.flatnonzero(same >= 0), same[same >= 0]
    numbers, names = dict(known.numbers), dict(known.names)
    for name, values in given.numbers.items():
        now = numbers.get(name, np.full(len(stored), np.nan, np.float32))
        gain = np.isnan(now[to]) & ~np.isnan(values[from_])
        numbers[name] = _put(now, to[gain], values[from_[gain]])
        gains[to[gain]] = True
    for name, hashes in given.names.items():
        wide = widened(names.get(name, np.zeros((len(stored), 1), np.uint64)), hashes.shape[1])
        gain = (wide[to] == 0).all(1) & (hashes[from_] != 0).any(1)
        names[name] = _put(wide, to[gain], widened(hashes[from_[gain]], wide.shape[1]))
        gains[to[gain]] = True
    num_filled = int(np.count_nonzero(gains))
    return (replace(stored, features=Columns(numbers, names)) if num_filled else stored), num_filled


def _put(column: Any, places: I64, values: Any) -> Any:
    if not len(places):
        return column
    column = column.copy()
    column[places] = values
    return column


def _rows(events: Events) -> list[bytes]:
    data = pack(events)
    return [data[at : at + EVENT.itemsize] for at in range(0, len(data), EVENT.itemsize)]


async def check_item_key(store: HistoryStore, key: bytes) -> None:
    """Check that the stored ids of items have this key; a new store takes it.

    Raises:
        ConfigError: they have another key, or none.
        StoreFailed: the store failed.
    """
    mine = key_fingerprint(key)
    if (stored := await store.item_key(mine)) != mine:
        theirs, ours = (f"the key {one}" if one else "no key" for one in (stored, mine))
        raise ConfigError(
            f"history_store: the ids of its items have {theirs}, those of the models have {ours}, "
            "so no name would be found; prepare the dataset with --like the older one, or use "
            "another store (history_store.path, history_store.url) and load the log into it"
        )
