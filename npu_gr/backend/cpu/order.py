"""The sums of a fitted order by the native kernel: one call a request, whose work does not grow with the catalogue.

Source: `ops/cpu/order.h`, which `order_call.h` and this file describe field by field.
"""

from __future__ import annotations

import threading
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
        self._room = _Room()
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
        room = self._room
        room.hold(num_recent + count, 4 * count)
        job, numbers = room.job, room.numbers
        numbers[:num_recent] = call.recent
        numbers[num_recent : num_recent + count] = call.candidates
        job.recent, job.candidates = room.numbers_at, room.numbers_at + 8 * num_recent
        job.retrieval = room.put(1, call.retrieval, count)
        job.click = room.put(2, call.click, count)
        job.seen = room.put(3, call.seen, count)
        job.num_recent, job.num_candidates = num_recent, count
        job.num_followed, job.num_liked = call.num_followed, call.num_liked
        job.tables, job.sums = self._tables, room.terms_at
        room.hold_workspace(self._kernels.order_bytes(byref(job)))
        self._kernels.order_sums(byref(job))
        return room.terms[:count].copy()

    def alike(self, liked: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Sum up the similarities of every item to those of the liked events: float64 [I]."""
        room = self._room
        room.hold(len(liked), 0)
        job = room.job
        room.numbers[: len(liked)] = liked
        job.recent = room.numbers_at
        job.num_recent = job.num_liked = len(liked)
        job.num_candidates = job.num_followed = 0
        job.tables = self._tables
        room.hold_workspace(self._kernels.order_bytes(byref(job)))
        sums = np.empty(1 + len(self._held.neighbours))
        self._kernels.neighbour_sums(byref(job), address(sums))
        return sums[1:]


class _Room(threading.local):
    """Memory that the calls of one thread reuse: its addresses are known, and what is new is cold."""

    def __init__(self) -> None:
        self.job = _Job()
        self.numbers = np.empty(0, np.int64)
        self.terms = np.empty(0, np.float32)
        self.workspace = np.empty(0, np.uint8)
        self.numbers_at = self.terms_at = 0

    def hold(self, num_numbers: int, num_terms: int) -> None:
        """Grow, if there is no room for so many."""
        if len(self.numbers) < num_numbers:
            self.numbers = np.empty(2 * num_numbers, np.int64)
            self.numbers_at = address(self.numbers)
        if len(self.terms) < num_terms:
            self.terms = np.empty(2 * num_terms, np.float32)
            self.terms_at = address(self.terms)

    def hold_workspace(self, num_bytes: int) -> None:
        if len(self.workspace) < num_bytes:
            self.workspace = np.empty(2 * num_bytes, np.uint8)
            self.job.workspace = address(self.workspace)

    def put(self, place: int, term: npt.NDArray[np.float32] | None, count: int) -> int:
        """Copy a term of each candidate; its address, 0 = there is none."""
        if term is None:
            return 0
        if term.shape != (count,):
            raise ValueError(f"a term of the order has the shape {term.shape}, there are {count} candidates")
        self.terms[place * count : (place + 1) * count] = term
        return self.terms_at + 4 * place * count
