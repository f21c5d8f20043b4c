"""Each kind of neighbours equals its formula, and the validation chooses the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from npu_gr.core.arrays import F32, I64
from npu_gr.model.blend import WEIGHTS, ScoreBlend
from npu_gr.model.item_similarity import LAST_ITEMS, Neighbours
from npu_gr.train.baselines import graph_of
from npu_gr.train.data import InteractionLog, NextItem, build_log
from npu_gr.train.linear import EASE
from npu_gr.train.metrics import F64
from npu_gr.train.rank import blend_choice
from npu_gr.train.rank import item_similarity as module
from npu_gr.train.rank.blend import ItemList, count_transitions, fit_blend
from npu_gr.train.rank.blend_choice import (
    choose_kind,
    list_likelihood,
    ndcg_cross_fitted,
    ndcg_of_lists,
)
from npu_gr.train.rank.item_similarity import (
    KINDS,
    MANY_ITEMS,
    USUAL,
    NeighbourKind,
    count_kinds,
    count_neighbours,
    ease_neighbours,
    linear_neighbours,
    linear_width,
)
from tests.train.synthetic import NUM_ITEMS, planted

EVERY = np.arange(NUM_ITEMS)


@pytest.fixture(scope="module", params=[20, 60])  # fewer users than items, and more
def log(request: pytest.FixtureRequest) -> InteractionLog:
    return build_log(planted(num_users=request.param, num_events=7), [], "leave-one-out")


def test_the_neighbours_of_ease_score_as_ease_does_above_0(log: InteractionLog) -> None:
    model = EASE(graph_of(log), NUM_ITEMS, 2.0)
    found = ease_neighbours(model, NUM_ITEMS)
    weights = model.weights(0, NUM_ITEMS).numpy()
    assert (weights < 0).any()
    for item in EVERY:
        want = weights[item].clip(0)
        np.testing.assert_allclose(found.means(np.array([item]), EVERY), want, rtol=1e-6)
    user = int(log.num_trained.argmax())
    own = np.unique(log.items[log.starts[user] : log.starts[user] + log.num_trained[user]])
    scores = model.scores(torch.tensor([user]))[0].numpy()
    others = np.setdiff1d(EVERY, own)  # with their weights below 0 they are what EASE itself says
    np.testing.assert_allclose(weights[own].sum(0)[others], scores[others], atol=1e-5)


def test_linear_ones_score_as_ease_does(log: InteractionLog) -> None:
    found = NeighbourKind(MANY_ITEMS, 2.0, is_summed=True, is_linear=True).counted(log)
    model = EASE(graph_of(log), NUM_ITEMS, 2.0)
    assert (found.similarity < 0).any()
    for user, count in enumerate(log.num_trained):
        history = log.items[log.starts[user] : log.starts[user] + count]
        # to the items of the history EASE's scores add themselves, by K
        others = np.setdiff1d(EVERY, history)
        scores = model.scores(torch.tensor([user]))[0].numpy()
        np.testing.assert_allclose(found.sums(history, others), scores[others], atol=1e-5)


@pytest.mark.parametrize("block", [7, 256])
def test_the_strongest_linear_weights_are_kept_of_either_sign(
    log: InteractionLog, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(module, "MANY_NEIGHBOURS", 3)
    monkeypatch.setattr(module, "BLOCK_ROWS", block)
    found = NeighbourKind(MANY_ITEMS, 2.0, is_summed=True, is_linear=True).counted(log)
    weights = EASE(graph_of(log), NUM_ITEMS, 2.0).weights(0, NUM_ITEMS).numpy()
    for item in EVERY:
        strongest = np.sort(np.abs(weights[item]))[-3:]
        kept = found.items[item][found.items[item] >= 0]
        assert len(kept) == np.count_nonzero(strongest)
        np.testing.assert_array_equal(
            found.similarity[item][found.items[item] >= 0], weights[item, kept]
        )
        np.testing.assert_array_equal(
            np.sort(np.abs(weights[item, kept])), strongest[strongest > 0]
        )


def test_the_highest_weights_are_kept(log: InteractionLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NEIGHBOURS", 2)
    monkeypatch.setattr(module, "BLOCK_ROWS", 7)
    model = EASE(graph_of(log), NUM_ITEMS, 2.0)
    found = ease_neighbours(model, NUM_ITEMS)
    weights = model.weights(0, NUM_ITEMS).numpy()
    for item in EVERY:
        best = [
            other
            for other in np.argsort(-weights[item], kind="stable")[:2].tolist()
            if weights[item, other] > 0
        ]
        assert found.items[item].tolist() == [-1] * (2 - len(best)) + sorted(best)


def test_every_kind_is_counted_with_its_events(log: InteractionLog) -> None:
    found = count_kinds(log)
    assert tuple(found) == KINDS
    assert KINDS[0] == USUAL
    for kind, neighbours in found.items():
        alone = kind.counted(log)
        if not kind.is_linear:
            ease = None if kind.ridge is None else EASE(graph_of(log), NUM_ITEMS, kind.ridge)
            want = count_neighbours(log) if ease is None else ease_neighbours(ease, NUM_ITEMS)
            assert np.array_equal(alone.items, want.items)
            assert np.array_equal(alone.similarity, want.similarity)
        assert np.array_equal(neighbours.items, alone.items)
        assert np.array_equal(neighbours.similarity, alone.similarity)
        assert neighbours.last_items == kind.last_items == alone.last_items
        assert neighbours.is_summed == kind.is_summed == alone.is_summed
        assert neighbours.is_linear == kind.is_linear == alone.is_linear
    assert [kind.name for kind in KINDS] == [
        "cosine, last 500, summed",
        "cosine, last 5",
        "cosine, last 500",
        "EASE, ridge 100, last 500",
        "EASE, ridge 100, last 500, linear",
        "EASE, ridge 1000, last 500",
    ]


def long_file(few: InteractionLog) -> tuple[InteractionLog, I64]:
    """The log with a long file of items, of which few have an event; and the rows of these."""
    rows = np.arange(NUM_ITEMS) * 11 + 5
    ids = np.arange(11 * NUM_ITEMS + 200)
    return replace(few, items=rows[few.items], item_ids=ids), rows


def the_slow_way(kind: NeighbourKind, log: InteractionLog) -> Neighbours:
    """Walk all items by all items."""
    assert kind.ridge is not None
    model = EASE(graph_of(log), log.num_items, kind.ridge)
    if not kind.is_linear:
        return ease_neighbours(model, log.num_items)

    def weights(start: int, stop: int) -> F32:
        found: F32 = model.weights(start, stop).numpy()
        return found

    return linear_neighbours(weights, log.num_items, linear_width(log.num_items))


def test_items_without_an_event_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    few = build_log(planted(num_users=20, num_events=7), [], "leave-one-out")
    log, rows = long_file(few)
    monkeypatch.setattr(module, "BLOCK_ROWS", 7)
    monkeypatch.setattr(module, "MAX_NEIGHBOURS", 4)
    monkeypatch.setattr(module, "MAX_TABLE", 9 * log.num_items)  # the width is by all items
    steps: list[tuple[int, int]] = []
    found = count_kinds(log, lambda *step: steps.append(step))
    assert steps == [(0, 6), (3, 6), (5, 6), (6, 6)]
    assert tuple(found) == KINDS
    for kind, neighbours in found.items():
        assert (np.delete(neighbours.items, rows, 0) == -1).all()
        assert len(neighbours.items) == log.num_items
        if kind.ridge is not None:
            slow = the_slow_way(kind, log)
            assert np.array_equal(neighbours.items, slow.items)
            assert neighbours.similarity.tobytes() == slow.similarity.tobytes()
            assert neighbours.items.shape[1] == (9 if kind.is_linear else 4)


def test_more_users_than_items_with_events_invert_the_items() -> None:
    """The slow way inverts users by users there, which rounds in another way."""
    few = build_log(planted(num_users=60, num_events=7), [], "leave-one-out")
    log, _ = long_file(few)
    every = np.arange(log.num_items)
    for kind, neighbours in count_kinds(log).items():
        if kind.ridge is not None:
            slow = the_slow_way(kind, log)
            for item in every[5:300:11]:
                np.testing.assert_allclose(
                    neighbours.sums(np.array([item]), every),
                    slow.sums(np.array([item]), every),
                    atol=1e-6,
                )


@pytest.mark.parametrize("bound", ["MAX_EDGES", "ease_is_too_large"])
def test_a_log_that_is_too_large_for_ease_has_the_cosine(
    log: InteractionLog, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(module, bound, 10 if bound == "MAX_EDGES" else lambda _: "too large")
    assert [kind.ridge for kind in count_kinds(log)] == [None, None, None]


def lists_of(log: InteractionLog, targets: list[NextItem]) -> list[ItemList]:
    terms = {name: np.zeros(NUM_ITEMS, np.float32) for name in WEIGHTS}
    return [ItemList(EVERY, **terms) for _ in targets]


def orders(log: InteractionLog, *kinds: NeighbourKind) -> dict[NeighbourKind, ScoreBlend]:
    transitions = count_transitions(log, "click")
    return {kind: replace(transitions, neighbours=kind.counted(log)) for kind in kinds}


def test_the_kind_that_orders_the_validation_better_is_chosen() -> None:
    log = build_log(planted(num_users=60, num_events=30), [], "leave-one-out")
    targets = log.next_items()
    # the last item alone leads to the next one
    counted = orders(log, NeighbourKind(MANY_ITEMS), NeighbourKind(1))
    lists = lists_of(log, targets)
    found = choose_kind(counted, log, lists, targets)
    assert found.kind == NeighbourKind(1)
    assert found.blend.neighbours is counted[found.kind].neighbours
    for kept, (user, event) in zip(found.lists, targets, strict=True):
        assert np.array_equal(
            kept.neighbours, found.blend.alike(log.items[log.starts[user] : event], EVERY)
        )
    figures = ndcg_of_lists(found.blend, log, found.lists, targets)
    own = log.items[[event for _, event in targets]]
    for figure, kept, item in zip(figures, found.lists, own, strict=True):
        # most of the next items are repeats, so all items compete
        scores = kept.scores(found.blend)
        # ties count half
        place = (scores > scores[item]).sum() + ((scores == scores[item]).sum() - 1) / 2
        assert figure == pytest.approx(1 / np.log2(place + 2) if place < 10 else 0)

    likely = list_likelihood(found.blend, log, found.lists, targets)
    scores = np.stack([kept.scores(found.blend) for kept in found.lists]).astype(np.float64)
    want = np.log(np.exp(scores)[np.arange(len(own)), own] / np.exp(scores).sum(1))
    np.testing.assert_allclose(likely, want, rtol=1e-6)
    without = [
        ItemList(*(column[kept.items != item] for column in kept))
        for kept, item in zip(lists, own, strict=True)
    ]
    assert len(list_likelihood(found.blend, log, without, targets)) == 0


def test_each_user_is_evaluated_by_weights_fitted_on_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each half of the users needs another term, so weights of one do not help the other."""
    monkeypatch.setattr(blend_choice, "FOLDS", 2)
    log = build_log(planted(num_users=60, num_events=30), [], "leave-one-out")
    targets = log.next_items()
    lists = []
    for row, (found, (_, event)) in enumerate(zip(lists_of(log, targets), targets, strict=True)):
        is_next = (log.items[event] == EVERY).astype(np.float32)
        lists.append(
            found._replace(click=is_next) if row % 2 else found._replace(popularity=is_next)
        )
    order = count_transitions(log, "click")
    assert (ndcg_of_lists(fit_blend(order, log, lists, targets), log, lists, targets) == 1).all()
    assert not (ndcg_cross_fitted(order, log, lists, targets) == 1).any()
    assert len(ndcg_cross_fitted(order, log, lists[:1], targets[:1])) == 1  # there is no other user


@pytest.mark.parametrize(
    ("places", "likely", "is_chosen"),
    [
        ([0.3, 0.3, 0.4, 0.3], [-9.0, -9.0, -9.0, -9.0], True),  # what is shown is surely better
        # or maybe, and the next items are surely likelier
        ([0.9, -0.3, -0.3, -0.3], [0.3, 0.3, 0.4, 0.3], True),
        ([0.9, -0.3, -0.3, -0.3], [0.9, 0.0, 0.0, -0.8], False),  # neither tells
        ([-0.1, 0.0, 0.0, 0.0], [0.3, 0.3, 0.4, 0.3], False),  # it is worse
        ([0.0, 0.0, 0.0, 0.0], [], False),  # no list has its next item
    ],
)
def test_a_kind_is_chosen_by_what_is_shown_and_else_by_the_likelihood(
    log: InteractionLog,
    monkeypatch: pytest.MonkeyPatch,
    places: list[float],
    likely: list[float],
    is_chosen: bool,
) -> None:
    targets = log.next_items()[:4]
    counted = orders(log, NeighbourKind(LAST_ITEMS), NeighbourKind(MANY_ITEMS))

    def figures(gaps: list[float], order: ScoreBlend) -> F64:
        assert order.neighbours is not None
        return np.array(gaps) * (order.neighbours.last_items == MANY_ITEMS)

    monkeypatch.setattr(blend_choice, "ndcg_of_lists", lambda order, *_: figures(places, order))
    monkeypatch.setattr(blend_choice, "list_likelihood", lambda order, *_: figures(likely, order))
    found = choose_kind(counted, log, lists_of(log, targets), targets)
    assert found.kind == (NeighbourKind(MANY_ITEMS) if is_chosen else NeighbourKind(LAST_ITEMS))


@pytest.mark.parametrize(
    ("places", "is_chosen"),
    [([0.3, 0.3, 0.4, 0.3], True), ([0.9, -0.3, -0.3, -0.3], False)],  # surely better, and maybe
)
def test_a_kind_that_reads_more_has_to_show_better_lists(
    log: InteractionLog, monkeypatch: pytest.MonkeyPatch, places: list[float], is_chosen: bool
) -> None:
    targets = log.next_items()[:4]
    usual, linear = KINDS[0], next(kind for kind in KINDS if kind.is_linear)

    def figures(gaps: list[float], order: ScoreBlend) -> F64:
        assert order.neighbours is not None
        return np.array(gaps) * order.neighbours.is_linear

    monkeypatch.setattr(blend_choice, "ndcg_of_lists", lambda order, *_: figures(places, order))
    monkeypatch.setattr(
        blend_choice, "list_likelihood", lambda order, *_: figures([0.3, 0.3, 0.4, 0.3], order)
    )
    found = choose_kind(orders(log, usual, linear), log, lists_of(log, targets), targets)
    assert found.kind == (linear if is_chosen else usual)


def test_of_equal_kinds_the_simplest_stays(log: InteractionLog) -> None:
    targets = log.next_items()
    same = orders(log, NeighbourKind(50), NeighbourKind(MANY_ITEMS))  # no history is as long
    assert choose_kind(same, log, lists_of(log, targets), targets).kind == NeighbourKind(50)
