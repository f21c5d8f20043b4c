"""Choose the kind of the neighbours: the one whose fitted order is best on the validation.

NDCG@10 of the order decides, paired by user: the likelihood, which fits the weights, also counts items that nobody
sees. A less simple kind has to be better by more than a standard error.
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
        counted: kind -> transitions and neighbours, the simplest first; they differ in their neighbours only.
        log: holds the events.
        lists: of the targets.
        targets: the validation's next items, at least one.
    """
    found: list[tuple[FittedKind, F64]] = []
    for kind, order in counted.items():
        own = [
            one._replace(neighbours=order.alike(log.items[log.starts[user] : event], one.items))
            for one, (user, event) in zip(lists, targets, strict=True)
        ]
        fitted = fit_order(order, log, own, targets)
        found.append((FittedKind(kind, fitted, own), ndcg_of_lists(fitted, log, own, targets)))
    best, figures = found[0]
    for other, its_figures in found[1:]:
        gap = its_figures - figures
        if gap.mean() > gap.std() / np.sqrt(len(gap)):
            best, figures = other, its_figures
    return best


def ndcg_of_lists(order: Order, log: InteractionLog, lists: Sequence[ItemList], targets: Sequence[NextItem]) -> F64:
    """Compute NDCG@10 of each next item by the order of its list, [targets]; what a list lacks stands behind it."""
    rows = (found.over_all(found.scores(order), log.num_items) for found in lists)
    return ndcg_of_each(rank_next_items(log, targets, rows).judged, K)
