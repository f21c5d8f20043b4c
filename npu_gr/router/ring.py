"""Where a user lives: a pure function of the user key and the ring, whose name is its epoch.

Every member has its own points on a circle of 64-bit hashes (their number depends on its weight and on nothing else),
and a user belongs to the member of the next point. So a member that leaves moves its own users and no others, wherever
the function is computed: routers share no state, only the list of members.

Load is bounded only when a signal is placed. What was decided travels with the signal's answer as a `Placement`, and
the rank brings it back: two decisions for one pair could differ.

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

POINTS = 256  # of a member of weight 1: shares are even within about 6 %


class Member(NamedTuple):
    """One instance on the ring."""

    name: str
    weight: float = 1.0  # its share of the users, relative to the others'


class Ring:
    """Immutable. Equal members give equal rings, in whatever order they came."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = tuple(sorted(members))
        self.names = tuple(member.name for member in self.members)
        text = ";".join(f"{name}={weight:g}" for name, weight in self.members)
        self.epoch = xxhash.xxh3_64_hexdigest(text.encode())[:8]
        points = sorted((point, name) for name, weight in self.members for point in _points(name, weight))
        self._at = [point for point, _ in points]
        self._names = [name for _, name in points]

    def owner(self, user: bytes) -> str:
        """The member that the user belongs to. Raises ValueError: nobody is on the ring."""
        if not self._at:
            raise ValueError("the ring is empty")
        return next(self.walk(user))

    def walk(self, user: bytes) -> Iterator[str]:
        """All members, the owner first, then the one that would take over, and so on."""
        start, size = bisect_right(self._at, xxhash.xxh3_64_intdigest(user)), len(self._names)
        seen: set[str] = set()
        for step in range(size):
            name = self._names[(start + step) % size]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == len(self.members):
                    return


@lru_cache(maxsize=4096)
def _points(name: str, weight: float) -> tuple[int, ...]:
    return tuple(xxhash.xxh3_64_intdigest(f"{name}#{i}".encode()) for i in range(max(1, round(POINTS * weight))))


def fraction(user: bytes) -> float:
    """A number in [0, 1) of the user's own, independent of the place on the ring: who may return first."""
    return xxhash.xxh32_intdigest(user, 1) / 2**32


def bound(total: int, weight: float, total_weight: float, factor: float) -> int:
    """Requests that a member may hold when `total` are in flight and one more comes: factor x its fair share."""
    return math.ceil(factor * (total + 1) * weight / total_weight)


def spill(candidates: Iterable[str], has_room: Callable[[str], bool]) -> tuple[str | None, bool]:
    """Of candidates in the ring's order the first with room, and whether that is not the first of all.

    Where none has room the first one keeps the user: bounded load evens out, limits refuse.
    """
    first: str | None = None
    for name in candidates:
        if has_room(name):
            return name, first is not None
        first = first or name
    return first, False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a signal went, as its answer says and its rank repeats: `instance@epoch`, or `instance@epoch+spilled`."""

    instance: str
    epoch: str
    is_spilled: bool = False

    def encode(self) -> str:
        """For the header."""
        return f"{self.instance}@{self.epoch}" + ("+spilled" if self.is_spilled else "")

    @classmethod
    def decode(cls, text: str) -> Placement | None:
        """None where the text is not a placement: a hint that cannot be read is no error."""
        match = _PLACEMENT.fullmatch(text)
        return cls(match[1], match[2], bool(match[3])) if match else None


NAME = r"[A-Za-z0-9\[](?:[A-Za-z0-9._:\[\]-]{0,126}[A-Za-z0-9\]])?"
_PLACEMENT = re.compile(rf"({NAME})@([0-9a-f]{{8}})(\+spilled)?")
