"""The parts of SCCDR: graph encoder, Katz centrality, losses, and negatives by difficulty.

    encoder      h_v' = W [h_v || sum over the neighbours n of v of  h_n / sqrt(d_v d_n)]
                 z_v = mean of h_v over all layers
    difficulty   of a negative v for an anchor u: -|log c_u - log c_v|, c = Katz centrality on the
                 union of the domains. The closer the centralities, the harder the negative
    pacing       share(x) = s + (1 - s) x, x = share of the stage that is done, s = START_SHARE

d = dimension, B = batch, k = negatives.

Source: SCCDR (arXiv:2502.16239) has GraphSAGE (arXiv:1706.02216) encoders and orders negatives by a
pre-computed Katz centrality; the mean of all layers as readout, the weights of the neighbours
(LightGCN, arXiv:2002.02126) and the formulas are our reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, softplus

from npu_gr.core.arrays import F32, I64
from npu_gr.train.evaluate import Csr, Graph
from npu_gr.vector_search.fold import Folding

KATZ_ROUNDS = 100  # most iterations of each of the two loops
KATZ_TOLERANCE = 1e-6  # relative change that ends an iteration
EMBEDDING_STD = 0.1
START_SHARE = 0.3
CHUNK_BYTES = 1 << 20  # rows to gather at a time, so that they stay in a core's cache

Encoding = tuple[Tensor, Tensor]  # float32 [num_users, d], [num_items, d]


class _Times(torch.autograd.Function):
    """The product with a constant sparse matrix; its gradient is a product with the transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Csr, transposed: Csr) -> Tensor:
        ctx.transposed = transposed
        return matrix.times(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed.times(grad.contiguous()), None, None


def times(matrix: Csr, x: Tensor, transposed: Csr) -> Tensor:
    """Compute `matrix @ x`, differentiably."""
    out: Tensor = _Times.apply(x, matrix, transposed)  # type: ignore[no-untyped-call]
    return out


def propagation(graph: Graph) -> tuple[Csr, Csr]:
    """Make D^-1/2 A D^-1/2, the propagation from items to users, and its transpose."""
    user_degrees, item_degrees = (
        np.maximum(degrees, 1).astype(np.float32) for degrees in graph.degrees()
    )
    values: F32 = np.sqrt(
        (np.float32(1) / user_degrees[graph.users]) * (np.float32(1) / item_degrees[graph.items])
    )
    return graph.to_users(values), graph.to_items(values)


def katz(graphs: list[Graph], ratio: float = 0.85) -> tuple[Tensor, list[Tensor]]:
    """Compute Katz centrality, the sum over k of beta^k A^k 1, on the union of graphs.

    Args:
        graphs: Graph of each domain; they share their users.
        ratio: beta x (largest eigenvalue of A), in (0, 1), so that the sum converges.

    Returns:
        float32 [num_users], and float32 [num_items] of each graph; every value is at least 1.
    """
    ones = [np.ones(len(graph.users), np.float32) for graph in graphs]
    pairs = [
        (graph.to_users(one), graph.to_items(one)) for graph, one in zip(graphs, ones, strict=True)
    ]

    def next_of(users: Tensor, items: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        total = torch.zeros_like(users)
        for (to_users, _), x in zip(pairs, items, strict=True):
            total = total + to_users.times(x)
        return total, [to_items.times(users) for _, to_items in pairs]

    one = torch.ones(graphs[0].num_users, 1)
    ones_of_items = [torch.ones(graph.num_items, 1) for graph in graphs]
    users = one
    items = ones_of_items
    largest = 1.0
    # Power iteration with A A: the eigenvalues of a bipartite graph come in pairs +-x, so with A
    # the iteration would not converge.
    for _ in range(KATZ_ROUNDS):
        users, items = next_of(*next_of(users, items))
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
        users, items = next_of(users, items)
        users = 1 + beta * users
        items = [1 + beta * x for x in items]
        change = float((users - before_users).abs().max() / users.abs().max())
        if change <= KATZ_TOLERANCE:
            break
    return users[:, 0], [x[:, 0] for x in items]


class GraphEncoder(nn.Module):
    """Encodes the users and items of one domain.

    W starts as [0 || 1], which is LightGCN, and is trained.
    """

    def __init__(self, graph: Graph, dim: int, num_layers: int, generator: torch.Generator) -> None:
        """Initialise the weights.

        Args:
            graph: Edges of the domain.
            dim: Dimension of all vectors.
            num_layers: Propagation steps.
            generator: Random generator of the embedding tables.
        """
        super().__init__()

        def table(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, dim, generator=generator) * EMBEDDING_STD)

        self.users = table(graph.num_users)
        self.items = table(graph.num_items)
        start = torch.cat([torch.zeros(dim, dim), torch.eye(dim)])
        self.weights = nn.ParameterList(nn.Parameter(start.clone()) for _ in range(num_layers))
        self.pass_over(graph)

    def pass_over(self, graph: Graph) -> None:
        """Pass messages over the edges of this graph, of the same users and items, from now on."""
        self._to_users, self._to_items = propagation(graph)

    def forward(self) -> Encoding:
        """Compute the vectors of all users and items."""
        states = self.states()
        sum_users, sum_items = next(states)
        for users, items in states:
            sum_users = sum_users + users
            sum_items = sum_items + items
        return sum_users / (len(self.weights) + 1), sum_items / (len(self.weights) + 1)

    def states(self) -> Iterator[Encoding]:
        """Yield the embeddings, then the output of each layer."""
        users: Tensor = self.users
        items: Tensor = self.items
        yield users, items
        for weight in self.weights:
            from_items = times(self._to_users, items, self._to_items)
            from_users = times(self._to_items, users, self._to_users)
            own, neighbours = weight.split(users.shape[1])
            users = torch.addmm(users @ own, from_items, neighbours)
            items = torch.addmm(items @ own, from_users, neighbours)
            yield users, items

    @torch.no_grad()
    def folding(self, item_degrees: I64) -> Folding:
        """Copy the parts that compute the vectors of users who come after the training.

        The copy is independent of further training.

        Args:
            item_degrees: int64 [num_items] edges of each item in the graph.
        """
        items = torch.stack([items for _, items in self.states()][:-1])
        return Folding(
            users=self.users.detach().clone().numpy(),
            states=items.numpy(),
            matrices=torch.stack([w.detach() for w in self.weights]).numpy(),
            degrees=item_degrees,
            norm="symmetric",
            activation="none",
        )


def intra_loss(logits: Tensor, num_edges: int) -> Tensor:
    """Compute the binary cross-entropy of edges against sampled items.

    Args:
        logits: float32 [B, 1 + k], each edge's own item first.
        num_edges: Edges of all ranks, of which these are a part.

    Returns:
        Scalar: summed over an edge's negatives; this part of the mean over all ranks' edges.
    """
    return (softplus(-logits[:, 0]) + softplus(logits[:, 1:]).sum(-1)).sum() / num_edges


def inter_loss(cosines: Tensor, hide: Tensor, tau: float, num_anchors: int) -> Tensor:
    """Compute InfoNCE: each anchor's own match against negatives.

    Args:
        cosines: float32 [B, 1 + k], each anchor's own match first.
        hide: bool [B, k], True = ignore the negative, because it equals the match.
        tau: Temperature.
        num_anchors: Anchors of all ranks, of which these are a part.

    Returns:
        Scalar: this part of the mean over all ranks' anchors.
    """
    logits = torch.cat([cosines[:, :1], cosines[:, 1:].masked_fill(hide, -torch.inf)], dim=1) / tau
    return (torch.logsumexp(logits, dim=1) - logits[:, 0]).sum() / num_anchors


def dots(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor) -> Tensor:
    """Compute inner products of some rows, differentiably.

    The same as `(left[of_left][:, None] * right[of_right]).sum(-1)`.

    Args:
        left: float32 [rows, d].
        right: float32 [rows, d].
        of_left: int64 [B] rows of `left`.
        of_right: int64 [B, n] rows of `right`.

    Returns:
        float32 [B, n].
    """
    out: Tensor = _Dots.apply(  # type: ignore[no-untyped-call]
        left, right, of_left, of_right
    )
    return out


class _Dots(torch.autograd.Function):
    """Forward in chunks that fit a core's cache; backward as two sparse products."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, of_left, of_right)
        out = left.new_empty(of_right.shape)
        size = max(1, CHUNK_BYTES // (4 * left.shape[1] * of_right.shape[1]))
        for i, j, part in zip(
            of_left.split(size), of_right.split(size), out.split(size), strict=True
        ):
            torch.sum(rows(right, j) * rows(left, i)[:, None], -1, out=part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, of_left, of_right = ctx.saved_tensors
        rows_left = of_left.repeat_interleave(of_right.shape[1])
        rows_right = of_right.flatten()
        values = grad.flatten()
        to_left = (
            _sums(rows_left, rows_right, values, right, len(left))
            if ctx.needs_input_grad[0]
            else None
        )
        to_right = (
            _sums(rows_right, rows_left, values, left, len(right))
            if ctx.needs_input_grad[1]
            else None
        )
        return to_left, to_right, None, None


def _sums(into: Tensor, of: Tensor, values: Tensor, table: Tensor, num_rows: int) -> Tensor:
    """Add `values[j] * table[of[j]]` to row `into[j]` of a zero matrix, for each j.

    Args:
        into: int64 [n] rows of the result.
        of: int64 [n] rows of the table.
        values: float32 [n] weights.
        table: float32 [rows, d].
        num_rows: Number of rows of the result.

    Returns:
        float32 [num_rows, d].
    """
    order = into.argsort(stable=True)
    starts = torch.nn.functional.pad(torch.bincount(into, minlength=num_rows).cumsum(0), (1, 0))
    return embedding_bag(
        of[order],
        table,
        starts,
        mode="sum",
        per_sample_weights=values[order],
        include_last_offset=True,
    )


def rows(table: Tensor, index: Tensor) -> Tensor:
    """Compute `table[index]`, several times as fast on a CPU."""
    return table.index_select(0, index.flatten()).view(*index.shape, table.shape[1])


def share(done_ratio: float) -> float:
    """Compute the share of negatives, the easiest ones, that may be drawn at a point of the stage.

    Args:
        done_ratio: Share of the stage that is done, 0 .. 1.
    """
    return min(1.0, START_SHARE + (1 - START_SHARE) * done_ratio)


class Negatives:
    """Nodes to draw negatives from, sorted by centrality."""

    def __init__(self, centrality: Tensor) -> None:
        """Sort the nodes; `centrality` is float32 [n], positive."""
        self.logs, self.nodes = centrality.log().sort()

    def draw(self, anchors: Tensor, k: int, easiest: float, generator: torch.Generator) -> Tensor:
        """Draw nodes uniformly from the share that is easiest for each anchor.

        The nodes that are too hard are a window of the sorted centralities around the anchor's own:

            sorted nodes   0 .. first - 1 | first .. first + num_hidden - 1 | first + num_hidden ..
                           may be drawn     hidden: closest to the anchor     may be drawn

        Args:
            anchors: float32 [B] log centrality of each anchor.
            k: Nodes to draw for each anchor.
            easiest: Share of the nodes that may be drawn, in (0, 1].
            generator: Random generator.

        Returns:
            int64 [B, k].
        """
        num_nodes = len(self.nodes)
        num_hidden = min(num_nodes - 1, int((1 - easiest) * num_nodes))
        drawn = torch.randint(num_nodes - num_hidden, (len(anchors), k), generator=generator)
        if num_hidden:
            # The window moves up from i to i + 1 if node i + num_hidden is closer to the anchor
            # than node i is: logs[i] + logs[i + num_hidden] < 2 x anchor.
            ends = self.logs[:-num_hidden] + self.logs[num_hidden:]
            first = torch.searchsorted(ends, 2 * anchors)[:, None]
            drawn = torch.where(drawn < first, drawn, drawn + num_hidden)
        return self.nodes[drawn]
