"""The simple order: ItemKNN as the baseline is, with its tuned settings, in the terms of a fitted order.

    s(i) = sum over the distinct j of the history of w(j, i) + p pop(i) + e seen(i)

w and p are the baseline's: of the items that a user lacks this is its score, less a constant. Six weights that are
fitted on a hundred next items are worse than this order: the likelihood weighs popularity for the whole list, and what
it is worth among the first ten is another matter. So the fitted order has to be shown to be better than this one.

e alone is fitted. A request that leaves out what was seen does not count it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from npu_gr.core.arrays import F32
from npu_gr.model.order import WEIGHTS, Order
from npu_gr.train.baselines.choose import LinearBaseline, graph_of
from npu_gr.train.baselines.linear import ItemKNN
from npu_gr.train.baselines.tune import log_popularity, root_mean_square
from npu_gr.train.data import InteractionLog, NextItem
from npu_gr.train.judge import BLOCK_USERS
from npu_gr.train.metrics import F64, ndcg_of_each
from npu_gr.train.next_item import rank_next_items
from npu_gr.train.paired import Difference, K, difference_of_users
from npu_gr.train.rank.linear_neighbours import linear_neighbours
from npu_gr.train.rank.neighbour_choice import is_above_0
from npu_gr.train.rank.order import ItemList, count_transitions, fit_order

NOTHING = dict.fromkeys(WEIGHTS, 0.0)


class SimpleOrder(NamedTuple):
    """ItemKNN as an order, and how the fitted one stands beside it on the validation."""

    baseline: LinearBaseline  # ItemKNN
    seen: float  # e
    fitted_less_it: Difference  # NDCG@10 of the fitted order less this one's
    is_served: bool  # it takes the place of the fitted order, which is not shown to be better

    def counted(self, log: InteractionLog, task: str) -> Order:
        """Count it in the trained events of a log, for the task that predicts the next item."""
        return as_order(self.baseline.refitted(log), log, task, self.seen)

    def text(self) -> str:
        """Say whether it is served, and why."""
        gap = self.fitted_less_it
        less = f"the fitted order less ItemKNN's: NDCG@{K} {gap.mean:+.4f} ({gap.low:+.4f} .. {gap.high:+.4f})"
        if not self.is_served:
            return less
        return f"{less}: not shown to be better, so ItemKNN's is served: {self.baseline.tuned.settings}"


def beside_simple(
    baseline: LinearBaseline,
    order: Order,
    figures: F64,
    log: InteractionLog,
    lists: Sequence[ItemList],
    targets: Sequence[NextItem],
) -> SimpleOrder:
    """Make the simple order, and compare the fitted one with it.

    Args:
        baseline: ItemKNN with its settings, fitted to any log of these users and items.
        order: fitted.
        figures: [targets] its NDCG@10 of each next item, by weights of which that item knows nothing.
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
    seen = fit_order(order, log, scored, targets, start=by_score, free=("seen",)).weights["seen"]
    simple = ndcg_of_each(rank_next_items(log, targets, scores(seen)).judged, K)
    gaps = figures - simple
    return SimpleOrder(baseline, seen, difference_of_users(figures, simple), is_served=not is_above_0(gaps))


def as_order(baseline: LinearBaseline, log: InteractionLog, task: str, seen: float) -> Order:
    """Write ItemKNN as an order.

    Args:
        baseline: ItemKNN, fitted to the log.
        log: its trained events count.
        task: that predicts the next item.
        seen: weight of what is in the history.
    """
    tuned, degrees = baseline.tuned, graph_of(log).degrees()[1]
    popularity = np.log((degrees + 0.5) / (degrees + 0.5).sum())  # the baseline's, but for a constant
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
