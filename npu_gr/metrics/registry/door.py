"""Admission: who waits, who is inside, how fast work goes, how many rejections and bytes wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from npu_gr.core.kinds import KINDS
from npu_gr.metrics.registry.families import Families

PLACES = ("waiting", "inside", "outside")


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
    """Gauges that are read when they are scraped."""

    def __init__(self, make: Families) -> None:
        self._requests = make.gauge("door_requests", "Requests at the door now.", ("kind", "place"))
        self._pace_s = make.gauge("door_pace_seconds", "Seconds a request, learnt from departures.", ("kind",))
        self._window = make.gauge("door_window_requests", "Requests of the kind that may be inside.", ("kind",))
        self._paused = make.gauge("rejections_paused", "Rejections that wait, so that clients who retry are paced.")
        self._receiving = make.gauge("receiving_bytes", "Bodies that have arrived and are not answered.")

    def observe(
        self,
        door: ObservedDoor,
        paused: Callable[[], int],
        receiving_bytes: Callable[[], int],
    ) -> None:
        """Export what is true when it is scraped.

        Args:
            door: whose places and paces.
            paused: counts rejections that wait.
            receiving_bytes: of bodies.
        """
        for kind in KINDS:
            for place in PLACES:
                self._requests.labels(kind, place).set_function(partial(_count, door, kind, place))
            self._pace_s.labels(kind).set_function(partial(door.pace_s, kind))
            self._window.labels(kind).set_function(partial(door.window, kind))
        self._paused.set_function(paused)
        self._receiving.set_function(receiving_bytes)


def _count(door: ObservedDoor, kind: str, place: str) -> int:
    return door.counts(kind)[place]
