"""A running quantile in O(1) memory, which follows a value that drifts.

Source: stochastic approximation of a quantile (Robbins and Monro 1951), in the multiplicative form of
"frugal streaming" estimators: each sample moves the estimate up by `rate * q`, or down by `rate * (1 - q)`, of itself.
"""

from __future__ import annotations


class RunningQuantile:
    """Of positive samples. It settles where a share q of the samples lies below it."""

    def __init__(self, q: float, initial: float, rate: float = 0.05, *, is_measured: bool = False) -> None:
        """`initial`: a guess, or a measured value that single samples only move."""
        assert 0.0 < q < 1.0
        assert initial > 0.0
        self._q, self._rate = q, rate
        self.value = initial
        self.num_samples = int(1.0 / rate) if is_measured else 0

    def observe(self, sample: float) -> None:
        """Take a sample in. The first replaces the guess, the next few move faster than the later ones."""
        self.num_samples += 1
        if self.num_samples == 1:
            self.value = sample
            return
        rate = max(self._rate, 1.0 / self.num_samples)
        self.value *= 1.0 + rate * self._q if sample > self.value else 1.0 / (1.0 + rate * (1.0 - self._q))
