"""What an index of items is, the exact one, and how one is compared with it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.best_items import Best, Hidden
from npu_gr.core.arrays import F32, I64


class Index(Protocol):
    """Finds items by inner product. Immutable."""

    def search(self, queries: Tensor, k: int, hidden: Hidden | None = None) -> Best:
        """Find the best items of each query.

        Args:
            queries: float32 [B, d], on the host.
            k: Number of items to find for each query, 1 or more, also more than there are.
            hidden: (query, item) pairs that must not be found; None = no such pair.

        Returns:
            Scores and item rows [B, k] on the host, best first. A query with fewer items ends in
            -inf and -1.
        """
        ...


class ExactIndex:
    """Exact search, which scores every item."""

    def __init__(self, items: F32, backend: Backend) -> None:
        self._backend = backend
        self._items = torch.from_numpy(np.ascontiguousarray(items)).to(backend.device)

    def search(self, queries: Tensor, k: int, hidden: Hidden | None = None) -> Best:
        found = self._backend.best_items(
            self._backend.upload(queries.numpy()), self._items, k, hidden
        )
        return Best(found.scores.cpu(), found.items.cpu())


def recall(found: Best, exact: Best) -> float:
    """Return the share of the exact results' items that another result of the queries has."""
    wanted = exact.items >= 0
    hits = (exact.items[:, :, None] == found.items[:, None, :]).any(-1) & wanted
    return float(hits.sum() / wanted.sum().clamp(min=1))


class ExactSteps:
    """One exact search in steps, so that other work may run between them."""

    STEP = 1 << 17  # items of a step

    def __init__(self, items: F32, query: F32, k: int, hidden: I64) -> None:
        """Begin.

        Args:
            items: float32 [I, d].
            query: float32 [d].
            k: Number of items to find.
            hidden: Rows that must not be found.
        """
        self._items = items
        self._query = query
        self._k = k
        self._hidden = hidden
        self._first = 0
        self._scores = np.empty(0, np.float32)
        self.rows: I64 = np.empty(
            0, np.int64
        )  # best ones so far, best first; ties by the lower row

    @property
    def is_over(self) -> bool:
        """Whether every item has been scored."""
        return self._first >= len(self._items)

    def step(self) -> None:
        """Score the next items."""
        until = min(self._first + self.STEP, len(self._items))
        scores = self._items[self._first : until] @ self._query
        own = self._hidden[(self._hidden >= self._first) & (self._hidden < until)]
        scores[own - self._first] = -np.inf
        scores = np.concatenate([self._scores, scores])
        rows = np.concatenate([self.rows, np.arange(self._first, until)])
        best = np.argsort(-scores, kind="stable")[: self._k]
        best = best[scores[best] > -np.inf]
        self._scores, self.rows = scores[best], rows[best]
        self._first = until
