"""Recognise times that are written as calendars: 2024/03/01 09:00, 01.03.2024, 20240301, RFC 822.

A column has one format. Whether 03/04/2024 begins with the month or with the day
shows in the cells whose first or second number is over 12; without one of these it is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.dataset.cells import pa, pc

_MONTH = "(0[1-9]|1[0-2])"
_DAY = r"(0[1-9]|[12]\d|3[01])"
_HOUR, _SIXTY = r"([01]\d|2[0-3])", r"[0-5]\d"
# regular expression -> format of strptime; digits alone, the first that all cells match
_DIGITS = (
    (f"(19|20)\\d\\d{_MONTH}{_DAY}", "%Y%m%d"),
    (f"(19|20)\\d\\d{_MONTH}{_DAY}{_HOUR}", "%Y%m%d%H"),
    (f"(19|20)\\d\\d{_MONTH}{_DAY}{_HOUR}{_SIXTY}", "%Y%m%d%H%M"),
    (f"(19|20)\\d\\d{_MONTH}{_DAY}{_HOUR}{_SIXTY}{_SIXTY}", "%Y%m%d%H%M%S"),
)
_DATES = (
    (r"\d{4}/\d{1,2}/\d{1,2}", "%Y/%m/%d"),
    (r"\d{4}\.\d{1,2}\.\d{1,2}", "%Y.%m.%d"),
    (r"\d{1,2}\.\d{1,2}\.\d{4}", "%d.%m.%Y"),
    (r"\d{4}年\d{1,2}月\d{1,2}日", "%Y年%m月%d日"),
    (r"\d{1,2} [A-Z][a-z]{2} \d{4}", "%d %b %Y"),
    (r"\d{1,2}-[A-Za-z]{3}-\d{4}", "%d-%b-%Y"),
    (r"[A-Z][a-z]{2} \d{1,2}, \d{4}", "%b %d, %Y"),
    (r"[A-Z][a-z]{3,8} \d{1,2}, \d{4}", "%B %d, %Y"),
    (r"\d{1,2} [A-Z][a-z]{3,8} \d{4}", "%d %B %Y"),
    (r"[A-Z][a-z]{2}, \d{1,2} [A-Z][a-z]{2} \d{4}", "%a, %d %b %Y"),
)
# with the clock between the month and the year, as Twitter and C write times
_WHOLE = (
    (
        r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d{2}:\d{2}:\d{2} [+-]\d{4} \d{4}",
        "%a %b %d %H:%M:%S %z %Y",
    ),
    (r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d{2}:\d{2}:\d{2} \d{4}", "%a %b %d %H:%M:%S %Y"),
    # of Oracle, whose years have two digits
    (r"\d{2}-[A-Z]{3}-\d{2} \d{2}\.\d{2}\.\d{2}\.\d{1,6} [AP]M", "%d-%b-%y %I.%M.%S.%f %p"),
    # of the access logs of web servers
    (r"\d{2}/[A-Z][a-z]{2}/\d{4}:\d{2}:\d{2}:\d{2} [+-]\d{4}", "%d/%b/%Y:%H:%M:%S %z"),
    *(
        (
            rf"\d{{4}}年\d{{1,2}}月\d{{1,2}}{day}{gap}\d{{1,2}}{hour}{rest}",
            f"%Y年%m月%d{day}{gap}%H{hour}{of}",
        )
        for day in "日号"
        for gap in ("", " ")
        for hour in "时時点點"
        for rest, of in (
            ("", ""),
            (r"\d{1,2}分", "%M分"),
            (r"\d{1,2}分\d{1,2}秒", "%M分%S秒"),
        )
    ),
)
# of a month and a day in an order that only their sizes show
_EITHER = ((r"\d{1,2}/\d{1,2}/\d{4}", "/"), (r"\d{1,2}-\d{1,2}-\d{4}", "-"))
# with a year of two digits, which stands first or last
_SHORT = (
    *(
        (rf"\d{{1,2}}[{mark}]\d{{1,2}}[{mark}]\d{{1,2}}", mark, ("dmy", "mdy", "ymd"))
        for mark in "/-."
    ),
    (r"\d{1,2}-[A-Za-z]{3}-\d{2}", "-", ("dby", "ybd")),
)
_MOST_YEARS = 3  # that a log spans, if its years have two digits
_CLOCKS = (
    ("", ""),
    (r" \d{1,2}:\d{2}", " %H:%M"),
    (r" \d{1,2}:\d{2}:\d{2}", " %H:%M:%S"),
    (r" \d{1,2}:\d{2}:\d{2}\.\d{1,6}", " %H:%M:%S.%f"),
    (r" \d{1,2}:\d{2} [AP]M", " %I:%M %p"),
    (r" \d{1,2}:\d{2}:\d{2} [AP]M", " %I:%M:%S %p"),
)
_MOST = 0.9  # share of the texts that must match a format; the other rows are rejected
_ZONES = (("", ""), (" GMT", " GMT"), (" UTC", " UTC"), (r" [+-]\d{4}", " %z"))


def find_digits(texts: Any) -> str:
    """Find the format of calendars that are digits alone, such as 2024030109; "" = none."""
    for expression, pattern in _DIGITS:
        if _share(texts, expression) == 1.0:
            return pattern
    return ""


def find_format(texts: Any, name: str) -> str:
    """Find the format of strptime that all texts have; "" = none is known.

    Args:
        texts: Trimmed cells without missing ones, as an Arrow array of strings.
        name: Name of the column, for messages.

    Raises:
        DataError: Either number can be the day.
    """
    for whole, pattern in _WHOLE:
        if _share(texts, whole) >= _MOST:
            return pattern
    for clock, of_clock in _CLOCKS:
        for zone, of_zone in _ZONES:
            for date, of_date in _DATES:
                if _share(texts, date + clock + zone) >= _MOST:
                    return of_date + of_clock + of_zone
            for date, mark in _EITHER:
                if _share(texts, date + clock + zone) >= _MOST:
                    dated = texts.filter(_matches(texts, date + clock + zone))
                    return _day_or_month(dated, mark, name, of_clock + of_zone)
            for date, mark, orders in _SHORT:
                if _share(texts, date + clock + zone) >= _MOST:
                    dated = texts.filter(_matches(texts, date + clock + zone))
                    return _short_year(dated, mark, orders, name, of_clock + of_zone)
    return ""


def _day_or_month(texts: Any, mark: str, name: str, rest: str) -> str:
    parts = pc.split_pattern(texts, mark, max_splits=2)
    first, second = (
        pc.cast(pc.list_element(parts, place), pa.int64()).to_numpy(zero_copy_only=False)
        for place in (0, 1)
    )
    month_first, day_first = f"%m{mark}%d{mark}%Y", f"%d{mark}%m{mark}%Y"
    if np.any(second > 12) and np.all(first <= 12):
        return month_first + rest
    if np.any(first > 12) and np.all(second <= 12):
        return day_first + rest
    raise DataError(
        f"{name}: {texts[0].as_py()!r} can begin with the month or with the day; give "
        f"--time-format '{month_first}{rest}' or --time-format '{day_first}{rest}'"
    )


def _short_year(texts: Any, mark: str, orders: Sequence[str], name: str, rest: str) -> str:
    """Find the order of day, month and a year of two digits, by what their numbers can be."""
    days = pc.list_element(pc.split_pattern(texts, " ", max_splits=1), 0)
    parts = pc.split_pattern(days, mark, max_splits=2)
    found = []
    for order in orders:
        of = {
            letter: pc.cast(pc.list_element(parts, place), pa.int64()).to_numpy()
            for place, letter in enumerate(order)
            if letter != "b"
        }
        is_date = all(
            of[letter].min() >= 1 and of[letter].max() <= most
            for letter, most in (("d", 31), ("m", 12))
            if letter in of
        )
        if is_date and len(np.unique(of["y"])) <= _MOST_YEARS:
            found.append(mark.join(f"%{letter}" for letter in order) + rest)
    if len(found) == 1:
        return found[0]
    said = " or ".join(f"--time-format '{one}'" for one in found) or "its --time-format"
    raise DataError(
        f"{name}: {texts[0].as_py()!r} has a year of two digits, and its numbers do not say which "
        f"is the day, the month and the year; give {said}"
    )


def _share(texts: Any, expression: str) -> float:
    return float(pc.mean(_matches(texts, expression)).as_py())


def _matches(texts: Any, expression: str) -> Any:
    return pc.match_substring_regex(texts, f"^{expression}$")
