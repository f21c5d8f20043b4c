"""Baselines that predict ratings: means, and matrix factorisation."""

from __future__ import annotations

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.factors import NUM_FACTORS, PENALTY, expected, solve_each
from npu_gr.train.data import InteractionLog
from npu_gr.train.metrics import F64


class Means:
    """Predicts item mean plus the user's mean so far, both shrunk towards the global mean."""

    name = "user + item means"
    shrinkage = 5.0  # events that the global mean counts for

    def __init__(self, log: InteractionLog) -> None:
        items = log.items[log.trained]
        values = log.values[log.trained]
        self._mean = float(values.mean())
        sums = np.bincount(items, values - self._mean, minlength=log.num_items)
        self._items = sums / (np.bincount(items, minlength=log.num_items) + self.shrinkage)

    def liking(self, log: InteractionLog) -> F64 | None:
        item = self._items[log.items]
        residual = log.values - self._mean - item
        user = np.zeros(len(item))  # mean residual of the user's events before each
        for start, stop in zip(log.starts[:-1], log.starts[1:], strict=True):
            before = np.cumsum(residual[start:stop]) - residual[start:stop]
            user[start:stop] = before / (np.arange(stop - start) + self.shrinkage)
        return item + user

    def next_items(self, log: InteractionLog, user: int) -> F64:
        return self._items


class MatrixFactorisation:
    """Factorises the action values with biases, by alternating least squares; folds users in event by event.

    value ~ mean + b_user + b_item + p_user . q_item,   with ridge terms on factors and biases
    """

    name = "matrix factorisation"
    num_sweeps = 12

    def __init__(self, log: InteractionLog, seed: int = 0) -> None:
        users = log.users[log.trained]
        items = log.items[log.trained]
        values = log.values[log.trained]
        self.mean = float(values.mean())
        by_user = _events_of_each(users, log.num_users)
        by_item = _events_of_each(items, log.num_items)
        random = np.random.default_rng(seed)
        self.items = random.normal(0, 0.1, (log.num_items, 1 + NUM_FACTORS))  # bias, then factors
        self.items[:, 0] = 0
        of_users = np.zeros((log.num_users, 1 + NUM_FACTORS))
        for _ in range(self.num_sweeps):
            for mine, other, events, at in (
                (of_users, self.items, by_user, items),
                (self.items, of_users, by_item, users),
            ):
                for row, chosen in enumerate(events):
                    seen = other[at[chosen]]
                    design = np.concatenate([np.ones((len(seen), 1)), seen[:, 1:]], axis=1)
                    residual = values[chosen] - self.mean - seen[:, 0]
                    mine[row] = np.linalg.solve(design.T @ design + PENALTY, design.T @ residual)

    def _fold_in(self, items: I64, values: F64) -> F64:
        """Solve the user's row after 0, 1, ... m of these events: float64 [m + 1, 1 + factors]."""
        seen = self.items[items]
        design = np.concatenate([np.ones((len(seen), 1)), seen[:, 1:]], axis=1)
        last = np.arange(len(seen) + 1)
        return solve_each(design, values - self.mean - seen[:, 0], np.zeros_like(last), last)

    def liking(self, log: InteractionLog) -> F64 | None:
        scores = np.zeros(len(log.items))  # predicted values, less the mean
        for start, stop in zip(log.starts[:-1], log.starts[1:], strict=True):
            part = slice(start, stop)
            rows = self._fold_in(log.items[part], log.values[part])[:-1]
            scores[part] = expected(rows, self.items[log.items[part]])
        return scores

    def next_items(self, log: InteractionLog, user: int) -> F64:
        # The items that the user would like best, which need not be those that come next.
        part = slice(log.starts[user], log.starts[user] + log.num_trained[user])
        row = self._fold_in(log.items[part], log.values[part])[-1]
        return expected(row, self.items)


def _events_of_each(owners: I64, count: int) -> list[I64]:
    """List the events of each of `count` owners, in the log's order."""
    order = np.argsort(owners, kind="stable")
    return np.split(order, np.searchsorted(owners[order], np.arange(1, count)))
