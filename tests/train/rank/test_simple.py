"""The ItemKNN fallback scores as ItemKNN does, and gives way to a better blend."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.model.blend import WEIGHTS, BlendSum, ScoreBlend, load_blend, save_blend
from npu_gr.train.baselines import LinearBaseline, fit_baselines
from npu_gr.train.data import InteractionLog, NextItem, build_log
from npu_gr.train.linear import EXPONENTS
from npu_gr.train.linear import WEIGHTS as POPULARITY_WEIGHTS
from npu_gr.train.metrics import F64, ndcg_of_each
from npu_gr.train.next_item import rank_next_items
from npu_gr.train.rank import blend_choice as module
from npu_gr.train.rank import item_similarity
from npu_gr.train.rank.blend import ItemList, count_transitions
from npu_gr.train.rank.blend_choice import ItemKNNFallback, as_blend, compare_with_item_knn
from tests.train.synthetic import NUM_ITEMS, planted

EVERY = np.arange(NUM_ITEMS)
NO_CLICK = np.zeros(NUM_ITEMS, np.float32)


@pytest.fixture(scope="module")
def log() -> InteractionLog:
    return build_log(planted(num_users=60, num_events=7), [], "leave-one-out")


@pytest.fixture(scope="module")
def knn(log: InteractionLog) -> LinearBaseline:
    found = {one.name: one for one in fit_baselines(log, "leave-one-out", 0)}["ItemKNN"]
    assert isinstance(found, LinearBaseline)
    return found


def histories(log: InteractionLog) -> list[np.ndarray]:
    return [
        log.items[start : start + count]
        for start, count in zip(log.starts, log.num_trained, strict=False)
    ]


def scores(order: ScoreBlend, history: np.ndarray, candidates: np.ndarray = EVERY) -> np.ndarray:
    """What is served, without a shared encoder."""
    own = order.own(history, candidates)
    return BlendSum(order)(history, candidates, None, NO_CLICK[: len(candidates)], own)


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("weight", POPULARITY_WEIGHTS)
def test_it_scores_what_the_baseline_does(
    log: InteractionLog, knn: LinearBaseline, exponent: float, weight: float
) -> None:
    for of_user, of_item in product((0.0, 0.5), (0.0, 0.5)):
        name = f"user exponent {of_user:g}, item exponent {of_item:g}"
        tuned = replace(knn.tuned, name=name, exponent=exponent, weight=weight)
        baseline = replace(knn, tuned=tuned).refitted(log)
        order = as_blend(baseline, log, "click", {"seen": -7.0})
        itself = module._item_knn(baseline).own.numpy() * baseline.tuned.factors.numpy()
        for user, history in enumerate(histories(log)):
            want = baseline.next_items(log, user)
            want[np.unique(history)] += -7.0 - itself[np.unique(history)]
            gaps = scores(order, history) - want
            np.testing.assert_allclose(gaps, gaps[0], atol=1e-5 * np.abs(want).max())


def test_every_instruction_set_serves_it_and_a_file_keeps_it(
    log: InteractionLog, knn: LinearBaseline, tmp_path: Path
) -> None:
    order = as_blend(knn, log, "click", {"seen": -7.0})
    save_blend(order, tmp_path)
    again = load_blend(tmp_path)
    assert again is not None
    assert again.weights == order.weights
    assert again.neighbours is not None
    assert again.neighbours.is_linear
    for history in histories(log):
        want = scores(order, history)
        assert scores(again, history).tobytes() == want.tobytes()
        own = again.own(history, EVERY)
        got = BlendSum(again, CPUBackend())(history, EVERY, None, NO_CLICK, own)
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("weight", [0.0, 0.5, 30.0])
def test_what_is_best_of_all_items_is_found(
    log: InteractionLog, knn: LinearBaseline, weight: float
) -> None:
    """With a small weight neighbours lead, with a large one popular items outside the history."""
    baseline = replace(knn, tuned=replace(knn.tuned, weight=weight)).refitted(log)
    order = as_blend(baseline, log, "click", {})
    assert order.neighbours is not None
    few = replace(
        order.neighbours,
        items=order.neighbours.items.copy(),
        similarity=order.neighbours.similarity.copy(),
    )
    # half of the items lead nowhere
    few.items[: NUM_ITEMS // 2], few.similarity[: NUM_ITEMS // 2] = -1, 0
    sparse = replace(order, neighbours=few)
    for one, history in product((order, sparse), histories(log)[:20]):
        whole = scores(one, history)
        best = np.sort(whole)[::-1]
        for k in (1, 5, NUM_ITEMS):
            found = one.nearest(history, k)
            assert len(set(found.tolist())) == k
            np.testing.assert_allclose(whole[found], best[:k], atol=1e-5 * np.abs(whole).max())


def test_items_without_an_event_change_no_bit_of_it(
    log: InteractionLog, knn: LinearBaseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.arange(NUM_ITEMS) * 11 + 5
    long = replace(log, items=rows[log.items], item_ids=np.arange(11 * NUM_ITEMS + 200))
    baseline = knn.refitted(long)
    model = module._item_knn(baseline)
    monkeypatch.setattr(item_similarity, "BLOCK_ROWS", 7)
    slow = item_similarity.linear_neighbours(
        lambda *of: model.weights(*of).numpy() * baseline.tuned.factors.numpy(),
        long.num_items,
        item_similarity.linear_width(long.num_items),
    )
    found = as_blend(baseline, long, "click", {}).neighbours
    assert found is not None
    assert np.array_equal(found.items, slow.items)
    assert found.similarity.tobytes() == slow.similarity.tobytes()
    assert (np.delete(found.items, rows, 0) == -1).all()


def test_the_highest_weights_are_kept(
    log: InteractionLog, knn: LinearBaseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = as_blend(knn, log, "click", {}).neighbours
    monkeypatch.setattr(item_similarity, "MAX_NEIGHBOURS", 2)
    monkeypatch.setattr(item_similarity, "MAX_TABLE", 3 * NUM_ITEMS)
    monkeypatch.setattr(item_similarity, "BLOCK_ROWS", 7)
    kept = as_blend(knn, log, "click", {}).neighbours
    assert whole is not None
    assert kept is not None
    assert kept.items.shape == (NUM_ITEMS, 3)
    for row in EVERY:
        best = np.sort(whole.similarity[row])[::-1][:3]
        np.testing.assert_array_equal(np.sort(kept.similarity[row])[::-1], best)


def lists_of(log: InteractionLog, targets: list[NextItem]) -> list[ItemList]:
    terms = {name: np.zeros(NUM_ITEMS, np.float32) for name in WEIGHTS}
    found = []
    for user, event in targets:
        seen = np.isin(EVERY, log.items[log.starts[user] : event]).astype(np.float32)
        found.append(ItemList(EVERY, **terms | {"seen": seen}))
    return found


def compared(knn: LinearBaseline, log: InteractionLog, gain: F64) -> tuple[ItemKNNFallback, F64]:
    """Compare a blend whose NDCG@10 is ItemKNN's plus a gain; return ItemKNN's too."""
    targets = log.next_items()
    lists = lists_of(log, targets)
    order = count_transitions(log, "click")
    nothing = np.zeros(len(targets))
    first = compare_with_item_knn(knn, order, nothing, log, lists, targets)
    served = first.counted(log, "click")
    own = (log.items[log.starts[user] : event] for user, event in targets)
    rows = (scores(served, history).astype(np.float64) for history in own)
    figures = ndcg_of_each(rank_next_items(log, targets, rows).evaluated, 10)
    assert first.fitted_less_it.mean == pytest.approx(-figures.mean(), abs=1e-3)  # as it is served
    return compare_with_item_knn(knn, order, figures + gain, log, lists, targets), figures


@pytest.mark.parametrize(
    ("gain", "repeats", "is_served"),
    [
        ([0.0, 0.0, 0.0, 0.0], False, True),  # equals
        ([0.3, 0.3, 0.4, 0.3], False, False),  # surely better
        ([0.9, -0.2, -0.2, -0.2], False, True),  # better by .08, where a standard error is .24
        ([0.9, -0.2, -0.2, -0.2], True, False),  # where people repeat, this is enough
        ([-0.3, -0.3, -0.4, -0.3], True, True),
    ],
)
def test_it_is_served_where_the_fitted_order_is_not_shown_to_be_better(
    log: InteractionLog,
    knn: LinearBaseline,
    monkeypatch: pytest.MonkeyPatch,
    gain: list[float],
    repeats: bool,
    is_served: bool,
) -> None:
    monkeypatch.setattr("npu_gr.train.next_item.MANY_REPEATS", 0.2 if repeats else 1.0)
    short = replace(log, num_trained=np.where(np.arange(log.num_users) < 4, log.num_trained, 0))
    found, _ = compared(knn.refitted(short), short, np.array(gain))
    assert found.is_served == is_served
    assert found.fitted_less_it.mean == pytest.approx(np.mean(gain), abs=1e-3)
    assert ("so ItemKNN is served: user exponent" in found.text()) == is_served
    assert found.text().startswith("the fitted score blend minus ItemKNN: NDCG@10 ")


def test_what_was_seen_weighs_what_the_next_items_say(
    knn: LinearBaseline, log: InteractionLog
) -> None:
    repeats = log.items.copy()
    tested = log.starts[:-1] + log.num_trained
    repeats[tested] = log.items[tested - 1]
    again = replace(log, items=repeats)
    new = log.items.copy()
    for user, event in log.next_items():
        new[event] = np.setdiff1d(EVERY, log.items[log.starts[user] : event])[0]
    for changed, is_wanted in ((again, True), (replace(log, items=new), False)):
        found, _ = compared(knn, changed, np.zeros(log.num_users))
        assert (found.own["seen"] > 1) == is_wanted
        assert (found.own["seen"] < -1) != is_wanted


def test_it_is_counted_in_the_events_of_any_log_with_the_same_settings(
    log: InteractionLog, knn: LinearBaseline
) -> None:
    found, _ = compared(knn, log, np.zeros(log.num_users))
    everything = log.all_trained()
    want = as_blend(knn.refitted(everything), everything, "click", found.own)
    got, before = found.counted(everything, "click"), found.counted(log, "click")
    assert got.neighbours is not None
    assert want.neighbours is not None
    assert before.neighbours is not None
    assert np.array_equal(got.neighbours.similarity, want.neighbours.similarity)
    assert got.weights == want.weights
    assert not np.array_equal(got.popularity, before.popularity)
    assert knn.refitted(everything).tuned.name == knn.tuned.name
    assert torch.equal(knn.refitted(log).tuned.factors, knn.tuned.factors)
