"""Compare two models on the same users and seeds: mean difference, interval and p value by a paired bootstrap."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

REPLICATES = 10_000
_BLOCK = 250  # replicates at a time


class Difference(NamedTuple):
    """The difference of two means; `low` .. `high` is its 95 % interval."""

    mean: float
    low: float
    high: float
    p: float  # two-sided; at least 1 / REPLICATES


def difference(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], seed: int = 0) -> Difference:
    """Compare ours with theirs. Every replicate resamples seeds and users, so the interval holds the noise of both.

    Args:
        ours: [seeds, users] a metric of each user under each seed.
        theirs: the same metric, with the same seeds and users in the same order.
        seed: of the bootstrap.

    Returns:
        Ours less theirs.
    """
    gap = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    num_seeds, num_users = gap.shape
    random = np.random.default_rng(seed)
    means = np.empty(REPLICATES)
    for start in range(0, REPLICATES, _BLOCK):
        users = random.multinomial(num_users, np.full(num_users, 1 / num_users), _BLOCK)
        seeds = random.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), _BLOCK)
        means[start : start + _BLOCK] = ((users @ gap.T) * seeds).sum(1) / (num_users * num_seeds)
    low, high = np.quantile(means, [0.025, 0.975])
    p = 2 * min((means <= 0).mean(), (means >= 0).mean())
    return Difference(float(gap.mean()), float(low), float(high), float(min(1.0, max(p, 1 / REPLICATES))))
