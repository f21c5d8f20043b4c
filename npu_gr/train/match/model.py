"""The graph encoder of a domain, GraphSAGE or LightGCN, and the projector between two domains.

Source: GraphSAGE (arXiv:1706.02216) with the mean of all layers as readout, and LightGCN (arXiv:2002.02126).

Propagation over the graph of a domain, and the Katz centrality of several graphs.

Propagation is a product with a sparse matrix; its backward pass is one with the transpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from npu_gr.core.arrays import F32, I64
from npu_gr.matching.fold import LEAK, Activation, Folding, Norm
from npu_gr.train.judge import Csr, Graph

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


Encoding = tuple[Tensor, Tensor]  # float32 [num_users, d], [num_items, d]
EMBEDDING_STD = 0.1


class GraphEncoder(nn.Module):
    """Encodes the users and items of one domain.

        h_v' = act(W [h_v || mean of h_n over the neighbours n of v]),   z_v = mean of all h_v

    W starts as [0 || 1]: an untrained layer is LightGCN's, which has neither W nor act. Then W learns.
    """

    def __init__(
        self,
        graph: Graph,
        dim: int,
        num_layers: int,
        kind: Literal["sage", "lightgcn"],
        norm: Norm,
        activation: Activation,
        users: nn.Parameter | None,
        generator: torch.Generator,
    ) -> None:
        """Initialise the weights.

        Args:
            graph: the domain's edges.
            dim: d, of all vectors.
            num_layers: propagation steps.
            kind: sage, or lightgcn, which has no matrices, and for which `norm` is symmetric and `activation` unused.
            norm: weights of the neighbours, see `propagation`.
            activation: act.
            users: an embedding table [num_users, d] shared with another encoder; None: a new one.
            generator: draws the embedding tables.
        """
        super().__init__()

        def table(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, dim, generator=generator) * EMBEDDING_STD)

        self.users = table(graph.num_users) if users is None else users
        self.items = table(graph.num_items)
        self.num_layers = num_layers
        self.weights = nn.ParameterList()
        if kind == "sage":
            for _ in range(num_layers):
                self.weights.append(nn.Parameter(torch.cat([torch.zeros(dim, dim), torch.eye(dim)])))
        self.activation = {"none": nn.Identity(), "tanh": nn.Tanh(), "leaky_relu": nn.LeakyReLU(LEAK)}[activation]
        self.activation_name: Activation = activation
        self.norm: Norm = norm if kind == "sage" else "symmetric"
        self.pass_over(graph)

    def pass_over(self, graph: Graph) -> None:
        """Pass messages over the edges of this graph from now on: of the same users and items."""
        self.to_users, self.to_items = propagation(graph, self.norm)

    def forward(self) -> Encoding:
        """Compute the vectors of all users and items."""
        states = self.states()
        sum_users, sum_items = next(states)
        for users, items in states:
            sum_users = sum_users + users
            sum_items = sum_items + items
        return sum_users / (self.num_layers + 1), sum_items / (self.num_layers + 1)

    def states(self) -> Iterator[Encoding]:
        """Yield the embeddings, then the output of each layer."""
        users: Tensor = self.users
        items: Tensor = self.items
        yield users, items
        for layer in range(self.num_layers):
            from_items = self.to_users(items)
            from_users = self.to_items(users)
            if self.weights:
                own, neighbours = self.weights[layer].split(users.shape[1])
                users = self.activation(torch.addmm(users @ own, from_items, neighbours))
                items = self.activation(torch.addmm(items @ own, from_users, neighbours))
            else:
                users = from_items
                items = from_users
            yield users, items

    @torch.no_grad()
    def folding(self, item_degrees: I64) -> Folding:
        """Copy the parts that compute the vectors of users who come after the training.

        Args:
            item_degrees: int64 [num_items] edges of each item in the graph.
        """
        items = torch.stack([items for _, items in self.states()][:-1])
        return Folding(
            users=self.users.detach().clone().numpy(),
            states=items.numpy(),
            matrices=torch.stack([w.detach() for w in self.weights]).numpy() if self.weights else None,
            degrees=item_degrees,
            norm=self.norm,
            activation=self.activation_name,
        )


class Projector(nn.Module):
    """Maps vectors of the target domain into the source's space by a matrix, which starts as the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.matrix = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.matrix.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        projected: Tensor = self.matrix(x)
        return projected
