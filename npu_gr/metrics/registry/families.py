"""Make metric families: names with a prefix, fast counters and histograms, cached children."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from npu_gr.core.renamed import METRICS, UNTIL

M = TypeVar("M", bound=MetricWrapperBase)

# Histogram edges. Those of latencies gain one edge for each objective.
LATENCY_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
LAG_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
POWERS = tuple(2**n for n in range(13))
MAX_PENDING = 256  # most observations of a series that wait to be sorted into buckets


class QuickHistogram(Histogram):
    """A histogram that collects observations, and sorts many of them into buckets at once.

    A rank makes nine observations. Two locks and a search for each would cost more than all of its
    other metrics.

    Invariant: `fold` is called before the buckets are read, which a scrape does.
    """

    def _metric_init(self) -> None:
        super()._metric_init()
        self._pending: deque[float] = deque()  # observations that are not in a bucket yet

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count an observation, from any thread.

        Args:
            amount: Any number but NaN.
            exemplar: Labels of at most 128 characters together; not checked.
        """
        pending = self._pending
        pending.append(amount)
        if exemplar:
            bucket = self._buckets[bisect_left(self._upper_bounds, amount)]
            bucket.set_exemplar(Exemplar(exemplar, amount, time.time()))
        if len(pending) >= MAX_PENDING:
            self.fold()

    def fold(self) -> None:
        """Sort the pending observations into the buckets, from any thread."""
        taken = []
        with suppress(IndexError):  # none is left; other threads may take some too
            while True:
                taken.append(self._pending.popleft())
        if not taken:
            return
        places = np.searchsorted(self._upper_bounds, taken)
        for place, num in enumerate(np.bincount(places).tolist()):
            if num:
                self._buckets[place].inc(num)
        total = self._sum
        with total._lock:
            total._value = sum(taken, total._value)

    def _child_samples(self) -> Iterable[Sample]:
        self.fold()
        return super()._child_samples()


class QuickCounter(Counter):
    """A counter without the checks of labels and exemplars, which cost more than the count."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Add an amount.

        Raises:
            ValueError: the amount is negative.
        """
        if amount < 0:
            raise ValueError(f"a counter cannot decrease, got {amount}")
        value: Any = self._value
        with value._lock:
            value._value += amount


class OldName(Collector):
    """Exports a family once more, under the name that it had."""

    def __init__(self, registry: CollectorRegistry, name: str, family: MetricWrapperBase) -> None:
        self._name = name.removesuffix("_total")
        self._family = family
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Name the family without values: registering reads none."""
        return [Metric(self._name, "", str(self._family._type))]

    def collect(self) -> Iterable[Metric]:
        """Copy the samples, with the name replaced."""
        for metric in self._family.collect():
            new = self._family._name
            total = "_total" if metric.type == "counter" else ""
            text = f"Deprecated: use {new}{total}; goes with npu_gr {UNTIL}."
            old = Metric(self._name, text, metric.type, metric.unit)
            old.samples = [
                one._replace(name=self._name + one.name.removeprefix(new)) for one in metric.samples
            ]
            yield old


class Families:
    """Makes metric families named `npu_gr_*` on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def _named(self, family: M, name: str) -> M:
        for old, new in METRICS.items():
            if new == f"npu_gr_{name}":
                OldName(self.registry, old, family)
        return family

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        """Make a counter; `name` ends in `_total`."""
        made = QuickCounter(f"npu_gr_{name}", text, labels, registry=self.registry)
        return self._named(made, name)

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        """Make a gauge."""
        return self._named(Gauge(f"npu_gr_{name}", text, labels, registry=self.registry), name)

    def histogram(
        self, name: str, text: str, edges: Iterable[float], labels: tuple[str, ...] = ()
    ) -> Histogram:
        """Make a histogram with these upper bucket edges, in ascending order."""
        return QuickHistogram(
            f"npu_gr_{name}", text, labels, buckets=tuple(edges), registry=self.registry
        )


class ReadCounter(Collector):
    """A counter with one label whose values are read from elsewhere at each scrape."""

    _family: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        label: str,
        read: Callable[[], Mapping[str, float]],
    ) -> None:
        """Register the counter.

        Args:
            registry: Registry to collect it.
            name: Full name, of a counter without `_total`.
            text: Help text.
            label: Name of the label.
            read: Function that returns label value -> count.
        """
        self._name = name
        self._text = text
        self._label = label
        self._read = read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Read the values."""
        family = self._family(self._name, self._text, labels=(self._label,))
        for value, count in self._read().items():
            family.add_metric((value,), count)
        yield family


class ReadGauge(ReadCounter):
    """A gauge of the same form."""

    _family = GaugeMetricFamily


def children(family: M) -> Callable[..., M]:
    """Return a cached `family.labels`, because each lookup costs more than the count.

    Use it where label values are not known in advance; there must be few of them.
    """
    return cache(family.labels)
