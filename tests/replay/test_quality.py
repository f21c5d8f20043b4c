"""NDCG equals its definition over every order of tied candidates."""

from __future__ import annotations

from itertools import pairwise, permutations
from math import isnan, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.replay.tally import ndcg_at

CASES = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.5, float("nan")]), st.integers(0, 1)),
    min_size=1,
    max_size=6,
)


def orders(scores: list[float]) -> list[tuple[int, ...]]:
    """Every order that sorts the scores, best first; NaN last."""
    value = [-np.inf if isnan(score) else score for score in scores]
    return [
        o
        for o in permutations(range(len(value)))
        if all(value[a] >= value[b] for a, b in pairwise(o))
    ]


@settings(deadline=None, max_examples=200)
@given(case=CASES, k=st.integers(1, 8))
def test_ndcg_is_the_mean_over_all_orders_of_ties(case: list[tuple[float, int]], k: int) -> None:
    scores, labels = [score for score, _ in case], [label for _, label in case]
    ndcg = ndcg_at(k, scores, labels)
    if not any(labels):
        assert isnan(ndcg)
        return
    best = sum(1 / log2(i + 2) for i in range(min(k, sum(labels))))
    ranked = [[labels[i] for i in order][:k] for order in orders(scores)]
    gains = [sum(label / log2(i + 2) for i, label in enumerate(row)) / best for row in ranked]
    assert ndcg == pytest.approx(np.mean(gains), abs=1e-12)


def test_by_hand() -> None:
    assert ndcg_at(10, [3, 2, 1], [0, 1, 0]) == pytest.approx(1 / log2(3))
    assert ndcg_at(1, [3, 2, 1], [0, 1, 0]) == 0


def test_a_constant_scorer_earns_what_chance_earns_wherever_the_positive_stands() -> None:
    for place in (0, 50, 99):
        labels = np.eye(100, dtype=int)[place]
        assert ndcg_at(10, np.zeros(100), labels) == pytest.approx(
            sum(1 / log2(i + 2) for i in range(10)) / 100
        )
