"""Names and times become exact columns, whatever a program has them in.

What cannot be one is rejected by place.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

from npu_gr.client import Behaviours
from npu_gr.client.wire import ids_of, listed, seconds
from npu_gr.core.errors import Unprocessable
from npu_gr.core.names import FIRST_HASHED, is_hashed, item_id

NAMES: list[Any] = ["SKU-1", 42, "42", "ä", 0]
IDS = [item_id(name) for name in NAMES]


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (NAMES, IDS),
        (tuple(NAMES), IDS),
        (np.array(["SKU-1", "42"]), [item_id("SKU-1"), 42]),
        (np.array(NAMES, object), IDS),
        ([np.int64(42), np.str_("SKU-1"), np.uint8(7)], [42, item_id("SKU-1"), 7]),
        (np.array([1, 2], np.uint16), [1, 2]),
        (np.array([FIRST_HASHED + 5]), [FIRST_HASHED + 5]),  # an id, as the dataset has it
        (range(3), [0, 1, 2]),
        ([], []),
        (np.array([], np.int64), []),
    ],
)
def test_items(names: Any, ids: list[int]) -> None:
    found = ids_of(names, "items")
    assert found.dtype == np.int64
    assert found.tolist() == ids
    assert [item_id(name) if type(name) is str else name for name in listed(names, "items")] == ids
    sent = Behaviours(names, [], []).on_the_wire("h").items
    has_texts = is_hashed(found).any() and not isinstance(names, np.ndarray | range)
    if has_texts or (isinstance(names, np.ndarray) and names.dtype.kind in "UO"):
        assert sent == listed(names, "items")  # the service has the key of their ids
    else:
        assert sent == np.array(ids, "<i8").tobytes()


def test_a_number_of_a_list_is_the_item_of_its_text() -> None:
    numbers = [7, 2**53 + 1, 2**62, 10**30]
    assert ids_of(numbers, "items").tolist() == [item_id(str(number)) for number in numbers]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("SKU-1", "items: is one text"),
        (["a", ""], "items: index 1: a name of 0 bytes"),
        (["a", -1], "items: index 1: -1 is not an item id"),
        ([3.0], "items: index 0: 3.0 is not a name"),
        ([True], "items: index 0: True is not a name"),
        ([None], "items: index 0: None is not a name"),
        ([b"a"], "items: index 0: b'a' is not a name"),
        (["x" * 513], "items: index 0: a name of 513 bytes"),
        (np.array([[1]]), "items: is an array of 2 dimensions"),
        (np.array([1, -2]), "items: ids are 0 to"),
        (np.array([2**63], np.uint64), "items: ids are 0 to"),
        (np.array([1.5]), "items: index 0: 1.5 is not a name"),
        (["\ud800"], "items: index 0"),
        ([["a"], ["b", "c"]], "items: index 0: .* is not a name"),
    ],
)
def test_what_is_no_item(names: Any, message: str) -> None:
    with pytest.raises(Unprocessable, match=message):
        ids_of(names, "items")


@pytest.mark.parametrize(
    ("actions", "names"),
    [
        (["view", "purchase"], ["view", "purchase"]),
        ([5, "4"], [5, "4"]),
        ([5.0, 4.5], ["5", "4.5"]),
        (np.array([5.0, 0.5]), ["5", "0.5"]),
        (np.array([5, 4]), [5, 4]),
        ([1234567.0, 1e6, 0.12345678], ["1234567", "1000000", "0.12345678"]),
        (np.array([4.1, 0.1, 5], np.float32), ["4.1", "0.1", "5"]),
        ([np.float32(4.1)], ["4.1"]),
        ([np.float32(4.5), np.int16(3), np.str_("view")], ["4.5", 3, "view"]),
    ],
)
def test_actions_are_names(actions: Any, names: list[str | int]) -> None:
    column = Behaviours([], actions, []).on_the_wire("h").actions
    assert column == names
    assert [type(one) for one in column] == [type(one) for one in names]


@pytest.mark.parametrize("actions", ["view", [None], [True], [b"view"], np.array([["view"]])])
def test_what_is_no_action(actions: Any) -> None:
    with pytest.raises(Unprocessable, match=r"^h\.actions: "):
        Behaviours([], actions, []).on_the_wire("h")


NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
NOON_S = 1_795_348_800


@pytest.mark.parametrize(
    ("times", "whole"),
    [
        ([NOON, NOON_S], [NOON_S, NOON_S]),
        ([datetime(2026, 11, 22, 14, tzinfo=timezone(timedelta(hours=2)))], [NOON_S]),
        ([NOON + timedelta(milliseconds=999)], [NOON_S]),
        ([datetime(1969, 12, 31, 23, 59, 59, 500_000, UTC)], [-1]),
        ([1.9, 2], [1, 2]),
        ([1, 2], [1, 2]),
        ((1, 2), [1, 2]),
        (np.array([1, 2], np.int32), [1, 2]),
        (np.array([1, 2], np.uint32), [1, 2]),
        (np.array([1.5, -0.5]), [1, -1]),
        (np.array(["2026-11-22T12:00:00.999"], "datetime64[ms]"), [NOON_S]),
        (np.array(["1969-12-31T23:59:59.500"], "datetime64[ms]"), [-1]),
        ([np.datetime64("2026-11-22T12:00:00")], [NOON_S]),
        ([], []),
        (np.array([], np.str_), []),
        (np.array([], np.bool_), []),
    ],
)
def test_times(times: Any, whole: list[int]) -> None:
    found = seconds(times, "timestamps")
    assert found.dtype == np.int64
    assert found.tolist() == whole


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([datetime(2026, 11, 22, 12)], "index 0: 2026-11-22T12:00:00 has no time zone"),
        ([NOON, None], "index 1: None is not a time"),
        ([NOON, True], "index 1: True is not a time"),
        (["2026-11-22"], "'2026-11-22' is not a time"),
        ([float("nan")], "finite"),
        ([float("inf")], "finite"),
        ([1e30], "below 2"),
        ([NOON, 1e30], "below 2"),
        ([2**64], "not a time|below"),
        (np.array(["NaT"], "datetime64[s]"), "index 0: is NaT"),
        (np.array([[1]]), "2 dimensions"),
        ([[1], [2]], "2 dimensions"),
        ([True], "True is not a time"),
        ([[1], [2, 3]], "contains a list"),
        ([NOON, [1]], "contains a list"),
        (np.array([b"1"]), "b'1' is not a time"),
    ],
)
def test_what_is_no_time(times: Any, message: str) -> None:
    with pytest.raises(Unprocessable, match=rf"^timestamps: .*{message}"):
        seconds(times, "timestamps")
