"""One layer of the HSTU ranker around its attention, and what torch has no module for: norms, and time buckets.

Public code computes a time bucket in fp32 (log or sqrt of seconds, divided, floored). Vectorised logarithms differ in
the last place from device to device, and so would a bucket whose edge a time difference just meets. Seconds are whole
numbers: the seconds at which each bucket begins are found once, and comparing with them is exact on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, normalize, silu

from npu_gr.backend.base import TIME_BUCKETS, Affine
from npu_gr.backend.calls import BiasTables
from npu_gr.backend.tiles import Slab
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.model.config import HSTUConfig, TimeBuckets, TimePeriod

NEVER_S = 1 << 40  # 35,000 years


def bucket_by_formula(times: TimeBuckets, seconds: Tensor) -> Tensor:
    """Compute the bucket of int64 seconds >= 0 as public code does, in fp32: the definition."""
    scaled = seconds.clamp(min=1).float() / times.unit_s
    if times.function == "log":
        scaled = scaled.log()
    elif times.function == "sqrt":
        scaled = scaled.sqrt()
    return (scaled / times.divisor).floor().clamp(0, times.count - 1).long()


def edges_of(times: TimeBuckets) -> Tensor:
    """Find the least second of every bucket but the first, int64 [count - 1]; `NEVER_S` where there is none.

    By bisection: the formula does not decrease.
    """
    wanted = torch.arange(1, times.count, device="cpu")  # also where a model is made without memory
    low = torch.zeros_like(wanted)  # every earlier second is in a lower bucket
    high = torch.full_like(wanted, NEVER_S)
    while bool((high > low).any()):
        middle = (low + high) // 2
        reached = bucket_by_formula(times, middle) >= wanted
        high = torch.where(reached, middle, high)
        low = torch.where(reached, low, middle + 1)
        low = torch.minimum(low, high)
    return high


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


_TORCH = TorchOps()  # differentiable, for training


class HSTULayer(nn.Module):
    """A layer without its attention: U, V, Q, K from the normed input; gated output and residual."""

    position_bias: Tensor
    time_bias: Tensor
    time_edges: Tensor | None  # int64 [buckets - 1] seconds; None = half octaves

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.uv_width = config.num_heads * config.v_dim
        self.qk_width = config.num_heads * config.qk_dim
        self.widths = [self.uv_width, self.uv_width, self.qk_width, self.qk_width]  # U, V, Q, K
        self.uvqk = nn.Linear(config.dim, sum(self.widths))
        joined = 3 if config.residual == "concat" else 1
        self.out = nn.Linear(joined * self.uv_width, config.dim)
        self.norm_in = nn.LayerNorm(config.dim, eps=config.norm_eps)
        group = config.v_dim if config.norm == "group" else self.uv_width
        per_head = config.norm == "head"
        norm = PerHeadNorm(config.num_heads, config.norm_eps) if per_head else nn.LayerNorm(group, eps=config.norm_eps)
        self.norm_attention = norm
        times = config.time_buckets
        self.register_buffer("time_edges", None if times is None else edges_of(times), persistent=False)
        for name, buckets in (
            ("position_bias", config.position_buckets),
            ("time_bias", TIME_BUCKETS if times is None else times.count),
        ):
            table = torch.zeros(config.num_heads, buckets)
            if name.removesuffix("_bias") in config.relative_bias.split("_"):
                self.register_parameter(name, nn.Parameter(table))
            else:
                self.register_buffer(name, table, persistent=False)  # zeros that no checkpoint holds

    @property
    def bias(self) -> BiasTables:
        """The layer's relative bias tables."""
        return BiasTables(self.position_bias, self.time_bias)

    def heads(self, x: Tensor, width: int) -> Tensor:
        """[..., H * width] -> [..., H, width]."""
        return x.view(*x.shape[:-1], self.config.num_heads, width)

    def project(self, x: Tensor, ops: Affine = _TORCH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Project rows x [..., dim] to U [..., H*Dv], V [..., H, Dv], Q and K [..., H, Dq]."""
        mixed = ops.affine(self.norm_in(x), self.uvqk, 0, sum(self.widths), self.config.activation == "uvqk")
        u, v, q, k = torch.split(mixed, self.widths, dim=-1)
        if self.config.activation == "u":
            u = silu(u)
        return (
            u,
            self.heads(v, self.config.v_dim),
            self.heads(q, self.config.qk_dim),
            self.heads(k, self.config.qk_dim),
        )

    def project_kv(self, x: Tensor, ops: Affine = _TORCH) -> Slab:
        """Project K and V only: all that the last layer needs of history rows."""
        normed = self.norm_in(x)
        is_silu = self.config.activation == "uvqk"
        uv = self.uv_width
        qk = self.qk_width
        v = ops.affine(normed, self.uvqk, uv, 2 * uv, is_silu)
        k = ops.affine(normed, self.uvqk, 2 * uv + qk, 2 * (uv + qk), is_silu)
        return self.heads(k, self.config.qk_dim), self.heads(v, self.config.v_dim)

    def finish(self, x: Tensor, u: Tensor, attention: Tensor, ops: Affine = _TORCH) -> Tensor:
        """Compute the next layer's rows.

        Args:
            x: rows [..., dim].
            u: their gate [..., H*Dv].
            attention: scaled attention output [..., H, Dv].
            ops: computes the linear layer.
        """
        wide = attention.to(x.dtype)
        if self.config.norm == "layer":
            normed = self.norm_attention(wide.flatten(-2)).to(u.dtype)
        else:
            normed = self.norm_attention(wide).flatten(-2).to(u.dtype)
        gated = u * normed
        if self.config.residual == "concat":
            beside = normed if self.config.attention_norm_in_concat else attention.flatten(-2)
            gated = torch.cat([u, beside, gated], dim=-1)
        mixed = ops.affine(gated, self.out, 0, self.config.dim, False)
        return x + mixed.to(x.dtype)
