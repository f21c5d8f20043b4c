"""Conditions on rows: `--positive 'click=1'`, `--drop 'status in (CANCELLED, RETURNED)'`, ...

    condition   COLUMN = VALUE, also with != < <= > >=, or COLUMN [not] in (VALUE, ...)

A VALUE is compared as text without blanks around it, and as a number where both are numbers. A cell
without a value meets no condition but `!=` and `not in`, and `COLUMN = ''`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import quoted
from npu_gr.dataset.cells import (
    as_text,
    finite_number,
    is_list_type,
    literal,
    number_sql,
    pc,
    text_sql,
)
from npu_gr.dataset.column_names import NAMES

NONE = "none"  # as a condition: every row is used
_IN = re.compile(
    r"^\s*(?P<name>.+?)\s+(?P<negated>not\s+)?in\s*\((?P<values>.*)\)\s*$", re.I | re.S
)
_COMPARED = re.compile(
    r"^\s*(?P<name>.+?)\s*(?P<operator>!=|<=|>=|=|<|>)\s*(?P<value>.*?)\s*$", re.S
)
# Names of columns, letters and digits only, whose 0 probably means "shown, and not clicked".
_LABELS = frozenset(
    "click clicked isclick isclicked iclick label target conversion converted".split()  # noqa: SIM905
)
_STATES = ("status", "state", "状态")  # ends of names
# event types of items that were shown: Google Analytics, Segment, and common words
_SHOWN = (
    r"(?i)^\s*(view_item_list|product list viewed|(item|product)?[ _]?impressions?|exposures?"
    r"|expose|曝光|展现|展示)\s*$"
)
_EVENTS = frozenset(NAMES["event"][0].split())
# names of columns with the time at which a row was undone, letters and digits only
_UNDONE_AT = re.compile(
    r"(cancel+ed|refunded|returned|voided|deleted|storniert|retourniert)(at|on|date|time|am)"
)
_UNDONE = r"(?i)cancel|return|refund|reject|void|failed|storn|retour|rückg|annul|取消|退"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on a column."""

    name: str
    operator: str  # "=", "!=", "<", "<=", ">", ">="; with several values "=" or "!="
    values: tuple[str, ...]

    def sql(self, cell: str, kind: str) -> str:
        """Return the SQL of whether a cell of a DuckDB type meets the condition, never null."""
        text = f"trim({text_sql(cell, kind)}, E' \\t\\r\\n')"
        number = "CAST(NULL AS DOUBLE)" if is_list_type(kind) else number_sql(cell, kind)
        if self.operator in ("=", "!="):
            is_one = [
                f"{text} = {literal(value)}" if value else f"coalesce({text}, '') = ''"
                for value in self.values
            ]
            numbers = (finite_number(value) for value in self.values)
            is_one += [f"{number} = {one!r}" for one in numbers if one is not None]
            if kind == "BOOLEAN":
                is_one += [
                    f"{cell} = {value.lower() in ('1', 'true')}"
                    for value in self.values
                    if value.lower() in ("0", "1", "true", "false")
                ]
            found = f"coalesce({' OR '.join(is_one)}, FALSE)"
            return f"(NOT {found})" if self.operator == "!=" else f"({found})"
        return f"coalesce({number} {self.operator} {finite_number(self.values[0])!r}, FALSE)"


def parse(text: str, option: str, columns: Mapping[str, Any]) -> Condition:
    """Read a condition.

    Args:
        option: Name of the option, for messages.
        columns: The log's columns by name.

    Raises:
        DataError: It is not a condition, or there is no such column.
    """
    if found := _IN.match(text):
        values = tuple(_unquoted(value) for value in found["values"].split(","))
        condition = Condition(found["name"], "!=" if found["negated"] else "=", values)
    elif found := _COMPARED.match(text):
        condition = Condition(found["name"], found["operator"], (_unquoted(found["value"]),))
    else:
        raise DataError(
            f"{option} {quoted(text)}: not a condition; write COLUMN=VALUE, also with != < <= > "
            ">=, or COLUMN in (VALUE, VALUE)"
        )
    if condition.name not in columns:
        listed = ", ".join(map(quoted, columns))
        raise DataError(
            f"{option}: there is no column {quoted(condition.name)}; there are {listed}"
        )
    if condition.operator[0] in "<>" and finite_number(condition.values[0]) is None:
        raise DataError(f"{option} {quoted(text)}: {condition.operator} compares with a number")
    return condition


def _unquoted(value: str) -> str:
    value = value.strip()
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def check_labels(
    columns: Mapping[str, Any],
    taken: Sequence[str],
    has_positive: bool,
    has_drop: bool,
    source: str,
) -> None:
    """Ask about rows that are probably not behaviours.

    Args:
        columns: The first cells of all columns, by name.
        taken: Columns that an option names or that have a condition; they are not asked about.
        has_positive, has_drop: Whether `--positive` and `--drop` (or `--where`) are given.

    Raises:
        DataError: A column is 0 or 1 and named like a click, an event type is that of items that
            were shown, or a status or a time of cancelling has cancelled rows.
    """
    for name, array in columns.items():
        plain = re.sub(r"[\W_]", "", name.lower())
        if name in taken or array.null_count == len(array):
            continue
        if plain in _LABELS and not has_positive and is_binary(array):
            raise DataError(
                f"{source}: {quoted(name)} is 0 or 1. Items that were shown and not clicked are no "
                f"behaviour: --positive '{name}=1' leaves out the other rows. If every row is a "
                f"behaviour, give --positive {NONE}"
            )
        if plain in _EVENTS and not (has_positive or has_drop or _is_list(array)):
            texts = pc.unique(pc.drop_null(as_text(array)))
            shown = texts.filter(pc.match_substring_regex(texts, _SHOWN)).to_pylist()
            if shown and len(shown) < len(texts):
                raise DataError(
                    f"{source}: {quoted(name)} has {', '.join(shown)}. Items that were shown are "
                    f"no behaviour: --positive '{name} not in ({', '.join(shown)})' keeps these "
                    f"rows as impressions. If every row is a behaviour, give --positive {NONE}"
                )
        if _UNDONE_AT.fullmatch(plain) and not has_drop and not _is_list(array):
            texts = pc.utf8_trim_whitespace(pc.fill_null(as_text(array), ""))
            if len(pc.unique(texts)) > 1 and "" in pc.unique(texts).to_pylist():
                raise DataError(
                    f'{source}: {quoted(name)} is set in some rows. Give --drop "{name} != '
                    f"''\" to leave out these rows, or --drop {NONE} if every row is a behaviour"
                )
        if plain.endswith(_STATES) and not has_drop and not _is_list(array):
            texts = pc.unique(pc.drop_null(as_text(array)))
            undone = texts.filter(pc.match_substring_regex(texts, _UNDONE)).to_pylist()
            if undone:
                raise DataError(
                    f"{source}: {quoted(name)} has {', '.join(undone[:5])}. Give --drop '{name} in "
                    f"({', '.join(undone[:5])})' to leave out these rows, or --drop {NONE} if "
                    "every row is a behaviour"
                )


def is_binary(array: Any) -> bool:
    """Whether the cells are 0 and 1, or false and true, and both occur."""
    if _is_list(array):
        return False
    texts = set(pc.unique(pc.drop_null(as_text(array))).to_pylist())
    texts = {text.strip().removesuffix(".0").lower() for text in texts}
    return texts in ({"0", "1"}, {"false", "true"})


def _is_list(array: Any) -> bool:
    return bool(str(array.type).startswith(("list", "large_list", "fixed_size_list")))
