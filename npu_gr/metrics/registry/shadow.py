"""Metrics of the shadow, which scores ranks next to the served ranker, and of what watches it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from npu_gr.metrics.registry.families import Families


class ObservedDifference(Protocol):
    """What the metrics read of a compared rank."""

    @property
    def top_overlap(self) -> float: ...

    @property
    def correlation(self) -> float: ...

    @property
    def mean(self) -> float: ...


class ShadowMetrics:
    """Metrics of the shadow, and of the guard after its promotion."""

    def __init__(self, make: Families) -> None:
        self.scored = make.counter(
            "shadow_scored_total", "Ranks that the shadow has scored after the served ranker."
        ).inc
        self._skipped = make.counter(
            "shadow_skipped_total", "Ranks of its share that the shadow did not score.", ("reason",)
        )
        self._overlap = make.gauge(
            "shadow_top_overlap_ratio",
            "Share of the ten best items that served ranker and shadow have in common, newest "
            "ranks; NaN = none was compared.",
        )
        self._correlation = make.gauge(
            "shadow_score_correlation",
            "Correlation of the shadow's scores with those of the served ranker, newest ranks.",
        )
        self._difference = make.gauge(
            "shadow_score_difference",
            "Mean difference of the newer ranker's scores to the older one's, in standard "
            "deviations, newest ranks.",
        )
        self._open = make.gauge("shadow_open", "1 while a shadow scores ranks.")
        self._guarding = make.gauge(
            "guard_on", "1 while the guard watches a ranker that was promoted."
        )
        self._rollbacks = make.counter(
            "guard_rollbacks_total", "Promoted rankers that the guard rolled back.", ("reason",)
        )

    def skipped(self, reason: str) -> None:
        """Count a rank that was not scored."""
        self._skipped.labels(reason).inc()

    def rolled_back(self, reason: str) -> None:
        """Count a promoted ranker that the guard rolled back."""
        self._rollbacks.labels(reason).inc()

    def observe(
        self,
        skips: Iterable[str],
        rollbacks: Iterable[str],
        differences: Callable[[], Sequence[ObservedDifference]],
        is_open: Callable[[], bool],
        is_guarding: Callable[[], bool],
    ) -> None:
        """Export the state of the shadow, read at each scrape.

        Args:
            skips, rollbacks: All values of the labels `reason`.
            differences: Returns those of the newest compared ranks.
            is_open, is_guarding: Return whether there is a shadow, and whether the guard watches.
        """
        for reason in skips:
            self._skipped.labels(reason)
        for reason in rollbacks:
            self._rollbacks.labels(reason)

        def mean(read: Callable[[ObservedDifference], float]) -> float:
            values = [read(one) for one in differences()]
            return math.fsum(values) / len(values) if values else math.nan

        self._overlap.set_function(lambda: mean(lambda one: one.top_overlap))
        self._correlation.set_function(lambda: mean(lambda one: one.correlation))
        self._difference.set_function(lambda: mean(lambda one: one.mean))
        self._open.set_function(is_open)
        self._guarding.set_function(is_guarding)
