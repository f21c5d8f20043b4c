"""Every metric of the router. Labels are instances and bounded enums, never a user.

Counters and histograms of prometheus_client take a lock and a method call for each bucket: together a tenth of what a
request costs the router. Here all counting is done by the event loop, so `RouterCounter` is a dict and `RouterTimes` a
list, and they become samples when they are scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from npu_gr.core.logs import num_lines_dropped
from npu_gr.metrics.registry.families import LAG_S, ReadCounter

LATENCY_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
_PREFIX = "npu_gr_router_"


class RouterCounter(Collector):
    """A counter by the values of its labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], registry: CollectorRegistry) -> None:
        """Register the counter.

        Args:
            name: without the prefix and `_total`.
            text: what is counted.
            labels: their names.
            registry: where it is scraped.
        """
        self._name = name
        self._text = text
        self._labels = labels
        self._counts = defaultdict[tuple[object, ...], int](int)
        registry.register(self)

    def add(self, *values: object) -> None:
        """Count one more. The label values become text when they are scraped."""
        self._counts[values] += 1

    def value(self, **labels: str) -> int:
        """Sum what was counted with these label values."""
        at = {self._labels.index(name): value for name, value in labels.items()}
        return sum(
            count for values, count in self._counts.items() if all(str(values[i]) == value for i, value in at.items())
        )

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Yield the family without samples."""
        yield CounterMetricFamily(_PREFIX + self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the family."""
        family = CounterMetricFamily(_PREFIX + self._name, self._text, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric([str(value) for value in values], count)
        yield family


class RouterTimes(Collector):
    """A histogram of seconds by the value of one label."""

    def __init__(self, name: str, text: str, label: str, registry: CollectorRegistry) -> None:
        """Register the histogram.

        Args:
            name: without the prefix, with its unit.
            text: what is timed.
            label: its name.
            registry: where it is scraped.
        """
        self._name = name
        self._text = text
        self._label = label
        self._counts: dict[str, list[int]] = {}  # in each bucket; the last one is over all edges
        self._sums_s = defaultdict[str, float](float)
        registry.register(self)

    def observe(self, took_s: float, value: str) -> None:
        """Count one more with this value of the label."""
        counts = self._counts.get(value)
        if counts is None:
            counts = self._counts[value] = [0] * (len(LATENCY_S) + 1)
        counts[bisect_left(LATENCY_S, took_s)] += 1
        self._sums_s[value] += took_s

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family without samples."""
        yield HistogramMetricFamily(_PREFIX + self._name, self._text, labels=(self._label,))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family; its buckets are cumulative."""
        family = HistogramMetricFamily(_PREFIX + self._name, self._text, labels=(self._label,))
        for value, counts in self._counts.items():
            edges = [*(str(edge) for edge in LATENCY_S), "+Inf"]
            buckets = [(edge, float(sum(counts[: i + 1]))) for i, edge in enumerate(edges)]
            family.add_metric([str(value)], buckets, self._sums_s[value])
        yield family


class InstanceGauge:
    """A gauge of each instance."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(_PREFIX + name, text, ("backend",), registry=registry)

    def set(self, instance: str, value: float) -> None:
        """Set the value of an instance."""
        self._gauge.labels(instance).set(value)

    def forget(self, instance: str) -> None:
        """Stop showing an instance."""
        self._gauge.remove_by_labels({"backend": instance})


class RouterMetrics:
    """All metrics of one router, on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> RouterCounter:
            return RouterCounter(name, text, labels, registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(_PREFIX + name, text, registry=registry)

        self.requests = counter(
            "requests", "Requests by kind and answered status; 0 = a gateway showed none", "kind", "status"
        )
        self.placed = counter("placed", "Requests sent to an instance, by what decided", "backend", "how")
        self.failures = counter("instance_failures", "Requests an instance failed", "backend", "why")
        self.opened = counter("instance_opened", "RouterTimes an instance was taken out", "backend", "why")
        self.retries = counter("retries", "Requests sent to a second instance, by reason; late = a hedge", "why")
        self.hedges = counter("hedges", "Requests that had a second try beside the first, by which answered", "winner")
        self.refused = counter("refused", "Requests that never reached an instance", "kind", "why")
        self.keys_refused = counter("api_keys_refused", "Requests refused for their API key, operators' too", "reason")
        self.cancelled = counter("cancelled", "Requests whose client left", "kind")
        self.refused_connections = counter("refused_connections", "Connections over limits.max_connections")
        self.up = InstanceGauge("instance_up", "1 = gets requests of its users", registry)
        self.gone = InstanceGauge("instance_gone", "1 = nobody listens at its address", registry)
        self.share = InstanceGauge("instance_share_ratio", "Share of its users that an instance gets", registry)
        self.instance_in_flight = InstanceGauge("instance_in_flight", "Requests at an instance", registry)
        self.panic = gauge("panic", "1 = too few instances are well, so health is not believed")
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
        self.keys = gauge("api_keys", "API keys in force; expired ones are not")
        self.keys_stale = gauge("api_keys_file_stale", "1 = the key file cannot be used: older keys hold")
        self.kept_bytes = gauge("kept_bytes", "Bytes of bodies that arrive or are kept")
        self.max_kept_bytes = gauge("max_kept_bytes", "limits.max_kept_bytes")
        self._expires_at = Gauge(
            "npu_gr_tls_certificate_expires_at_seconds",
            "When a certificate in force expires, in unix seconds",
            ("of",),
            registry=registry,
        )
        self.connections = gauge("connections", "Connections of clients")
        self.max_connections = gauge("max_connections", "limits.max_connections")
        self.in_flight = gauge("in_flight", "Requests in the router")
        self.duration_s = RouterTimes(
            "request_duration_seconds",
            "From a request's first byte to the last of its answer, by kind",
            "kind",
            registry,
        )
        self.added_s = RouterTimes(
            "added_seconds", "Of a request's duration what it did not wait for its last instance", "kind", registry
        )
        self.instance_s = RouterTimes(
            "instance_duration_seconds", "From sending to the answer's head, by instance", "backend", registry
        )

    def observe_certificate(self, of: str, read: Callable[[], float]) -> None:
        """Export when a certificate in force expires, read at each scrape: the files are followed."""
        self._expires_at.labels(of).set_function(read)

    def placed_at(self, instance: str) -> int:
        """Count the requests that were sent to an instance since the start."""
        return self.placed.value(backend=instance)

    def forget(self, instance: str) -> None:
        """Stop showing the gauges of an instance that has left; its counters stay."""
        for gauge in (self.up, self.gone, self.share, self.instance_in_flight):
            gauge.forget(instance)
