"""The fields of a record that an access log may have: how the text or JSON value of each is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from npu_gr.core.names import item_ids
from npu_gr.core.words import quoted
from npu_gr.replay.line_format import NoField, look_up

_UNITS = ((1_000_000_000, 1e17), (1_000_000, 1e14), (1000, 1e11))  # of a second, and the least number that is in them
_LATEST_S = 4_102_444_800.0  # 2100-01-01
_NGINX_TIME = "%d/%b/%Y:%H:%M:%S %z"


class Stamp(NamedTuple):
    """A time of a log."""

    seconds: float  # since 1970
    is_whole: bool  # it is written without a fraction of a second


def read_time(value: Any) -> Stamp:
    """Read a time: seconds, ms, us or ns since 1970 by their size, ISO 8601, or as nginx writes its local time.

    Raises:
        ValueError: it is none of them, or not of our days.
    """
    if isinstance(value, str):
        text = value.strip()
        try:
            value = int(text) if text.isdigit() else float(text)
        except ValueError:
            return _dated(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{quoted(value)} is no time")
    unit = next((unit for unit, least in _UNITS if abs(value) >= least), 1)
    seconds = value / unit
    if not 0 <= seconds < _LATEST_S:
        raise ValueError(f"{value} is no time since 1970 in s, ms, us or ns")
    return Stamp(seconds, unit == 1 and isinstance(value, int))


def _dated(text: str) -> Stamp:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        try:
            at = datetime.strptime(text, _NGINX_TIME)
        except ValueError:
            raise ValueError(
                f"{quoted(text)} is no time: since 1970, ISO 8601, or 31/Dec/2026:23:59:59 +0000"
            ) from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return Stamp(at.timestamp(), re.search(r"\d[.,]\d", text) is None)


def _text(value: Any) -> str:
    if isinstance(value, str | int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{quoted(value)} is neither text nor a whole number")


def _number(value: Any) -> float:
    try:
        number = float(value if isinstance(value, float) else _text(value))
    except ValueError:
        raise ValueError(f"{quoted(value)} is no number") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"{value} is not in 0 to infinity")
    return number


def _count(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError(f"{quoted(value)} is no whole number")
    return int(number)


def _several(value: Any) -> list[Any]:
    """Read a list, also as JSON, or a text of values between commas."""
    if isinstance(value, str) and value.startswith("["):
        value = msgspec.json.decode(value.encode())  # its error is a ValueError
    if isinstance(value, list):
        return value
    return [part.strip() for part in _text(value).split(",")]


def _ids(value: Any) -> list[int]:
    ids: list[int] = item_ids(_several(value)).tolist()
    return ids


def _times(value: Any) -> list[int]:
    return [int(read_time(one).seconds) for one in _several(value)]


COLUMNS = ("history", "events")  # each has items, actions and timestamps of one length, oldest first
# What --field may name, and how its value is read.
FIELDS: dict[str, Callable[[Any], Any]] = {
    "ts": read_time,
    "user_id": _text,
    "tenant": _text,
    "path": _text,
    "method": _text,
    "status": _count,
    "latency_s": _number,
    "latency_ms": _number,
    "deadline_ms": _number,
    "candidates": _ids,
    "num_candidates": _count,
    "num_items": _count,
    "top_k": _count,
    "timestamp": lambda value: int(read_time(value).seconds),
    **{f"{part}.items": _ids for part in COLUMNS},
    **{f"{part}.actions": _several for part in COLUMNS},
    **{f"{part}.timestamps": _times for part in COLUMNS},
}


class LineReader:
    """Reads the fields of one line."""

    def __init__(self, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
        self._values = values
        self._sources = sources
        self.found: set[str] = set()  # fields that the line had
        self.absent: dict[str, str] = {}  # and those that it had not: what it had

    def __call__(self, name: str) -> Any:
        """Return what a line says of a field; None = nobody named it, or the server wrote that there is none."""
        source = self._sources.get(name)
        if source is None:
            return None
        try:
            value = look_up(self._values, source)
        except NoField as error:
            self.absent[name] = str(error)
            return None
        self.found.add(name)
        try:
            return None if value is None else FIELDS[name](value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{name}={source}: {error}") from None
