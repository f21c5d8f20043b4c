"""API keys: requests that were refused for theirs, and the keys in force."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from npu_gr.metrics.registry.families import Families


class KeyMetrics:
    """Refusals by reason, and gauges that are read when they are scraped."""

    def __init__(self, make: Families) -> None:
        self._refused = make.counter("api_keys_refused_total", "Requests refused for their API key.", ("reason",))
        self._in_force = make.gauge("api_keys", "API keys in force; expired ones are not.")
        self._is_stale = make.gauge("api_keys_file_stale", "1 while the key file cannot be used: older keys hold.")

    def observe(self, reasons: Iterable[str], in_force: Callable[[], int], is_stale: Callable[[], bool]) -> None:
        """Export what is true when it is scraped.

        Args:
            reasons: every value of the label `reason`.
            in_force: counts the keys.
            is_stale: whether the file cannot be used.
        """
        for reason in reasons:
            self._refused.labels(reason)
        self._in_force.set_function(in_force)
        self._is_stale.set_function(is_stale)

    def refused(self, reason: str) -> None:
        """Count a request."""
        self._refused.labels(reason).inc()
