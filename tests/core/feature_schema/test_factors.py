"""A user folded in from a history is the ridge regression that a slow and obvious loop solves."""

from __future__ import annotations

import numpy as np
import pytest

from npu_gr.core.feature_schema.factors import NUM_FACTORS, RIDGE, RIDGE_BIAS, ItemFactors

NUM_ITEMS = 7
RANDOM = np.random.default_rng(0)
FACTORS = ItemFactors(RANDOM.normal(size=(NUM_ITEMS, 1 + NUM_FACTORS)), np.array([-2.0, 0.5, 1.0]))


def loss(row: np.ndarray, items: list[int], actions: list[int]) -> float:
    """What a user's row makes least."""
    total = RIDGE_BIAS * row[0] ** 2 + RIDGE * float((row[1:] ** 2).sum())
    for item, action in zip(items, actions, strict=True):
        bias, *factors = FACTORS.items[item] if item < NUM_ITEMS else np.zeros(1 + NUM_FACTORS)
        total += (FACTORS.values[action] - bias - row[0] - float(np.dot(factors, row[1:]))) ** 2
    return float(total)


@pytest.mark.parametrize("num_events", [0, 1, 3, 40])
def test_a_folded_user_explains_the_history_best(num_events: int) -> None:
    random = np.random.default_rng(num_events)
    items, actions = (
        random.integers(0, NUM_ITEMS + 2, num_events),
        random.integers(0, 3, num_events),
    )
    row = FACTORS.user(items, actions)
    least = loss(row, items.tolist(), actions.tolist())
    for _ in range(50):
        assert (
            loss(row + random.normal(size=row.shape) * 1e-2, items.tolist(), actions.tolist())
            > least
        )
    candidates = np.array([0, 3, NUM_ITEMS])
    want = [
        row[0] + bias + float(np.dot(factors, row[1:])) for bias, *factors in FACTORS.items[[0, 3]]
    ]
    assert FACTORS.scores(items, actions, candidates).tolist() == pytest.approx(
        [*want, row[0]], rel=1e-5, abs=1e-7
    )
    assert num_events or not row.any()


def test_many_histories_of_one_user_are_folded_in_at_once() -> None:
    items, actions = RANDOM.integers(0, NUM_ITEMS, 30), RANDOM.integers(0, 3, 30)
    first, last = np.array([0, 0, 5, 29]), np.array([0, 30, 17, 30])
    found = FACTORS.users(items, actions, first, last)
    want = [FACTORS.user(items[a:b], actions[a:b]) for a, b in zip(first, last, strict=True)]
    np.testing.assert_allclose(found, want, atol=1e-10)
