"""How many requests may be served at once, found from their latency: arithmetic only, `limiter.py` enforces it.

A sample is a request's latency as a multiple of its objective, so ranks and generates count alike. With r the mean
of a window's samples and h the share of the objective that a request should take,

    gradient = clamp(h / r, 1/2, 1)
    limit'   = limit + smoothing * (limit * gradient + sqrt(limit) - limit)

Latency under h * objective: the limit grows by about sqrt(limit) a window, as far as it is used. Over it: the limit
shrinks in proportion, by half of `smoothing` at most. In between it settles where latency is near h * objective.

Source: the gradient limit of adaptive concurrency control (Netflix concurrency-limits, `style.md` 2.6), with the
objective in the place of the latency without load, which a cascade with an SLO knows and a proxy has to guess.
"""

from __future__ import annotations

import math


class GradientLimit:
    """The limit. Feed it one sample a request that ended; read `limit`."""

    def __init__(self, least: int, most: int, *, share: float = 0.7, smoothing: float = 0.2, window: int = 16) -> None:
        """Start at `most`: nothing is refused before there is a reason.

        Args:
            least, most: bounds of the limit.
            share: h, of the objective.
            smoothing: how much of a step is taken.
            window: samples a step.
        """
        assert 1 <= least <= most
        self._least, self._most, self._share, self._smoothing, self._window = least, most, share, smoothing, window
        self._value = float(most)
        self._sum, self._count, self._peak = 0.0, 0, 0

    @property
    def limit(self) -> int:
        """Requests at once."""
        return int(self._value)

    def observe(self, of_objective: float, inflight: int) -> None:
        """A request ended.

        Args:
            of_objective: its latency over its objective.
            inflight: requests being served when it ended, itself included.
        """
        self._sum, self._count = self._sum + of_objective, self._count + 1
        self._peak = max(self._peak, inflight)
        if self._count < self._window:
            return
        mean, peak = self._sum / self._count, self._peak
        self._sum, self._count, self._peak = 0.0, 0, 0
        gradient = min(1.0, max(0.5, self._share / max(mean, 1e-9)))
        # from what is really used: a limit far above it says nothing about the load that it would allow
        value = self._value if gradient == 1.0 else min(self._value, max(2.0 * peak, self._least))
        if gradient == 1.0 and peak < value / 2:
            return
        value += self._smoothing * (value * gradient + math.sqrt(value) - value)
        self._value = min(max(value, float(self._least)), float(self._most))
