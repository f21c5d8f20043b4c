"""Rank one held-out item of each user among the whole catalogue, less what the user is known to have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.train.graph import Graph
from npu_gr.train.metrics import F64, hit_ratio

BLOCK_USERS = 64  # users whose scores of all items are held at once
SMOOTH_AT = (10, 20, 30, 50, 70, 100)

Scores = Callable[[Tensor], Tensor]  # int64 [n] user rows -> float32 [n, items], which the caller may change


class HeldOut(NamedTuple):
    """Held-out edges, at most one of each user."""

    users: I64  # [n] rows, distinct
    items: I64  # [n] rows


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """Held-out items, and the items of their users that do not compete with them.

    n = held-out items.
    """

    held_out: HeldOut
    hidden_rows: I64  # [m] index into `held_out` of each (user, item) pair that does not compete, ascending
    hidden_items: I64  # [m] item row of each such pair

    @classmethod
    def make(cls, held_out: HeldOut, *hidden: Graph) -> Judge:
        """Look up what does not compete.

        Args:
            held_out: the items to rank. They are ranked even if `hidden` has them.
            hidden: edges that do not compete: what the users are known to have.
        """
        row_of = np.full(hidden[0].num_users, -1)
        row_of[held_out.users] = np.arange(len(held_out.users))
        rows = np.concatenate([row_of[graph.users] for graph in hidden])
        items = np.concatenate([graph.items for graph in hidden])
        edges = np.flatnonzero(rows >= 0)
        edges = edges[np.argsort(rows[edges], kind="stable")]
        return cls(held_out, rows[edges], items[edges])

    def only(self, chosen: npt.NDArray[np.bool_]) -> Judge:
        """Judge some of the held-out items: bool [n]."""
        kept = chosen[self.hidden_rows]
        new_rows = np.cumsum(chosen) - 1
        held_out = HeldOut(self.held_out.users[chosen], self.held_out.items[chosen])
        return Judge(held_out, new_rows[self.hidden_rows[kept]], self.hidden_items[kept])

    def ranks(self, users: Tensor, items: Tensor) -> F64:
        """Rank by inner products of vectors: float32 [U, d] and [I, d]; see `ranks_by`."""
        return self.ranks_by(lambda rows: users[rows] @ items.T)

    def ranks_by(self, scores: Scores) -> F64:
        """Rank each held-out item among all items that compete.

        Args:
            scores: of any users.

        Returns:
            float64 [n] ranks from 0; ties count half.
        """
        ranks: F64 = self.ranks_of_each(lambda rows: [scores(rows)])[0]
        return ranks

    @torch.no_grad()
    def ranks_of_each(self, tables: Callable[[Tensor], Iterable[Tensor]]) -> F64:
        """Rank under several models that share work.

        Args:
            tables: user rows -> the scores of each model, as `Scores` gives them.

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
    """Count the set flags of each row: many times as fast as torch's sum."""
    return np.array([np.count_nonzero(row) for row in flags.numpy()], np.float64)


def smooth_hit(ranks: F64) -> float:
    """Average HIT@k over `SMOOTH_AT`: it moves less by chance than any one of them. `ranks` count from 0."""
    return float(np.mean([hit_ratio(ranks, k) for k in SMOOTH_AT]))
