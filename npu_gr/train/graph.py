"""Who has which items: the edges of a graph, and its matrices by rows with their products.

A product is a segmented sum (`embedding_bag`): no dense matrix and no atomic additions, so the result has the same bits
whatever runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from npu_gr.core.arrays import F32, I64


@dataclass(frozen=True, slots=True, eq=False)
class Csr:
    """A sparse matrix by rows."""

    starts: Tensor  # int32 [rows + 1] row r has the elements starts[r] .. starts[r + 1] - 1
    columns: Tensor  # int32 [nnz]
    values: Tensor  # float32 [nnz]

    def times(self, x: Tensor) -> Tensor:
        """Multiply the matrix by x: float32 [columns, d] -> [rows, d]."""
        if not len(self.columns):
            return x.new_zeros(len(self.starts) - 1, x.shape[1])
        return embedding_bag(
            self.columns, x, self.starts, mode="sum", per_sample_weights=self.values, include_last_offset=True
        )

    def block(self, start: int, stop: int) -> Csr:
        """Take the rows start .. stop - 1."""
        starts = self.starts[start : stop + 1]
        own = slice(int(starts[0]), int(starts[-1]))
        return Csr(starts - starts[0], self.columns[own], self.values[own])

    def dense(self, rows: Tensor, num_columns: int) -> Tensor:
        """Write some rows out: int64 [n] -> float32 [n, num_columns]."""
        starts = self.starts.long()
        counts = starts[rows + 1] - starts[rows]
        into = torch.arange(len(rows)).repeat_interleave(counts)
        places = torch.arange(len(into)) + (starts[rows] - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        out = torch.zeros(len(rows), num_columns)
        out[into, self.columns[places].long()] = self.values[places]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Edges between users and items, each once. n = edges."""

    users: I64  # [n] rows
    items: I64  # [n] rows
    num_users: int
    num_items: int

    def none(self) -> Graph:
        """The same users and items without edges."""
        return Graph(self.users[:0], self.items[:0], self.num_users, self.num_items)

    def degrees(self) -> tuple[I64, I64]:
        """Count the edges of every user, int64 [num_users], and of every item, int64 [num_items]."""
        return (
            np.bincount(self.users, minlength=self.num_users),
            np.bincount(self.items, minlength=self.num_items),
        )

    def to_users(self, values: F32) -> Csr:
        """Make the matrix [num_users, num_items] with a value, float32 [n], for each edge."""
        return _csr(self.users, self.items, values, self.num_users)

    def to_items(self, values: F32) -> Csr:
        """Make the matrix [num_items, num_users] with a value, float32 [n], for each edge."""
        return _csr(self.items, self.users, values, self.num_items)

    def beside(self, other: Graph) -> Graph:
        """Join another graph of the same users; its items come after these."""
        return Graph(
            np.concatenate([self.users, other.users]),
            np.concatenate([self.items, other.items + self.num_items]),
            self.num_users,
            self.num_items + other.num_items,
        )


def unique_edges(users: I64, items: I64, num_users: int, num_items: int) -> Graph:
    """Make a graph of pairs that may come more than once."""
    edges = np.unique(users * num_items + items)
    return Graph(edges // num_items, edges % num_items, num_users, num_items)


def _csr(rows: I64, columns: I64, values: F32, num_rows: int) -> Csr:
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], np.arange(num_rows + 1))
    return Csr(
        torch.from_numpy(starts.astype(np.int32)),
        torch.from_numpy(columns[order].astype(np.int32)),
        torch.from_numpy(values[order]),
    )
