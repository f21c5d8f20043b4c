"""Run the native operators on CPU tensors by the CPU emulator, not by their torch definitions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ops.ascend_emulator import Emulator, Machine
from tests.ops.hstu_emulator import HstuSizes, hstu_finish, hstu_rows, hstu_scores

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
ON = Machine(cores=4)


def array(x: Any) -> Any:
    """The memory of a tensor, in place; bfloat16 as the emulator takes it."""
    if not isinstance(x, Tensor):
        return x
    assert x.is_contiguous(), "as the binding demands"
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


class HstuOnEmulator:
    """The three operators of HSTU."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator

    def hstu_rows(
        self, mixed: Tensor, meta: Tensor, ids: Tensor, k_plane: Tensor, v_plane: Tensor, *rest: Any
    ) -> None:
        *results, q_scale, silu_all = rest
        q, k, v, u = results
        sizes = HstuSizes(
            len(q), q.shape[2], k.shape[2], q.shape[1], q.shape[3], v.shape[3], NAMES[q.dtype]
        )
        planes = array(k_plane), array(v_plane)
        written = array(q), array(k), array(v), array(u)
        hstu_rows(
            self.emulator, sizes, array(mixed), array(meta), array(ids), planes, written,
            q_scale=q_scale,
            silu_all=silu_all, on=ON,
        )  # fmt: skip

    def hstu_scores(self, scores: Tensor, *rest: Any) -> None:
        *arrays, alpha = rest
        batch, heads, rows, keys = scores.shape
        block = 32 // scores.element_size()  # no size of a head matters
        sizes = HstuSizes(batch, rows, keys, heads, block, block, NAMES[scores.dtype])
        hstu_scores(self.emulator, sizes, array(scores), *map(array, arrays), alpha=alpha, on=ON)

    def hstu_finish(
        self,
        attention: Tensor,
        u: Tensor,
        norm: Tensor,
        meta: Tensor,
        out: Tensor,
        scale: float,
        eps: float,
    ) -> None:
        batch, heads, rows, dim = attention.shape
        sizes = HstuSizes(batch, rows, 256, heads, dim, dim, NAMES[u.dtype])
        arrays = [array(x) for x in (attention, u, norm, meta, out)]
        hstu_finish(self.emulator, sizes, *arrays, scale=scale, eps=eps, on=ON)
