"""The door: who waits, who is inside, how fast work goes, and which connections there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum, auto
from functools import partial
from typing import Protocol

from npu_gr.core.kinds import KINDS
from npu_gr.metrics.registry.families import Families

PLACES = ("waiting", "inside", "outside")


class Ended(StrEnum):
    """Why the instance closed a connection."""

    IDLE = auto()  # nothing came
    SLOW = auto()  # a request did not become whole
    UNREAD = auto()  # the caller did not read its answer
    EVICTED = auto()  # it was idle, and a new one needed the place
    REFUSED = auto()  # it was new, and there was no place
    HANDSHAKE = auto()  # TLS came to nothing: another protocol, no certificate that we trust, too slow


class ObservedDoor(Protocol):
    """What can be read of a door."""

    def counts(self, kind: str) -> dict[str, int]:
        """Requests of a kind by where they are: `PLACES`."""
        ...

    def pace_s(self, kind: str) -> float:
        """Seconds a request of a kind."""
        ...

    def window(self, kind: str) -> int:
        """Requests of a kind that may be inside where there are no others."""
        ...


class DoorMetrics:
    """Gauges that are read when they are scraped, and connections that the instance closed."""

    def __init__(self, make: Families) -> None:
        self._requests = make.gauge("door_requests", "Requests at the door now.", ("kind", "place"))
        self._pace_s = make.gauge("door_pace_seconds", "Seconds a request, learnt from departures.", ("kind",))
        self._window = make.gauge("door_window_requests", "Requests of the kind that may be inside.", ("kind",))
        self._connections = make.gauge("connections", "Open connections.", ("state",))
        self._paused = make.gauge("connections_paused", "Connections that were refused and are not read for a moment.")
        self._lent = make.gauge("connections_lent", "Connections that a native thread reads.")
        self._refusals = make.gauge("door_refusals_per_second_limit", "That clients who retry at once are held to.")
        self._receiving = make.gauge("receiving_bytes", "Bodies that arrive or wait.")
        self.before_scrape: Callable[[], None] = lambda: None  # counts what is counted in bulk
        ended = make.counter("connections_ended_total", "Connections that the instance closed.", ("reason",))
        self._ended = {reason: ended.labels(reason.value) for reason in Ended}

    def observe(
        self,
        door: ObservedDoor,
        connections: Mapping[str, Callable[[], int]],
        paused: Callable[[], int],
        lent: Callable[[], int],
        receiving_bytes: Callable[[], int],
        refusals_per_s: Callable[[], float],
    ) -> None:
        """Export what is true when it is scraped.

        Args:
            door: whose places and paces.
            connections: for each state of a connection, counts those in it.
            paused: counts connections that are not read.
            lent: counts connections that the shedder reads.
            receiving_bytes: of bodies.
            refusals_per_s: that clients who retry at once are held to.
        """
        for kind in KINDS:
            for place in PLACES:
                self._requests.labels(kind, place).set_function(partial(_count, door, kind, place))
            self._pace_s.labels(kind).set_function(partial(door.pace_s, kind))
            self._window.labels(kind).set_function(partial(door.window, kind))
        for state, count in connections.items():
            self._connections.labels(state).set_function(count)
        self._paused.set_function(paused)
        self._lent.set_function(lent)
        self._receiving.set_function(receiving_bytes)
        self._refusals.set_function(refusals_per_s)

    def ended(self, reason: Ended) -> None:
        """Count a connection that the instance closed."""
        self._ended[reason].inc()


def _count(door: ObservedDoor, kind: str, place: str) -> int:
    return door.counts(kind)[place]
