"""What a check of a history store finds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(slots=True)
class Found:
    """What a check found."""

    num_users: int = 0  # whose history is whole
    num_events: int = 0  # that are whole
    num_entries: int = 0  # rows or values that were read
    num_unchecked: int = 0  # of them: written before there were checksums
    is_complete: bool = True
    bad_users: set[bytes] = field(default_factory=set)  # whose history cannot be read whole
    damage: list[str] = field(default_factory=list)  # what the file says of itself, and places that cannot be read

    @property
    def num_damaged(self) -> int:
        """Damaged places: users, and parts of the file."""
        return len(self.bad_users) + len(self.damage)


def hashed(key: bytes) -> str:
    """Name a user in reports without naming the user."""
    return hashlib.blake2b(key, digest_size=8).hexdigest()
