"""What a history store must do, its settings, and the bytes in which every store keeps events."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from npu_gr.core.request import Events, UserKey
from npu_gr.core.settings import Seconds

EVENT = np.dtype([("item", "<i8"), ("action", "<i2"), ("timestamp", "<i8")])  # packed: 18 bytes


class HistoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where behaviours are kept."""

    kind: Literal["embedded", "redis", "none"] = "embedded"
    path: str = "history.db"  # embedded: the file; its folder is made
    url: str = "redis://127.0.0.1:6379/0"  # redis
    # older ones are given up; the limit keeps a user under the 512 MiB that Redis allows one value
    max_events_per_user: Annotated[int, msgspec.Meta(ge=1, le=8_388_608)] = 65_536
    timeout_s: Seconds = 1.0  # redis: to get a connection, to connect, to be answered


class StoredHistory(NamedTuple):
    """The newest events of a user."""

    events: Events
    first_index: int  # of the first of them, counted over everything the user ever did


class HistoryStore(Protocol):
    """Append-only behaviours by user. A store that fails raises Unavailable."""

    async def append(self, user: UserKey, events: Events) -> int:
        """Append in the given order; durable when it returns.

        Returns:
            How many events are kept for the user now.
        """
        ...

    async def append_many(self, batch: list[tuple[UserKey, Events]]) -> None:
        """Append for many users at once; durable when it returns. If it fails, each user has all or nothing."""
        ...

    async def read(self, user: UserKey, last: int) -> StoredHistory:
        """The newest `last` >= 0 events, oldest first; none for an unknown user."""
        ...

    async def erase(self, user: UserKey) -> None:
        """Forget the user."""
        ...

    async def close(self) -> None:
        """Finish what was acknowledged, then close the files or connections."""
        ...


def pack(events: Events) -> bytes:
    """Events as EVENT records."""
    records = np.empty(len(events), EVENT)
    records["item"] = events.items
    records["action"] = events.actions
    records["timestamp"] = events.timestamps
    return records.tobytes()


def unpack(data: bytes) -> Events:
    """Events from EVENT records."""
    records = np.frombuffer(data, EVENT)
    return Events.make(records["item"], records["action"], records["timestamp"])


def key_bytes(user: UserKey) -> bytes:
    """One key for each (tenant, user): the tenant's length keeps "a"+"bc" and "ab"+"c" apart.

    Every Python string has one, lone surrogates included.
    """
    tenant, name = (part.encode("utf-8", "surrogatepass") for part in user)
    return len(tenant).to_bytes(4, "big") + tenant + name
