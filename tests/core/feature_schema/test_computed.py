"""What we compute of a history and a candidate is what a slow and obvious loop says."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.feature_schema import computed
from npu_gr.core.feature_schema.computed import (
    OF_HISTORY,
    CrossFeatures,
    ItemValueTable,
    read_rule,
    time_column,
)
from npu_gr.core.feature_schema.schema import Feature

ACTIONS = ("view", "cart", "buy")
NUM_ITEMS = 12
PADDING = 5
GENRES = np.array(
    [[item % 5, (item * 7) % 5 if item % 3 else PADDING] for item in range(NUM_ITEMS)]
)
GENRES[:, 1] = np.where(GENRES[:, 1] == GENRES[:, 0], PADDING, GENRES[:, 1])
GENRES[4] = PADDING  # an item without any
TABLES = {"genre": ItemValueTable(GENRES, PADDING)}


class Named(NamedTuple):
    name: str
    computed: str
    actions: tuple[str, ...] = ()


FEATURES = [
    Named(f"{what}{by}{'!' if actions else ''}", what + by, actions)
    for what in OF_HISTORY
    for by in ("", "_by:genre", "_by:*")
    for actions in ((), ("cart", "buy"))
]


class Event(NamedTuple):
    item: int
    action: int
    time: int


def values(by: str, item: int) -> set[int]:
    if by in ("", "*"):
        return {0 if by else item}
    return set() if item >= NUM_ITEMS else set(GENRES[item].tolist()) - {PADDING}


def slow(feature: Named, history: list[Event], candidate: int, now: int) -> float:
    what, by = read_rule(feature.computed)
    own = values(by, candidate)
    counted = [
        event
        for event in history
        if not feature.actions or ACTIONS[event.action] in feature.actions
    ]
    alike = [[event for event in counted if value in values(by, event.item)] for value in own]
    num = sum(map(len, alike))
    if not own:
        return math.nan
    if what == "events":
        return math.log1p(num / len(own))
    if what == "share":
        return num / len(own) / len(counted) if counted else math.nan
    if what == "rate":
        whole = sum(value in values(by, event.item) for value in own for event in history)
        return (num + 5 * len(counted) / len(history)) / (whole + 5) if history else math.nan
    newest = max((event.time for events in alike for event in events), default=None)
    return math.nan if newest is None else math.log1p(max(0, now - newest))


EVENTS = st.lists(
    st.builds(Event, st.integers(0, NUM_ITEMS + 1), st.integers(0, 2), st.integers(0, 50)),
    max_size=30,
).map(lambda events: sorted(events, key=lambda event: event.time))


@pytest.mark.parametrize("dense", [1 << 16, 0])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    history=EVENTS,
    candidates=st.lists(st.integers(0, NUM_ITEMS + 1), max_size=9),
    now=st.integers(0, 60),
)
def test_columns_are_what_the_loop_says(
    dense: int, history: list[Event], candidates: list[int], now: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computed, "_DENSE", dense)
        items, actions, times = np.array(history, np.int64).reshape(-1, 3).T
        cross = CrossFeatures(FEATURES, ACTIONS, TABLES)
        found = cross.columns(items, actions, times, np.array(candidates, np.int64), now)
    for feature in FEATURES:
        want = [slow(feature, history, candidate, now) for candidate in candidates]
        np.testing.assert_allclose(found[feature.name], want, rtol=1e-6, err_msg=feature.name)


def test_only_computed_features_have_columns_and_a_table_may_grow() -> None:
    tables = dict(TABLES)
    cross = CrossFeatures([Named("given", ""), Named("near", "events_by:genre")], ACTIONS, tables)
    history = (np.array([0, 5]), np.array([0, 1]), np.array([10, 20]))
    new = np.array([NUM_ITEMS])
    found = cross.columns(*history, new, 30)
    assert list(found) == ["near"]
    assert np.isnan(found["near"][0])
    tables["genre"] = ItemValueTable(np.concatenate([GENRES, [[0, PADDING]]]), PADDING)
    assert cross.columns(*history, new, 30)["near"].tolist() == pytest.approx(
        [math.log1p(2)], rel=1e-6
    )


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (
            Named("near", "events_by:maker"),
            r"features.near: unknown item feature 'maker'; there "
            r"are genre",
        ),
        (
            Named("near", "events", ("sell",)),
            r"features.near: unknown action 'sell'; there are view, "
            r"cart, buy",
        ),
        (
            Named("near", "visits"),
            r"computed: 'visits' must be one of .* recency, alone or with "
            r"_by:FEATURE, or mf_score",
        ),
        (Named("near", "mf_score_by:genre"), "'mf_score_by:genre' must be one of"),
        (Named("near", "mf_score"), "features.near: mf_score: the model has no factorisation"),
        (Named("near", "events_by:"), "'events_by:' must be one of"),
    ],
)
def test_what_the_model_lacks_is_named(feature: Named, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CrossFeatures([feature], ACTIONS, TABLES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"of": "user", "kind": "number", "computed": "events"},
            "'events' is not available for user",
        ),
        (
            {"of": "cross", "kind": "category", "values": ("a",), "computed": "events"},
            "events needs kind number",
        ),
        (
            {"of": "cross", "kind": "number", "computed": "hour"},
            "features.x: computed: 'hour' must be one of",
        ),
        ({"of": "request", "kind": "number", "computed": "hour"}, "hour needs kind category"),
        (
            {"of": "request", "kind": "number", "computed": "events"},
            "'events' is not available for request",
        ),
        (
            {"of": "cross", "kind": "number", "actions": ("buy",)},
            "actions are only for a computed cross feature",
        ),
        (
            {"of": "cross", "kind": "number", "computed": "mf_score", "actions": ("buy",)},
            "actions: not allowed for mf_score",
        ),
    ],
)
def test_a_schema_with_what_cannot_be_computed_is_rejected(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Feature(name="x", **fields)


def test_the_time_of_a_request() -> None:
    times = np.array([0, 3600 * 23 + 59, 951_782_399, 1_700_000_000, 1_732_332_000])
    told = [datetime.fromtimestamp(time, UTC) for time in times.tolist()]
    assert time_column("hour", times).tolist() == [when.hour for when in told]
    assert time_column("weekday", times).tolist() == [when.weekday() for when in told]
