"""The best items by the native kernel: one pass over the items, at the speed of memory for a lone query.

Source: `ops/cpu/items.h`. Results are small new tensors.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_int64, c_void_p

import torch
from torch import Tensor

from npu_gr.backend.best_items import Best, Hidden
from npu_gr.backend.cpu.library import Native


class ItemsJob(Structure):
    """Mirror `struct ItemsJob` of `ops/cpu/items_call.h`, field by field."""

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
    """Compute `Backend.best_items` and `item_products`, which agree to the last bit. Any thread may call."""

    def __init__(self, native: Native) -> None:
        self._kernels = native.kernels

    def __call__(self, queries: Tensor, items: Tensor, k: int, hidden: Hidden | None) -> Best:
        """Find the best items of at most 2**32."""
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
            None if starts is None else starts.data_ptr(), None if rows is None else rows.data_ptr(),
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
            query.data_ptr(), items.data_ptr(), num_items, dim, rows.data_ptr(), len(rows), scores.data_ptr()
        )
        if self._kernels.item_products(byref(call)):
            raise IndexError(f"an item row is outside of the {num_items} items")
        return scores
