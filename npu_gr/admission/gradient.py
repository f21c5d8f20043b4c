"""Find from latencies how many requests may be in flight at once. Arithmetic only: `limiter.py` enforces the limit.

A sample is a request's latency divided by its objective, so ranks and generates count alike. r is the mean of a window
of samples; h is the share of the objective that a request should take.

    gradient = clamp(h / r, 1/2, 1)
    limit'   = limit + smoothing * (limit * gradient + sqrt(limit) - limit)

    r below h   the limit grows by about sqrt(limit) a window, as far as requests use it
    r above h   the limit shrinks in proportion, at most by half of `smoothing`

The limit settles where latencies are near h objectives.

Source: the gradient limit of adaptive concurrency control (Netflix concurrency-limits). Ours divides by the objective
instead of the latency without load: a cascade with an SLO knows the former, a proxy has to guess the latter.
"""

from __future__ import annotations

import math


class GradientLimit:
    """The limit in force. Feed it one sample for each request that ended; read `limit`."""

    def __init__(self, least: int, most: int, *, share: float = 0.7, smoothing: float = 0.2, window: int = 16) -> None:
        """Start at `most`: nothing is refused before there is a reason.

        Args:
            least, most: bounds of the limit.
            share: h, of the objective.
            smoothing: how much of a step is taken.
            window: samples a step.
        """
        assert 1 <= least <= most
        self._least = least
        self._most = most
        self._share = share
        self._smoothing = smoothing
        self._window = window
        self._value = float(most)
        self._start_window()

    def _start_window(self) -> None:
        self._sum = 0.0  # of samples
        self._count = 0
        self._peak = 0  # most requests in flight

    @property
    def limit(self) -> int:
        """Requests at once."""
        return int(self._value)

    def observe(self, of_objective: float, inflight: int) -> None:
        """Record a request that ended.

        Args:
            of_objective: its latency over its objective.
            inflight: requests being served when it ended, itself included.
        """
        self._sum += of_objective
        self._count += 1
        self._peak = max(self._peak, inflight)
        if self._count < self._window:
            return
        mean = self._sum / self._count
        peak = self._peak
        self._start_window()
        gradient = min(1.0, max(0.5, self._share / max(mean, 1e-9)))
        # shrink from what is really used: a limit far above it says nothing about the load that it would allow
        value = self._value if gradient == 1.0 else min(self._value, max(2.0 * peak, self._least))
        if gradient == 1.0 and peak < value / 2:
            return
        value += self._smoothing * (value * gradient + math.sqrt(value) - value)
        self._value = min(max(value, float(self._least)), float(self._most))
