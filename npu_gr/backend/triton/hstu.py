"""HSTU attention by one kernel: history or candidate rows against slabs of cached keys.

Without a softmax the sum over keys can be split anywhere. Each slab (a run of consecutive pages) is
one launch, and is split further into parts if the row blocks alone do not fill the device. Every
part has its own fp32 sums, which are added in order, so equal inputs give equal bits.

Pages in int8 are read as they lie: a program widens the keys and values of a step as it loads them,
to the numbers that `tiles.dequantise` says, in the dtype of the queries.

The bias is that of `base.time_bucket` and the distance, from fp32 tables that are made once a
layer. The steps of a program are of three kinds, in this order:

    far      every distance is beyond the position table, whose last entry is in the time table
    near     the position table is read too
    edge     near, with masks: the diagonal and the end of the slab

Times are int32 seconds since the earliest, computed once a pass. If the span exceeds int32, the
same launch uses int64 and masks everywhere. SiLU is x / (1 + 2^-y), y = x log2(e): the tables and
alpha include log2(e), the sums ln 2. fp32 is three products of tf32 halves, as exact as fp32.
`tanh.approx` would save one instruction over exp and reciprocal, but its error is 2^-11 of x, not
of the result, and adds up if many logits are negative.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from npu_gr.backend.base import TIME_BUCKETS
from npu_gr.backend.calls import BiasTables, HstuCall
from npu_gr.backend.tiles import Slab, scale_bytes

# size of one step of a program
ROWS = 64
KEYS = 64

# two for each multiprocessor of an H200; constant, so that the parts are the same on every device
PROGRAMS = 264
MAX_PARTS = 16  # per slab
MIN_STEPS = 4  # per part
NUMBERS = 1024  # numbers per program of `sum_kernel`
MIN_ROWS = 16  # of a matrix unit
MAX_NUMBERS = 1 << 31  # between the first and the last row of a slab
# compute capabilities: 9 multiplies 64 rows by four warps; from 10 on two fp32 are one instruction
WARP_GROUPS = 9
PAIRS_FROM = 10

IN = -math.log2(math.e)  # factor on tables and alpha
_SCALE = tl.constexpr(-math.log(2.0))
_MAX_SPAN_S = tl.constexpr(2**31 - 2)
# kinds of steps; each includes the previous one
_FAR = tl.constexpr(0)
_NEAR = tl.constexpr(1)
_EDGE = tl.constexpr(2)
_WIDE = tl.constexpr(3)
# how table entries are read
PLAIN = tl.constexpr(0)  # loads by address
FAST = tl.constexpr(1)  # NVIDIA instructions
PAIRS = tl.constexpr(3)  # as FAST, for devices from sm_100 on, which compute two fp32 at once
# Ascend: one select per bucket, and distances stored in rows; floats are compared, because
# comparing integers would be scalar code
SELECTS = tl.constexpr(2)


@triton.jit(do_not_specialize=["num_tokens"])
def clock_kernel(times, num_tokens, seconds, limits, tokens: tl.constexpr):
    """In one program: write the earliest and latest time, and int32 seconds since the earliest."""
    lane = tl.arange(0, tokens)
    earliest = tl.load(times + lane, mask=lane < num_tokens, other=0x7FFFFFFFFFFFFFFF)
    latest = tl.load(times + lane, mask=lane < num_tokens, other=-0x7FFFFFFFFFFFFFFF)
    for start in range(tokens, num_tokens, tokens):
        at = start + lane
        earliest = tl.minimum(
            earliest, tl.load(times + at, mask=at < num_tokens, other=0x7FFFFFFFFFFFFFFF)
        )
        latest = tl.maximum(
            latest, tl.load(times + at, mask=at < num_tokens, other=-0x7FFFFFFFFFFFFFFF)
        )
    first = tl.min(earliest, 0)
    tl.store(limits, first)
    tl.store(limits + 1, tl.max(latest, 0))
    for start in range(0, num_tokens, tokens):
        at = start + lane
        since = tl.load(times + at, mask=at < num_tokens, other=0) - first
        tl.store(seconds + at, since.to(tl.int32), mask=at < num_tokens)


@triton.jit(do_not_specialize=["num_keys"])
def bounds_kernel(seconds, num_keys, bounds, keys: tl.constexpr):
    """Write the range of a step's seconds: the largest in the upper half, the least in the lower.

    Program i is step i of a slab, whose seconds begin at `seconds`.
    """
    at = tl.program_id(0) * keys + tl.arange(0, keys)
    inside = at < num_keys
    least = tl.min(tl.load(seconds + at, mask=inside, other=0x7FFFFFFF), 0)
    most = tl.max(tl.load(seconds + at, mask=inside, other=0), 0)
    tl.store(bounds + tl.program_id(0), (most.to(tl.int64) << 32) | least.to(tl.int64))


@triton.jit
def _weights(y, how: tl.constexpr):
    """Compute -SiLU(x) log2(e) of y = -x log2(e)."""
    if how == PAIRS:  # as FAST, two numbers an instruction
        return tl.inline_asm_elementwise(
            """{ .reg .f32 a, b; .reg .b64 one, y, w;
            ex2.approx.ftz.f32 a, $2; ex2.approx.ftz.f32 b, $3;
            mov.b64 w, {a, b}; mov.b64 one, {0f3F800000, 0f3F800000}; add.rn.f32x2 w, w, one;
            mov.b64 {a, b}, w; rcp.approx.ftz.f32 a, a; rcp.approx.ftz.f32 b, b;
            mov.b64 w, {a, b}; mov.b64 y, {$2, $3}; mul.rn.f32x2 w, w, y;
            mov.b64 {$0, $1}, w; }""",
            "=f,=f,f,f",
            [y],
            tl.float32,
            True,
            2,
        )
    if how == FAST:  # an infinite power gives the weight 0
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, True, 1
        )
        return y * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], tl.float32, True, 1
        )
    return y / (1.0 + tl.exp2(tl.minimum(y, 120.0)))


@triton.jit
def _look_up(table, index, how: tl.constexpr):
    """Gather fp32 numbers; FAST loads into registers, not through shared memory."""
    if how == FAST or how == PAIRS:  # noqa: SIM109  (Triton has no `in`)
        found = tl.inline_asm_elementwise(
            "{ .reg .u64 at; mad.wide.s32 at, $1, 4, $2; ld.global.nc.f32 $0, [at]; }",
            "=f,r,l",
            [index, table.to(tl.int64)],
            tl.float32,
            True,
            1,
        )
    else:
        found = tl.load(table + index)
    return found


@triton.jit
def _select(by_time, seconds, least, most):
    """Look up the bias of seconds whose buckets lie between those of `least` and `most`."""
    fractions = seconds.to(tl.float32)
    lowest = _bucket(least)
    bias = tl.zeros_like(fractions) + tl.load(by_time + lowest)
    for bucket in range(lowest + 1, _bucket(most) + 1):
        border = ((tl.full([1, 1], 254, tl.int32) + bucket) << 22).to(tl.float32, bitcast=True)
        bias = tl.where(fractions >= border, tl.load(by_time + bucket), bias)
    return bias


@triton.jit
def _bucket(seconds):
    """Compute `base.time_bucket` of seconds - 1, for seconds in 1..2^31 - 1 (or 2^31, as int64)."""
    return (seconds.to(tl.float32).to(tl.int32, bitcast=True) >> 22) - 254


@triton.jit
def _seconds(row_time, key_time, kind: tl.constexpr):
    """Compute the seconds between rows and keys, and 1, which narrow row times include."""
    if kind == _WIDE:
        seconds = tl.minimum(tl.maximum(row_time - key_time, 0), 2147483647) + 1
    else:
        seconds = tl.maximum(row_time - key_time, 1)
    return seconds


@triton.jit
def _least(bucket):
    """Compute the least seconds of a bucket >= 0, whose conversion to fp32 rounds to its border."""
    half = bucket & 1
    power = bucket >> 1
    border = (((half + 2).to(tl.int64) << power) + 1) >> 1
    return (border - ((tl.full([], 1, tl.int64) << power) >> (25 - half))).to(tl.int32)


@triton.jit
def _rows(at, row, lane, inside, numbers, width: tl.constexpr, masked: tl.constexpr):
    """Load rows of keys or values, also of int8 with a bf16 scale behind the numbers of each row.

    Args:
        at: The first row.
        row: Stride of rows.
        lane: Index of each row.
        inside: Whether each row exists; read if `masked`.
        numbers: [1, width padded], the columns.
        width: Numbers of a row.
        masked: Rows that do not exist are zeros.
    """
    # a slab has less than 2^31 numbers (`takes`)
    offset = at + (lane[:, None] * row + numbers)
    if masked:
        found = tl.load(offset, mask=inside[:, None] & (numbers < width), other=0.0)
    else:
        found = tl.load(offset, mask=numbers < width, other=0.0)
    if at.dtype.element_ty == tl.int8:
        behind = at + (lane * row + width)
        if masked:
            low = tl.load(behind, mask=inside, other=0)
            high = tl.load(behind + 1, mask=inside, other=0)
        else:
            low = tl.load(behind)
            high = tl.load(behind + 1)
        bits = (high.to(tl.int32) << 24) | ((low.to(tl.int32) & 255) << 16)
        found = found.to(tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]
    return found


@triton.jit
def _attend_keys(
    acc, queries, start, k, k_row, v, v_row, num_keys, first_key, row_at, row_time, key_times,
    bounds, first_second, last_second,
    by_time, by_distance,
    buckets, alpha, qk, vd, corner,
    qk_dim: tl.constexpr, v_dim: tl.constexpr,
    kind: tl.constexpr, targets: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    precision: tl.constexpr,
    how: tl.constexpr,
):  # fmt: skip
    """Add one step's keys to the sums."""
    look: tl.constexpr = PLAIN if targets else how
    lane = tl.arange(0, keys)
    at = start + lane
    in_keys = at < num_keys
    # the offsets of a step's rows never change
    masked: tl.constexpr = kind >= _EDGE
    key = _rows(k + start * k_row, k_row, lane, in_keys, qk[None, :], qk_dim, masked)
    key = key.to(queries.dtype)
    value = _rows(v + start * v_row, v_row, lane, in_keys, vd[None, :], v_dim, masked)
    value = value.to(queries.dtype)
    if kind >= _EDGE:
        key_time = tl.load(key_times + first_key + at, mask=in_keys, other=0)[None, :]
    else:
        key_time = tl.load(key_times + first_key + at)[None, :]
    key_at = (first_key + at)[None, :]
    y = tl.dot(queries, tl.trans(key), input_precision=precision) * alpha
    if kind >= _NEAR and how == SELECTS:  # the table holds the block's rows: see `_distances`
        column = tl.maximum(buckets + keys - (corner - first_key - start), 0) + tl.arange(0, keys)
        if targets:
            y += tl.load(by_distance + column)[None, :]
        else:
            line = tl.arange(0, rows) * (buckets + rows + 2 * keys)
            y += tl.load(by_distance + line[:, None] + column[None, :])
    elif kind == _NEAR and look != PLAIN:  # rows are 4 bytes apart, so loads share an address
        row_bias = by_distance.to(tl.int64) + 4 * (row_at - first_key - start).to(tl.int64)
        y += tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];",
            "=f,l",
            [row_bias - 4 * lane.to(tl.int64)[None, :]],
            tl.float32,
            True,
            1,
        )
    elif kind >= _NEAR:
        distance = tl.minimum(tl.maximum(row_at - key_at, 0), buckets - 1)
        y += _look_up(by_distance, distance, look)
    if how == SELECTS:
        least = tl.min(row_time) - tl.max(key_time)
        most = tl.max(row_time) - tl.min(key_time)
        if kind == _WIDE:
            least = tl.minimum(tl.maximum(least, 0), 2147483647) + 1
            most = tl.minimum(tl.maximum(most, 0), 2147483647) + 1
        else:
            least = tl.maximum(least, 1)
            most = tl.maximum(most, 1)
        bias = _select(by_time, _seconds(row_time, key_time, kind), least, most)
        weights = _weights(y + bias, how).to(value.dtype)
    elif targets or kind == _WIDE:
        bias = _look_up(by_time, _bucket(_seconds(row_time, key_time, kind)), look)
        weights = _weights(y + bias, how).to(value.dtype)
    else:
        range_ = tl.load(bounds + start // keys)
        lowest = _bucket(tl.maximum(first_second - (range_ >> 32).to(tl.int32), 1))
        highest = _bucket(tl.maximum(last_second - range_.to(tl.int32), 1))
        if lowest == highest:
            weights = _weights(y + tl.load(by_time + lowest), how).to(value.dtype)
        elif lowest + 1 == highest:
            is_older = key_time <= row_time - _least(highest)
            bias = tl.where(is_older, tl.load(by_time + highest), tl.load(by_time + lowest))
            weights = _weights(y + bias, how).to(value.dtype)
        else:
            bias = _look_up(by_time, _bucket(_seconds(row_time, key_time, kind)), look)
            weights = _weights(y + bias, how).to(value.dtype)
    if kind >= _EDGE:
        if how == SELECTS:  # positions are exact in fp32
            seen = (at.to(tl.float32) < num_keys.to(tl.float32))[None, :]
            seen &= key_at.to(tl.float32) <= row_at.to(tl.float32)
        else:
            seen = in_keys[None, :] & (key_at <= row_at)
        weights = tl.where(seen, weights, tl.zeros([], value.dtype))
    return acc + tl.dot(weights, value, input_precision=precision)


@triton.jit
def attend_part(
    head, part, first,
    q, q_row, q_head, own_k, own_row, own_head, own_v, own_v_row, own_v_head, num_rows,
    k, k_row, k_head, v, v_row, v_head, num_keys, first_row, first_key,
    times, seconds, limits, bounds, query_time, tables, table_row, buckets, alpha, out, heads,
    first_part, span,
    targets: tl.constexpr, begins: tl.constexpr, whole: tl.constexpr, qk_dim: tl.constexpr,
    v_dim: tl.constexpr,
    qk_wide: tl.constexpr, v_wide: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    time_buckets: tl.constexpr,
    precision: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """Sum one part of a slab's keys for [rows from `first` on, head]; with `whole`, finish them.

    Row i is token first_row + i and sees the keys up to itself. With `targets`, every row is token
    first_row at query_time, and sees all keys and (with `begins`, in the first part) itself. Part i
    is the keys i * span .. (i + 1) * span.
    """
    row = first + tl.arange(0, rows)
    qk = tl.arange(0, qk_wide)
    vd = tl.arange(0, v_wide)
    in_rows = (row < num_rows)[:, None]
    in_qk = (qk < qk_dim)[None, :]
    in_v = (vd < v_dim)[None, :]
    queries = tl.load(
        q + row[:, None].to(tl.int64) * q_row + head * q_head + qk[None, :],
        mask=in_rows & in_qk,
        other=0.0,
    )
    by_time = tables + head * table_row
    own_distance = buckets + keys if how == SELECTS else 0
    by_distance = by_time + time_buckets
    k += head * k_head
    v += head * v_head
    acc = tl.zeros([rows, v_wide], tl.float32)
    if targets and begins:
        is_first = (row < num_rows * (1 - tl.minimum(part, 1)))[:, None]  # only in the first part
        own = tl.load(
            own_k + row[:, None].to(tl.int64) * own_row + head * own_head + qk[None, :],
            mask=is_first & in_qk,
            other=0.0,
        )
        own_value = tl.load(
            own_v + row[:, None].to(tl.int64) * own_v_row + head * own_v_head + vd[None, :],
            mask=is_first & in_v,
            other=0.0,
        )
        own_y = tl.sum(queries.to(tl.float32) * own.to(tl.float32), 1) * alpha
        own_y += tl.load(by_time) + tl.load(by_distance + own_distance)
        acc = _weights(own_y, how)[:, None] * own_value.to(tl.float32)
    earliest = tl.load(limits)
    is_wide = tl.load(limits + 1) - earliest > _MAX_SPAN_S
    begin = part * span
    end = tl.minimum(begin + span, num_keys)
    # number of keys before the first row
    before = first_row - first_key
    if targets:
        is_wide |= query_time - earliest > _MAX_SPAN_S
        row_at = tl.full([1, 1], 0, tl.int32) + first_row
        row_second = tl.full([1, 1], 1, tl.int32) + tl.maximum(query_time - earliest, -1).to(
            tl.int32
        )
        row_time = tl.full([1, 1], 0, tl.int64) + query_time
        first_second = row_second
        last_second = row_second
        clear = end
        corner = first_row  # the first row's position
    else:
        corner = first_row + first
        row_at = (first_row + row)[:, None]
        row_second = tl.load(seconds + first_row + row, mask=row < num_rows, other=0)[:, None] + 1
        row_time = tl.load(times + first_row + row, mask=row < num_rows, other=0)[:, None]
        first_second = tl.min(tl.where(in_rows, row_second, 0x7FFFFFFF))
        last_second = tl.max(row_second)
        before += first
        end = tl.minimum(end, before + rows)
        clear = tl.minimum(end, before + 1)
    far = tl.minimum(clear, before - buckets + 2)
    # without branches, which Ascend's compiler does not support in a loop over tasks
    narrow_end = tl.where(is_wide, begin, end)
    far = begin + tl.maximum(tl.minimum(far, narrow_end) - begin, 0) // keys * keys
    clear = far + tl.maximum(tl.minimum(clear, narrow_end) - far, 0) // keys * keys
    for kind in tl.static_range(4):
        start_at = far if kind == _NEAR else clear if kind == _EDGE else begin
        stop_at = far if kind == _FAR else clear if kind == _NEAR else narrow_end
        if kind == _WIDE:
            stop_at = tl.where(is_wide, end, begin)
        row_clock = row_time if kind == _WIDE else row_second
        key_clock = times if kind == _WIDE else seconds
        for start in range(start_at, stop_at, keys):
            acc = _attend_keys(
                acc, queries, start, k, k_row, v, v_row, num_keys, first_key, row_at, row_clock,
                key_clock, bounds, first_second, last_second, by_time,
                by_distance, buckets, alpha, qk, vd, corner, qk_dim, v_dim,
                kind, targets, rows, keys, precision, how,
            )  # fmt: skip
    into = ((first_part + part) * num_rows + row[:, None]).to(tl.int64) * heads + head
    acc = acc * _SCALE if whole else acc
    tl.store(out + into * v_dim + vd[None, :], acc.to(out.dtype.element_ty), mask=in_rows & in_v)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_keys",
        "first_row",
        "first_key",
        "first_part",
        "query_time",
        "span",
    ]
)
def hstu_kernel(
    q, q_row, q_head, own_k, own_row, own_head, own_v, own_v_row, own_v_head, num_rows,
    k, k_row, k_head, v, v_row, v_head, num_keys, first_row, first_key,
    times, seconds, limits, bounds, query_time, tables, table_row, buckets, alpha, out, heads,
    first_part, span,
    targets: tl.constexpr, begins: tl.constexpr, whole: tl.constexpr, qk_dim: tl.constexpr,
    v_dim: tl.constexpr,
    qk_wide: tl.constexpr, v_wide: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    time_buckets: tl.constexpr,
    precision: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """Run `attend_part` for the grid [row blocks, heads, parts]."""
    # the last rows have the most keys, so they start first
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * rows
    attend_part(
        tl.program_id(1), tl.program_id(2), first,
        q, q_row, q_head, own_k, own_row, own_head, own_v, own_v_row, own_v_head, num_rows,
        k, k_row, k_head, v, v_row, v_head, num_keys, first_row, first_key,
        times, seconds, limits, bounds, query_time, tables, table_row, buckets, alpha, out, heads,
        first_part, span,
        targets, begins, whole, qk_dim, v_dim, qk_wide, v_wide, rows, keys, time_buckets,
        precision, how,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_parts", "num_numbers"])
def sum_kernel(sums, num_parts, num_numbers, out, numbers: tl.constexpr):
    """Add the parts' sums in order."""
    at = tl.program_id(0).to(tl.int64) * numbers + tl.arange(0, numbers)
    inside = at < num_numbers
    total = tl.load(sums + at, mask=inside, other=0.0)
    for _ in range(1, num_parts):
        sums += num_numbers
        total += tl.load(sums + at, mask=inside, other=0.0)
    tl.store(out + at, (total * _SCALE).to(out.dtype.element_ty), mask=inside)


class _Clock(NamedTuple):
    """A pass's times for the kernel."""

    seconds: Tensor  # int32 [tokens] since the earliest
    limits: Tensor  # int64 [2], the earliest and the latest
    # lengths of the slabs, and keys of a step -> ranges of each slab's steps, see `bounds_kernel`
    bounds: dict[tuple[tuple[int, ...], int], list[Tensor]]


class DeviceLimits(NamedTuple):
    """The limits of a device that decide on a program's sizes."""

    major: int  # of its compute capability; 0 = no CUDA device
    shared_bytes: int  # most shared memory of one program


class Tile(NamedTuple):
    """Sizes of a program's steps, and how it is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int

    def shared_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Estimate the shared memory: rows and weights, in two halves if fp32, keys and values."""
        size, halves = dtype.itemsize, 2 if dtype == torch.float32 else 1
        buffers = 2 * (self.stages - 1) * self.keys * width
        return size * (halves * self.rows * (width + self.keys) + buffers)

    def within(self, limits: DeviceLimits, width: int, dtype: torch.dtype) -> Tile:
        """Halve the rows until the shared memory is within the limit, down to a matrix unit's."""
        tile = self
        while tile.shared_bytes(width, dtype) > limits.shared_bytes and tile.rows > MIN_ROWS:
            tile = tile._replace(rows=tile.rows // 2)
        return tile


class _Part(NamedTuple):
    """A slab and its division into parts."""

    slab: Slab
    num_parts: int
    span: int  # keys per part


class Attention(threading.local):
    """Computes `Backend.hstu_causal` and `hstu_targets`; caches tables and times per thread."""

    programs = PROGRAMS  # number of programs that fill the device

    def __init__(self) -> None:
        # times of a pass -> _Clock; all layers of a pass share the times
        self._clocks = WeakIdKeyDictionary()
        # a layer's position table -> versions of its sources, and the tables
        self._tables = WeakIdKeyDictionary()

    def takes(self, q: Tensor, slabs: Sequence[Slab]) -> bool:
        """Return whether the kernel supports slabs: q's dtype or int8, < `MAX_NUMBERS` apart."""
        planes = [plane for slab in slabs for plane in slab]
        same = all(
            plane.dtype in (q.dtype, torch.int8) and len(plane) * plane.stride(0) < MAX_NUMBERS
            for plane in planes
        )
        return same and self.takes_numbers(q.dtype)

    def takes_numbers(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel supports a dtype."""
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def causal(self, call: HstuCall, past: Sequence[Slab]) -> Tensor:
        """Compute `Backend.hstu_causal`; `past` is `call.cached` without tiles.

        In int8 all rows are stored ones: see `HstuCall.as_stored`.
        """
        return self._attend(call, None, [*past, (call.k, call.v)], len(call.times) - len(call.q))

    def targets(self, call: HstuCall, history: Sequence[Slab]) -> Tensor:
        """Compute `Backend.hstu_targets`; `history` is `call.cached` without tiles."""
        return self._attend(call, (call.k, call.v), history, len(call.times))

    def _attend(
        self, call: HstuCall, own: Slab | None, slabs: Sequence[Slab], first_row: int
    ) -> Tensor:
        """Launch once a slab.

        Args:
            call: The call.
            own: Keys and values of candidates; None = history rows.
            slabs: All keys and values.
            first_row: Position of the first row.
        """
        num_rows, heads, qk_dim = call.q.shape
        v_dim = call.v.shape[2] - scale_bytes(call.v.dtype)
        out = call.q.new_empty(num_rows, heads, v_dim)
        if not num_rows:
            return out
        q = _unit_stride(call.q)
        clock = self._clock(call.times)
        times = call.times.contiguous()
        tile = self._tile(q, max(qk_dim, v_dim))
        rows, keys = tile.rows, tile.keys
        tables = self._bias(call.bias, keys)
        buckets = call.bias.position.shape[1]
        own_k, own_v = (_unit_stride(x) for x in own) if own else (q, q)
        blocks = -(-num_rows // rows)
        # an empty slab if there are no keys, because each candidate sees itself
        held = [slab for slab in slabs if len(slab[0])] or [(q[:0], call.v[:0])]
        cut = [
            _Part(slab, *_parts(self.programs, blocks * heads, len(slab[0]), keys)) for slab in held
        ]
        total = sum(part.num_parts for part in cut)
        sums = (
            out if total == 1 else q.new_empty(total, num_rows, heads, v_dim, dtype=torch.float32)
        )
        bounds = self._bounds(clock, [len(slab[0]) for slab in held], keys, is_causal=own is None)
        first_key = first_part = 0
        for index, (slab, num_parts, span) in enumerate(cut):
            k, v = (_unit_stride(x) for x in slab)
            arguments = (
                q, *q.stride()[:2], own_k, *own_k.stride()[:2], own_v, *own_v.stride()[:2],
                num_rows,
                k, *k.stride()[:2], v, *v.stride()[:2], len(k), first_row, first_key,
                times, clock.seconds, clock.limits, bounds[index], call.query_time,
                tables, tables.stride(0), buckets, IN * call.alpha,
                sums, heads, first_part, span,
            )  # fmt: skip
            constants = {
                "targets": own is not None, "begins": index == 0, "whole": total == 1,
                "qk_dim": qk_dim, "v_dim": v_dim,
                "qk_wide": wide(qk_dim), "v_wide": wide(v_dim), "rows": rows, "keys": keys,
                "time_buckets": TIME_BUCKETS,
            }  # fmt: skip
            self._launch((blocks, heads, num_parts), arguments, constants, tile)
            first_key += len(k)
            first_part += num_parts
        if total > 1:
            sum_kernel[(-(-out.numel() // NUMBERS),)](
                sums, total, out.numel(), out, numbers=NUMBERS
            )
        return out

    def _launch(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[object, ...],
        constants: Mapping[str, object],
        tile: Tile,
    ) -> None:
        """Run `attend_part` for [row blocks, heads, parts]."""
        q = arguments[0]
        assert isinstance(q, Tensor)
        hstu_kernel[grid](
            *arguments, **constants, precision=precision(q.dtype), how=how_of(limits_of(q.device)),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _tile(self, q: Tensor, width: int) -> Tile:
        return tile_of(q.dtype, width, len(q), limits_of(q.device))

    def _bounds(
        self, clock: _Clock, sizes: Sequence[int], keys: int, *, is_causal: bool
    ) -> list[Tensor]:
        """Return the ranges of each slab's steps; candidates have one time, and read none."""
        if not is_causal:
            return [clock.limits] * len(sizes)
        key = tuple(sizes), keys
        if key not in clock.bounds:
            made = clock.bounds[key] = list[Tensor]()
            first = 0
            for size in sizes:
                made.append(clock.limits.new_empty(max(1, -(-size // keys))))
                bounds_kernel[(len(made[-1]),)](clock.seconds[first:], size, made[-1], keys=keys)
                first += size
        return clock.bounds[key]

    def _clock(self, times: Tensor) -> _Clock:
        made: _Clock | None = self._clocks.get(times)
        if made is None:
            made = _Clock(times.new_empty(len(times), dtype=torch.int32), times.new_zeros(2), {})
            if len(times):
                clock_kernel[(1,)](times.contiguous(), len(times), *made[:2], tokens=1024)
            self._clocks[times] = made
        return made

    def _bias(self, bias: BiasTables, keys: int) -> Tensor:
        """Return fp32 [H, ...]: time + the last position's bias, then position - the last one's."""
        made_of = [(x.data_ptr(), x.dtype, None if x.is_inference() else x._version) for x in bias]
        known: tuple[object, Tensor] | None = self._tables.get(bias.position)
        if known is None or known[0] != made_of:
            position, time = (x.detach().float() * IN for x in bias)
            last = position[:, -1:]
            known = made_of, torch.cat([time + last, self._distances(position - last, keys)], dim=1)
            self._tables[bias.position] = known
        return known[1]

    def _distances(self, by_distance: Tensor, keys: int) -> Tensor:
        """Arrange a table [H, P] for the kernel, for steps of `keys` keys.

        A block that is near reads up to its rows and keys behind the table, where all is zero.
        """
        return torch.nn.functional.pad(by_distance, (0, 2 * ROWS + keys))


def _parts(fills: int, programs: int, num_keys: int, step: int) -> tuple[int, int]:
    """Divide a slab so that the device, which needs `fills` programs, is full.

    Returns:
        The number of parts, and the keys of each.
    """
    steps = max(1, -(-num_keys // step))
    wanted = max(1, min(MAX_PARTS, -(-fills // programs), steps // MIN_STEPS))
    span = -(-steps // wanted) * step
    return max(1, -(-num_keys // span)), span


def wide(width: int) -> int:
    """Round a width up to a power of two, at least the 16 of a matrix unit."""
    return max(16, 1 << (width - 1).bit_length())


def step_keys(dtype: torch.dtype, width: int) -> int:
    """Return the keys of a step: fewer for wide heads, and fp32 with its four-fold registers."""
    keys = KEYS if dtype.itemsize == 2 else KEYS // 4
    return max(16, keys * 128 // max(128, wide(width)))


@functools.cache
def limits_of(device: torch.device) -> DeviceLimits:
    """Ask a device for its limits; off CUDA there are none."""
    if device.type != "cuda":
        return DeviceLimits(0, 1 << 31)
    known = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return DeviceLimits(torch.cuda.get_device_capability(device)[0], known["max_shared_mem"])


def how_of(limits: DeviceLimits) -> tl.constexpr:
    """Return how a device reads tables and computes exponentials."""
    return PLAIN if not limits.major else PAIRS if limits.major >= PAIRS_FROM else FAST


def tile_of(dtype: torch.dtype, width: int, num_rows: int, limits: DeviceLimits) -> Tile:
    """Choose the sizes of `hstu_kernel`.

    Args:
        dtype: Dtype of the numbers.
        width: The larger of the widths of a head's keys and values.
        num_rows: Rows of the call.
        limits: Limits of the device.
    """
    keys = step_keys(dtype, width)
    tile = Tile(ROWS, keys, 4, 3)
    if limits.major not in (0, WARP_GROUPS) and dtype.itemsize == 2:
        tile = Tile(2 * ROWS if num_rows > ROWS else ROWS, keys, 8, 2)
    elif limits.major > WARP_GROUPS:
        tile = Tile(ROWS // 2, keys, 8, 3)
    return tile.within(limits, wide(width), dtype)


def precision(dtype: torch.dtype) -> str:
    """Return `tl.dot`'s precision: fp32 as three tf32 products, which tensor cores compute."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
