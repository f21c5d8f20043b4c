"""Checksums of what the stores keep, and what a check of them finds: damage on a disk or in a server's memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.errors import StoreFailed, StoreFault
from npu_gr.core.history import Events

U64 = npt.NDArray[np.uint64]

# Redis: every event carries its check, because an append there cannot read what it appends to.
# 22 bytes
CHECKED = np.dtype([("item", "<i8"), ("action", "<i2"), ("timestamp", "<i8"), ("check", "<u4")])


def row_sum(*fields: bytes | int) -> int:
    """Hash the fields of a row (xxh3-64) into a signed 64-bit integer, as SQLite has them."""
    digest = xxhash.xxh3_64()
    for one in fields:
        data = one if isinstance(one, bytes) else one.to_bytes(8, "little", signed=True)
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def check_row(found: int | None, *fields: bytes | int) -> None:
    """Compare a row with its sum; None = the row is older than the sums.

    Raises:
        StoreFailed: the row is damaged.
    """
    if found is not None and found != row_sum(*fields):
        raise damaged("a checksum is wrong")


def damaged(what: str) -> StoreFailed:
    """Make the error of an entry that cannot be trusted."""
    return StoreFailed(
        f"the history store has damaged data of this user: {what}", StoreFault.CORRUPT
    )


def pack_checked(key: bytes, events: Events) -> bytes:
    """Events as CHECKED records; `key` is of the user, and part of every check."""
    records = np.empty(len(events), CHECKED)
    records["item"] = events.items
    records["action"] = events.actions
    records["timestamp"] = events.timestamps
    records["check"] = _checks(key, events)
    return records.tobytes()


def unpack_checked(key: bytes, data: bytes) -> Events:
    """Events of CHECKED records of that user.

    Raises:
        StoreFailed: a record is damaged, cut short, or another user's.
    """
    if len(data) % CHECKED.itemsize:
        raise damaged(f"{len(data)} bytes are not whole records")
    records = np.frombuffer(data, CHECKED)
    events = Events.make(records["item"], records["action"], records["timestamp"])
    bad = int(np.count_nonzero(records["check"] != _checks(key, events)))
    if bad:
        raise damaged(f"{bad} of {len(records)} checksums are wrong")
    return events


def count_bad(key: bytes, data: bytes) -> int:
    """How many of the CHECKED records are damaged; a rest that is no whole record counts as one."""
    whole = len(data) // CHECKED.itemsize * CHECKED.itemsize
    records = np.frombuffer(data[:whole], CHECKED)
    events = Events.make(records["item"], records["action"], records["timestamp"])
    return int(np.count_nonzero(records["check"] != _checks(key, events))) + (whole != len(data))


def _checks(key: bytes, events: Events) -> npt.NDArray[np.uint32]:
    """One check an event, by whole columns: calling a library for each event would cost a read a millisecond."""
    mixed = np.full(len(events), xxhash.xxh3_64_intdigest(key), np.uint64)
    for column in (events.items, events.actions, events.timestamps):
        mixed = mix(mixed ^ column.astype(np.int64).view(np.uint64))
    return (mixed >> np.uint64(32)).astype(np.uint32)


def mix(values: U64) -> U64:
    """Mix each value (the finaliser of splitmix64): each of its bits changes half of the bits of its result."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Any = values ^ (values >> np.uint64(31))
    return mixed  # type: ignore[no-any-return]


@dataclass(slots=True)
class Found:
    """What a check found."""

    num_users: int = 0  # whose history is whole
    num_events: int = 0  # that are whole
    num_entries: int = 0  # rows or values that were read
    num_unchecked: int = 0  # of them: written before there were checksums
    is_complete: bool = True
    bad_users: set[bytes] = field(default_factory=set)  # whose history cannot be read whole
    # what the file says of itself, and places that cannot be read
    damage: list[str] = field(default_factory=list)

    @property
    def num_damaged(self) -> int:
        """Damaged places: users, and parts of the file."""
        return len(self.bad_users) + len(self.damage)


def hashed(key: bytes) -> str:
    """Name a user in reports without naming the user."""
    return hashlib.blake2b(key, digest_size=8).hexdigest()
