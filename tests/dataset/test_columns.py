"""Columns are guessed by name and type.

Two that fit are a question with the answers in it, never a choice.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from npu_gr.core.errors import DataError
from npu_gr.dataset.columns import LogColumns, choose_item_columns, choose_log_columns

CELLS: dict[str, Any] = {
    "text": pa.array(["a1", "b2", None]),
    "integer": pa.array([1, 2, 3]),
    "gaps": pa.array([1.0, 2.0, None]),
    "number": pa.array([1.5, 2.25, 3.0]),
    "time": pa.array(["2024-01-05", "2024-01-06 10:00", "2024-01-07T10:00:00Z"]),
    "seconds": pa.array([1_700_000_000] * 3),
    "list": pa.array([["a", "b"], ["b"], ["c", "d"]]),
}


def choose(named: dict[str, str], /, **kinds: str) -> dict[str, str | None]:
    found = choose_log_columns(
        {name: CELLS[kind] for name, kind in kinds.items()}, named, source="log.csv"
    )
    return _names(found)


def _names(found: LogColumns) -> dict[str, str | None]:
    return {
        role: None if (one := getattr(found, role)) is None else one.name
        for role in ("user", "item", "time", "event", "value")
    }


@pytest.mark.parametrize(
    ("user", "item", "time"),
    [
        ("user_id", "item_id", "timestamp"),
        ("userId", "movieId", "timestamp"),
        ("visitorid", "itemid", "timestamp"),
        ("customer_id", "article_id", "t_dat"),
        ("Customer ID", "StockCode", "InvoiceDate"),
        ("reviewerID", "asin", "unixReviewTime"),
        ("user_pseudo_id", "properties.sku", "event_timestamp"),
        ("uid", "iid", "ts"),
        ("session_id", "product_id", "event_time"),
    ],
)
def test_names_of_many_houses(user: str, item: str, time: str) -> None:
    found = choose(
        {}, **{user: "text", item: "integer", time: "seconds", "price": "number", "brand": "text"}
    )
    assert (found["user"], found["item"], found["time"]) == (user, item, time)
    assert found["event"] is found["value"] is None  # a price is no value


def test_a_weak_name_gives_way_to_a_strong_one() -> None:
    found = choose(
        {},
        session_id="text",
        user_id="text",
        item_id="text",
        event_date="time",
        event_timestamp="seconds",
    )
    assert (found["user"], found["time"]) == ("user_id", "event_timestamp")


def test_integers_with_gaps_are_items() -> None:
    assert choose({}, user_id="text", item_id="gaps", ts="seconds")["item"] == "item_id"


def test_the_only_column_of_times_is_the_time() -> None:
    assert choose({}, user_id="text", item_id="text", when_it_was="time")["time"] == "when_it_was"
    with pytest.raises(
        DataError,
        match=r"2 columns could be the time \(when\): --time a or "
        r"--time b",
    ):
        choose({}, user_id="text", item_id="text", a="time", b="time")


def test_an_event_comes_before_a_value() -> None:
    base = {"user_id": "text", "item_id": "text", "ts": "seconds"}
    assert choose({}, **base, event_type="text", rating="number")["value"] is None
    assert (
        choose({"event": "none"}, **base, event_type="text", rating="number")["value"] == "rating"
    )
    with pytest.raises(DataError, match="--event event_type and --value rating exclude each other"):
        choose({"value": "rating"}, **base, event_type="text", rating="number")


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        (
            {"user_id": "text", "customer_id": "text", "item_id": "text", "ts": "seconds"},
            r"2 columns could be the user \(who did it\): --user user_id or --user customer_id",
        ),
        (
            {"user_id": "text", "sku": "text", "asin": "text", "ts": "seconds"},
            "--item sku or --item asin",
        ),
        (
            {"user_id": "text", "sku": "text", "ts": "seconds", "time": "time"},
            "--time ts or --time time",
        ),
        (
            {"user_id": "text", "sku": "text", "ts": "seconds", "event": "text", "action": "text"},
            "--event event or --event action, or --event none",
        ),
        (
            {
                "user_id": "text",
                "sku": "text",
                "ts": "seconds",
                "rating": "number",
                "score": "number",
            },
            "--value rating or --value score, or --value none",
        ),
        (
            {"a": "text", "sku": "text", "ts": "seconds"},
            r"name it with --user: 'a', 'sku', "
            r"'ts'.*--columns a,b",
        ),
        (
            {"user_id": "text", "b": "text", "ts": "seconds"},
            "no column looks like the item.*name it with --item",
        ),
        (
            {"user_id": "text", "sku": "text", "x": "text"},
            "no column looks like the time.*name it with --time.*--no-time",
        ),
        ({"user_id": "number", "sku": "text", "ts": "seconds"}, "no column looks like the user"),
        ({"user_id": "text", "sku": "list", "ts": "seconds"}, "no column looks like the item"),
    ],
    ids=str,
)
def test_what_cannot_be_guessed_is_asked(kinds: dict[str, str], reason: str) -> None:
    with pytest.raises(DataError, match=f"log.csv: .*{reason}"):
        choose({}, **kinds)


def test_a_named_column_is_chosen() -> None:
    kinds = {"user_id": "text", "customer_id": "text", "sku": "text", "ts": "seconds"}
    assert choose({"user": "customer_id"}, **kinds)["user"] == "customer_id"
    with pytest.raises(
        DataError, match="--user absent: there is no such column; there are 'user_id'"
    ):
        choose({"user": "absent"}, **kinds)
    with pytest.raises(DataError, match="'sku' is both user and item; name another column"):
        choose({"user": "sku"}, **kinds)


def test_an_event_of_very_many_kinds_is_none() -> None:
    columns = {"user_id": CELLS["text"], "item_id": CELLS["text"], "ts": CELLS["seconds"]}
    many = pa.array([f"n{at}" for at in range(200)])
    short = {name: pa.concat_arrays([array] * 67).slice(0, 200) for name, array in columns.items()}
    assert (
        _names(choose_log_columns({**short, "event": many}, {}, source="log.csv"))["event"] is None
    )


def test_items_are_found_by_the_name_that_the_log_uses() -> None:
    columns = {
        "sku": CELLS["text"],
        "product_id": CELLS["text"],
        "title": CELLS["text"],
        "name": CELLS["text"],
    }
    with pytest.raises(DataError, match="--items-key sku or --items-key product_id"):
        choose_item_columns(columns, {}, "item", "items.csv")
    with pytest.raises(DataError, match="--title title or --title name, or --title none"):
        choose_item_columns(columns, {}, "sku", "items.csv")
    key, title = choose_item_columns(columns, {"title": "name"}, "sku", "items.csv")
    assert (key.name, title and title.name) == ("sku", "name")
    key, title = choose_item_columns(
        {"id": CELLS["integer"], "colour": CELLS["text"]}, {}, "sku", "items.csv"
    )
    assert (key.name, title) == ("id", None)
