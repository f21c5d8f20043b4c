"""The graph encoder of a domain, GraphSAGE or LightGCN, and the projector between two domains.

Source: GraphSAGE (arXiv:1706.02216) with the mean of all layers as readout, and LightGCN (arXiv:2002.02126).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from npu_gr.core.arrays import I64
from npu_gr.matching.fold import LEAK, Activation, Folding, Norm
from npu_gr.train.graph import Graph
from npu_gr.train.match.propagation import propagation

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
