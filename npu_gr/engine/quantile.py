"""An estimate of a quantile in O(1) memory, which follows a value that drifts.

Source: stochastic approximation of a quantile (Robbins and Monro 1951), in the multiplicative form of
"frugal streaming" estimators: each sample moves the estimate up by `rate * q`, or down by `rate * (1 - q)`, of itself.
"""

from __future__ import annotations


class RunningQuantile:
    """The q-quantile of positive samples: it settles where a share q of the samples lies below it."""

    def __init__(self, q: float, initial: float, rate: float = 0.05, *, is_measured: bool = False) -> None:
        """Start from `initial`.

        Args:
            q: the share, within (0, 1).
            initial: the estimate before the first sample, > 0.
            rate: how far one sample moves the estimate, once there are many.
            is_measured: `initial` was measured, and single samples only move it. Otherwise it is a guess, which the
                first sample replaces.
        """
        assert 0.0 < q < 1.0
        assert initial > 0.0
        self._q = q
        self._rate = rate
        self.value = initial
        self.num_samples = int(1.0 / rate) if is_measured else 0

    def observe(self, sample: float) -> None:
        """Take a sample in. The first replaces a guess; the next few move the estimate more than later ones do."""
        self.num_samples += 1
        if self.num_samples == 1:
            self.value = sample
            return
        rate = max(self._rate, 1.0 / self.num_samples)
        self.value *= 1.0 + rate * self._q if sample > self.value else 1.0 / (1.0 + rate * (1.0 - self._q))
