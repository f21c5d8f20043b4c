"""Every metric in one place: name, unit, help, labels, buckets.

A test builds as many registries as it likes.

    requests    what every kind of `KINDS` has: admissions, latencies, stages, objectives; ranks; passes of the device
    jobs        what signals, generates, matches and recommends count beyond that; prefixes and memory tiers
    store       the history store, what stands in for it, bytes of erased users that are left
    process     admission, event loop, limits, version, recorder, reloads, API keys

Labels are bounded enums, never a user or an item. What changes by itself is read when it is scraped
(`observe_*`), so no gauge can say what was true before a reload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry

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
        """Make every family.

        Args:
            registry: where `/metrics` reads.
            objectives: exactly one for each kind of request.
            clock: seconds that never go back.
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
        self.door = AdmissionMetrics(make)
        self.engine = EngineMetrics(make)
        self.keys = KeyMetrics(make)
        self.erasures = ErasureMetrics(make)
        self.store = StoreMetrics(make, self.erasures)
        self.source = SourceMetrics(make)
        self.process = ProcessMetrics(make)
        self.reloads = ReloadMetrics(make)

    def waiting(self) -> Mapping[str, float]:
        """Count the jobs that wait and the prefixes that are on their way, for the status page."""
        return {"jobs_waiting": self.engine.queue_depth()} | {
            name: read() for name, read in self.relay.in_flight.items()
        }

    def refresh(self) -> None:
        """Set what has to be set anew before a scrape."""
        self.generate.refresh()
