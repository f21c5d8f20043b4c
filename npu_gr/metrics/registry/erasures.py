"""Erasures that are not at their end: files that still hold bytes of erased users, and the runs that remove them.

Nothing finds an erased user from the answer on, so nothing but these figures shows that bytes are left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from npu_gr.metrics.registry.families import Families

PLACES = ("store", "recordings")
RESULTS = ("ok", "held", "failed")  # held: by a reader, or by a file that is being written

_NONE: Mapping[str, int] = Counter()


class ErasureMetrics(Collector):
    """Read at each scrape from those who remove the bytes."""

    def __init__(self, make: Families, clock: Callable[[], float] = time.time) -> None:
        """Make the families.

        Args:
            make: on which registry.
            clock: unix seconds.
        """
        self._clock = clock
        self._pending = make.gauge(
            "erasure_pending_seconds", "Age of the oldest erasure whose bytes are left; 0 = none is.", ("place",)
        )
        self._runs: dict[str, Callable[[], Mapping[str, int]]] = dict.fromkeys(PLACES, lambda: _NONE)
        for place in PLACES:
            self._pending.labels(place).set(0)
        make.registry.register(self)

    def observe(self, place: str, erased_at: Callable[[], float | None], runs: Callable[[], Mapping[str, int]]) -> None:
        """Export a place.

        Args:
            place: one of `PLACES`.
            erased_at: unix seconds of the oldest erasure whose bytes are left there; None = none is.
            runs: that removed bytes, by their result.
        """

        def age_s() -> float:
            at = erased_at()
            return 0.0 if at is None else max(0.0, self._clock() - at)

        self._pending.labels(place).set_function(age_s)
        self._runs[place] = runs

    def collect(self) -> Iterable[Metric]:
        """Read the runs."""
        family = CounterMetricFamily(
            "npu_gr_erasure_runs", "Runs that remove the bytes of erased users.", labels=("place", "result")
        )
        for place, read in self._runs.items():
            runs = read()
            for result in RESULTS:
                family.add_metric((place, result), runs.get(result, 0))
        yield family
