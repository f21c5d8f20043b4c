"""NEXT, the search and a rank of what is found in one call of the CPU kernels; mirrors `ops/cpu/hstu_find_call.h`.

Between its passes nothing waits for the interpreter: the kernels write the second pass' numbers themselves.
"""

from __future__ import annotations

import itertools
from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from npu_gr.backend.calls import HstuFindCall, HstuFound
from npu_gr.backend.cpu.hstu import HstuKernels
from npu_gr.backend.cpu.hstu_pass import HstuPassKernel, PassHead, PassJob, checked
from npu_gr.backend.cpu.items import ItemsJob
from npu_gr.backend.cpu.library import Native, address


class _Find(Structure):
    _fields_ = [
        ("next", PassJob),
        ("items", ItemsJob),
        ("head", POINTER(PassHead)),
        *((name, c_void_p) for name in ("wanted", "least", "numbers")),
        ("num_bytes", c_int64),
        *((name, c_void_p) for name in ("num_scored", "logits", "products")),
    ]


class HstuFindKernel:
    """Compute `Backend.hstu_find` for fp32 and bf16. Any thread may call."""

    def __init__(self, native: Native, hstu: HstuKernels, passes: HstuPassKernel) -> None:
        self._kernels = native.kernels
        self._hstu = hstu
        self._passes = passes

    def __call__(self, call: HstuFindCall) -> HstuFound | None:
        if call.next.embeddings is None:
            return None
        ready = self._passes.prepared(call.next)
        if ready is None or not {"next", "logits"} <= ready.heads.keys():
            return None
        native, heads = ready.native, ready.heads
        native.head, dim = heads["next"]
        head, num_outputs = heads["logits"]
        table, k = call.items, call.k
        assert (table.dtype, table.is_contiguous(), table.shape[1]) == (torch.float32, True, dim)
        assert call.num_items <= table.shape[0]
        num = len(call.next.segments)
        num_wanted = sum(call.wanted)
        hidden = [np.sort(rows) for rows in call.hidden]
        starts = [0, *itertools.accumulate(map(len, hidden))]
        job = ItemsJob(None, table.data_ptr(), num, call.num_items, dim, k)
        num_workspace = -(-self._kernels.best_items_bytes(byref(job)) // 8)
        (given, wanted), (off, job.hidden), (rows, job.item), (scored, scored_at), (_, job.workspace), (_, numbers) = (
            _parts(np.int64, 3 * num + 1, starts[-1], num * k, num, num_workspace, native.num_numbers + num_wanted)
        )
        (u, native.out), (_, job.score), (logits, logits_at), (products, products_at) = _parts(
            np.float32, num * dim, num * k, num_wanted * num_outputs, num_wanted
        )
        given[:] = [*call.wanted, *call.least, *starts]
        if hidden:
            np.concatenate(hidden, out=off)
        job.queries = native.out
        job.hidden_start = wanted + 16 * num
        find = _Find(native, job, head, wanted, wanted + 8 * num, numbers, 0, scored_at, logits_at, products_at)
        find.num_bytes = checked(self._kernels.hstu_find_bytes(byref(find)))
        find.next.scratch = self._hstu.scratch_at(find.num_bytes)
        checked(self._kernels.hstu_find(byref(find)))
        shape = num_wanted, num_outputs
        return HstuFound(u.reshape(num, dim), rows.reshape(num, k), scored, logits.reshape(shape), products)


def _parts(dtype: type[np.generic], *sizes: int) -> list[tuple[npt.NDArray[Any], int]]:
    """Lay arrays out one behind the other in one piece of memory; each with its address."""
    whole = np.empty(sum(sizes), dtype)
    at, size_of = address(whole), whole.itemsize
    parts, first = list[tuple[npt.NDArray[Any], int]](), 0
    for size in sizes:
        parts.append((whole[first : first + size], at + size_of * first))
        first += size
    return parts
