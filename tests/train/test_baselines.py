"""Baselines find a planted rule, are tuned on a validation; those too large are left out."""

from __future__ import annotations

import numpy as np
import pytest

from npu_gr.train.baselines import (
    DecayedTransitions,
    Markov,
    OwnHistory,
    fit_baselines,
    skipped_baselines,
)
from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.evaluate import Evaluator, HeldOut, unique_edges
from npu_gr.train.linear import Candidate, tune
from npu_gr.train.next_item import baseline_figures
from tests.train.synthetic import planted

NAMES = [
    "popularity",
    "Markov counts",
    "own recency and frequency",
    "decayed transitions",
    "ItemKNN",
    "EASE",
    "PureSVD",
]


@pytest.fixture(scope="module")
def log() -> InteractionLog:
    return build_log(planted(), [], "leave-one-out")


def test_all_are_fitted_and_those_that_know_the_order_find_the_planted_rule(
    log: InteractionLog,
) -> None:
    baselines = fit_baselines(log, "leave-one-out", 0)
    found = {b.name: baseline_figures(log, log.next_items(), b).hr_at_10 for b in baselines}
    assert list(found) == NAMES
    assert skipped_baselines(log) == ()
    assert found["decayed transitions"] > 0.9
    assert all(value > 0 for value in found.values())


def test_own_items_go_by_how_often_and_how_lately_the_user_had_them(log: InteractionLog) -> None:
    user = 3
    start, count = log.starts[user], log.num_trained[user]
    history = log.items[start : start + count].tolist()
    markov = Markov(log)
    follows = markov.next_items(log, user)
    want = 0.3 * follows / follows.sum()
    for age, item in enumerate(reversed(history)):
        want[item] += 0.97**age
    np.testing.assert_allclose(OwnHistory(markov).next_items(log, user), want)


def test_the_last_event_decides_nothing(log: InteractionLog) -> None:
    """What is asked for is no part of the settings, and of no model."""
    changed = log.items.copy()
    changed[~log.trained] = (changed[~log.trained] + 1) % log.num_items
    other = InteractionLog(
        **{name: getattr(log, name) for name in InteractionLog.__slots__} | {"items": changed}
    )
    for one, two in zip(
        *(fit_baselines(each, "leave-one-out", 0) for each in (log, other)), strict=True
    ):
        for user in (0, 5):
            np.testing.assert_array_equal(one.next_items(log, user), two.next_items(other, user))


def test_what_is_too_large_is_left_out_in_words(
    log: InteractionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_gr.train.linear.MAX_SIDE", 3)
    (words,) = skipped_baselines(log)
    found = fit_baselines(log, "leave-one-out", 0)
    assert [b.name for b in found] == [name for name in NAMES if name != "EASE"]
    assert words.startswith("EASE is skipped: ")
    monkeypatch.setattr("npu_gr.train.baselines.MAX_EDGES", 10)
    (words,) = skipped_baselines(log)
    assert [b.name for b in fit_baselines(log, "leave-one-out", 0)] == NAMES[:4]
    assert "the limit is 10" in words


def test_decayed_transitions_are_their_formula(log: InteractionLog) -> None:
    user = 4
    rows = [
        log.items[log.starts[u] : log.starts[u] + log.num_trained[u]].tolist()
        for u in range(log.num_users)
    ]
    counts = np.zeros((log.num_items, log.num_items))
    for row in rows:
        for at in range(len(row)):
            for lag in range(1, 6):
                if at + lag < len(row):
                    counts[row[at], row[at + lag]] += 0.6 ** (lag - 1)
    popularity = np.bincount(np.concatenate(rows), minlength=log.num_items) / sum(map(len, rows))
    chance = (counts + 10 * popularity) / (counts.sum(1, keepdims=True) + 10)
    want = sum(0.6**age * chance[item] for age, item in enumerate(reversed(rows[user][-5:])))
    np.testing.assert_allclose(DecayedTransitions(log).next_items(log, user), want, rtol=1e-5)


def test_the_better_candidate_is_chosen_with_popularity_where_it_helps() -> None:
    import torch

    class Fixed:
        def __init__(self, table: torch.Tensor) -> None:
            self.table = table

        def scores(self, users: torch.Tensor) -> torch.Tensor:
            return self.table[users]

    random = np.random.default_rng(0)
    goals = random.integers(0, 300, 50)
    degrees = np.ones(300, np.int64)
    good = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    good[torch.arange(50), torch.from_numpy(goals)] += 2
    evaluate = Evaluator.make(
        HeldOut(np.arange(50), goals), unique_edges(np.zeros(0, int), np.zeros(0, int), 50, 300)
    )
    candidates = [
        Candidate("chance", lambda: Fixed(torch.rand(50, 300))),
        Candidate("good", lambda: Fixed(good)),
    ]
    assert tune(candidates, degrees, evaluate).name == "good"
    degrees[goals] = 50
    chosen = tune(candidates[:1], degrees, evaluate)
    assert chosen.weight > 0 or chosen.exponent > 0
    assert chosen.validation > 0.5
