"""Read the times of a log: a unit since 1970, ISO 8601, a calendar, or a given format.

The unit of numbers is recognised by their size in the first rows and holds for the whole log: a row
with another unit is rejected. Times without a zone are UTC.

    below 1e11  seconds (until the year 5138)      below 1e17  microseconds
    below 1e14  milliseconds                       above       nanoseconds

Digits that are calendars in every row, and numbers of 30,000 to 60,000 with fractions or in a
column of dates (the days of a spreadsheet), are recognised first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.dataset.cells import (
    NUMBER,
    is_instant,
    is_integer_type,
    is_missing_sql,
    is_text,
    literal,
    number_sql,
    pa,
    pc,
)
from npu_gr.dataset.rejects import CODES, RejectReason
from npu_gr.dataset.time_formats import find_digits, find_format

US_PER_S = 1_000_000
ORDER_S = 10_000_000  # smaller numbers are row numbers rather than seconds since 1970
FIRST_US = ORDER_S * US_PER_S
LAST_US = 4_102_444_800 * US_PER_S  # 2100-01-01
# microseconds per unit; negative: units per microsecond
UNITS = {"s": US_PER_S, "ms": 1000, "us": 1, "ns": -1000}
NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
ISO = "iso"
_LIMITS = (1e11, 1e14, 1e17)
_INTEGER = r"^[+-]?[0-8]?\d{1,18}$"
_ISO = (
    r"^\d{4}-\d{2}-\d{2}"
    r"([T ]\d{2}(:\d{2}(:\d{2}([.,]\d+)?)?)?\s*(Z|z|UTC|GMT|[+-]\d{2}:?(\d{2})?)?)?$"
)
_ZONE = r"(Z|z|UTC|GMT|[+-]\d{2}:?(\d{2})?)$"
_PLAIN_ISO = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}:\d{2}(\.\d{1,6})?)?$"
_MOST = 2**63 - 1
SERIAL = "days of a spreadsheet"
_SERIALS = (30_000, 60_000)  # 1982 to 2064
_IS_DATE = re.compile(r"(?i)date|datum|fecha|дата|日期|日付")  # names of columns of whole days
_SERIAL_OF_1970 = 25_569
_ROUNDED = r"^\d(\.\d+)?[eE]\+\d+$"


class TimeSql(NamedTuple):
    """SQL that reads times, in three steps."""

    parts: dict[str, str]  # columns computed from the cells; `us` and `reason` use them
    us: str  # microseconds since 1970, computed from the parts; null if unreadable
    # one of CODES or 0, computed from the parts and `time_us` (the value of `us`)
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeKind:
    """The format of the times in a log."""

    unit: str  # a key of UNITS, ISO, SERIAL, or "" with a `pattern`
    pattern: str = ""  # of strptime
    words: str  # for the summary
    is_guess: bool = True  # reject numbers whose size suggests another unit
    least_us: int = FIRST_US  # reject earlier times: many tools write 0 for "unset"

    def sql(self, column: str, kind: str) -> TimeSql:
        """Return the SQL that reads cells of a DuckDB type."""
        parts = {"time_missing": is_missing_sql(column, kind)}
        text = (
            f"trim({column}, E' \\t\\r\\n')" if kind == "VARCHAR" else f"CAST({column} AS VARCHAR)"
        )
        is_other = "FALSE"
        if kind.startswith("TIMESTAMP WITH") or kind == "TIMESTAMPTZ":
            us = f"epoch_us({column})"
        elif kind == "DATE" or kind.startswith("TIMESTAMP"):
            us = f"epoch_us(CAST({column} AS TIMESTAMP))"
        elif self.pattern:
            us = f"epoch_us(try_strptime({text}, {literal(self.pattern)}))"
        elif self.unit == ISO:
            us = _iso_sql(text)
        else:
            if is_integer_type(kind):
                parts |= {
                    "time_whole": f"TRY_CAST({column} AS BIGINT)",
                    "time_fraction": "CAST(NULL AS DOUBLE)",
                }
            elif kind == "VARCHAR":
                plain = f"TRY_CAST({column} AS BIGINT)"  # the fast path of plain digits
                whole = (
                    f"CASE WHEN CAST({plain} AS VARCHAR) = {column} THEN {plain} "
                    f"WHEN regexp_matches({text}, '{_INTEGER}') THEN TRY_CAST({text} AS BIGINT) END"
                )
                parts |= {"time_whole": whole}
                parts |= {
                    "time_fraction": (
                        f"CASE WHEN {whole} IS NULL THEN {number_sql(column, kind)} END"
                    )
                }
            else:
                parts |= {
                    "time_whole": "CAST(NULL AS BIGINT)",
                    "time_fraction": number_sql(column, kind),
                }
            us = _serial_sql() if self.unit == SERIAL else _scaled_sql(self.unit)
            if self.is_guess and self.unit != SERIAL:
                size = "abs(coalesce(CAST(time_whole AS DOUBLE), time_fraction))"
                low, high = _range_of(self.unit)
                is_other = f"{size} >= {ORDER_S} AND NOT ({size} >= {low} AND {size} < {high})"
        codes = {reason.name: CODES[reason] for reason in RejectReason}
        reason = (
            f"CASE WHEN {is_other} THEN {codes['OTHER_UNIT']} WHEN time_missing THEN "
            f"{codes['NO_TIME']} "
            f"WHEN time_us IS NULL THEN {codes['UNREADABLE_TIME']} WHEN time_us < {self.least_us} "
            f"THEN {codes['EARLY']} WHEN time_us >= {LAST_US} THEN {codes['LATE']} ELSE 0 END"
        )
        if "time_whole" not in parts:
            parts |= {"time_read": us}
            us = "time_read"
        return TimeSql(parts, us, reason)


def recognise(array: Any, name: str, unit: str = "", pattern: str = "") -> TimeKind:
    """Recognise the format of the times in a log.

    Args:
        array: The first cells of the column.
        name: Name of the column, for messages.
        unit: A key of UNITS, or ISO; "" to recognise it.
        pattern: Format of strptime; "" to recognise it.

    Raises:
        DataError: the cells do not look like times; the message names the option that helps.
    """
    if is_instant(array):
        zone = array.type.tz if _has_zone(array) else None
        return TimeKind(unit=ISO, words=f"{array.type}" + ("" if zone else ", UTC assumed"))
    if pattern:
        return TimeKind(
            unit="", pattern=pattern, words=f"as --time-format {pattern} says, UTC assumed"
        )
    texts = pc.drop_null(
        pc.utf8_trim_whitespace(array if is_text(array) else pc.cast(array, pa.string()))
    )
    numbers = pc.replace_substring_regex(
        texts.filter(pc.match_substring_regex(texts, NUMBER)), r"^\+", ""
    )
    size = np.abs(pc.cast(numbers, pa.float64()).to_numpy(zero_copy_only=False))
    size = size[np.isfinite(size)]
    is_order = bool(size.size) and size.max() < ORDER_S
    least_us = 0 if is_order else FIRST_US
    if unit:
        words = f"{NAMES.get(unit, 'ISO 8601')}, as --time-unit says"
        return TimeKind(unit=unit, words=words, is_guess=False, least_us=least_us)
    if not len(texts):
        raise DataError(f"{name}: the first rows have no time; name another column with --time")
    is_iso = pc.match_substring_regex(texts, _ISO)
    num_iso = pc.sum(is_iso).as_py()
    if num_iso >= len(size) and num_iso:
        dated = texts.filter(is_iso)
        has_zone = pc.sum(pc.match_substring_regex(dated, f"[T ].*{_ZONE}")).as_py()
        missing = "" if has_zone == len(dated) else ", UTC assumed where no zone is given"
        return TimeKind(unit=ISO, words=f"ISO 8601{missing}")
    if found := find_format(texts, name):
        words = f"as {found}, recognised from {texts[0].as_py()!r}"
        return TimeKind(unit="", pattern=found, words=f"{words}, UTC assumed")
    if not len(size):
        raise DataError(
            f"{name}: {texts[0].as_py()!r} is not a known time (seconds, milliseconds, "
            "microseconds or nanoseconds since 1970, ISO 8601, or a calendar such as "
            "2024/03/01 09:00); give its format as strptime has it with --time-format, "
            "or name another column with --time"
        )
    if is_text(array) and pc.mean(pc.match_substring_regex(texts, _ROUNDED)).as_py() > 0.5:
        raise DataError(
            f"{name}: {texts[0].as_py()!r} was rounded, probably by a spreadsheet, so events of "
            "minutes share a time; export the column as text, or give --time-unit s to use it"
        )
    if found := "" if pa.types.is_floating(array.type) else find_digits(texts):
        words = f"digits of a calendar ({found}), UTC assumed"
        return TimeKind(unit="", pattern=found, words=words)
    if (_SERIALS[0] <= size.min() and size.max() < _SERIALS[1]) and (
        (size % 1).any() or _IS_DATE.search(name.rpartition(": ")[2])
    ):
        return TimeKind(unit=SERIAL, words="days of a spreadsheet since 1899-12-30, UTC assumed")
    unit = list(UNITS)[int(np.bincount(np.digitize(size, _LIMITS), minlength=4).argmax())]
    words = f"{NAMES[unit]} since 1970, by the size of the numbers"
    if is_order:
        words = "small numbers: positions in an order rather than seconds since 1970"
    return TimeKind(unit=unit, words=words, least_us=least_us)


def _has_zone(array: Any) -> bool:
    return bool(pa.types.is_timestamp(array.type)) and array.type.tz is not None


def _range_of(unit: str) -> tuple[float, float]:
    """Return the range of numbers that suggests this unit."""
    at = list(UNITS).index(unit)
    limits = (0.0, *_LIMITS, 1e300)
    return limits[at], limits[at + 1]


def _scaled_sql(unit: str) -> str:
    """Return the SQL of microseconds from `time_whole` or `time_fraction`, clamped to int64."""
    factor = UNITS[unit]
    if factor < 0:
        whole, fraction = f"time_whole // {-factor}", f"floor(time_fraction / {-factor})"
    else:
        most = _MOST // factor
        whole = f"greatest(least(time_whole, {most}), -{most}) * {factor}"
        fraction = f"floor(time_fraction * {factor})"
    fraction = f"CAST(greatest(least({fraction}, 9e18), -9e18) AS BIGINT)"
    return (
        f"CASE WHEN time_whole IS NOT NULL THEN {whole} WHEN time_fraction IS NOT NULL THEN "
        f"{fraction} END"
    )


def _serial_sql() -> str:
    """Return the SQL of microseconds from a spreadsheet's days, rounded to seconds."""
    days = f"(coalesce(CAST(time_whole AS DOUBLE), time_fraction) - {_SERIAL_OF_1970})"
    return f"CAST(round({days} * 86400) AS BIGINT) * {US_PER_S}"


def _iso_sql(text: str) -> str:
    """Return the SQL of microseconds from ISO 8601 texts; without a zone they are UTC."""
    us = f"epoch_us(TRY_CAST({text} AS TIMESTAMP))"
    other = f"CASE WHEN regexp_matches({text}, '{_ISO}') THEN {text} END"
    for pattern, by in (
        (r"\s*(z|UTC|GMT)$", "Z"),
        (r"[.,](\d{1,6})\d*", r".\1"),
        (r"\s+([+-]\d{2}:?(\d{2})?)$", r"\1"),
        (r"^(\d{4}-\d{2}-\d{2}[T ]\d{2})(Z|[+-].*|)$", r"\1:00\2"),
    ):
        other = f"regexp_replace({other}, '{pattern}', '{by}')"
    zoned = f"epoch_us(TRY_CAST({other} AS TIMESTAMPTZ))"
    return f"CASE WHEN regexp_matches({text}, '{_PLAIN_ISO}') THEN {us} ELSE {zoned} END"
