"""The native kernels of retrieval: the best items, and the sums of a score blend.

The best items take one pass over all items, at memory bandwidth for a single query
(`ops/cpu/items.h`). The sums take one call a request, whose time does not depend on the size of the
catalogue (`ops/cpu/order.h`; the structures mirror `order_call.h`). Results are small new tensors.
"""

from __future__ import annotations

import threading
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_void_p, pointer

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npu_gr.backend.best_items import Best, Hidden
from npu_gr.backend.calls import BlendCall, BlendTables
from npu_gr.backend.cpu.library import Native, address


class ItemsJob(Structure):
    """Mirrors `struct ItemsJob` of `ops/cpu/items_call.h`, field by field."""

    _fields_ = [
        ("queries", c_void_p),
        ("items", c_void_p),
        *((name, c_int64) for name in ("num_queries", "num_items", "dim", "k")),
        *((name, c_void_p) for name in ("hidden_start", "hidden", "workspace", "score", "item")),
    ]


class _ProductsJob(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "items")),
        *((name, c_int64) for name in ("num_items", "dim")),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("score", c_void_p),
    ]


class NativeItems:
    """Computes `Backend.best_items` and `item_products`, bit-equal to each other. Thread-safe."""

    def __init__(self, native: Native) -> None:
        self._kernels = native.kernels

    def __call__(self, queries: Tensor, items: Tensor, k: int, hidden: Hidden | None) -> Best:
        """Find the best items; there may be at most 2**32."""
        queries = queries.contiguous()
        items = items.contiguous()
        best = Best(torch.empty(len(queries), k), torch.empty(len(queries), k, dtype=torch.int64))
        starts = rows = None
        if hidden is not None:
            order = torch.argsort(hidden.queries, stable=True)  # rows of one query already ascend
            rows = hidden.items[order]
            starts = torch.zeros(len(queries) + 1, dtype=torch.int64)
            starts[1:] = torch.bincount(hidden.queries, minlength=len(queries)).cumsum(0)
        call = ItemsJob(
            queries.data_ptr(), items.data_ptr(), len(queries), len(items), items.shape[1], k,
            None if starts is None else starts.data_ptr(),
            None if rows is None else rows.data_ptr(),
            None, best.scores.data_ptr(), best.items.data_ptr(),
        )  # fmt: skip
        workspace = torch.empty(self._kernels.best_items_bytes(byref(call)), dtype=torch.uint8)
        call.workspace = workspace.data_ptr()
        self._kernels.best_items(byref(call))
        return best

    def products(self, query: Tensor, items: Tensor, rows: Tensor) -> Tensor:
        """Multiply a query with the items of these rows."""
        query, items = query.contiguous(), items.contiguous()
        rows = rows.contiguous()
        scores = torch.empty(len(rows))
        num_items, dim = items.shape
        call = _ProductsJob(
            query.data_ptr(),
            items.data_ptr(),
            num_items,
            dim,
            rows.data_ptr(),
            len(rows),
            scores.data_ptr(),
        )
        if self._kernels.item_products(byref(call)):
            raise IndexError(f"an item row is outside of the {num_items} items")
        return scores


class _Tables(Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("successors", "log_prob", "neighbours", "similarity", "rest", "shares")
        ),
        *(
            (name, c_int64)
            for name in ("num_items", "num_successors", "num_neighbours", "is_summed")
        ),
        *((name, c_double) for name in ("decay", "scale")),
        *(
            (name, c_float)
            for name in ("retrieval", "click", "transitions", "alike", "popularity", "seen")
        ),
    ]


class _Job(Structure):
    _fields_ = [
        ("tables", POINTER(_Tables)),
        *((name, c_void_p) for name in ("recent", "candidates", "retrieval", "click", "seen")),
        *(
            (name, c_int64)
            for name in ("num_recent", "num_candidates", "num_followed", "num_liked")
        ),
        *((name, c_void_p) for name in ("workspace", "sums")),
    ]


class NativeOrder:
    """Implements `BlendSums`. Thread-safe."""

    def __init__(self, native: Native, tables: BlendTables) -> None:
        """Describe the tables, which must not change afterwards."""
        self._kernels = native.kernels
        self._room = _Room()
        self._held = held = BlendTables(
            np.ascontiguousarray(tables.successors),
            np.ascontiguousarray(tables.log_prob),
            np.ascontiguousarray(tables.rest),
            np.ascontiguousarray(tables.shares),
            np.ascontiguousarray(tables.neighbours),
            np.ascontiguousarray(tables.similarity),
            *tables[6:],
        )
        num_items, num_successors = held.successors.shape
        if (
            len(held.rest) != num_items + 1
            or len(held.shares) != num_items + 1
            or len(held.neighbours) != num_items
        ):
            raise ValueError("tables of an order: their lengths differ")
        tables_at = [
            address(array)
            for array in (held.successors, held.log_prob, held.neighbours, held.similarity)
        ]
        self._tables = pointer(
            _Tables(
                *tables_at, address(held.rest), address(held.shares),
                num_items, num_successors, held.neighbours.shape[1], held.is_summed,
                held.decay, held.scale, *held.weights,
            )
        )  # fmt: skip

    def __call__(self, call: BlendCall) -> npt.NDArray[np.float32]:
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
        self._kernels.blend_sums(byref(job))
        return room.terms[:count].copy()

    def alike(self, liked: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Sum the similarities of every item to the liked items: float64 [I]."""
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
    """Memory that the calls of one thread reuse: addresses are known, and caches are warm."""

    def __init__(self) -> None:
        self.job = _Job()
        self.numbers = np.empty(0, np.int64)
        self.terms = np.empty(0, np.float32)
        self.workspace = np.empty(0, np.uint8)
        self.numbers_at = self.terms_at = 0

    def hold(self, num_numbers: int, num_terms: int) -> None:
        """Grow to at least this many numbers and terms."""
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
        """Copy a term of the candidates; return its address, 0 = there is none."""
        if term is None:
            return 0
        if term.shape != (count,):
            raise ValueError(
                f"a term of the blend has the shape {term.shape}, there are {count} candidates"
            )
        self.terms[place * count : (place + 1) * count] = term
        return self.terms_at + 4 * place * count
