"""Parse a Kafka message as one event: {"user_id", "item_id", "event", "timestamp"} or similar."""

from __future__ import annotations

import hashlib
import math
from datetime import UTC, datetime
from typing import Any

import msgspec
import orjson

from npu_gr.core.feature_schema.columns import as_columns
from npu_gr.core.feature_schema.values import BLANKS
from npu_gr.core.history import Events, Mode, UserKey, Write
from npu_gr.core.names import item_id, value_name
from npu_gr.core.text_format import cut, quoted
from npu_gr.server.schemas.fields import LAST_S, MAX_NAME
from npu_gr.tools.ingest import EventModel

_GUESSED = {
    "user": "userid user uid customerid customer visitorid memberid accountid clientid",
    "item": "itemid item sku skuid productid product asin articleid contentid",
    "event": "event eventtype eventname action actiontype behavior behaviour rating type",
    "time": "timestamp time ts eventtime eventtimestamp createdat occurredat datetime",
}


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of the fields in a message, e.g. `payload.user`; None: guessed in each message."""

    user: str | None = None
    item: str | None = None
    event: str | None = None
    time: str | None = None
    features: dict[str, str] = {}  # event feature -> path; never guessed


class Poison(ValueError):
    """A message that cannot be parsed as an event; the text is the reason."""


def read_event(message: Any, fields: Fields, model: EventModel, tenant: str = "") -> Write:
    """Parse a message as an append of one event, with an idempotency key made of its offset.

    A field without a path is guessed by its name, ignoring case and punctuation. An event without
    a time has the broker's.

    Raises:
        Poison: the message cannot be parsed.
    """
    try:
        table = orjson.loads(message.value or b"null")
    except orjson.JSONDecodeError as error:
        raise Poison(f"no JSON: {error}") from None
    if not isinstance(table, dict):
        raise Poison("not a JSON object" if message.value else "no value")
    # the first of several similar names counts
    plain = {
        "".join(filter(str.isalnum, name.lower())): one for name, one in reversed(table.items())
    }

    def cell(role: str, kinds: Any) -> Any:
        if (path := getattr(fields, role)) is not None:
            found = _at(table, path)
        else:
            found = next(
                (plain[one] for one in _GUESSED[role].split() if plain.get(one) is not None), None
            )
        if isinstance(found, bool) or not isinstance(found, kinds):
            raise Poison(f"no {role}" if found is None else f"{role}: {quoted(found)} is no {role}")
        return found

    user, item = str(cell("user", str | int)).strip(BLANKS), cell("item", str | int)
    event, at = cell("event", str | int | float | None), cell("time", str | int | float | None)
    if not 0 < len(user) <= MAX_NAME:
        raise Poison(f"user: {len(user)} characters, must be 1 to {MAX_NAME}")
    if at is None and (fields.time or message.timestamp is None or message.timestamp < 0):
        raise Poison(f"no {fields.time or 'time, of the message or of its broker'}")
    at = message.timestamp // 1000 if at is None else seconds(at)
    action = _action(value_name(event) if isinstance(event, int | float) else event, model)
    columns = {name: [_at(table, field)] for name, field in fields.features.items()}
    known = {one.name: one for one in model.features if one.of == "event"}
    where = "item: "
    try:
        events = Events.make([item_id(item, model.item_key)], [action], [at])
        where = "features."
        events = msgspec.structs.replace(events, features=as_columns(known, columns, 1))
    except (ValueError, UnicodeError) as error:
        raise Poison(f"{where}{error}") from None
    text = f"{message.topic}\0{message.partition}\0{message.offset}\0{message.timestamp}"
    key = f"kafka-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
    return Write(UserKey(tenant, user), events, Mode.APPEND, key, (item,))


def _action(name: str | None, model: EventModel) -> int:
    if name is None and len(model.actions) == 1:
        return 0
    if name is None:
        raise Poison("event: none, but the model has several actions; name the field with --event")
    if name not in model.actions:
        known = ", ".join(cut(one) for one in model.actions[:20])
        raise Poison(f"event: {cut(name)!r} is not an action of the model: {known}")
    return model.actions.index(name)


def _at(table: dict[str, Any], path: str) -> Any:
    """Find the value at a path such as `payload.user.id`; a field of that full name comes first."""
    if path in table:
        return table[path]
    first, _, rest = path.partition(".")
    return _at(inner, rest) if rest and isinstance(inner := table.get(first), dict) else None


def seconds(time: str | float) -> int:
    """Convert ISO 8601 or a number, whose unit is guessed by its size, to unix seconds.

    Raises:
        Poison: the value is not a time between 1970 and the latest time.
    """
    shown = quoted(time)
    try:
        number = float(time)
    except ValueError:
        try:
            moment = datetime.fromisoformat(str(time).strip())
        except ValueError:
            raise Poison(f"time: {shown} is neither a number nor ISO 8601") from None
        number = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except OverflowError:
        number = math.inf
    units = next((unit for unit in (1, 10**3, 10**6, 10**9) if abs(number) <= LAST_S * unit), None)
    if units is None:
        raise Poison(f"time: {shown} is too large")
    found = math.floor(number / units)
    if not 0 <= found <= LAST_S:
        raise Poison(f"time: {found} is not between 1970 and {LAST_S}")
    return found
