"""Business rules after the rank hold for every list: pins, limits by attribute, drawn places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import Unprocessable
from npu_gr.core.history import Events
from npu_gr.core.item_rules import Boost, Cap, Diversity, Explore, OrderRules, Pin
from npu_gr.handlers.cascade_plan import Shown
from npu_gr.handlers.hooks import reordered
from npu_gr.handlers.item_filters import ItemFilters, Mask
from npu_gr.handlers.rules import Asked, apply

BRANDS = np.array(["acme", "bolt", "cane"])
OUTSIDE = 999  # an item that no source found, and that the catalogue lacks


class Brands(ItemFilters):
    """A catalogue in which item i has the brand i % 3, without the items above 900."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def columns(self, names: Iterable[str], ids: I64) -> dict[str, tuple[npt.NDArray[Any], Mask]]:
        if unknown := set(names) - {"brand"}:
            raise Unprocessable(f"rules: no attribute {unknown}")
        return dict.fromkeys(names, (BRANDS[ids % 3], ids < 900))


def brand(item: int) -> str | None:
    return str(BRANDS[item % 3]) if item < 900 else None


def ranked(scores: list[float]) -> Shown:
    """Items 1, 2, ... with these scores, best first; NaN last."""
    row = np.array(scores, np.float32)
    return Shown(
        np.arange(1, len(row) + 1),
        np.concatenate([-np.sort(-row[~np.isnan(row)]), row[np.isnan(row)]]),
    )


def asked(
    num_items: int = 10,
    shown_items: I64 | None = None,
    banned: Iterable[int] = (),
    by_place: bool = False,
    events: Events | None = None,
) -> Asked:
    return Asked(
        num_items=num_items,
        shown_items=shown_items,
        events=events or Events.empty(),
        actions=("view", "impression"),
        now_s=100_000,
        banned=lambda ids: np.isin(ids, list(banned)),
        by_place=by_place,
    )


def run(rules: OrderRules, shown: Shown, about: Asked, seed: int = 0) -> Shown:
    return apply(rules, shown, about, Brands(), np.random.default_rng(seed))


rules_of_all_kinds = st.builds(
    OrderRules,
    boost=st.lists(
        st.builds(
            Boost,
            items=st.just((1, 5)),
            attributes=st.sampled_from([{}, {"brand": ("acme",)}]),
            factor=st.floats(0.1, 10),
            add=st.floats(-5, 5),
        ),
        max_size=2,
    ).map(tuple),
    pin=st.lists(
        st.builds(Pin, item=st.sampled_from([2, 3, 7, OUTSIDE]), place=st.integers(1, 12)),
        max_size=3,
    ).map(tuple),
    diversity=st.lists(
        st.builds(Diversity, by=st.just("brand"), most=st.integers(1, 4)), max_size=2
    ).map(tuple),
    cap=st.none() | st.builds(Cap, most=st.integers(1, 2)),
    explore=st.none()
    | st.builds(Explore, keep=st.integers(0, 4), epsilon=st.floats(0.01, 1))
    | st.builds(Explore, keep=st.integers(0, 4), temperature=st.floats(0.001, 100)),
)


@settings(max_examples=300, deadline=None)
@given(
    rules=rules_of_all_kinds,
    scores=st.lists(st.floats(-50, 50, width=32) | st.just(float("nan")), max_size=25),
    num_items=st.integers(1, 15),
    shown_items=st.lists(st.integers(1, 30), max_size=10),
    banned=st.sets(st.integers(1, 10), max_size=3),
    by_place=st.booleans(),
    seed=st.integers(0, 100),
)
def test_what_holds_of_every_answer(
    rules: OrderRules,
    scores: list[float],
    num_items: int,
    shown_items: list[int],
    banned: set[int],
    by_place: bool,
    seed: int,
) -> None:
    before = ranked(scores)
    allowed = ~np.isin(before.items, list(banned))  # the sources have left out what is denied
    before = Shown(before.items[allowed], before.scores[allowed])
    about = asked(num_items, np.array(shown_items, np.int64), banned, by_place)
    after = run(rules, before, about, seed)
    items = after.items.tolist()

    assert len(items) == len(set(items)) <= num_items
    assert not set(items) & banned
    of_item = dict(zip(before.items.tolist(), before.scores.tolist(), strict=True))
    expected = [of_item.get(item, np.nan) for item in items]
    np.testing.assert_array_equal(after.scores, np.array(expected, np.float32))

    pinned: dict[int, int] = {}
    for pin in rules.pin:
        item = int(pin.item)
        fits = pin.place <= num_items and item not in banned
        if fits and pin.place not in pinned and item not in pinned.values():
            pinned[pin.place] = item
    for place, item in pinned.items():
        assert item in items
        if place <= len(items) - sum(other > place for other in pinned):
            assert items[place - 1] == item
    assert set(items) <= set(before.items.tolist()) | set(pinned.values())

    counts = Counter(brand(item) for item in items if brand(item) is not None)
    of_pins = Counter(brand(item) for item in pinned.values())
    for one in rules.diversity:
        for value, count in counts.items():
            assert count <= max(one.most, of_pins[value])
    if rules.cap is not None:
        showings = Counter(shown_items)
        free = set(items) - set(pinned.values())
        assert all(showings[item] < rules.cap.most for item in free)

    assert (after.propensities is None) == (rules.explore is None)
    if after.propensities is not None:
        assert len(after.propensities) == len(items)
        # a probability may be below what a float holds, never above 1
        assert ((after.propensities >= 0) & (after.propensities <= 1 + 1e-5)).all()
    again = run(rules, before, about, seed)
    assert again.items.tolist() == items


@given(st.lists(st.floats(-50, 50, width=32) | st.just(float("nan")), max_size=30))
def test_items_that_no_rule_concerns_keep_their_order(scores: list[float]) -> None:
    before = ranked(scores)
    untouched = OrderRules(
        boost=(Boost(items=(555,), factor=3.0),),
        diversity=(Diversity(by="brand", most=100),),
        cap=Cap(most=1),
        pin=(Pin(item=OUTSIDE, place=99),),
    )
    after = run(untouched, before, asked(len(scores) or 1, np.array([777])))
    assert after.items.tobytes() == before.items.tobytes()
    assert after.scores.tobytes() == before.scores.tobytes()


def test_a_boost_raises_whatever_the_sign_of_the_score() -> None:
    before = ranked([2.0, 1.0, -1.0, -4.0])

    def order(boost: Boost) -> list[int]:
        return list(run(OrderRules(boost=(boost,)), before, asked()).items.tolist())

    assert order(Boost(items=(2,), factor=2.5)) == [2, 1, 3, 4]
    assert order(Boost(items=(4,), factor=5.0)) == [1, 2, 4, 3]  # -4 / 5 is above -1
    assert order(Boost(items=(1,), factor=0.1)) == [2, 1, 3, 4]
    assert order(Boost(items=("3",), add=3.5)) == [3, 1, 2, 4]
    assert order(Boost(attributes={"brand": ("acme",)}, add=9.0)) == [3, 1, 2, 4]
    assert order(Boost(attributes={"brand": ("nobody",)}, add=9.0)) == [1, 2, 3, 4]
    # by place: 60/61 of the second place, 60/63 of the fourth
    placed = run(OrderRules(boost=(Boost(items=(4,), factor=1.04),)), before, asked(by_place=True))
    assert placed.items.tolist() == [1, 4, 2, 3]


def test_a_cap_counts_showings_and_events_of_its_action() -> None:
    events = Events.make(
        np.array([1, 1, 2, 3]), np.array([1, 1, 1, 0]), np.array([10, 99_000, 99_500, 99_900])
    )
    before = ranked([4.0, 3.0, 2.0, 1.0])

    def left(cap: Cap, shown: list[int]) -> list[int]:
        about = asked(shown_items=np.array(shown, np.int64), events=events)
        return list(run(OrderRules(cap=cap), before, about).items.tolist())

    assert left(Cap(most=1), []) == [1, 2, 3, 4]
    assert left(Cap(most=2), [4, 4, 3]) == [1, 2, 3]
    assert left(Cap(most=1, action="impression"), []) == [3, 4]
    assert left(Cap(most=2, action="impression"), []) == [1, 2, 3, 4]
    assert left(Cap(most=2, action="impression", window_s=1e6), []) == [2, 3, 4]
    assert left(Cap(most=2, action="impression"), [1, 2]) == [3, 4]
    assert left(Cap(most=1, action="no such"), []) == [1, 2, 3, 4]


def frequencies(rules: OrderRules, before: Shown, num_items: int, runs: int) -> dict[Any, float]:
    """How often each list was drawn, and that its propensities multiply to about that."""
    seen: Counter[tuple[int, ...]] = Counter()
    said: dict[tuple[int, ...], float] = {}
    random = np.random.default_rng(7)
    for _ in range(runs):
        drawn = apply(rules, before, asked(num_items), Brands(), random)
        key = tuple(drawn.items.tolist())
        assert drawn.propensities is not None
        seen[key] += 1
        said[key] = float(np.prod(drawn.propensities, dtype=np.float64))
    for key, count in seen.items():
        spread = 5 * np.sqrt(max(said[key] * (1 - said[key]), 1e-3) / runs)
        assert abs(count / runs - said[key]) < spread, (key, count / runs, said[key])
    return said


@pytest.mark.parametrize(
    "explore",
    [
        Explore(keep=1, temperature=1.0),
        Explore(keep=0, temperature=0.5),
        Explore(keep=1, epsilon=0.4),
        Explore(keep=0, epsilon=1.0),
    ],
)
@pytest.mark.parametrize("limited", [False, True])
def test_the_logged_propensity_is_how_often_the_list_is_drawn(
    explore: Explore, limited: bool
) -> None:
    before = ranked([2.0, 1.5, 1.0, 0.5, 0.2, float("nan")])
    diversity = (Diversity(by="brand", most=1),) if limited else ()
    said = frequencies(OrderRules(explore=explore, diversity=diversity), before, 3, 4000)
    assert len(said) > 2
    assert sum(said.values()) == pytest.approx(1.0, abs=0.02)  # nearly all lists were drawn


def test_what_a_hook_returns_keeps_its_scores() -> None:
    before = ranked([3.0, 2.0, 1.0])
    after = reordered(before, np.array([3, OUTSIDE, 1]))
    assert after.items.tolist() == [3, OUTSIDE, 1]
    np.testing.assert_array_equal(after.scores, np.array([1.0, np.nan, 3.0], np.float32))
    nothing: F32 = reordered(Shown(before.items[:0], before.scores[:0]), np.array([5])).scores
    assert np.isnan(nothing).all()


@pytest.mark.parametrize(
    ("table", "detail"),
    [
        ({"boost": [{"factor": 2.0}]}, "needs `items` or `attributes`"),
        ({"boost": [{"items": [1], "factor": 0.0}]}, "> 0.0"),
        ({"pin": [{"item": 1, "place": 0}]}, ">= 1"),
        ({"explore": {"keep": 1}}, "either `epsilon` or `temperature`"),
        ({"explore": {"epsilon": 0.1, "temperature": 1.0}}, "either"),
        ({"diversity": [{"by": "brand", "most": 0}]}, ">= 1"),
        ({"cap": {"most": 1, "actions": "x"}}, "unknown field"),
        ({"pin": [{"item": 1, "place": 1}] * 101}, "length <= 100"),
    ],
)
def test_a_bad_rule_is_told(table: dict[str, Any], detail: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=detail):
        msgspec.convert(table, OrderRules)
