"""What SCCDR is trained with. d = dimension, B = batch, k = negatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, softplus

CHUNK_BYTES = 1 << 20  # of gathered rows at a time: they stay in the cache of a core


def intra_loss(logits: Tensor) -> Tensor:
    """Binary cross-entropy of edges against sampled non-edges, summed over an edge's negatives, mean over edges.

    Args:
        logits: float32 [B, 1 + k], each edge's own item first.
    """
    return (softplus(-logits[:, 0]) + softplus(logits[:, 1:]).sum(-1)).mean()


def inter_loss(cosines: Tensor, hide: Tensor, tau: float) -> Tensor:
    """InfoNCE: each anchor's own match against others; mean over anchors.

    Args:
        cosines: float32 [B, 1 + k], each anchor's own match first.
        hide: bool [B, k], which of the others are no negatives.
        tau: temperature.
    """
    logits = torch.cat([cosines[:, :1], cosines[:, 1:].masked_fill(hide, -torch.inf)], dim=1) / tau
    return (torch.logsumexp(logits, dim=1) - logits[:, 0]).mean()


def dots(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor) -> Tensor:
    """Inner products of chosen rows, differentiable: the same as `(left[of_left][:, None] * right[of_right]).sum(-1)`.

    Args:
        left, right: float32 [.., d].
        of_left: int64 [B].
        of_right: int64 [B, n].

    Returns:
        float32 [B, n].
    """
    out: Tensor = _Dots.apply(  # type: ignore[no-untyped-call]
        left, right, of_left, of_right
    )
    return out


class _Dots(torch.autograd.Function):
    """Forward in chunks that a cache holds; backward as two sparse products, without gathering a row."""

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
        ours, theirs = of_left.repeat_interleave(of_right.shape[1]), of_right.flatten()
        values = grad.flatten()
        to_left = _sums(ours, theirs, values, right, len(left)) if ctx.needs_input_grad[0] else None
        to_right = _sums(theirs, ours, values, left, len(right)) if ctx.needs_input_grad[1] else None
        return to_left, to_right, None, None


def _sums(into: Tensor, of: Tensor, values: Tensor, table: Tensor, num_rows: int) -> Tensor:
    """[num_rows, d]: row r is the sum of `values * table[of]` where `into` is r."""
    order = into.argsort(stable=True)
    starts = torch.nn.functional.pad(torch.bincount(into, minlength=num_rows).cumsum(0), (1, 0))
    return embedding_bag(
        of[order], table, starts, mode="sum", per_sample_weights=values[order], include_last_offset=True
    )


def rows(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]`, several times as fast on a CPU."""
    return table.index_select(0, index.flatten()).view(*index.shape, -1)
