"""Placement of users on instances, for the endpoint picker, Ray and the simulator.

Consistent hashing: every member has points on a circle of 64-bit hashes, in proportion to its
weight. The member of the next point after the user's hash owns the user, so a member that leaves
moves its own users only. Pickers share no state: equal lists of members give equal placements.

A rank follows its signal even if the owner has changed since (`Signals`). HAProxy does the same
with `hash-type consistent` and a stick table, on a circle of its own.

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
from itertools import islice
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import xxhash

from npu_gr.core.kinds import KINDS, Routing

# Points of a member of weight 1. With 256, the shares of equal members differ by about 6 %.
POINTS = 256
MOST_TRIES = 8  # instances that are tried for a request
BY_USER = (Routing.SIGNAL, Routing.FOLLOW, Routing.ONCE)
OF_USER = "/v1/users/"  # begins the paths that end with a user
_ROUTES = [
    (kind.method, re.compile(re.sub("{[^}]*}", "[^/?]+", path)), kind.routing)
    for kind in KINDS.values()
    for path in kind.paths
]
_ROUTES.append(("GET", re.compile(OF_USER + "[^/?]+"), Routing.ONCE))  # what its instance knows


class Member(NamedTuple):
    """An instance on the ring: its name and its weight."""

    name: str
    weight: float = 1.0  # its share of the users, relative to the others'


class How(StrEnum):
    """The reason for a placement."""

    HOME = "home"  # the instance owns the user
    SPILLED = "spilled"  # the owner has more requests than its bounded load
    SIGNAL = "signal"  # a rank follows its signal
    SUCCESSOR = "successor"  # the owner takes no requests


class Place(NamedTuple):
    """The instance of a request, and the reason."""

    name: str
    how: How


class Ring:
    """Immutable ring of consistent hashing; the order of the members does not matter."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = tuple(sorted(members))
        points = sorted(
            (point, name) for name, weight in self.members for point in _points(name, weight)
        )
        self._hashes = [point for point, _ in points]
        self._names = [name for _, name in points]

    def owner(self, user: bytes) -> str:
        """Return the member that owns the user. Raises ValueError if the ring is empty."""
        for name in self.walk(user):
            return name
        raise ValueError("the ring is empty")

    def walk(self, user: bytes) -> Iterator[str]:
        """Yield all members: the owner, then its successors in the order of the ring."""
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
    """The instances of recent signals, by user."""

    def __init__(self, life_s: float, most: int) -> None:
        """Start empty.

        Args:
            life_s: Seconds for which a rank follows its signal.
            most: Largest number of remembered signals; the oldest are dropped.
        """
        self._life_s = life_s
        self._most = most
        # user -> (instance, expires_at), oldest first
        self._by_user: dict[bytes, tuple[str, float]] = {}

    def remember(self, user: bytes, name: str, now_at: float) -> None:
        """Let the ranks of a user follow a signal to this instance."""
        by_user = self._by_user
        by_user.pop(user, None)
        by_user[user] = (name, now_at + self._life_s)
        while len(by_user) > self._most or next(iter(by_user.values()))[1] <= now_at:
            del by_user[next(iter(by_user))]

    def find(self, user: bytes, now_at: float) -> str | None:
        """Return the instance of the user's signal; None = there is no recent one."""
        name, expires_at = self._by_user.get(user, (None, 0.0))
        return name if now_at < expires_at else None


def place(
    ring: Ring,
    user: bytes,
    takes: Callable[[str], bool],
    signalled: str | None = None,
    has_room: Callable[[str], bool] | None = None,
) -> Place | None:
    """Choose the instance for a request of a user; a pure function.

    In this order: the instance of the user's signal; the first in the ring's order that takes
    requests and has room; the first that takes requests.

    Args:
        ring: The instances.
        user: User of the request.
        takes: Whether an instance takes requests now.
        signalled: Instance of the user's signal, for a rank; None = there is none.
        has_room: Whether an instance is below its bounded load, for a signal; None = loads are not
            bounded.

    Returns:
        The place; None = no instance takes requests.
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
    """Return a member's largest number of requests: `factor` times its fair share.

    Args:
        total: Requests in flight at all members, without the new one.
        weight: Weight of the member.
        total_weight: Sum of all weights.
        factor: Load factor of at least 1, so that all members together admit the new request.
    """
    return math.ceil(factor * (total + 1) * weight / total_weight)


def routing_of(method: str, path: str) -> Routing | None:
    """Return the routing of an HTTP method and path (without query); None = any instance."""
    return next(
        (routing for on, at, routing in _ROUTES if on == method and at.fullmatch(path)), None
    )


def user_in(path: str) -> bytes:
    """Return the user at the end of a raw path (without query); empty = the path names none."""
    return unquote_to_bytes(path.removeprefix(OF_USER)) if path.startswith(OF_USER) else b""


def order(
    ring: Ring,
    routing: Routing | None,
    user: bytes,
    able: Collection[str],
    in_flight: Callable[[str], int],
    signalled: str | None = None,
    has_room: Callable[[str], bool] | None = None,
    *,
    most: int = MOST_TRIES,
) -> list[str]:
    """Order the instances for a request: the chosen one, then those to retry at.

    Args:
        ring: The instances.
        routing: Routing of the kind; None = any instance can answer.
        user: User of the request; empty = none: the less loaded of two random instances is chosen.
        able: Instances that take requests now.
        in_flight: Number of requests at an instance.
        signalled: Instance of the user's last signal; ignored for a signal.
        has_room: Whether an instance is below its bounded load, for a signal; None = loads are not
            bounded.
        most: Largest number of instances to return.
    """
    if routing not in BY_USER or not user:
        names = random.sample(tuple(able), min(most, len(able)))
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
    others = (name for name in ring.walk(user) if name != first.name and name in able)
    return [first.name, *islice(others, most - 1)]
