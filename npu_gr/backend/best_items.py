"""Exact top-k in a total order: of all items of a catalogue, and of the continuations of beams.

`top_k` finds the items with the best inner products with each query, without storing all scores. It
reads the items once, in blocks that fit a cache. A running threshold, each query's k-th best score
so far, drops almost all of a block; the survivors are sorted when enough have accumulated. The
order is by score, then by item row, so the result does not depend on block size and batch.

`select` chooses continuations among the valid ones (source: xBeam of xGR, arXiv:2512.11529). It
visits rows in descending order of an upper bound of their scores, and stops when the bound falls
below the worst selected score, so the result is exact. Order: score descending, then beam
ascending, then edge (and so code) ascending.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.calls import Choices, Continuations
from npu_gr.core.arrays import I64

BLOCK_SCORES = 1 << 18  # float32 scores of a block, over all queries: 1 MiB
MIN_BLOCK_ITEMS = 2048
MAX_BLOCK_ITEMS = 32_768


class Best(NamedTuple):
    """The best items of each query, best first; missing ones have score -inf and item -1."""

    scores: Tensor  # float32 [B, k]
    items: Tensor  # int64 [B, k] rows


class Hidden(NamedTuple):
    """Pairs (query, item row) that a search excludes; on the host."""

    queries: Tensor  # int64 [n]
    items: Tensor  # int64 [n], ascending

    @classmethod
    def of(cls, rows: Sequence[I64]) -> Hidden | None:
        """Collect the item rows [n] to exclude of each query; None = there are none."""
        items = np.concatenate(rows)
        if not len(items):
            return None
        order = np.argsort(items, kind="stable")
        queries = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
        return cls(torch.from_numpy(queries[order]), torch.from_numpy(items[order]))


def top_k(
    queries: Tensor,
    items: Tensor,
    k: int,
    hidden: Hidden | None = None,
    block_items: int | None = None,
) -> Best:
    """Find the best k items of each query.

    Args:
        queries: float32 [B, d].
        items: float32 [I, d], finite.
        k: Number of items, >= 1.
        hidden: Pairs to exclude.
        block_items: Items per block; None = as many as fit a cache.
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
            low, high = torch.searchsorted(
                hidden.items, torch.tensor([start, stop], device=items.device)
            )
            scores[hidden.items[low:high] - start, hidden.queries[low:high]] = -torch.inf
        kept.add(scores, start)
    return kept.best()


def _scores(items: Tensor, queries: Tensor, out: Tensor) -> Tensor:
    """Compute scores [n, B].

    On a CPU numpy is used: its BLAS is up to twice as fast as torch's for few queries.
    """
    if items.device.type != "cpu":
        return torch.mm(items, queries.T, out=out)
    np.matmul(items.numpy(), queries.numpy().T, out=out.numpy())
    return out


def _places(mask: Tensor) -> Tensor:
    """Return the flat indices, int64 [n], of true values.

    On a CPU numpy is used: it skips eight false values at once.
    """
    if mask.device.type != "cpu":
        return torch.nonzero(mask.flatten())[:, 0]
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


class _Candidates:
    """Items that may be among the best; they include every query's k best so far."""

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
        """Return the best of all added items."""
        self._sort()
        counts = torch.bincount(self._queries, minlength=self._shape[0])
        place = (
            torch.arange(len(self._queries), device=counts.device)
            - (counts.cumsum(0) - counts)[self._queries]
        )
        out = Best(
            torch.full(self._shape, -torch.inf, device=counts.device),
            torch.full(self._shape, -1, dtype=torch.int64, device=counts.device),
        )
        out.scores[self._queries, place] = self._scores
        out.items[self._queries, place] = self._items
        return out

    def _sort(self) -> None:
        new = zip(*self._new, strict=True) if self._new else ((),) * 3
        queries, items, scores = (
            torch.cat([old, *added])
            for old, added in zip((self._queries, self._items, self._scores), new, strict=True)
        )
        found = scores > -torch.inf
        queries = queries[found]
        items = items[found]
        scores = scores[found]
        # rows of a query already ascend, and both sorts are stable
        order = torch.argsort(scores, descending=True, stable=True)
        order = order[torch.argsort(queries[order], stable=True)]
        queries = queries[order]
        counts = torch.bincount(queries, minlength=self._shape[0])
        place = (
            torch.arange(len(queries), device=queries.device) - (counts.cumsum(0) - counts)[queries]
        )
        kept = place < self._k
        self._queries = queries[kept]
        self._items = items[order][kept]
        self._scores = scores[order][kept]
        last = place == self._k - 1
        self._thresholds[queries[last]] = scores[order][last]
        self._new = []
        self._num_new = 0


CHUNK_EDGES = 1 << 16  # candidates gathered at once; the first chunk is a quarter of this


def select(
    logits: Tensor, norm: Tensor | None, acc: Tensor, follow: Continuations, width: int
) -> Choices:
    """Select the `width` best of acc[row] + logits[row, code] - norm[row] over all valid edges.

    Args:
        logits: fp32 (fp64) [rows, codes] of the level's codebook.
        norm: [rows] log-sum-exp by which a row is normalised; None = over its valid, allowed edges.
        acc: [rows] accumulated log-probability of each beam; -inf = a dead beam.
        follow: The valid edges.
        width: Number of edges to select, >= 1.

    Raises:
        FloatingPointError: A logit is NaN or infinity.
    """
    if norm is None:
        norm = _valid_norm(logits, follow)
    best = _Best(width)
    peak = logits.amax(1)
    if bool((peak.isnan() | ~(norm < float("inf"))).any()):
        raise FloatingPointError("a logit is not a number")
    # rounded in the same order as the scores, so that no score of a row exceeds it
    bound = (peak - norm).add_(acc)
    alive = (bound > float("-inf")) & (follow.degree > 0) & (norm > float("-inf"))
    order = torch.argsort(bound, descending=True, stable=True)
    order = order[alive[order]]
    bounds = bound[order].tolist()
    edges = follow.degree[order].cumsum(0).tolist()
    at = 0
    chunk = CHUNK_EDGES // 4
    while at < len(bounds) and bounds[at] >= best.worst:
        end = at + 1
        limit = (edges[at - 1] if at else 0) + chunk
        while end < len(bounds) and edges[end] <= limit and bounds[end] >= best.worst:
            end += 1
        best.offer(*_candidates(logits, norm, acc, follow, order[at:end]))
        at = end
        chunk = CHUNK_EDGES
    return best.sorted(logits)


class _Best:
    """The best so far, unsorted, including all ties with the worst."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.worst = float("-inf")
        self._kept: list[Choices] = []

    def offer(self, score: Tensor, parent: Tensor, edge: Tensor) -> None:
        keep = torch.nonzero(score >= self.worst).squeeze(1)
        keep = keep[score[keep] > float("-inf")]
        if not len(keep):
            return
        self._kept.append(Choices(score[keep], parent[keep], edge[keep]))
        if sum(len(part.score) for part in self._kept) >= self.width:
            everything = Choices(*(torch.cat(column) for column in zip(*self._kept, strict=True)))
            worst = torch.topk(everything.score, self.width, sorted=False).values.amin()
            good = torch.nonzero(everything.score >= worst).squeeze(1)
            self.worst = float(worst)
            self._kept = [Choices(*(column[good] for column in everything))]

    def sorted(self, like: Tensor) -> Choices:
        if not self._kept:
            nothing = torch.empty(0, dtype=torch.int64, device=like.device)
            return Choices(like.new_empty(0), nothing, nothing)
        score, parent, edge = (torch.cat(column) for column in zip(*self._kept, strict=True))
        # edges of a level are distinct, and those of one beam ascend by code
        order = torch.argsort(edge)
        order = order[torch.argsort(parent[order], stable=True)]
        order = order[torch.argsort(score[order], descending=True, stable=True)][: self.width]
        return Choices(score[order], parent[order], edge[order])


def edges_of(follow: Continuations, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (row, edge) of every allowed edge of some rows, row by row, without padding."""
    degree = follow.degree[rows]
    ends = degree.cumsum(0)
    row = torch.repeat_interleave(rows, degree)
    first = torch.repeat_interleave(follow.lo[rows] - (ends - degree), degree)
    edge = torch.arange(len(row), device=row.device) + first
    if follow.allowed is not None:
        keep = torch.nonzero(follow.allowed[edge]).squeeze(1)
        row = row[keep]
        edge = edge[keep]
    return row, edge


def _candidates(
    logits: Tensor, norm: Tensor, acc: Tensor, follow: Continuations, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    row, edge = edges_of(follow, rows)
    score = logits[row, follow.code[edge].long()].sub_(norm[row]).add_(acc[row])
    return score, row, edge


def _valid_norm(logits: Tensor, follow: Continuations) -> Tensor:
    """Compute the log-sum-exp over each row's valid edges; -inf for a row without any."""
    row, edge = edges_of(follow, torch.arange(len(logits), device=logits.device))
    values = logits[row, follow.code[edge].long()]
    peak = torch.full_like(logits[:, 0], float("-inf")).scatter_reduce_(0, row, values, "amax")
    total = torch.zeros_like(peak).scatter_add_(0, row, (values - peak[row]).exp_())
    return peak + total.log()
