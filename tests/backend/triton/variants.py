"""Argument types and constants of every Triton kernel launch, to compile without a device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from npu_gr.backend.triton import beams, fork, hstu, hstu_ascend, topk

_INTS = ("num_", "first_", "buckets", "heads", "group", "span", "table_row")
_STRIDES = ("_row", "_head", "_stride", "own_slot", "ancestry_slot")
_TYPES = {
    **dict.fromkeys(
        ("lo", "degree", "key_out", "key", "chosen", "parent_out", "edge_out", "parent"), "*i64"
    ),
    **dict.fromkeys(("times", "ancestry", "limits"), "*i64"),
    "seconds": "*i32",
    "bounds": "*i64",
    **dict.fromkeys(("tables", "sums"), "*fp32"),
    **dict.fromkeys(
        ("acc", "norm_out", "norm", "score_out", "peaks", "totals", "outputs"), "*fp32"
    ),
    **dict.fromkeys(("peak_out", "total_out", "output_out", "out"), "*fp32"),
    "code": "*i32",
    "allowed": "*u8",
    "bad_out": "*i32",
    "alpha": "fp32",
    "scale": "fp32",
    "query_time": "i64",
}

H100 = hstu.DeviceLimits(9, 232_448)


class Variant(NamedTuple):
    """One form of a kernel, as it is compiled."""

    kernel: Any
    x: str  # type of the numbers
    types: dict[str, str]  # of all arguments that are no constants
    constants: dict[str, Any]
    options: dict[str, int]  # of the compiler

    @property
    def label(self) -> str:
        return "-".join(
            str(part) for part in (self.kernel.__name__, self.x, *self.constants.values())
        )


def _of(
    kernel: Any, x: str, constants: dict[str, Any], tile: hstu.Tile | None = None, **own: str
) -> Variant:
    types = {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in constants:
            continue
        if name in _TYPES | own:
            types[name] = (_TYPES | own)[name]
        elif name.startswith(_INTS) or name.endswith(_STRIDES):
            types[name] = "i32"
        else:
            types[name] = f"*{x}"
    options = {} if tile is None else {"num_warps": tile.warps, "num_stages": tile.stages}
    return Variant(kernel, x, types, constants, options)


def variants(
    on: Literal["cuda", "npu"] = "cuda", limits: hstu.DeviceLimits = H100
) -> Iterator[Variant]:
    """In bf16 and fp32, as they are launched on a device for many rows."""
    yield _of(hstu.clock_kernel, "i64", {"tokens": 1024})
    if on == "cuda":
        yield _of(hstu.bounds_kernel, "i64", {"keys": hstu.KEYS})
    for x in ("bf16", "fp32"):
        for targets, whole in ((False, True), (True, False)):
            if x == "bf16" or not targets or on == "npu":
                yield _hstu(on, limits, x, targets=targets, whole=whole)
        yield _of(hstu.sum_kernel, x, {"numbers": hstu.NUMBERS}, out=f"*{x}")
        for dim in (128, 256):
            if dim == 128 or on == "cuda":
                yield _shared(on, limits, x, dim)
        yield _of(
            beams.merge_kernel,
            x,
            {"by_ancestry": True, "dim": 128, "dim_wide": 128, "rows": beams.MERGE_ROWS},
            out=f"*{x}",
        )
        for over_valid in (False, True):
            sizes = {"columns": topk.COLUMNS, "blocks": topk.BLOCKS, "edges": topk.EDGES}
            yield _of(topk.rows_kernel, x, {"over_valid": over_valid, "filtered": True, **sizes})
        yield _of(topk.blocks_kernel, x, {"filtered": True, "edges": topk.EDGES})
        yield _of(fork.fork_kernel, x, {"rows": 512, "numbers": fork.NUMBERS})
    yield _of(topk.choices_kernel, "fp32", {"edges": topk.EDGES, "lanes": 256})


def of_int8(limits: hstu.DeviceLimits) -> Iterator[Variant]:
    """The attention over pages in int8, in bf16: history rows, then candidates."""
    for targets in (False, True):
        plain = _hstu("cuda", limits, "bf16", targets=targets, whole=True)
        yield plain._replace(types=plain.types | {"k": "*i8", "v": "*i8"})


def _hstu(on: str, limits: hstu.DeviceLimits, x: str, *, targets: bool, whole: bool) -> Variant:
    dtype = torch.bfloat16 if x == "bf16" else torch.float32
    is_npu = on == "npu"
    tile = hstu.Tile(hstu.ROWS, hstu.step_keys(dtype, 64), 4, 3)
    if not is_npu:
        tile = hstu.tile_of(dtype, 64, 4096, limits)
    constants = {
        "targets": targets, "begins": targets, "whole": whole,
        "qk_dim": 64, "v_dim": 64, "qk_wide": 64, "v_wide": 64,
        "rows": tile.rows, "keys": tile.keys, "time_buckets": 64,
        "precision": "ieee" if is_npu else hstu.precision(dtype),
        "how": int(hstu.SELECTS if is_npu else hstu.how_of(limits)),
    }  # fmt: skip
    kernel = hstu_ascend.hstu_tasks_kernel if is_npu else hstu.hstu_kernel
    own = {"blocks": "i32", "parts": "i32"} if is_npu else {}
    return _of(kernel, x, constants, tile, out=f"*{x}" if whole else "*fp32", **own)


def _shared(on: str, limits: hstu.DeviceLimits, x: str, dim: int) -> Variant:
    """The stage of beams over a prefix."""
    dtype = torch.bfloat16 if x == "bf16" else torch.float32
    tile = beams.tile_of(dtype, dim, limits)
    constants = {
        "dim": dim, "dim_wide": dim, "rows": tile.rows, "keys": tile.keys, "span": beams.SPAN,
        "precision": "ieee" if on == "npu" else hstu.precision(dtype),
    }  # fmt: skip
    return _of(beams.shared_kernel, x, constants, tile)
