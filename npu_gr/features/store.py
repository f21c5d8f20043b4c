"""User histories: what a store must do, and the named choice of one."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from npu_gr.core.request import Events, UserKey

EVENT = np.dtype([("item", "<i8"), ("action", "<i2"), ("timestamp", "<i8")])  # packed: 18 bytes


class HistoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where behaviours are kept."""

    kind: Literal["embedded", "redis", "none"] = "embedded"
    path: str = "history.db"  # embedded: the file; its folder is made
    url: str = "redis://127.0.0.1:6379/0"  # redis
    # older ones are given up; the limit keeps a user under the 512 MiB that Redis allows one value
    max_events_per_user: Annotated[int, msgspec.Meta(ge=1, le=8_388_608)] = 65_536
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # redis: to get a connection, to connect, to be answered


class Stored(NamedTuple):
    """The newest events of a user."""

    events: Events
    first_index: int  # of the first of them, counted over everything the user ever did


class HistoryStore(Protocol):
    """Append-only behaviours by user. A failing store raises Unavailable."""

    async def append(self, user: UserKey, events: Events) -> int:
        """Append in the given order; durable when it returns. How many are kept for the user now."""
        ...

    async def append_many(self, batch: list[tuple[UserKey, Events]]) -> None:
        """Append for many users at once; durable when it returns. Where it fails, each user has all or nothing."""
        ...

    async def read(self, user: UserKey, last: int) -> Stored:
        """The newest `last` >= 0 events, oldest first; none for a user that is not known."""
        ...

    async def erase(self, user: UserKey) -> None:
        """Forget the user."""
        ...

    async def close(self) -> None:
        """Finish what was acknowledged and let go of the files or connections."""
        ...


async def open_store(config: HistoryConfig) -> HistoryStore | None:
    """The store that the config names.

    Raises:
        ConfigError: its file, its package or its server cannot be used.
    """
    match config.kind:
        case "embedded":
            from npu_gr.features.embedded import EmbeddedStore

            return await asyncio.to_thread(EmbeddedStore, config)  # may have a long log to recover
        case "redis":
            from npu_gr.features.redis import RedisStore

            return await RedisStore.connect(config)
        case "none":
            return None


def pack(events: Events) -> bytes:
    """As EVENT records."""
    records = np.empty(len(events), EVENT)
    records["item"], records["action"], records["timestamp"] = events.items, events.actions, events.timestamps
    return records.tobytes()


def unpack(data: bytes) -> Events:
    """From EVENT records."""
    records = np.frombuffer(data, EVENT)
    return Events.make(records["item"], records["action"], records["timestamp"])


def key_bytes(user: UserKey) -> bytes:
    """One key for each (tenant, user): the tenant's length keeps "a"+"bc" and "ab"+"c" apart.

    Every Python string has one, lone surrogates included.
    """
    tenant, name = (part.encode("utf-8", "surrogatepass") for part in user)
    return len(tenant).to_bytes(4, "big") + tenant + name
