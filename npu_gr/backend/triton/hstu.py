"""HSTU attention by one kernel: history rows and candidate rows against slabs of cached keys, read where they lie.

A slab is one launch that adds to an fp32 output: without a softmax the sum over keys may be cut anywhere, and a run
of consecutive pages is one slab. Bias by position and time comes from the tables, bucketed as `base.time_bucket`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_gr.backend.base import TIME_BUCKETS
from npu_gr.backend.calls import HstuCall
from npu_gr.backend.tiles import Slab

# of one step of a program
ROWS = 64
KEYS = 64


@triton.jit
def _time_bucket(delta_s):
    """Compute `base.time_bucket`."""
    seconds = tl.minimum(tl.maximum(delta_s, 0), 2147483647) + 1
    octave_and_half = seconds.to(tl.float32).to(tl.int32, bitcast=True) >> 22
    return tl.minimum(tl.maximum(octave_and_half - 254, 0), 63)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-tl.maximum(x, -80.0)))  # below, the result is 0 and exp would be infinite


@triton.jit(do_not_specialize=["num_rows", "num_keys", "first_row", "first_key", "query_time"])
def hstu_kernel(
    q, q_row, q_head, own_k, own_row, own_head, own_v, own_v_row, own_v_head, num_rows,
    k, k_row, k_head, v, v_row, v_head, num_keys, first_row, first_key,
    times, query_time, position_bias, time_bias, buckets, alpha, out, heads,
    targets: tl.constexpr, begins: tl.constexpr, qk_dim: tl.constexpr, v_dim: tl.constexpr,
    qk_wide: tl.constexpr, v_wide: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    time_buckets: tl.constexpr,
):  # fmt: skip
    """Add one slab's keys to [rows, head] of the output, or begin it.

    Row i is token first_row + i and sees keys up to itself; of `targets`, every row is token first_row, at
    query_time, and sees all keys and (with `begins`) itself.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    qk = tl.arange(0, qk_wide)
    vd = tl.arange(0, v_wide)
    in_rows = (row < num_rows)[:, None]
    in_qk = (qk < qk_dim)[None, :]
    in_v = (vd < v_dim)[None, :]
    queries = tl.load(
        q + row[:, None].to(tl.int64) * q_row + head * q_head + qk[None, :], mask=in_rows & in_qk, other=0.0
    )
    into = out + (row[:, None].to(tl.int64) * heads + head) * v_dim + vd[None, :]
    position_bias += head * buckets
    time_bias += head * time_buckets
    if not begins:
        acc = tl.load(into, mask=in_rows & in_v, other=0.0)
    elif targets:
        own = tl.load(
            own_k + row[:, None].to(tl.int64) * own_row + head * own_head + qk[None, :], mask=in_rows & in_qk, other=0.0
        )
        own_value = tl.load(
            own_v + row[:, None].to(tl.int64) * own_v_row + head * own_v_head + vd[None, :],
            mask=in_rows & in_v,
            other=0.0,
        )
        logit = tl.sum(queries.to(tl.float32) * own.to(tl.float32), 1) * alpha
        logit += tl.load(position_bias).to(tl.float32) + tl.load(time_bias).to(tl.float32)
        acc = _silu(logit)[:, None] * own_value.to(tl.float32)
    else:
        acc = tl.zeros([rows, v_wide], tl.float32)
    end = num_keys
    if targets:
        row_at = tl.full([1, 1], 0, tl.int64) + first_row
        row_time = tl.full([1, 1], 0, tl.int64) + query_time
    else:
        row_at = (first_row + row)[:, None].to(tl.int64)
        row_time = tl.load(times + first_row + row, mask=row < num_rows, other=0)[:, None]
        end = tl.minimum(num_keys, first_row + (tl.program_id(0) + 1) * rows - first_key)
    for start in range(0, end, keys):
        at = start + tl.arange(0, keys)
        in_keys = at < num_keys
        key = tl.load(
            k + at[:, None].to(tl.int64) * k_row + head * k_head + qk[None, :], mask=in_keys[:, None] & in_qk, other=0.0
        )
        value = tl.load(
            v + at[:, None].to(tl.int64) * v_row + head * v_head + vd[None, :], mask=in_keys[:, None] & in_v, other=0.0
        )
        key_at = (first_key + at)[None, :].to(tl.int64)
        key_time = tl.load(times + first_key + at, mask=in_keys, other=0)[None, :]
        distance = tl.minimum(tl.maximum(row_at - key_at, 0), buckets - 1)
        bias = tl.load(position_bias + distance).to(tl.float32)
        bias += tl.load(time_bias + _time_bucket(row_time - key_time)).to(tl.float32)
        logits = tl.dot(queries, tl.trans(key), input_precision="ieee") * alpha + bias
        weights = tl.where(in_keys[None, :] & (key_at <= row_at), _silu(logits), 0.0)
        acc += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    tl.store(into, acc, mask=in_rows & in_v)


def takes(q: Tensor, slabs: Sequence[Slab]) -> bool:
    """Tell whether the kernel reads these: one dtype, and not fp64, which only tests have."""
    same = all(plane.dtype == q.dtype for slab in slabs for plane in slab)
    return same and q.dtype in (torch.float32, torch.bfloat16, torch.float16)


def causal(call: HstuCall, past: Sequence[Slab]) -> Tensor:
    """Compute `Backend.hstu_causal`; `past` is `call.cached` without tiles."""
    return _attend(call, None, [*past, (call.k, call.v)], len(call.times) - len(call.q))


def targets(call: HstuCall, history: Sequence[Slab]) -> Tensor:
    """Compute `Backend.hstu_targets`; `history` is `call.cached` without tiles."""
    history = history or [(call.k[:0], call.v[:0])]  # each candidate still sees itself
    return _attend(call, (call.k, call.v), history, len(call.times))


def _attend(call: HstuCall, own: Slab | None, slabs: Sequence[Slab], first_row: int) -> Tensor:
    """Launch once a slab; `own` holds candidates' keys and values, `first_row` is the position of the first row."""
    num_rows, heads, qk_dim = call.q.shape
    v_dim = call.v.shape[2]
    out = call.q.new_empty(num_rows, heads, v_dim, dtype=torch.float32)
    if not num_rows:
        return out.to(call.q.dtype)
    q = _unit_stride(call.q)
    times = call.times.contiguous()
    position = call.bias.position.contiguous()
    time = call.bias.time.contiguous()
    own_k, own_v = (_unit_stride(x) for x in own) if own else (q, q)
    first_key = 0
    for index, slab in enumerate(slabs):
        k, v = (_unit_stride(x) for x in slab)
        hstu_kernel[(-(-num_rows // ROWS), heads)](
            q, *q.stride()[:2], own_k, *own_k.stride()[:2], own_v, *own_v.stride()[:2], num_rows,
            k, *k.stride()[:2], v, *v.stride()[:2], len(k), first_row, first_key,
            times, call.query_time, position, time, position.shape[1], call.alpha, out, heads,
            targets=own is not None, begins=index == 0, qk_dim=qk_dim, v_dim=v_dim,
            qk_wide=wide(qk_dim), v_wide=wide(v_dim), rows=ROWS, keys=keys_of(q), time_buckets=TIME_BUCKETS,
        )  # fmt: skip
        first_key += len(k)
    return out.to(q.dtype)


def wide(width: int) -> int:
    """The power of two that a tile of this width takes: at least what a matrix unit multiplies."""
    return max(16, 1 << (width - 1).bit_length())


def keys_of(q: Tensor) -> int:
    """Keys of a step: fp32 tiles are twice as large, and a program's shared memory is not."""
    return KEYS if q.dtype.itemsize == 2 else max(16, KEYS // 2)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
