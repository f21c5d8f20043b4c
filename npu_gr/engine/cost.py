"""What a pass costs in seconds: fitted at warm-up from a few measured passes, then pure arithmetic.

    T_full(n, c) = a0 + a1 n + a2 n^2 + c (b0 + b1 n)         n history tokens, c candidates

Source: `relaygr.md` 2.3 (our reading of RelayGR's risk test).
"""

from __future__ import annotations

from collections.abc import Iterable
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
        """A pass over the new tokens and the candidates, against those that are cached."""
        n, c = cached_tokens + new_tokens, num_candidates
        history = self.a1 * new_tokens + self.a2 * (n * n - cached_tokens * cached_tokens)
        return self.a0 + history + c * (self.b0 + self.b1 * n)

    def full_s(self, num_tokens: int, num_candidates: int) -> float:
        """A pass over the whole history and the candidates."""
        return self.pass_s(num_tokens, 0, num_candidates)

    def safe_tokens(self, num_tokens: int, num_candidates: int, budget_s: float) -> int:
        """The most tokens n <= num_tokens with full_s(n, c) <= budget_s; 0 where not even one fits."""
        if self.full_s(num_tokens, num_candidates) <= budget_s:
            return num_tokens
        low, high = 0, num_tokens
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.full_s(middle, num_candidates) <= budget_s else (low, middle)
        return low


class Pace:
    """How much longer passes take than their estimates, lately: the model is of a machine that does nothing else."""

    def __init__(self) -> None:
        self.value = 1.0

    def observe(self, expected_s: float, took_s: float) -> None:
        """A pass has ended; nothing is learnt from one without an estimate."""
        if expected_s > 0.0:
            self.value += _FOLLOW * (min(max(took_s / expected_s, 1 / _EXTREME), _EXTREME) - self.value)


_FOLLOW, _EXTREME = 0.1, 8.0


def fit(samples: Iterable[tuple[int, int, float]]) -> CostModel:
    """As `fit_passes`, of full passes: (num_tokens, num_candidates, seconds)."""
    return fit_passes((n, 0, c, seconds) for n, c, seconds in samples)


def fit_passes(samples: Iterable[tuple[int, int, int, float]]) -> CostModel:
    """Least squares over (new_tokens, cached_tokens, num_candidates, seconds), weighted by 1/seconds, all >= 0."""
    new, cached, c, seconds = np.array(list(samples), np.float64).T
    n = new + cached
    rows = np.stack([np.ones_like(n), new, n * n - cached * cached, c, c * n], axis=1)
    used = list(range(rows.shape[1]))
    values = np.zeros(rows.shape[1])
    while used:  # drop the most negative coefficient and fit again: plain, and enough for five of them
        found, *_ = np.linalg.lstsq(rows[:, used] / seconds[:, None], np.ones_like(seconds), rcond=None)
        if (found >= 0).all():
            values[used] = found
            break
        used.pop(int(np.argmin(found)))
    return CostModel(*values.tolist())
