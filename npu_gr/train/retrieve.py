"""Train retrieval vectors from one log: factorised item-to-item transitions.

    lead[j, i]   how often item i came within a window of events after item j. The next event counts
                 1, later ones less. Divided by powers of how often j leads and i comes, so that
                 popular items do not win everywhere
    lead ~ A B'  truncated singular value decomposition. Row j of A is what item j leads to, row i
                 of B is what leads to item i
    user         weighted mean of the rows of A of the user's events: weight 1 for the newest event,
                 exponentially less for older ones
    score        user . B[i] + prior x popularity of i

A score is an inner product of a user's vector and an item's, so exact search and any inner-product
index can serve it. A user who is not in the log gets the same vector from the same events.

    events of a user   0 1 2 ... n-3 | n-2          | n-1
                       trained on      validation     test

The settings with the best NDCG@10 on the validation are trained on everything before the test, and
evaluated on the test. The served vectors are then made from all events with the same settings.

Deterministic: the same log, options and number of threads give the same bits.

Source: a first-order Markov model, smoothed over a window as in item-to-item models, and factorised
as in PureSVD (Cremonesi et al., RecSys 2010), on the transitions instead of the ratings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from npu_gr.core.arrays import F32, I64
from npu_gr.core.history import UserKey
from npu_gr.core.settings import Count
from npu_gr.history_store.interactions import Interactions
from npu_gr.train.data import InteractionLog, NextItem, Split, build_log
from npu_gr.train.metrics import F64, known, ndcg
from npu_gr.train.next_item import (
    RetrievalFigures,
    RetrievalReport,
    rank_next_items,
    sample_targets,
)
from npu_gr.train.options import Seed
from npu_gr.train.shared_baselines import RankBaselines, rank_baselines
from npu_gr.train.steps import TrainingProgress
from npu_gr.vector_search.fold import Folding
from npu_gr.vector_search.vectors import Vectors

SPLIT: Split = "leave-one-out"
NAME = "vectors"
_Decay = Annotated[float, Meta(gt=0.0, le=1.0)]
_Weight = Annotated[float, Meta(gt=0.0)]


class RetrieveOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the vectors, except the log and the number of threads.

    Where an option is a list, the validation chooses one of its values.
    """

    seed: Annotated[Seed, Meta(description="seed of the factorisation and of the drawn users")] = 0
    dim: Annotated[
        Count,
        Meta(description="singular values of the transitions; a vector has one dimension more"),
    ] = 64
    windows: Annotated[
        tuple[Count, ...],
        Meta(min_length=1, description="events after an item that count as following it"),
    ] = (5, 20)
    powers: Annotated[
        tuple[_Weight, ...],
        Meta(min_length=1, description="exponent of an item's uses, which divide its transitions"),
    ] = (0.3, 0.5)
    decays: Annotated[
        tuple[_Decay, ...],
        Meta(
            min_length=1,
            description="factor of an event's weight in the user's vector, per newer event",
        ),
    ] = (0.6, 0.8, 0.9)
    priors: Annotated[
        tuple[_Weight, ...], Meta(min_length=1, description="weight of an item's popularity")
    ] = (
        0.01,
        0.1,
    )
    validation_users: Annotated[
        Count, Meta(description="most users of the validation, drawn at random")
    ] = 1000
    test_users: Annotated[Count, Meta(description="most users of the test, drawn at random")] = (
        10_000
    )
    refit: Annotated[
        bool,
        Meta(
            description="after the evaluation, make the served vectors from all events, "
            "the newest included"
        ),
    ] = True


class TrainedRetriever(NamedTuple):
    """Vectors to serve, and the figures of the evaluated ones."""

    vectors: Vectors
    report: RetrievalReport


class _Model(NamedTuple):
    items: F32  # [I, d + 1] what leads to each item; the last column is its popularity prior
    folding: Folding


def train_retriever(
    interactions: Interactions,
    options: RetrieveOptions,
    progress: Callable[[TrainingProgress], None] = lambda _: None,
    tenant: str = "",
    evaluated: Callable[[TrainedRetriever], None] = lambda _: None,
    rank: RankBaselines = rank_baselines,
) -> TrainedRetriever:
    """Train the vectors of a log, compare them with the baselines, and refit them on all events.

    Args:
        interactions: The whole log.
        options: Settings, and the lists that the validation chooses from.
        progress: Callback after every step, in this thread.
        tenant: Tenant of all users.
        evaluated: Callback with the evaluated vectors, before the refit.
        rank: Ranks the test users' next items by the baselines.

    Raises:
        DataError: the log is too small.
    """
    log = build_log(interactions, [], SPLIT)
    settings, validation_ndcg = _choose(log.only_trained(SPLIT), options, progress)
    model = _model(log, settings, options)
    targets = sample_targets(log.next_items(), options.test_users, options.seed)
    scores = _with_progress(
        _scores(log, model, targets), "vectors: evaluate", len(targets), progress
    )
    baselines = rank(log, SPLIT, options.seed, targets)
    words = ", ".join(f"{name} {value:g}" for name, value in settings._asdict().items())
    report = RetrievalReport(
        num_trained=int(log.trained.sum()),
        num_served=len(log.items) if options.refit else int(log.trained.sum()),
        own=RetrievalFigures.from_ranks(rank_next_items(log, targets, scores), NAME),
        baselines=baselines.figures(),
        skipped=baselines.skipped,
        made=f"chosen on the validation: {words}",
        chosen={"settings": settings._asdict(), "validation_ndcg_at_10": validation_ndcg},
    )
    users = [UserKey(tenant, name) for name in interactions.user_names]
    found = TrainedRetriever(_vectors(log, model, users, report), report)
    evaluated(found)
    if not options.refit:
        return found
    full_log = log.all_trained()
    refitted = _vectors(full_log, _model(full_log, settings, options), users, report)
    progress(TrainingProgress("vectors: refit", 1, 1))
    return TrainedRetriever(refitted, report)


def _choose(
    log: InteractionLog, options: RetrieveOptions, progress: Callable[[TrainingProgress], None]
) -> tuple[Settings, float]:
    """Choose the settings with the best NDCG@10 on the validation; ties go to the first ones."""
    targets = sample_targets(log.next_items(), options.validation_users, options.seed)
    found: list[tuple[Settings, float]] = []
    grid = [len(options.windows), len(options.powers), len(options.decays), len(options.priors)]
    for window in options.windows:
        counted = transitions(log, window)
        for power in options.powers:
            factors = factorise(log, counted, power, options.dim, options.seed)
            for decay, prior in product(options.decays, options.priors):
                settings = Settings(window, power, decay, prior)
                ranks = rank_next_items(
                    log, targets, _scores(log, _joined(log, factors, settings), targets)
                )
                found.append((settings, ndcg(ranks.evaluated, 10) if targets else 0.0))
                progress(TrainingProgress("vectors: choose", len(found), math.prod(grid)))
    return max(found, key=lambda one: one[1])


def _model(log: InteractionLog, settings: Settings, options: RetrieveOptions) -> _Model:
    factors = factorise(
        log, transitions(log, settings.window), settings.power, options.dim, options.seed
    )
    return _joined(log, factors, settings)


def _joined(log: InteractionLog, factors: Factors, settings: Settings) -> _Model:
    """Append the popularity prior: users' vectors end with 1, items' vectors with the prior."""
    states = np.concatenate([factors.leads, np.ones((log.num_items, 1), np.float32)], axis=1)
    prior = np.float32(settings.prior) * factors.popularity[:, None]
    return _Model(
        items=np.concatenate([factors.comes, prior], axis=1),
        folding=Folding(
            users=None,
            states=states[None],
            matrices=None,
            degrees=np.bincount(log.items[log.trained], minlength=log.num_items),
            norm="mean",
            activation="none",
            decay=settings.decay,
        ),
    )


def _user_vector(log: InteractionLog, model: _Model, user: int) -> F32:
    """Compute the vector of a user's trained events, as a request with these events gets it."""
    start = int(log.starts[user])
    return model.folding.vector(-1, log.items[start : start + int(log.num_trained[user])])


def _scores(log: InteractionLog, model: _Model, targets: Sequence[NextItem]) -> Iterator[F64]:
    """Yield the scores of all items for each target, float64 [num_items].

    The inner products are computed in float32, as in service.
    """
    for user, _ in targets:
        yield (model.items @ _user_vector(log, model, user)).astype(np.float64)


def _with_progress(
    rows: Iterable[F64], stage: str, total: int, progress: Callable[[TrainingProgress], None]
) -> Iterator[F64]:
    for done, row in enumerate(rows, 1):
        yield row
        progress(TrainingProgress(stage, done, total))


def _vectors(
    log: InteractionLog, model: _Model, users: list[UserKey], report: RetrievalReport
) -> Vectors:
    trained = log.trained
    has_any = log.num_trained > 0
    table = np.zeros((log.num_users, model.items.shape[1]), np.float32)
    for user in np.flatnonzero(has_any).tolist():
        table[user] = _user_vector(log, model, user)
    figures = {
        f"{name}_unseen": getattr(report.own, f"{name}_unseen")
        for name in ("hr_at_10", "ndcg_at_10")
    }
    counts = {"num_trained": float(report.num_trained), "num_served": float(report.num_served)}
    return Vectors(
        user_keys=users,
        item_ids=log.item_ids,
        users=table,
        items=model.items,
        in_target=has_any,
        in_source=np.zeros(log.num_users, np.bool_),
        popularity=np.bincount(log.items[trained], minlength=log.num_items),
        seen_starts=np.concatenate([[0], np.cumsum(log.num_trained)]),
        seen_items=log.items[trained].astype(np.int32),
        figures=known(figures | counts),
        folding=model.folding,
    )


# Added to each item's count, so that one co-occurrence of rare items counts little.
SMOOTHING = 10.0
SOURCE_POWER = 0.5  # exponent of how often an item leads, by which its transitions are divided
SVD_SWEEPS = 8  # iterations of the randomised singular value decomposition
SPARE_VECTORS = 8  # extra vectors to iterate, because the last ones of a block converge slowest


class Settings(NamedTuple):
    """The settings that the validation chooses."""

    window: int  # events after an item that count as following it
    power: float  # exponent of an item's uses, by which transitions to it are divided
    decay: float  # factor of an event's weight in the user's vector, per newer event
    prior: float  # weight of the popularity


class Factors(NamedTuple):
    """The factorised transitions. I = items, d = dimension."""

    leads: F32  # [I, d] what each item leads to
    comes: F32  # [I, d] what leads to each item
    # [I] scaled so that the most popular item has the weight of a strong transition
    popularity: F32


def transitions(log: InteractionLog, window: int) -> Tensor:
    """Count which items follow which in the trained events: sparse float32 [items, items].

    Args:
        log: Log whose trained events are counted.
        window: Most events between the two items of a pair. A pair n events apart counts
            (1 - 1 / window) ** (n - 1).
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
    """Factorise transitions by a truncated singular value decomposition.

    Args:
        log: Log whose trained events were counted.
        counted: Result of `transitions`.
        power: Exponent of an item's uses; see `Settings`.
        dim: Most singular values.
        seed: Seed of the decomposition's random start.
    """
    places = counted.indices().numpy()
    source, target = places
    counts = counted.values().numpy().astype(np.float64)
    uses = np.bincount(log.items[log.trained], minlength=log.num_items)
    outgoing = np.bincount(source, counts, log.num_items)
    weights = (
        counts
        / (outgoing[source] + SMOOTHING) ** SOURCE_POWER
        / (uses[target] + SMOOTHING) ** power
    )
    matrix = _sparse(places, weights, log.num_items)
    dim = min(dim, log.num_items)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        left, values, right = torch.svd_lowrank(
            matrix, min(dim + SPARE_VECTORS, log.num_items), SVD_SWEEPS
        )
    roots = values[:dim].sqrt()
    strongest = np.zeros(log.num_items)
    np.maximum.at(strongest, source, weights)
    # without any transition, the popularity alone decides
    strong = (strongest * uses).sum() / uses.sum() or 1.0
    return Factors(
        leads=(left[:, :dim] * roots).numpy(),
        comes=(right[:, :dim] * roots).numpy(),
        popularity=(uses / uses.max() * strong).astype(np.float32),
    )


def _sparse(places: I64, values: F64, num_items: int) -> Tensor:
    """Make a sparse float32 [num_items, num_items]; `places` int64 [2, n] ascend."""
    made: Tensor = torch.sparse_coo_tensor(
        torch.from_numpy(places),
        torch.from_numpy(values.astype(np.float32)),
        (num_items, num_items),
        is_coalesced=True,
        check_invariants=False,
    )
    return made
