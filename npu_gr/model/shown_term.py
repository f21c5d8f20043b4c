"""What counts tell about the click of a shown item: a term of its task's logit, no weight of it.

    term(i | history) = b_i + p . q_i     p = sum of r_j over the items j of the history / sqrt(n)

b_i is the item's log-odds to be clicked where it is shown, less those of the mean item. r and q are
singular vectors of which users have which items, so p . q_i is the user's taste; n is the number of
the history's events. A new item has zeros, so its term is that of the mean item.

The term reads the whole history, cached or not, so a hit and a cold pass add the same bits. It is
computed on the host for every backend. `train/rank/shown_term.py` fits it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npu_gr.core.arrays import F32, I64

NUM_TASTES = 16
NUM_COLUMNS = 1 + 2 * NUM_TASTES
TASTES, SCORES = slice(1, 1 + NUM_TASTES), slice(1 + NUM_TASTES, NUM_COLUMNS)  # r and q


class ShownTerm(NamedTuple):
    """The term of one model."""

    task: int  # index of the task
    table: F32  # [num_items, NUM_COLUMNS] b, then r, then q

    def __call__(self, history: I64, candidates: I64) -> F32:
        """Compute the term of each candidate, float32 [c].

        Args:
            history: int64 [n] item rows of the events, new items allowed.
            candidates: int64 [c] item rows, new items allowed.
        """
        known = history[history < len(self.table)]
        tastes = self.table[known, TASTES].sum(0) / max(1, len(history)) ** 0.5
        is_known = candidates < len(self.table)
        rows = self.table[np.where(is_known, candidates, 0)]
        # row by row: a score does not depend on the other candidates
        found: F32 = rows[:, 0] + (rows[:, SCORES] * tastes.astype(np.float32)).sum(1)
        return np.where(is_known, found, np.float32(0))
