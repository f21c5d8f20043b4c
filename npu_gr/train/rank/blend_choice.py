"""Choose the order that is served, on the validation: fitted weights, one source alone, or ItemKNN's own order.

the kind of the neighbours, with its fitted weights
one source in their place, if it is surely better
ItemKNN, unless what there is is shown to be better

Choose the kind of the neighbours: the one whose fitted order is best on the validation.

A later kind takes the place of the best one before it if it is better by more than a standard
error, paired by user: by NDCG@10, which is what is shown; or by the likelihood, if NDCG@10 is no
lower. The likelihood tells kinds apart where hits are rare, but it also counts items that nobody
sees. So it is no ground for a kind whose requests read more neighbours of an item: on MovieLens
linear ones were chosen by it, and a recommend took .2 ms more for no better list.

Does a source by itself order the validation better than the fitted order? Then it is named, and may
be served.

The weights are fitted by likelihood, which also counts items that nobody sees. So NDCG@10 of each
source is compared with that of the fitted order, paired by user, on the users by whom the order was
fitted. These favour the order, if anything: what is better there is better.

The simple order: ItemKNN as the baseline is, with its tuned settings, in the terms of a fitted
order.

    s(i) = sum over the distinct j of the history of w(j, i) + p pop(i) + e seen(i)

w and p are the baseline's: of the items that a user lacks this is its score, less a constant. Six
weights that are fitted on a hundred next items are worse than this order: the likelihood weighs
popularity for the whole list, and what it is worth among the first ten is another matter. So the
fitted order has to be shown to be better than this one.

e alone is fitted. A request that leaves out what was seen does not count it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from npu_gr.core.arrays import F32
from npu_gr.model.blend import WEIGHTS, ScoreBlend
from npu_gr.model.hstu import HSTU
from npu_gr.train.baselines import LinearBaseline, graph_of
from npu_gr.train.data import InteractionLog, NextItem
from npu_gr.train.evaluate import BLOCK_USERS
from npu_gr.train.linear import ItemKNN, log_popularity, root_mean_square
from npu_gr.train.metrics import F64, Difference, difference_of_users, ndcg_of_each
from npu_gr.train.next_item import K, rank_next_items
from npu_gr.train.rank.blend import (
    ItemList,
    ListSizes,
    count_blend,
    count_transitions,
    fit_blend,
    retrieved_lists,
)
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.item_similarity import USUAL, NeighbourKind, count_kinds, linear_neighbours
from npu_gr.train.rank.losses import HeldOutEvents


class ChosenBlend(NamedTuple):
    """How an order is counted in any events of the log."""

    task: str  # that predicts the next item
    kind: NeighbourKind = USUAL
    weights: Mapping[str, float] | None = None  # None = there is no validation
    better: Mapping[str, Difference] = {}  # sources above the fitted weights
    simple: ItemKNNFallback | None = None  # None = there is no ItemKNN, or no validation

    def counted(self, log: InteractionLog) -> ScoreBlend:
        """Count it in the trained events of a log.

        Without a validation the weights are retrieval's alone.
        """
        if self.simple is not None and self.simple.is_served:
            return self.simple.counted(log, self.task)
        order = count_blend(log, self.task, self.kind)
        return order if self.weights is None else replace(order, weights=self.weights)

    def text(self) -> str:
        """Say what was chosen."""
        if self.simple is not None and self.simple.is_served:
            return self.simple.text()
        assert self.weights is not None, "there is a validation"
        weights = ", ".join(f"{name} {weight:.2f}" for name, weight in self.weights.items())
        beside = "" if self.simple is None else f"; {self.simple.text()}"
        return f"order: {weights}; neighbours: {self.kind.name}{beside}"


def choose_blend(
    model: HSTU,
    task: str,
    held_out: HeldOutEvents,
    sizes: ListSizes,
    item_knn: LinearBaseline | None,
) -> ChosenBlend:
    """Fit the order on the validation, and compare it with each source alone, and with ItemKNN.

    Args:
        model: that retrieves, in evaluation mode, its items frozen; trained on nothing of the
            validation.
        task: that predicts the next item.
        held_out: the validation.
        sizes: of its lists.
        item_knn: with its settings; None = the log is too large for it.
    """
    log, targets = held_out
    if not targets:
        return ChosenBlend(task)
    transitions = count_transitions(log, task)
    kinds = count_kinds(log)
    inputs = LogInputs(log, model)
    lists = list(
        retrieved_lists(inputs, model, transitions, targets, sizes, others=[*kinds.values()])
    )
    counted = {
        kind: replace(transitions, neighbours=neighbours) for kind, neighbours in kinds.items()
    }
    kind, order, own = choose_kind(counted, log, lists, targets)
    better = better_alone(order, log, own, targets)
    served = to_serve(order, better)
    simple = None
    if item_knn is not None:
        figures = (ndcg_cross_fitted if served is order else ndcg_of_lists)(
            served, log, own, targets
        )
        simple = beside_simple(item_knn, order, figures, log, own, targets)
    return ChosenBlend(task, kind, served.weights, better, simple)


FOLDS = 10  # of the validation's users: each is ordered by weights that the others were fitted on


class FittedKind(NamedTuple):
    """An order with the neighbours of one kind."""

    kind: NeighbourKind
    order: ScoreBlend
    lists: Sequence[ItemList]  # of the validation, with these neighbours


def choose_kind(
    counted: Mapping[NeighbourKind, ScoreBlend],
    log: InteractionLog,
    lists: Sequence[ItemList],
    targets: Sequence[NextItem],
) -> FittedKind:
    """Fit the order with the neighbours of each kind, and choose the best.

    Args:
        counted: kind -> transitions and neighbours, the usual kind first; they differ in their
            neighbours only.
        log: holds the events.
        lists: of the targets.
        targets: the validation's next items, at least one.
    """
    found: list[tuple[FittedKind, F64, F64]] = []
    for kind, order in counted.items():
        own = [
            one._replace(neighbours=order.alike(log.items[log.starts[user] : event], one.items))
            for one, (user, event) in zip(lists, targets, strict=True)
        ]
        fitted = fit_blend(order, log, own, targets)
        likelihood = list_likelihood(fitted, log, own, targets)
        found.append(
            (FittedKind(kind, fitted, own), ndcg_of_lists(fitted, log, own, targets), likelihood)
        )
    best = found[0]
    for other in found[1:]:
        of_places, of_likelihood = other[1] - best[1], other[2] - best[2]
        is_slower = other[0].kind.num_neighbours > best[0].kind.num_neighbours
        if is_above_0(of_places) or (
            not is_slower and of_places.mean() >= 0 and is_above_0(of_likelihood)
        ):
            best = other
    return best[0]


def is_above_0(gaps: F64) -> bool:
    """Whether a mean is above 0 by more than a standard error; not of nothing."""
    return len(gaps) > 0 and float(gaps.mean()) > float(gaps.std()) / len(gaps) ** 0.5


def list_likelihood(
    order: ScoreBlend, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> F64:
    """Compute the log-probability of each next item within its list.

    Those that their lists lack are left out.
    """
    each = []
    for found, (_, event) in zip(lists, targets, strict=True):
        place = np.flatnonzero(found.items == log.items[event])
        if len(place):
            scores = found.scores(order).astype(np.float64)
            top = scores.max()
            each.append(scores[place[0]] - top - np.log(np.exp(scores - top).sum()))
    return np.array(each)


def ndcg_of_lists(
    order: ScoreBlend, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> F64:
    """Compute NDCG@10 of each next item by the order of its list, [targets].

    What a list lacks stands behind it.
    """
    rows = (found.over_all(found.scores(order), log.num_items) for found in lists)
    return ndcg_of_each(rank_next_items(log, targets, rows).evaluated, K)


def ndcg_cross_fitted(
    order: ScoreBlend, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> F64:
    """Compute NDCG@10 of each next item, [targets], by weights that were fitted on other users: as of new ones."""
    fold_of = np.arange(len(targets)) % FOLDS
    orders = []
    for fold in range(FOLDS):
        others = np.flatnonzero(fold_of != fold).tolist()
        orders.append(
            fit_blend(order, log, [lists[row] for row in others], [targets[row] for row in others])
        )
    scores = (
        found.scores(orders[fold]) for found, fold in zip(lists, fold_of.tolist(), strict=True)
    )
    rows = (found.over_all(own, log.num_items) for found, own in zip(lists, scores, strict=True))
    return ndcg_of_each(rank_next_items(log, targets, rows).evaluated, K)


SOURCES = ("retrieval", "transitions", "neighbours", "popularity")  # the terms that find items too


def alone(order: ScoreBlend, source: str) -> ScoreBlend:
    """Let one source decide: weight 1 for it, and 0 for all others but `seen`.

    `seen` stays as fitted: it is 0 of every unseen item, so among these the order is the source's
    own.
    """
    weights = dict.fromkeys(WEIGHTS, 0.0) | {source: 1.0, "seen": order.weights["seen"]}
    return replace(order, weights=weights)


def better_alone(
    order: ScoreBlend, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> dict[str, Difference]:
    """Compare every source alone with the fitted order.

    Args:
        order: fitted.
        log: with the users' histories.
        lists: of the targets.
        targets: the validation's next items.

    Returns:
        Source -> its NDCG@10 less the fitted order's, of the sources whose mean is above it, the
        highest first.
    """
    if not targets:
        return {}

    fitted = ndcg_of_lists(order, log, lists, targets)
    others = {
        source: ndcg_of_lists(alone(order, source), log, lists, targets) for source in SOURCES
    }
    gaps = {source: difference_of_users(figures, fitted) for source, figures in others.items()}
    best_first = sorted(gaps, key=lambda source: -gaps[source].mean)
    return {source: gaps[source] for source in best_first if gaps[source].mean > 0}


def to_serve(order: ScoreBlend, better: Mapping[str, Difference]) -> ScoreBlend:
    """Choose the order that is served: of one source alone where that is better by more than chance, else the fitted.

    Args:
        order: fitted.
        better: as `better_alone` returns them.
    """
    source = _surely(better)
    return order if source is None else alone(order, source)


def in_words(better: Mapping[str, Difference]) -> list[str]:
    """Warn of each source that is above the fitted order, and say which one is served in its place."""
    served = _surely(better)
    return [
        f"WARNING: {source} alone, less the fitted order, on the validation: NDCG@{K} "
        f"{gap.mean:+.4f} "
        f"({gap.low:+.4f} .. "
        f"{gap.high:+.4f})" + ("; its order is served" if source == served else "")
        for source, gap in better.items()
    ]


def _surely(better: Mapping[str, Difference]) -> str | None:
    """Name the best source whose interval excludes 0; None = there is none."""
    return next((source for source, gap in better.items() if gap.low > 0), None)


NOTHING = dict.fromkeys(WEIGHTS, 0.0)


class ItemKNNFallback(NamedTuple):
    """ItemKNN as an order, and how the fitted one stands beside it on the validation."""

    baseline: LinearBaseline  # ItemKNN
    seen: float  # e
    fitted_less_it: Difference  # NDCG@10 of the fitted order less this one's
    is_served: bool  # it takes the place of the fitted order, which is not shown to be better

    def counted(self, log: InteractionLog, task: str) -> ScoreBlend:
        """Count it in the trained events of a log, for the task that predicts the next item."""
        return as_blend(self.baseline.refitted(log), log, task, self.seen)

    def text(self) -> str:
        """Say whether it is served, and why."""
        gap = self.fitted_less_it
        less = (
            f"the fitted order less ItemKNN's: NDCG@{K} {gap.mean:+.4f} ({gap.low:+.4f} .. "
            f"{gap.high:+.4f})"
        )
        if not self.is_served:
            return less
        return (
            f"{less}: not shown to be better, so ItemKNN's is served: "
            f"{self.baseline.tuned.settings}"
        )


def beside_simple(
    baseline: LinearBaseline,
    order: ScoreBlend,
    figures: F64,
    log: InteractionLog,
    lists: Sequence[ItemList],
    targets: Sequence[NextItem],
) -> ItemKNNFallback:
    """Make the simple order, and compare the fitted one with it.

    Args:
        baseline: ItemKNN with its settings, fitted to any log of these users and items.
        order: fitted.
        figures: [targets] its NDCG@10 of each next item, by weights of which that item knows
            nothing.
        log: with the users' histories; its trained events are counted.
        lists: of the targets.
        targets: the validation's next items, at least one.
    """
    fitted = baseline.refitted(log)
    of_itself = _item_knn(fitted).own.numpy() * fitted.tuned.factors.numpy()

    def scores(seen: float) -> Iterator[F64]:
        for start in range(0, len(targets), BLOCK_USERS):
            block = targets[start : start + BLOCK_USERS]
            rows = fitted.tuned.scores(torch.tensor([user for user, _ in block])).double().numpy()
            for (user, event), row in zip(block, rows, strict=True):
                history = np.unique(log.items[log.starts[user] : event])
                row[history] += seen - of_itself[history]
                yield row

    scored = [
        found._replace(neighbours=row[found.items].astype(np.float32))
        for found, row in zip(lists, scores(0.0), strict=True)
    ]
    by_score = NOTHING | {"neighbours": 1.0}
    seen = fit_blend(order, log, scored, targets, start=by_score, free=("seen",)).weights["seen"]
    simple = ndcg_of_each(rank_next_items(log, targets, scores(seen)).evaluated, K)
    gaps = figures - simple
    return ItemKNNFallback(
        baseline, seen, difference_of_users(figures, simple), is_served=not is_above_0(gaps)
    )


def as_blend(baseline: LinearBaseline, log: InteractionLog, task: str, seen: float) -> ScoreBlend:
    """Write ItemKNN as an order.

    Args:
        baseline: ItemKNN, fitted to the log.
        log: its trained events count.
        task: that predicts the next item.
        seen: weight of what is in the history.
    """
    tuned, degrees = baseline.tuned, graph_of(log).degrees()[1]
    # the baseline's, but for a constant
    popularity = np.log((degrees + 0.5) / (degrees + 0.5).sum())
    weight = tuned.weight / root_mean_square(log_popularity(degrees))
    model, factors = _item_knn(baseline), tuned.factors.numpy()

    def weights(start: int, stop: int) -> F32:
        scaled: F32 = model.weights(start, stop).numpy() * factors
        return scaled

    return replace(
        count_transitions(log, task),
        weights=NOTHING | {"neighbours": 1.0, "popularity": weight, "seen": seen},
        popularity=popularity.astype(np.float32),
        neighbours=linear_neighbours(weights, log.num_items),
    )


def _item_knn(baseline: LinearBaseline) -> ItemKNN:
    assert isinstance(baseline.tuned.model, ItemKNN), "the baseline is ItemKNN"
    return baseline.tuned.model
