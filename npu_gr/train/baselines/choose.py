"""Fit the baselines of the next item to a log; choose their settings on its validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.train.baselines.counts import Baseline, DecayedTransitions, Markov, Popularity
from npu_gr.train.baselines.linear import (
    EASE,
    Candidate,
    ItemKNN,
    LinearModel,
    PureSVD,
    Tuned,
    ease_is_too_large,
    spectrum,
    tune,
)
from npu_gr.train.data import InteractionLog, Split
from npu_gr.train.judge import Graph, HeldOut, Judge, unique_edges
from npu_gr.train.metrics import F64
from npu_gr.train.next_item import MANY_REPEATS, sample_targets

VALIDATION_USERS = 1000  # most of them
MAX_EDGES = 2_000_000  # of a log whose linear models are fitted: the validation of one takes minutes above it
USER_EXPONENTS = (0.0, 0.5)  # of ItemKNN
RIDGES = (10.0, 100.0, 1000.0)  # of EASE
ITEM_EXPONENTS = (0.0, 0.5)  # of ItemKNN, and of PureSVD
NUM_VALUES = (16, 32, 64)  # of PureSVD

Models = Callable[[Graph], Iterator[Candidate[LinearModel]]]


class FittedBaselines(NamedTuple):
    """Baselines of one log."""

    fitted: list[Baseline]
    left_out: tuple[str, ...]  # why others are not among them

    @property
    def item_knn(self) -> LinearBaseline | None:
        """ItemKNN; None = it is left out."""
        linear = (one for one in self.fitted if isinstance(one, LinearBaseline))
        return next((one for one in linear if isinstance(one.tuned.model, ItemKNN)), None)


@dataclass(slots=True, eq=False)
class LinearBaseline:
    """A linear model of who has what, which knows no order of events."""

    name: str
    tuned: Tuned[LinearModel]
    models: Models  # that it was chosen among
    scale_users: I64  # some of the validation's, whose scores decide the scale

    def refitted(self, log: InteractionLog) -> LinearBaseline:
        """Fit the same settings to the trained events of another log of the same users and items."""
        graph = graph_of(log)
        tuned = self.tuned.refitted(self.models(graph), graph.degrees()[1], self.scale_users)
        return replace(self, tuned=tuned)

    def liking(self, log: InteractionLog) -> F64 | None:
        return None

    def next_items(self, log: InteractionLog, user: int) -> F64:
        scores: F64 = self.tuned.scores(torch.tensor([user]))[0].double().numpy()
        return scores


def fit_baselines(log: InteractionLog, split: Split, seed: int) -> FittedBaselines:
    """Fit popularity, Markov counts, decayed transitions, ItemKNN, EASE and PureSVD to the trained events.

    The linear models' settings are those with the best smooth HIT on a split of the trained events: of unseen items, or
    of all where most of the next ones are repeats.

    Args:
        log: the whole of it.
        split: that made it; splits the trained events again.
        seed: draws the users of the validation.
    """
    fitted: list[Baseline] = [Popularity(log), Markov(log), DecayedTransitions(log)]
    graph = graph_of(log)
    if len(graph.users) > MAX_EDGES:
        words = f"ItemKNN, EASE and PureSVD are left out: {len(graph.users)} pairs of user and item, over {MAX_EDGES}"
        return FittedBaselines(fitted, (words,))
    too_large = ease_is_too_large(graph)
    kinds: dict[str, Models] = {"ItemKNN": _item_knns, "EASE": _eases, "PureSVD": _svds}
    if too_large is not None:
        del kinds["EASE"]
    earlier, judge = _validation(log, split, seed)
    for name, models in kinds.items():
        chosen = tune(models(earlier), earlier.degrees()[1], judge)
        fitted.append(LinearBaseline(name, chosen, models, judge.held_out.users).refitted(log))
    return FittedBaselines(fitted, () if too_large is None else (too_large,))


def _validation(log: InteractionLog, split: Split, seed: int) -> tuple[Graph, Judge]:
    """Split the trained events again; a log that is too small for it has nothing to validate on."""
    try:
        earlier = log.only_trained(split)
    except DataError:
        earlier = log.all_trained()
    targets = sample_targets(earlier.next_items(), VALIDATION_USERS, seed)
    users = np.array([target.user for target in targets], np.int64)
    items = earlier.items[np.array([target.event for target in targets], np.int64)]
    graph = graph_of(earlier)
    had = np.isin(users * graph.num_items + items, graph.users * graph.num_items + graph.items)
    judges_all = len(had) > 0 and had.mean() > MANY_REPEATS
    return graph, Judge.make(HeldOut(users, items), graph.none() if judges_all else graph)


def graph_of(log: InteractionLog) -> Graph:
    """Make the graph of who has what in the trained events."""
    trained = log.trained
    return unique_edges(log.users[trained], log.items[trained], log.num_users, log.num_items)


def _item_knns(graph: Graph) -> Iterator[Candidate[LinearModel]]:
    for of_user, of_item in product(USER_EXPONENTS, ITEM_EXPONENTS):
        make = partial(ItemKNN, graph, graph.num_items, of_user, of_item)
        yield Candidate(f"user exponent {of_user:g}, item exponent {of_item:g}", make)


def _eases(graph: Graph) -> Iterator[Candidate[LinearModel]]:
    for ridge in RIDGES:
        yield Candidate(f"ridge {ridge:g}", partial(EASE, graph, graph.num_items, ridge))


def _svds(graph: Graph) -> Iterator[Candidate[LinearModel]]:
    for exponent in ITEM_EXPONENTS:
        found = spectrum(graph, exponent, max(NUM_VALUES))
        for num_values in NUM_VALUES:
            make = partial(PureSVD, found, graph.num_items, num_values, 1.0)
            yield Candidate(f"item exponent {exponent:g}, {num_values} values", make)
