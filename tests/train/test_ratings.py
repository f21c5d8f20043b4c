"""Baselines find what they are made for, read no future, and count exactly."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from npu_gr.core.feature_schema.factors import PENALTY
from npu_gr.train.baselines import Markov, MatrixFactorisation, Means, Popularity
from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.next_item import Baseline
from npu_gr.train.rank.evaluate import evaluate_baseline
from tests.train.synthetic import planted


@pytest.fixture(scope="module")
def log() -> InteractionLog:
    return build_log(planted(), [], "leave-one-out")


def test_markov_finds_the_planted_rule_and_popularity_does_not(log: InteractionLog) -> None:
    likes = log.values >= 4
    assert evaluate_baseline(log, Markov(log), likes, log.next_items()).hr_at_10 > 0.9
    assert evaluate_baseline(log, Popularity(log), likes, log.next_items()).hr_at_10 < 0.6


def test_markov_counts_pairs_of_one_user(log: InteractionLog) -> None:
    last = int(log.items[log.starts[0] + log.num_trained[0] - 1])
    counts = np.zeros(log.num_items)
    for user in range(log.num_users):
        row = log.items[log.starts[user] : log.starts[user] + log.num_trained[user]].tolist()
        for before, after in pairwise(row):
            counts[after] += before == last
    assert np.array_equal(np.floor(Markov(log).next_items(log, 0)), counts)


@pytest.mark.parametrize("kind", [Means, MatrixFactorisation])
def test_generous_users_are_recognised(
    kind: type[Means | MatrixFactorisation], log: InteractionLog
) -> None:
    assert evaluate_baseline(log, kind(log), log.values >= 4, log.next_items()).auc > 0.85


@pytest.mark.parametrize("kind", [Means, MatrixFactorisation])
def test_an_event_is_scored_before_it_is_known(
    kind: type[Means | MatrixFactorisation], log: InteractionLog
) -> None:
    baseline: Baseline = kind(log)
    before = baseline.liking(log)
    changed = log.actions.copy()
    changed[~log.trained] = 1 - changed[~log.trained]  # each user's last event
    other = InteractionLog(
        **{name: getattr(log, name) for name in InteractionLog.__slots__} | {"actions": changed}
    )
    after = baseline.liking(other)
    assert before is not None
    assert after is not None
    np.testing.assert_allclose(before, after)


def test_folding_in_the_training_history_solves_the_user_it_was_fitted_with(
    log: InteractionLog,
) -> None:
    factors = MatrixFactorisation(log)
    part = slice(log.starts[3], log.starts[3] + log.num_trained[3])
    rows = factors._fold_in(log.items[part], log.values[part])
    seen = factors.items[log.items[part]]
    design = np.concatenate([np.ones((len(seen), 1)), seen[:, 1:]], axis=1)
    residual = log.values[part] - factors.mean - seen[:, 0]
    want = np.linalg.solve(design.T @ design + PENALTY, design.T @ residual)
    np.testing.assert_allclose(rows[-1], want, atol=1e-8)
    np.testing.assert_array_equal(rows[0], 0)
