"""Times in several columns: a date and a clock, or a year, a month and a day.

The parts are joined to one text, which is read as any other time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from npu_gr.dataset.cells import as_text, pa, pc, text_sql

MARK = "+"  # between the names of the parts: --time date+time
_CALENDAR = (
    ("year", "yyyy", "jahr", "年"),
    ("month", "mm", "monat", "月"),
    ("day", "dd", "tag", "dayofmonth", "日"),
)
_HOURS = ("hour", "hh", "stunde", "时", "小时")
_DATES = ("date", "eventdate", "orderdate", "purchasedate", "datum", "day", "日期")
_CLOCKS = ("time", "eventtime", "clock", "timeofday", "uhrzeit", "zeit", "时间")
_CLOCK = r"^\s*\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*([AP]M)?\s*$"
_WHOLE = r"^\s*\d{1,4}(\.0*)?\s*$"
_DAY = r"^\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4})\s*$"
_HOUR = r"^\s*([01]?\d|2[0-3])\s*$"


def find_parts(columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Find the columns that together are the time, by name and cells; () = there are none.

    Args:
        columns: The first cells of all columns, by name.
    """
    plain = {re.sub(r"[\W_]", "", name.lower()): name for name in columns}
    calendar = [next((plain[word] for word in words if word in plain), None) for words in _CALENDAR]
    if None not in calendar:
        found = [name for name in calendar if name is not None]
        hour = next((plain[word] for word in _HOURS if word in plain), None)
        found += [hour] if hour is not None else []
        if all(_all_match(columns[name], _WHOLE) for name in found):
            return tuple(found)
    clock = next(
        (plain[w] for w in _CLOCKS if w in plain and _all_match(columns[plain[w]], _CLOCK)), None
    )
    date = next((plain[w] for w in _DATES if w in plain and plain[w] != clock), None)
    if clock is None or date is None or _all_match(columns[date], _CLOCK):
        return ()
    return date, clock


def find_hour(columns: Mapping[str, Any], date: str) -> str:
    """Find the column of the hour for a column of dates, as folders `dt=.../hour=09` have; "" = no.

    Args:
        columns: The first cells of all columns, by name.
        date: Name of the column of dates.
    """
    if not _all_match(columns[date], _DAY):
        return ""
    plain = {re.sub(r"[\W_]", "", name.lower()): name for name in columns}
    hours = (plain[word] for word in _HOURS if word in plain)
    return next((name for name in hours if _all_match(columns[name], _HOUR)), "")


def joined(arrays: Sequence[Any]) -> Any:
    """Join the cells of the parts: Arrow arrays [n] -> an Arrow array of strings [n]."""
    columns = [as_text(array).to_pylist() for array in arrays]
    return pa.array([_join(cells) for cells in zip(*columns, strict=True)], pa.string())


def _join(cells: Sequence[str | None]) -> str | None:
    parts = [cell.strip() for cell in cells if cell is not None]
    if len(parts) < len(cells):
        return None
    if len(parts) == 2:
        return " ".join(parts) + (":00" if re.match(_HOUR, parts[1]) else "")
    numbers = [part.split(".")[0].rjust(2, "0") for part in parts]
    return "-".join(numbers[:3]) + "".join(f" {hour}:00" for hour in numbers[3:])


def joined_sql(cells: Sequence[tuple[str, str]]) -> str:
    """Return the SQL that joins cells as `joined` does; each is an expression and its type."""
    texts = [f"trim({text_sql(cell, kind)}, E' \\t\\r\\n')" for cell, kind in cells]
    if len(texts) == 2:
        end = f"CASE WHEN regexp_matches({texts[1]}, '{_HOUR}') THEN ':00' ELSE '' END"
        return f"({texts[0]} || ' ' || {texts[1]} || {end})"
    numbers = [f"regexp_replace({text}, '\\.0*$', '')" for text in texts]
    padded = [f"lpad({one}, CAST(greatest(length({one}), 2) AS INTEGER), '0')" for one in numbers]
    hours = [f" || ' ' || {one} || ':00'" for one in padded[3:]]
    return "(" + " || '-' || ".join(padded[:3]) + "".join(hours) + ")"


def _all_match(array: Any, expression: str) -> bool:
    if str(array.type).startswith(("list", "large_list", "struct")):
        return False
    texts = pc.drop_null(as_text(array))
    return bool(len(texts)) and bool(pc.all(pc.match_substring_regex(texts, expression)).as_py())
