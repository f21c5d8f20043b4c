"""Choose the kind of the neighbours: the one whose fitted order is best on the validation.

A later kind takes the place of the best one before it if it is better by more than a standard error, paired by
user: by NDCG@10, which is what is shown; or by the likelihood, if NDCG@10 is no lower. The likelihood tells kinds apart
where hits are rare, but it also counts items that nobody sees. So it is no ground for a kind whose requests read more
neighbours of an item: on MovieLens linear ones were chosen by it, and a recommend took .2 ms more for no better list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from npu_gr.model.order import Order
from npu_gr.train.data import InteractionLog, NextItem
from npu_gr.train.metrics import F64, ndcg_of_each
from npu_gr.train.next_item import rank_next_items
from npu_gr.train.paired import K
from npu_gr.train.rank.neighbour_kinds import NeighbourKind
from npu_gr.train.rank.order import ItemList, fit_order

FOLDS = 10  # of the validation's users: each is ordered by weights that the others were fitted on


class FittedKind(NamedTuple):
    """An order with the neighbours of one kind."""

    kind: NeighbourKind
    order: Order
    lists: Sequence[ItemList]  # of the validation, with these neighbours


def choose_kind(
    counted: Mapping[NeighbourKind, Order], log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]
) -> FittedKind:
    """Fit the order with the neighbours of each kind, and choose the best.

    Args:
        counted: kind -> transitions and neighbours, the usual kind first; they differ in their neighbours only.
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
        fitted = fit_order(order, log, own, targets)
        likelihood = list_likelihood(fitted, log, own, targets)
        found.append((FittedKind(kind, fitted, own), ndcg_of_lists(fitted, log, own, targets), likelihood))
    best = found[0]
    for other in found[1:]:
        of_places, of_likelihood = other[1] - best[1], other[2] - best[2]
        is_slower = other[0].kind.num_neighbours > best[0].kind.num_neighbours
        if is_above_0(of_places) or (not is_slower and of_places.mean() >= 0 and is_above_0(of_likelihood)):
            best = other
    return best[0]


def is_above_0(gaps: F64) -> bool:
    """Whether a mean is above 0 by more than a standard error; not of nothing."""
    return len(gaps) > 0 and float(gaps.mean()) > float(gaps.std()) / len(gaps) ** 0.5


def list_likelihood(order: Order, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]) -> F64:
    """Compute the log-probability of each next item within its list; those that their lists lack are left out."""
    each = []
    for found, (_, event) in zip(lists, targets, strict=True):
        place = np.flatnonzero(found.items == log.items[event])
        if len(place):
            scores = found.scores(order).astype(np.float64)
            top = scores.max()
            each.append(scores[place[0]] - top - np.log(np.exp(scores - top).sum()))
    return np.array(each)


def ndcg_of_lists(order: Order, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]) -> F64:
    """Compute NDCG@10 of each next item by the order of its list, [targets]; what a list lacks stands behind it."""
    rows = (found.over_all(found.scores(order), log.num_items) for found in lists)
    return ndcg_of_each(rank_next_items(log, targets, rows).judged, K)


def ndcg_cross_fitted(order: Order, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]) -> F64:
    """Compute NDCG@10 of each next item, [targets], by weights that were fitted on other users: as of new ones."""
    fold_of = np.arange(len(targets)) % FOLDS
    orders = []
    for fold in range(FOLDS):
        others = np.flatnonzero(fold_of != fold).tolist()
        orders.append(fit_order(order, log, [lists[row] for row in others], [targets[row] for row in others]))
    scores = (found.scores(orders[fold]) for found, fold in zip(lists, fold_of.tolist(), strict=True))
    rows = (found.over_all(own, log.num_items) for found, own in zip(lists, scores, strict=True))
    return ndcg_of_each(rank_next_items(log, targets, rows).judged, K)
