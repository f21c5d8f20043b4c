"""Sizes and times as people write them: `1GiB` is 1073741824 bytes, `50ms` is 0.05 seconds.

A setting whose type names a unit takes them beside plain numbers; inside it is the number.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

KEY = "x-unit"  # in the JSON schema of a type, which is where msgspec carries it


class Unit(NamedTuple):
    """What a number counts, and the words that may follow it."""

    noun: str
    forms: str  # examples, for messages and for the reference
    factors: dict[str, Fraction]  # word -> how many of the noun

    @property
    def pattern(self) -> str:
        """A regular expression (of Python and of JSON Schema) that every text with such a word matches."""
        words = "|".join(self.factors)
        return rf"^\s*[0-9]+(\.[0-9]+)?\s*({words})\s*$"


BYTES = Unit(
    "bytes",
    "1GiB, 512 MiB, 64MB",
    {"B": Fraction(1)}
    | {f"{letter}iB": Fraction(1024**power) for power, letter in enumerate("KMGT", 1)}
    | {f"{letter}B": Fraction(1000**power) for power, letter in enumerate("kMGT", 1)},
)
SECONDS = Unit(
    "seconds",
    "50ms, 2s, 10min, 1h",
    {
        "us": Fraction(1, 1_000_000),
        "ms": Fraction(1, 1000),
        "s": Fraction(1),
        "min": Fraction(60),
        "h": Fraction(3600),
        "d": Fraction(86_400),
    },
)
UNITS = {unit.noun: unit for unit in (BYTES, SECONDS)}
IN_BYTES, IN_SECONDS = ({KEY: unit.noun} for unit in (BYTES, SECONDS))  # `msgspec.Meta(extra_json_schema=IN_BYTES)`

# What YAML 1.1 takes for a text, because the point or the sign is missing: 1e-5, 1.0e5.
_SCIENTIFIC = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,3}")


def number(text: str, unit: Unit | None, whole: bool) -> int | float | None:
    """Read a number that YAML gives as a text.

    Args:
        text: `1e-5`, or a number with a word of the unit behind it.
        unit: of the setting, if it has one.
        whole: the setting takes whole numbers alone.

    Returns:
        The number in the setting's unit; None: it is no such text, or no whole number.
    """
    if len(text) > 40:
        return None
    if _SCIENTIFIC.fullmatch(text):
        value = Fraction(text)
    elif unit is not None and (found := re.match(unit.pattern, text)):
        value = Fraction(text[: found.start(2)].strip()) * unit.factors[found[2]]
    else:
        return None
    if whole:
        return int(value) if value.denominator == 1 else None
    return _as_float(value)


def _as_float(value: Fraction) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return None
