"""The limits of the native operators of `ops/ascendc`: those of `tiling.h`, known to Python before a call.

A call beyond a limit runs as torch ops; a call within them goes to the operator, and an error that the operator then
raises is an error. `tests/backend/npu/test_limits.py` compares these functions with the header, size by size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from npu_gr.backend.calls import TopkCall

# of tiling.h, by the header's names
MAX_K = 2048  # pairs kept
MIN_TILE = 256  # elements
MAX_TILE = 4096
MAX_ROWS = 2048  # beams of one request
MAX_PAIRS = 1 << 31  # row and position share one 32-bit index

ELEMENT_BYTES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}


class VectorUnits(NamedTuple):
    """The resources of an NPU; the defaults are the least of any 910B or A3, so each of them has a plan found here."""

    cores: int = 40  # vector cores: 40 or 48
    ub_bytes: int = 192 * 1024 - 256 - 8 * 1024  # Unified Buffer of one core; Select keeps 8 KiB, the system 256 bytes


LEAST = VectorUnits()


def topk_limit(call: TopkCall, units: VectorUnits = LEAST) -> str | None:
    """Name the limit of `csr_gather_topk` that a call exceeds; None = the operator takes it."""
    if call.logits.dtype not in ELEMENT_BYTES or call.follow.code.dtype != torch.int32:
        return f"logits {call.logits.dtype} and codes {call.follow.code.dtype}"
    rows, columns = call.logits.shape
    codes = len(range(*(call.codes or slice(None)).indices(columns)))
    element_bytes = ELEMENT_BYTES[call.logits.dtype] if call.scale == 1.0 else 4  # scaled logits are fp32
    return csr_limit(rows, codes, call.width, element_bytes, units)


def fork_limit(keys: Tensor, parent: Tensor, units: VectorUnits = LEAST) -> str | None:
    """Name the limit of `beam_fork_` that keys [L, W, ...] and parents [rows] exceed; None = it takes them."""
    held = keys.shape[1]
    rows = len(parent)
    if held > MAX_ROWS or rows > held:
        return f"beam_fork: at most {MAX_ROWS} beams, no more than the arena holds"
    if (units.ub_bytes - _up(4 * rows, 32)) // 2 // max(1, held) < 32:
        return "beam_fork: a column of the arena does not fit the buffer"
    return None


def items_limit(k: int, units: VectorUnits = LEAST) -> str | None:
    """Name the limit of `masked_topk` over fp32 scores that a search for k items exceeds; None = it takes it."""
    if not 1 <= k <= MAX_K:
        return f"masked_topk: k must be 1 to {MAX_K}"
    if _masked_bytes(k, 4) > units.ub_bytes:
        return "masked_topk: no tile fits the buffer"
    if _merge_bytes(k, 0) > units.ub_bytes:
        return "masked_topk: k lists do not fit the buffer"
    return None


def csr_limit(rows: int, codes: int, k: int, element_bytes: int, units: VectorUnits) -> str | None:
    """Name the reason for which `plan_csr_gather_topk` finds no plan; None = there is one.

    Args:
        rows: beams.
        codes: of the level's codebook.
        k: choices wanted.
        element_bytes: of a logit, 2 or 4.
        units: the machine.
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
    # the planner halves its tile until the buffers fit; the smallest tile decides whether there is one at all
    need = max(_csr_select_bytes(codes, held, k, element_bytes), _csr_norm_bytes(codes, rows, element_bytes))
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
    return _csr_row_bytes(codes, element_bytes) + 3 * 4 * MIN_TILE + tables + 8 * _up(k, 32) + _best_pairs_bytes(k)


def _csr_norm_bytes(codes: int, rows: int, element_bytes: int) -> int:
    return _csr_row_bytes(codes, element_bytes) + 4 * MIN_TILE + 4096 + 6 * _up(4 * rows, 32)


def _merge_bytes(k: int, rows: int) -> int:
    padded = _up(k, 32)
    return 2 * 8 * padded + 12 * padded + 2 * 4 * padded + _up(4 * rows, 32) + _best_pairs_bytes(k)
