"""Metrics equal their definitions, counted pair by pair and place by place."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.train.metrics import (
    auc,
    auc_terms,
    calibration_error,
    hit_ratio,
    mean_reciprocal_rank,
    ndcg,
    rank_of,
)

SCORES = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 0.5, 2.0]), st.booleans()), min_size=1, max_size=25
)


@given(SCORES)
@settings(deadline=None)
def test_auc_is_the_share_of_pairs_in_order(rows: list[tuple[float, bool]]) -> None:
    scores, labels = np.array([s for s, _ in rows]), np.array([y for _, y in rows])
    pairs = [(p > n) + (p == n) / 2 for p in scores[labels] for n in scores[~labels]]
    got = auc(scores, labels)
    assert math.isclose(got, float(np.mean(pairs))) if pairs else math.isnan(got)


def test_rank_counts_better_scores_and_half_of_the_equal_ones() -> None:
    scores = np.array([3.0, 1.0, 2.0, 2.0, -np.inf])
    assert [rank_of(scores, target) for target in range(4)] == [0, 3, 1.5, 1.5]


def test_hits_and_gains_stop_at_k() -> None:
    ranks = np.array([0.0, 9.0, 10.0, 200.0])
    assert hit_ratio(ranks, 10) == 0.5
    assert math.isclose(ndcg(ranks, 10), (1 + 1 / math.log2(11)) / 4)
    assert math.isclose(mean_reciprocal_rank(ranks), (1 + 1 / 10 + 1 / 11 + 1 / 201) / 4)


@given(SCORES)
@settings(deadline=None)
def test_terms_of_the_auc_are_its_change_by_each_event(rows: list[tuple[float, bool]]) -> None:
    scores, labels = np.array([s for s, _ in rows]), np.array([y for _, y in rows])
    if labels.all() or not labels.any():
        return
    terms = auc_terms(scores, labels)
    assert abs(terms.sum()) < 1e-9
    for place, (score, label) in enumerate(rows):
        others = scores[labels != label]
        wins = np.mean((others < score) + (others == score) / 2)
        gain = wins - auc(scores, labels) if label else (1 - wins) - auc(scores, labels)
        assert math.isclose(terms[place], gain / (labels == label).sum(), abs_tol=1e-9)


def test_the_calibration_error_is_the_gap_between_probability_and_share_of_positives() -> None:
    random = np.random.default_rng(0)
    users = np.repeat(np.arange(500), 20)
    chances = random.uniform(0.05, 0.95, len(users))
    labels = random.random(len(users)) < chances
    logits = np.log(chances / (1 - chances))
    error, low, high = calibration_error(logits, labels, users)
    assert low <= error <= high < 0.03
    raised = np.log((chances * 0.5 + 0.5) / (0.5 - chances * 0.5))  # of (1 + p) / 2
    error, low, high = calibration_error(raised, labels, users)
    assert low < np.mean((1 - chances) / 2) < high
    assert error > 0.2
