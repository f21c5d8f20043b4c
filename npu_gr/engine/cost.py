"""Cost estimates: a model of the device seconds of a pass, and running quantiles of measurements.

The cost model is fitted at warm-up to a few timed passes:

    T_full(n, c) = a0 + a1 n + a2 n^2 + c (b0 + b1 n)         n history tokens, c candidates

Source: the risk test of RelayGR's sequence-aware trigger (arXiv:2601.01712), in our reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

# A truncated pass reads at least so many tokens, or as many as make a pass without a history longer
# by this ratio: leaving them out would save hardly any time, and without a history all users would
# get the same scores. The warm-up measures hardly shorter passes.
LEAST_TOKENS = 32
FREE_RATIO = 0.25


@dataclass(frozen=True, slots=True)
class CostModel:
    """Device seconds of a pass by its lengths. Coefficients are >= 0: costs grow with n and c."""

    a0: float
    a1: float
    a2: float
    b0: float
    b1: float
    # of longer histories, a pass computes and reads no more than these tokens; 0 = all
    most_tokens: int = 0

    def pass_s(self, new_tokens: int, cached_tokens: int, num_candidates: int) -> float:
        """Predict a pass that computes `new_tokens` after `cached_tokens` and scores candidates."""
        if self.most_tokens:
            new_tokens = min(new_tokens, self.most_tokens)
            cached_tokens = min(cached_tokens, self.most_tokens)
        n = cached_tokens + new_tokens
        c = num_candidates
        history = self.a1 * new_tokens + self.a2 * (n * n - cached_tokens * cached_tokens)
        return self.a0 + history + c * (self.b0 + self.b1 * n)

    def full_s(self, num_tokens: int, num_candidates: int) -> float:
        """Predict a pass with nothing cached: T_full(n, c)."""
        return self.pass_s(num_tokens, 0, num_candidates)

    def safe_tokens(self, num_tokens: int, num_candidates: int, budget_s: float) -> int:
        """Return how many of `num_tokens` to read: as many as fit the budget, but never none."""
        budget_s = max(budget_s, (1 + FREE_RATIO) * self.full_s(0, num_candidates))
        if self.full_s(num_tokens, num_candidates) <= budget_s:
            return num_tokens
        low = min(num_tokens, LEAST_TOKENS)
        high = num_tokens
        while high - low > 1:
            middle = (low + high) // 2
            if self.full_s(middle, num_candidates) <= budget_s:
                low = middle
            else:
                high = middle
        return low


class SlowdownEwma:
    """Moving average of (actual / estimated) seconds of passes.

    The cost model is fitted on an idle device. Under load a pass takes this many times longer.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def observe(self, expected_s: float, took_s: float) -> None:
        """Record the duration of a pass. A pass without an estimate changes nothing."""
        if expected_s > 0.0:
            ratio = min(max(took_s / expected_s, 1 / _MAX_RATIO), _MAX_RATIO)
            self.value += _WEIGHT * (ratio - self.value)


_WEIGHT = 0.1  # of one pass, so that about the last ten count
_MAX_RATIO = 8.0  # limits the effect of one outlier, e.g. a pause of the process


def fit(samples: Iterable[tuple[int, int, float]]) -> CostModel:
    """Fit the model to timed full passes: (num_tokens, num_candidates, seconds)."""
    return fit_passes((n, 0, c, seconds) for n, c, seconds in samples)


def fit_passes(samples: Iterable[tuple[int, int, int, float]]) -> CostModel:
    """Fit the model to timed passes: (new_tokens, cached_tokens, num_candidates, seconds).

    Least squares of the relative error (weighted by 1/seconds), with every coefficient >= 0.
    """
    new, cached, c, seconds = np.array(list(samples), np.float64).T
    n = new + cached
    rows = np.stack([np.ones_like(n), new, n * n - cached * cached, c, c * n], axis=1)
    used = list(range(rows.shape[1]))
    values = np.zeros(rows.shape[1])
    # Drop the most negative coefficient and fit again: enough for five coefficients.
    while used:
        found, *_ = np.linalg.lstsq(
            rows[:, used] / seconds[:, None], np.ones_like(seconds), rcond=None
        )
        if (found >= 0).all():
            values[used] = found
            break
        used.pop(int(np.argmin(found)))
    a0, a1, a2, b0, b1 = values.tolist()
    return CostModel(a0, a1, a2, b0, b1)


class RunningQuantile:
    """Estimate of the q-quantile of positive samples, in O(1) memory; it follows a drift.

    Each sample moves the estimate up by `rate * q` of itself, or down by `rate * (1 - q)`. It
    settles where a part q of the samples lies below it.

    Source: stochastic approximation of a quantile (Robbins and Monro 1951), in the multiplicative
    form of "frugal streaming" estimators.
    """

    def __init__(
        self, q: float, initial: float, rate: float = 0.05, *, is_measured: bool = False
    ) -> None:
        """Start from `initial`.

        Args:
            q: Part of the samples below the quantile, in (0, 1).
            initial: Estimate before the first sample, > 0.
            rate: Relative change of the estimate by one sample, once there are many.
            is_measured: True if `initial` was measured, so that samples only move it. Otherwise it
                is a guess, which the first sample replaces.
        """
        assert 0.0 < q < 1.0
        assert initial > 0.0
        self._q = q
        self._rate = rate
        self.value = initial
        self.num_samples = int(1.0 / rate) if is_measured else 0

    def observe(self, sample: float) -> None:
        """Record a sample. The first few move the estimate more than later ones."""
        self.num_samples += 1
        if self.num_samples == 1:
            self.value = sample
            return
        rate = max(self._rate, 1.0 / self.num_samples)
        self.value *= (
            1.0 + rate * self._q if sample > self.value else 1.0 / (1.0 + rate * (1.0 - self._q))
        )


# A running quantile needs positive samples: a pass not slower than predicted counts as this.
LEAST_RESIDUAL_S = 1e-4


class PassCosts:
    """Estimated times of an engine's passes, copies and waits, by which the relay plans."""

    def __init__(self, wait_s: Callable[[float], float]) -> None:
        """Start without measurements.

        Args:
            wait_s: Function that estimates the seconds for which a request with a given SLO
                objective (seconds) would wait for the device.
        """
        self.cost = CostModel(0.0, 0.0, 0.0, 0.0, 0.0)  # until the warm-up has fitted it
        self.copy_bytes_per_s = float("inf")  # until it is measured
        # SLO objective in seconds from a request's arrival. It sets the place in the queue; only
        # the deadline, which is later, cancels a request.
        self.objective_s = float("inf")
        self._wait_s = wait_s
        self._residual_s = RunningQuantile(0.9, LEAST_RESIDUAL_S)

    @property
    def queue_s(self) -> float:
        """Seconds that a request arriving now would wait for the device."""
        return self._wait_s(self.objective_s)

    @property
    def residual_s(self) -> float:
        """P90 of (actual - predicted) seconds of recent full passes that ran alone."""
        return self._residual_s.value

    def observe_pass(self, expected_s: float, took_s: float) -> None:
        """Record the error of the cost model for a full pass that ran alone on the device."""
        self._residual_s.observe(max(took_s - expected_s, LEAST_RESIDUAL_S))
