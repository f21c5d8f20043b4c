"""The self-tests reject a model whose scores carry no information, and name the reason."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import CheckpointError
from npu_gr.engine.sanity import check_scores, check_weights
from tests.models import tiny_model

NAMES = ("click", "like")
GOOD = np.random.default_rng(0).normal(size=(2, 5, 2)).astype(np.float32)


def found(logits: np.ndarray) -> str:
    with pytest.raises(CheckpointError) as error:
        check_scores(logits, NAMES, "checkpoint m")
    return str(error.value)


def test_scores_that_differ_pass() -> None:
    check_scores(GOOD, NAMES, "m")
    check_scores(GOOD[:1], NAMES, "m")
    check_scores(GOOD[:, :1], NAMES, "m")
    check_scores(np.zeros((1, 1, 2), np.float32), NAMES, "m")  # nothing to differ from


def test_scores_that_say_nothing_are_rejected() -> None:
    assert "all 5 candidates have the same score of click, 0" in found(np.zeros_like(GOOD))
    one_task = GOOD.copy()
    one_task[..., 1] = 3.5
    assert "all 5 candidates have the same score of like, 3.5" in found(one_task)
    by_history = np.repeat(GOOD[:, :1], 5, axis=1)
    assert "all 5 candidates have the same score of click" in found(by_history)
    assert "the same for 2 different histories" in found(np.repeat(GOOD[:1], 2, axis=0))


@given(place=st.integers(0, GOOD.size - 1), value=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_one_score_that_is_no_number_is_rejected(place: int, value: float) -> None:
    broken = GOOD.copy()
    broken.flat[place] = value
    assert f"1 of 10 scores of {NAMES[place % 2]} are not finite" in found(broken)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_named(value: float) -> None:
    model = tiny_model()
    check_weights(model, "checkpoint m")
    name, weight = list(model.named_parameters())[5]
    with torch.no_grad():
        weight.view(-1)[3] = value
    with pytest.raises(CheckpointError) as error:
        check_weights(model, "checkpoint m")
    assert (f"1 of {weight.numel()} values of {name} are not finite, the first is {value}") in str(
        error.value
    )
