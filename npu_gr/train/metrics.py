"""Ranking metrics, exact under ties, and how figures are printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

V = TypeVar("V")
F64 = npt.NDArray[np.float64]
NAN = float("nan")  # a figure that a model does not have


def auc(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.bool_]) -> float:
    """Compute the chance that a random positive scores above a random negative; a tie counts half.

    Args:
        scores: [n].
        labels: [n], True = positive.

    Returns:
        0 .. 1; NaN without a positive or without a negative.
    """
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return NAN
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # mean rank of equal scores, from 1
    wins = ranks[place][labels].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def auc_terms(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.bool_]) -> F64:
    """Compute what each event moves its AUC by: the influence function, which adds up to 0.

    The AUC's variance is the sum of squares of these, summed first over events that are not independent.
    Source: placement values of DeLong et al., Biometrics 1988, by clusters as in Obuchowski, Biometrics 1997.

    Args:
        scores: [n].
        labels: [n], True = positive; both kinds are among them.

    Returns:
        float64 [n].
    """
    terms = np.empty(len(scores))
    for mine, others, sign in ((labels, ~labels, 1.0), (~labels, labels, -1.0)):
        ascending = np.sort(scores[others])
        below = np.searchsorted(ascending, scores[mine], "left") + np.searchsorted(ascending, scores[mine], "right")
        share = below / (2 * len(ascending))  # of the others that it wins against; a tie counts half
        terms[mine] = sign * (share - share.mean()) / len(share)
    return terms


def rank_of(scores: npt.NDArray[np.floating], target: int) -> float:
    """Compute the target's rank, from 0, among the scores that are not -inf.

    A tie counts half, so a constant score ranks the target in the middle, as chance would.
    """
    own = scores[target]
    return float((scores > own).sum() + ((scores == own).sum() - 1) / 2)


def hits(ranks: F64, k: int) -> F64:
    """Whether each target is among the best k, 1 or 0. `ranks` count from 0."""
    return (ranks < k).astype(np.float64)


def hit_ratio(ranks: F64, k: int) -> float:
    """Compute HIT@k = HR@k: the share of targets among the best k. `ranks` count from 0."""
    return float(hits(ranks, k).mean())


def ndcg_of_each(ranks: F64, k: int) -> F64:
    """Compute NDCG@k of each target, which is the only relevant item: 1 / log2(rank + 2), or 0 beyond the best k."""
    return np.where(ranks < k, 1 / np.log2(ranks + 2), 0.0)


def ndcg(ranks: F64, k: int) -> float:
    """Compute NDCG@k of one relevant item each: the mean over the targets."""
    return float(ndcg_of_each(ranks, k).mean())


def known(figures: Mapping[str, V]) -> dict[str, V]:
    """Keep the figures that JSON has: no ranks of users, no scores of events, and no NaN."""
    return {name: value for name, value in figures.items() if name not in ("ranks", "liking") and value == value}


def cells(figures: Iterable[float]) -> list[str]:
    """Format figures for a table; NaN is a dash."""
    return ["-" if value != value else f"{value:.4f}" for value in figures]
