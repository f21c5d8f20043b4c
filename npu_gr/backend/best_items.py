"""Exact best k of every item for a batch of queries, by inner product, without ever holding all scores.

Each batch reads the items once, in blocks that fit a cache. A running threshold, each query's k-th best score so far,
drops almost all of a block; the survivors are sorted when enough have piled up. The order is total, by score and then
by item row, so equal scores give the same answer in any block size and batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import I64

BLOCK_SCORES = 1 << 18  # float32 scores of a block, over all queries: 1 MiB
MIN_BLOCK_ITEMS = 2048
MAX_BLOCK_ITEMS = 32_768


class Best(NamedTuple):
    """The best items of each query, best first; a row with fewer than k items ends in -inf and -1."""

    scores: Tensor  # float32 [B, k]
    items: Tensor  # int64 [B, k] rows


class Hidden(NamedTuple):
    """Pairs (query, item row) that a search must not find; on the host."""

    queries: Tensor  # int64 [n]
    items: Tensor  # int64 [n], ascending

    @classmethod
    def of(cls, rows: Sequence[I64]) -> Hidden | None:
        """Hide the item rows [n] that stand for each query; None = there is none. On the host."""
        items = np.concatenate(rows)
        if not len(items):
            return None
        order = np.argsort(items, kind="stable")
        queries = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
        return cls(torch.from_numpy(queries[order]), torch.from_numpy(items[order]))


def top_k(queries: Tensor, items: Tensor, k: int, hidden: Hidden | None = None, block_items: int | None = None) -> Best:
    """Find the best k items of each query.

    Args:
        queries: float32 [B, d].
        items: float32 [I, d], finite.
        k: at least 1.
        hidden: pairs to leave out.
        block_items: items of a block; None = as many as fit a cache.
    """
    if hidden is not None:
        hidden = Hidden(*(part.to(items.device) for part in hidden))
    num_queries = len(queries)
    size = min(MAX_BLOCK_ITEMS, max(MIN_BLOCK_ITEMS, BLOCK_SCORES // max(1, num_queries)))
    size = max(1, min(block_items or size, len(items)))
    kept = _Candidates(num_queries, k, queries.device)
    buffer = queries.new_empty(size, num_queries)
    for start in range(0, len(items), size):
        stop = min(start + size, len(items))
        scores = _scores(items[start:stop], queries, buffer[: stop - start])
        if hidden is not None:
            low, high = torch.searchsorted(hidden.items, torch.tensor([start, stop], device=items.device))
            scores[hidden.items[low:high] - start, hidden.queries[low:high]] = -torch.inf
        kept.add(scores, start)
    return kept.best()


def _scores(items: Tensor, queries: Tensor, out: Tensor) -> Tensor:
    """Multiply to scores [n, B]; on a CPU by numpy, whose BLAS is up to twice as fast as torch's for few queries."""
    if items.device.type != "cpu":
        return torch.mm(items, queries.T, out=out)
    np.matmul(items.numpy(), queries.numpy().T, out=out.numpy())
    return out


def _places(mask: Tensor) -> Tensor:
    """Return the flat places, int64 [n], of true values; on a CPU by numpy, which skips eight false ones at once."""
    if mask.device.type != "cpu":
        return torch.nonzero(mask.flatten())[:, 0]
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


class _Candidates:
    """Items that may still be among the best; they always include every query's k best so far."""

    def __init__(self, num_queries: int, k: int, device: torch.device) -> None:
        self._k = k
        self._shape = (num_queries, k)
        self._thresholds = torch.full((num_queries,), -torch.inf, device=device)
        self._queries = torch.empty(0, dtype=torch.int64, device=device)
        self._items = self._queries
        self._scores = torch.empty(0, device=device)
        self._new: list[tuple[Tensor, Tensor, Tensor]] = []
        self._num_new = 0

    def add(self, scores: Tensor, first_item: int) -> None:
        """Add the scores [n, B] of a block, whose first item is `first_item`."""
        if self._num_new == 0 and len(self._items) == 0 and len(scores) > self._k:
            self._thresholds = scores.T.topk(self._k, dim=1, sorted=False).values.amin(1)
        found = _places(scores >= self._thresholds)
        if not len(found):
            return
        rows = found // self._shape[0]
        queries = found % self._shape[0]
        self._new.append((queries, rows + first_item, scores.flatten()[found]))
        self._num_new += len(queries)
        if self._num_new >= self._shape[0] * self._k:
            self._sort()

    def best(self) -> Best:
        """Return the best of everything that was added."""
        self._sort()
        counts = torch.bincount(self._queries, minlength=self._shape[0])
        place = torch.arange(len(self._queries), device=counts.device) - (counts.cumsum(0) - counts)[self._queries]
        out = Best(
            torch.full(self._shape, -torch.inf, device=counts.device),
            torch.full(self._shape, -1, dtype=torch.int64, device=counts.device),
        )
        out.scores[self._queries, place] = self._scores
        out.items[self._queries, place] = self._items
        return out

    def _sort(self) -> None:
        queries, items, scores = (
            torch.cat([old, *new])
            for old, new in zip(
                (self._queries, self._items, self._scores), zip(*self._new, strict=True) if self._new else ((),) * 3,
                strict=True,
            )
        )  # fmt: skip
        found = scores > -torch.inf
        queries = queries[found]
        items = items[found]
        scores = scores[found]
        # rows rise within a query already, and both sorts are stable
        order = torch.argsort(scores, descending=True, stable=True)
        order = order[torch.argsort(queries[order], stable=True)]
        queries = queries[order]
        counts = torch.bincount(queries, minlength=self._shape[0])
        place = torch.arange(len(queries), device=queries.device) - (counts.cumsum(0) - counts)[queries]
        kept = place < self._k
        self._queries = queries[kept]
        self._items = items[order][kept]
        self._scores = scores[order][kept]
        last = place == self._k - 1
        self._thresholds[queries[last]] = scores[order][last]
        self._new = []
        self._num_new = 0
