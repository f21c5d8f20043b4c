"""The bipartite graph of one domain, mean and symmetric propagation over it, and Katz centrality of several.

Propagation is a segmented sum over a CSR (`embedding_bag`), whose backward is the same over the transpose: no dense
matrix, no atomics, the same bits whatever runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from npu_gr.core.request import I64

KATZ_ROUNDS = 100
KATZ_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Csr:
    """A sparse matrix by rows."""

    starts: Tensor  # int32 [rows + 1]
    columns: Tensor  # int32 [nnz]
    values: Tensor  # float32 [nnz]

    def times(self, x: Tensor) -> Tensor:
        """This matrix times x: float32 [columns, d] -> [rows, d]."""
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
        """Differentiable `matrix @ x`."""
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
        """Of every user and of every item."""
        return (
            np.bincount(self.users, minlength=self.num_users),
            np.bincount(self.items, minlength=self.num_items),
        )

    def propagation(self, norm: Literal["mean", "symmetric"]) -> tuple[Propagation, Propagation]:
        """Items to users and users to items: a mean over neighbours (GraphSAGE), or D^-1/2 A D^-1/2 (LightGCN)."""
        of_user, of_item = (np.maximum(degrees, 1).astype(np.float32) for degrees in self.degrees())
        by_user, by_item = 1 / of_user[self.users], 1 / of_item[self.items]
        if norm == "symmetric":
            by_user = by_item = np.sqrt(by_user * by_item)
        to_users = self._csr(self.users, self.items, by_user, self.num_users)
        to_items = self._csr(self.items, self.users, by_item, self.num_items)
        return (
            Propagation(to_users, self._csr(self.items, self.users, by_user, self.num_items)),
            Propagation(to_items, self._csr(self.users, self.items, by_item, self.num_users)),
        )

    @staticmethod
    def _csr(rows: I64, columns: I64, values: np.ndarray[Any, Any], num_rows: int) -> Csr:
        order = np.argsort(rows, kind="stable")
        starts = np.searchsorted(rows[order], np.arange(num_rows + 1))
        return Csr(
            torch.from_numpy(starts.astype(np.int32)),
            torch.from_numpy(columns[order].astype(np.int32)),
            torch.from_numpy(values[order]),
        )


def katz(graphs: list[Graph], ratio: float = 0.85) -> tuple[Tensor, list[Tensor]]:
    """Katz centrality on the union of graphs that share their users: sum over k of (ratio / lambda_max)^k A^k 1.

    Args:
        graphs: one a domain.
        ratio: of the largest damping that converges, in (0, 1).

    Returns:
        float32 [num_users], and float32 [num_items] of each graph; at least 1.
    """
    pairs = []
    for graph in graphs:
        ones = np.ones(len(graph.users), np.float32)
        pairs.append(
            (
                Graph._csr(graph.users, graph.items, ones, graph.num_users),
                Graph._csr(graph.items, graph.users, ones, graph.num_items),
            )
        )

    def times(users: Tensor, items: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        total = torch.zeros_like(users)
        for (to_users, _), x in zip(pairs, items, strict=True):
            total = total + to_users.times(x)
        return total, [to_items.times(users) for _, to_items in pairs]

    one = torch.ones(graphs[0].num_users, 1)
    ones_of_items = [torch.ones(graph.num_items, 1) for graph in graphs]
    users, items = one, ones_of_items
    largest = 1.0
    for _ in range(KATZ_ROUNDS):  # the graph is bipartite: its eigenvalues come as +-, so only A A has one largest
        users, items = times(*times(users, items))
        norm = float(torch.sqrt(users.square().sum() + sum(x.square().sum() for x in items)))
        if norm == 0:
            return one[:, 0], [x[:, 0] for x in ones_of_items]
        users, items = users / norm, [x / norm for x in items]
        before, largest = largest, norm**0.5
        if abs(largest - before) <= KATZ_TOLERANCE * largest:
            break
    beta = ratio / largest
    users, items = one, ones_of_items
    for _ in range(KATZ_ROUNDS):
        new_users, new_items = times(users, items)
        new_users, new_items = 1 + beta * new_users, [1 + beta * x for x in new_items]
        change = float((new_users - users).abs().max() / new_users.abs().max())
        users, items = new_users, new_items
        if change <= KATZ_TOLERANCE:
            break
    return users[:, 0], [x[:, 0] for x in items]
