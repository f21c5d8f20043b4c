"""Fork the beams' own KV in place: each program reads its part of all beams before it writes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 16  # numbers of each beam that one program moves
MAX_BEAMS = 1024  # limit of a program's registers


@triton.jit(do_not_specialize=["num_rows", "num_numbers"])
def fork_kernel(
    plane,
    layer_stride,
    row_stride,
    parent,
    num_rows,
    num_numbers,
    rows: tl.constexpr,
    numbers: tl.constexpr,
):
    """Copy the first numbers of row parent[i] to row i, in one layer."""
    row = tl.arange(0, rows)
    at = tl.program_id(0) * numbers + tl.arange(0, numbers)
    layer = plane + tl.program_id(1).to(tl.int64) * layer_stride
    inside = (row < num_rows)[:, None] & (at < num_numbers)[None, :]
    source = tl.load(parent + row, mask=row < num_rows, other=0)
    held = tl.load(layer + source[:, None] * row_stride + at[None, :], mask=inside)
    tl.debug_barrier()  # all threads read before one writes
    tl.store(layer + row[:, None].to(tl.int64) * row_stride + at[None, :], held, mask=inside)


def fork(plane: Tensor, parent: Tensor, num_slots: int) -> None:
    """Fork one plane in place: copy the first slots of row parent[i] to row i, in every layer.

    Args:
        plane: [L, W, S, H, D]; the rows of a layer are contiguous.
        parent: int64 [rows], rows <= MAX_BEAMS, in any order.
        num_slots: Number of slots to copy.
    """
    layers, _, _, heads, dim = plane.shape
    assert plane[0].is_contiguous()
    numbers = num_slots * heads * dim
    if not numbers or not len(parent):
        return
    fork_kernel[(-(-numbers // NUMBERS), layers)](
        plane, plane.stride(0), plane.stride(1), parent.contiguous(), len(parent), numbers,
        rows=triton.next_power_of_2(len(parent)), numbers=NUMBERS, num_warps=8,
    )  # fmt: skip
