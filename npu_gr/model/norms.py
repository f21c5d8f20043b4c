"""Norms of HSTU checkpoints that torch has no module for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize, silu

from npu_gr.model.config import HSTUConfig, TimePeriod


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


class NormGate(nn.LayerNorm):
    """x * sigmoid(norm(x))."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """[..., width] -> the same shape."""
        gate: Tensor = super().forward(input).sigmoid()
        return input * gate


class NormSiLU(nn.LayerNorm):
    """silu(norm(x))."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """[..., width] -> the same shape."""
        return silu(super().forward(input))


class ClockMix(nn.Module):
    """Mix what clocks show at the request's time into rows, by a linear layer.

    A clock shows the cosine and the sine of (units since 1970 mod its units) / its units * 6.28, in fp32 as public code
    has it (seconds of this century are rounded to 128).
    """

    def __init__(self, dim: int, periods: Sequence[TimePeriod]) -> None:
        super().__init__()
        self.periods = periods
        self.linear = nn.Linear(dim + 2 * len(periods), dim)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """Rows x [..., dim] and their seconds at [...], int64."""
        shown = []
        for period in self.periods:
            units = torch.div(at.float(), float(period.unit_s), rounding_mode="floor")
            angle = torch.remainder(units, float(period.num_units)) / float(period.num_units) * 2 * 3.14
            shown += [angle.cos(), angle.sin()]
        mixed: Tensor = self.linear(torch.cat([x, torch.stack(shown, -1).to(x.dtype)], dim=-1))
        return mixed


def head_norm(config: HSTUConfig) -> nn.Module:
    """Make the norm of a candidate's final row."""
    eps = config.norm_eps if config.head_norm_eps is None else config.head_norm_eps
    if config.head_norm == "layer":
        return nn.LayerNorm(config.dim, eps=eps)
    return UnitLength(eps) if config.head_norm == "l2" else nn.Identity()


def head_mlp(config: HSTUConfig) -> nn.Sequential:
    """Make the MLP from a final row to the logits."""
    eps = config.norm_eps if config.head_norm_eps is None else config.head_norm_eps
    plain: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "relu": nn.ReLU, "gelu": nn.GELU}
    normed = {"norm_gate": NormGate, "norm_silu": NormSiLU}
    kind = plain.get(config.head_activation)
    middle = normed[config.head_activation](config.head_dim, eps=eps) if kind is None else kind()
    return nn.Sequential(nn.Linear(config.dim, config.head_dim), middle, nn.Linear(config.head_dim, len(config.tasks)))
