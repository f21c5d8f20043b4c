"""The schedule, the moving average and the early stopping that every trainer's steps share."""

from __future__ import annotations

import pytest
import torch

from npu_gr.train.steps import EarlyStopping, average, schedule


def test_a_training_stops_after_patience_validations_without_a_best_one() -> None:
    stopping = EarlyStopping(patience=2)
    assert [stopping.is_best(score) for score in (0.0, 0.3, 0.3)] == [True, True, False]
    assert not stopping.is_over
    assert not stopping.is_best(0.1)
    assert stopping.is_over
    assert stopping.is_best(0.4)
    assert not stopping.is_over
    assert stopping.best == 0.4


def test_patience_0_never_stops() -> None:
    stopping = EarlyStopping(patience=0)
    for _ in range(100):
        stopping.is_best(0.1)
    assert not stopping.is_over


def test_the_rate_rises_to_all_of_it_and_falls_to_nothing() -> None:
    assert schedule(0.0, 0.1) == 0.0
    assert schedule(0.05, 0.1) == pytest.approx(0.5)
    assert schedule(0.1, 0.1) == 1.0
    assert schedule(0.55, 0.1) == pytest.approx(0.5)
    assert schedule(1.0, 0.1) == pytest.approx(0.0)
    assert schedule(0.0, 0.0) == 1.0


def test_the_average_forgets_the_initial_weights_soon_and_decay_0_is_no_average() -> None:
    averages = [torch.zeros(3)]
    average(0.9, averages, [torch.ones(3)], 0)
    assert averages[0].tolist() == pytest.approx([0.9] * 3)  # the first update keeps a tenth
    average(0.0, averages, [torch.full((3,), 5.0)], 1000)
    assert averages[0].tolist() == [5.0] * 3
