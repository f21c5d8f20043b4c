"""Cold users by the thousands: a part of the shared users loses every target edge, and each is asked for one of them.

The users of a fold are cold in it, everything is fitted to what is left, and the next fold follows. Each way to score
them has a popularity term; its weight in a fold is the one that is best on the users of the other folds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.train.baselines.tune import SCALE_USERS, log_popularity, root_mean_square
from npu_gr.train.graph import Graph
from npu_gr.train.judge import HeldOut, Judge, Scores, smooth_hit
from npu_gr.train.match.arms import EXPORT, POPULARITY, SCCDR, Bench
from npu_gr.train.match.domains import Domains, MatchData, split
from npu_gr.train.match.options import MatchOptions
from npu_gr.train.match.train import StageProgress
from npu_gr.train.metrics import F64

NUM_FOLDS = 3
POPULARITY_WEIGHTS = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
# Way -> the trained arm, and by which of its vectors the users are scored.
_VECTORS = {
    "initialised, own vector": ("initialised, no inter-domain loss", "own"),
    "separated, own vector": ("separated", "own"),
    "separated, source vector": ("separated", "source"),
    "+ stop-gradient, source vector": ("+ stop-gradient", "source"),
    "+ curriculum, source vector": (SCCDR, "source"),
}
JOINT_SVD = "joint SVD"
WAYS = (POPULARITY, *_VECTORS, JOINT_SVD, EXPORT)


def cold_ranks(
    domains: Domains,
    base: MatchOptions,
    density: float,
    num_validation: int,
    seed: int,
    progress: Callable[[str, StageProgress], None] = lambda _name, _step: None,
) -> dict[str, F64]:
    """Rank the tested edges of cold users, those of twins left out.

    Args:
        domains: the data.
        base: options of the whole of SCCDR.
        density: share of the target's edges that is kept.
        num_validation: most users to validate on.
        seed: of the folds, the split and the trainings.
        progress: called after every step, with the training's name.

    Returns:
        Way of `WAYS` -> float64 [cold users tested] ranks, by user: with each seed in the same order.
    """
    data = split(domains, density, num_validation, seed)
    shared = np.flatnonzero((domains.source.degrees()[0] > 0) & (domains.target.degrees()[0] > 0))
    parts = np.array_split(np.random.default_rng(seed).permutation(shared), NUM_FOLDS)
    found: dict[str, list[F64]] = {way: [] for way in WAYS}
    tested = domains.judge()
    users = []
    for number, part in enumerate(parts, 1):
        judge = tested.only(np.isin(tested.held_out.users, part))
        users.append(judge.held_out.users)
        bench = Bench(_without(data, part), base, seed, partial(_named, progress, f"cold users, fold {number}: "))
        for way in WAYS:
            found[way].append(_ranks(bench, way, judge))
    by_user = np.argsort(np.concatenate(users))
    return {way: _weighted(folds)[by_user] for way, folds in found.items()}


def _named(progress: Callable[[str, StageProgress], None], prefix: str, arm: str, step: StageProgress) -> None:
    progress(prefix + arm, step)


def _ranks(bench: Bench, way: str, judge: Judge) -> F64:
    """Rank under each weight of the popularity term: float64 [weights, users]. What is served has no further term."""
    if way in (POPULARITY, EXPORT):
        fitted = bench.fit(way)
        assert fitted is not None, "it has no limit"
        return judge.ranks_by(fitted.scores)[None]
    scores = bench.svd().served.scores if way == JOINT_SVD else _vector_scores(bench, *_VECTORS[way])
    unit = 1 / root_mean_square(scores(torch.from_numpy(judge.held_out.users[:SCALE_USERS])))
    popularity = log_popularity(bench.data.whole().target.degrees()[1])
    popularity = popularity / root_mean_square(popularity)

    def tables(users: Tensor) -> Iterator[Tensor]:
        base = scores(users) * unit
        return (base + popularity * weight for weight in POPULARITY_WEIGHTS)

    return judge.ranks_of_each(tables)


def _vector_scores(bench: Bench, arm: str, which: str) -> Scores:
    trained = bench.trained(arm)
    users, items = trained.users, trained.items
    if which == "source":
        assert trained.source_users is not None
        assert trained.bridge_items is not None
        users, items = trained.source_users, trained.bridge_items
    return lambda rows: users[rows] @ items.T


def _weighted(folds: list[F64]) -> F64:
    """Take each fold's ranks under the weight that is best on the other folds."""
    chosen = []
    for number, ranks in enumerate(folds):
        others = np.concatenate([fold for other, fold in enumerate(folds) if other != number], axis=1)
        chosen.append(ranks[int(np.argmax([smooth_hit(row) for row in others]))])
    return np.concatenate(chosen)


def _without(data: MatchData, users: I64) -> MatchData:
    """Take away every target edge of some users, and their validation."""
    kept = ~np.isin(data.target.users, users)
    target = Graph(data.target.users[kept], data.target.items[kept], data.target.num_users, data.target.num_items)
    validated = ~np.isin(data.validation.users, users)
    held_out = HeldOut(data.validation.users[validated], data.validation.items[validated])
    return replace(data, target=target, validation=held_out)
