"""The one implementation of placement: which instance gets a user.

For the picker, for Ray and for the simulator.

Consistent hashing: every member has its own points on a circle of 64-bit hashes; their number
depends on its weight alone. The member of the next point after the user's hash owns the user, so a
member that leaves moves its own users and no others. Pickers share no state, only the list of
members: equal lists place equally.

A rank goes where its signal went, though the owner may have changed since; `Signals` remembers.
HAProxy does the same with `hash-type consistent` and a stick table, on a circle of its own.

Source: consistent hashing (Karger et al. 1997), with bounded loads (arXiv:1608.01350); RelayGR
(arXiv:2601.01712) for the pair. That the spill is decided once, at signal time, is our reading.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import xxhash

from npu_gr.core.kinds import KINDS, Routing

# of a member of weight 1; with so many, equal members own equal shares within about 6 %
POINTS = 256
BY_USER = (Routing.SIGNAL, Routing.FOLLOW, Routing.ONCE)
_ROUTES = [
    (kind.method, re.compile(re.sub("{[^}]*}", "[^/?]+", path)), kind.routing)
    for kind in KINDS.values()
    for path in kind.paths
]


class Member(NamedTuple):
    """An instance on the ring: its name and its weight."""

    name: str
    weight: float = 1.0  # its share of the users, relative to the others'


class How(StrEnum):
    """The reason for which a request goes to its instance."""

    HOME = "home"  # the instance owns the user
    SPILLED = "spilled"  # the owner had more than its share
    SIGNAL = "signal"  # a rank follows its signal
    SUCCESSOR = "successor"  # the owner does not take it


class Place(NamedTuple):
    """Where a request goes, and why."""

    name: str
    how: How


class Ring:
    """Immutable. Equal members give equal rings, whatever their order was."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = tuple(sorted(members))
        points = sorted(
            (point, name) for name, weight in self.members for point in _points(name, weight)
        )
        self._hashes = [point for point, _ in points]
        self._names = [name for _, name in points]

    def owner(self, user: bytes) -> str:
        """The member that owns the user.

        Raises:
            ValueError: the ring is empty.
        """
        for name in self.walk(user):
            return name
        raise ValueError("the ring is empty")

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


@lru_cache(maxsize=4096)
def _points(name: str, weight: float) -> tuple[int, ...]:
    return tuple(
        xxhash.xxh3_64_intdigest(f"{name}#{i}".encode()) for i in range(round(POINTS * weight))
    )


class Signals:
    """Where the signals of the last seconds went."""

    def __init__(self, life_s: float, most: int) -> None:
        """Remember nothing yet.

        Args:
            life_s: a rank follows its signal for so long.
            most: signals remembered; the oldest is forgotten first.
        """
        self._life_s = life_s
        self._most = most
        # user -> (instance, expires_at), oldest first
        self._kept: dict[bytes, tuple[str, float]] = {}

    def remember(self, user: bytes, name: str, now_at: float) -> None:
        """Let the ranks of a user follow a signal to this instance."""
        kept = self._kept
        kept.pop(user, None)
        kept[user] = (name, now_at + self._life_s)
        while len(kept) > self._most or next(iter(kept.values()))[1] <= now_at:
            del kept[next(iter(kept))]

    def find(self, user: bytes, now_at: float) -> str | None:
        """Return the instance of the user's signal; None: there was none lately."""
        name, expires_at = self._kept.get(user, (None, 0.0))
        return name if now_at < expires_at else None


def place(
    ring: Ring,
    user: bytes,
    takes: Callable[[str], bool],
    signalled: str | None = None,
    has_room: Callable[[str], bool] | None = None,
) -> Place | None:
    """Choose the instance for a request of a user: a pure function of its arguments.

    In this order: the instance that had the user's signal; the first of the ring's order that takes
    the user and has room; the first that takes the user.

    Args:
        ring: of the instances.
        user: the value of the user header.
        takes: whether an instance takes requests now.
        signalled: of a rank, the instance that its signal went to.
        has_room: of a signal, whether an instance is under its bounded load; None = loads are not
            bounded.

    Returns:
        None: no instance takes it.
    """
    if signalled is not None and takes(signalled):
        return Place(signalled, How.SIGNAL)
    first: Place | None = None
    is_owner = True
    for name in ring.walk(user):
        if takes(name):
            here = Place(name, How.HOME if is_owner else How.SUCCESSOR)
            if has_room is None or has_room(name):
                return here if first is None else Place(name, How.SPILLED)
            first = first or here
        is_owner = False
    return first


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


def routing_of(method: str, path: str) -> Routing | None:
    """Return how a request is placed; None: any instance answers it.

    Args:
        method: of HTTP.
        path: without the query.
    """
    return next(
        (routing for on, at, routing in _ROUTES if on == method and at.fullmatch(path)), None
    )


def order(
    ring: Ring,
    routing: Routing | None,
    user: bytes,
    able: Collection[str],
    in_flight: Callable[[str], int],
    signalled: str | None = None,
    has_room: Callable[[str], bool] | None = None,
) -> list[str]:
    """Order the instances for a request: the chosen one, then those that take it if the ones before do not.

    Args:
        ring: of the instances.
        routing: of the request's kind; None = any instance answers it.
        user: the value of the user header; empty = nobody's request, which goes to the less loaded
            of two.
        able: instances that take requests now.
        in_flight: requests that an instance has.
        signalled: the instance of the user's signal; a signal itself chooses anew.
        has_room: of a signal, whether an instance is under its bounded load; None = loads are not
            bounded.
    """
    if routing not in BY_USER or not user:
        names = random.sample(sorted(able), len(able))
        return sorted(names[:2], key=in_flight) + names[2:]
    is_signal = routing is Routing.SIGNAL
    first = place(
        ring,
        user,
        able.__contains__,
        None if is_signal else signalled,
        has_room if is_signal else None,
    )
    if first is None:
        return []
    return [first.name, *(name for name in ring.walk(user) if name != first.name and name in able)]
