"""Choose the order that is served, on the validation: fitted weights, one source alone, or ItemKNN's own order.

the kind of the neighbours, with its fitted weights     `neighbour_choice.py`
one source in their place, if it is surely better       `alone.py`
ItemKNN, unless what there is is shown to be better     `simple.py`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from npu_gr.model.hstu import HSTU
from npu_gr.model.order import Order
from npu_gr.train.baselines.choose import LinearBaseline
from npu_gr.train.data import InteractionLog
from npu_gr.train.paired import Difference
from npu_gr.train.rank.alone import better_alone, to_serve
from npu_gr.train.rank.held_out import HeldOutEvents
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.neighbour_choice import choose_kind, ndcg_cross_fitted, ndcg_of_lists
from npu_gr.train.rank.neighbour_kinds import USUAL, NeighbourKind, count_kinds
from npu_gr.train.rank.order import ListSizes, count_order, count_transitions, retrieved_lists
from npu_gr.train.rank.simple import SimpleOrder, beside_simple


class ChosenOrder(NamedTuple):
    """How an order is counted in any events of the log."""

    task: str  # that predicts the next item
    kind: NeighbourKind = USUAL
    weights: Mapping[str, float] | None = None  # None = there is no validation
    better: Mapping[str, Difference] = {}  # sources above the fitted weights
    simple: SimpleOrder | None = None  # None = there is no ItemKNN, or no validation

    def counted(self, log: InteractionLog) -> Order:
        """Count it in the trained events of a log; without a validation the weights are retrieval's alone."""
        if self.simple is not None and self.simple.is_served:
            return self.simple.counted(log, self.task)
        order = count_order(log, self.task, self.kind)
        return order if self.weights is None else replace(order, weights=self.weights)

    def text(self) -> str:
        """Say what was chosen."""
        if self.simple is not None and self.simple.is_served:
            return self.simple.text()
        assert self.weights is not None, "there is a validation"
        weights = ", ".join(f"{name} {weight:.2f}" for name, weight in self.weights.items())
        beside = "" if self.simple is None else f"; {self.simple.text()}"
        return f"order: {weights}; neighbours: {self.kind.name}{beside}"


def choose_order(
    model: HSTU, task: str, held_out: HeldOutEvents, sizes: ListSizes, item_knn: LinearBaseline | None
) -> ChosenOrder:
    """Fit the order on the validation, and compare it with each source alone, and with ItemKNN.

    Args:
        model: that retrieves, in evaluation mode, its items frozen; trained on nothing of the validation.
        task: that predicts the next item.
        held_out: the validation.
        sizes: of its lists.
        item_knn: with its settings; None = the log is too large for it.
    """
    log, targets = held_out
    if not targets:
        return ChosenOrder(task)
    transitions = count_transitions(log, task)
    kinds = count_kinds(log)
    inputs = LogInputs(log, model)
    lists = list(retrieved_lists(inputs, model, transitions, targets, sizes, others=[*kinds.values()]))
    counted = {kind: replace(transitions, neighbours=neighbours) for kind, neighbours in kinds.items()}
    kind, order, own = choose_kind(counted, log, lists, targets)
    better = better_alone(order, log, own, targets)
    served = to_serve(order, better)
    simple = None
    if item_knn is not None:
        figures = (ndcg_cross_fitted if served is order else ndcg_of_lists)(served, log, own, targets)
        simple = beside_simple(item_knn, order, figures, log, own, targets)
    return ChosenOrder(task, kind, served.weights, better, simple)
