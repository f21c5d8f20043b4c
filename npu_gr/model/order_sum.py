"""What the candidates of a request are ordered by: the fitted sum, by a kernel of the host where the device has one.

`Order` defines each term; without a kernel, or to compare, it computes them one after the other.
"""

from __future__ import annotations

import numpy as np

from npu_gr.backend.base import Backend
from npu_gr.backend.calls import OrderCall, OrderTables
from npu_gr.core.arrays import F32, I64
from npu_gr.model.order import DECAY, LAST_EVENTS, WEIGHTS, Order


class OrderSum:
    """The sums of one order. Any thread may call."""

    def __init__(self, order: Order, backend: Backend | None = None) -> None:
        """Prepare them.

        Args:
            order: whose terms and weights.
            backend: whose kernel computes them, if it has one; None = numpy.
        """
        self.order = order
        self._kernel = None if backend is None else backend.order_sums(_tables(order))
        self._num_liked = 0 if order.neighbours is None else order.neighbours.last_items  # events, at most

    def __call__(self, history: I64, candidates: I64, retrieval: F32 | None, click: F32, seen: F32 | None) -> F32:
        """Sum the terms of each candidate: float32 [c].

        Args:
            history: int64 [n] item rows, oldest first.
            candidates: int64 [c] item rows; new ones too, as in the history.
            retrieval: [c]; None = without u the other terms decide.
            click: [c] logits of the order's task.
            seen: [c] 1 for an item of the history, else 0; None = none is one.
        """
        if self._kernel is None:
            return self._defined(history, candidates, retrieval, click, seen)
        recent = history[-max(LAST_EVENTS, self._num_liked) :]
        num_followed, num_liked = min(len(recent), LAST_EVENTS), min(len(recent), self._num_liked)
        return self._kernel(OrderCall(recent, num_followed, num_liked, candidates, retrieval, click, seen))

    def nearest(self, history: I64, k: int) -> I64:
        """Retrieve as `Order.nearest` does: by sums of all items from the kernel, where the pairs are not few."""
        neighbours = self.order.neighbours
        if self._kernel is None or neighbours is None or not neighbours.are_many(history):
            return self.order.nearest(history, k)
        sums = self._kernel.alike(history[-neighbours.last_items :])
        alike = np.flatnonzero(sums)
        return self.order.best_alike(alike, sums[alike], k)

    def _defined(self, history: I64, candidates: I64, retrieval: F32 | None, click: F32, seen: F32 | None) -> F32:
        nothing = np.zeros(len(candidates), np.float32)
        return self.order.scores(
            nothing if retrieval is None else retrieval,
            click,
            self.order.transitions(history, candidates),
            self.order.alike(history, candidates),
            self.order.popular(candidates),
            nothing if seen is None else seen,
        )


def _tables(order: Order) -> OrderTables:
    neighbours = order.neighbours
    none = order.num_items, 0
    retrieval, click, transitions, alike, popularity, seen = (order.weights[name] for name in WEIGHTS)
    return OrderTables(
        order.successors,
        order.log_prob,
        order.rest,
        order.shares,
        np.empty(none, np.int32) if neighbours is None else neighbours.items,
        np.empty(none, np.float32) if neighbours is None else neighbours.similarity,
        DECAY,
        order.scale,
        neighbours is not None and neighbours.is_summed,
        (retrieval, click, transitions, alike, popularity, seen),
    )
