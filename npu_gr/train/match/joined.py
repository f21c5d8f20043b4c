"""`npu-gr train match`: train the parts of cross-domain vectors, and join them.

A score is the inner product of a user's and an item's row. A row has three parts:

    item   [ V d^g     | z_i   | p_i  ]     U, s, V: joint SVD of both domains (`fit_joint_svd`)
    user   [ U s^power | w z_u | beta ]     z: vectors of the graph encoder;  p: log popularity

Each part is scaled so that its scores have a root mean square of 1. The weights w and beta are
those with the best smooth HIT on the validation; a part with weight 0 has no columns. The served
vectors are made from all edges, those of the validation included.

U s^power of a user is a sum over the user's items in both domains (`JoinedFolding`), so it can be
computed for any user, also for one with source items only, or one who comes after the training. The
encoder has vectors of target users only; z_u of other users is 0.

The baselines are ItemKNN, EASE and PureSVD, on the target alone and on both domains. Each is tuned
with popularity terms on the same validation, and then refitted to all edges.
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
from npu_gr.train.distributed import joined
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
from npu_gr.train.resume import NO_STATES, STATES, TrainingStates, digest_of
from npu_gr.train.steps import training_progress
from npu_gr.vector_search.fold import JoinedFolding, SourceItems
from npu_gr.vector_search.vectors import Vectors, save

ITEM_EXPONENT = 0.25  # of `spectrum`
# numbers of singular values to try, and the power of the values in the users' rows
FILTERS = ((8, 1.0), (16, 1.0), (32, 1.0), (64, 1.0), (64, 3.0))
ENCODER_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0)
POPULARITY_WEIGHTS = (0.0, 0.2, 0.5, 1.0)

M = TypeVar("M", bound=LinearModel, covariant=True)
# graph, number of scored items (the first ones) -> candidates
Models = Callable[[Graph, int], Iterator[Candidate[M]]]


class FittedLinear(NamedTuple, Generic[M]):
    """A model before and after its refit."""

    chosen: Tuned[M]  # fitted without the validation's edges
    served: Tuned[M]  # the same settings, fitted to all edges


def fit(models: Models[M], data: MatchData, *, both: bool) -> FittedLinear[M] | None:
    """Choose a candidate on the validation, and refit it; None = there are no candidates.

    Args:
        models: Function that lists the candidates; it lists the same settings for any data.
        data: Data to fit to.
        both: Use both domains, not the target alone.
    """

    def candidates(of: MatchData) -> Iterator[Candidate[M]]:
        return models(of.target.join(of.source) if both else of.target, of.target.num_items)

    found = list(candidates(data))  # cheap: a candidate is fitted by its `make`
    if not found:
        return None
    evaluator = data.evaluator()
    chosen = tune(found, data.target.degrees()[1], evaluator)
    full = data.with_validation()
    return FittedLinear(
        chosen,
        chosen.refitted(candidates(full), full.target.degrees()[1], evaluator.held_out.users),
    )


def _pure_svds(graph: Graph, num_scored: int) -> Iterator[Candidate[PureSVD]]:
    """List the PureSVD candidates.

    Both domains have the same weight. A weight chosen on the validation would be too low for the
    source: validation users have more target edges than the users who depend on the source.
    """
    found = spectrum(graph, ITEM_EXPONENT, max(FILTERS)[0])
    for num_values, power in FILTERS:
        make = partial(PureSVD, found, num_scored, num_values, power)
        yield Candidate(f"{num_values} values to the power {power:g}", make)


def fit_joint_svd(data: MatchData) -> FittedLinear[PureSVD]:
    """Fit PureSVD to both domains: choose its settings, and refit."""
    found = fit(_pure_svds, data, both=True)
    assert found is not None, "PureSVD has candidates for any data"
    return found


BASELINES: dict[str, Callable[[MatchData], FittedLinear[LinearModel] | None]] = {
    f"{name}, {where}": partial(fit, models, both=both)
    for where, both in (("target", False), ("both", True))
    for name, models in (("ItemKNN", item_knns), ("EASE", eases), ("PureSVD", _pure_svds))
}


class Weights(NamedTuple):
    """Weights of the parts relative to the spectral part, which has weight 1."""

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
    """Choose the weights of the parts, and join the parts.

    Args:
        data: Data that both parts were made from.
        fitted: Spectral part.
        trained: Part of the graph encoder.
    """
    chosen, validation = _choose(data, fitted.chosen, trained.validated)
    target = data.with_validation().target
    degrees = target.degrees()
    svd = fitted.served
    popularity = log_popularity(degrees[1])
    beta = chosen.popularity / root_mean_square(popularity)
    states = _states(svd.model)
    both = target.join(data.source)
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
        beta += weight  # the encoder's scores contain the popularity prior
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
    """Choose the weights with the best smooth HIT on the validation; ties go to the first ones."""
    popularity = log_popularity(data.target.degrees()[1])
    popularity = popularity / root_mean_square(popularity)
    encoder_unit = 1 / _size(data, trained)
    grid = [Weights(*w) for w in product(ENCODER_WEIGHTS, POPULARITY_WEIGHTS)]

    def tables(rows: Tensor) -> Iterator[Tensor]:
        base = svd.model.scores(rows) * svd.factors
        encoder = trained.scores(rows) * encoder_unit
        return (torch.add(base + popularity * w.popularity, encoder, alpha=w.encoder) for w in grid)

    hits = [smooth_hit(ranks) for ranks in data.evaluator().ranks_of_each(tables)]
    best = int(np.argmax(hits))
    return grid[best], hits[best]


def _size(data: MatchData, vectors: TrainedVectors | Validated) -> float:
    """Compute the root mean square of the scores of the first validation users."""
    return root_mean_square(
        vectors.scores(torch.from_numpy(data.evaluator().held_out.users[:SCALE_USERS]))
    )


def _states(model: PureSVD) -> Tensor:
    """Compute F, what each item adds to its users' rows.

    U s^power = Du^-1/2 X F with F = columns V s^(power - 1).
    """
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
    """Train, write the vectors, and compare them with the baselines.

    All ranks of `torchrun` train; the first one does the rest.

    Args:
        domains: Data to train on and to test on.
        folder: Folder to write the vectors to.
        overrides: `KEY=VALUE` of `MatchOptions`.
        density: Share of the target's edges to train on, in (0, 1].
        num_validation: Most users to validate on.
        console: Terminal for progress and figures.

    Raises:
        ConfigError: no such option, or the density is out of range.
        DataError: the data cannot be trained on, or the folder cannot be written.
    """
    options = override(MatchOptions(), overrides)
    if not 0 < density <= 1:
        raise ConfigError(f"--density: must be above 0 and at most 1, got {density}")
    data = split(domains, density, num_validation, options.seed)
    with joined() as all_ranks:
        shown = console if all_ranks.is_first else Console(quiet=True)
        _warn(domains, shown)
        arrays = (data.source.users, data.source.items, data.target.users, data.target.items)
        states = NO_STATES
        if all_ranks.is_first:
            states = TrainingStates(folder / STATES, digest_of(*arrays))
        with training_progress(shown) as show:
            trained = Trainer(data, options, states).run(show)
    if not all_ranks.is_first:
        return
    states.remove()
    drawn = "" if len(domains.test.users) == domains.num_testable else " drawn at random"
    console.print(
        f"validated on {len(data.validation.users):,} users (at most {num_validation:,}, drawn at "
        f"random), tested on {len(domains.test.users):,}{drawn} of {domains.num_testable:,}",
        highlight=False,
        soft_wrap=True,
    )
    served = join(data, fit_joint_svd(data), trained)
    console.print(f"served: {served.settings}; {served.items.shape[1]} dimensions")
    evaluator = domains.evaluator()
    ranks = evaluator.ranks(served.users, served.items)
    with_near_duplicates = domains.evaluator_with_near_duplicates().ranks(
        served.users, served.items
    )
    figures = {
        "validation_smooth_hit": served.validation,
        **_figures(ranks),
        **_figures(with_near_duplicates, "_near_duplicates"),
    }
    console.print(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    by_baseline = {
        name: evaluator.ranks_by(fitted.served.scores)
        for name, fit in BASELINES.items()
        if (fitted := fit(data))
    }
    for name, found in by_baseline.items():
        console.print(
            f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in _figures(found).items())
        )
    comparison = compare_hits("joined vectors", ranks, by_baseline)
    if comparison is not None:
        console.print(comparison.text(), markup=False, highlight=False)
    version = save(export(domains, data, served, figures), folder)
    console.print(f"vectors {version} in {folder}")
    user = domains.users[int(data.target.users[0])].user
    console.print(how_to_match(folder, user), soft_wrap=True, markup=False, highlight=False)


def _warn(domains: Domains, console: Console) -> None:
    if (words := domains.about_near_duplicates()) is not None:
        console.print(words, markup=False, highlight=False)
    if not domains.ids_are_apart:
        console.print(
            "WARNING: some item ids are in both domains. An id in a request's history is taken as "
            "the target's item, so new source events of a user do not change the user's matches. "
            "Use different ids in the two domains to avoid this."
        )


def _figures(ranks: F64, suffix: str = "") -> dict[str, float]:
    """Compute the figures that the folder of the vectors keeps."""
    return {f"hit_{k}{suffix}": hit_ratio(ranks, k) for k in (10, 50, 100)} | {
        f"ndcg_10{suffix}": ndcg(ranks, 10)
    }


def export(
    domains: Domains, data: MatchData, joined: JoinedVectors, figures: dict[str, float]
) -> Vectors:
    """Add the names and histories that serving needs to the vectors.

    Args:
        domains: Domains whose edges all count as seen.
        data: Data of the training; users without edges in it have no vector.
        joined: Vectors to serve.
        figures: Metric -> value, saved with the vectors.
    """
    target_starts, target_items = _by_user(domains.target)
    source_starts, source_items = _by_user(domains.source)
    num_source = domains.source.num_items
    return Vectors(
        user_keys=domains.users,
        item_ids=domains.target_ids,
        users=joined.users.numpy(),
        items=joined.items.numpy(),
        in_target=data.with_validation().target.degrees()[0] > 0,
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
