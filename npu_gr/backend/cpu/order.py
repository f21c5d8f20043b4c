"""The sums of a fitted order by the native kernel: one call a request, whose work does not grow with the catalogue.

Source: `ops/cpu/order.h`, which `order_call.h` and this file describe field by field.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_void_p, pointer

import numpy as np
import numpy.typing as npt

from npu_gr.backend.calls import OrderCall, OrderTables
from npu_gr.backend.cpu.library import Native, address


class _Tables(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("successors", "log_prob", "neighbours", "similarity", "rest", "shares")),
        *((name, c_int64) for name in ("num_items", "num_successors", "num_neighbours", "is_summed")),
        *((name, c_double) for name in ("decay", "scale")),
        *((name, c_float) for name in ("retrieval", "click", "transitions", "alike", "popularity", "seen")),
    ]


class _Job(Structure):
    _fields_ = [
        ("tables", POINTER(_Tables)),
        *((name, c_void_p) for name in ("recent", "candidates", "retrieval", "click", "seen")),
        *((name, c_int64) for name in ("num_recent", "num_candidates", "num_followed", "num_liked")),
        *((name, c_void_p) for name in ("workspace", "sums")),
    ]


class NativeOrder:
    """Compute what `Backend.order_sums` prepares. Any thread may call."""

    def __init__(self, native: Native, tables: OrderTables) -> None:
        """Point at the tables, which stay as they are."""
        self._kernels = native.kernels
        self._held = held = OrderTables(
            np.ascontiguousarray(tables.successors),
            np.ascontiguousarray(tables.log_prob),
            np.ascontiguousarray(tables.rest),
            np.ascontiguousarray(tables.shares),
            np.ascontiguousarray(tables.neighbours),
            np.ascontiguousarray(tables.similarity),
            *tables[6:],
        )
        num_items, num_successors = held.successors.shape
        if len(held.rest) != num_items + 1 or len(held.shares) != num_items + 1 or len(held.neighbours) != num_items:
            raise ValueError("tables of an order: their lengths differ")
        tables_at = [address(array) for array in (held.successors, held.log_prob, held.neighbours, held.similarity)]
        self._tables = pointer(
            _Tables(
                *tables_at, address(held.rest), address(held.shares),
                num_items, num_successors, held.neighbours.shape[1], held.is_summed,
                held.decay, held.scale, *held.weights,
            )
        )  # fmt: skip

    def __call__(self, call: OrderCall) -> npt.NDArray[np.float32]:
        """Sum the terms of each candidate: float32 [c]."""
        num_recent, count = len(call.recent), len(call.candidates)
        if max(call.num_followed, call.num_liked) > num_recent:
            raise ValueError(f"the order reads more than the {num_recent} events that it is given")
        rows = np.concatenate((call.recent, call.candidates))
        at = address(rows)
        given = [None if one is None else _of_length(one, count) for one in call[4:]]
        terms = [0 if one is None else address(one) for one in given]
        sums = np.empty(count, np.float32)
        job = _Job(
            self._tables, at, at + 8 * num_recent, *terms,
            num_recent, count, call.num_followed, call.num_liked, None, address(sums),
        )  # fmt: skip
        workspace = np.empty(self._kernels.order_bytes(byref(job)), np.uint8)
        job.workspace = address(workspace)
        self._kernels.order_sums(byref(job))
        return sums


def _of_length(array: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.float32]:
    if array.shape != (count,):
        raise ValueError(f"a term of the order has the shape {array.shape}, there are {count} candidates")
    return np.ascontiguousarray(array, np.float32)
