"""Ranking of one held-out item a user: among the whole catalogue, and among 999 sampled items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npu_gr.core.request import I64
from npu_gr.train.match.domains import Held
from npu_gr.train.match.graph import Graph

BLOCK_USERS = 64
NUM_SAMPLED = 999

Ranks = npt.NDArray[np.float64]  # place from 0; ties count half


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """Held-out items with what their users are known to have, which is not ranked."""

    held: Held
    rows: I64  # of `held`, ascending; with the next: (held-out row, item) pairs that are known
    items: I64

    @classmethod
    def make(cls, held: Held, known: Graph) -> Judge:
        """From the graph of all that is known; a held-out item itself is always ranked."""
        place = np.full(known.num_users, -1)
        place[held.users] = np.arange(len(held.users))
        rows = place[known.users]
        asked = np.flatnonzero(rows >= 0)
        asked = asked[np.argsort(rows[asked], kind="stable")]
        return cls(held, rows[asked], known.items[asked])

    @torch.no_grad()
    def ranks(self, users: Tensor, items: Tensor) -> Ranks:
        """Of each held-out item among all items, float64 [n].

        Args:
            users: float32 [U, d].
            items: float32 [I, d].
        """
        found = np.empty(len(self.held.users))
        vectors = users[torch.from_numpy(self.held.users)]
        goals = torch.from_numpy(self.held.items)
        for start in range(0, len(found), BLOCK_USERS):
            stop = min(len(found), start + BLOCK_USERS)
            scores = vectors[start:stop] @ items.T
            own = scores.gather(1, goals[start:stop, None])
            low, high = np.searchsorted(self.rows, (start, stop))
            rows, columns = self.rows[low:high] - start, self.items[low:high]
            scores[torch.from_numpy(rows), torch.from_numpy(columns)] = -torch.inf
            scores.scatter_(1, goals[start:stop, None], own)
            above, equal = (scores > own).sum(1), (scores == own).sum(1) - 1
            found[start:stop] = (above + equal / 2).numpy()
        return found

    @torch.no_grad()
    def sampled_ranks(self, users: Tensor, items: Tensor, seed: int) -> Ranks:
        """Of each held-out item among itself and 999 items that its user is not known to have, float64 [n]."""
        found = np.empty(len(self.held.users))
        random = np.random.default_rng(seed)
        num_sampled = min(NUM_SAMPLED, len(items) - 1)
        for row, (user, goal) in enumerate(zip(*self.held, strict=True)):
            low, high = np.searchsorted(self.rows, (row, row + 1))
            taken = {int(goal), *self.items[low:high].tolist()}
            drawn = random.choice(len(items), min(len(items), num_sampled + len(taken)), replace=False)
            others = [item for item in drawn.tolist() if item not in taken][:num_sampled]
            scores = items[torch.tensor([int(goal), *others])] @ users[int(user)]
            found[row] = float((scores[1:] > scores[0]).sum() + (scores[1:] == scores[0]).sum() / 2)
        return found


def hit_ratio(ranks: Ranks, k: int) -> float:
    """Share of held-out items among the best k."""
    return float((ranks < k).mean())


def ndcg(ranks: Ranks, k: int) -> float:
    """Mean of 1 / log2(rank + 2) where it is among the best k, 0 elsewhere: NDCG of one relevant item."""
    return float(np.where(ranks < k, 1 / np.log2(ranks + 2), 0).mean())
