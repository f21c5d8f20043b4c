"""All metrics, each with its name, unit, help, labels and buckets.

    requests    metrics of every kind of request (admissions, latencies, stages, objectives), of
                ranks, and of passes on the device
    jobs        metrics of signals, generates, matches and recommends; prefixes and memory tiers
    shadow      a ranker that scores next to the served one, and the guard of its promotion
    store       the history store, its fallbacks, and erased bytes that are still on disk
    process     admission, event loop, limits, version, recorder, reloads, API keys

Labels are bounded enums, never a user or an item. Gauges of changing state are read at each scrape
(`observe_*`), so that no gauge keeps a value from before a reload. Any number of registries can be
built in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry

from npu_gr.core.health import Health
from npu_gr.metrics.registry.families import Families
from npu_gr.metrics.registry.jobs import (
    GenerateMetrics,
    MatchMetrics,
    RecommendMetrics,
    RelayMetrics,
    SignalMetrics,
)
from npu_gr.metrics.registry.process import (
    AdmissionMetrics,
    KeyMetrics,
    ProcessMetrics,
    ReloadMetrics,
)
from npu_gr.metrics.registry.requests import EngineMetrics, RankMetrics, RequestMetrics
from npu_gr.metrics.registry.shadow import ShadowMetrics
from npu_gr.metrics.registry.store import ErasureMetrics, SourceMetrics, StoreMetrics
from npu_gr.metrics.slo import Objective


class Metrics:
    """All metrics of one instance, on one registry."""

    def __init__(
        self,
        registry: CollectorRegistry,
        objectives: Iterable[Objective],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make all families.

        Args:
            registry: Registry that `/metrics` shows.
            objectives: Exactly one objective for each kind of request.
            clock: Monotonic clock, in seconds.
        """
        make = Families(registry)
        self.registry = registry
        self.requests = RequestMetrics(make, objectives, clock)
        self.rank = RankMetrics(make)
        self.signal = SignalMetrics(make)
        self.generate = GenerateMetrics(make)
        self.match = MatchMetrics(make)
        self.recommend = RecommendMetrics(make)
        self.relay = RelayMetrics(make)
        self.admission = AdmissionMetrics(make)
        self.engine = EngineMetrics(make)
        self.keys = KeyMetrics(make)
        self.erasures = ErasureMetrics(make)
        self.store = StoreMetrics(make, self.erasures)
        self.source = SourceMetrics(make)
        self.process = ProcessMetrics(make)
        self.health = Health()
        self.process.observe_health(self.health)
        self.reloads = ReloadMetrics(make)
        self.shadow = ShadowMetrics(make)

    def waiting(self) -> Mapping[str, float]:
        """Return the numbers of waiting jobs and of prefixes in flight, for the status page."""
        return {"jobs_waiting": self.engine.queue_depth()} | {
            name: read() for name, read in self.relay.in_flight.items()
        }

    def refresh(self) -> None:
        """Update the metrics that are not read at a scrape; call it before each scrape."""
        self.generate.refresh()
