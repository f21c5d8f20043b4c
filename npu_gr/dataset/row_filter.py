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
# Names of columns, letters and digits only, whose 0 probably means "shown, and not clicked"; a
# column that could be the event or the value is another one.
_LABEL_WORDS = (
    "click clicked isclick isclicked iclick clicks label target y conversion converted isconverted "
    "purchase purchased ispurchase ispurchased buy isbuy bought isbought ordered isordered like "
    "liked islike isliked longview islongview watched iswatched played interacted isinteracted "
    "engaged isengaged response responded ispositive positive klick geklickt gekauft angeklickt "
    "clique achete 点击 是否点击 购买 是否购买 转化 是否转化 点赞 是否点赞"
)
_LABELS = frozenset(" ".join((_LABEL_WORDS, *NAMES["event"], *NAMES["value"])).split())
_PAIRS = (
    ("0", "1"),
    ("false", "true"),
    ("no", "yes"),
    ("n", "y"),
    ("f", "t"),
    ("nein", "ja"),
    ("non", "oui"),
    ("否", "是"),
)
# ends of names
_STATES = ("status", "state", "statut", "estado", "stato", "zustand", "fulfillment", "状态")
# event types of items that were shown: Google Analytics, Segment, and common words
_SHOWN = (
    r"(?i)^\s*(view_item_list|product list viewed|(item|product)?[ _]?impressions?|exposures?"
    r"|expose|曝光|展现|展示)\s*$"
)
_EVENTS = frozenset(NAMES["event"][0].split())
_GONE = r"cancel+ed|refunded|returned|voided|deleted|rejected|storniert|retourniert"
# names of columns, letters and digits only: the time at which a row was undone, whether it was, and
# how much of it
_UNDONE_AT = re.compile(rf"({_GONE})(at|on|date|time|am)")
_IS_UNDONE = re.compile(
    rf"(is|was|has|been|ist|是否|已)*({_GONE}|cancel+ation|refund|return|storno|retoure|取消|退货|退款)"
)
_NUM_UNDONE = re.compile(
    r"(total)?(refund(ed)?|return(ed)?|cancel+ed)(amount|amt|quantity|qty|total|sum|value|items|units)"
)
_COUNT = re.compile(
    r"(lineitem|item|order|product)?(quantity|qty|units|menge|anzahl|stückzahl|cantidad|quantité|数量)"
    r"|(sales|order|line|item)?(amount|revenue)|salesvalue|betrag|umsatz"
)
_NEGATIVE = r"^\s*-[\d.,]*[1-9]"
_ABOVE_0 = r"^\s*\+?[\d.,]*[1-9]"
_UNDONE = (
    r"(?i)cancel|return|refund|reject|void|failed|storn|retour|rückg|annul|rembours|devuel|取消|退"
)
# the same, as a whole cell of a column of any name
_IS_UNDONE_CELL = (
    r"(?i)^\s*((order|product|item|purchase|payment)s?[ _-]?)?(cancel+ed|cancel+ation|refund(ed)?"
    r"|returned|storno|storniert|retoure|retourniert|annulée?|remboursée?|cancelad[oa]|devuelt[oa]"
    r"|已取消|已退货|已退款|退货|退款)\s*$"
)
_MOST_STATES = 50  # different cells of a column of states


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
        DataError: A column has two values such as 0 and 1 and is named like a click or an action,
            an event type is that of items that were shown, or a column says that rows were
            cancelled or given back.
    """
    for name, array in columns.items():
        if name in taken or array.null_count == len(array) or _is_list(array):
            continue
        plain = re.sub(r"[\W_]", "", name.lower().rstrip(". ").rpartition(".")[2])
        question = "" if has_positive else _shown(name, plain, array, has_drop)
        if question := question or ("" if has_drop else _undone(name, plain, array)):
            raise DataError(f"{source}: {quoted(name)} {question}")


def _shown(name: str, plain: str, array: Any, has_drop: bool) -> str:
    """Return what to ask about rows of items that were only shown; "" = nothing."""
    if plain in _LABELS and (found := binary(array)):
        no, yes = found
        return (
            f"is {no} or {yes}. Items that were shown and not clicked are no behaviour: --positive "
            f"'{name}={yes}' leaves out the other rows. If every row is a behaviour, give "
            f"--positive {NONE}"
        )
    if plain not in _EVENTS or has_drop:
        return ""
    texts = pc.unique(pc.drop_null(as_text(array)))
    shown = texts.filter(pc.match_substring_regex(texts, _SHOWN)).to_pylist()
    if not shown or len(shown) == len(texts):
        return ""
    listed = ", ".join(shown)
    return (
        f"has {listed}. Items that were shown are no behaviour: --positive '{name} not in "
        f"({listed})' keeps these rows as impressions. If every row is a behaviour, give "
        f"--positive {NONE}"
    )


def _undone(name: str, plain: str, array: Any) -> str:
    """Return what to ask about rows that were cancelled or given back; "" = nothing."""
    every = f"to leave out these rows, or --drop {NONE} if every row is a behaviour"
    texts = pc.unique(pc.utf8_trim_whitespace(pc.fill_null(as_text(array), "")))
    if _UNDONE_AT.fullmatch(plain) and len(texts) > 1 and "" in texts.to_pylist():
        return f"is set in some rows. Give --drop \"{name} != ''\" {every}"
    if _IS_UNDONE.fullmatch(plain) and (found := binary(array)):
        return f"is {found[1]} in some rows. Give --drop '{name}={found[1]}' {every}"
    if _NUM_UNDONE.fullmatch(plain) and _any_match(texts, _ABOVE_0):
        return f"is above 0 in some rows. Give --drop '{name}>0' {every}"
    if _COUNT.fullmatch(plain) and _any_match(texts, _NEGATIVE):
        return f"is below 0 in some rows, as of goods given back. Give --drop '{name}<0' {every}"
    if len(texts) > _MOST_STATES:
        return ""
    words = _UNDONE if plain.endswith(_STATES) else _IS_UNDONE_CELL
    undone = texts.filter(pc.match_substring_regex(texts, words)).to_pylist()
    if not undone:
        return ""
    listed = ", ".join(undone[:5])
    return f"has {listed}. Give --drop '{name} in ({listed})' {every}"


def _any_match(texts: Any, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())


def binary(array: Any) -> tuple[str, str] | None:
    """Return the cells that mean no and yes, such as 0 and 1, if both occur and no others do."""
    if _is_list(array):
        return None
    texts = [text.strip() for text in pc.unique(pc.drop_null(as_text(array))).to_pylist()]
    found = {text.removesuffix(".0").lower(): text.removesuffix(".0") for text in texts if text}
    return next(((found[no], found[yes]) for no, yes in _PAIRS if found.keys() == {no, yes}), None)


def _is_list(array: Any) -> bool:
    return bool(str(array.type).startswith(("list", "large_list", "fixed_size_list")))
