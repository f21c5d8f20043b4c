"""`npu-gr train match`: train, and join the parts into what is served: an inner product of a user's and an item's row.

    item   [ V d^g     | z_i   | p_i  ]     U, s, V: singular values of both domains side by side (`fit_joint_svd`)
    user   [ U s^power | w z_u | beta ]     z: vectors of the trained graph encoder;  p: log popularity

Each part is scaled to scores with a root mean square of 1. The weights are those with the best
smooth HIT on the validation. 0 is among them, and the columns of a part that does not help are left
out. What is joined knows all edges, the validation's among them.

A user's U s^power is a sum over all items known of him in both domains (`JoinedFolding`), so any
user has one: also one who has source items alone, or who comes later. The encoder knows users of
the target only: the others' z_u is 0.

The baselines are ItemKNN, EASE and PureSVD, on the target alone and on both domains side by side.
Each has a popularity exponent and a popularity term, and is chosen on the same validation. Then the
chosen one is refitted to all edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import override
from npu_gr.train.evaluate import Graph, smooth_hit
from npu_gr.train.linear import (
    SCALE_USERS,
    Candidate,
    LinearModel,
    PureSVD,
    Tuned,
    eases,
    item_knns,
    log_popularity,
    root_mean_square,
    spectrum,
    tune,
)
from npu_gr.train.match.domains import Domains, MatchData, split
from npu_gr.train.match.train import MatchOptions, TrainedVectors, Trainer, Validated
from npu_gr.train.metrics import F64, hit_ratio, ndcg
from npu_gr.train.next_item import compare_hits
from npu_gr.train.options import how_to_match
from npu_gr.train.steps import training_progress
from npu_gr.vector_search.fold import JoinedFolding, SourceItems
from npu_gr.vector_search.vectors import Vectors, save

ITEM_EXPONENT = 0.25  # of the decomposition
# singular values, and their power for the users
FILTERS = ((8, 1.0), (16, 1.0), (32, 1.0), (64, 1.0), (64, 3.0))
ENCODER_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0)
POPULARITY_WEIGHTS = (0.0, 0.2, 0.5, 1.0)

M = TypeVar("M", bound=LinearModel, covariant=True)
Models = Callable[[Graph, int], Iterator[Candidate[M]]]  # of the first items of a graph


class FittedLinear(NamedTuple, Generic[M]):
    """A model before and after its refit."""

    chosen: Tuned[M]  # does not know the validation's edges
    served: Tuned[M]  # the same settings, of all edges


def fit(models: Models[M], data: MatchData, *, both: bool) -> FittedLinear[M] | None:
    """Choose by the validation, and refit; None = there is nothing to choose among.

    Args:
        models: the candidates, the same ones for any data.
        data: to fit to.
        both: use both domains side by side, not the target alone.
    """

    def candidates(of: MatchData) -> Iterator[Candidate[M]]:
        return models(of.target.beside(of.source) if both else of.target, of.target.num_items)

    found = list(candidates(data))  # none of them is made yet
    if not found:
        return None
    evaluate = data.evaluate()
    chosen = tune(found, data.target.degrees()[1], evaluate)
    whole = data.whole()
    return FittedLinear(
        chosen,
        chosen.refitted(candidates(whole), whole.target.degrees()[1], evaluate.held_out.users),
    )


def _pure_svds(graph: Graph, num_scored: int) -> Iterator[Candidate[PureSVD]]:
    """List the candidates of PureSVD.

    Both domains have the same weight: the users to validate on have more target edges than others,
    and would have the source count for less than it is worth to those who need it.
    """
    found = spectrum(graph, ITEM_EXPONENT, max(FILTERS)[0])
    for num_values, power in FILTERS:
        make = partial(PureSVD, found, num_scored, num_values, power)
        yield Candidate(f"{num_values} values to the power {power:g}", make)


def fit_joint_svd(data: MatchData) -> FittedLinear[PureSVD]:
    """Decompose both domains side by side, choose and refit."""
    found = fit(_pure_svds, data, both=True)
    assert found is not None, "there is a candidate"
    return found


BASELINES: dict[str, Callable[[MatchData], FittedLinear[LinearModel] | None]] = {
    f"{name}, {where}": partial(fit, models, both=both)
    for where, both in (("target", False), ("both", True))
    for name, models in (("ItemKNN", item_knns), ("EASE", eases), ("PureSVD", _pure_svds))
}


class Weights(NamedTuple):
    """Weights of the parts, each scaled to scores with a root mean square of 1.

    The spectral part has 1.
    """

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


def join(data: MatchData, fitted: FittedLinear[PureSVD], trained: TrainedVectors) -> JoinedVectors:
    """Choose the weights, and join.

    Args:
        data: that both were made of.
        fitted: the joint spectral part.
        trained: the encoder's part.
    """
    chosen, validation = _choose(data, fitted.chosen, trained.validated)
    target = data.whole().target
    degrees = target.degrees()
    svd = fitted.served
    popularity = log_popularity(degrees[1])
    beta = chosen.popularity / root_mean_square(popularity)
    states = _states(svd.model)
    both = target.beside(data.source)
    roots = np.maximum(both.degrees()[0], 1).astype(np.float32) ** np.float32(-0.5)
    users = [both.to_users(roots[both.users]).times(states)]
    items = [
        svd.model.found.items[: len(popularity), : svd.model.num_values] * svd.factors[:, None]
    ]
    weight = chosen.encoder / _size(data, trained)
    if weight:
        in_target = torch.from_numpy(degrees[0] > 0)
        users.append(trained.users * (weight * in_target[:, None]))
        items.append(trained.items)
        beta += weight  # of the encoder's prior
    if beta:
        users.append(torch.full((data.target.num_users, 1), beta))
        items.append(popularity[:, None])
    target_states, source_states = (
        part.numpy() for part in states.split([len(popularity), data.source.num_items])
    )
    folding = JoinedFolding(
        target_states=target_states,
        source_states=source_states,
        encoder=trained.folding if weight else None,
        encoder_weight=weight,
        popularity=beta,
        degrees=degrees[1],
    )
    settings = (
        f"spectral 1 ({svd.settings}), encoder {chosen.encoder:g}, popularity {chosen.popularity:g}"
    )
    return JoinedVectors(torch.cat(users, 1), torch.cat(items, 1), folding, settings, validation)


def _choose(data: MatchData, svd: Tuned[PureSVD], trained: Validated) -> tuple[Weights, float]:
    """Choose the weights; of equals the first."""
    popularity = log_popularity(data.target.degrees()[1])
    popularity = popularity / root_mean_square(popularity)
    encoder_unit = 1 / _size(data, trained)
    grid = [Weights(*w) for w in product(ENCODER_WEIGHTS, POPULARITY_WEIGHTS)]

    def tables(rows: Tensor) -> Iterator[Tensor]:
        base = svd.model.scores(rows) * svd.factors
        encoder = trained.scores(rows) * encoder_unit
        return (torch.add(base + popularity * w.popularity, encoder, alpha=w.encoder) for w in grid)

    hits = [smooth_hit(ranks) for ranks in data.evaluate().ranks_of_each(tables)]
    best = int(np.argmax(hits))
    return grid[best], hits[best]


def _size(data: MatchData, vectors: TrainedVectors | Validated) -> float:
    """Compute the root mean square of the scores of some users."""
    return root_mean_square(
        vectors.scores(torch.from_numpy(data.evaluate().held_out.users[:SCALE_USERS]))
    )


def _states(model: PureSVD) -> Tensor:
    """Compute what each item adds to its users' rows: U s^power = Du^-1/2 X F, F = columns V s^(power - 1)."""
    k = model.num_values
    found = model.found
    return found.columns[:, None] * found.items[:, :k] * found.values[:k] ** (model.power - 1)


def run_training(
    domains: Domains,
    folder: Path,
    overrides: Sequence[str],
    density: float,
    num_validation: int,
    console: Console,
) -> None:
    """Train; write the vectors, and their figures beside the baselines'.

    Args:
        domains: the data.
        folder: of the vectors.
        overrides: `KEY=VALUE` of `MatchOptions`.
        density: share of the target's edges to train on, in (0, 1].
        num_validation: most users to validate on.
        console: shows progress and figures.

    Raises:
        ConfigError: no such option, or the density is out of range.
        DataError: the data cannot be trained on, or the folder cannot be written.
    """
    options = override(MatchOptions(), overrides)
    if not 0 < density <= 1:
        raise ConfigError(f"--density: {density} is not in (0, 1]")
    data = split(domains, density, num_validation, options.seed)
    if (words := domains.about_near_duplicates()) is not None:
        console.print(words, markup=False, highlight=False)
    if not domains.ids_are_apart:
        console.print(
            "Both domains have some item ids: an id of a request's history is the target's item, "
            "so what a user does "
            "in the source later is not folded in."
        )
    with training_progress(console) as show:
        trained = Trainer(data, options).run(show)
    served = join(data, fit_joint_svd(data), trained)
    console.print(f"served: {served.settings}; {served.items.shape[1]} dimensions")
    evaluate = domains.evaluate()
    ranks = evaluate.ranks(served.users, served.items)
    with_near_duplicates = domains.judge_with_near_duplicates().ranks(served.users, served.items)
    figures = {
        "validation_smooth_hit": served.validation,
        **_figures(ranks),
        **_figures(with_near_duplicates, "_near_duplicates"),
    }
    console.print(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    by_baseline = {
        name: evaluate.ranks_by(fitted.served.scores)
        for name, fit in BASELINES.items()
        if (fitted := fit(data))
    }
    for name, found in by_baseline.items():
        console.print(
            f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in _figures(found).items())
        )
    comparison = compare_hits("what is served", ranks, by_baseline)
    if comparison is not None:
        console.print(comparison.text(), markup=False, highlight=False)
    version = save(export(domains, data, served, figures), folder)
    console.print(f"vectors {version} in {folder}")
    user = domains.users[int(data.target.users[0])].user
    console.print(how_to_match(folder, user), soft_wrap=True, markup=False, highlight=False)


def _figures(ranks: F64, suffix: str = "") -> dict[str, float]:
    """Compute what is kept beside the vectors."""
    return {f"hit_{k}{suffix}": hit_ratio(ranks, k) for k in (10, 50, 100)} | {
        f"ndcg_10{suffix}": ndcg(ranks, 10)
    }


def export(
    domains: Domains, data: MatchData, joined: JoinedVectors, figures: dict[str, float]
) -> Vectors:
    """Join vectors with the names and histories that serving needs.

    Args:
        domains: every edge in them counts as seen.
        data: that the training saw: it decides which users have vectors.
        joined: the vectors.
        figures: metrics to keep beside the vectors, by name.
    """
    target_starts, target_items = _by_user(domains.target)
    source_starts, source_items = _by_user(domains.source)
    num_source = domains.source.num_items
    return Vectors(
        user_keys=domains.users,
        item_ids=domains.target_ids,
        users=joined.users.numpy(),
        items=joined.items.numpy(),
        in_target=data.whole().target.degrees()[0] > 0,
        in_source=data.source.degrees()[0] > 0,
        popularity=domains.target.degrees()[1],
        seen_starts=target_starts,
        seen_items=target_items.astype(np.int32),
        figures=figures,
        folding=joined.folding,
        source=SourceItems(
            ids=domains.source_ids if domains.ids_are_apart else None,
            seen_starts=source_starts,
            seen_items=source_items.astype(np.int32),
            near_duplicate_starts=np.searchsorted(
                domains.near_duplicates.source_items, np.arange(num_source + 1)
            ),
            near_duplicate_items=domains.near_duplicates.target_items.astype(np.int32),
        ),
    )


def _by_user(graph: Graph) -> tuple[I64, I64]:
    order = np.argsort(graph.users, kind="stable")
    return np.searchsorted(graph.users[order], np.arange(graph.num_users + 1)), graph.items[order]
