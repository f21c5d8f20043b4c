"""`mf_score`: the prediction of matrix factorisation, with users folded in from histories.

    value ~ mean + b_user + b_item + p_user . q_item

The row of an item, [b_item, q_item], is in a table of the checkpoint. The row of a user, [b_user,
p_user], is the ridge regression of the history's values, minus the mean and b_item, on [1, q_item].
The score is the predicted value minus the mean. An item without a row has zeros, so its score is
b_user.
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
RIDGE = 8.0  # penalty of factors
RIDGE_BIAS = 3.0  # penalty of biases
PENALTY = np.diag([RIDGE_BIAS, *[RIDGE] * NUM_FACTORS])


class ItemFactors(NamedTuple):
    """The item side of a matrix factorisation. I = items."""

    items: F32 | F64  # [I, 1 + NUM_FACTORS] bias, then factors
    values: F32 | F64  # [actions] value of each action minus the mean

    def rows(self, items: I64) -> F64:
        """Look up item rows: [...] -> [..., 1 + NUM_FACTORS]; zeros beyond the table."""
        is_known = items < len(self.items)
        found = self.items[np.where(is_known, items, 0)].astype(np.float64)
        return np.where(is_known[..., None], found, 0.0)

    def user(self, items: I64, actions: I64) -> F64:
        """Fold in a user.

        Args:
            items: [n] item rows of the history.
            actions: [n] action indices.

        Returns:
            [1 + NUM_FACTORS] bias, then factors; zeros without a history.
        """
        design, target = self.regression(items, actions)
        return np.asarray(
            np.linalg.solve(design.T @ design + PENALTY, design.T @ target), np.float64
        )

    def users(self, items: I64, actions: I64, first: I64, last: I64) -> F64:
        """Fold in many users, of events first[k] .. last[k] - 1: [len(first), 1 + NUM_FACTORS]."""
        return solve_each(*self.regression(items, actions), first, last)

    def regression(self, items: I64, actions: I64) -> tuple[F64, F64]:
        """Return the regression of a user's row: design [n, 1 + NUM_FACTORS], target [n]."""
        design = self.rows(items)
        target = self.values.astype(np.float64)[actions] - design[:, 0]
        design[:, 0] = 1.0
        return design, target

    def scores(self, items: I64, actions: I64, candidates: I64) -> F32:
        """Score candidates [c] after a history [n]: float32 [c]."""
        return expected(self.user(items, actions), self.rows(candidates)).astype(np.float32)


def solve_each(design: F64, target: F64, first: I64, last: I64) -> F64:
    """Solve the regressions of many row ranges: [len(first), 1 + NUM_FACTORS].

    Args:
        design: [n, 1 + NUM_FACTORS].
        target: [n].
        first, last: Bounds of each range; last is exclusive.
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
    """Predict values minus the mean, from user and item rows: [...]."""
    found: F64 = users[..., 0] + items[..., 0] + (users[..., 1:] * items[..., 1:]).sum(-1)
    return found
