"""A message is read as an event, by guessed or given fields and any usual time.

Or the text says why it is none.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, cast

import pytest

from npu_gr.core.names import item_id
from npu_gr.tools.consume_message import Fields, Poison, read_event, seconds
from npu_gr.tools.ingest import EventModel
from tests.tools.test_consumer import Message

ACTIONS = ("view", "purchase", "4.5")


class Event(NamedTuple):
    """What a message says."""

    user: str
    item: int
    action: int
    timestamp: int


def read(
    table: Any, fields: Fields | None = None, came_ms: int | None = 1_600_000_123_456
) -> Event:
    value = table if isinstance(table, bytes | None) else json.dumps(table).encode()
    message = Message("t", 0, 1, cast(int, came_ms), None, value)
    found = read_event(message, fields or Fields(), EventModel(ACTIONS))
    events = found.events
    return Event(
        found.user.user, int(events.items[0]), int(events.actions[0]), int(events.timestamps[0])
    )


@pytest.mark.parametrize(
    "table",
    [
        {"user_id": "u", "item_id": "SKU-1", "event": "purchase", "timestamp": 1_600_000_000},
        {"userId": "u", "sku": "SKU-1", "eventType": "purchase", "ts": 1_600_000_000_999},
        {
            "User": "u",
            "Product ID": "SKU-1",
            "action": "purchase",
            "created_at": "2020-09-13T12:26:40Z",
            "more": [{}],
        },
    ],
)
def test_fields_are_guessed(table: dict[str, Any]) -> None:
    assert read(table) == Event("u", item_id("SKU-1"), 1, 1_600_000_000)


def test_fields_are_given() -> None:
    table = {
        "user_id": "wrong",
        "p": {"who": 7, "what": 42},
        "kind": "view",
        "at.utc": "2020-09-13 14:26:40+02:00",
    }
    fields = Fields(user="p.who", item="p.what", event="kind", time="at.utc")
    assert read(table, fields) == Event("7", 42, 0, 1_600_000_000)


def test_numbers_are_events_and_the_broker_knows_the_time() -> None:
    assert read({"user": "u", "item": "1", "rating": 4.5}) == Event("u", 1, 2, 1_600_000_123)


@pytest.mark.parametrize(
    "time",
    [
        *(
            1.6e9,
            1_600_000_000_500,
            1_600_000_000_500_000,
            1_600_000_000_500_000_000,
            "1600000000",
            "1600000000.7",
        ),
        *("2020-09-13T12:26:40", "2020-09-13T12:26:40.5+00:00", " 2020-09-13 12:26:40Z "),
    ],
)
def test_times(time: str | float) -> None:
    assert seconds(time) == 1_600_000_000


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (None, "no value"),
        (b"\xff", "no JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 5000, "no JSON"),
        ({"item": "a", "event": "view"}, "no user"),
        ({"user": "", "item": "a", "event": "view"}, "user: 0 characters"),
        ({"user": "u" * 129, "item": "a", "event": "view"}, "user: 129 characters"),
        ({"user": ["u"], "item": "a", "event": "view"}, "is no user"),
        ({"user": "u", "event": "view"}, "no item"),
        ({"user": "u", "item": 1.5, "event": "view"}, "is no item"),
        ({"user": "u", "item": -1, "event": "view"}, "item: "),
        ({"user": "u", "item": "x" * 600, "event": "view"}, "item: "),
        (
            {"user": "u", "item": "a", "event": "nap"},
            "event: 'nap' is not an action of the model: view, purchase, 4.5",
        ),
        ({"user": "u", "item": "a", "event": {}}, "is no event"),
        ({"user": "u", "item": "a", "event": "view", "time": "noon"}, "neither a number nor ISO"),
        ({"user": "u", "item": "a", "event": "view", "time": True}, "is no time"),
        ({"user": "u", "item": "a", "event": "view", "time": -5}, "not between"),
        ({"user": "u", "item": "a", "event": "view", "time": 1e30}, "too large"),
    ],
)
def test_what_is_no_event_says_why(table: Any, reason: str) -> None:
    with pytest.raises(Poison, match=reason):
        read(table)


@pytest.mark.parametrize("number", [1234567, 1234567.0, 1234568.5])
def test_numbers_keep_their_digits(number: float) -> None:
    name = str(number).removesuffix(".0")
    with pytest.raises(Poison, match=f"event: '{name}' is not an action"):
        read({"user": "u", "item": 1, "event": number})


@pytest.mark.parametrize("came_ms", [None, -1])
def test_a_broker_that_knows_no_time_tells_none(came_ms: int | None) -> None:
    value = b'{"user": "u", "item": "a", "event": "view"}'
    with pytest.raises(Poison, match="no time"):
        read(value, None, came_ms)
    timed = value.replace(b"}", b', "time": 1600000000}')
    assert read(timed, None, came_ms).timestamp == 1_600_000_000


def test_a_time_that_was_given_must_be_there() -> None:
    with pytest.raises(Poison, match="no at"):
        read({"user": "u", "item": "a", "event": "view"}, Fields(time="at"))
