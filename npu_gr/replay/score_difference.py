"""How much two rankers' scores of one request differ."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from npu_gr.core.arrays import F32

TOP = 10  # items of the top-k overlap


class ScoreDifference(NamedTuple):
    """Differences over the items that both rankers know."""

    drift: float  # the largest difference, over the standard deviation of the first's scores
    max_abs: float  # in the scores' own unit
    top_overlap: float  # share of the `TOP` best items that is in both
    has_same_first: bool
    correlation: float  # Pearson's, -1 to 1; 0 where either ranker scores everything alike
    mean: float  # of second - first, over the standard deviation of the first's scores


SAME = ScoreDifference(0.0, 0.0, 1.0, True, 1.0, 0.0)


def score_difference(a: F32, b: F32) -> ScoreDifference:
    """Compare the scores of one request and task; `SAME` if no item has both.

    Args:
        a, b: [n] scores; NaN = the ranker does not know the item.
    """
    known = ~(np.isnan(a) | np.isnan(b))
    left = a[known].astype(np.float64)
    right = b[known].astype(np.float64)
    if not len(left):
        return SAME
    gap = float(np.abs(left - right).max())
    spread, other = float(left.std()), float(right.std())
    best = [np.argsort(-row, kind="stable")[:TOP] for row in (left, right)]
    shared = len(np.intersect1d(best[0], best[1])) / len(best[0])
    product = float(((left - left.mean()) * (right - right.mean())).mean())
    return ScoreDifference(
        drift=gap / spread if spread else (0.0 if not gap else math.inf),
        max_abs=gap,
        top_overlap=shared,
        has_same_first=bool(best[0][0] == best[1][0]),
        correlation=product / (spread * other) if spread and other else float(not gap),
        mean=float(right.mean() - left.mean()) / spread if spread else 0.0,
    )
