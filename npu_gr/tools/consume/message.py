"""One message of a topic as one event: a JSON object such as {"user_id", "item_id", "event", "timestamp"}.

A field that is not told is guessed by its name, without regard to case, blanks and underscores. Times are seconds,
milliseconds, microseconds or nanoseconds since 1970, told apart by their size, or ISO 8601, without a zone in UTC.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson

from npu_gr.core.feature_schema.columns import NO_COLUMNS, Columns, as_columns
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.names import item_id, value_name
from npu_gr.core.words import quoted
from npu_gr.server.codec.fields import LAST_S, MAX_NAME

_GUESSED = {
    "user": ("userid", "user", "uid", "customerid", "customer", "visitorid", "memberid", "accountid", "clientid"),
    "item": ("itemid", "item", "sku", "skuid", "productid", "product", "asin", "articleid", "contentid"),
    "event": ("event", "eventtype", "eventname", "action", "actiontype", "behavior", "behaviour", "rating", "type"),
    "time": ("timestamp", "time", "ts", "eventtime", "eventtimestamp", "createdat", "occurredat", "datetime"),
}
_UNITS = ((1, 1), (10**3, 10**3), (10**6, 10**6), (10**9, 10**9))  # times LAST_S -> units of a second


class Poison(ValueError):
    """A message that is no event; the text says why."""


class Event(NamedTuple):
    """What a message says."""

    user: str
    item: int  # id
    action: int  # of the model
    timestamp: int  # unix seconds
    features: Columns = NO_COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The names of the fields; None = guessed, anew in each message."""

    user: str | None = None
    item: str | None = None
    event: str | None = None
    time: str | None = None
    features: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of events: name -> field; never guessed


def read_event(
    value: bytes | None,
    came_ms: int | None,
    fields: Fields,
    action_of: Callable[[str | None], int],
    known: Mapping[str, Feature] | None = None,
) -> Event:
    """Read a message.

    Args:
        value: JSON.
        came_ms: the broker's time of the message: that of an event without one. None, -1: it knows none.
        fields: where is what.
        action_of: the model's action by its name; None = the message names none. Raises Poison.
        known: the model's features of events; a field that a message lacks is a missing value.

    Raises:
        Poison: the message is no event.
    """
    if value is None:
        raise Poison("no value")
    try:
        table = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise Poison(f"no JSON: {error}") from None
    if not isinstance(table, dict):
        raise Poison("not a JSON object")
    plain = {_plain(name): cell for name, cell in reversed(table.items())}  # of two alike the first counts

    def cell(role: str, told: str | None) -> Any:
        if told is not None:
            return _at(table, told)
        return next((plain[name] for name in _GUESSED[role] if plain.get(name) is not None), None)

    time = cell("time", fields.time)
    if time is None and fields.time is not None:
        raise Poison(f"no {fields.time}")
    if time is None and (came_ms is None or came_ms < 0):
        raise Poison("no time, of the message or of its broker")
    return Event(
        _user(cell("user", fields.user)),
        _item(cell("item", fields.item)),
        action_of(_event(cell("event", fields.event))),
        (came_ms or 0) // 1000 if time is None else seconds(time),
        _features({name: [_at(table, field)] for name, field in fields.features.items()}, known or {}),
    )


def _features(columns: Mapping[str, list[Any]], known: Mapping[str, Feature]) -> Columns:
    try:
        return as_columns(known, columns, 1)
    except ValueError as error:
        raise Poison(f"features.{error}") from None


def seconds(time: object) -> int:
    """Return unix seconds. Raises Poison where it is no time."""
    if isinstance(time, str):
        text = time.strip()
        try:
            time = float(text) if _is_number(text) else datetime.fromisoformat(text)
        except ValueError:
            raise Poison(f"time: {quoted(time)} is neither a number nor ISO 8601") from None
    if isinstance(time, datetime):
        return _checked(int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()))
    if isinstance(time, bool) or not isinstance(time, int | float) or not math.isfinite(time):
        raise Poison(f"time: {quoted(time)} is no time")
    for most, units in _UNITS:
        if abs(time) <= LAST_S * most:
            return _checked(math.floor(time / units) if isinstance(time, float) else time // units)
    raise Poison(f"time: {quoted(time)} is too large")


def _checked(time: int) -> int:
    if not 0 <= time <= LAST_S:
        raise Poison(f"time: {time} is not between 1970 and {LAST_S}")
    return time


def _is_number(text: str) -> bool:
    return text.removeprefix("-").replace(".", "", 1).isascii() and text.removeprefix("-").replace(".", "", 1).isdigit()


def _user(cell: object) -> str:
    if isinstance(cell, bool) or not isinstance(cell, str | int):
        raise Poison("no user" if cell is None else f"user: {quoted(cell)} is no user")
    text = str(cell)
    if not 0 < len(text) <= MAX_NAME:
        raise Poison(f"user: {len(text)} characters; it has 1 to {MAX_NAME}")
    return text


def _item(cell: object) -> int:
    if isinstance(cell, bool) or not isinstance(cell, str | int):
        raise Poison("no item" if cell is None else f"item: {quoted(cell)} is no item")
    try:
        return item_id(cell)
    except (ValueError, UnicodeError) as error:
        raise Poison(f"item: {error}") from None


def _event(cell: object) -> str | None:
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        raise Poison(f"event: {quoted(cell)} is no event")
    return value_name(cell)


def _at(table: Mapping[str, Any], path: str) -> Any:
    """The cell at a path such as `payload.user.id`; a field of that very name comes first."""
    if path in table:
        return table[path]
    first, _, rest = path.partition(".")
    inner = table.get(first)
    return _at(inner, rest) if rest and isinstance(inner, dict) else None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
