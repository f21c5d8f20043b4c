"""Times of a log: seconds, milliseconds, microseconds or nanoseconds since 1970, ISO 8601, or a format that is given.

The kind is recognised by the size of numbers in the first rows, and holds for the whole log: a row of another kind is
rejected. Times without a zone are taken as UTC.

    below 1e11  seconds (until the year 5138)      below 1e17  microseconds
    below 1e14  milliseconds                       above       nanoseconds
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.dataset.arrow import NUMBER, is_instant, is_text, pa, pc
from npu_gr.dataset.rejects import CODES, RejectReason

US_PER_S = 1_000_000
_ORDER_S = 10_000_000  # numbers below it are rather places in an order than seconds since 1970
FIRST_US = _ORDER_S * US_PER_S
LAST_US = 4_102_444_800 * US_PER_S  # 2100-01-01
UNITS = {"s": US_PER_S, "ms": 1000, "us": 1, "ns": -1000}  # microseconds of one; below 0: so many make a microsecond
NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
ISO = "iso"
_LIMITS = (1e11, 1e14, 1e17)
_INTEGER = r"^[+-]?[0-8]?\d{1,18}$"
_ISO = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}(:\d{2}(:\d{2}([.,]\d+)?)?)?\s*(Z|z|UTC|GMT|[+-]\d{2}:?(\d{2})?)?)?$"
_ZONE = r"(Z|z|UTC|GMT|[+-]\d{2}:?(\d{2})?)$"
_CALENDAR = r"^(19|20)\d{2}(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])$"


class Times(NamedTuple):
    """Times of some rows."""

    us: I64  # [n] microseconds since 1970; 0 where there is a reason
    reasons: npt.NDArray[np.int8]  # [n] why a row cannot be used: one of CODES, or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeKind:
    """How a log writes its times."""

    unit: str  # a key of UNITS, ISO, or "" where `pattern` says it
    pattern: str = ""  # as strptime has it
    words: str  # what was found, for a person
    is_guess: bool = True  # numbers whose size says another unit are rejected
    least_us: int = FIRST_US  # earlier ones are rejected: 0 is how many a tool writes "unset"

    def read(self, array: Any) -> Times:
        """Read the times of some rows."""
        if is_instant(array):
            zone = array.type.tz if _has_zone(array) else None
            found = pc.cast(pc.cast(array, pa.timestamp("us", zone), safe=False), pa.int64())
        elif self.pattern:
            parsed = pc.strptime(_text(array), format=self.pattern, unit="us", error_is_null=True)
            found = pc.cast(parsed, pa.int64())
        elif self.unit == ISO:
            found = _iso_us(_text(array))
        else:
            return self._of_numbers(array)
        return self._checked(array, found)

    def _of_numbers(self, array: Any) -> Times:
        whole, broken = _numbers(array)
        is_number = whole.valid | broken.valid
        times = self._checked(array, pa.array(_scaled(whole, broken, self.unit), mask=~is_number))
        if self.is_guess:
            size = np.where(whole.valid, np.abs(whole.values), np.abs(broken.values))
            is_other = is_number & (size >= _ORDER_S) & (_unit_of(size) != list(UNITS).index(self.unit))
            times.reasons[is_other] = CODES[RejectReason.OTHER_UNIT]
            times.us[is_other] = 0
        return times

    def _checked(self, array: Any, found: Any) -> Times:
        """Name the reason where a time is missing, unreadable or not of our days."""
        us = _values(found, np.int64)
        is_missing = pc.is_null(array, nan_is_null=pa.types.is_floating(array.type)).to_numpy(zero_copy_only=False)
        reasons = np.zeros(len(array), np.int8)
        reasons[~us.valid] = CODES[RejectReason.UNREADABLE_TIME]
        reasons[is_missing] = CODES[RejectReason.NO_TIME]
        reasons[us.valid & (us.values < self.least_us)] = CODES[RejectReason.EARLY]
        reasons[us.valid & (us.values >= LAST_US)] = CODES[RejectReason.LATE]
        return Times(np.where(reasons, 0, us.values), reasons)


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
        return TimeKind(unit="", pattern=pattern, words=f"as --time-format {pattern} says, UTC assumed")
    texts = pc.drop_null(_text(array))
    whole, broken = _numbers(texts)
    is_number = whole.valid | broken.valid
    size = np.where(whole.valid, np.abs(whole.values), np.abs(broken.values))[is_number]
    is_order = bool(size.size) and size.max() < _ORDER_S
    least_us = 0 if is_order else FIRST_US
    if unit:
        words = f"{NAMES.get(unit, 'ISO 8601')}, as --time-unit says"
        return TimeKind(unit=unit, words=words, is_guess=False, least_us=least_us)
    if not len(texts):
        raise DataError(f"{name}: every time of the first rows is missing; --time names another column")
    is_iso = pc.match_substring_regex(texts, _ISO)
    num_iso = pc.sum(is_iso).as_py()
    if num_iso >= is_number.sum() and num_iso:
        dated = texts.filter(is_iso)
        has_zone = pc.sum(pc.match_substring_regex(dated, f"[T ].*{_ZONE}")).as_py()
        missing = "" if has_zone == len(dated) else ", UTC assumed where no zone is given"
        return TimeKind(unit=ISO, words=f"ISO 8601{missing}")
    if not is_number.any():
        raise DataError(
            f"{name}: {texts[0].as_py()!r} is no time that is recognised (seconds, milliseconds, microseconds or "
            "nanoseconds since 1970, or ISO 8601); --time-format '%d.%m.%Y %H:%M' says how it is written, "
            "or --time names another column"
        )
    if pc.sum(pc.match_substring_regex(texts, _CALENDAR)).as_py() == len(texts):
        raise DataError(f"{name}: {texts[0].as_py()} looks like a date; --time-format %Y%m%d, or --time-unit s if not")
    unit = list(UNITS)[int(np.bincount(_unit_of(size), minlength=4).argmax())]
    words = f"{NAMES[unit]} since 1970, by the size of the numbers"
    if is_order:
        words = "small numbers, so places in an order rather than seconds since 1970; taken as seconds"
    return TimeKind(unit=unit, words=words, least_us=least_us)


class _Values(NamedTuple):
    values: npt.NDArray[Any]
    valid: npt.NDArray[np.bool_]


def _has_zone(array: Any) -> bool:
    return bool(pa.types.is_timestamp(array.type)) and array.type.tz is not None


def _text(array: Any) -> Any:
    text = array if is_text(array) else pc.cast(array, pa.string())
    return pc.utf8_trim_whitespace(text)


def _numbers(array: Any) -> tuple[_Values, _Values]:
    """The cells that are whole numbers, as int64, and those that are other finite numbers, as float64."""
    if pa.types.is_integer(array.type):
        wide = pc.cast(array, pa.int64(), safe=False)
        return _values(wide, np.int64), _Values(np.zeros(len(array)), np.zeros(len(array), np.bool_))
    if is_text(array):
        text = _text(array)
        is_whole = pc.match_substring_regex(text, _INTEGER)
        is_other = pc.and_not(pc.match_substring_regex(text, NUMBER), is_whole)
        whole = pc.cast(pc.replace_substring_regex(pc.if_else(is_whole, text, None), r"^\+", ""), pa.int64())
        broken = pc.cast(pc.replace_substring_regex(pc.if_else(is_other, text, None), r"^\+", ""), pa.float64())
    elif pa.types.is_floating(array.type) or pa.types.is_decimal(array.type):
        broken = pc.cast(array, pa.float64())
        whole = pa.nulls(len(array), pa.int64())
    else:
        whole = pa.nulls(len(array), pa.int64())
        broken = pa.nulls(len(array), pa.float64())
    floats = _values(broken, np.float64)
    return _values(whole, np.int64), _Values(floats.values, floats.valid & np.isfinite(floats.values))


def _values(array: Any, dtype: Any) -> _Values:
    valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
    return _Values(pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(dtype, copy=False), valid)


def _unit_of(size: npt.NDArray[Any]) -> I64:
    """Index into UNITS of each number, by its size."""
    found: I64 = np.digitize(size, _LIMITS)
    return found


def _scaled(whole: _Values, broken: _Values, unit: str) -> I64:
    factor = UNITS[unit]
    most = np.iinfo(np.int64).max // max(factor, 1)
    if factor < 0:
        us = whole.values // -factor
        floats = np.floor(broken.values / -factor)
    else:
        us = np.clip(whole.values, -most, most) * factor
        floats = np.floor(broken.values * factor)
    scaled: I64 = np.where(whole.valid, us, np.clip(np.nan_to_num(floats), -9e18, 9e18).astype(np.int64))
    return scaled


def _iso_us(text: Any) -> Any:
    is_iso = pc.match_substring_regex(text, _ISO)
    text = pc.if_else(is_iso, text, None)
    text = pc.replace_substring_regex(text, r"\s*(z|UTC|GMT)$", "Z")
    text = pc.replace_substring_regex(text, r"[.,](\d{1,6})\d*", r".\1")
    text = pc.replace_substring_regex(text, r"\s+([+-]\d{2}:?(\d{2})?)$", r"\1")
    has_zone = pc.match_substring_regex(text, f"[T ].*{_ZONE}")
    with_zone = _parsed(pc.if_else(has_zone, text, None), pa.timestamp("us", "UTC"))
    without = _parsed(pc.if_else(has_zone, None, text), pa.timestamp("us"))
    return pc.coalesce(pc.cast(with_zone, pa.int64()), pc.cast(without, pa.int64()))


def _parsed(text: Any, kind: Any) -> Any:
    try:
        return pc.cast(text, kind)
    except pa.ArrowInvalid:  # February 30 among them: one by one
        return pa.array([_one(cell) for cell in text.to_pylist()], pa.int64()).cast(kind)


def _one(cell: str | None) -> int | None:
    if cell is None:
        return None
    try:
        at = datetime.fromisoformat(cell)
    except ValueError:
        return None
    since = (at if at.tzinfo else at.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86400 + since.seconds) * US_PER_S + since.microseconds
