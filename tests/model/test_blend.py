"""Transitions are one distribution over the catalogue, as the dense table has it.

An order is read as written.

An order without neighbours, which older versions wrote, is read as they read it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from npu_gr.core.errors import CheckpointError
from npu_gr.model import blend as module
from npu_gr.model.blend import (
    DECAY,
    FILE,
    FOLLOWING,
    LAST_ALONE,
    LAST_EVENTS,
    WEIGHTS,
    ScoreBlend,
    load_blend,
    own_or_next,
    save_blend,
)
from npu_gr.model.item_similarity import Neighbours
from npu_gr.model.own_items import OwnItems

ITEMS = 12


def an_order(seed: int = 0, width: int = 4) -> ScoreBlend:
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
    weights = dict(zip(WEIGHTS, (0.5, 0.25, 0.125, 4.0, 0.75, -2.0, 0.0, 0.0, 0.0), strict=True))
    return ScoreBlend(
        task="click",
        weights=weights,
        successors=successors,
        log_prob=log_prob,
        popularity=popularity,
        neighbours=some_neighbours(),
    )


def some_neighbours() -> Neighbours:
    """The neighbours are the previous item and, more similar, the next; the last item has none."""
    items = np.array([[(row - 1) % ITEMS, (row + 1) % ITEMS] for row in range(ITEMS)], np.int32)
    similarity = np.where(items == (np.arange(ITEMS)[:, None] + 1) % ITEMS, 0.5, 0.25).astype(
        np.float32
    )
    order = np.argsort(items, axis=1)
    items, similarity = (
        np.take_along_axis(items, order, 1),
        np.take_along_axis(similarity, order, 1),
    )
    items[-1], similarity[-1] = -1, 0
    return Neighbours(items, similarity)


def dense(order: ScoreBlend) -> npt.NDArray[np.float64]:
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
@pytest.mark.parametrize("decay", [DECAY, LAST_ALONE])
def test_transitions_are_the_dense_tables(seed: int, num_events: int, decay: float) -> None:
    order = replace(an_order(seed), decay=decay)
    history = np.random.default_rng(seed).integers(0, ITEMS, num_events)
    recent = history[-LAST_EVENTS:][::-1]
    weights = decay ** np.arange(len(recent))
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
    np.testing.assert_allclose(
        order.transitions(np.array([ITEMS]), old), np.log(share / share.sum()), rtol=1e-5
    )
    assert order.transitions(old, every)[:ITEMS].tolist() == order.transitions(old, old).tolist()
    assert (
        order.top(np.array([ITEMS]), 4).tolist() == np.argsort(-share, kind="stable")[:4].tolist()
    )
    assert order.popular(every)[ITEMS:] == pytest.approx(order.popularity.mean())
    assert order.popular(every)[:ITEMS].tolist() == order.popularity.tolist()
    assert np.exp(order.popular(every[ITEMS:])) == pytest.approx(share.mean())


def test_of_an_empty_history_the_popularity_is_left() -> None:
    order = an_order()
    nothing = np.empty(0, np.int64)
    assert np.array_equal(order.transitions(nothing, np.array([3, 1])), order.popularity[[3, 1]])
    assert (
        order.top(nothing, 5).tolist() == np.argsort(-order.popularity, kind="stable")[:5].tolist()
    )


def test_an_order_without_any_transition_is_the_popularity() -> None:
    order = an_order(width=0)
    np.testing.assert_allclose(
        order.transitions(np.array([2]), np.arange(ITEMS)), order.popularity, rtol=1e-5
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_top_are_the_most_probable_of_all_items(seed: int) -> None:
    order = an_order(seed, width=2)
    history = np.random.default_rng(seed).integers(0, ITEMS, 4)
    among = order.transitions(history, np.arange(ITEMS))
    # an item that is no kept successor of any follows by its popularity, so only the first k of
    # these can be found
    kept = {item for item in order.successors[history].ravel().tolist() if item >= 0}
    for k in range(1, ITEMS + 1):
        found = kept | set(np.argsort(-order.popularity, kind="stable")[:k].tolist())
        best = [item for item in np.argsort(-among, kind="stable").tolist() if item in found]
        assert order.top(history, k).tolist() == best[:k]
        others = [item for item in range(ITEMS) if item not in kept]
        most = [item for item in order.top(history, k).tolist() if item in others]
        assert (
            most
            == [
                item
                for item in np.argsort(-order.popularity, kind="stable").tolist()
                if item in others
            ][: len(most)]
        )
    assert sorted(order.top(history, 100).tolist()) == list(range(ITEMS))


def test_few_popular_items_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_POPULAR", 3)
    order = an_order(width=0)
    assert (
        order.top(np.array([2]), 9).tolist()
        == np.argsort(-order.popularity, kind="stable")[:3].tolist()
    )


def test_what_is_alike_is_what_the_neighbours_say() -> None:
    order = an_order()
    assert order.neighbours is not None
    history = np.array([2, 4, 2])
    found = order.alike(history, np.arange(ITEMS))
    want = np.zeros(ITEMS)
    want[[1, 3, 5]] = 0.25, 0.5 + 0.25, 0.5
    np.testing.assert_allclose(found, np.log(1 + 100 * want / 2), rtol=1e-6)
    assert found.dtype == np.float32
    summed = replace(order, neighbours=replace(order.neighbours, is_summed=True))
    np.testing.assert_allclose(
        summed.alike(history, np.arange(ITEMS)), np.log(1 + 10 * want), rtol=1e-6
    )
    assert order.nearest(history, 2).tolist() == summed.nearest(history, 2).tolist() == [3, 5]
    linear = replace(order, neighbours=replace(order.neighbours, is_summed=True, is_linear=True))
    np.testing.assert_allclose(linear.alike(history, np.arange(ITEMS)), want, rtol=1e-6)
    together = (
        linear.weights["neighbours"] * want + linear.weights["popularity"] * linear.popularity
    )
    for k in (2, ITEMS):
        assert (
            linear.nearest(history, k).tolist() == np.argsort(-together, kind="stable")[:k].tolist()
        )
    nothing = np.empty(0, np.int64)
    for cold in (nothing, np.array([ITEMS - 1]), np.array([ITEMS + 4])):
        assert order.alike(cold, np.arange(ITEMS)).tolist() == [0] * ITEMS
        assert order.nearest(cold, 5).tolist() == []


def test_a_new_item_is_as_alike_as_the_others_are_on_average() -> None:
    order = an_order()
    every = np.arange(ITEMS + 2)
    among = order.alike(np.array([2, 4]), every)
    assert among[ITEMS:] == pytest.approx(among[:ITEMS].mean())
    assert among[:ITEMS].tolist() == order.alike(np.array([2, 4]), every[:ITEMS]).tolist()
    assert order.alike(np.array([2, 4]), every[ITEMS:]).tolist() == [0, 0]
    assert order.alike(np.array([2, ITEMS, 4]), every).tolist() == among.tolist()


def test_the_sum_has_each_term_once() -> None:
    one = np.eye(6, dtype=np.float32)
    weights = {**an_order().weights, "own_count": 3.0, "own_age": -1.5}
    order = replace(an_order(), weights=weights)
    assert order.scores(*one).tolist() == [0.5, 0.25, 0.125, 4.0, 0.75, 1.0]
    assert order.own_sum(*np.eye(3, dtype=np.float32)).tolist() == [-2.0, 3.0, -1.5]
    assert [order.weights[name] for name in WEIGHTS] == [
        *(0.5, 0.25, 0.125, 4.0, 0.75, -2.0, 3.0, -1.5, 0.0)
    ]


def test_items_of_the_history_weigh_how_often_and_how_long_ago_they_were_had() -> None:
    weights = {**an_order().weights, "own_count": 3.0, "own_age": -1.5}
    order = replace(an_order(), weights=weights)
    history = np.array([7, 3, 7, 5])  # ages 3, 2, 1, 0
    found = order.own(history, np.array([5, 7, 3, 4]))
    often = np.log([1, 0.97 + 0.97**3, 0.97**2])
    assert found[:3] == pytest.approx(-2 + 3 * often - 1.5 * np.log1p([0, 1, 2]), rel=1e-5)
    assert found[3] == 0
    assert order.own(history[:0], history).tolist() == [0, 0, 0, 0]
    assert OwnItems.of(history).best(2).tolist() == [7, 5]
    assert OwnItems.of(np.array([2, 1])).best(9).tolist() == [1, 2]


def test_an_item_comes_again_or_follows_the_last_one() -> None:
    order = an_order()
    every = np.arange(ITEMS)
    own = OwnItems.of(np.array([105, 103, 105]))  # of ids, which need not be the rows
    found = own_or_next(order, own, every + 100, np.array([2, 4]), every)
    follows = np.exp(order.transitions(np.array([4]), every))  # the last row decides
    had = np.zeros(ITEMS)
    had[[3, 5]] = 0.97, 1 + 0.97**2
    assert found == pytest.approx(np.log(had + FOLLOWING * follows), rel=1e-5)
    nobody = OwnItems.of(np.empty(0, np.int64))
    found = own_or_next(order, nobody, every, np.array([2, 4]), every)
    assert found == pytest.approx(np.log(FOLLOWING * follows), rel=1e-5)


@pytest.mark.parametrize(
    ("last_items", "is_summed", "is_linear"),
    [(5, False, False), (100, False, False), (500, True, False), (9, True, True)],
)
def test_round_trip(tmp_path: Path, last_items: int, is_summed: bool, is_linear: bool) -> None:
    assert load_blend(tmp_path) is None
    order = an_order()
    read = replace(
        some_neighbours(), last_items=last_items, is_summed=is_summed, is_linear=is_linear
    )
    order = replace(order, neighbours=read, decay=LAST_ALONE if is_summed else DECAY)
    save_blend(order, tmp_path)
    again = load_blend(tmp_path)
    assert again is not None
    assert (again.task, again.weights, again.decay) == ("click", order.weights, order.decay)
    for name in ("successors", "log_prob", "popularity"):
        assert np.array_equal(getattr(again, name), getattr(order, name))
    assert again.neighbours is not None
    assert order.neighbours is not None
    assert np.array_equal(again.neighbours.items, order.neighbours.items)
    assert np.array_equal(again.neighbours.similarity, order.neighbours.similarity)
    assert again.neighbours is not None
    found = (again.neighbours.last_items, again.neighbours.is_summed, again.neighbours.is_linear)
    assert found == (last_items, is_summed, is_linear)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


def test_a_file_without_a_weight_of_the_popularity_does_not_count_it(tmp_path: Path) -> None:
    order = an_order()
    order = replace(order, weights={**order.weights, "popularity": 0.0, "own_count": 2.5})
    save_blend(order, tmp_path)
    with safe_open(tmp_path / FILE, framework="numpy") as file:  # as older versions can read it
        weights = json.loads(file.metadata()["npu_gr.order"])["weights"]
        assert not {"popularity", "own_age"} & {*weights}
        assert weights["own_count"] == 2.5
    again = load_blend(tmp_path)
    assert again is not None
    assert again.weights == order.weights


def older_file(order: ScoreBlend, path: Path) -> None:
    """Write what the version before neighbours wrote."""
    weights = {name: order.weights[name] for name in ("retrieval", "click", "transitions", "seen")}
    notes = {
        "format": 1,
        "task": "click",
        "weights": weights,
        "decay": 0.6,
        "prior": 10.0,
        "last_events": 5,
    }
    tensors = {name: getattr(order, name) for name in ("successors", "log_prob", "popularity")}
    save_file(tensors, path, {"npu_gr.order": json.dumps(notes)})


def test_an_older_file_is_the_order_that_it_was(tmp_path: Path) -> None:
    order = an_order()
    older_file(order, tmp_path / FILE)
    found = load_blend(tmp_path)
    assert found is not None
    assert found.neighbours is None
    assert found.weights == {**order.weights, "neighbours": 0.0, "popularity": 0.0}
    history, every = np.array([2, 4]), np.arange(ITEMS + 1)
    terms = np.random.default_rng(0).normal(size=(4, ITEMS + 1)).astype(np.float32)
    a, b, c, e = (
        np.float32(order.weights[name]) for name in ("retrieval", "click", "transitions", "seen")
    )
    was = a * terms[0] + b * terms[1] + c * terms[2] + e * terms[3]
    retrieval, click, transitions, seen = terms
    others = found.alike(history, every), found.popular(every)
    assert found.scores(retrieval, click, transitions, *others, e * seen).tolist() == was.tolist()
    assert found.nearest(history, 5).tolist() == []
    save_blend(found, tmp_path)  # as the older version can read it
    with safe_open(tmp_path / FILE, framework="numpy") as file:
        assert sorted(file.keys()) == ["log_prob", "popularity", "successors"]
        notes = json.loads(file.metadata()["npu_gr.order"])
    assert notes["format"] == 1
    assert set(notes) == {"format", "task", "weights", "decay", "prior", "last_events"}
    assert set(notes["weights"]) == {"retrieval", "click", "transitions", "seen"}
    again = load_blend(tmp_path)
    assert again is not None
    assert again.weights == found.weights


@pytest.mark.parametrize("change", [{"format": 3}, {"format": 1}, {"scale": 7.0}, {"decay": 0.5}])
def test_a_file_of_another_kind_is_rejected(tmp_path: Path, change: dict[str, float]) -> None:
    save_blend(an_order(), tmp_path)
    with safe_open(tmp_path / FILE, framework="numpy") as file:
        notes = json.loads(file.metadata()["npu_gr.order"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / FILE, {"npu_gr.order": json.dumps(notes | change)})
    with pytest.raises(CheckpointError, match="is not of this version"):
        load_blend(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"weights": {"retrieval": 1.0}},
            "weights: needs finite retrieval, click, transitions, neighbours, popularity, seen",
        ),
        ({"weights": dict.fromkeys(WEIGHTS, float("nan"))}, "weights: needs finite"),
        (
            {"popularity": np.full(ITEMS, -np.inf, np.float32)},
            "popularity: needs one finite number an item",
        ),
        ({"popularity": np.zeros(3, np.float32)}, "successors and log_prob: need 3 equal rows"),
        (
            {"successors": np.full((ITEMS, 4), ITEMS, np.int32)},
            "successors: need ascending item rows below 12",
        ),
        ({"successors": np.zeros((ITEMS, 4), np.int32)}, "successors: need ascending"),
        (
            {"neighbours": Neighbours(*np.empty((2, 3, 0), np.int32))},
            "neighbours: needs 12 rows, got 3",
        ),
        (
            {"log_prob": np.full((ITEMS, 4), 0.1, np.float32)},
            "log_prob: needs logs of probabilities",
        ),
    ],
)
def test_what_is_no_order_is_rejected(changes: dict[str, Any], words: str) -> None:
    order = an_order()
    parts = {
        name: getattr(order, name)
        for name in ("task", "weights", "successors", "log_prob", "popularity")
    }
    with pytest.raises(ValueError, match=words):
        ScoreBlend(**(parts | changes))


def test_a_damaged_file_is_rejected(tmp_path: Path) -> None:
    save_blend(an_order(), tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"order\.safetensors"):
        load_blend(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_blend(an_order(), tmp_path / "no")
