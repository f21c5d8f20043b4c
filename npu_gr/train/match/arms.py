"""The arms of the ablation: simple baselines, SCCDR with its ingredients switched on and off, and what is served.

The baselines of matching: ItemKNN, EASE and PureSVD, on the target alone and on both domains side by side.

Each has a popularity exponent and a popularity term, and is chosen on the validation that SCCDR has. Then the chosen
one is refitted to all edges, the validation's among them.

Join what was trained into the vectors that are served: one inner product of a user's and an item's row.

    item   [ V d^g     | z_i   | p_i  ]     U, s, V: singular values of both domains side by side (`fit_joint_svd`)
    user   [ U s^power | w z_u | beta ]     z: vectors of the trained graph encoder;  p: log popularity

Each part is scaled to scores with a root mean square of 1. The weights are those with the best smooth HIT on the
validation. 0 is among them, and the columns of a part that does not help are left out. What is joined knows all edges,
the validation's among them.

A user's U s^power is a sum over all items known of him in both domains (`JoinedFolding`), so any user has one: also one
who has source items alone, or who comes later. The encoder knows users of the target only: the others' z_u is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from npu_gr.matching.fold import JoinedFolding
from npu_gr.train.baselines.linear import (
    EASE,
    SCALE_USERS,
    Candidate,
    ItemKNN,
    LinearModel,
    PureSVD,
    Tuned,
    ease_is_too_large,
    log_popularity,
    root_mean_square,
    spectrum,
    tune,
)
from npu_gr.train.judge import Graph, Scores, smooth_hit
from npu_gr.train.match.domains import MatchData
from npu_gr.train.match.options import MatchOptions
from npu_gr.train.match.train import StageProgress, TrainedVectors, Trainer, Validated

EXPONENTS = (0.0, 0.5)  # of users and of items, of ItemKNN
RIDGES = (10.0, 100.0, 1000.0)  # of EASE
ITEM_EXPONENT = 0.25  # of the decomposition
FILTERS = ((8, 1.0), (16, 1.0), (32, 1.0), (64, 1.0), (64, 3.0))  # singular values, and their power for the users

M = TypeVar("M", bound=LinearModel, covariant=True)
Models = Callable[[MatchData, bool], Iterator[Candidate[M]]]  # of both domains, or of the target


class FittedLinear(NamedTuple, Generic[M]):
    """A model before and after its refit."""

    chosen: Tuned[M]  # does not know the validation's edges
    served: Tuned[M]  # the same settings, of all edges


def fit(models: Models[M], data: MatchData, both: bool) -> FittedLinear[M] | None:
    """Choose by the validation, and refit; None = there is nothing to choose among.

    Args:
        models: the candidates, the same ones for any data.
        data: to fit to.
        both: use both domains side by side, not the target alone.
    """
    candidates = models(data, both)
    first = next(candidates, None)
    if first is None:
        return None
    judge = data.judge()
    chosen = tune(chain([first], candidates), data.target.degrees()[1], judge)
    whole = data.whole()
    return FittedLinear(chosen, chosen.refitted(models(whole, both), whole.target.degrees()[1], judge.held_out.users))


def item_knns(data: MatchData, both: bool) -> Iterator[Candidate[ItemKNN]]:
    """List the candidates of ItemKNN."""
    graph = _joined(data, both)
    for of_user, of_item in product(EXPONENTS, EXPONENTS):
        make = partial(ItemKNN, graph, data.target.num_items, of_user, of_item)
        yield Candidate(f"user exponent {of_user:g}, item exponent {of_item:g}", make)


def eases(data: MatchData, both: bool) -> Iterator[Candidate[EASE]]:
    """List the candidates of EASE; none if it is too large to invert."""
    graph = _joined(data, both)
    if ease_is_too_large(graph) is None:
        for ridge in RIDGES:
            yield Candidate(f"ridge {ridge:g}", partial(EASE, graph, data.target.num_items, ridge))


def pure_svds(data: MatchData, both: bool) -> Iterator[Candidate[PureSVD]]:
    """List the candidates of PureSVD.

    Both domains have the same weight: the users to validate on have more target edges than others, and would have the
    source count for less than it is worth to those who need it.
    """
    found = spectrum(_joined(data, both), ITEM_EXPONENT, max(FILTERS)[0])
    for num_values, power in FILTERS:
        make = partial(PureSVD, found, data.target.num_items, num_values, power)
        yield Candidate(f"{num_values} values to the power {power:g}", make)


def fit_joint_svd(data: MatchData) -> FittedLinear[PureSVD]:
    """Decompose both domains side by side, choose and refit."""
    found = fit(pure_svds, data, both=True)
    assert found is not None, "there is a candidate"
    return found


def _joined(data: MatchData, both: bool) -> Graph:
    return data.target.beside(data.source) if both else data.target


BASELINES: dict[str, Callable[[MatchData], FittedLinear[LinearModel] | None]] = {
    f"{name}, {where}": partial(fit, models, both=both)
    for where, both in (("target", False), ("both", True))
    for name, models in (("ItemKNN", item_knns), ("EASE", eases), ("PureSVD", pure_svds))
}


ENCODER_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0)
POPULARITY_WEIGHTS = (0.0, 0.2, 0.5, 1.0)


class Weights(NamedTuple):
    """Weights of the parts, each scaled to scores with a root mean square of 1; the spectral part has 1."""

    encoder: float
    popularity: float


@dataclass(frozen=True, slots=True, eq=False)
class JoinedVectors:
    """Vectors to serve. U = users, I = items of the target, d = dimensions."""

    users: Tensor  # float32 [U, d]
    items: Tensor  # float32 [I, d]
    folding: JoinedFolding
    settings: str  # what the validation chose, in words
    validation: float  # smooth HIT


def join(data: MatchData, fitted: FittedLinear[PureSVD] | None, trained: TrainedVectors | None) -> JoinedVectors:
    """Choose the weights, and join.

    Args:
        data: that both were made of.
        fitted: the joint spectral part; None: there is none.
        trained: the encoder's part; None: there is none.
    """
    validated = None if trained is None else trained.validated
    chosen, validation = _choose(data, None if fitted is None else fitted.chosen, validated)
    target = data.whole().target
    degrees = target.degrees()
    svd = None if fitted is None else fitted.served
    popularity = log_popularity(degrees[1])
    beta = chosen.popularity / root_mean_square(popularity)
    users, items = [], []
    target_states = source_states = None
    if svd is not None:
        states = _states(svd.model)
        target_states, source_states = (part.numpy() for part in states.split([len(popularity), data.source.num_items]))
        both = target.beside(data.source)
        roots = np.maximum(both.degrees()[0], 1).astype(np.float32) ** np.float32(-0.5)
        users.append(both.to_users(roots[both.users]).times(states))
        items.append(svd.model.found.items[: len(popularity), : svd.model.num_values] * svd.factors[:, None])
    weight = 0.0 if trained is None else chosen.encoder / (1.0 if svd is None else _size(data, trained))
    if trained is not None and weight:
        in_target = torch.from_numpy(degrees[0] > 0)
        users.append(trained.users * (weight * in_target[:, None]))
        items.append(trained.items)
        beta += 0.0 if trained.prior is None else weight
    if beta:
        users.append(torch.full((data.target.num_users, 1), beta))
        items.append(popularity[:, None])
    folding = JoinedFolding(
        target_states=target_states,
        source_states=source_states,
        encoder=trained.folding if trained is not None and weight else None,
        encoder_weight=weight,
        popularity=beta,
        degrees=degrees[1],
    )
    words = f"encoder {chosen.encoder:g}, popularity {chosen.popularity:g}"
    settings = words if svd is None else f"spectral 1 ({svd.settings}), {words}"
    return JoinedVectors(torch.cat(users, 1), torch.cat(items, 1), folding, settings, validation)


def _choose(data: MatchData, svd: Tuned[PureSVD] | None, trained: Validated | None) -> tuple[Weights, float]:
    """Choose the weights; of equals the first. An encoder without a spectral part has no weights to choose."""
    judge = data.judge()
    if svd is None:
        assert trained is not None, "there is a part"
        return Weights(1.0, 0.0), smooth_hit(judge.ranks_by(trained.scores))
    popularity = log_popularity(data.target.degrees()[1])
    popularity = popularity / root_mean_square(popularity)
    encoder_unit = 1.0 if trained is None else 1 / _size(data, trained)
    grid = [Weights(*w) for w in product(ENCODER_WEIGHTS if trained else (0.0,), POPULARITY_WEIGHTS)]

    def tables(rows: Tensor) -> Iterator[Tensor]:
        base = svd.model.scores(rows) * svd.factors
        encoder = trained.scores(rows) * encoder_unit if trained else torch.zeros(1)
        return (torch.add(base + popularity * w.popularity, encoder, alpha=w.encoder) for w in grid)

    hits = [smooth_hit(ranks) for ranks in judge.ranks_of_each(tables)]
    best = int(np.argmax(hits))
    return grid[best], hits[best]


def _size(data: MatchData, vectors: TrainedVectors | Validated) -> float:
    """Compute the root mean square of the scores of some users."""
    return root_mean_square(vectors.scores(torch.from_numpy(data.judge().held_out.users[:SCALE_USERS])))


def _states(model: PureSVD) -> Tensor:
    """Compute what each item adds to its users' rows: U s^power = Du^-1/2 X F, F = columns V s^(power - 1)."""
    k = model.num_values
    found = model.found
    return found.columns[:, None] * found.items[:, :k] * found.values[:k] ** (model.power - 1)


POPULARITY = "popularity"  # the arm that trains nothing
EXPORT = "export"  # what is served: joint SVD, SCCDR and popularity
EXPORT_LESS = "export less SCCDR"
_PLAIN = {"stop_gradient": False, "curriculum": False}
_NO_INTER = {"aligned": False, "neighbour": False}
# Arm -> options that differ from the base, which is the whole of SCCDR.
TRAINED: dict[str, dict[str, Any]] = {
    "target only, no prior": {"schedule": "target-only", "prior": False},
    "target only": {"schedule": "target-only"},
    "shared user embedding": {"schedule": "mixed", "users": "shared", **_NO_INTER, **_PLAIN},
    # Its weights of the losses were tuned less than those of the other arms.
    "mixed": {"schedule": "mixed", "lambda_intra": 1.0, "lambda_inter": 0.1, **_PLAIN},
    "separated, not initialised": {"initialise": False, **_PLAIN},
    "initialised, no inter-domain loss": _NO_INTER,
    "separated": _PLAIN,
    "+ stop-gradient": {"curriculum": False},
    "+ curriculum": {},
}
SCCDR = "+ curriculum"
ARMS = (POPULARITY, *BASELINES, *TRAINED, EXPORT_LESS, EXPORT)


class FittedArm(NamedTuple):
    """An arm, fitted."""

    scores: Scores
    validation: float | None  # smooth HIT; None: nothing was validated
    settings: str  # what was chosen, in words


@dataclass(slots=True)
class Bench:
    """Fits arms to one split of the data, and keeps what they share."""

    data: MatchData
    base: MatchOptions
    seed: int
    progress: Callable[[str, StageProgress], None] = lambda _arm, _step: None
    _stages: dict[str, bytes] = field(default_factory=dict)
    _trained: dict[str, TrainedVectors] = field(default_factory=dict)
    _svd: FittedLinear[PureSVD] | None = None

    def fit(self, arm: str) -> FittedArm | None:
        """Fit an arm of `ARMS`; None = it is too large for this data."""
        if arm == POPULARITY:
            popularity = log_popularity(self.data.whole().target.degrees()[1])
            return FittedArm(lambda users: popularity.repeat(len(users), 1), None, "")
        if arm in TRAINED:
            trained = self.trained(arm)
            return FittedArm(trained.scores, trained.validation, f"step {trained.step} of stage {trained.stage}")
        if arm in BASELINES:
            fitted = self.svd() if arm == "PureSVD, both" else BASELINES[arm](self.data)
            if fitted is None:
                return None
            return FittedArm(fitted.served.scores, fitted.chosen.validation, fitted.chosen.settings)
        found = join(self.data, self.svd(), self.trained(SCCDR) if arm == EXPORT else None)
        return FittedArm(_products(found.users, found.items), found.validation, found.settings)

    def svd(self) -> FittedLinear[PureSVD]:
        """Decompose both domains side by side, once."""
        if self._svd is None:
            self._svd = fit_joint_svd(self.data)
        return self._svd

    def trained(self, arm: str) -> TrainedVectors:
        """Train an arm of `TRAINED`, once."""
        if arm not in self._trained:
            trainer = Trainer(self.data, options_of(self.base, arm, self.seed))
            self._trained[arm] = trainer.run(lambda step: self.progress(arm, step), shared=self._stages)
        return self._trained[arm]


def options_of(base: MatchOptions, arm: str, seed: int) -> MatchOptions:
    """Set the options of an arm.

    Args:
        base: options of the whole of SCCDR.
        arm: of `TRAINED`.
        seed: of the training.
    """
    return msgspec.structs.replace(base, seed=seed, **TRAINED[arm])


def _products(users: Tensor, items: Tensor) -> Scores:
    columns = items.T.contiguous()
    return lambda rows: torch.mm(users[rows], columns)
