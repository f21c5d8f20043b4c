"""NEXT, the search and a rank of what is found in one call of the CPU kernels; mirrors `ops/cpu/hstu_find_call.h`.

Between its passes nothing waits for the interpreter: the kernels write the second pass' numbers themselves.
"""

from __future__ import annotations

import itertools
from ctypes import POINTER, Structure, byref, c_int64, c_void_p

import numpy as np
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
        starts = [0, *itertools.accumulate(map(len, call.hidden))]
        job = ItemsJob(None, table.data_ptr(), num, call.num_items, dim, k)
        num_workspace = -(-self._kernels.best_items_bytes(byref(job)) // 8)
        # all of one type lies in one piece of memory: what goes in or comes out first, then what the kernels use alone
        hidden_at, rows_at = 3 * num + 1, 3 * num + 1 + starts[-1]
        scored_at = rows_at + num * k
        work_at = scored_at + num
        numbers_at = work_at + num_workspace
        ints = np.empty(numbers_at + native.num_numbers + num_wanted, np.int64)
        logits_at, products_at = num * dim, num * dim + num_wanted * num_outputs
        score_at = products_at + num_wanted
        floats = np.empty(score_at + num * k, np.float32)
        ints[:hidden_at] = [*call.wanted, *call.least, *starts]
        for rows, start, end in zip(call.hidden, starts, starts[1:], strict=False):
            hidden = ints[hidden_at + start : hidden_at + end]
            hidden[:] = rows
            hidden.sort()
        at, out = address(ints), address(floats)
        native.out = job.queries = out
        job.score = out + 4 * score_at
        job.hidden_start, job.hidden = at + 16 * num, at + 8 * hidden_at
        job.item, job.workspace = at + 8 * rows_at, at + 8 * work_at
        find = _Find(
            native, job, head, at, at + 8 * num, at + 8 * numbers_at, 0,
            at + 8 * scored_at, out + 4 * logits_at, out + 4 * products_at,
        )  # fmt: skip
        find.num_bytes = checked(self._kernels.hstu_find_bytes(byref(find)))
        find.next.scratch = self._hstu.scratch_at(find.num_bytes)
        checked(self._kernels.hstu_find(byref(find)))
        return HstuFound(
            floats[:logits_at].reshape(num, dim),
            ints[rows_at:scored_at].reshape(num, k),
            ints[scored_at:work_at],
            floats[logits_at:products_at].reshape(num_wanted, num_outputs),
            floats[products_at:score_at],
        )
