"""One layer of the HSTU ranker, around its attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from npu_gr.backend.base import TIME_BUCKETS, Affine
from npu_gr.backend.calls import BiasTables
from npu_gr.backend.tiles import Slab
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.model.config import HSTUConfig
from npu_gr.model.norms import PerHeadNorm
from npu_gr.model.time_buckets import edges_of

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
