"""The bipartite graph of a domain, propagation over it, and the Katz centrality of several graphs.

Propagation is a segmented sum over a CSR matrix (`embedding_bag`); its backward pass is the same over the transpose.
That needs no dense matrix and no atomic additions, so the result has the same bits whatever runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from npu_gr.core.request import F32, I64

KATZ_ROUNDS = 100  # most iterations of each of the two loops
KATZ_TOLERANCE = 1e-6  # relative change that ends them


@dataclass(frozen=True, slots=True, eq=False)
class Csr:
    """A sparse matrix by rows."""

    starts: Tensor  # int32 [rows + 1] row r has the elements starts[r] .. starts[r + 1] - 1
    columns: Tensor  # int32 [nnz]
    values: Tensor  # float32 [nnz]

    def times(self, x: Tensor) -> Tensor:
        """Multiply the matrix by x: float32 [columns, d] -> [rows, d]."""
        if not len(self.columns):
            return x.new_zeros(len(self.starts) - 1, x.shape[1])
        return embedding_bag(
            self.columns, x, self.starts, mode="sum", per_sample_weights=self.values, include_last_offset=True
        )


@dataclass(frozen=True, slots=True, eq=False)
class Propagation:
    """A constant sparse matrix with its transpose."""

    forward: Csr
    transposed: Csr

    def __call__(self, x: Tensor) -> Tensor:
        """Compute `matrix @ x`, differentiably."""
        out: Tensor = _Times.apply(x, self)  # type: ignore[no-untyped-call]
        return out


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Propagation) -> Tensor:
        ctx.matrix = matrix
        return matrix.forward.times(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.matrix.transposed.times(grad.contiguous()), None


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Edges between users and items, each once. n = edges."""

    users: I64  # [n] rows
    items: I64  # [n] rows
    num_users: int
    num_items: int

    def degrees(self) -> tuple[I64, I64]:
        """Count the edges of every user, int64 [num_users], and of every item, int64 [num_items]."""
        return (
            np.bincount(self.users, minlength=self.num_users),
            np.bincount(self.items, minlength=self.num_items),
        )

    def propagation(self, norm: Literal["mean", "symmetric"]) -> tuple[Propagation, Propagation]:
        """Make the matrices that propagate items to users and users to items.

        Args:
            norm: mean = average the neighbours (GraphSAGE); symmetric = D^-1/2 A D^-1/2 (LightGCN).
        """
        user_degrees, item_degrees = (np.maximum(degrees, 1).astype(np.float32) for degrees in self.degrees())
        by_user: F32 = np.float32(1) / user_degrees[self.users]
        by_item: F32 = np.float32(1) / item_degrees[self.items]
        if norm == "symmetric":
            by_user = by_item = np.sqrt(by_user * by_item)
        return (
            Propagation(self._to_users(by_user), self._to_items(by_user)),
            Propagation(self._to_items(by_item), self._to_users(by_item)),
        )

    def adjacency(self) -> tuple[Csr, Csr]:
        """Make the 0/1 matrices [num_users, num_items] and [num_items, num_users]."""
        ones = np.ones(len(self.users), np.float32)
        return self._to_users(ones), self._to_items(ones)

    def _to_users(self, values: F32) -> Csr:
        return _csr(self.users, self.items, values, self.num_users)

    def _to_items(self, values: F32) -> Csr:
        return _csr(self.items, self.users, values, self.num_items)


def _csr(rows: I64, columns: I64, values: F32, num_rows: int) -> Csr:
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], np.arange(num_rows + 1))
    return Csr(
        torch.from_numpy(starts.astype(np.int32)),
        torch.from_numpy(columns[order].astype(np.int32)),
        torch.from_numpy(values[order]),
    )


def katz(graphs: list[Graph], ratio: float = 0.85) -> tuple[Tensor, list[Tensor]]:
    """Compute Katz centrality on the union of graphs that share their users: sum over k of beta^k A^k 1.

    Args:
        graphs: one for each domain.
        ratio: beta = ratio / (largest eigenvalue of A), in (0, 1): the sum converges.

    Returns:
        float32 [num_users], and float32 [num_items] of each graph; every value is at least 1.
    """
    pairs = [graph.adjacency() for graph in graphs]

    def times(users: Tensor, items: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        total = torch.zeros_like(users)
        for (to_users, _), x in zip(pairs, items, strict=True):
            total = total + to_users.times(x)
        return total, [to_items.times(users) for _, to_items in pairs]

    one = torch.ones(graphs[0].num_users, 1)
    ones_of_items = [torch.ones(graph.num_items, 1) for graph in graphs]
    users = one
    items = ones_of_items
    largest = 1.0
    # Power iteration with A A: the eigenvalues of a bipartite graph come in pairs +-x, so A alone has no largest one.
    for _ in range(KATZ_ROUNDS):
        users, items = times(*times(users, items))
        norm = float(torch.sqrt(users.square().sum() + sum(x.square().sum() for x in items)))
        if norm == 0:
            return one[:, 0], [x[:, 0] for x in ones_of_items]
        users = users / norm
        items = [x / norm for x in items]
        before = largest
        largest = norm**0.5
        if abs(largest - before) <= KATZ_TOLERANCE * largest:
            break
    beta = ratio / largest
    users = one
    items = ones_of_items
    for _ in range(KATZ_ROUNDS):
        before_users = users
        users, items = times(users, items)
        users = 1 + beta * users
        items = [1 + beta * x for x in items]
        change = float((users - before_users).abs().max() / users.abs().max())
        if change <= KATZ_TOLERANCE:
            break
    return users[:, 0], [x[:, 0] for x in items]
