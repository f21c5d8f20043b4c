"""Rank one held-out item of each user: among the whole catalogue, or among 999 sampled items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.request import I64
from npu_gr.train.match.domains import HeldOut
from npu_gr.train.match.graph import Graph
from npu_gr.train.metrics import F64

BLOCK_USERS = 64  # users whose scores of all items are held at once
NUM_SAMPLED = 999


@dataclass(frozen=True, slots=True, eq=False)
class Judge:
    """Held-out items, and the items that their users are known to have, which do not compete with them.

    n = held-out items.
    """

    held_out: HeldOut
    known_rows: I64  # [m] index into `held_out` of each known (user, item) pair, ascending
    known_items: I64  # [m] item row of each known pair

    @classmethod
    def make(cls, held_out: HeldOut, known: Graph) -> Judge:
        """Look up what the users of held-out items have.

        Args:
            held_out: the items to rank. They are ranked even if `known` has them.
            known: all known edges.
        """
        row_of = np.full(known.num_users, -1)
        row_of[held_out.users] = np.arange(len(held_out.users))
        rows = row_of[known.users]
        edges = np.flatnonzero(rows >= 0)
        edges = edges[np.argsort(rows[edges], kind="stable")]
        return cls(held_out, rows[edges], known.items[edges])

    @torch.no_grad()
    def ranks(self, users: Tensor, items: Tensor) -> F64:
        """Rank each held-out item among all items but the known ones of its user.

        Args:
            users: float32 [U, d].
            items: float32 [I, d].

        Returns:
            float64 [n] ranks from 0; ties count half.
        """
        found = np.empty(len(self.held_out.users))
        vectors = users[torch.from_numpy(self.held_out.users)]
        goals = torch.from_numpy(self.held_out.items)
        for start in range(0, len(found), BLOCK_USERS):
            stop = min(len(found), start + BLOCK_USERS)
            scores = vectors[start:stop] @ items.T
            own = scores.gather(1, goals[start:stop, None])
            low, high = np.searchsorted(self.known_rows, (start, stop))
            rows = self.known_rows[low:high] - start
            scores[torch.from_numpy(rows), torch.from_numpy(self.known_items[low:high])] = -torch.inf
            scores.scatter_(1, goals[start:stop, None], own)
            num_above = (scores > own).sum(1)
            num_equal = (scores == own).sum(1) - 1
            found[start:stop] = (num_above + num_equal / 2).numpy()
        return found

    @torch.no_grad()
    def sampled_ranks(self, users: Tensor, items: Tensor, seed: int) -> F64:
        """Rank each held-out item among itself and `NUM_SAMPLED` random items that its user is not known to have.

        Args:
            users: float32 [U, d].
            items: float32 [I, d].
            seed: of the sample.

        Returns:
            float64 [n] ranks from 0; ties count half.
        """
        found = np.empty(len(self.held_out.users))
        random = np.random.default_rng(seed)
        num_sampled = min(NUM_SAMPLED, len(items) - 1)
        for row, (user, goal) in enumerate(zip(*self.held_out, strict=True)):
            low, high = np.searchsorted(self.known_rows, (row, row + 1))
            excluded = {int(goal), *self.known_items[low:high].tolist()}
            # Enough draws that the sample is complete even if all excluded items are among them.
            drawn = random.choice(len(items), min(len(items), num_sampled + len(excluded)), replace=False)
            others = [item for item in drawn.tolist() if item not in excluded][:num_sampled]
            scores = items[torch.tensor([int(goal), *others])] @ users[int(user)]
            found[row] = float((scores[1:] > scores[0]).sum() + (scores[1:] == scores[0]).sum() / 2)
        return found
