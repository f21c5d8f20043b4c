"""Checksums of stored events, which reveal damage on a disk or in a server's memory."""

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

# A record in Redis, 22 bytes. Every event has its own check, since an append in Redis cannot read
# the records before it.
CHECKED = np.dtype([("item", "<i8"), ("action", "<i2"), ("timestamp", "<i8"), ("check", "<u4")])


def row_sum(*fields: bytes | int) -> int:
    """Hash the fields of a row (xxh3-64) to a signed 64-bit integer, the integer type of SQLite."""
    digest = xxhash.xxh3_64()
    for one in fields:
        data = one if isinstance(one, bytes) else one.to_bytes(8, "little", signed=True)
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def check_row(found: int | None, *fields: bytes | int) -> None:
    """Compare a row with its checksum; None = the row was written before there were checksums.

    Raises:
        StoreFailed: the row is damaged.
    """
    if found is not None and found != row_sum(*fields):
        raise damaged("a checksum is wrong")


def damaged(what: str) -> StoreFailed:
    """Make the error for a damaged entry."""
    return StoreFailed(
        f"the history store has damaged data of this user: {what}", StoreFault.CORRUPT
    )


def pack_checked(key: bytes, events: Events) -> bytes:
    """Convert events to CHECKED records; the user's `key` is part of every check."""
    records = np.empty(len(events), CHECKED)
    records["item"] = events.items
    records["action"] = events.actions
    records["timestamp"] = events.timestamps
    records["check"] = _checks(key, events)
    return records.tobytes()


def unpack_checked(key: bytes, data: bytes) -> Events:
    """Convert a user's CHECKED records to events.

    Raises:
        StoreFailed: a record is damaged, incomplete, or of another user.
    """
    if len(data) % CHECKED.itemsize:
        raise damaged(f"{len(data)} bytes are not a whole number of records")
    records = np.frombuffer(data, CHECKED)
    events = Events.make(records["item"], records["action"], records["timestamp"])
    bad = int(np.count_nonzero(records["check"] != _checks(key, events)))
    if bad:
        raise damaged(f"{bad} of {len(records)} checksums are wrong")
    return events


def count_bad(key: bytes, data: bytes) -> int:
    """Count the damaged CHECKED records; an incomplete last record counts as one."""
    num_bytes = len(data) // CHECKED.itemsize * CHECKED.itemsize
    records = np.frombuffer(data[:num_bytes], CHECKED)
    events = Events.make(records["item"], records["action"], records["timestamp"])
    return int(np.count_nonzero(records["check"] != _checks(key, events))) + (
        num_bytes != len(data)
    )


def _checks(key: bytes, events: Events) -> npt.NDArray[np.uint32]:
    """Compute one check for each event, column by column.

    A library call for each event would make a read a millisecond slower.
    """
    mixed = np.full(len(events), xxhash.xxh3_64_intdigest(key), np.uint64)
    for column in (events.items, events.actions, events.timestamps):
        mixed = mix(mixed ^ column.astype(np.int64).view(np.uint64))
    return (mixed >> np.uint64(32)).astype(np.uint32)


def mix(values: U64) -> U64:
    """Hash each value by the finaliser of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Any = values ^ (values >> np.uint64(31))
    return mixed  # type: ignore[no-any-return]


@dataclass(slots=True)
class Found:
    """The result of a check."""

    num_users: int = 0  # users with an undamaged history
    num_events: int = 0  # undamaged events
    num_entries: int = 0  # rows or values that were read
    num_unchecked: int = 0  # entries without a checksum, written before there were any
    is_complete: bool = True  # False = the time limit ended the check
    bad_users: set[bytes] = field(default_factory=set)  # users with a damaged history
    # Errors that SQLite reports for the file, and places that cannot be read.
    damage: list[str] = field(default_factory=list)

    @property
    def num_damaged(self) -> int:
        """Damaged places: users, and parts of the file."""
        return len(self.bad_users) + len(self.damage)


def hashed(key: bytes) -> str:
    """Return a pseudonym of a user, for reports."""
    return hashlib.blake2b(key, digest_size=8).hexdigest()
