"""What a history store must do, its settings, and the bytes in which every store keeps events."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from npu_gr.core.errors import StoreFailed, StoreFault, Unprocessable
from npu_gr.core.history import Events, UserKey, Write, Written
from npu_gr.core.secret import SecretUrl
from npu_gr.core.settings import Count, Seconds, SecondsOrZero
from npu_gr.features.source import SourceConfig

EVENT = np.dtype([("item", "<i8"), ("action", "<i2"), ("timestamp", "<i8")])  # packed: 18 bytes

MAX_EVENTS = 8_388_608  # of a user; keeps a user under the 512 MiB that Redis allows one value
MAX_FEATURE_BYTES = 65_536  # of an event

FailurePolicy = Literal["fail", "last_known", "nothing"]


class RedisTlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom a `rediss://` connection believes, and the certificate that it shows."""

    ca: str | None = None  # PEM file; None = the authorities that the system trusts
    certificate: str | None = None  # PEM file; Redis asks for one unless tls-auth-clients is no
    key: str | None = None  # PEM file, without a password

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate, key: give both or neither")


class HistoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where behaviours are kept."""

    kind: Literal["embedded", "redis", "none"] = "embedded"
    path: str = "history.db"  # embedded: the file; its folder is made
    url: SecretUrl | None = None  # redis; None = redis://127.0.0.1:6379/0; rediss:// is over TLS
    tls: RedisTlsConfig | None = None  # of rediss://
    max_events_per_user: Annotated[int, msgspec.Meta(ge=1, le=MAX_EVENTS)] = 65_536  # older ones are given up
    # of an event: 4 a number, 8 a name; as many names as any event of the write has
    max_feature_bytes_per_event: Annotated[int, msgspec.Meta(ge=0, le=MAX_FEATURE_BYTES)] = 1024
    timeout_s: Seconds = 1.0  # of an append or erasure; redis: also to connect, and to be answered
    read_timeout_s: Seconds = 0.025  # of one read: a small share of the objectives of those who wait for it
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
    source: SourceConfig | None = None  # of the features of users; None = requests bring them

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
        return cls(hashlib.blake2b(text, digest_size=16).digest(), bytes.fromhex(events.fingerprint()))


@dataclass(slots=True)
class StoreHealth:
    """What a store says of itself; kept up to date by the store, read from any thread."""

    free_bytes: int | None = None  # that its file system has left; None = it has no file here
    disk_bytes: int | None = None  # size of that file system
    damaged: int | None = None  # places that the check at the start found; None = there was none
    erased_at: float | None = None  # unix seconds of the oldest erasure that is not overwritten yet; None = all are
    overwrites: Counter[str] = field(default_factory=Counter)  # runs by their result: ok, held (by a reader), failed


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
            Unprocessable: the key was applied to other events, or their features take too many bytes.
        """
        ...

    async def write_many(self, batch: Sequence[Write]) -> list[Written | StoreFailed | Unprocessable]:
        """Do many writes at once, those of one user in the given order; durable when it returns.

        Returns:
            What each write did, or why it did nothing: a write that fails does nothing, and the others are done.

        Raises:
            StoreFailed: no write was done, and none because of its own user.
        """
        ...

    async def read(self, user: UserKey, last: int) -> StoredHistory:
        """The newest `last` >= 0 events, oldest first; none for an unknown user."""
        ...

    async def actions(self) -> tuple[str, ...]:
        """The names of the actions whose numbers are kept; none = no event was written under a name yet."""
        ...

    async def name_actions(self, names: Sequence[str]) -> tuple[str, ...]:
        """Remember what the numbers of actions mean; durable when it returns.

        Args:
            names: by number. They take the place of those that are remembered if they begin with them.

        Returns:
            The names that are remembered then: other ones if `names` do not begin with them.
        """
        ...

    async def erase(self, user: UserKey) -> bool:
        """Forget the user, durably.

        Returns:
            Whether no byte of the user is left in the store's files here. False: no call finds the user any more, and
            the store overwrites what is left when it can.
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


def checked(results: Iterable[Written | StoreFailed | Unprocessable]) -> list[Written | StoreFailed | Unprocessable]:
    """Return the results of `write_many`, or raise what it raises."""
    made = list(results)
    failures = [one for one in made if isinstance(one, StoreFailed) and one.fault is not StoreFault.CORRUPT]
    if failures and len(failures) == len(made):
        raise failures[0]
    return made


def key_bytes(user: UserKey) -> bytes:
    """One key for each (tenant, user): the tenant's length keeps "a"+"bc" and "ab"+"c" apart.

    Every Python string has one, lone surrogates included.
    """
    tenant, name = (part.encode("utf-8", "surrogatepass") for part in user)
    return len(tenant).to_bytes(4, "big") + tenant + name
