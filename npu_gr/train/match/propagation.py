"""Propagation over the graph of a domain, and the Katz centrality of several graphs.

Propagation is a product with a sparse matrix; its backward pass is one with the transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import F32
from npu_gr.train.graph import Csr, Graph

KATZ_ROUNDS = 100  # most iterations of each of the two loops
KATZ_TOLERANCE = 1e-6  # relative change that ends them


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


def propagation(graph: Graph, norm: Literal["mean", "symmetric"]) -> tuple[Propagation, Propagation]:
    """Make the matrices that propagate items to users and users to items.

    Args:
        graph: its edges carry the messages.
        norm: mean = average the neighbours (GraphSAGE); symmetric = D^-1/2 A D^-1/2 (LightGCN).
    """
    user_degrees, item_degrees = (np.maximum(degrees, 1).astype(np.float32) for degrees in graph.degrees())
    by_user: F32 = np.float32(1) / user_degrees[graph.users]
    by_item: F32 = np.float32(1) / item_degrees[graph.items]
    if norm == "symmetric":
        by_user = by_item = np.sqrt(by_user * by_item)
    return (
        Propagation(graph.to_users(by_user), graph.to_items(by_user)),
        Propagation(graph.to_items(by_item), graph.to_users(by_item)),
    )


def _adjacency(graph: Graph) -> tuple[Csr, Csr]:
    """Make the 0/1 matrices [num_users, num_items] and [num_items, num_users]."""
    ones = np.ones(len(graph.users), np.float32)
    return graph.to_users(ones), graph.to_items(ones)


def katz(graphs: list[Graph], ratio: float = 0.85) -> tuple[Tensor, list[Tensor]]:
    """Compute Katz centrality on the union of graphs that share their users: sum over k of beta^k A^k 1.

    Args:
        graphs: one for each domain.
        ratio: beta = ratio / (largest eigenvalue of A), in (0, 1): the sum converges.

    Returns:
        float32 [num_users], and float32 [num_items] of each graph; every value is at least 1.
    """
    pairs = [_adjacency(graph) for graph in graphs]

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
