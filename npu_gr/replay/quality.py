"""Ranking quality of served scores: exact, and fair to ties.

Tied scores count as the mean over every order of them. So a model that cannot tell the candidates apart earns what
chance earns, whatever the order of the list. NaN (the service knows no such item) ranks last, tied with other NaNs.
Source of the tie-averaged DCG: McSherry and Najork, ECIR 2008.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import nan

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def ndcg_at(k: int, scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Expected DCG of the first k over that of the best order, binary gains, log2 discount; NaN without a positive.

    Args:
        k: at least 1.
        scores: [n], higher is better.
        labels: [n], 0 or 1.
    """
    values, positive = _read(scores, labels)
    if not positive.any():
        return nan
    discount = 1 / np.log2(np.arange(2, len(values) + 2))
    discount[k:] = 0
    dcg = sum(discount[start:stop].mean() * num_positive for start, stop, num_positive in _tied(values, positive))
    return float(dcg / discount[: int(positive.sum())].sum())


def _read(scores: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[F64, npt.NDArray[np.bool_]]:
    values = np.asarray(scores, np.float64)
    positive = np.asarray(labels) > 0
    assert values.ndim == 1
    assert values.shape == positive.shape
    return np.where(np.isnan(values), -np.inf, values), positive


def _tied(values: F64, positive: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Groups of equal scores, best first: (first place, last place + 1, positives among them)."""
    order = np.argsort(-values, kind="stable")
    ranked = values[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    num_positive = np.add.reduceat(positive[order].astype(np.int64), starts)
    yield from zip(starts.tolist(), [*starts[1:].tolist(), len(values)], num_positive.tolist(), strict=True)
