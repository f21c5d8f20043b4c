"""ItemKNN is served unless another blend is better; what is evaluated is served."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from npu_gr.history_store.interactions import Interactions
from npu_gr.train.data import build_log
from npu_gr.train.rank.blend_choice import NOTHING
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.rank.train import train_rank
from tests.train.rank.test_kinds_of_logs import log_of

NUM_USERS = 150
NUM_ITEMS = 400
QUICK = TrainOptions(split="leave-one-out", dim=16, qk_dim=8, v_dim=8, head_dim=16, epochs=1)


@pytest.fixture(scope="module")
def few() -> Interactions:
    """A log too small to fit six weights: six events a user, of one group's items."""
    random = np.random.default_rng(3)
    likes = 1 / np.arange(1, 41)
    items = [
        random.integers(10) + 10 * random.choice(40, 6, replace=False, p=likes / likes.sum())
        for _ in range(NUM_USERS)
    ]
    return log_of(items)


def test_with_few_events_item_knn_is_served_and_evaluated_as_it_is(few: Interactions) -> None:
    checkpoint, found = train_rank(few, [], QUICK)
    assert "so ItemKNN is served: user exponent" in found.text()
    comparison = found.compared_with("ItemKNN")
    assert comparison is not None
    assert all(
        gap.mean == pytest.approx(0, abs=1e-3) for gap in list(comparison.differences.values())[:2]
    )
    order = checkpoint.order
    assert order is not None
    assert order.neighbours is not None
    assert order.neighbours.is_linear
    weights = dict(order.weights)
    assert weights["seen"] < 0
    assert weights["popularity"] >= 0
    weights |= {"seen": 0.0, "popularity": 0.0}
    assert weights == NOTHING | {"neighbours": 1.0}
    # what is served knows the newest events too
    everything = build_log(few, [], "leave-one-out").all_trained()
    uses = np.bincount(everything.items, minlength=everything.num_items) + 0.5
    np.testing.assert_allclose(np.exp(order.popularity), uses / uses.sum(), rtol=1e-5)


def test_without_item_knn_the_fitted_order_is_served(
    few: Interactions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_gr.train.baselines.MAX_EDGES", 10)
    checkpoint, found = train_rank(few, [], msgspec.structs.replace(QUICK, refit=False))
    assert "ItemKNN" not in found.fitting
    assert checkpoint.order is not None
    assert checkpoint.order.neighbours is not None
    assert not checkpoint.order.neighbours.is_linear
    assert "neighbours: " in found.fitting
