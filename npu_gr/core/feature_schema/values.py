"""Read one value of a feature: the only reading, for `prepare`, the trainer and the service.

    missing   None, NaN, blanks, and the texts that tools write for a missing value ("null", "NaN")
    name      42, 42.0, "42" and "42.0" are one name; so are true, "True", "TRUE", "true", 1 and "1"
    number    a number or its decimal text; true is 1

Blanks around a text do not count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from decimal import Decimal
from typing import Any

FeatureValue = bool | int | float | str | None
BLANKS = " \t\n\v\f\r\xa0"
MISSING = frozenset({"", "NULL", "null", "None", "none", "NaN", "nan", "\\N"})
"""Texts that tools write for a missing value."""
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
MAX_NUMBER = (2 - 2**-23) * 2.0**127  # the largest float32
BOOLEANS = {"true": "1", "True": "1", "TRUE": "1", "false": "0", "False": "0", "FALSE": "0"}
_IS_NUMBER = re.compile(NUMBER, re.ASCII)
_WHOLE_WITH_POINT = re.compile(r"(-?\d+)\.0+", re.ASCII)
_MAX_WHOLE = 2**53  # larger floats cannot represent every whole number


def name_of(value: Any, known: Collection[str] = ()) -> str | None:
    """Return a value as a name; None if it is missing.

    Args:
        value: Text, number, boolean or None.
        known: Texts that are names, even if tools write them for a missing value.

    Raises:
        TypeError: it is of another type, which is the message.
    """
    if isinstance(value, str):
        text = value.strip(BLANKS)
        return None if text in MISSING and text not in known else plain_name(text)
    if value is None:
        return None
    if isinstance(value, int):  # also a boolean
        return str(int(value))
    if isinstance(value, float):
        if math.isnan(value):
            return None
        is_whole = value.is_integer() and abs(value) <= _MAX_WHOLE
        return str(int(value)) if is_whole else repr(value)
    raise TypeError(type_name(value))


def plain_name(text: str) -> str:
    """Return the name that all spellings of a text have in common."""
    text = text.strip(BLANKS)
    if (boolean := BOOLEANS.get(text)) is not None:
        return boolean
    if "." in text and (whole := _WHOLE_WITH_POINT.fullmatch(text)):
        return "0" if whole[1] == "-0" else whole[1]
    return text


def number_of(value: Any) -> float:
    """Return a value as a number; NaN if it is missing, an infinity if it is too large.

    Raises:
        TypeError: it is no number; the message is its type.
    """
    if isinstance(value, str):
        text = value.strip(BLANKS)
        if text in MISSING:
            return math.nan
        text = BOOLEANS.get(text, text)
        if not _IS_NUMBER.fullmatch(text):
            raise TypeError(type_name(value))
        return float(text)
    if value is None:
        return math.nan
    if not isinstance(value, int | float | Decimal):
        raise TypeError(type_name(value))
    try:
        return float(value)
    except OverflowError:
        return math.inf


def type_name(value: Any) -> str:
    """Name the type of a value, for an error."""
    names: dict[type, str] = {dict: "map", list: "list", str: "text"}
    return names.get(type(value), type(value).__name__)
