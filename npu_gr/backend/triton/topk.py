"""xBeam's selection in two kernels and two small top-k's: fixed shapes, one wait at the end.

    rows     one program a beam: log-sum-exp of its row, then the best score of each block of EDGES
             edges
    top-k    the `width` best blocks
    blocks   one program for each of these blocks: the scores of its edges
    top-k    the `width` best edges

The result is exact, including ties: a score and its index form one distinct 64-bit key. If the
block of an edge is not among the `width` best, each of those blocks has an edge that comes before
it in the total order.

Source: xBeam of xGR, arXiv:2512.11529; the blocks are ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_gr.backend.calls import Choices, TopkCall

COLUMNS = 1024  # logits of a row read at once
EDGES = 64  # edges per block
BLOCKS = 8  # blocks of a row that are scored at once

_LOW = tl.constexpr(0xFFFFFFFF)
_NOTHING = tl.constexpr(-(2**63))  # the lowest key: cannot be selected
_EXACT = {"enable_fp_fusion": False}  # both kernels must round a score equally


class Proposal(NamedTuple):
    """Choices on the device, padded: the first `status[1]` are valid."""

    score: Tensor  # fp32 [w]
    parent: Tensor  # int64 [w]
    edge: Tensor  # int64 [w]
    status: Tensor  # int64 [2]: number of rows with a NaN or infinite logit, number of choices


@triton.jit
def _key(score, index):
    """Make keys that order by descending score, ties by ascending index; -inf: `_NOTHING`."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    rising = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(score > float("-inf"), (rising << 32) | (_LOW - index.to(tl.int64)), _NOTHING)


@triton.jit
def _score_of(key):
    rising = (key >> 32).to(tl.int32)
    return tl.where(rising < 0, rising ^ 0x7FFFFFFF, rising).to(tl.float32, bitcast=True)


@triton.jit
def _edge_logits(row_logits, scale, lo, degree, at, code, allowed, filtered: tl.constexpr):
    """Load scaled logits of a row's edges `at`; -inf = no such edge, or not allowed."""
    inside = at < degree
    codes = tl.load(code + lo + at, mask=inside, other=0).to(tl.int64)
    if filtered:
        inside = inside & (tl.load(allowed + lo + at, mask=inside, other=0) != 0)
    logit = tl.load(row_logits + codes, mask=inside, other=float("-inf")).to(tl.float32) * scale
    return tl.where(inside, logit, float("-inf"))


@triton.jit
def _is_bad(x):
    return (x != x) | (x == float("inf"))


@triton.jit
def _add_exp(peak, total, x):
    """Update the running maximum and the sum of exp(x - maximum), per lane."""
    higher = tl.maximum(peak, x)
    base = tl.where(higher > float("-inf"), higher, 0.0)
    return higher, total * tl.exp(peak - base) + tl.exp(x - base)


@triton.jit
def _score(logit, norm, acc):
    """Compute the accumulated log-probability; -inf if all logits of the row are -inf."""
    return logit - tl.where(norm > float("-inf"), norm, float("inf")) + acc


@triton.jit(do_not_specialize=["num_columns", "first_code", "num_blocks"])
def rows_kernel(
    logits, row_stride, num_columns, first_code, scale, acc, lo, degree, code, allowed, num_blocks,
    norm_out, bad_out, key_out,
    over_valid: tl.constexpr, filtered: tl.constexpr, columns: tl.constexpr, blocks: tl.constexpr,
    edges: tl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exp of one row, and the key of every block of its edges."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * row_stride
    row_codes = row_logits + first_code
    row_lo = tl.load(lo + row)
    row_degree = tl.load(degree + row)
    row_acc = tl.load(acc + row)
    lane = tl.arange(0, columns)
    peak = tl.full([columns], float("-inf"), tl.float32)
    total = tl.zeros([columns], tl.float32)
    bad = tl.zeros([columns], tl.int32)
    num_read = row_degree if over_valid else num_columns.to(tl.int64)
    for start in range(0, num_read, columns):
        if over_valid:
            x = _edge_logits(
                row_codes, scale, row_lo, row_degree, start + lane, code, allowed, filtered
            )
        else:
            at = start + lane
            x = (
                tl.load(row_logits + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
                * scale
            )
        bad = bad | _is_bad(x).to(tl.int32)
        peak, total = _add_exp(peak, total, tl.where(_is_bad(x), float("-inf"), x))
    highest = tl.max(peak, 0)
    base = tl.where(highest > float("-inf"), highest, 0.0)
    weight = tl.sum(total * tl.exp(peak - base), 0)
    norm = tl.where(weight > 0.0, tl.log(tl.where(weight > 0.0, weight, 1.0)) + base, float("-inf"))
    tl.store(norm_out + row, norm)
    tl.store(bad_out + row, tl.max(bad, 0))
    within = tl.arange(0, blocks)
    for first in range(0, num_blocks, blocks):
        block = first + within
        at = block[:, None].to(tl.int64) * edges + tl.arange(0, edges)[None, :]
        x = _edge_logits(row_codes, scale, row_lo, row_degree, at, code, allowed, filtered)
        x = tl.where(_is_bad(x), float("-inf"), x)
        best = tl.max(_score(x, norm, row_acc), 1)
        tl.store(
            key_out + row * num_blocks + block,
            _key(best, row * num_blocks + block),
            mask=block < num_blocks,
        )


@triton.jit(do_not_specialize=["first_code", "num_blocks", "num_all"])
def blocks_kernel(
    logits, row_stride, first_code, scale, acc, lo, degree, code, allowed, num_blocks, num_all,
    norm, chosen, key_out,
    filtered: tl.constexpr, edges: tl.constexpr,
):  # fmt: skip
    """Compute the keys of the edges of one selected block.

    Their index ascends with beam and edge, because `chosen` does.
    """
    slot = tl.program_id(0).to(tl.int64)
    block = tl.load(chosen + slot)
    # padding: an index behind all edges of row 0
    row = tl.where(block < num_all, block // num_blocks, 0)
    lane = tl.arange(0, edges)
    at = (block - row * num_blocks) * edges + lane
    row_codes = logits + row * row_stride + first_code
    x = _edge_logits(
        row_codes, scale, tl.load(lo + row), tl.load(degree + row), at, code, allowed, filtered
    )
    x = tl.where(_is_bad(x), float("-inf"), x)
    tl.store(
        key_out + slot * edges + lane,
        _key(_score(x, tl.load(norm + row), tl.load(acc + row)), slot * edges + lane),
    )


@triton.jit(do_not_specialize=["num_blocks", "num_keys"])
def choices_kernel(
    key,
    chosen,
    lo,
    num_blocks,
    num_keys,
    score_out,
    parent_out,
    edge_out,
    edges: tl.constexpr,
    lanes: tl.constexpr,
):
    """Decode each key to score, beam and edge."""
    at = tl.program_id(0) * lanes + tl.arange(0, lanes)
    here = at < num_keys
    keys = tl.load(key + at, mask=here, other=_NOTHING)
    found = keys != _NOTHING
    place = tl.where(found, _LOW - (keys & _LOW), 0)
    block = tl.where(found, tl.load(chosen + place // edges, mask=here, other=0), 0)
    row = block // num_blocks
    edge = (
        tl.load(lo + row, mask=here, other=0) + (block - row * num_blocks) * edges + place % edges
    )
    tl.store(score_out + at, tl.where(found, _score_of(keys), float("-inf")), mask=here)
    tl.store(parent_out + at, row, mask=here)
    tl.store(edge_out + at, edge, mask=here)


def takes(call: TopkCall) -> bool:
    """Return whether the kernels support the dtypes; fp64 is for tests only."""
    return (
        call.logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and call.acc.dtype == torch.float32
    )


def propose(call: TopkCall) -> Proposal:
    """Compute `Backend.beam_topk` without waiting for the device, for rows >= 1 and codes >= 1.

    Every shape follows from the inputs' shapes.
    """
    follow = call.follow
    logits = call.logits if call.logits.stride(1) == 1 else call.logits.contiguous()
    rows, columns = logits.shape
    first, end, _ = (call.codes or slice(None)).indices(columns)
    # a row's codes are distinct, so it has no more edges than there are codes
    num_blocks = -(-(end - first) // EDGES)
    lo = follow.lo.contiguous()
    degree = follow.degree.contiguous()
    acc = call.acc.contiguous()
    filtered = follow.allowed is not None
    allowed = follow.code if follow.allowed is None else follow.allowed.view(torch.uint8)
    norm = logits.new_empty(rows, dtype=torch.float32)
    bad = degree.new_empty(rows, dtype=torch.int32)
    row_keys = degree.new_empty(rows * num_blocks)
    rows_kernel[(rows,)](
        logits, logits.stride(0), columns, first, call.scale, acc, lo, degree, follow.code,
        allowed, num_blocks,
        norm, bad, row_keys,
        over_valid=call.over == "valid", filtered=filtered, columns=COLUMNS, blocks=BLOCKS,
        edges=EDGES, **_EXACT,
    )  # fmt: skip
    best = torch.topk(row_keys, min(call.width, len(row_keys)), sorted=False).values
    # in the order of rows; padding is last
    chosen = (_LOW.value - (best & _LOW.value)).sort().values
    edge_keys = degree.new_empty(len(chosen) * EDGES)
    blocks_kernel[(len(chosen),)](
        logits, logits.stride(0), first, call.scale, acc, lo, degree, follow.code, allowed,
        num_blocks, len(row_keys),
        norm, chosen, edge_keys, filtered=filtered, edges=EDGES, **_EXACT,
    )  # fmt: skip
    keys = torch.topk(edge_keys, min(call.width, len(edge_keys))).values
    score = norm.new_empty(len(keys))
    parent, edge = degree.new_empty(2, len(keys))
    choices_kernel[(-(-len(keys) // 256),)](
        keys, chosen, lo, num_blocks, len(keys), score, parent, edge, edges=EDGES, lanes=256
    )
    return Proposal(score, parent, edge, torch.stack([bad.sum(), (keys != _NOTHING.value).sum()]))


def beam_topk(call: TopkCall) -> Choices:
    """Compute `Backend.beam_topk`.

    The host waits for the device once, for the number of choices.
    """
    first, end, _ = (call.codes or slice(None)).indices(call.logits.shape[1])
    if not len(call.logits) or end <= first or not len(call.follow.code):
        nothing = call.follow.lo.new_empty(0)
        return Choices(call.acc.new_empty(0), nothing, nothing)
    made = propose(call)
    num_bad, found = made.status.tolist()
    if num_bad:
        raise FloatingPointError("a logit is not a number")
    return Choices(made.score[:found], made.parent[:found], made.edge[:found])
