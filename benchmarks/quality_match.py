"""The matching models of `quality`: simple baselines, SCCDR by ingredients, and the served model.

Cold-start users: in three folds, a third of the users of both domains lose all target edges,
everything is fitted to the rest, and one of the lost edges of each is ranked. Each score has a
popularity term, whose weight in a fold is the best on the users of the other folds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.train.evaluate import Evaluator, Graph, HeldOut, Scores, smooth_hit
from npu_gr.train.linear import SCALE_USERS, PureSVD, log_popularity, root_mean_square
from npu_gr.train.match.domains import Domains, MatchData, split
from npu_gr.train.match.joined import BASELINES, FittedLinear, fit_joint_svd, join
from npu_gr.train.match.train import MatchOptions, TrainedVectors, Trainer
from npu_gr.train.metrics import F64

DENSITY = 0.4  # share of the target's edges used for training
NUM_VALIDATION = 2000
NUM_FOLDS = 3  # folds of cold-start users
POPULARITY_WEIGHTS = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
POPULARITY = "popularity"
SERVED = "served"  # joint SVD, SCCDR and popularity
JOINT_SVD = "PureSVD, both"
SCCDR = "+ curriculum"
INGREDIENTS: dict[str, dict[str, Any]] = {
    "target only": {"schedule": "target-only"},
    "initialised": {"schedule": "initialised"},
    "separated": {"stop_gradient": False, "curriculum": False},
    "+ stop-gradient": {"curriculum": False},
    SCCDR: {},
}
"""Arm -> options that differ from complete SCCDR; each arm adds one ingredient."""
COLD_START = (POPULARITY, "separated", "+ stop-gradient", SCCDR, JOINT_SVD, SERVED)


@dataclass(slots=True)
class Arms:
    """Fits arms to one split of the data, and caches shared parts."""

    data: MatchData
    base: MatchOptions
    _trained: dict[str, TrainedVectors] = field(default_factory=dict)
    _svd: FittedLinear[PureSVD] | None = None

    def scores(self, arm: str) -> Scores | None:
        """Fit an arm; None = the data is too large for it."""
        if arm == POPULARITY:
            popularity = log_popularity(self.data.with_validation().target.degrees()[1])
            return lambda users: popularity.repeat(len(users), 1)
        if arm == SERVED:
            found = join(self.data, self.svd(), self.trained(SCCDR))
            columns = found.items.T.contiguous()
            return lambda users: torch.mm(found.users[users], columns)
        if arm in INGREDIENTS:
            return self.trained(arm).scores
        fitted = self.svd() if arm == JOINT_SVD else BASELINES[arm](self.data)
        return None if fitted is None else fitted.served.scores

    def svd(self) -> FittedLinear[PureSVD]:
        """Decompose both domains together, once."""
        if self._svd is None:
            self._svd = fit_joint_svd(self.data)
        return self._svd

    def trained(self, arm: str) -> TrainedVectors:
        """Train an arm of `INGREDIENTS`, once."""
        if arm not in self._trained:
            options = msgspec.structs.replace(self.base, **INGREDIENTS[arm])
            self._trained[arm] = Trainer(self.data, options).run()
        return self._trained[arm]


def fitted_ranks(
    domains: Domains,
    base: MatchOptions,
    seeds: Sequence[int],
    arms: Sequence[str],
    evaluators: Mapping[str, Evaluator],
) -> dict[str, dict[str, list[F64]]]:
    """Fit arms with every seed, and rank the tested edges: test -> arm -> ranks of each seed."""
    ranks: dict[str, dict[str, list[F64]]] = {kind: {} for kind in evaluators}
    for seed in seeds:
        fits = Arms(
            split(domains, DENSITY, NUM_VALIDATION, seed), msgspec.structs.replace(base, seed=seed)
        )
        for arm in arms:
            if (scores := fits.scores(arm)) is not None:
                for kind, evaluator in evaluators.items():
                    ranks[kind].setdefault(arm, []).append(evaluator.ranks_by(scores))
    return ranks


def cold_start_ranks(
    domains: Domains, base: MatchOptions, seeds: Sequence[int]
) -> dict[str, list[F64]]:
    """Rank the tested edges of cold-start users, without near-duplicates.

    Returns:
        Arm of `COLD_START` -> ranks of each seed, with users in the same order. SCCDR's arms score
        a cold-start user by the source's vector.
    """
    shared = np.flatnonzero((domains.source.degrees()[0] > 0) & (domains.target.degrees()[0] > 0))
    tested = domains.evaluator()
    ranks: dict[str, list[F64]] = {arm: [] for arm in COLD_START}
    for seed in seeds:
        data = split(domains, DENSITY, NUM_VALIDATION, seed)
        folds: dict[str, list[F64]] = {arm: [] for arm in COLD_START}
        users = []
        for part in np.array_split(np.random.default_rng(seed).permutation(shared), NUM_FOLDS):
            evaluator = tested.only(np.isin(tested.held_out.users, part))
            users.append(evaluator.held_out.users)
            fits = Arms(_without(data, part), msgspec.structs.replace(base, seed=seed))
            for arm in COLD_START:
                folds[arm].append(_ranks(fits, arm, evaluator))
        by_user = np.argsort(np.concatenate(users))
        for arm, found in folds.items():
            ranks[arm].append(_weighted(found)[by_user])
    return ranks


def _ranks(fits: Arms, arm: str, evaluator: Evaluator) -> F64:
    """Rank with each weight of the popularity term: float64 [weights, users].

    The served model has one already, so it is ranked once.
    """
    scores = _source_scores(fits.trained(arm)) if arm in INGREDIENTS else fits.scores(arm)
    assert scores is not None, "these arms fit data of any size"
    if arm in (POPULARITY, SERVED):
        return evaluator.ranks_by(scores)[None]
    unit = 1 / root_mean_square(scores(torch.from_numpy(evaluator.held_out.users[:SCALE_USERS])))
    popularity = log_popularity(fits.data.with_validation().target.degrees()[1])
    popularity = popularity / root_mean_square(popularity)

    def tables(users: Tensor) -> Iterator[Tensor]:
        own = scores(users) * unit
        return (own + popularity * weight for weight in POPULARITY_WEIGHTS)

    return evaluator.ranks_of_each(tables)


def _source_scores(trained: TrainedVectors) -> Scores:
    users, items = trained.source_users, trained.bridge_items
    assert users is not None
    assert items is not None
    return lambda rows: users[rows] @ items.T


def _weighted(folds: list[F64]) -> F64:
    """Take each fold's ranks with the weight that is best on the other folds."""
    chosen = []
    for number, ranks in enumerate(folds):
        others = np.concatenate(
            [fold for other, fold in enumerate(folds) if other != number], axis=1
        )
        chosen.append(ranks[int(np.argmax([smooth_hit(row) for row in others]))])
    return np.concatenate(chosen)


def _without(data: MatchData, users: I64) -> MatchData:
    """Remove all target edges of some users, also from the validation."""
    kept = ~np.isin(data.target.users, users)
    target = Graph(
        data.target.users[kept],
        data.target.items[kept],
        data.target.num_users,
        data.target.num_items,
    )
    validated = ~np.isin(data.validation.users, users)
    held_out = HeldOut(data.validation.users[validated], data.validation.items[validated])
    return replace(data, target=target, validation=held_out)
