"""Metrics of the history store and of the feature source: calls, breakers, disk, fallbacks.

`ErasureMetrics` shows erased users whose bytes are still on disk. No request can find these users,
so nothing else would show it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from npu_gr.core.errors import StoreFault
from npu_gr.core.history import HistorySource, StoreHealth, UserFeaturesSource
from npu_gr.metrics.registry.families import LATENCY_S, Families

PLACES = ("store", "recordings")
RUNS = ("ok", "held", "failed")  # held = blocked by a reader, or by a file that is being written

_NONE: Mapping[str, int] = Counter()


class ErasureMetrics(Collector):
    """Pending erasures and the runs that remove erased bytes, read at each scrape."""

    def __init__(self, make: Families, clock: Callable[[], float] = time.time) -> None:
        """Make the families.

        Args:
            make: Families of the registry to use.
            clock: Clock, in unix seconds.
        """
        self._clock = clock
        self._pending = make.gauge(
            "erasure_pending_seconds",
            "Age of the oldest erasure whose bytes are still stored; 0 = there is none.",
            ("place",),
        )
        self._runs: dict[str, Callable[[], Mapping[str, int]]] = dict.fromkeys(
            PLACES, lambda: _NONE
        )
        for place in PLACES:
            self._pending.labels(place).set(0)
        make.registry.register(self)

    def observe(
        self,
        place: str,
        erased_at: Callable[[], float | None],
        runs: Callable[[], Mapping[str, int]],
    ) -> None:
        """Export a place.

        Args:
            place: One of `PLACES`.
            erased_at: Function that returns the unix seconds of the oldest erasure whose bytes are
                still in that place; None = there is none.
            runs: Function that returns the number of runs by result, see `RUNS`.
        """

        def age_s() -> float:
            at = erased_at()
            return 0.0 if at is None else max(0.0, self._clock() - at)

        self._pending.labels(place).set_function(age_s)
        self._runs[place] = runs

    def collect(self) -> Iterable[Metric]:
        """Read the runs."""
        family = CounterMetricFamily(
            "npu_gr_erasure_runs",
            "Runs that remove the bytes of erased users.",
            labels=("place", "result"),
        )
        for place, read in self._runs.items():
            runs = read()
            for result in RUNS:
                family.add_metric((place, result), runs.get(result, 0))
        yield family


OPERATIONS = ("append", "read", "erase")
RESULTS = ("ok", "rejected", *(fault.value for fault in StoreFault))
SOURCES = (HistorySource.LAST_KNOWN.value, HistorySource.NOTHING.value, "failed")


class LaneFigures(Protocol):
    """The figures of one bulkhead, e.g. that of reads."""

    @property
    def is_open(self) -> bool:
        """Whether the circuit breaker is open, so that calls fail at once."""

    @property
    def num_calls(self) -> int:
        """Calls in flight."""

    @property
    def waiting(self) -> int:
        """Calls in the queue."""


class SourceMetrics:
    """Metrics of the source of users' features."""

    def __init__(self, make: Families) -> None:
        calls = make.counter(
            "feature_source_calls_total", "Fetches of users' features by result.", ("result",)
        )
        self._calls = {result: calls.labels(result) for result in RESULTS}
        self._took_s = make.histogram(
            "feature_source_call_duration_seconds",
            "Time of a fetch of users' features, with its wait in the queue.",
            LATENCY_S,
        )
        reads = make.counter(
            "user_features_total",
            "Users whose features were not in the request, by where they came from.",
            ("source",),
        )
        self._reads = {source: reads.labels(source) for source in UserFeaturesSource}
        self._open = make.gauge(
            "feature_source_breaker_open", "1 while the circuit breaker of fetches is open."
        )
        self._in_flight = make.gauge(
            "feature_source_calls_in_flight", "Fetches that are in flight now."
        )
        self._waiting = make.gauge(
            "feature_source_calls_waiting", "Fetches that wait in the queue."
        )

    def called(self, operation: str, result: str, took_s: float) -> None:
        """Count a fetch; `result` is one of `RESULTS`."""
        self._calls[result].inc()
        self._took_s.observe(took_s)

    def read(self, source: UserFeaturesSource) -> None:
        """Count a user whose features were looked up."""
        self._reads[source].inc()

    def observe(self, lane: LaneFigures) -> None:
        """Export the state of the fetches, read at each scrape."""
        self._open.set_function(partial(getattr, lane, "is_open"))
        self._in_flight.set_function(partial(getattr, lane, "num_calls"))
        self._waiting.set_function(partial(getattr, lane, "waiting"))


class StoreMetrics:
    """Metrics of the history store's calls, fallbacks, disk and damage."""

    def __init__(self, make: Families, erasures: ErasureMetrics) -> None:
        self._erasures = erasures
        calls = make.counter(
            "store_calls_total", "Calls of the history store by result.", ("operation", "result")
        )
        self._calls = {
            (of, result): calls.labels(of, result) for of in OPERATIONS for result in RESULTS
        }
        took = make.histogram(
            "store_call_duration_seconds",
            "Time of a call of the history store, with its wait in the queue.",
            LATENCY_S,
            ("operation",),
        )
        self._took_s = {of: took.labels(of) for of in OPERATIONS}
        degraded = make.counter(
            "history_degraded_total",
            "Histories that the store failed to return, by what was used instead.",
            ("source", "fault"),
        )
        self._degraded = {
            (source, fault): degraded.labels(source, fault)
            for source in SOURCES
            for fault in StoreFault
        }
        self.late_events = make.counter(
            "history_late_events_total",
            "Events that were written or read after newer ones of their user, and sorted.",
        )
        self._open = make.gauge(
            "store_breaker_open", "1 while the circuit breaker is open.", ("store", "lane")
        )
        self._in_flight = make.gauge(
            "store_calls_in_flight", "Calls that are in flight now.", ("lane",)
        )
        self._waiting = make.gauge(
            "store_calls_waiting", "Calls that wait in the queue.", ("lane",)
        )
        self._free = make.gauge(
            "store_disk_free_bytes", "Free bytes of the file system of the embedded store."
        )
        self._size = make.gauge(
            "store_disk_bytes", "Size of the file system of the embedded store."
        )
        self._damaged = make.gauge(
            "store_damaged_places", "Damaged entries that the check at the start found."
        )

    def called(self, operation: str, result: str, took_s: float) -> None:
        """Count a call; `result` is one of `RESULTS`."""
        self._calls[operation, result].inc()
        self._took_s[operation].observe(took_s)

    def degraded(self, source: str, fault: StoreFault) -> None:
        """Count a history that the store failed to return; `source` is one of `SOURCES`."""
        self._degraded[source, fault].inc()

    def observe(self, kind: str, lanes: Mapping[str, LaneFigures], health: StoreHealth) -> None:
        """Export the state of a store, read at each scrape without a disk access.

        Args:
            kind: "embedded" or "redis".
            lanes: Value of the label `lane` (reads, writes) -> figures of its bulkhead.
            health: Health of the store.
        """
        for name, lane in lanes.items():
            self._open.labels(kind, name).set_function(partial(getattr, lane, "is_open"))
            self._in_flight.labels(name).set_function(partial(getattr, lane, "num_calls"))
            self._waiting.labels(name).set_function(partial(getattr, lane, "waiting"))
        self._free.set_function(_or_nan(lambda: health.free_bytes))
        self._size.set_function(_or_nan(lambda: health.disk_bytes))
        self._damaged.set_function(_or_nan(lambda: health.damaged))
        self._erasures.observe("store", lambda: health.erased_at, lambda: health.overwrites)


def _or_nan(read: Callable[[], int | None]) -> Callable[[], float]:
    def number() -> float:
        value = read()
        return float("nan") if value is None else float(value)

    return number
