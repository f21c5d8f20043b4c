"""Consistent hashing: which instance owns a user. A pure function of the user and the members of the ring.

Every member has its own points on a circle of 64-bit hashes; the number of its points depends on its weight alone. The
member of the next point after the user's hash owns the user. A member that leaves therefore moves its own users and no
others. Routers share no state, only the list of members: equal lists give equal rings, and a ring's `epoch` names it.

Load is bounded only when a signal is placed. The decision travels with the signal's answer as a `Placement`, and the
rank brings it back, because a second decision for the same pair could differ from the first.

Source: consistent hashing (Karger et al. 1997), with bounded loads (arXiv:1608.01350); RelayGR (arXiv:2601.01712) for
the pair. That the spill is decided once, at signal time, is our reading.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import xxhash

POINTS = 256  # of a member of weight 1; with so many, equal members own equal shares within about 6 %


class Member(NamedTuple):
    """An instance on the ring: its name and its weight."""

    name: str
    weight: float = 1.0  # its share of the users, relative to the others'


class Ring:
    """Immutable. Equal members give equal rings, whatever their order was."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = tuple(sorted(members))
        self.names = tuple(member.name for member in self.members)
        text = ";".join(f"{name}={weight:g}" for name, weight in self.members)
        self.epoch = xxhash.xxh3_64_hexdigest(text.encode())[:8]
        points = sorted((point, name) for name, weight in self.members for point in _points(name, weight))
        self._hashes = [point for point, _ in points]
        self._names = [name for _, name in points]
        self._successors = _successors(self._names)

    def owner(self, user: bytes) -> str:
        """The member that owns the user.

        Raises:
            ValueError: the ring is empty.
        """
        owner = self.owner_or_none(user)
        if owner is None:
            raise ValueError("the ring is empty")
        return owner

    def owner_or_none(self, user: bytes) -> str | None:
        """The member that owns the user. None: the ring is empty."""
        if not self._hashes:
            return None
        return self._names[bisect_right(self._hashes, xxhash.xxh3_64_intdigest(user)) % len(self._names)]

    def first_two(self, user: bytes) -> tuple[str | None, str | None]:
        """The first two of `walk`; None: there are not so many."""
        if not self._hashes:
            return None, None
        at = bisect_right(self._hashes, xxhash.xxh3_64_intdigest(user)) % len(self._names)
        return self._names[at], self._successors[at]

    def walk(self, user: bytes) -> Iterator[str]:
        """All members: first the owner, then the one that would take over from it, and so on."""
        start = bisect_right(self._hashes, xxhash.xxh3_64_intdigest(user))
        size = len(self._names)
        seen: set[str] = set()
        for step in range(size):
            name = self._names[(start + step) % size]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == len(self.members):
                    return


def _successors(names: list[str]) -> list[str | None]:
    """For each point the member of the next one that is another's."""
    successors: list[str | None] = [None] * len(names)
    if len(set(names)) > 1:
        for at in range(2 * len(names) - 2, -1, -1):  # twice around, because the last ones go on at the beginning
            here, after = at % len(names), (at + 1) % len(names)
            successors[here] = names[after] if names[after] != names[here] else successors[after]
    return successors


@lru_cache(maxsize=4096)
def _points(name: str, weight: float) -> tuple[int, ...]:
    return tuple(xxhash.xxh3_64_intdigest(f"{name}#{i}".encode()) for i in range(max(1, round(POINTS * weight))))


def fraction(user: bytes) -> float:
    """A hash of the user in [0, 1), independent of the user's place on the ring.

    Users with small fractions return first to an instance that comes back.
    """
    return xxhash.xxh32_intdigest(user, 1) / 2**32


def bound(total: int, weight: float, total_weight: float, factor: float) -> int:
    """Limit a member's requests to `factor` times its fair share.

    Args:
        total: requests in flight at all members, without the one that comes.
        weight: the member's weight.
        total_weight: the sum of all weights.
        factor: over 1; then the bounds of all members together leave room for one more request.

    Returns:
        How many requests the member may hold.
    """
    return math.ceil(factor * (total + 1) * weight / total_weight)


def spill(candidates: Iterable[str], has_room: Callable[[str], bool]) -> tuple[str | None, bool]:
    """Choose the first candidate with room.

    Args:
        candidates: names in the ring's order.
        has_room: whether a candidate is under its bounded load.

    Returns:
        The name and whether it is another than the first candidate. If no candidate has room, the first one is chosen:
        bounded load evens out, only limits reject. (None, False) if there is no candidate.
    """
    first: str | None = None
    for name in candidates:
        if has_room(name):
            return name, first is not None
        first = first or name
    return first, False


@dataclass(frozen=True, slots=True)
class Placement:
    """The instance that a signal went to. The signal's answer names it in a header, and the rank repeats the header."""

    instance: str
    epoch: str
    is_spilled: bool = False

    def encode(self) -> str:
        """The header's text: `instance@epoch`, or `instance@epoch+spilled`."""
        return f"{self.instance}@{self.epoch}" + ("+spilled" if self.is_spilled else "")

    @classmethod
    def decode(cls, text: str) -> Placement | None:
        """Parse a header. Returns None if it is no placement: it is a hint, so bad text is no error."""
        match = _PLACEMENT.fullmatch(text)
        return cls(match[1], match[2], bool(match[3])) if match else None


NAME = r"[A-Za-z0-9\[](?:[A-Za-z0-9._:\[\]-]{0,126}[A-Za-z0-9\]])?"
_PLACEMENT = re.compile(rf"({NAME})@([0-9a-f]{{8}})(\+spilled)?")
