"""What a history store must do, its settings, the bytes in which every store keeps events, and how they merge."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from npu_gr.core.arrays import I64
from npu_gr.core.errors import StoreFailed, StoreFault, Unprocessable
from npu_gr.core.feature_schema.columns import Columns, widened
from npu_gr.core.history import Events, StoreHealth, UserKey, Write, Written
from npu_gr.core.secret import SecretUrl
from npu_gr.core.settings import Count, Seconds, SecondsOrZero
from npu_gr.core.tls import TlsFiles

EVENT = np.dtype([("item", "<i8"), ("action", "<i2"), ("timestamp", "<i8")])  # packed: 18 bytes

MAX_EVENTS = 8_388_608  # of a user; keeps a user under the 512 MiB that Redis allows one value
MAX_FEATURE_BYTES = 65_536  # of an event

FailurePolicy = Literal["fail", "last_known", "nothing"]


Option = bool | int | float | str | list[str] | dict[str, str]


class FeatureStoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the features of users come from that requests do not bring."""

    entry: str  # feast, or package.module:name of a function or a class
    # keyword arguments: of the class, of feast, of each call of the function
    options: dict[str, Option] = {}
    timeout_s: Seconds = 0.01  # of one call, the wait for its place included
    max_calls: Count = 32  # at once; as many threads where the source is no coroutine
    max_queue: Count = 1024  # that wait for their turn; the next one fails at once
    max_failures: Count = 5  # in a row; then calls fail at once, but for one every `retry_s`
    retry_s: Seconds = 0.05
    # so long a user's features serve his requests; a signal's serve the rank after it
    fresh_s: SecondsOrZero = 30.0
    # so old ones still stand in where the source fails; 0 = none do
    stale_s: SecondsOrZero = 3600.0
    max_users: Count = 100_000  # whose features are remembered


class HistoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where behaviours are kept."""

    kind: Literal["embedded", "redis", "none"] = "embedded"
    path: str = "history.db"  # embedded: the file; its folder is made
    url: SecretUrl | None = None  # redis; None = redis://127.0.0.1:6379/0; rediss:// is over TLS
    tls: TlsFiles | None = None  # of rediss://
    # older ones are given up
    max_events_per_user: Annotated[int, msgspec.Meta(ge=1, le=MAX_EVENTS)] = 65_536
    # of an event: 4 a number, 8 a name; as many names as any event of the write has
    max_feature_bytes_per_event: Annotated[int, msgspec.Meta(ge=0, le=MAX_FEATURE_BYTES)] = 1024
    timeout_s: Seconds = 1.0  # of an append or erasure; redis: also to connect, and to be answered
    # of one read: a small share of the objectives of those who wait for it
    read_timeout_s: Seconds = 0.025
    max_calls: Count = 64  # reads at once, and as many appends and erasures
    max_queue: Count = 1024  # of each that wait for their turn; the next one fails at once
    max_failures: Count = 5  # in a row; then calls fail at once, but for one every `retry_s`
    retry_s: Seconds = 0.05
    # a request whose history cannot be read: fail = 503 | last_known = what this instance last knew of the user, or 503
    # if that is nothing | nothing = the same, but without behaviours if nothing is known
    on_failure: FailurePolicy = "last_known"
    idempotency_s: Seconds = 86_400.0  # how long an append's idempotency key is remembered
    max_idempotency_keys: Count = 256  # of a user; then the oldest is forgotten
    check_s: SecondsOrZero = 1.0  # embedded: how long the start looks for damage; 0 = not

    def __post_init__(self) -> None:
        if self.tls is not None and not str(self.url).startswith("rediss://"):
            raise ValueError("tls: needs a url that begins with rediss://")

    @property
    def redis_url(self) -> SecretUrl:
        """Where Redis is."""
        return self.url or SecretUrl("redis://127.0.0.1:6379/0")


class StoredHistory(NamedTuple):
    """The newest events of a user."""

    events: Events
    first_index: int  # of the first of them, counted over everything the user ever did


class IdempotencyKey(NamedTuple):
    """An idempotency key as a store keeps it: digests of a fixed size."""

    key: bytes  # 16 bytes
    events: bytes  # 16 bytes, of the events that came with it

    @classmethod
    def make(cls, key: str, events: Events) -> IdempotencyKey:
        """Digest a caller's key and the events that came with it."""
        text = key.encode("utf-8", "surrogatepass")
        return cls(
            hashlib.blake2b(text, digest_size=16).digest(), bytes.fromhex(events.fingerprint())
        )


class HistoryStore(Protocol):
    """Append-only behaviours by user. A store that fails raises StoreFailed."""

    @property
    def health(self) -> StoreHealth:
        """What the store says of itself."""
        ...

    async def append(self, user: UserKey, events: Events, key: str | None = None) -> int:
        """Append in the given order; durable when it returns.

        Args:
            user: whose they are.
            events: oldest first.
            key: idempotency key. A key that the store remembers of this user appends nothing.

        Returns:
            How many events are kept for the user now, or were when the key was first applied.

        Raises:
            Unprocessable: the key was applied to other events, or their features take too many
                bytes.
        """
        ...

    async def write_many(
        self, batch: Sequence[Write]
    ) -> list[Written | StoreFailed | Unprocessable]:
        """Do many writes at once, those of one user in the given order; durable when it returns.

        Returns:
            What each write did, or why it did nothing: a write that fails does nothing, and the
            others are done.

        Raises:
            StoreFailed: no write was done, and none because of its own user.
        """
        ...

    async def read(self, user: UserKey, last: int) -> StoredHistory:
        """The newest `last` >= 0 events, oldest first; none for an unknown user."""
        ...

    async def actions(self) -> tuple[str, ...]:
        """The names of the actions whose numbers are kept.

        None = no event was written under a name yet.
        """
        ...

    async def name_actions(self, names: Sequence[str]) -> tuple[str, ...]:
        """Remember what the numbers of actions mean; durable when it returns.

        Args:
            names: by number. They take the place of those that are remembered if they begin with
                them.

        Returns:
            The names that are remembered then: other ones if `names` do not begin with them.
        """
        ...

    async def erase(self, user: UserKey) -> bool:
        """Forget the user, durably.

        Returns:
            Whether no byte of the user is left in the store's files here. False: no call finds the
            user any more, and the store overwrites what is left when it can.
        """
        ...

    async def close(self) -> None:
        """Finish what was acknowledged, then close the files or connections."""
        ...


def pack(events: Events) -> bytes:
    """Events as EVENT records, without their features."""
    records = np.empty(len(events), EVENT)
    records["item"] = events.items
    records["action"] = events.actions
    records["timestamp"] = events.timestamps
    return records.tobytes()


def unpack(data: bytes) -> Events:
    """Events from EVENT records."""
    records = np.frombuffer(data, EVENT)
    return Events.make(records["item"], records["action"], records["timestamp"])


def checked(
    results: Iterable[Written | StoreFailed | Unprocessable],
) -> list[Written | StoreFailed | Unprocessable]:
    """Return the results of `write_many`, or raise what it raises."""
    made = list(results)
    failures = [
        one for one in made if isinstance(one, StoreFailed) and one.fault is not StoreFault.CORRUPT
    ]
    if failures and len(failures) == len(made):
        raise failures[0]
    return made


def key_bytes(user: UserKey) -> bytes:
    """One key for each (tenant, user): the tenant's length keeps "a"+"bc" and "ab"+"c" apart.

    Every Python string has one, lone surrogates included.
    """
    tenant, name = (part.encode("utf-8", "surrogatepass") for part in user)
    return len(tenant).to_bytes(4, "big") + tenant + name


class Merged(NamedTuple):
    """A history after a merge."""

    events: Events  # the newest `max_events` of both, oldest first
    num_added: int  # of them, that were not stored
    num_filled: int  # of the stored ones, that gained features
    # the added ones are the last of them, and the others are as they are in the store
    is_append: bool

    @property
    def changes(self) -> bool:
        """Whether it is another history than the stored one."""
        return bool(self.num_added or self.num_filled)


def merge(stored: Events, events: Events, max_events: int) -> Merged:
    """Merge events into a stored history, in time order; of equal times what is stored comes first.

    Events are the same by item, action and time; of those that are the same, there are as many as
    the fuller of the two sides has. What the store lacks of the features of one that it has is
    filled in; a value that it has stays. A second merge of the same events changes nothing, however
    long ago the first one was: nothing is remembered for it.

    Args:
        stored: what the store keeps of the user.
        events: what is to be in it, in any order.
        max_events: that the store keeps of a user. What it has given up for newer ones does not
            come back.
    """
    same = _places(stored, events)
    is_new = same < 0
    stored, num_filled = _filled(stored, events, same)
    if len(stored) >= max_events:
        is_new &= events.timestamps > stored.timestamps.min()
    new = events.take(is_new)
    new = new.take(np.argsort(new.timestamps, kind="stable"))
    if not len(new) or not len(stored) or new.timestamps[0] >= stored.timestamps.max():
        added = new[-max_events:]
        return Merged(
            (stored + added)[-max_events:], len(added), num_filled, is_append=not num_filled
        )
    both = stored + new
    order = np.argsort(both.timestamps, kind="stable")[-max_events:]
    return Merged(both.take(order), int((order >= len(stored)).sum()), num_filled, is_append=False)


def _places(stored: Events, events: Events) -> I64:
    """Find each event among the stored ones: its place, or -1.

    The m-th of equal events is the m-th of these there.
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
    """Fill in what the stored events lack of the features of the same events, and count those that gain any."""
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
