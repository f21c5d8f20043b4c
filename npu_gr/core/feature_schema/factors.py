"""`mf_score`: what matrix factorisation says of a user and an item, the user folded in from the history.

    value ~ mean + b_user + b_item + p_user . q_item

The item's row is [b_item, q_item], one of a table in the checkpoint. The user's row, [b_user,
p_user], is the ridge regression of the history's values, less the mean and b_item, on its items'
[1, q_item]. The score is the value that is expected, less the mean. An item without a row has
zeros: its score is what the user gives on average.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

MF_SCORE = "mf_score"
NUM_FACTORS = 16
RIDGE = 8.0  # of a user's and an item's factors
RIDGE_BIAS = 3.0  # of their biases
PENALTY = np.diag([RIDGE_BIAS, *[RIDGE] * NUM_FACTORS])


class ItemFactors(NamedTuple):
    """A matrix factorisation as far as its users are folded in. I = items."""

    items: F32 | F64  # [I, 1 + NUM_FACTORS] bias, then factors
    values: F32 | F64  # [actions] what each action is worth, less the mean

    def rows(self, items: I64) -> F64:
        """Look up item rows: [...] -> [..., 1 + NUM_FACTORS]; zeros past the table."""
        is_known = items < len(self.items)
        found = self.items[np.where(is_known, items, 0)].astype(np.float64)
        return np.where(is_known[..., None], found, 0.0)

    def user(self, items: I64, actions: I64) -> F64:
        """Fold a user in.

        Args:
            items: [n] item rows of the history.
            actions: [n] places in the model's actions.

        Returns:
            [1 + NUM_FACTORS] bias, then factors; zeros without a history.
        """
        design, target = self.regression(items, actions)
        return np.asarray(
            np.linalg.solve(design.T @ design + PENALTY, design.T @ target), np.float64
        )

    def users(self, items: I64, actions: I64, first: I64, last: I64) -> F64:
        """Fold a user in for many histories, the events first[k] .. last[k] - 1 of n: [len(first), 1 + NUM_FACTORS]."""
        return solve_each(*self.regression(items, actions), first, last)

    def regression(self, items: I64, actions: I64) -> tuple[F64, F64]:
        """Say what a user's row solves: [n, 1 + NUM_FACTORS] of the history's items, and [n] values to explain."""
        design = self.rows(items)
        target = self.values.astype(np.float64)[actions] - design[:, 0]
        design[:, 0] = 1.0
        return design, target

    def scores(self, items: I64, actions: I64, candidates: I64) -> F32:
        """Score candidates [c] after a history [n]: float32 [c]."""
        return expected(self.user(items, actions), self.rows(candidates)).astype(np.float32)


def solve_each(design: F64, target: F64, first: I64, last: I64) -> F64:
    """Solve the regressions of many runs of rows, first[k] .. last[k] - 1: [len(first), 1 + NUM_FACTORS].

    Args:
        design: [n, 1 + NUM_FACTORS].
        target: [n].
        first, last: of the runs, 0 .. n.
    """
    sums = (
        np.cumsum(part, axis=0)
        for part in (design[:, :, None] * design[:, None, :], design * target[:, None])
    )
    gram, right = (np.concatenate([np.zeros((1, *part.shape[1:])), part]) for part in sums)
    rows: F64 = np.linalg.solve(
        PENALTY + gram[last] - gram[first], (right[last] - right[first])[:, :, None]
    )[:, :, 0]
    return rows


def expected(users: F64, items: F64) -> F64:
    """Compute the expected values, less the mean: rows [..., 1 + NUM_FACTORS] of both -> [...]."""
    found: F64 = users[..., 0] + items[..., 0] + (users[..., 1:] * items[..., 1:]).sum(-1)
    return found
