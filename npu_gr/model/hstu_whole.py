"""The ranker for kernels of whole passes and of whole layers: a batch in numbers, the weights, the layers around them.

A backend may take a model with plain passes in one call, or its attention layer by layer for all segments at once; it
says None where it does not, and `hstu_segments.py` computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from npu_gr.backend.base import Backend, HstuPass
from npu_gr.backend.calls import (
    HstuHead,
    HstuLayerCall,
    HstuLayerWeights,
    HstuPassCall,
    HstuSegment,
    HstuWeights,
)
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu_layer import HSTULayer
from npu_gr.model.hstu_segments import Segment


def told_in_numbers(config: HSTUConfig, segments: Sequence[Segment]) -> list[HstuSegment] | None:
    """Describe a batch to kernels of whole layers; None = the model, or what its host knows, is not for them."""
    if not config.has_plain_passes:
        return None
    told = []
    for s in segments:
        if s.host is None:
            return None
        times, pages, ids = s.host
        new = s.times.shape[0]  # len() of a tensor takes ten times as long
        own = s.candidates.shape[0]
        cached = len(times) - new
        told.append(HstuSegment(cached, new, own, times, s.candidate_time, pages, s.sink is not None, ids))
    return told


def weights_of(
    layers: Sequence[HSTULayer], heads: Mapping[str, HstuHead], config: HSTUConfig, scale: float
) -> HstuWeights:
    """Name what kernels of a whole pass read of a model with plain passes."""
    read = []
    for layer in layers:
        assert isinstance(layer.norm_attention, nn.LayerNorm)
        read.append(HstuLayerWeights(layer.norm_in, layer.uvqk, layer.bias, layer.norm_attention, layer.out))
    return HstuWeights(
        read,
        heads,
        config.num_heads,
        config.qk_dim,
        config.v_dim,
        config.attention_alpha,
        scale,
        config.activation == "uvqk",
        config.residual == "concat",
    )


def whole_pass(
    config: HSTUConfig,
    scale_of: Callable[[int], float],
    dtype: torch.dtype,
    backend: Backend,
    rows: Sequence[HstuSegment],
) -> HstuPass | None:
    """Ask the backend for kernels of whole layers; None = layers go segment by segment."""
    scales = {scale_of(len(row.times)) for row in rows}
    if len(scales) != 1:
        return None
    return backend.hstu_pass(
        HstuPassCall(
            rows,
            config.num_heads,
            config.qk_dim,
            config.v_dim,
            dtype,
            config.attention_alpha,
            scales.pop(),
            config.activation == "uvqk",
            "head" if config.norm == "group" else "row",
            config.residual == "concat",
        )
    )


def run_whole_layers(layers: Sequence[HSTULayer], dim: int, backend: Backend, whole: HstuPass, x: Tensor) -> Tensor:
    """Run all layers: [rows, dim] of all segments -> [c, dim] of all candidates, and rows that mean nothing."""
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1
        assert isinstance(layer.norm_attention, nn.LayerNorm)
        mixed = backend.affine(layer.norm_in(x), layer.uvqk, 0, sum(layer.widths), False)
        gated = whole.mix(HstuLayerCall(index, mixed, layer.bias, layer.norm_attention, is_last))
        if gated is None:
            return x[:0]
        x = whole.candidates(x) if is_last else x
        out = backend.affine(gated[: len(x)], layer.out, 0, dim, False)
        x = x + out  # the sum has the wider dtype, in one launch
    return x
