"""Times of a log: seconds, milliseconds, microseconds or nanoseconds since 1970, ISO 8601, or a format that is given.

The kind is recognised by the size of numbers in the first rows, and holds for the whole log: a row
of another kind is rejected. Times without a zone are taken as UTC.

    below 1e11  seconds (until the year 5138)      below 1e17  microseconds
    below 1e14  milliseconds                       above       nanoseconds
"""

from __future__ import annotations

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

US_PER_S = 1_000_000
_ORDER_S = 10_000_000  # numbers below it are rather places in an order than seconds since 1970
FIRST_US = _ORDER_S * US_PER_S
LAST_US = 4_102_444_800 * US_PER_S  # 2100-01-01
# microseconds of one; below 0: so many make a microsecond
UNITS = {"s": US_PER_S, "ms": 1000, "us": 1, "ns": -1000}
NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
ISO = "iso"
_LIMITS = (1e11, 1e14, 1e17)
_INTEGER = r"^[+-]?[0-8]?\d{1,18}$"
_ISO = (
    r"^\d{4}-\d{2}-\d{2}([T "
    r"]\d{2}(:\d{2}(:\d{2}([.,]\d+)?)?)?\s*(Z|z|UTC|GMT|[+-]\d{2}:?(\d{2})?)?)?$"
)
_ZONE = r"(Z|z|UTC|GMT|[+-]\d{2}:?(\d{2})?)$"
_PLAIN_ISO = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}:\d{2}(\.\d{1,6})?)?$"
_MOST = 2**63 - 1
_CALENDAR = r"^(19|20)\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])$"


class TimeSql(NamedTuple):
    """How DuckDB reads times, in three steps."""

    parts: dict[str, str]  # of the cells: what `us` and `reason` stand on
    us: str  # of the parts: microseconds since 1970, null where it is no time
    # of the parts and `time_us`, which is `us`: why a row cannot be used, one of CODES, or 0
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeKind:
    """How a log writes its times."""

    unit: str  # a key of UNITS, ISO, or "" where `pattern` says it
    pattern: str = ""  # as strptime has it
    words: str  # what was found, for a person
    is_guess: bool = True  # numbers whose size says another unit are rejected
    least_us: int = FIRST_US  # earlier ones are rejected: 0 is how many a tool writes "unset"

    def sql(self, column: str, kind: str) -> TimeSql:
        """Write how cells of a type are read."""
        parts = {"time_missing": is_missing_sql(column, kind)}
        text = (
            (f"trim({column}, E' \\t\\r\\n')")
            if kind == "VARCHAR"
            else f"CAST({column} AS VARCHAR)"
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
                    "time_broken": "CAST(NULL AS DOUBLE)",
                }
            elif kind == "VARCHAR":
                plain = f"TRY_CAST({column} AS BIGINT)"  # as most are written
                whole = (
                    f"CASE WHEN CAST({plain} AS VARCHAR) = {column} THEN {plain} "
                    f"WHEN regexp_matches({text}, '{_INTEGER}') THEN TRY_CAST({text} AS BIGINT) END"
                )
                parts |= {"time_whole": whole}
                parts |= {
                    "time_broken": f"CASE WHEN {whole} IS NULL THEN {number_sql(column, kind)} END"
                }
            else:
                parts |= {
                    "time_whole": "CAST(NULL AS BIGINT)",
                    "time_broken": number_sql(column, kind),
                }
            us = _scaled_sql(self.unit)
            if self.is_guess:
                size = "abs(coalesce(CAST(time_whole AS DOUBLE), time_broken))"
                low, high = _range_of(self.unit)
                is_other = f"{size} >= {_ORDER_S} AND NOT ({size} >= {low} AND {size} < {high})"
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
    """Find out how a log writes its times.

    Args:
        array: the cells of the first rows.
        name: of the column, for messages.
        unit: a key of UNITS, or ISO, if it is known.
        pattern: as strptime has it, if it is known.

    Raises:
        DataError: nothing of it looks like a time; the message has the option that helps.
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
    is_order = bool(size.size) and size.max() < _ORDER_S
    least_us = 0 if is_order else FIRST_US
    if unit:
        words = f"{NAMES.get(unit, 'ISO 8601')}, as --time-unit says"
        return TimeKind(unit=unit, words=words, is_guess=False, least_us=least_us)
    if not len(texts):
        raise DataError(
            f"{name}: every time of the first rows is missing; --time names another column"
        )
    is_iso = pc.match_substring_regex(texts, _ISO)
    num_iso = pc.sum(is_iso).as_py()
    if num_iso >= len(size) and num_iso:
        dated = texts.filter(is_iso)
        has_zone = pc.sum(pc.match_substring_regex(dated, f"[T ].*{_ZONE}")).as_py()
        missing = "" if has_zone == len(dated) else ", UTC assumed where no zone is given"
        return TimeKind(unit=ISO, words=f"ISO 8601{missing}")
    if not len(size):
        raise DataError(
            f"{name}: {texts[0].as_py()!r} is no time that is recognised (seconds, milliseconds, "
            "microseconds or "
            "nanoseconds since 1970, or ISO 8601); --time-format '%d.%m.%Y %H:%M' says how it is "
            "written, "
            "or --time names another column"
        )
    if pc.sum(pc.match_substring_regex(texts, _CALENDAR)).as_py() == len(texts):
        raise DataError(
            f"{name}: {texts[0].as_py()} looks like a date; --time-format %Y%m%d, or "
            "--time-unit s if not"
        )
    unit = list(UNITS)[int(np.bincount(np.digitize(size, _LIMITS), minlength=4).argmax())]
    words = f"{NAMES[unit]} since 1970, by the size of the numbers"
    if is_order:
        words = (
            "small numbers, so places in an order rather than seconds since 1970; taken as seconds"
        )
    return TimeKind(unit=unit, words=words, least_us=least_us)


def _has_zone(array: Any) -> bool:
    return bool(pa.types.is_timestamp(array.type)) and array.type.tz is not None


def _range_of(unit: str) -> tuple[float, float]:
    """The sizes of numbers that are rather of this unit than of another one."""
    at = list(UNITS).index(unit)
    limits = (0.0, *_LIMITS, 1e300)
    return limits[at], limits[at + 1]


def _scaled_sql(unit: str) -> str:
    """Microseconds of `time_whole`, or of `time_broken`: numbers that are too large stay large."""
    factor = UNITS[unit]
    if factor < 0:
        whole, broken = f"time_whole // {-factor}", f"floor(time_broken / {-factor})"
    else:
        most = _MOST // factor
        whole = f"greatest(least(time_whole, {most}), -{most}) * {factor}"
        broken = f"floor(time_broken * {factor})"
    broken = f"CAST(greatest(least({broken}, 9e18), -9e18) AS BIGINT)"
    return (
        f"CASE WHEN time_whole IS NOT NULL THEN {whole} WHEN time_broken IS NOT NULL THEN "
        f"{broken} END"
    )


def _iso_sql(text: str) -> str:
    """Microseconds of texts as ISO 8601 has them: without a zone they are of UTC."""
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
