"""Rank one held-out item of each user among the items that the user does not have.

Which user has which items is a bipartite `Graph`. `Csr` is a sparse matrix over its edges. Its
product is a segmented sum (`embedding_bag`), without a dense matrix and without atomic additions,
so the result has the same bits for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from npu_gr.core.arrays import F32, I64
from npu_gr.train.metrics import F64, hit_ratio


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
            self.columns,
            x,
            self.starts,
            mode="sum",
            per_sample_weights=self.values,
            include_last_offset=True,
        )

    def block(self, start: int, stop: int) -> Csr:
        """Slice the rows start .. stop - 1."""
        starts = self.starts[start : stop + 1]
        own = slice(int(starts[0]), int(starts[-1]))
        return Csr(starts - starts[0], self.columns[own], self.values[own])

    def of(self, rows: Tensor) -> Csr:
        """Take some rows: int64 [n]."""
        begin = self.starts[rows].long()
        counts = self.starts[rows + 1] - begin
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        places = torch.arange(int(starts[-1])) + (begin - starts[:-1]).repeat_interleave(counts)
        return Csr(starts.int(), self.columns[places], self.values[places])

    def dense(self, rows: Tensor, num_columns: int) -> Tensor:
        """Expand some rows to a dense matrix: int64 [n] -> float32 [n, num_columns]."""
        some = self.of(rows)
        into = torch.arange(len(rows)).repeat_interleave(some.starts.diff())
        out = torch.zeros(len(rows), num_columns)
        out[into, some.columns.long()] = some.values
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Edges between users and items, each once. n = edges."""

    users: I64  # [n] rows
    items: I64  # [n] rows
    num_users: int
    num_items: int

    def none(self) -> Graph:
        """Return a graph of the same users and items without edges."""
        return Graph(self.users[:0], self.items[:0], self.num_users, self.num_items)

    def with_edges_only(self) -> tuple[Graph, I64]:
        """Leave out the items without an edge.

        Returns:
            The graph of the others, in the same order, and their rows here, int64 [its items].
        """
        rows, items = np.unique(self.items, return_inverse=True)
        return Graph(self.users, items, self.num_users, len(rows)), rows

    def degrees(self) -> tuple[I64, I64]:
        """Count the edges of each user, int64 [num_users], and of each item, int64 [num_items]."""
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

    def join(self, other: Graph) -> Graph:
        """Append the items and edges of another graph of the same users."""
        return Graph(
            np.concatenate([self.users, other.users]),
            np.concatenate([self.items, other.items + self.num_items]),
            self.num_users,
            self.num_items + other.num_items,
        )


def unique_edges(users: I64, items: I64, num_users: int, num_items: int) -> Graph:
    """Make a graph of (user, item) pairs, dropping repeated pairs."""
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


BLOCK_USERS = 64  # users whose scores of all items are in memory at once
SMOOTH_AT = (10, 20, 30, 50, 70, 100)

# int64 [n] user rows -> float32 [n, items]; the result may be overwritten
Scores = Callable[[Tensor], Tensor]


class HeldOut(NamedTuple):
    """Held-out edges, at most one of each user."""

    users: I64  # [n] rows, distinct
    items: I64  # [n] rows


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """Held-out items, and the items of their users that are excluded from the ranking.

    n = held-out items.
    """

    held_out: HeldOut
    # [m] index into `held_out` of each excluded (user, item) pair, ascending
    hidden_rows: I64
    hidden_items: I64  # [m] item row of each excluded pair

    @classmethod
    def make(cls, held_out: HeldOut, *hidden: Graph) -> Evaluator:
        """Collect the excluded items of the held-out items' users.

        Args:
            held_out: Items to rank. They are ranked even if `hidden` has them.
            hidden: Edges to exclude: what the users are known to have.
        """
        row_of = np.full(hidden[0].num_users, -1)
        row_of[held_out.users] = np.arange(len(held_out.users))
        rows = np.concatenate([row_of[graph.users] for graph in hidden])
        items = np.concatenate([graph.items for graph in hidden])
        edges = np.flatnonzero(rows >= 0)
        edges = edges[np.argsort(rows[edges], kind="stable")]
        return cls(held_out, rows[edges], items[edges])

    def only(self, chosen: npt.NDArray[np.bool_]) -> Evaluator:
        """Return an evaluator of some of the held-out items: bool [n]."""
        kept = chosen[self.hidden_rows]
        new_rows = np.cumsum(chosen) - 1
        held_out = HeldOut(self.held_out.users[chosen], self.held_out.items[chosen])
        return Evaluator(held_out, new_rows[self.hidden_rows[kept]], self.hidden_items[kept])

    def ranks(self, users: Tensor, items: Tensor) -> F64:
        """Rank by inner products of vectors, float32 [U, d] and [I, d]; see `ranks_by`."""
        return self.ranks_by(lambda rows: users[rows] @ items.T)

    def ranks_by(self, scores: Scores) -> F64:
        """Rank each held-out item among all items that are not excluded.

        Returns:
            float64 [n] ranks from 0; ties count half.
        """
        ranks: F64 = self.ranks_of_each(lambda rows: [scores(rows)])[0]
        return ranks

    @torch.no_grad()
    def ranks_of_each(self, tables: Callable[[Tensor], Iterable[Tensor]]) -> F64:
        """Rank under several models that share work.

        Args:
            tables: Function user rows -> scores of each model, as `Scores` returns them.

        Returns:
            float64 [models, n] ranks from 0; ties count half.
        """
        found: list[F64] = []
        for start in range(0, max(1, len(self.held_out.users)), BLOCK_USERS):
            block = slice(start, start + BLOCK_USERS)
            goals = torch.from_numpy(self.held_out.items[block])[:, None]
            low, high = np.searchsorted(self.hidden_rows, (start, start + BLOCK_USERS))
            rows = torch.from_numpy(self.hidden_rows[low:high] - start)
            items = torch.from_numpy(self.hidden_items[low:high])
            block_ranks = []
            for scores in tables(torch.from_numpy(self.held_out.users[block])):
                own = scores.gather(1, goals)
                scores[rows, items] = -torch.inf
                scores.scatter_(1, goals, own)
                num_above = _counts(scores > own)
                block_ranks.append(num_above + (_counts(scores >= own) - num_above - 1) / 2)
            found.append(np.stack(block_ranks))
        return np.concatenate(found, axis=1)


def _counts(flags: Tensor) -> F64:
    """Count the set flags of each row; numpy is many times as fast as torch's sum."""
    return np.array([np.count_nonzero(row) for row in flags.numpy()], np.float64)


def smooth_hit(ranks: F64) -> float:
    """Average HIT@k over the k of `SMOOTH_AT`, which is less noisy than any one of them.

    `ranks` count from 0.
    """
    return float(np.mean([hit_ratio(ranks, k) for k in SMOOTH_AT]))
