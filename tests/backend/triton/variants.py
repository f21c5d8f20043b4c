"""Argument types and constants of every Triton kernel launch, to compile without a device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from npu_gr.backend.triton import beams, fork, hstu, hstu_ascend, topk

_INTS = ("num_", "first_", "buckets", "heads", "group", "span")
_STRIDES = ("_row", "_head", "_stride", "own_slot", "ancestry_slot")
_TYPES = {
    **dict.fromkeys(
        ("lo", "degree", "key_out", "key", "chosen", "parent_out", "edge_out", "parent"), "*i64"
    ),
    **dict.fromkeys(("times", "ancestry", "limits"), "*i64"),
    "seconds": "*i32",
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


class Variant(NamedTuple):
    """One form of a kernel, as it is compiled."""

    kernel: Any
    x: str  # type of the numbers
    types: dict[str, str]  # of all arguments that are no constants
    constants: dict[str, Any]

    @property
    def label(self) -> str:
        return "-".join(
            str(part) for part in (self.kernel.__name__, self.x, *self.constants.values())
        )


def _of(kernel: Any, x: str, constants: dict[str, Any], **own: str) -> Variant:
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
    return Variant(kernel, x, types, constants)


def variants(on: Literal["cuda", "npu"] = "cuda") -> Iterator[Variant]:
    """In bf16 and fp32."""
    yield _of(hstu.clock_kernel, "i64", {"tokens": 1024})
    for x in ("bf16", "fp32"):
        dtype = torch.bfloat16 if x == "bf16" else torch.float32
        precision = hstu.precision(dtype) if on == "cuda" else "ieee"
        wide = {"qk_dim": 64, "v_dim": 64, "qk_wide": 64, "v_wide": 64}
        how = {"precision": precision, "how": int(hstu.FAST if on == "cuda" else hstu.PLAIN)}
        tiles = {"rows": hstu.ROWS, "keys": hstu.step_keys(dtype, 64), "time_buckets": 64, **how}
        for targets, whole in ((False, True), (False, False), (True, True), (True, False)):
            flags = {"targets": targets, "begins": targets, "whole": whole}
            out = f"*{x}" if whole else "*fp32"
            yield _of(hstu.hstu_kernel, x, {**flags, **wide, **tiles}, out=out)
            if on == "npu":
                own = {**tiles, "how": int(hstu.SELECTS)}
                yield _of(
                    hstu_ascend.hstu_tasks_kernel,
                    x,
                    {**flags, **wide, **own},
                    out=out,
                    blocks="i32",
                    parts="i32",
                )
        yield _of(hstu.sum_kernel, x, {"numbers": hstu.NUMBERS}, out=f"*{x}")
        dims = {"dim": 128, "dim_wide": 128}
        stage = {"keys": hstu.step_keys(dtype, 128), "span": beams.SPAN, "precision": precision}
        yield _of(beams.shared_kernel, x, {**dims, "rows": hstu.ROWS, **stage})
        yield _of(
            beams.merge_kernel,
            x,
            {"by_ancestry": True, **dims, "rows": beams.MERGE_ROWS},
            out=f"*{x}",
        )
        for over_valid in (False, True):
            sizes = {"columns": topk.COLUMNS, "blocks": topk.BLOCKS, "edges": topk.EDGES}
            yield _of(topk.rows_kernel, x, {"over_valid": over_valid, "filtered": True, **sizes})
        yield _of(topk.blocks_kernel, x, {"filtered": True, "edges": topk.EDGES})
        yield _of(fork.fork_kernel, x, {"rows": 512, "numbers": fork.NUMBERS})
    yield _of(topk.choices_kernel, "fp32", {"edges": topk.EDGES, "lanes": 256})
