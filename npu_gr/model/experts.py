"""A mixture of experts in a decoder's layer: each row goes through the few MLPs that its router likes best.

Source: Qwen3 (arXiv:2505.09388), as transformers computes it.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import silu

from npu_gr.backend.base import Affine, accumulator
from npu_gr.core.settings import Count


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The experts of a decoder."""

    num_experts: Count
    num_per_token: Count  # experts that a row goes through
    mlp_dim: Count  # hidden width of one expert
    normalises: bool  # whether the weights of a row's experts sum to 1
    dense_layers: tuple[int, ...] = ()  # layers with one MLP for all rows instead

    def __post_init__(self) -> None:
        if self.num_per_token > self.num_experts:
            raise ValueError(f"num_per_token: {self.num_per_token} is more than num_experts {self.num_experts}")


class Experts(nn.Module):
    """The experts of one layer and their router."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(dim, config.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.mlp_dim, dim))
        self.down = nn.Parameter(torch.empty(config.num_experts, dim, config.mlp_dim))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, ops: Affine) -> Tensor:
        """Compute the experts' update of rows x: [..., dim] -> [..., dim]. No shape depends on values."""
        if x.ndim > 2:
            rows: Tensor = self(x.flatten(0, -2), ops)
            return rows.view(x.shape)
        config = self.config
        liked = ops.affine(x, self.router, 0, config.num_experts, False)
        weight, expert = liked.to(accumulator(liked.dtype)).softmax(-1).topk(config.num_per_token, dim=-1)
        if config.normalises:
            weight = weight / weight.sum(-1, keepdim=True)
        through = _grouped if _has_grouped(x, self.gate_up) else _gathered
        each = through(x.repeat_interleave(config.num_per_token, 0), expert.flatten(), self.gate_up, self.down)
        wide: Tensor = each.unflatten(0, weight.shape) * weight.to(x.dtype)[..., None]
        return wide.sum(1)


def _has_grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies groups of rows in one launch here, without asking the device for their sizes."""
    if not hasattr(functional, "grouped_mm"):  # torch before 2.10
        return False
    is_aligned = all(width * x.element_size() % 16 == 0 for width in (weight.shape[1] // 2, weight.shape[2]))
    if x.device.type == "cpu":
        return is_aligned and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_aligned and x.is_cuda and x.dtype == torch.bfloat16


def _grouped(x: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sort the rows by expert, and multiply each run of rows with its expert's weights."""
    order = expert.argsort(stable=True)
    ends = torch.searchsorted(expert[order], torch.arange(len(gate_up), device=x.device), right=True)
    ends = ends.to(torch.int32)
    gate, up = functional.grouped_mm(x[order], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    mixed = functional.grouped_mm(silu(gate) * up, down.transpose(1, 2), offs=ends)
    return torch.empty_like(mixed).index_copy_(0, order, mixed)


def _gathered(x: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Read the weights of each row's expert by themselves: any device and dtype, and the slow definition."""
    gate, up = torch.bmm(gate_up[expert], x[..., None])[..., 0].chunk(2, dim=-1)
    return torch.bmm(down[expert], (silu(gate) * up)[..., None])[..., 0]
