"""HSTU attention by Triton on an Ascend NPU: `hstu.py` in a form that compiles to vector code.

It is used only with `attention: triton`. The differences follow from triton-ascend's documentation
(3.2.0, for CANN 8.5.0) and its compilers:

- The grid has one program for each AI core, which loops over its tasks; a larger grid would be
  dispatched in turns.
- Nothing is gathered from computed addresses, which would load number by number. The time bucket is
  found by one select for each bucket that a block can hold (three on average); distances are stored
  in rows, so that a block of them is one load.
- Comparing int32 and int64 is scalar code: masks compare positions in fp32, exact below 2^24. int64
  sums are scalar code too, so times are int32, except for spans over 2^31 seconds.
- fp32 products are "ieee": other precisions are for NVIDIA.
- A step of 64 rows and keys fits the 192 KB of a core's vector buffer; a test checks it with the
  compiler.

Not yet run on an NPU by us: tests compare it with the definition in Triton's interpreter, and
compile it to HIVM with the public compilers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_gr.backend.tiles import Slab
from npu_gr.backend.triton import hstu
from npu_gr.backend.triton.hstu import SELECTS, attend_part

# AI cores of the smallest 910B; constant, so that the parts, and so the bits, are the same on every
# device
CORES = 20
MAX_TOKENS = 1 << 24  # positions are compared in fp32


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_keys", "first_row", "first_key", "first_part", "query_time", "span",
        "blocks", "parts",
    ]
)  # fmt: skip
def hstu_tasks_kernel(
    q, q_row, q_head, own_k, own_row, own_head, own_v, own_v_row, own_v_head, num_rows,
    k, k_row, k_head, v, v_row, v_head, num_keys, first_row, first_key,
    times, seconds, limits, bounds, query_time, tables, table_row, buckets, alpha, out, heads,
    first_part, span,
    blocks, parts,
    targets: tl.constexpr, begins: tl.constexpr, whole: tl.constexpr, qk_dim: tl.constexpr,
    v_dim: tl.constexpr,
    qk_wide: tl.constexpr, v_wide: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
    time_buckets: tl.constexpr,
    precision: tl.constexpr, how: tl.constexpr,
):  # fmt: skip
    """Run `attend_part` for all tasks of [row blocks, parts, heads].

    A program runs every num_programs-th task, long ones first.
    """
    for task in range(tl.program_id(0), blocks * parts * heads, tl.num_programs(0)):
        head = task % heads
        part = task // heads % parts
        first = (blocks - 1 - task // heads // parts) * rows
        attend_part(
            head, part, first,
            q, q_row, q_head, own_k, own_row, own_head, own_v, own_v_row, own_v_head, num_rows,
            k, k_row, k_head, v, v_row, v_head, num_keys, first_row, first_key,
            times, seconds, limits, bounds, query_time, tables, table_row, buckets, alpha, out,
            heads, first_part, span,
            targets, begins, whole, qk_dim, v_dim, qk_wide, v_wide, rows, keys, time_buckets,
            precision, how,
        )  # fmt: skip


class NpuAttention(hstu.Attention):
    """Computes `Backend.hstu_causal` and `hstu_targets` on an NPU."""

    programs = 2 * CORES

    def takes(self, q: Tensor, slabs: Sequence[Slab]) -> bool:
        """Return whether the kernel supports the dtypes and the number of tokens."""
        return sum(len(k) for k, _ in slabs) + len(q) < MAX_TOKENS and super().takes(q, slabs)

    def _distances(self, by_distance: Tensor, keys: int) -> Tensor:
        """Return [H, ROWS * (P + ROWS + 2 keys)] in ROWS rows.

        Entry y of row i is the bias of distance i - y + P + keys, clamped to the table.
        """
        positions = by_distance.shape[1]
        row = torch.arange(hstu.ROWS, device=by_distance.device)[:, None]
        column = torch.arange(positions + hstu.ROWS + 2 * keys, device=by_distance.device)
        distance = (row - column + positions + keys).clamp(0, positions - 1)
        return by_distance[:, distance.flatten()]

    def _tile(self, q: Tensor, width: int) -> hstu.Tile:
        return hstu.Tile(hstu.ROWS, hstu.step_keys(q.dtype, width), 4, 3)

    def _bounds(
        self, clock: hstu._Clock, sizes: Sequence[int], keys: int, *, is_causal: bool
    ) -> list[Tensor]:
        return [clock.limits] * len(sizes)  # its kernel finds ranges itself

    def _launch(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[object, ...],
        constants: Mapping[str, object],
        tile: hstu.Tile,
    ) -> None:
        blocks, heads, parts = grid
        cores = min(CORES, blocks * heads * parts)
        hstu_tasks_kernel[(cores,)](
            *arguments, blocks, parts, **constants, precision="ieee", how=SELECTS
        )
