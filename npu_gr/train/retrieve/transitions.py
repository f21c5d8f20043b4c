"""Vectors from one log: which items follow which, factorised, and a user as what was done last.

    lead[j, i]   how often item i came within a window of events after item j: 1 for the next event, less for later
                 ones; divided by roots of how often j leads and i comes, so that popular items do not win everywhere
    lead ~ A B'  the largest singular values; a row of A is what an item leads to, a row of B is what leads to it
    user         the mean of the rows of A of the user's events, the newest with weight 1, each older one with less
    score        user . B[i], and a small prior: how popular i is

A score is an inner product of a user's vector and an item's, so exact search and any index of inner products serve it.
A user whose events are new gets the vector that the same events would have got in the training.

Source: a first-order Markov model, smoothed over a window as in item-to-item models, and factorised as in PureSVD
(Cremonesi et al., RecSys 2010), on the transitions instead of the ratings.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import F32, I64
from npu_gr.train.data import InteractionLog
from npu_gr.train.metrics import F64

SMOOTHING = 10.0  # events added to each item's count, so that one meeting of two rare items is no evidence
SOURCE_POWER = 0.5  # of how often an item leads
SVD_SWEEPS = 8  # of the randomised singular value decomposition
SPARE_VECTORS = 8  # that it iterates beside the wanted ones: the last of a block converge slowest


class Settings(NamedTuple):
    """What is chosen on the validation."""

    window: int  # events after an item that it leads to
    power: float  # of how often an item comes, by which its transitions are divided
    decay: float  # of an event's weight in its user's vector, with each newer event
    prior: float  # weight of the popularity


class Factors(NamedTuple):
    """The factorised transitions. I = items, d = dimension."""

    leads: F32  # [I, d] what each item leads to
    comes: F32  # [I, d] what leads to each item
    popularity: F32  # [I] in units of a strong transition


def transitions(log: InteractionLog, window: int) -> Tensor:
    """Count which items follow which in the trained events: sparse float32 [items, items].

    Args:
        log: its trained events count.
        window: a pair n events apart counts (1 - 1 / window) ** (n - 1), up to this many.
    """
    total = _sparse(np.empty((2, 0), np.int64), np.empty(0), log.num_items)
    for apart in range(1, window + 1):
        near = log.trained[apart:] & (log.users[apart:] == log.users[:-apart])
        both = log.items[:-apart][near] * log.num_items + log.items[apart:][near]
        pairs, counts = np.unique(both, return_counts=True)
        weights = counts.astype(np.float64) * (1 - 1 / window) ** (apart - 1)
        total = total + _sparse(np.stack(np.divmod(pairs, log.num_items)), weights, log.num_items)
    coalesced: Tensor = total.coalesce()
    return coalesced


def factorise(log: InteractionLog, counted: Tensor, power: float, dim: int, seed: int) -> Factors:
    """Factorise transitions.

    Args:
        log: whose trained events were counted.
        counted: by `transitions`.
        power: see `Settings`.
        dim: most singular values.
        seed: of the decomposition's start.
    """
    places = counted.indices().numpy()
    source, target = places
    counts = counted.values().numpy().astype(np.float64)
    uses = np.bincount(log.items[log.trained], minlength=log.num_items)
    outgoing = np.bincount(source, counts, log.num_items)
    weights = counts / (outgoing[source] + SMOOTHING) ** SOURCE_POWER / (uses[target] + SMOOTHING) ** power
    matrix = _sparse(places, weights, log.num_items)
    dim = min(dim, log.num_items)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        left, values, right = torch.svd_lowrank(matrix, min(dim + SPARE_VECTORS, log.num_items), SVD_SWEEPS)
    roots = values[:dim].sqrt()
    strongest = np.zeros(log.num_items)
    np.maximum.at(strongest, source, weights)
    strong = (strongest * uses).sum() / uses.sum() or 1.0  # nothing follows anything: there is popularity alone
    return Factors(
        leads=(left[:, :dim] * roots).numpy(),
        comes=(right[:, :dim] * roots).numpy(),
        popularity=(uses / uses.max() * strong).astype(np.float32),
    )


def _sparse(places: I64, values: F64, num_items: int) -> Tensor:
    """Make a sparse float32 [num_items, num_items]; the places ascend."""
    made: Tensor = torch.sparse_coo_tensor(
        torch.from_numpy(places),
        torch.from_numpy(values.astype(np.float32)),
        (num_items, num_items),
        is_coalesced=True,
        check_invariants=False,
    )
    return made
