"""A search keeps significant improvements, ends bad trials early, and keeps its budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from npu_gr.core.errors import ConfigError
from npu_gr.model.hstu import HSTU
from npu_gr.train.data import NextItem, build_log
from npu_gr.train.metrics import F64
from npu_gr.train.rank import train as module
from npu_gr.train.rank.fit import (
    BEHIND,
    Fitted,
    GivesUp,
    SearchedOptions,
    Train,
    changes,
    new_model,
    search,
)
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import event_likelihood, next_item_likelihood
from npu_gr.train.rank.options import LIKE, NEXT, TrainOptions, make_labels
from npu_gr.train.rank.train import train_rank
from tests.train.rank.test_blend import answer
from tests.train.rank.test_train import TINY
from tests.train.synthetic import NUM_ITEMS, planted

Evaluate = Callable[[Fitted], F64]
ASKED = TrainOptions(epochs=4, budget_s=100.0)


class Trainings:
    """Fake trainings: ten seconds each, with a curve and a likelihood by their options."""

    def __init__(self, gain: Callable[[TrainOptions], float], noise: float = 0.0) -> None:
        self.tried: list[TrainOptions] = []
        self.epochs: list[int] = []
        self.clock = 0.0
        self._gain = gain
        self._noise = noise

    def train(self, options: TrainOptions, _: str, gives_up: GivesUp) -> Fitted:
        self.tried.append(options)
        curve: list[float] = []
        for epoch in range(options.epochs):
            self.clock += 10 / options.epochs
            curve.append(-5 - options.epochs / ASKED.epochs / (epoch + 1) + self._gain(options))
            if gives_up((epoch + 1) / options.epochs, curve[-1]):
                break
        self.epochs.append(len(curve))
        return Fitted(HSTU.__new__(HSTU), len(self.tried), tuple(curve))

    def evaluate(self, fitted: Fitted) -> F64:
        noise = np.random.default_rng(fitted.num_epochs).permutation(np.repeat([-1.0, 1.0], 250))
        return fitted.curve[-1] + self._noise * noise


def test_without_a_budget_what_was_asked_for_is_trained_alone() -> None:
    trainings = Trainings(lambda options: 1.0)
    found = search(
        msgspec.structs.replace(ASKED, budget_s=0.0), trainings.train, trainings.evaluate
    )
    assert (found.num_trials, found.changes, len(trainings.tried)) == (1, {}, 1)


def test_matrix_factorisation_is_an_input_where_the_validation_prefers_it() -> None:
    for gain, want in ((0.5, {"computed": ("hour", "mf_score")}), (-0.5, {})):
        trainings = Trainings(lambda options, gain=gain: gain * ("mf_score" in options.computed))  # type: ignore[misc]
        asked = msgspec.structs.replace(ASKED, budget_s=15.0, computed=("hour",))
        found = search(
            asked,
            trainings.train,
            trainings.evaluate,
            lambda of=trainings: of.clock,  # type: ignore[misc]
            has_likes=True,
        )
        assert found.changes == want
        assert trainings.tried[1].computed == ("hour", "mf_score")
    assert not any("computed" in change for change in changes(ASKED))


def test_what_is_better_stays_and_the_rest_is_tried_on_it() -> None:
    trainings = Trainings(
        lambda options: 0.1 * (options.dropout < 0.2) + 0.1 * (options.window_tokens == 60)
    )
    found = search(
        msgspec.structs.replace(ASKED, budget_s=1e9),
        trainings.train,
        trainings.evaluate,
        lambda: 0.0,
    )
    assert found.changes == {"dropout": 0.15, "window_tokens": 60}
    assert (found.options.dropout, found.options.window_tokens) == (0.15, 60)
    assert found.num_trials == len(trainings.tried) == 1 + len(list(changes(ASKED)))
    assert trainings.tried[2].dropout == 0.15


def test_a_gain_within_chance_changes_nothing() -> None:
    for noise, want in ((0.0, {"dropout": 0.15}), (1.0, {})):
        trainings = Trainings(lambda options: 0.01 * (options.dropout < 0.2), noise)
        assert search(ASKED, trainings.train, trainings.evaluate, lambda: 0.0).changes == want


def test_a_trial_that_falls_behind_is_given_up_after_the_first_look() -> None:
    trainings = Trainings(lambda options: -2 * BEHIND * (options != ASKED))
    found = search(ASKED, trainings.train, trainings.evaluate, lambda: 0.0)
    assert found.changes == {}
    assert trainings.epochs[0] == 4
    assert set(trainings.epochs[1:]) == {1, 2}  # a quarter of its epochs: of 8 two


def test_the_seconds_end_it_and_never_the_first_trial() -> None:
    trainings = Trainings(lambda options: 0.0)
    search(
        msgspec.structs.replace(ASKED, budget_s=25.0),
        trainings.train,
        trainings.evaluate,
        lambda: trainings.clock,
    )
    assert len(trainings.tried) == 3
    assert trainings.epochs == [4, 4, 2]
    trainings = Trainings(lambda options: 0.0)
    search(
        msgspec.structs.replace(ASKED, budget_s=1.0),
        trainings.train,
        trainings.evaluate,
        lambda: trainings.clock,
    )
    assert trainings.epochs == [4]


def test_the_likelihood_is_that_of_the_definition() -> None:
    log = build_log(planted(), [], "leave-one-out")
    torch.manual_seed(0)
    model = new_model(log, [], (NEXT, LIKE), TINY).eval()
    model.items.freeze()
    labels = make_labels(log, (NEXT, LIKE))
    targets = [log.next_items()[4], NextItem(7, int(log.starts[7]) + 2)]
    found = next_item_likelihood(LogInputs(log, model), model, targets).log_probabilities
    both = event_likelihood(LogInputs(log, model), model, targets, labels)

    for place, target in enumerate(targets):
        own = int(log.items[target.event])
        history = set(log.items[log.starts[target.user] : target.event].tolist())
        logits = (
            model.items.vectors()
            @ answer(model, log, target, np.array([NUM_ITEMS]), is_next=True)[0]
        )
        among = [item for item in range(NUM_ITEMS) if item not in history or item == own]
        want = float(logits[own] - torch.logsumexp(logits[among], 0))
        assert found[place] == pytest.approx(want, abs=1e-5)
        like = float(answer(model, log, target, np.array([own]))[0, 1])
        is_liked = log.values[target.event] >= 4
        assert both[place] - want == pytest.approx(
            -np.log1p(np.exp(-like if is_liked else like)), abs=1e-5
        )


def test_what_ranks_better_but_makes_the_labels_less_likely_is_not_kept() -> None:
    for loss, want in ((0.0, {"dropout": 0.15}), (0.1, {})):
        trainings = Trainings(lambda options: 0.1 * (options.dropout < 0.2))
        worse = {2: loss}  # of the second trial, which has less dropout
        found = search(
            ASKED,
            trainings.train,
            trainings.evaluate,
            lambda: 0.0,
            likes=lambda fitted, worse=worse: np.full(9, -worse.get(fitted.num_epochs, 0.0)),  # type: ignore[misc]
        )
        assert found.changes == want


def test_a_search_of_a_large_catalogue_compares_by_what_its_epochs_are_chosen_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluated: list[tuple[Fitted, F64]] = []

    def spied(
        options: TrainOptions, train: Train, evaluate: Evaluate, **of: Any
    ) -> SearchedOptions:
        found = search(options, train, evaluate, **of)
        evaluated.append((found.fitted, evaluate(found.fitted)))
        return found

    monkeypatch.setattr(module, "search", spied)
    options = msgspec.structs.replace(TINY, budget_s=1e-3, max_softmax_items=NUM_ITEMS - 1)
    _, found = train_rank(planted(), [], options)
    assert "best of 1 settings tried: the given options" in found.text()
    [(fitted, scores)] = evaluated
    assert np.log(scores.mean()) == pytest.approx(fitted.curve[fitted.num_epochs - 1], abs=1e-6)
    assert np.rint(1 / scores) == pytest.approx(1 / scores)


def test_without_a_validation_there_is_nothing_to_search_on() -> None:
    options = msgspec.structs.replace(TINY, budget_s=1.0, tasks=(LIKE,))
    with pytest.raises(ConfigError, match="budget_s: no user has two trained events"):
        train_rank(planted(), [], options)


def test_mf_score_is_chosen_by_the_labels_of_two_short_trainings() -> None:
    asked = msgspec.structs.replace(ASKED, budget_s=0.0, epochs=16, choose_mf_score=True)
    for gain, want in ((0.5, {"computed": ("mf_score",)}), (-0.5, {})):
        trainings = Trainings(lambda options, gain=gain: gain * ("mf_score" in options.computed))  # type: ignore[misc]
        found = search(asked, trainings.train, trainings.evaluate, likes=trainings.evaluate)
        assert found.changes == want
        assert [one.epochs for one in trainings.tried] == [4, 4, 16]
        assert found.options == msgspec.structs.replace(asked, **want)
    trainings = Trainings(lambda options: 1.0)
    search(asked, trainings.train, trainings.evaluate)  # no labels: nothing to choose by
    assert len(trainings.tried) == 1
