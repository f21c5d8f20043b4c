"""The similarity of a candidate to a history is the mean over the dense table of similarities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from npu_gr.model import item_similarity as module
from npu_gr.model.item_similarity import LAST_ITEMS, Neighbours, best_rows

ITEMS = 40


def some_neighbours(seed: int = 0, width: int = 5) -> Neighbours:
    """Random neighbours, some items with none."""
    random = np.random.default_rng(seed)
    items = np.full((ITEMS, width), -1, np.int32)
    similarity = np.zeros((ITEMS, width), np.float32)
    for row in range(ITEMS):
        kept = int(random.integers(0, width + 1))
        items[row, width - kept :] = np.sort(random.choice(ITEMS, kept, replace=False))
        # sums are exact, and have ties
        similarity[row, width - kept :] = random.choice([0.25, 0.5, 1.0], kept)
    return Neighbours(items, similarity)


def by_definition(
    neighbours: Neighbours, history: list[int], last_items: int = LAST_ITEMS
) -> npt.NDArray[np.float64]:
    """The mean of every item, neighbour by neighbour."""
    sums = np.zeros(ITEMS)
    known = {item for item in history[-last_items:] if item < ITEMS}
    for item in known:
        for neighbour, similarity in zip(
            neighbours.items[item], neighbours.similarity[item], strict=True
        ):
            if neighbour >= 0:
                sums[neighbour] += similarity
    return sums / max(len(known), 1)


HISTORIES = {
    "one": [7],
    "short": [3, 1, 12],
    "each item counts once": [3, 3, 1, 3],
    "only the last ones count": [*range(ITEMS), *range(LAST_ITEMS)],
    "new ones count nothing": [ITEMS, 5, ITEMS + 3],
    "only new ones": [ITEMS],
    "empty": [],
}


@pytest.mark.parametrize("dense_pairs", [0.01, 1000])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("last_items", [1, LAST_ITEMS, 30])
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_means_and_the_best_of_them_are_those_of_the_definition(
    seed: int,
    last_items: int,
    history: list[int],
    dense_pairs: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DENSE_PAIRS", dense_pairs)
    neighbours = replace(some_neighbours(seed), last_items=last_items)
    want = by_definition(neighbours, history, last_items)
    rows = np.array(history, np.int64)
    candidates = np.random.default_rng(seed).permutation(ITEMS)[:25]
    assert neighbours.means(rows, candidates).tolist() == want[candidates].tolist()
    twice = np.concatenate([candidates, candidates])
    assert neighbours.means(rows, twice).tolist() == want[twice].tolist()
    num_read = len({item for item in history[-last_items:] if item < ITEMS})
    np.testing.assert_allclose(neighbours.sums(rows, twice), want[twice] * num_read, rtol=1e-12)
    best = [item for item in np.argsort(-want, kind="stable").tolist() if want[item] > 0]
    for k in (0, 3, ITEMS):
        assert neighbours.top(rows, k).tolist() == best[:k]
    assert neighbours.top(rows, k).dtype == np.int64


def test_new_and_no_candidates_have_nothing_in_common() -> None:
    neighbours = some_neighbours()
    history = np.arange(ITEMS)
    assert neighbours.means(history, np.array([ITEMS, ITEMS + 7])).tolist() == [0, 0]
    assert neighbours.means(history, np.empty(0, np.int64)).tolist() == []


def test_items_without_any_neighbour_have_nothing_in_common() -> None:
    none = Neighbours(np.empty((ITEMS, 0), np.int32), np.empty((ITEMS, 0), np.float32))
    assert none.means(np.arange(ITEMS), np.arange(ITEMS)).tolist() == [0] * ITEMS
    assert none.means(np.arange(ITEMS), np.arange(ITEMS)).dtype == np.float64
    assert none.top(np.arange(ITEMS), 5).tolist() == []


def test_linear_ones_may_take_off() -> None:
    good = some_neighbours()
    signs = np.where(np.arange(ITEMS) % 2, 1, -1)[:, None].astype(np.float32)
    linear = replace(
        good, similarity=good.similarity * signs, last_items=30, is_summed=True, is_linear=True
    )
    want = by_definition(linear, [1, 2, 4, 9], 30) * 4
    rows = np.array([1, 2, 4, 9])
    assert linear.sums(rows, np.arange(ITEMS)).tolist() == want.tolist()
    assert (want < 0).any()
    found, sums, _ = linear.found(rows)
    for k in (0, 3, ITEMS):
        assert linear.top(rows, k).tolist() == found[np.argsort(-sums, kind="stable")][:k].tolist()


def test_the_best_rows_are_the_highest_and_of_equals_the_lowest() -> None:
    rows, scores = np.array([8, 1, 5, 3, 2]), np.array([0.5, -1.0, 0.5, 2.0, 0.5])
    for k, want in enumerate(
        [[], [3], [3, 2], [3, 2, 5], [3, 2, 5, 8], [3, 2, 5, 8, 1], [3, 2, 5, 8, 1]]
    ):
        assert best_rows(rows, scores, k).tolist() == want


GOOD = some_neighbours()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"similarity": np.ones((ITEMS, 2), np.float32)},
            "neighbours and similarity: need equal rows",
        ),
        (
            {"items": np.full((ITEMS, 5), ITEMS, np.int32)},
            "neighbours: need ascending item rows below 40",
        ),
        ({"items": np.zeros((ITEMS, 5), np.int32)}, "neighbours: need ascending"),
        ({"items": np.full((ITEMS, 5), -2, np.int32)}, "neighbours: need ascending"),
        ({"similarity": -GOOD.similarity}, "similarity: needs finite numbers above 0"),
        (
            {"similarity": GOOD.similarity + np.float32(1)},
            "similarity: needs .* and 0 in the padding",
        ),
        ({"similarity": np.full((ITEMS, 5), np.nan, np.float32)}, "similarity: needs finite"),
        (
            {"is_summed": True, "is_linear": True, "similarity": GOOD.similarity * 0},
            "numbers other than 0, and 0 in",
        ),
        (
            {"is_summed": True, "is_linear": True, "similarity": GOOD.similarity - np.float32(9)},
            "numbers other than 0",
        ),
        ({"last_items": 0}, "last_items: needs at least 1, got 0"),
        ({"is_linear": True}, "is_linear: of a sum only"),
    ],
)
def test_what_are_no_neighbours_is_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Neighbours(**({"items": GOOD.items, "similarity": GOOD.similarity} | changes))
