"""The limits of the native operators of `ops/ascendc`, as in `tiling.h` and `hstu_tiling.h`.

They are checked before a call: a call beyond a limit runs as torch ops. An error of the operator
itself is not caught. `tests/backend/npu/test_limits.py` compares these functions with the headers,
size by size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from npu_gr.backend.calls import HstuShape, TopkCall
from npu_gr.backend.npu.hstu_batch import KEY_BLOCK, NEAR_END, ROW_BLOCK

# from tiling.h, with the header's names
MAX_K = 2048  # selected pairs
MIN_TILE = 256  # elements
MAX_TILE = 4096
MAX_ROWS = 2048  # beams of one request
MAX_PAIRS = 1 << 31  # row and position share one 32-bit index

ELEMENT_BYTES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}


class VectorUnits(NamedTuple):
    """The resources of an NPU; by default the smallest of any 910B or A3."""

    cores: int = 40  # vector cores: 40 or 48
    # Unified Buffer of one core, less 8 KiB for Select and 256 bytes for the system
    ub_bytes: int = 192 * 1024 - 256 - 8 * 1024


LEAST = VectorUnits()


def topk_limit(call: TopkCall, units: VectorUnits = LEAST) -> str | None:
    """Return the limit of `csr_gather_topk` that a call exceeds; None = it is supported."""
    if call.logits.dtype not in ELEMENT_BYTES or call.follow.code.dtype != torch.int32:
        return f"logits {call.logits.dtype} and codes {call.follow.code.dtype}"
    rows, columns = call.logits.shape
    codes = len(range(*(call.codes or slice(None)).indices(columns)))
    # the operator's input is fp32 if the logits were scaled
    element_bytes = ELEMENT_BYTES[call.logits.dtype] if call.scale == 1.0 else 4
    return csr_limit(rows, codes, call.width, element_bytes, units)


def fork_limit(keys: Tensor, parent: Tensor, units: VectorUnits = LEAST) -> str | None:
    """Return the limit of `beam_fork_` that keys [L, W, ...] and parents [rows] exceed, or None."""
    held = keys.shape[1]
    rows = len(parent)
    if held > MAX_ROWS or rows > held:
        return f"beam_fork: at most {MAX_ROWS} beams, no more than the arena holds"
    if (units.ub_bytes - _up(4 * rows, 32)) // 2 // max(1, held) < 32:
        return "beam_fork: a column of the arena does not fit the buffer"
    return None


def items_limit(k: int, units: VectorUnits = LEAST) -> str | None:
    """Return the limit of `masked_topk` over fp32 scores that k items exceed, or None."""
    if not 1 <= k <= MAX_K:
        return f"masked_topk: k must be 1 to {MAX_K}"
    if _masked_bytes(k, 4) > units.ub_bytes:
        return "masked_topk: no tile fits the buffer"
    if _merge_bytes(k, 0) > units.ub_bytes:
        return "masked_topk: k lists do not fit the buffer"
    return None


def csr_limit(rows: int, codes: int, k: int, element_bytes: int, units: VectorUnits) -> str | None:
    """Return why `plan_csr_gather_topk` finds no plan; None = it finds one.

    Args:
        rows: Number of beams.
        codes: Number of codes of the level.
        k: Number of choices.
        element_bytes: Bytes per logit, 2 or 4.
        units: Resources of the NPU.
    """
    if not 1 <= k <= MAX_K:
        return f"csr_gather_topk: k must be 1 to {MAX_K}"
    if not 1 <= rows <= MAX_ROWS:
        return f"csr_gather_topk: 1 to {MAX_ROWS} rows"
    if codes < 1:
        return "csr_gather_topk: a codebook of no codes"
    if rows << (codes - 1).bit_length() > MAX_PAIRS:
        return "csr_gather_topk: rows times codes over 2^31"
    has_pieces = rows == 1 and _parts_for(1000 + codes, k, units.cores) > 1
    groups = rows if has_pieces else min(rows, _parts_for(1000 * rows, k, units.cores))
    held = -(-rows // groups)
    # the planner halves its tile until the buffers fit, so the smallest tile decides
    need = max(
        _csr_select_bytes(codes, held, k, element_bytes),
        _csr_norm_bytes(codes, rows, element_bytes),
    )
    if need > units.ub_bytes:
        return "csr_gather_topk: a row of logits and k pairs do not fit the buffer"
    if _merge_bytes(k, rows) > units.ub_bytes:
        return "csr_gather_topk: k lists do not fit the buffer"
    return None


# ---- bytes of one core's buffers at the smallest tile, by the header's formulas


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def _parts_for(work_cycles: int, k: int, most: int) -> int:
    parts = 1
    while parts < most and (parts + 1) * parts * 4 * _up(k, 32) <= work_cycles:
        parts += 1
    return parts


def _best_pairs_bytes(k: int) -> int:
    return _up(MIN_TILE // 8, 256) + 2 * 4 * MIN_TILE + 2 * 8 * MIN_TILE + 2 * 16 * _up(k, 32)


def _masked_bytes(k: int, element_bytes: int) -> int:
    inputs = 2 * (MIN_TILE * element_bytes + _up(MIN_TILE // 8, 256))
    wide = 0 if element_bytes == 4 else 4 * MIN_TILE
    return inputs + wide + 4 * MIN_TILE + 32 + 8 * _up(k, 32) + _best_pairs_bytes(k)


def _csr_row_bytes(codes: int, element_bytes: int) -> int:
    raw = _up(codes * element_bytes, 32)
    wide = raw if element_bytes == 4 else _up(4 * codes, 32)
    return raw + wide + 2 * 4 * MIN_TILE + 2 * MIN_TILE + 2 * MIN_TILE + _up(MIN_TILE // 8, 256)


def _csr_select_bytes(codes: int, rows: int, k: int, element_bytes: int) -> int:
    tables = 4 * _up(4 * rows, 32)
    return (
        _csr_row_bytes(codes, element_bytes)
        + 3 * 4 * MIN_TILE
        + tables
        + 8 * _up(k, 32)
        + _best_pairs_bytes(k)
    )


def _csr_norm_bytes(codes: int, rows: int, element_bytes: int) -> int:
    return _csr_row_bytes(codes, element_bytes) + 4 * MIN_TILE + 4096 + 6 * _up(4 * rows, 32)


def _merge_bytes(k: int, rows: int) -> int:
    padded = _up(k, 32)
    return 2 * 8 * padded + 12 * padded + 2 * 4 * padded + _up(4 * rows, 32) + _best_pairs_bytes(k)


# from hstu_tiling.h
MAX_KEYS = 1 << 24
MAX_PAGE_TOKENS = 4095
MAX_GROUP = 2040  # width of a norm
MAX_SCORE_BYTES = 1 << 28  # scores in memory at a time; a 910B's cache holds a part of them
STAGE_BYTES = 32 * 1024
ZERO_BYTES = 2 * 1024


class Slots(NamedTuple):
    """The sizes that the three kernels share."""

    requests: int
    rows: int
    keys: int
    num_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype


def hstu_limit(
    slots: Slots,
    page_tokens: int,
    page_ids: int,
    group: int,
    is_joined: bool,
    units: VectorUnits = LEAST,
) -> str | None:
    """Return why one of the three kernels finds no plan; None = all find one.

    Args:
        slots: Sizes of the pass.
        page_tokens: Tokens per page.
        page_ids: Number of pages of all requests.
        group: Width of the norm.
        is_joined: The result includes U and the attention.
        units: Resources of the NPU.
    """
    size = ELEMENT_BYTES[slots.dtype]
    block = 32 // size
    if slots.qk_dim % block or slots.v_dim % block:
        return "hstu: a head's row is no whole number of 32 bytes"
    if slots.keys >= MAX_KEYS:
        return "hstu: 2^24 keys or more"
    if slots.num_heads * ROW_BLOCK * slots.keys * size > MAX_SCORE_BYTES:
        return f"hstu: scores of {ROW_BLOCK} rows of more than {MAX_SCORE_BYTES} bytes"
    if page_tokens > MAX_PAGE_TOKENS:
        return f"hstu_rows: 1 to {MAX_PAGE_TOKENS} tokens a page"
    widest = max(slots.qk_dim, slots.v_dim)
    piece = min(page_tokens, max(1, STAGE_BYTES // (widest * slots.num_heads * size)))
    if _rows_bytes(slots, page_ids, piece, size) > units.ub_bytes:
        return "hstu_rows: a row and the page ids do not fit the buffer"
    if _scores_bytes(slots, size) > units.ub_bytes:
        return "hstu_scores: tables, bounds and a tile do not fit the buffer"
    if group > MAX_GROUP:
        return f"hstu_finish: a norm over more than {MAX_GROUP} numbers"
    if (
        slots.num_heads * slots.v_dim // group > 255
        or _finish_bytes(slots, group, is_joined, size) > units.ub_bytes
    ):
        return "hstu_finish: a row does not fit the buffer"
    return None


def shape_limit(shape: HstuShape, units: VectorUnits = LEAST) -> str | None:
    """Return why the kernels support no pass of a ranker; None = they support small passes."""
    if shape.dtype not in ELEMENT_BYTES:
        return f"a model in {shape.dtype}"
    if shape.kept_dtype != shape.dtype:
        return f"pages in {shape.kept_dtype} under a model in {shape.dtype}"
    slots = Slots(1, ROW_BLOCK, KEY_BLOCK, shape.num_heads, shape.qk_dim, shape.v_dim, shape.dtype)
    return hstu_limit(slots, shape.page_tokens, 1, shape.norm_group, shape.is_joined, units)


# ---- bytes of one core's buffers at the smallest plan, by the header's formulas


def _rows_bytes(slots: Slots, page_ids: int, piece: int, size: int) -> int:
    head = max(slots.qk_dim, slots.v_dim)
    widest = head * slots.num_heads
    mixed = 2 * slots.num_heads * (slots.qk_dim + slots.v_dim)
    zeros = max(1, ZERO_BYTES // (head * size)) * head * size
    return (
        32 * slots.requests
        + _up(4 * page_ids, 32)
        + 2 * piece * widest * size
        + 3 * mixed * size
        + 8 * widest
        + zeros
    )


def _scores_bytes(slots: Slots, size: int) -> int:
    cells = 8 * KEY_BLOCK  # cells of the smallest tile
    bounds = _up(8 * (slots.rows // ROW_BLOCK + slots.keys // KEY_BLOCK) * slots.requests, 32)
    tables = 1024 + 512 * slots.num_heads
    times = 2 * 1024 + 8 * NEAR_END * 4 + ROW_BLOCK * 32 + 1024 + 256 + 1024 + 64
    return (
        32 * slots.requests
        + bounds
        + tables
        + max(3 * size + 12, 5 * size + 8) * cells
        + cells
        + times
    )


def _finish_bytes(slots: Slots, group: int, is_joined: bool, size: int) -> int:
    cells = slots.num_heads * slots.v_dim
    groups = _up(cells // group, 8)
    buffers = (7 if is_joined else 5) * cells * size + 8 * cells
    return (
        32 * slots.requests + _up(8 * group, 32) + buffers + _up(4 * groups, 32) * 2 + 32 * groups
    )
