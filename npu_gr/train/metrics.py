"""Ranking metrics, exact under ties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def auc(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.bool_]) -> float:
    """Chance that a random positive scores above a random negative; a tie counts half. NaN without both."""
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # mean rank of equal scores, from 1
    wins = ranks[place][labels].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def rank_of(scores: npt.NDArray[np.floating], target: int) -> float:
    """Place of the target, from 0, among scores not -inf; ties count half, so a constant scores as chance does."""
    own = scores[target]
    return float((scores > own).sum() + ((scores == own).sum() - 1) / 2)


def hit_ratio(ranks: npt.NDArray[np.float64], k: int) -> float:
    """Share of targets among the best k."""
    return float((ranks < k).mean())


def ndcg(ranks: npt.NDArray[np.float64], k: int) -> float:
    """Mean of 1 / log2(rank + 2) of the targets among the best k, 0 for the others: NDCG of one relevant item."""
    return float(np.where(ranks < k, 1 / np.log2(ranks + 2), 0).mean())
