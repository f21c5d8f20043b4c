"""Norms of HSTU checkpoints that torch has no module for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize

from npu_gr.model.config import HSTUConfig


class PerHeadNorm(nn.Module):
    """Normalise each head by itself, then scale and shift it by one number a head."""

    def __init__(self, num_heads: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))
        self.bias = nn.Parameter(torch.zeros(num_heads))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., H, Dv] -> the same shape."""
        return layer_norm(x, x.shape[-1:], eps=self.eps) * self.weight[:, None] + self.bias[:, None]


class UnitLength(nn.Module):
    """Divide each row by its length, or by `eps` where that is more."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> the same shape."""
        return normalize(x, dim=-1, eps=self.eps)


def head_norm(config: HSTUConfig) -> nn.Module:
    """Make the norm of a candidate's final row."""
    if config.head_norm == "layer":
        return nn.LayerNorm(config.dim, eps=config.norm_eps)
    return UnitLength(config.norm_eps) if config.head_norm == "l2" else nn.Identity()
