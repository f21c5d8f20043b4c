"""The losses of SCCDR, and the gather of inner products that they need. d = dimension, B = batch, k = negatives.

Draw negatives from easy to hard, by Katz centrality: the closer two nodes' centralities, the harder.

    difficulty   of a negative v for an anchor u: -|log c_u - log c_v|
    pacing       share(x) = s + (1 - s) x, x = done share of the stage, s = START_SHARE

Source: SCCDR (arXiv:2502.16239) orders negatives by a pre-computed Katz centrality; both formulas are our reading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, softplus

CHUNK_BYTES = 1 << 20  # rows gathered at a time: they stay in the cache of a core


def intra_loss(logits: Tensor) -> Tensor:
    """Compute the binary cross-entropy of edges against sampled items.

    Args:
        logits: float32 [B, 1 + k], each edge's own item first.

    Returns:
        A scalar: summed over an edge's negatives, averaged over edges.
    """
    return (softplus(-logits[:, 0]) + softplus(logits[:, 1:]).sum(-1)).mean()


def inter_loss(cosines: Tensor, hide: Tensor, tau: float) -> Tensor:
    """Compute InfoNCE: each anchor's own match against negatives.

    Args:
        cosines: float32 [B, 1 + k], each anchor's own match first.
        hide: bool [B, k], True = the sampled one is no negative (it equals the match), and is left out.
        tau: temperature.

    Returns:
        A scalar: the mean over anchors.
    """
    logits = torch.cat([cosines[:, :1], cosines[:, 1:].masked_fill(hide, -torch.inf)], dim=1) / tau
    return (torch.logsumexp(logits, dim=1) - logits[:, 0]).mean()


def dots(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor) -> Tensor:
    """Compute inner products of some rows, differentiably: `(left[of_left][:, None] * right[of_right]).sum(-1)`.

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
    """Forward in chunks that fit a core's cache; backward as two sparse products, without gathering rows."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, of_left, of_right)
        out = left.new_empty(of_right.shape)
        size = max(1, CHUNK_BYTES // (4 * left.shape[1] * of_right.shape[1]))
        for i, j, part in zip(of_left.split(size), of_right.split(size), out.split(size), strict=True):
            torch.sum(rows(right, j) * rows(left, i)[:, None], -1, out=part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, of_left, of_right = ctx.saved_tensors
        rows_left = of_left.repeat_interleave(of_right.shape[1])
        rows_right = of_right.flatten()
        values = grad.flatten()
        to_left = _sums(rows_left, rows_right, values, right, len(left)) if ctx.needs_input_grad[0] else None
        to_right = _sums(rows_right, rows_left, values, left, len(right)) if ctx.needs_input_grad[1] else None
        return to_left, to_right, None, None


def _sums(into: Tensor, of: Tensor, values: Tensor, table: Tensor, num_rows: int) -> Tensor:
    """Sum weighted rows of a table into rows: row r is the sum of `values * table[of]` where `into` is r.

    Args:
        into: int64 [n].
        of: int64 [n].
        values: float32 [n].
        table: float32 [rows, d].
        num_rows: of the result.

    Returns:
        float32 [num_rows, d].
    """
    order = into.argsort(stable=True)
    starts = torch.nn.functional.pad(torch.bincount(into, minlength=num_rows).cumsum(0), (1, 0))
    return embedding_bag(
        of[order], table, starts, mode="sum", per_sample_weights=values[order], include_last_offset=True
    )


def rows(table: Tensor, index: Tensor) -> Tensor:
    """Compute `table[index]`, several times as fast on a CPU."""
    return table.index_select(0, index.flatten()).view(*index.shape, -1)


START_SHARE = 0.3


def share(done_ratio: float) -> float:
    """Compute the share of all negatives, the easiest ones, that may be drawn at a point of the stage.

    Args:
        done_ratio: done share of the stage, 0 .. 1.
    """
    return min(1.0, START_SHARE + (1 - START_SHARE) * done_ratio)


class Negatives:
    """Nodes to draw negatives from, sorted by centrality."""

    def __init__(self, centrality: Tensor) -> None:
        """Sort the nodes; `centrality` is float32 [n], positive."""
        self.logs, self.nodes = centrality.log().sort()

    def draw(self, anchors: Tensor, k: int, easiest: float, generator: torch.Generator) -> Tensor:
        """Draw nodes evenly from the share that is easiest for each anchor.

        The nodes that are too hard are a window of the sorted centralities around the anchor's own:

            sorted nodes   0 .. first - 1 | first .. first + num_hidden - 1 | first + num_hidden ..
                           may be drawn     hidden: closest to the anchor     may be drawn

        Args:
            anchors: float32 [B] log centrality of each anchor.
            k: nodes to draw for each anchor.
            easiest: share that may be drawn, in (0, 1].
            generator: draws them.

        Returns:
            int64 [B, k].
        """
        num_nodes = len(self.nodes)
        num_hidden = min(num_nodes - 1, int((1 - easiest) * num_nodes))
        drawn = torch.randint(num_nodes - num_hidden, (len(anchors), k), generator=generator)
        if num_hidden:
            # The window moves up from i to i + 1 if node i + num_hidden is closer to the anchor than node i is:
            # logs[i] + logs[i + num_hidden] < 2 x anchor.
            ends = self.logs[:-num_hidden] + self.logs[num_hidden:]
            first = torch.searchsorted(ends, 2 * anchors)[:, None]
            drawn = torch.where(drawn < first, drawn, drawn + num_hidden)
        return self.nodes[drawn]
