"""The ranker's layers over a batch of segments: linears run over all rows at once, attention per segment.

Every backend has the ops of this pass. Kernels of whole layers or passes (`hstu_whole.py`) give its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.calls import HstuCall
from npu_gr.backend.tiles import Slab, Tiles
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu_layer import HSTULayer
from npu_gr.model.segment import Segment


def run_by_segments(
    layers: Sequence[HSTULayer],
    config: HSTUConfig,
    scale_of: Callable[[int], float],
    backend: Backend,
    segments: Sequence[Segment],
    x: Tensor,
) -> list[Tensor]:
    """Run all layers, and hand every segment's new keys and values to its sink.

    Args:
        layers: of the model.
        config: of the model.
        scale_of: factor on the attention over so many tokens.
        backend: that computes.
        segments: the batch.
        x: [rows, dim] embeddings of each segment's history and candidates, in order.

    Returns:
        Per segment [c, dim] final rows of its candidates.
    """
    alpha = config.attention_alpha
    starts = [0]
    for s in segments:
        starts.append(starts[-1] + s.num_rows)
    bounds = list(zip(segments, starts, strict=False))
    times = [s.times if s.past is None else torch.cat([s.past.times, s.times]) for s in segments]

    for index, layer in enumerate(layers[:-1]):
        u, v, q, k = layer.project(x, backend)
        attention = torch.empty_like(v)
        for (s, start), at in zip(bounds, times, strict=True):
            n = s.num_tokens
            scale = scale_of(len(at))
            past = s.past.slabs(index) if s.past else []
            history = slice(start, start + n)
            own = slice(start + n, start + s.num_rows)
            new = k[history], v[history]
            kept = s.sink(index, *new) if s.sink else None
            if kept is not None:
                past = kept
                new = (k[:0], v[:0])
            if n:
                asked = None if s.last is None else s.last.row_times
                call = HstuCall(q[history], *new, past, at, layer.bias, alpha, row_times=asked, edges=layer.time_edges)
                out = backend.hstu_causal(call)
                if config.context == "full" and (users := s.num_user_tokens):
                    out[:users] = backend.hstu_targets(_seeing_all(layer, call, users))
                attention[history] = out.mul_(scale)
            if len(s.candidates):
                slabs = [*past, new] if len(new[0]) else past
                out = backend.hstu_targets(_asking(layer, s, q[own], k[own], v[own], slabs, at, alpha))
                attention[own] = out.mul_(scale)
        x = layer.finish(x, u, attention, backend)
    return _last_layer(layers, config, scale_of, backend, x, bounds, times)


def _last_layer(
    layers: Sequence[HSTULayer],
    config: HSTUConfig,
    scale_of: Callable[[int], float],
    backend: Backend,
    x: Tensor,
    bounds: Sequence[tuple[Segment, int]],
    times: Sequence[Tensor],
) -> list[Tensor]:
    """Run the last layer; of history rows only the keys and values are computed."""
    index = len(layers) - 1
    layer = layers[-1]
    alpha = config.attention_alpha
    rows = []
    for (s, start), at in zip(bounds, times, strict=True):
        n = s.num_tokens
        slabs = list(s.past.slabs(index)) if s.past else []
        if n:
            k, v = layer.project_kv(x[start : start + n], backend)
            kept = s.sink(index, k, v) if s.sink else None
            slabs = [*slabs, (k, v)] if kept is None else list(kept)
        own = x[start + n : start + s.num_rows]
        if len(own):
            u, v, q, k = layer.project(own, backend)
            out = backend.hstu_targets(_asking(layer, s, q, k, v, slabs, at, alpha))
            own = layer.finish(own, u, out.mul_(scale_of(len(at))), backend)
        rows.append(own)
    return rows


def _seeing_all(layer: HSTULayer, call: HstuCall, num_rows: int) -> HstuCall:
    """Let the first rows of a whole history attend to all of it: as candidates would, whose own key adds nothing."""
    q = call.q[:num_rows]
    nothing = call.v.new_zeros(num_rows, *call.v.shape[1:])
    slabs = [*call.cached, (call.k, call.v)] if len(call.k) else call.cached
    return HstuCall(q, torch.zeros_like(q), nothing, slabs, call.times, layer.bias, call.alpha)


def _asking(
    layer: HSTULayer,
    segment: Segment,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slabs: Sequence[Slab | Tiles],
    times: Tensor,
    alpha: float,
) -> HstuCall:
    """Let a segment's candidates attend."""
    own = None if segment.last is None else segment.last.time
    at = segment.candidate_time
    return HstuCall(q, k, v, slabs, times, layer.bias, alpha, at, own_time=own, edges=layer.time_edges)
