"""Every metric of the router. Labels are instances and bounded enums, never a user."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from npu_gr.core.logs import num_lines_dropped
from npu_gr.metrics.registry.families import LAG_S, ReadCounter

LATENCY_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)


class RouterMetrics:
    """All metrics of one router, on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, labels: tuple[str, ...]) -> _Children:
            return _Children(Counter(f"npu_gr_router_{name}", text, labels, registry=registry))

        def gauge(name: str, text: str, labels: tuple[str, ...]) -> _Children:
            return _Children(Gauge(f"npu_gr_router_{name}", text, labels, registry=registry))

        self.requests = counter("requests_total", "Requests by kind and answered status", ("kind", "status"))
        self.placed = counter("placed_total", "Requests sent to an instance, by what decided", ("backend", "how"))
        self.failures = counter("instance_failures_total", "Requests an instance failed", ("backend", "why"))
        self.opened = counter("instance_opened_total", "Times an instance was taken out", ("backend", "why"))
        self.retries = counter("retries_total", "Requests sent to the successor, by reason", ("why",))
        self.refused = counter("refused_total", "Requests that never reached an instance", ("why",))
        self.cancelled = counter("cancelled_total", "Requests whose client left", ("kind",))
        self.up = gauge("instance_up", "1 = gets requests of its users", ("backend",))
        self.share = gauge("instance_share_ratio", "Share of its users that an instance gets", ("backend",))
        self.instance_in_flight = gauge("instance_in_flight", "Requests at an instance", ("backend",))
        self.loop_lag_s = Histogram(
            "npu_gr_router_event_loop_lag_seconds",
            "How late timers fire, of all instants alike",
            buckets=LAG_S,
            registry=registry,
        )
        self.loop_freezes = Counter(
            "npu_gr_router_event_loop_freezes_total", "Times that the event loop stood still", registry=registry
        )
        ReadCounter(
            registry, "npu_gr_router_log_lines_dropped", "Log lines that nobody took", "stream", num_lines_dropped
        )
        self.connections = Gauge("npu_gr_router_connections", "Connections of clients", registry=registry)
        self.in_flight = Gauge("npu_gr_router_in_flight", "Requests in the router", registry=registry)
        self.duration_s = _Children(
            Histogram(
                "npu_gr_router_request_duration_seconds",
                "From a request's first byte to the last of its answer, by kind",
                ("kind",),
                buckets=LATENCY_S,
                registry=registry,
            )
        )
        self.instance_s = _Children(
            Histogram(
                "npu_gr_router_instance_duration_seconds",
                "From sending to the answer's head, by instance",
                ("backend",),
                buckets=LATENCY_S,
                registry=registry,
            )
        )

    def placed_at(self, instance: str) -> int:
        """Count the requests that were sent to an instance since the start."""
        samples = (sample for family in self.placed.collect() for sample in family.samples)
        counted = (s.value for s in samples if s.name.endswith("_total") and s.labels["backend"] == instance)
        return int(sum(counted))

    def forget(self, instance: str) -> None:
        """Stop showing the gauges of an instance that has left; its counters stay."""
        for children in (self.up, self.share, self.instance_in_flight):
            children.forget(instance)


class _Children:
    """A metric's children by label values, remembered: finding one with `labels()` costs more than counting."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._child = cache(lambda *labels: metric.labels(*labels))

    def __call__(self, *labels: str) -> Any:
        return self._child(*labels)

    def collect(self) -> Any:
        return self._metric.collect()

    def forget(self, *labels: str) -> None:
        self._child.cache_clear()
        try:
            self._metric.remove(*labels)
        except KeyError:
            return  # it never had one
