"""Estimates: the cost model predicts the device seconds of a pass, and running quantiles follow what is measured.

The cost model is fitted at warm-up from a few timed passes; then it is arithmetic:

    T_full(n, c) = a0 + a1 n + a2 n^2 + c (b0 + b1 n)         n history tokens, c candidates

Source: the risk test of RelayGR's sequence-aware trigger (arXiv:2601.01712), in our reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds as a function of lengths; every coefficient is >= 0, so costs grow with n and c."""

    a0: float
    a1: float
    a2: float
    b0: float
    b1: float

    def pass_s(self, new_tokens: int, cached_tokens: int, num_candidates: int) -> float:
        """Predict a pass that computes `new_tokens` behind `cached_tokens`, and scores the candidates against both."""
        n = cached_tokens + new_tokens
        c = num_candidates
        history = self.a1 * new_tokens + self.a2 * (n * n - cached_tokens * cached_tokens)
        return self.a0 + history + c * (self.b0 + self.b1 * n)

    def full_s(self, num_tokens: int, num_candidates: int) -> float:
        """Predict a pass over the whole history and the candidates, with nothing cached: T_full(n, c)."""
        return self.pass_s(num_tokens, 0, num_candidates)

    def safe_tokens(self, num_tokens: int, num_candidates: int, budget_s: float) -> int:
        """Return the most tokens n <= num_tokens with full_s(n, c) <= budget_s; 0 if not even one fits."""
        if self.full_s(num_tokens, num_candidates) <= budget_s:
            return num_tokens
        low = 0
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

    The cost model was fitted on a device that did nothing else. Under load a pass takes this many
    times longer.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def observe(self, expected_s: float, took_s: float) -> None:
        """Take in the duration of a pass. A pass without an estimate changes nothing."""
        if expected_s > 0.0:
            ratio = min(max(took_s / expected_s, 1 / _MAX_RATIO), _MAX_RATIO)
            self.value += _WEIGHT * (ratio - self.value)


_WEIGHT = 0.1  # of one pass: the last ten or so count
_MAX_RATIO = 8.0  # one outlier (a pause of the process) must not move the average further than this


def fit(samples: Iterable[tuple[int, int, float]]) -> CostModel:
    """Fit the model to timed full passes: (num_tokens, num_candidates, seconds).

    See `fit_passes`.
    """
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
    # drop the most negative coefficient and fit again: plain, and enough for five of them
    while used:
        found, *_ = np.linalg.lstsq(
            rows[:, used] / seconds[:, None], np.ones_like(seconds), rcond=None
        )
        if (found >= 0).all():
            values[used] = found
            break
        used.pop(int(np.argmin(found)))
    return CostModel(*values.tolist())


class RunningQuantile:
    """The q-quantile of positive samples: it settles where a share q of the samples lies below it.

    It takes O(1) memory, and follows a value that drifts. Each sample moves the estimate up by
    `rate * q`, or down by `rate * (1 - q)`, of itself.

    Source: stochastic approximation of a quantile (Robbins and Monro 1951), in the multiplicative
    form of "frugal streaming" estimators.
    """

    def __init__(
        self, q: float, initial: float, rate: float = 0.05, *, is_measured: bool = False
    ) -> None:
        """Start from `initial`.

        Args:
            q: the share, within (0, 1).
            initial: the estimate before the first sample, > 0.
            rate: how far one sample moves the estimate, once there are many.
            is_measured: `initial` was measured, and single samples only move it. Otherwise it is a
                guess, which the first sample replaces.
        """
        assert 0.0 < q < 1.0
        assert initial > 0.0
        self._q = q
        self._rate = rate
        self.value = initial
        self.num_samples = int(1.0 / rate) if is_measured else 0

    def observe(self, sample: float) -> None:
        """Take a sample in. The first replaces a guess.

        The next few move the estimate more than later ones do.
        """
        self.num_samples += 1
        if self.num_samples == 1:
            self.value = sample
            return
        rate = max(self._rate, 1.0 / self.num_samples)
        self.value *= (
            1.0 + rate * self._q if sample > self.value else 1.0 / (1.0 + rate * (1.0 - self._q))
        )


# a running quantile needs positive samples: a pass that took no longer counts as this
LEAST_RESIDUAL_S = 1e-4


class PassCosts:
    """How long an engine's passes and copies take, and how long they wait: what the relay plans by."""

    def __init__(self, wait_s: Callable[[float], float]) -> None:
        """Know nothing yet.

        Args:
            wait_s: seconds that a request with this objective would wait for the device.
        """
        self.cost = CostModel(0.0, 0.0, 0.0, 0.0, 0.0)  # until the warm-up has fitted it
        self.copy_bytes_per_s = float("inf")  # until it is measured
        # The SLO objective in seconds from a request's arrival. It sets the request's place in the
        # queue; only the deadline, which is later, cancels the request.
        self.objective_s = float("inf")
        self._wait_s = wait_s
        self._residual_s = RunningQuantile(0.9, LEAST_RESIDUAL_S)

    @property
    def queue_s(self) -> float:
        """Seconds that a request arriving now would wait for the device."""
        return self._wait_s(self.objective_s)

    @property
    def residual_s(self) -> float:
        """P90 of (actual - predicted) seconds of recent full passes that shared the device with no other request."""
        return self._residual_s.value

    def observe_pass(self, expected_s: float, took_s: float) -> None:
        """Record how far the cost model was from a full pass that had the device to itself."""
        self._residual_s.observe(max(took_s - expected_s, LEAST_RESIDUAL_S))
