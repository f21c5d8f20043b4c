"""Ranking metrics, exact under ties, and confidence intervals of the difference of two models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64

V = TypeVar("V")
F64 = npt.NDArray[np.float64]
NAN = float("nan")  # a figure that a model does not have


def auc(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.bool_]) -> float:
    """Compute the chance that a random positive scores above a random negative; a tie counts half.

    Args:
        scores: [n] any real numbers.
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
    """Compute the influence of each event on the AUC, float64 [n]. The influences add up to 0.

    The AUC's variance is the sum of their squares. Influences of events that depend on each other,
    such as those of one user, are added up before they are squared.

    Source: placement values of DeLong et al., Biometrics 1988, by clusters as in Obuchowski,
    Biometrics 1997.

    Args:
        scores: [n] any real numbers.
        labels: [n], True = positive; at least one of each.
    """
    terms = np.empty(len(scores))
    for mine, others, sign in ((labels, ~labels, 1.0), (~labels, labels, -1.0)):
        ascending = np.sort(scores[others])
        below = np.searchsorted(ascending, scores[mine], "left") + np.searchsorted(
            ascending, scores[mine], "right"
        )
        # the share of the other class that the event is on the right side of; a tie counts half
        share = below / (2 * len(ascending))
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
    """Compute NDCG@k of each target: 1 / log2(rank + 2), or 0 beyond the best k.

    The target is the only relevant item. `ranks` count from 0.
    """
    return np.where(ranks < k, 1 / np.log2(ranks + 2), 0.0)


def ndcg(ranks: F64, k: int) -> float:
    """Compute NDCG@k of one relevant item each: the mean over the targets."""
    return float(ndcg_of_each(ranks, k).mean())


def mean_reciprocal_rank(ranks: F64) -> float:
    """Compute the mean of 1 / (rank + 1). `ranks` count from 0."""
    return float((1 / (ranks + 1)).mean())


def known(figures: Mapping[str, V]) -> dict[str, V]:
    """Keep the figures that go into a JSON report: no arrays by user or event, and no NaN."""
    return {
        name: value
        for name, value in figures.items()
        if name not in ("ranks", "liking") and value == value
    }


def cells(figures: Iterable[float]) -> list[str]:
    """Format figures for a table; NaN is a dash."""
    return ["-" if value != value else f"{value:.4f}" for value in figures]


REPLICATES = 10_000
NORMAL = 1.96  # deviations on each side that hold 95 % of a normal distribution
_BLOCK = 250  # replicates at a time


class Difference(NamedTuple):
    """The difference of two means; `low` .. `high` is its 95 % interval."""

    mean: float
    low: float
    high: float
    p: float  # two-sided; at least 1 / REPLICATES


def difference(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], seed: int = 0) -> Difference:
    """Bootstrap the difference of two models that were trained under several seeds.

    Every replicate resamples seeds and users, so the interval covers the noise of both.

    Args:
        ours: [seeds, users] a metric of each user under each seed.
        theirs: the same metric, with the same seeds and users in the same order.
        seed: Seed of the bootstrap.

    Returns:
        Ours minus theirs.
    """
    gap = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    num_seeds, num_users = gap.shape
    random = np.random.default_rng(seed)
    means = np.empty(REPLICATES)
    for start in range(0, REPLICATES, _BLOCK):
        users = random.multinomial(num_users, np.full(num_users, 1 / num_users), _BLOCK)
        seeds = random.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), _BLOCK)
        means[start : start + _BLOCK] = ((users @ gap.T) * seeds).sum(1) / (num_users * num_seeds)
    return _difference(float(gap.mean()), means)


def is_above_0(gaps: F64) -> bool:
    """Whether the mean is above 0 by more than a standard error; False for an empty array."""
    return len(gaps) > 0 and float(gaps.mean()) > float(gaps.std()) / len(gaps) ** 0.5


def difference_of_users(ours: F64, theirs: F64, seed: int = 0) -> Difference:
    """Bootstrap the difference of two models, one training each, by resampling users.

    Users with the same gap are drawn together by one multinomial draw, so the cost depends on the
    number of distinct gaps and not on the number of users.

    Args:
        ours: [users] a metric of each user, which takes few distinct values.
        theirs: the same metric of the same users.
        seed: Seed of the bootstrap.

    Returns:
        Ours minus theirs.
    """
    gaps, counts = np.unique(ours - theirs, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(ours), counts / len(ours), REPLICATES)
    return _difference(float((ours - theirs).mean()), drawn @ gaps / len(ours))


def _difference(mean: float, means: F64) -> Difference:
    low, high = np.quantile(means, [0.025, 0.975])
    p = 2 * min((means <= 0).mean(), (means >= 0).mean())
    return Difference(mean, float(low), float(high), float(min(1.0, max(p, 1 / REPLICATES))))


NUM_BINS = 10  # of the calibration error
CALIBRATION_REPLICATES = 200


def calibration_error(
    logits: F64, labels: npt.NDArray[np.bool_], users: I64, seed: int = 0
) -> tuple[float, float, float]:
    """Compute the expected calibration error of probabilities, and its 95 % interval.

    It is the mean gap between probability and share of positives, over ten bins of equally many
    events. Every replicate of the interval resamples users, with their events. A perfectly
    calibrated model of few events has an error above 0, too.

    Args:
        logits: [n] logit of each event.
        labels: [n], True = positive.
        users: [n] the user of each event.
    """
    gaps = 1 / (1 + np.exp(-logits)) - labels
    bin_of = np.argsort(np.argsort(logits, kind="stable")) * NUM_BINS // max(1, len(logits))
    _, row = np.unique(users, return_inverse=True)
    sums = np.zeros((row.max() + 1, NUM_BINS))  # of the gaps, by user
    np.add.at(sums, (row, bin_of), gaps)
    counts = np.bincount(row)
    error = float(np.abs(sums.sum(0)).sum() / len(logits))
    random = np.random.default_rng(seed)
    drawn = random.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), CALIBRATION_REPLICATES)
    errors = np.abs(drawn @ sums).sum(1) / (drawn @ counts)
    low, high = np.quantile(errors, [0.025, 0.975])
    return error, float(low), float(high)


def difference_of_auc(
    ours: F64, theirs: F64 | None, labels: npt.NDArray[np.bool_], users: I64
) -> Difference | None:
    """Compare two models' AUC on the same events, or compute one model's AUC with its interval.

    The variance is clustered by user, because a user's events depend on each other.

    Args:
        ours: [n] a score of each event.
        theirs: the same of another model; None = ours alone.
        labels: [n], True = positive.
        users: [n] the user of each event.

    Returns:
        Ours minus theirs, with the interval of a normal distribution; None = all labels are equal.
    """
    if labels.all() or not labels.any():
        return None
    mean = auc(ours, labels)
    terms = auc_terms(ours, labels)
    if theirs is not None:
        mean -= auc(theirs, labels)
        terms = terms - auc_terms(theirs, labels)
    deviation = float(np.sqrt(np.square(np.bincount(users, terms)).sum()))
    p = math.erfc(abs(mean) / deviation / math.sqrt(2)) if deviation else float(mean == 0)
    return Difference(
        mean, mean - NORMAL * deviation, mean + NORMAL * deviation, max(p, 1 / REPLICATES)
    )
