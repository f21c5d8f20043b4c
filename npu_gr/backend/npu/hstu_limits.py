"""The limits of the HSTU kernels: those of `ops/ascendc/hstu_tiling.h`, known before a pass begins.

As in `limits.py`: a test compares the two size by size, and an error of an operator is an error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npu_gr.backend.calls import HstuShape
from npu_gr.backend.npu.hstu_batch import KEY_BLOCK, NEAR_END, ROW_BLOCK
from npu_gr.backend.npu.limits import ELEMENT_BYTES, LEAST, VectorUnits

MAX_KEYS = 1 << 24
MAX_PAGE_TOKENS = 4095
MAX_GROUP = 2040  # numbers that one norm is over
MAX_SCORE_BYTES = 1 << 28  # of a layer's scores; a 910B's cache holds a part of that
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
    slots: Slots, page_tokens: int, page_ids: int, group: int, is_joined: bool, units: VectorUnits = LEAST
) -> str | None:
    """Name the reason for which a kernel finds no plan; None = all three have one.

    Args:
        slots: of the pass.
        page_tokens: of a page.
        page_ids: pages of all requests.
        group: numbers that one norm is over.
        is_joined: the result holds U and the attention as well.
        units: the machine.
    """
    size = ELEMENT_BYTES[slots.dtype]
    block = 32 // size
    if slots.qk_dim % block or slots.v_dim % block:
        return "hstu: a head's row is no whole number of 32 bytes"
    if slots.keys >= MAX_KEYS:
        return "hstu: 2^24 keys or more"
    if slots.requests * slots.num_heads * slots.rows * slots.keys * size > MAX_SCORE_BYTES:
        return f"hstu: scores of more than {MAX_SCORE_BYTES} bytes a layer"
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
    if slots.num_heads * slots.v_dim // group > 255 or _finish_bytes(slots, group, is_joined, size) > units.ub_bytes:
        return "hstu_finish: a row does not fit the buffer"
    return None


def shape_limit(shape: HstuShape, units: VectorUnits = LEAST) -> str | None:
    """Name the reason for which the kernels take no pass of a ranker; None = they take its small ones at least."""
    if shape.dtype not in ELEMENT_BYTES:
        return f"a model in {shape.dtype}"
    if shape.kept_dtype != shape.dtype:
        return f"pages in {shape.kept_dtype} under a model in {shape.dtype}"
    slots = Slots(1, ROW_BLOCK, KEY_BLOCK, shape.num_heads, shape.qk_dim, shape.v_dim, shape.dtype)
    return hstu_limit(slots, shape.page_tokens, 1, shape.norm_group, shape.is_joined, units)


# ---- bytes of one core's buffers at the smallest plan, by the header's formulas


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def _rows_bytes(slots: Slots, page_ids: int, piece: int, size: int) -> int:
    head = max(slots.qk_dim, slots.v_dim)
    widest = head * slots.num_heads
    whole = 2 * slots.num_heads * (slots.qk_dim + slots.v_dim)
    zeros = max(1, ZERO_BYTES // (head * size)) * head * size
    return (
        32 * slots.requests + _up(4 * page_ids, 32) + 2 * piece * widest * size + 3 * whole * size + 8 * widest + zeros
    )


def _scores_bytes(slots: Slots, size: int) -> int:
    cells = 8 * KEY_BLOCK  # of the smallest tile
    bounds = _up(8 * (slots.rows // ROW_BLOCK + slots.keys // KEY_BLOCK) * slots.requests, 32)
    tables = 1024 + 512 * slots.num_heads
    times = 2 * 1024 + 8 * NEAR_END * 4 + ROW_BLOCK * 32 + 1024 + 256 + 1024 + 64
    return 32 * slots.requests + bounds + tables + max(3 * size + 12, 5 * size + 8) * cells + cells + times


def _finish_bytes(slots: Slots, group: int, is_joined: bool, size: int) -> int:
    cells = slots.num_heads * slots.v_dim
    groups = _up(cells // group, 8)
    buffers = (7 if is_joined else 5) * cells * size + 8 * cells
    return 32 * slots.requests + _up(8 * group, 32) + buffers + _up(4 * groups, 32) * 2 + 32 * groups
