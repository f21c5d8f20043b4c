"""Choose the score blend to serve, on the validation, in five steps.

0. Transitions from the last event alone, if they are likelier than those from the last five by more
   than a standard error.

1. The kind of neighbours whose fitted blend is best. A kind replaces the best one before it if its
   NDCG@10 is higher by more than a standard error, paired by user; or if its likelihood is, and its
   NDCG@10 is not lower. The likelihood distinguishes kinds where hits are rare, but it also depends
   on items far down the list, which no user sees. So it cannot choose a kind that reads more
   neighbours per item: on MovieLens it would choose linear neighbours, and a recommend would take
   0.2 ms longer for the same lists.

2. One source alone (retrieval, transitions, neighbours, popularity), if its NDCG@10 is
   significantly higher than that of the fitted blend. The weights are fitted by likelihood, so this
   can happen. The comparison uses the users on whom the blend was fitted, which favours the blend:
   a source that is better even there is better.

3. The fitted blend with one term more (`own_or_next`), where people have items again, by the rule
   of step 1.

4. ItemKNN with the baseline's settings, unless the result of the steps before is better by more
   than a standard error. Where many next items are repeats, it need only be better: what decides
   there are the own terms, which both have, and the order of events, which ItemKNN ignores.

       s(i) = sum over the distinct items j of the history of  w(j, i) + p pop(i) + own(i)

   w and p are those of the baseline, so the score of an unseen item is the baseline's, minus a
   constant. Only the three weights of own(i), an item of the history, are fitted; they do not
   matter if a request excludes seen items. On small
   validations (100 next items) this fallback beats eight fitted weights: the likelihood weighs
   popularity for the whole list, but its weight for the first ten places should be another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from npu_gr.core.arrays import F32
from npu_gr.model.blend import (
    DECAY,
    LAST_ALONE,
    OWN_OR_NEXT,
    OWN_WEIGHTS,
    WEIGHTS,
    ScoreBlend,
)
from npu_gr.model.hstu import HSTU
from npu_gr.train.baselines import LinearBaseline, graph_of
from npu_gr.train.data import InteractionLog, NextItem
from npu_gr.train.evaluate import BLOCK_USERS
from npu_gr.train.linear import ItemKNN, log_popularity, root_mean_square
from npu_gr.train.metrics import (
    F64,
    Difference,
    difference_of_users,
    is_above_0,
    ndcg_of_each,
)
from npu_gr.train.next_item import K, rank_next_items
from npu_gr.train.rank.blend import (
    USUAL_WEIGHTS,
    ItemList,
    ListSizes,
    count_blend,
    count_transitions,
    fit_blend,
    retrieved_lists,
)
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.item_similarity import (
    USUAL,
    NeighbourKind,
    count_kinds,
    linear_neighbours,
    linear_width,
    spread,
)
from npu_gr.train.rank.losses import HeldOutEvents


class ChosenBlend(NamedTuple):
    """The settings of the chosen blend, which can be counted in any events of the log."""

    task: str  # name of the task that predicts the next item
    kind: NeighbourKind = USUAL
    decay: float = DECAY  # of the transitions
    weights: Mapping[str, float] | None = None  # None = there is no validation
    better: Mapping[str, Difference] = {}  # sources that alone are better than the fitted blend
    fallback: ItemKNNFallback | None = None  # None = there is no ItemKNN, or no validation

    def counted(self, log: InteractionLog) -> ScoreBlend:
        """Count the blend in the trained events of a log.

        Without a validation the weights are those of retrieval alone.
        """
        if self.fallback is not None and self.fallback.is_served:
            return self.fallback.counted(log, self.task)
        blend = count_blend(log, self.task, self.kind, self.decay)
        return blend if self.weights is None else replace(blend, weights=self.weights)

    def text(self) -> str:
        """Describe what was chosen."""
        if self.fallback is not None and self.fallback.is_served:
            return self.fallback.text()
        assert self.weights is not None, "there is a validation"
        weights = ", ".join(f"{name} {weight:.2f}" for name, weight in self.weights.items())
        comparison = "" if self.fallback is None else f"; {self.fallback.text()}"
        last = "" if self.decay else "; transitions: from the last event alone"
        return f"score blend: {weights}; neighbours: {self.kind.name}{last}{comparison}"


def choose_blend(
    model: HSTU,
    task: str,
    held_out: HeldOutEvents,
    sizes: ListSizes,
    item_knn: LinearBaseline | None,
    counted_kinds: Callable[[int, int], None] = lambda *_: None,
) -> ChosenBlend:
    """Fit the blend on the validation, and compare it with each source alone and with ItemKNN.

    Args:
        model: Ranker in evaluation mode, its items frozen, that was not trained on the validation.
        task: Name of the task that predicts the next item.
        held_out: Validation.
        sizes: Most items of its lists.
        item_knn: Tuned ItemKNN baseline; None = it was skipped, because the log is too large.
        counted_kinds: Callback (done, total) after each kind of neighbours.
    """
    log, targets = held_out
    if not targets:
        return ChosenBlend(task)
    transitions = choose_transitions(log, task, targets)
    kinds = count_kinds(log, counted_kinds)
    inputs = LogInputs(log, model)
    lists = list(
        retrieved_lists(inputs, model, transitions, targets, sizes, others=[*kinds.values()])
    )
    counted = {
        kind: replace(transitions, neighbours=neighbours) for kind, neighbours in kinds.items()
    }
    kind, blend, own = choose_kind(counted, log, lists, targets)
    better = better_alone(blend, log, own, targets)
    served = to_serve(blend, better)
    if served is blend:
        served = blend = with_own_or_next(blend, log, own, targets)
    fallback = None
    if item_knn is not None:
        figures = (ndcg_cross_fitted if served is blend else ndcg_of_lists)(
            served, log, own, targets
        )
        fallback = compare_with_item_knn(item_knn, blend, figures, log, own, targets)
    return ChosenBlend(task, kind, served.decay, served.weights, better, fallback)


def choose_transitions(log: InteractionLog, task: str, targets: Sequence[NextItem]) -> ScoreBlend:
    """Count transitions from the last five events, or from the last one if that is better (step 0).

    Args:
        log: Log that holds the events; its trained ones are counted.
        task: Name of the task that predicts the next item.
        targets: Next items of the validation, at least one.
    """
    usual, last = (count_transitions(log, task, decay) for decay in (DECAY, LAST_ALONE))

    def likelihood(counted: ScoreBlend) -> F64:
        each = (
            counted.transitions(log.items[log.starts[user] : event], log.items[event : event + 1])
            for user, event in targets
        )
        return np.concatenate([*each]).astype(np.float64)

    return last if is_above_0(likelihood(last) - likelihood(usual)) else usual


FOLDS = 10  # cross-validation folds: each fold is ranked with weights fitted on the others


class FittedKind(NamedTuple):
    """A fitted blend with the neighbours of one kind."""

    kind: NeighbourKind
    blend: ScoreBlend
    lists: Sequence[ItemList]  # the validation's lists, with these neighbours


def choose_kind(
    counted: Mapping[NeighbourKind, ScoreBlend],
    log: InteractionLog,
    lists: Sequence[ItemList],
    targets: Sequence[NextItem],
) -> FittedKind:
    """Fit the blend with the neighbours of each kind, and choose the best one (step 1).

    Args:
        counted: Kind -> transitions and neighbours, `USUAL` first; the blends differ in their
            neighbours only.
        log: Log that holds the events.
        lists: List of each target.
        targets: Next items of the validation, at least one.
    """
    found: list[tuple[FittedKind, F64, F64]] = []
    for kind, blend in counted.items():
        own = [
            one._replace(neighbours=blend.alike(log.items[log.starts[user] : event], one.items))
            for one, (user, event) in zip(lists, targets, strict=True)
        ]
        fitted = fit_blend(blend, log, own, targets)
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


def with_own_or_next(
    blend: ScoreBlend, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> ScoreBlend:
    """Fit the term of own and following items too; keep it if that is better (step 3).

    Args:
        blend: The fitted blend without this term.
        log: Log that holds the events.
        lists: List of each target.
        targets: Next items of the validation.
    """
    fitted = fit_blend(blend, log, lists, targets, free=WEIGHTS)
    if not fitted.weights[OWN_OR_NEXT]:  # no next item is a repeat
        return blend
    places = ndcg_of_lists(fitted, log, lists, targets) - ndcg_of_lists(blend, log, lists, targets)
    likelihood = list_likelihood(fitted, log, lists, targets) - list_likelihood(
        blend, log, lists, targets
    )
    return fitted if places.mean() >= 0 and is_above_0(likelihood) else blend


def list_likelihood(
    blend: ScoreBlend, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> F64:
    """Compute the log-probability of each next item within its list.

    Next items that are not in their lists are skipped.
    """
    each = []
    for found, (_, event) in zip(lists, targets, strict=True):
        place = np.flatnonzero(found.items == log.items[event])
        if len(place):
            scores = found.scores(blend).astype(np.float64)
            top = scores.max()
            each.append(scores[place[0]] - top - np.log(np.exp(scores - top).sum()))
    return np.array(each)


def ndcg_of_lists(
    blend: ScoreBlend, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> F64:
    """Compute NDCG@10 of each next item in its blended list, [targets].

    Items that are not in the list rank behind it.
    """
    rows = (found.over_all(found.scores(blend), log.num_items) for found in lists)
    return ndcg_of_each(rank_next_items(log, targets, rows).evaluated, K)


def ndcg_cross_fitted(
    blend: ScoreBlend, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> F64:
    """Compute NDCG@10 of each next item, [targets], by cross-validation.

    Each user's list is ranked with weights that were fitted on other users.
    """
    fold_of = np.arange(len(targets)) % FOLDS
    free = WEIGHTS if blend.weights[OWN_OR_NEXT] else USUAL_WEIGHTS
    blends = []
    for fold in range(FOLDS):
        others = np.flatnonzero(fold_of != fold).tolist()
        of_others = [lists[row] for row in others], [targets[row] for row in others]
        blends.append(fit_blend(blend, log, *of_others, free=free))
    scores = (
        found.scores(blends[fold]) for found, fold in zip(lists, fold_of.tolist(), strict=True)
    )
    rows = (found.over_all(own, log.num_items) for found, own in zip(lists, scores, strict=True))
    return ndcg_of_each(rank_next_items(log, targets, rows).evaluated, K)


NOTHING = dict.fromkeys(WEIGHTS, 0.0)
SOURCES = ("retrieval", "transitions", "neighbours", "popularity")  # terms that can rank alone


def alone(blend: ScoreBlend, source: str) -> ScoreBlend:
    """Return a blend of one source: weight 1 for it, and 0 for all other terms but the own ones.

    Those keep their fitted weights. They do not change the ranking of unseen items.
    """
    return replace(blend, weights=NOTHING | {source: 1.0} | _own_weights(blend))


def better_alone(
    blend: ScoreBlend, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> dict[str, Difference]:
    """Compare every source alone with the fitted blend (step 2).

    Args:
        blend: The fitted blend.
        log: Log that holds the users' histories.
        lists: List of each target.
        targets: Next items of the validation.

    Returns:
        Source -> its NDCG@10 minus the blend's, for sources with a positive mean, the highest
        first.
    """
    if not targets:
        return {}

    fitted = ndcg_of_lists(blend, log, lists, targets)
    others = {
        source: ndcg_of_lists(alone(blend, source), log, lists, targets) for source in SOURCES
    }
    gaps = {source: difference_of_users(figures, fitted) for source, figures in others.items()}
    best_first = sorted(gaps, key=lambda source: -gaps[source].mean)
    return {source: gaps[source] for source in best_first if gaps[source].mean > 0}


def to_serve(blend: ScoreBlend, better: Mapping[str, Difference]) -> ScoreBlend:
    """Choose the blend to serve: that of one source, if it is significantly better, or the fitted.

    Args:
        blend: The fitted blend.
        better: Result of `better_alone`.
    """
    source = _significantly_better(better)
    return blend if source is None else alone(blend, source)


def better_source_warnings(better: Mapping[str, Difference]) -> list[str]:
    """Warn of each source that ranks better alone, and say which one is served."""
    served = _significantly_better(better)
    return [
        f"WARNING: {source} alone ranks the validation better than the fitted score blend: "
        f"NDCG@{K} {gap.mean:+.4f} ({gap.low:+.4f} .. {gap.high:+.4f})"
        + ("; it is served instead" if source == served else "")
        for source, gap in better.items()
    ]


def _significantly_better(better: Mapping[str, Difference]) -> str | None:
    """Return the best source whose interval excludes 0; None = there is none."""
    return next((source for source, gap in better.items() if gap.low > 0), None)


class ItemKNNFallback(NamedTuple):
    """ItemKNN as a score blend, and its comparison with the fitted blend on the validation."""

    baseline: LinearBaseline  # ItemKNN
    own: Mapping[str, float]  # weights of the terms of seen items, by the names of `OWN_WEIGHTS`
    fitted_less_it: Difference  # NDCG@10 of the fitted blend minus ItemKNN's
    is_served: bool  # True = the fitted blend is not shown to be better, so ItemKNN is served

    def counted(self, log: InteractionLog, task: str) -> ScoreBlend:
        """Count ItemKNN in the trained events of a log; `task` predicts the next item."""
        return as_blend(self.baseline.refitted(log), log, task, self.own)

    def text(self) -> str:
        """Say whether ItemKNN is served, and why."""
        gap = self.fitted_less_it
        comparison = (
            f"the fitted score blend minus ItemKNN: NDCG@{K} {gap.mean:+.4f} ({gap.low:+.4f} .. "
            f"{gap.high:+.4f})"
        )
        if not self.is_served:
            return comparison
        return (
            f"{comparison}: not shown to be better, so ItemKNN is served: "
            f"{self.baseline.tuned.settings}"
        )


def compare_with_item_knn(
    baseline: LinearBaseline,
    blend: ScoreBlend,
    figures: F64,
    log: InteractionLog,
    lists: Sequence[ItemList],
    targets: Sequence[NextItem],
) -> ItemKNNFallback:
    """Fit ItemKNN's weights of seen items, and compare the blend to serve with ItemKNN (step 4).

    Args:
        baseline: Tuned ItemKNN, fitted to any log of these users and items.
        blend: The fitted blend.
        figures: [targets] NDCG@10 of each next item by the blend to serve, with weights that were
            not fitted on that item.
        log: Log that holds the users' histories; its trained events are counted.
        lists: List of each target.
        targets: Next items of the validation, at least one.
    """
    fitted = baseline.refitted(log)
    of_itself = _item_knn(fitted).own.numpy() * fitted.tuned.factors.numpy()

    def scores(own: ScoreBlend) -> Iterator[F64]:
        for start in range(0, len(targets), BLOCK_USERS):
            block = targets[start : start + BLOCK_USERS]
            rows = fitted.tuned.scores(torch.tensor([user for user, _ in block])).double().numpy()
            for (user, event), row in zip(block, rows, strict=True):
                history = log.items[log.starts[user] : event]
                had = np.unique(history)
                row[had] += own.own(history, had) - of_itself[had]
                yield row

    by_score = replace(blend, weights=NOTHING | {"neighbours": 1.0})
    scored = [
        found._replace(neighbours=row[found.items].astype(np.float32))
        for found, row in zip(lists, scores(by_score), strict=True)
    ]
    own = fit_blend(blend, log, scored, targets, start=by_score.weights, free=OWN_WEIGHTS)
    ranks = rank_next_items(log, targets, scores(own))
    item_knn = ndcg_of_each(ranks.evaluated, K)
    gaps = figures - item_knn
    return ItemKNNFallback(
        baseline,
        _own_weights(own),
        difference_of_users(figures, item_knn),
        is_served=bool(gaps.mean() <= 0) if ranks.evaluates_all else not is_above_0(gaps),
    )


def as_blend(
    baseline: LinearBaseline, log: InteractionLog, task: str, own: Mapping[str, float]
) -> ScoreBlend:
    """Express ItemKNN as a score blend.

    Args:
        baseline: ItemKNN, fitted to the log.
        log: Log whose trained events are counted.
        task: Name of the task that predicts the next item.
        own: Weights of the terms of items that are in the history.
    """
    tuned, degrees = baseline.tuned, graph_of(log).degrees()[1]
    # the baseline's popularity term, up to a constant
    popularity = np.log((degrees + 0.5) / (degrees + 0.5).sum())
    weight = tuned.weight / root_mean_square(log_popularity(degrees))
    # items without an event have no neighbours, and may be many more than the others
    graph, rows = graph_of(log).with_edges_only()
    model = tuned.fitted(baseline.models(graph, graph.num_items))
    assert isinstance(model, ItemKNN)
    factors = tuned.factors.numpy()[rows]

    def weights(start: int, stop: int) -> F32:
        scaled: F32 = model.weights(start, stop).numpy() * factors
        return scaled

    return replace(
        count_transitions(log, task),
        weights=NOTHING | {"neighbours": 1.0, "popularity": weight} | dict(own),
        popularity=popularity.astype(np.float32),
        neighbours=spread(
            linear_neighbours(weights, len(rows), linear_width(log.num_items)), rows, log.num_items
        ),
    )


def _own_weights(blend: ScoreBlend) -> dict[str, float]:
    return {name: blend.weights[name] for name in OWN_WEIGHTS}


def _item_knn(baseline: LinearBaseline) -> ItemKNN:
    assert isinstance(baseline.tuned.model, ItemKNN)
    return baseline.tuned.model
