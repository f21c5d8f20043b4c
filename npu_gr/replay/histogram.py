"""Latencies in constant memory: HDR histograms of a whole run and of its slices of time, and a sample of points."""

from __future__ import annotations

import heapq
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash
from hdrh.histogram import HdrHistogram

MAX_S = 3600.0
MAX_SLICES = 240
MAX_POINTS = 1000

_UNITS_PER_S = 1e6  # counted in microseconds


class Latency:
    """A histogram of seconds.

    Percentiles are exact to a part in 1,000 (`digits` = 3) or in 100 (2). A value over an hour counts as an hour.
    """

    def __init__(self, digits: int = 3) -> None:
        self._digits = digits
        self._counts: Any = HdrHistogram(1, int(MAX_S * _UNITS_PER_S), digits)

    def __len__(self) -> int:
        return int(self._counts.get_total_count())

    def record(self, seconds: float) -> None:
        """Count one value."""
        self._counts.record_value(max(1, round(min(seconds, MAX_S) * _UNITS_PER_S)))

    def merge(self, other: Latency) -> None:
        """Count all values of `other` too."""
        self._counts.add(other._counts)

    def percentile_s(self, percent: float) -> float:
        """The percentile, 0 to 100, in seconds; NaN if nothing was recorded."""
        return float(self._counts.get_value_at_percentile(percent)) / _UNITS_PER_S if len(self) else float("nan")

    def cdf(self) -> Iterator[tuple[float, float]]:
        """(seconds, share of the values that are at most so long), ascending."""
        for step in self._counts.get_recorded_iterator():
            yield step.value_iterated_to / _UNITS_PER_S, step.total_count_to_this_value / len(self)

    def __getstate__(self) -> tuple[int, bytes]:
        return self._digits, self._counts.encode()

    def __setstate__(self, state: tuple[int, bytes]) -> None:
        self._digits = state[0]
        self._counts = HdrHistogram.decode(state[1])


@dataclass(slots=True)
class Slice:
    """The requests that were due in one slice of the run."""

    num_due: int = 0
    num_good: int = 0  # answered within the SLO
    outcomes: Counter[str] = field(default_factory=Counter)  # of the answers; "error" counts the requests without one
    latency: Latency = field(default_factory=lambda: Latency(2))

    def merge(self, other: Slice) -> None:
        """Count all requests of `other` too."""
        self.num_due += other.num_due
        self.num_good += other.num_good
        self.outcomes.update(other.outcomes)
        self.latency.merge(other.latency)


class Slices:
    """A run cut into at most `MAX_SLICES` slices of equal width; the width doubles when the run outgrows them."""

    def __init__(self) -> None:
        self.width_s = 0.25
        self.slices: list[Slice] = []

    def at(self, due_at: float) -> Slice:
        """The slice of an instant, in seconds after the run began."""
        while (index := int(max(due_at, 0.0) / self.width_s)) >= MAX_SLICES:
            self._halve()
        while len(self.slices) <= index:
            self.slices.append(Slice())
        return self.slices[index]

    def merge(self, other: Slices) -> None:
        """Count all requests of `other` too; `other` becomes as coarse as this one."""
        while self.width_s < other.width_s:
            self._halve()
        while other.width_s < self.width_s:
            other._halve()
        for index, part in enumerate(other.slices):
            self.at((index + 0.5) * self.width_s).merge(part)

    def _halve(self) -> None:
        self.width_s *= 2
        for left, right in zip(self.slices[::2], self.slices[1::2], strict=False):
            left.merge(right)
        self.slices = self.slices[::2]


class Point(NamedTuple):
    """One request of a run."""

    due_at: float  # seconds after the run began
    latency_s: float
    outcome: str  # or "error"


class Scatter:
    """A sample of a run's requests: all of them, or beyond `max_points` those with the smallest hashes.

    The hash is of the request alone, so it does not matter who counted it: parts merge to the sample of the whole.
    """

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self._max_points = max_points
        self._kept: list[tuple[int, Point]] = []  # a heap of minus the hash: the first one leaves first

    def add(self, number: int, point: Point) -> None:
        """Count one request: its number in the log, and what became of it."""
        self._keep(-xxhash.xxh3_64_intdigest(struct.pack("<qd", number, point.due_at)), point)

    def merge(self, other: Scatter) -> None:
        """Count all requests of `other` too."""
        for rank, point in other._kept:
            self._keep(rank, point)

    def points(self) -> list[Point]:
        """List the sample, by due time."""
        return sorted(point for _, point in self._kept)

    def _keep(self, rank: int, point: Point) -> None:
        if len(self._kept) < self._max_points:
            heapq.heappush(self._kept, (rank, point))
        else:
            heapq.heappushpop(self._kept, (rank, point))
