"""Rotary position embeddings (RoPE), with the scalings of the served families.

Source: RoFormer (arXiv:2104.09864); the scaling `llama3`: Llama 3 (arXiv:2407.21783), as its checkpoints state it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import msgspec
import torch
from torch import Tensor

from npu_gr.backend.base import accumulator
from npu_gr.core.settings import Count, Positive


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the frequencies of a model for short texts were changed for longer ones."""

    kind: Literal["linear", "llama3"]
    factor: Positive
    low_freq_factor: Positive = 1.0  # llama3: wavelengths over original_max_tokens / this are scaled whole
    high_freq_factor: Positive = 4.0  # llama3: wavelengths under original_max_tokens / this are not scaled
    original_max_tokens: Count = 8192  # llama3: positions of the model before it was scaled

    def __post_init__(self) -> None:
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor: {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}"
            )


def rope_angles(first: int, num_tokens: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cos and sin [num_tokens, 1, head_dim / 2] of positions from `first`, in fp32 as the models were trained.

    Args:
        first: position of the first token.
        num_tokens: how many positions.
        frequencies: what `rope_frequencies` gave; its device is that of the result.
    """
    positions = torch.arange(first, first + num_tokens, dtype=torch.float32, device=frequencies.device)
    angles = positions[:, None, None] * frequencies
    return angles.cos(), angles.sin()


@lru_cache(maxsize=32)
def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Compute the frequency of each pair of a head: float32 [head_dim / 2], radians a position."""
    with torch.inference_mode(False):  # kept for training too
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        plain: Tensor = 1.0 / theta**exponent
        if scaling is None:
            return plain
        if scaling.kind == "linear":
            return plain / scaling.factor
        turns = scaling.original_max_tokens * plain / (2 * math.pi)  # within the original positions
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return (1 - kept) * plain / scaling.factor + kept * plain


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [n, H, D]: pair i is (x[i], x[i + D/2]), the layout of Hugging Face checkpoints."""
    low, high = x.to(accumulator(x.dtype)).chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
