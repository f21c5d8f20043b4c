"""A source that orders the validation better than the fitted order is named.

By more than chance, it is served.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from npu_gr.core.arrays import F32
from npu_gr.model.blend import WEIGHTS, ScoreBlend
from npu_gr.train.data import InteractionLog, NextItem, build_log
from npu_gr.train.metrics import Difference
from npu_gr.train.rank.blend import ItemList, count_blend
from npu_gr.train.rank.blend_choice import (
    SOURCES,
    alone,
    better_alone,
    better_source_warnings,
    to_serve,
)
from tests.train.synthetic import NUM_ITEMS, planted

NUM_USERS = 60
WRONG = 20  # place of the next item where a term is wrong


@pytest.fixture(scope="module")
def log() -> InteractionLog:
    return build_log(planted(NUM_USERS, num_events=5), [], "leave-one-out")


@pytest.fixture(scope="module")
def order(log: InteractionLog) -> ScoreBlend:
    """It goes by the click."""
    weights = dict.fromkeys(WEIGHTS, 0.0) | {"click": 1.0, "seen": -9.0}
    return replace(count_blend(log, "click"), weights=weights)


def term(item: int, history: list[int], place: int) -> F32:
    """Scores under which one item has a given rank among those outside the history."""
    others = [other for other in range(NUM_ITEMS) if other != item and other not in history]
    ranked = [*others[:place], item, *others[place:]]
    scores = np.full(NUM_ITEMS, -1.0, np.float32)
    scores[ranked] = np.arange(len(ranked), 0, -1)
    return scores


def lists(
    log: InteractionLog, places: dict[str, list[int]]
) -> tuple[list[ItemList], list[NextItem]]:
    """Lists of all items, from term -> rank of each user's next item; other terms are 0."""
    targets = list(log.next_items())
    found = []
    for row, (user, event) in enumerate(targets):
        item, history = int(log.items[event]), log.items[log.starts[user] : event].tolist()
        terms = {name: np.zeros(NUM_ITEMS, np.float32) for name in WEIGHTS}
        terms |= {name: term(item, history, own[row]) for name, own in places.items()}
        terms["seen"][history] = 1
        terms["seen"][item] = 0
        found.append(ItemList(np.arange(NUM_ITEMS), **terms))
    return found, targets


def right(share: float) -> list[int]:
    """The first place for a share of the users, a bad one for the others."""
    return [0 if row < share * NUM_USERS else WRONG for row in range(NUM_USERS)]


def test_a_source_that_is_surely_better_is_served_in_the_place_of_the_order(
    log: InteractionLog, order: ScoreBlend
) -> None:
    found, targets = lists(
        log, {"click": right(0.2), "neighbours": right(0.7), "transitions": right(0.1)}
    )
    better = better_alone(order, log, found, targets)
    assert list(better) == ["neighbours"]
    gap = better["neighbours"]
    assert gap.mean == pytest.approx(0.5)
    assert gap.low > 0
    served = to_serve(order, better)
    assert served.weights == {
        "retrieval": 0.0,
        "click": 0.0,
        "transitions": 0.0,
        "neighbours": 1.0,
        "popularity": 0.0,
        "seen": -9.0,
        "own_count": 0.0,
        "own_age": 0.0,
        "own_or_next": 0.0,
    }
    assert served.successors is order.successors
    words = f"NDCG@10 +0.5000 ({gap.low:+.4f} .. {gap.high:+.4f})"
    assert better_source_warnings(better) == [
        "WARNING: neighbours alone ranks the validation better than the fitted score blend: "
        f"{words}; it is served instead"
    ]
    # the order that is served is that of the source among unseen items
    for one in found:
        unseen = np.flatnonzero(one.seen == 0)
        by_source = np.argsort(-one.neighbours[unseen], kind="stable")
        assert np.array_equal(np.argsort(-one.scores(served)[unseen], kind="stable"), by_source)


def test_a_source_that_may_be_better_by_chance_is_named_and_the_order_stays(
    log: InteractionLog, order: ScoreBlend
) -> None:
    # better for three users, worse for two
    by_click = [0] * 30 + [WRONG] * 3 + [0] * 2 + [WRONG] * 25
    by_source = [0] * 30 + [0] * 3 + [WRONG] * 2 + [WRONG] * 25
    found, targets = lists(log, {"click": by_click, "transitions": by_source})
    better = better_alone(order, log, found, targets)
    assert list(better) == ["transitions"]
    gap = better["transitions"]
    assert gap.mean == pytest.approx(1 / NUM_USERS)
    assert gap.low < 0 < gap.high
    assert to_serve(order, better) is order
    words = f"NDCG@10 +0.0167 ({gap.low:+.4f} .. {gap.high:+.4f})"
    assert better_source_warnings(better) == [
        f"WARNING: transitions alone ranks the validation better than the fitted score blend: "
        f"{words}"
    ]


def test_an_order_that_beats_every_source_stays_without_words(
    log: InteractionLog, order: ScoreBlend
) -> None:
    found, targets = lists(
        log, {"click": right(0.7), "retrieval": right(0.6), "neighbours": right(0.2)}
    )
    better = better_alone(order, log, found, targets)
    assert better == {}
    assert to_serve(order, better) is order
    assert better_source_warnings(better) == []


def test_a_tie_is_not_better(log: InteractionLog, order: ScoreBlend) -> None:
    found, targets = lists(log, dict.fromkeys(("click", *SOURCES), right(0.5)))
    assert better_alone(order, log, found, targets) == {}
    assert better_alone(order, log, [], []) == {}


def test_the_best_source_is_named_first(log: InteractionLog, order: ScoreBlend) -> None:
    found, targets = lists(
        log, {"click": right(0.1), "retrieval": right(0.4), "neighbours": right(0.8)}
    )
    better = better_alone(order, log, found, targets)
    assert list(better) == ["neighbours", "retrieval"]
    assert to_serve(order, better).weights["neighbours"] == 1.0


def test_of_two_that_are_better_the_one_that_surely_is_is_served(order: ScoreBlend) -> None:
    better = {
        "transitions": Difference(0.3, -0.1, 0.7, 0.2),
        "retrieval": Difference(0.2, 0.1, 0.3, 0.01),
    }
    assert to_serve(order, better).weights == alone(order, "retrieval").weights
    assert [line.endswith("it is served instead") for line in better_source_warnings(better)] == [
        False,
        True,
    ]


def test_items_that_a_list_lacks_stand_behind_it(log: InteractionLog, order: ScoreBlend) -> None:
    found, targets = lists(log, {"click": right(1.0), "neighbours": right(1.0)})
    own = [int(log.items[event]) for _, event in targets]
    kept = [one.items != item for one, item in zip(found, own, strict=True)]
    short = [
        ItemList(*(column[rows] for column in one)) for one, rows in zip(found, kept, strict=True)
    ]
    assert better_alone(order, log, short, targets) == {}
