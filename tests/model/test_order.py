"""Transitions are one distribution over the catalogue, as the dense table has it; an order is read as written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from npu_gr.core.errors import CheckpointError
from npu_gr.model.order import DECAY, FILE, LAST_EVENTS, WEIGHTS, Order, load_order, save_order

ITEMS = 12


def an_order(seed: int = 0, width: int = 4) -> Order:
    """Random successors, some items with none, and what probability they leave for the rest."""
    random = np.random.default_rng(seed)
    successors = np.full((ITEMS, width), -1, np.int32)
    log_prob = np.full((ITEMS, width), -np.inf, np.float32)
    for row in range(ITEMS):
        kept = int(random.integers(0, width + 1))
        if kept:
            successors[row, width - kept :] = np.sort(random.choice(ITEMS, kept, replace=False))
            log_prob[row, width - kept :] = np.log(random.dirichlet(np.ones(kept + 1))[:kept])
    popularity = np.log(random.dirichlet(np.ones(ITEMS))).astype(np.float32)
    weights = dict(zip(WEIGHTS, (0.5, 0.25, 0.125, -2.0), strict=True))
    return Order(task="click", weights=weights, successors=successors, log_prob=log_prob, popularity=popularity)


def dense(order: Order) -> npt.NDArray[np.float64]:
    """P(column | row), [items, items]."""
    share = np.exp(order.popularity.astype(np.float64))
    table = np.zeros((ITEMS, ITEMS))
    for row in range(ITEMS):
        kept = order.successors[row] >= 0
        items = order.successors[row][kept]
        table[row, items] = np.exp(order.log_prob[row][kept].astype(np.float64))
        others = np.setdiff1d(np.arange(ITEMS), items)
        table[row, others] = (1 - table[row].sum()) * share[others] / share[others].sum()
    return table


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_events", [1, 3, LAST_EVENTS, 9])
def test_transitions_are_the_dense_tables(seed: int, num_events: int) -> None:
    order = an_order(seed)
    history = np.random.default_rng(seed).integers(0, ITEMS, num_events)
    recent = history[-LAST_EVENTS:][::-1]
    weights = DECAY ** np.arange(len(recent))
    want = (weights[:, None] * dense(order)[recent]).sum(0) / weights.sum()
    candidates = np.random.default_rng(seed).permutation(ITEMS)
    got = order.transitions(history, candidates)
    np.testing.assert_allclose(got, np.log(want[candidates]), rtol=1e-5)
    assert np.exp(got.astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)


def test_a_new_item_is_neutral_and_leads_to_what_is_popular() -> None:
    order = an_order()
    every = np.arange(ITEMS + 2)
    old = np.arange(ITEMS)
    share = np.exp(order.popularity.astype(np.float64))
    alone = order.transitions(every[:0], every[ITEMS:])
    assert np.exp(alone) == pytest.approx(share.mean())
    for history in (every[:0], old, np.array([ITEMS, 3])):
        among = order.transitions(history, every)
        assert among[ITEMS:] == pytest.approx(among[:ITEMS].mean())
    np.testing.assert_allclose(order.transitions(np.array([ITEMS]), old), np.log(share / share.sum()), rtol=1e-5)
    assert order.transitions(old, every)[:ITEMS].tolist() == order.transitions(old, old).tolist()
    assert order.top(np.array([ITEMS, 3]), 4).tolist() == order.top(np.array([3]), 4).tolist()
    assert len(order.top(np.array([ITEMS]), 4)) == 0


def test_of_an_empty_history_the_popularity_is_left() -> None:
    order = an_order()
    nothing = np.empty(0, np.int64)
    assert np.array_equal(order.transitions(nothing, np.array([3, 1])), order.popularity[[3, 1]])
    assert len(order.top(nothing, 5)) == 0


def test_an_order_without_any_transition_is_the_popularity() -> None:
    order = an_order(width=0)
    np.testing.assert_allclose(order.transitions(np.array([2]), np.arange(ITEMS)), order.popularity, rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_top_are_the_most_probable_kept_successors(seed: int) -> None:
    order = an_order(seed)
    history = np.random.default_rng(seed).integers(0, ITEMS, 4)
    kept = np.unique(order.successors[history])
    kept = kept[kept >= 0]
    best = kept[np.argsort(-order.transitions(history, kept.astype(np.int64)), kind="stable")]
    assert order.top(history, 3).tolist() == best[:3].tolist()
    assert sorted(order.top(history, 100).tolist()) == kept.tolist()


def test_the_sum_has_each_term_once() -> None:
    one = np.eye(4, dtype=np.float32)
    assert an_order().scores(*one).tolist() == [0.5, 0.25, 0.125, -2.0]


def test_round_trip(tmp_path: Path) -> None:
    assert load_order(tmp_path) is None
    order = an_order()
    save_order(order, tmp_path)
    again = load_order(tmp_path)
    assert again is not None
    assert (again.task, again.weights) == ("click", order.weights)
    for name in ("successors", "log_prob", "popularity"):
        assert np.array_equal(getattr(again, name), getattr(order, name))
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": {"retrieval": 1.0}}, "weights: needs finite retrieval, click, transitions, seen"),
        ({"weights": dict.fromkeys(WEIGHTS, float("nan"))}, "weights: needs finite"),
        ({"popularity": np.full(ITEMS, -np.inf, np.float32)}, "popularity: needs one finite number an item"),
        ({"popularity": np.zeros(3, np.float32)}, "successors and log_prob: need 3 equal rows"),
        ({"successors": np.full((ITEMS, 4), ITEMS, np.int32)}, "successors: need ascending item rows below 12"),
        ({"successors": np.zeros((ITEMS, 4), np.int32)}, "successors: need ascending"),
        ({"log_prob": np.full((ITEMS, 4), 0.1, np.float32)}, "log_prob: needs logs of probabilities"),
    ],
)
def test_what_is_no_order_is_refused(changes: dict[str, Any], words: str) -> None:
    order = an_order()
    parts = {name: getattr(order, name) for name in ("task", "weights", "successors", "log_prob", "popularity")}
    with pytest.raises(ValueError, match=words):
        Order(**(parts | changes))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    save_order(an_order(), tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"order\.safetensors"):
        load_order(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_order(an_order(), tmp_path / "no")
