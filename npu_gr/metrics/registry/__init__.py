"""Every metric in one place: name, unit, help, labels, buckets. A test builds as many registries as it likes.

    requests    what every kind of `KINDS` has: admissions, latencies, stages, objectives
    rank, signal, generate, match, recommend    what single jobs count beyond that
    relay       prefixes and memory tiers
    door        who waits, who is inside, connections
    engine      the device's queue and passes
    keys        API keys
    store       the history store, and what stands in for it
    erasures    bytes of erased users that are left
    process     event loop, limits, version, recorder
    reloads     whether the last reload took effect
    front       processes that stand in front of the engine

Labels are bounded enums, never a user or an item. What changes by itself is read when it is scraped (`observe_*`), so
no gauge can say what was true before a reload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry

from npu_gr.core.kinds import MATCH
from npu_gr.metrics.registry.deltas import Delta, add
from npu_gr.metrics.registry.door import DoorMetrics
from npu_gr.metrics.registry.engine import EngineMetrics
from npu_gr.metrics.registry.erasures import ErasureMetrics
from npu_gr.metrics.registry.families import Families
from npu_gr.metrics.registry.front import FrontMetrics
from npu_gr.metrics.registry.jobs import GenerateMetrics, MatchMetrics, RankMetrics, RecommendMetrics, SignalMetrics
from npu_gr.metrics.registry.keys import KeyMetrics
from npu_gr.metrics.registry.process import ProcessMetrics
from npu_gr.metrics.registry.relay import RelayMetrics
from npu_gr.metrics.registry.reloads import ReloadMetrics
from npu_gr.metrics.registry.requests import JUDGED, RequestMetrics
from npu_gr.metrics.registry.store import SourceMetrics, StoreMetrics
from npu_gr.metrics.slo import Objective, Result


class Metrics:
    """All metrics of one instance, on one registry."""

    def __init__(
        self, registry: CollectorRegistry, objectives: Iterable[Objective], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Make every family.

        Args:
            registry: where `/metrics` reads.
            objectives: exactly one for each kind of request.
            clock: seconds that never go back.
        """
        make = Families(registry)
        self.registry = registry
        self.counted = make.counted  # counters and histograms by name
        self.requests = RequestMetrics(make, objectives, clock)
        self.rank = RankMetrics(make)
        self.signal = SignalMetrics(make)
        self.generate = GenerateMetrics(make)
        self.match = MatchMetrics(make)
        self.recommend = RecommendMetrics(make)
        self.relay = RelayMetrics(make)
        self.door = DoorMetrics(make)
        self.engine = EngineMetrics(make)
        self.keys = KeyMetrics(make)
        self.erasures = ErasureMetrics(make)
        self.store = StoreMetrics(make, self.erasures)
        self.source = SourceMetrics(make)
        self.process = ProcessMetrics(make)
        self.reloads = ReloadMetrics(make)
        self.front = FrontMetrics(make)

    def waiting(self) -> Mapping[str, float]:
        """Count the jobs that wait and the prefixes that are on their way, for the status page."""
        return {"jobs_waiting": self.engine.queue_depth()} | {
            name: read() for name, read in self.relay.in_flight.items()
        }

    def batch_done(self, kind: str, num_requests: int, num_rows: int) -> None:
        """Record a pass that requests of a kind shared; matches have a histogram of their own."""
        if kind == MATCH.name:
            self.match.pass_done(num_requests)
        else:
            self.engine.batch_done(num_requests, num_rows)

    def counted_elsewhere(self, deltas: Iterable[Delta]) -> None:
        """Add what another process of the instance counted. Raises ValueError where it is of another build."""
        add(self.counted, deltas, self._judged_elsewhere)

    def _judged_elsewhere(self, family: str, labels: tuple[str, ...], num: float) -> None:
        if family == JUDGED:
            self.requests.judged_elsewhere(labels[0], Result(labels[1]), int(num))

    def refresh(self) -> None:
        """Set what has to be set anew before a scrape."""
        self.generate.refresh()
