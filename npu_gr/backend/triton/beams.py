"""Beam attention by two kernels: all beams against the shared prefix, then the merge.

    shared   [beams x grouped heads, keys] of one slab: a key tile is loaded once for all rows of a
             program, and other programs of the KV head find it in the cache; SPAN keys a program,
             so that a long prefix with few beams fills the device
    merge    the stages of all spans and each beam's own tokens, by an online softmax

Source: staged attention of xGR, arXiv:2512.11529. A stage is (peak, total, output), fp32, base e.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_gr.backend.calls import BeamCall
from npu_gr.backend.triton.hstu import (
    ROWS,
    DeviceLimits,
    Tile,
    limits_of,
    precision,
    step_keys,
    wide,
)

SPAN = 1024  # keys of one program
MERGE_ROWS = 16


@triton.jit(do_not_specialize=["num_rows", "num_folded", "num_keys", "first_span"])
def shared_kernel(
    q, q_row, q_head, num_rows, num_folded, k, k_row, k_head, v, v_row, v_head, num_keys, scale,
    peak_out, total_out, output_out, first_span, group,
    dim: tl.constexpr, dim_wide: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    span: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Attend to a span of a slab's keys.

    Folded row i is beam i % num_rows and query head i // num_rows of the group.
    """
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    folded = tl.program_id(0) * rows + tl.arange(0, rows)
    d = tl.arange(0, dim_wide)
    in_rows = folded < num_folded
    in_d = (d < dim)[None, :]
    beam = (folded % num_rows).to(tl.int64)
    head = kv_head * group + folded // num_rows
    at_query = q + beam[:, None] * q_row + head[:, None] * q_head + d[None, :]
    queries = tl.load(at_query, mask=in_rows[:, None] & in_d, other=0.0)
    peak = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    output = tl.zeros([rows, dim_wide], tl.float32)
    for start in range(part * span, tl.minimum((part + 1) * span, num_keys), keys):
        at = start + tl.arange(0, keys)
        in_keys = at < num_keys
        offset = at[:, None].to(tl.int64)
        key = tl.load(
            k + offset * k_row + kv_head * k_head + d[None, :],
            mask=in_keys[:, None] & in_d,
            other=0.0,
        )
        value = tl.load(
            v + offset * v_row + kv_head * v_head + d[None, :],
            mask=in_keys[:, None] & in_d,
            other=0.0,
        )
        scores = tl.dot(queries, tl.trans(key), input_precision=precision) * scale
        scores = tl.where(in_keys[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp(peak - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        output = output * shrink[:, None] + tl.dot(
            weights.to(value.dtype), value, input_precision=precision
        )
        peak = higher
    stage = ((first_span + part) * tl.num_programs(1) + kv_head).to(tl.int64) * num_folded + folded
    tl.store(peak_out + stage, peak, mask=in_rows)
    tl.store(total_out + stage, total, mask=in_rows)
    tl.store(output_out + stage[:, None] * dim + d[None, :], output, mask=in_rows[:, None] & in_d)


@triton.jit(do_not_specialize=["num_rows", "num_folded", "num_spans", "ancestry_slot"])
def merge_kernel(
    q, q_row, q_head, num_rows, num_folded, own_k, own_v, own_row, own_slot, own_head, num_slots,
    ancestry,
    ancestry_slot, scale, peaks, totals, outputs, num_spans, group, out,
    by_ancestry: tl.constexpr, dim: tl.constexpr, dim_wide: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Add each row's own tokens to its stages, and normalise."""
    kv_head = tl.program_id(1)
    folded = tl.program_id(0) * rows + tl.arange(0, rows)
    d = tl.arange(0, dim_wide)
    in_rows = folded < num_folded
    in_d = (d < dim)[None, :]
    inside = in_rows[:, None] & in_d
    beam = (folded % num_rows).to(tl.int64)
    head = kv_head * group + folded // num_rows
    queries = tl.load(
        q + beam[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=inside, other=0.0
    )
    queries = queries.to(tl.float32) * scale
    peak = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    output = tl.zeros([rows, dim_wide], tl.float32)
    for span in range(num_spans):
        stage = (span * tl.num_programs(1) + kv_head).to(tl.int64) * num_folded + folded
        its_peak = tl.load(peaks + stage, mask=in_rows, other=0.0)
        higher = tl.maximum(peak, its_peak)
        shrink = tl.exp(peak - higher)
        weight = tl.exp(its_peak - higher)
        total = total * shrink + weight * tl.load(totals + stage, mask=in_rows, other=1.0)
        its_output = tl.load(outputs + stage[:, None] * dim + d[None, :], mask=inside, other=0.0)
        output = output * shrink[:, None] + weight[:, None] * its_output
        peak = higher
    for slot in range(num_slots):
        holder = beam
        if by_ancestry:
            holder = tl.load(ancestry + slot * ancestry_slot + beam, mask=in_rows, other=0)
        at = holder[:, None] * own_row + slot * own_slot + kv_head * own_head + d[None, :]
        key = tl.load(own_k + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(own_v + at, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(queries * key, 1)
        higher = tl.maximum(peak, score)
        shrink = tl.exp(peak - higher)
        weight = tl.exp(score - higher)
        total = total * shrink + weight
        output = output * shrink[:, None] + weight[:, None] * value
        peak = higher
    into = out + (beam[:, None] * (tl.num_programs(1) * group) + head[:, None]) * dim + d[None, :]
    tl.store(into, output / total[:, None], mask=inside)


def tile_of(dtype: torch.dtype, dim: int, limits: DeviceLimits) -> Tile:
    """Choose the sizes of `shared_kernel`: wide heads, and fp32, want fewer rows for registers.

    Args:
        dtype: Dtype of the numbers.
        dim: Width of a head.
        limits: Limits of the device.
    """
    row_bytes = wide(dim) * dtype.itemsize
    rows = ROWS if row_bytes <= 256 and dtype.itemsize == 2 else 32 if row_bytes <= 512 else 16
    tile = Tile(min(rows, ROWS), step_keys(dtype, dim), 4 if dtype.itemsize == 2 else 8, 3)
    return tile.within(limits, wide(dim), dtype)


def attend(call: BeamCall) -> Tensor:
    """Compute `Backend.beam_attention`."""
    q = call.q
    num_rows, num_heads, dim = q.shape
    kv_heads = call.unshared[0].shape[2]
    group = num_heads // kv_heads
    folded = group * num_rows
    shared = [slab for slab in call.shared if len(slab[0])]
    spans = [-(-len(k) // SPAN) for k, _ in shared]
    peaks, totals = q.new_empty(2, sum(spans), kv_heads, folded, dtype=torch.float32)
    outputs = q.new_empty(sum(spans), kv_heads, folded, dim, dtype=torch.float32)
    tile = tile_of(q.dtype, dim, limits_of(q.device))
    first_span = 0
    for (k, v), num_spans in zip(shared, spans, strict=True):
        shared_kernel[(-(-folded // tile.rows), kv_heads, num_spans)](
            q, *q.stride()[:2], num_rows, folded, k, *k.stride()[:2], v, *v.stride()[:2], len(k),
            call.scale,
            peaks, totals, outputs, first_span, group,
            dim=dim, dim_wide=wide(dim), rows=tile.rows, keys=tile.keys, span=SPAN,
            precision=precision(q.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        first_span += num_spans
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    own_k, own_v = call.unshared
    table = own_k if call.ancestry is None else call.ancestry.contiguous()
    merge_kernel[(-(-folded // MERGE_ROWS), kv_heads)](
        q, *q.stride()[:2], num_rows, folded, own_k, own_v, *own_k.stride()[:3], call.num_slots,
        table, table.stride(0),
        call.scale, peaks, totals, outputs, first_span, group, out,
        by_ancestry=call.ancestry is not None, dim=dim, dim_wide=wide(dim), rows=MERGE_ROWS,
    )  # fmt: skip
    return out


def takes(call: BeamCall) -> bool:
    """Return whether the kernels support the call: one dtype, not fp64, contiguous heads."""
    q = call.q
    unshared = call.unshared
    planes = [*unshared, *(plane for slab in call.shared for plane in slab)]
    same = all(plane.dtype == q.dtype and plane.stride(-1) == 1 for plane in planes)
    return (
        same
        and q.stride(-1) == 1
        and unshared[0].stride() == unshared[1].stride()
        and q.dtype != torch.float64
    )
