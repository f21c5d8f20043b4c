"""What SCCDR is trained with. d = dimension, B = batch, k = negatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

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
    """In chunks, forward and backward: no row is ever gathered into memory that the cache does not hold."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, of_left, of_right)
        out = left.new_empty(of_right.shape)
        for i, j, o in _chunks(of_left, of_right, out, dim=left.shape[1]):
            torch.sum(rows(right, j) * rows(left, i)[:, None], -1, out=o)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, of_left, of_right = ctx.saved_tensors
        to_left = torch.zeros_like(left) if ctx.needs_input_grad[0] else None
        to_right = torch.zeros_like(right) if ctx.needs_input_grad[1] else None
        for i, j, g in _chunks(of_left, of_right, grad, dim=left.shape[1]):
            if to_left is not None:
                to_left.index_add_(0, i, (rows(right, j) * g[..., None]).sum(1))
            if to_right is not None:
                to_right.index_add_(0, j.flatten(), (rows(left, i)[:, None] * g[..., None]).flatten(0, 1))
        return to_left, to_right, None, None


def rows(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]`, several times as fast on a CPU."""
    return table.index_select(0, index.flatten()).view(*index.shape, -1)


def _chunks(of_left: Tensor, of_right: Tensor, values: Tensor, dim: int) -> zip[tuple[Tensor, Tensor, Tensor]]:
    size = max(1, CHUNK_BYTES // (4 * dim * of_right.shape[1]))
    return zip(of_left.split(size), of_right.split(size), values.split(size), strict=True)
