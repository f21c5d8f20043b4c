"""Choose the columns of a log: as the options say, else by name and type.

If two columns fit a role, it is an error that names both and the option that decides.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import cut, quoted
from npu_gr.dataset.cells import NUMBER, Cells, as_text, is_instant, is_text, pa, pc, without_point
from npu_gr.dataset.column_names import IS_A, NAMES
from npu_gr.dataset.row_filter import binary
from npu_gr.dataset.time_parts import MARK, find_hour, find_parts

NONE = "none"  # as the name in an option: the log has no such column
_INTEGER = r"^\s*[+-]?(\d+|\d(\.\d+)?[eE]\+\d+)\s*$"  # a tool may have rounded it
_GOOGLE = r"^\d{5,10}\.1\d{9}$"  # a client of Google Analytics: a random number, and when it came
_COMMA = r"^\s*[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+\s*$|^\s*[+-]?\d{1,3}(\.\d{3})*\s*$"
_JSON_LIST = r"^\s*\[.*\]\s*$"
_OBJECT = r"^\s*\{"  # of JSON
_DATED = r"^\s*\d{4}-\d{2}-\d{2}([T ]|\s*$)"
_MOST = 0.9  # share of the cells that must match a kind
_MIN_RECUR = 2  # times that a value of a list occurs on average
_LONGEST_PART = 40  # characters of a value of a list; longer ones are sentences
_MOST_ONE = 0.5  # if more of the lists have one cell, the column is one of cells
MAX_EVENT_TYPES = 100


class CellKind(StrEnum):
    """The kind of a column's cells."""

    EMPTY = "empty"
    TEXT = "text"
    INTEGER = "whole numbers"
    NUMBER = "numbers"
    COMMA = "numbers with a decimal comma"
    TIME = "times"
    LIST = "lists"


@dataclass(frozen=True, slots=True)
class Column:
    """A chosen column."""

    name: str
    why: str  # the reason, for the summary
    parts: tuple[str, ...] = ()  # columns that are joined (`time_parts`); () = `name` is one


@dataclass(frozen=True, slots=True, kw_only=True)
class LogColumns:
    """The columns of a log that have a role."""

    user: Column
    item: Column
    time: Column | None  # None: the row number is the time
    event: Column | None
    value: Column | None  # None if there is an event

    def names(self) -> list[str]:
        """Return the names of the columns, each once."""
        taken = (self.user, self.item, self.time, self.event, self.value)
        chosen = (one for one in taken if one is not None)
        return list(dict.fromkeys(name for one in chosen for name in one.parts or (one.name,)))


def kind_of(array: Any) -> CellKind:
    """Find the kind of cells; of texts, the kind that at least 90 % of them match."""
    kind = array.type
    if array.null_count == len(array):
        return CellKind.EMPTY
    if pa.types.is_list(kind):
        is_one = pc.equal(pc.list_value_length(array), 1)
        if pa.types.is_nested(kind.value_type) or pc.mean(is_one).as_py() <= _MOST_ONE:
            return CellKind.LIST
        one = pc.list_flatten(array.filter(is_one))
        return CellKind.LIST if is_text(one) and _share(one, _OBJECT) >= _MOST else kind_of(one)
    if pa.types.is_integer(kind):
        return CellKind.INTEGER
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        texts = pc.drop_null(as_text(array))
        return (
            CellKind.INTEGER if len(texts) and _share(texts, _INTEGER) >= _MOST else CellKind.NUMBER
        )
    if is_instant(array):
        return CellKind.TIME
    if not is_text(array):
        return CellKind.TEXT
    texts = without_point(pc.drop_null(array))
    if _share(texts, _GOOGLE) >= _MOST:
        return CellKind.TEXT
    if _share(texts, _INTEGER) >= _MOST:
        return CellKind.INTEGER
    if _share(texts, NUMBER) >= _MOST:
        return CellKind.NUMBER
    if _share(texts, _DATED) >= _MOST:
        return CellKind.TIME
    return CellKind.COMMA if _share(texts, _COMMA) >= _MOST else CellKind.TEXT


def cells_of(name: str, array: Any, declared: Mapping[str, str]) -> Cells:
    """Find how the cells of a column hold values.

    Args:
        array: The first cells of the column.
        declared: Types in the header of a RecBole atomic file, by column.
    """
    kind = declared.get(name, "")
    if kind == "token_seq":
        return "blanks"
    if kind == "token":
        return "text"
    if pa.types.is_list(array.type):
        return "list"
    if kind_of(array) in (CellKind.NUMBER, CellKind.INTEGER) and not name.lower().endswith("id"):
        return "number"
    if not is_text(array):
        return "text"
    texts = pc.drop_null(array)
    if _share(texts, _COMMA) >= _MOST:
        return "comma"
    if _share(texts, _JSON_LIST) >= _MOST:
        return "json"
    if pc.any(pc.match_substring(texts, "|")).as_py():
        return "bars"
    return "semicolons" if _repeats(texts, ";") else "commas" if _repeats(texts, ", ") else "text"


def _repeats(texts: Any, mark: str) -> bool:
    """Whether texts are lists: their parts recur in other cells, as those of sentences do not."""
    if not pc.any(pc.match_substring(texts, mark)).as_py():
        return False
    parts = pc.list_flatten(pc.split_pattern(texts, mark))
    return bool(pc.count_distinct(parts).as_py() * _MIN_RECUR <= len(parts)) and bool(
        pc.max(pc.utf8_length(parts)).as_py() <= _LONGEST_PART
    )


def choose_log_columns(
    columns: Mapping[str, Any], named: Mapping[str, str], *, has_time: bool = True, source: str
) -> LogColumns:
    """Choose the columns of a log.

    Args:
        columns: The first cells of all columns, by name.
        named: Role ("user", "item", "time", "event", "value") -> name of the column, or NONE;
            missing roles are guessed.
        has_time: False if no column is the time and rows are in time order.

    Raises:
        DataError: no column fits a required role, or more than one does; the message names them
            and the option.
    """
    kinds = {name: kind_of(array) for name, array in columns.items()}
    user = _required("user", columns, kinds, named, source)
    item = _required("item", columns, kinds, named, source)
    if user.name == item.name:
        raise DataError(
            f"{source}: {quoted(user.name)} is both user and item; name another column with "
            "--user or --item"
        )
    time = _time(columns, kinds, named, source) if has_time else None
    taken = {user.name, item.name, *((time.parts or (time.name,)) if time is not None else ())}
    event = _optional("event", columns, kinds, named, source, taken)
    if event is not None and named.get("value", NONE) != NONE:
        raise DataError(
            f"{source}: --event {event.name} and --value {named['value']} exclude each other, "
            f"since an event has one action; give --event {NONE} or --value {NONE}"
        )
    if event is not None and "event" not in named and "value" not in named:
        rival = _optional("value", columns, kinds, named, source, taken)
        why = (
            f"{event.why}; {quoted(rival.name)} is not used (--event {NONE} uses it)"
            if rival
            else event.why
        )
        event = Column(event.name, why)
    value = None if event is not None else _optional("value", columns, kinds, named, source, taken)
    return LogColumns(user=user, item=item, time=time, event=event, value=value)


def is_item_name(name: str) -> bool:
    """Whether a column of this name is probably the item."""
    return _plain(name) in NAMES["item"][0].split()


def is_user_name(name: str) -> bool:
    """Whether a column of this name is probably the user, or a session or device of one."""
    return _plain(name) in " ".join(NAMES["user"]).split()


def choose_title(columns: Mapping[str, Any], taken: Sequence[str]) -> Column | None:
    """Choose the column of a log that has the titles of items; None = there is none.

    Args:
        columns: The first cells of all columns, by name.
        taken: Columns that have another role.
    """
    kinds = {name: kind_of(array) for name, array in columns.items()}
    strong = set(NAMES["title"][0].split()) - {"name"}  # in a log it may be the user's
    found = [
        name
        for name, kind in kinds.items()
        if name not in taken and _plain(name) in strong and kind is CellKind.TEXT
    ]
    return Column(found[0], "its name") if len(found) == 1 else None


def choose_position(
    columns: Mapping[str, Any], named: str, taken: Sequence[str], source: str
) -> Column | None:
    """Choose the column of a log with the places of shown items; None = there is none.

    Args:
        columns: The first cells of all columns, by name.
        named: Name of the column, or NONE; "" to guess.
        taken: Columns that have another role.
        source: Name of the log, for messages.

    Raises:
        DataError: there is no such column, or more than one fits.
    """
    kinds = {name: kind_of(array) for name, array in columns.items()}
    given = {"position": named} if named else {}
    return _optional("position", columns, kinds, given, source, set(taken))


def unused_columns(columns: Mapping[str, Any], taken: Sequence[str]) -> list[dict[str, str]]:
    """List the columns that have no role: name, first values, and an option that uses them.

    Args:
        columns: The first cells of all columns, by name.
        taken: Columns that have a role, or are features.
    """
    found = []
    for name, array in columns.items():
        if name in taken:
            continue
        kind = kind_of(array)
        values = (
            pc.unique(pc.drop_null(array.slice(0, 100))).to_pylist()[:3]
            if (not pa.types.is_nested(array.type))
            else []
        )
        hint = ""
        if found_two := binary(array):
            no, yes = found_two
            hint = f"if {no} is shown and not clicked: --positive '{name}={yes}'"
        elif _plain(name) in " ".join(NAMES["value"]).split() and _fits("value", kind):
            hint = f"--value {name} uses it"
        elif _plain(name) in " ".join(NAMES["value"]).split():
            hint = f"its cells are {kind}, not numbers; --value {name} rejects the others"
        first = ", ".join(cut(str(value), 16) for value in values) or str(kind)
        found.append({"name": name, "values": first, "hint": hint})
    return found


def choose_item_columns(
    columns: Mapping[str, Any], named: Mapping[str, str], log_item: str, source: str
) -> tuple[Column, Column | None]:
    """Choose the item and title columns of a file of items.

    Args:
        columns: The first cells of all columns, by name.
        named: "item" and "title" -> name of the column, or NONE; missing roles are guessed.
        log_item: Name of the item column in the log; the same name has priority.

    Raises:
        DataError: as `choose_log_columns`.
    """
    kinds = {name: kind_of(array) for name, array in columns.items()}
    if "item" not in named and log_item in columns:
        item = Column(log_item, "its name in the log")
    elif "item" not in named and not _candidates("item", kinds) and "id" in map(_plain, columns):
        item = Column(next(name for name in columns if _plain(name) == "id"), "its name")
    else:
        item = _required("item", columns, kinds, named, source, option="--items-key")
    return item, _optional("title", columns, kinds, named, source, {item.name})


def choose_user_column(
    columns: Mapping[str, Any], named: str, log_user: str, source: str
) -> Column:
    """Choose the user column of a file of users.

    Args:
        columns: The first cells of all columns, by name.
        named: Name of the column; "" to guess.
        log_user: Name of the user column in the log; the same name has priority.

    Raises:
        DataError: as `choose_log_columns`.
    """
    if named:
        return _named(named, columns, source, "--users-key")
    if log_user in columns:
        return Column(log_user, "its name in the log")
    kinds = {name: kind_of(array) for name, array in columns.items()}
    if not _candidates("user", kinds) and "id" in map(_plain, columns):
        return Column(next(name for name in columns if _plain(name) == "id"), "its name")
    return _required("user", columns, kinds, {}, source, option="--users-key")


def _required(
    role: str,
    columns: Mapping[str, Any],
    kinds: Mapping[str, CellKind],
    named: Mapping[str, str],
    source: str,
    option: str = "",
) -> Column:
    option = option or f"--{role}"
    if role == "user" and named.get(role, "") not in columns and "," in named.get(role, ""):
        names = tuple(name.strip() for name in named[role].split(","))
        for name in names:
            _named(name, columns, source, option)
        return Column(named[role], f"{option} says so; the first that is set", names)
    if role in named:
        return _named(named[role], columns, source, option)
    found = _candidates(role, kinds)
    if len(found) == 1:
        return Column(found[0], "its name")
    if found:
        raise _ambiguous(role, found, source, option)
    raise DataError(
        f"{source}: no column looks like the {role} ({IS_A[role]}); name it with {option}: "
        f"{_listed(columns)}. If the file has no header, name the columns with --columns a,b,..."
    )


def _optional(
    role: str,
    columns: Mapping[str, Any],
    kinds: Mapping[str, CellKind],
    named: Mapping[str, str],
    source: str,
    taken: set[str],
) -> Column | None:
    if named.get(role) == NONE:
        return None
    if role in named:
        return _named(named[role], columns, source, f"--{role}")
    found = [name for name in _candidates(role, kinds) if name not in taken]
    if role == "event":
        found = [
            name
            for name in found
            if pc.count_distinct(as_text(columns[name])).as_py() <= MAX_EVENT_TYPES
        ]
    if len(found) > 1:
        raise _ambiguous(role, found, source, f"--{role}", f", or --{role} {NONE}")
    return Column(found[0], "its name") if found else None


def _time(
    columns: Mapping[str, Any], kinds: Mapping[str, CellKind], named: Mapping[str, str], source: str
) -> Column:
    if "time" in named:
        if named["time"] not in columns and MARK in named["time"]:
            parts = [_named(one, columns, source, "--time") for one in named["time"].split(MARK)]
            names = tuple(part.name for part in parts)
            return Column(named["time"], "--time says so", names)
        return _named(named["time"], columns, source, "--time")
    if parts_found := find_parts(columns):
        return Column(MARK.join(parts_found), "their names", parts_found)
    found = _candidates("time", kinds)
    if len(found) == 1:
        if hour := find_hour(columns, found[0]):
            return Column(MARK.join((found[0], hour)), "their names", (found[0], hour))
        return Column(found[0], "its name")
    if found:
        raise _ambiguous("time", found, source, "--time")
    typed = [name for name, kind in kinds.items() if kind is CellKind.TIME]
    if len(typed) == 1:
        return Column(typed[0], "the only column of times")
    if typed:
        raise _ambiguous("time", typed, source, "--time")
    raise DataError(
        f"{source}: no column looks like the time (when); name it with --time: {_listed(columns)}. "
        "Give --no-time if there is none and the rows are in time order"
    )


def _named(name: str, columns: Mapping[str, Any], source: str, option: str) -> Column:
    if name not in columns:
        raise DataError(
            f"{source}: {option} {name}: there is no such column; there are {_listed(columns)}"
        )
    return Column(name, f"{option} says so")


def _candidates(role: str, kinds: Mapping[str, CellKind]) -> list[str]:
    """Find the columns whose name and kind fit a role: by strong names, else by weak ones.

    A column without a cell is none if another one has cells.
    """
    empty: list[str] = []
    for names in NAMES[role]:
        known = set(names.split())
        found = [
            name
            for name, kind in kinds.items()
            if (_plain(name) in known or _with_owner(name) in known) and _fits(role, kind)
        ]
        if with_cells := [name for name in found if kinds[name] is not CellKind.EMPTY]:
            return with_cells
        empty = empty or found
    return empty


def _fits(role: str, kind: CellKind) -> bool:
    match role:
        case "user" | "item":
            return kind in (CellKind.EMPTY, CellKind.TEXT, CellKind.INTEGER)
        case "time":
            return kind in (
                CellKind.EMPTY,
                CellKind.TEXT,
                CellKind.INTEGER,
                CellKind.NUMBER,
                CellKind.TIME,
            )
        case "position":
            return kind is CellKind.INTEGER
        case "event":
            return kind in (CellKind.TEXT, CellKind.INTEGER)
        case "value":
            return kind in (CellKind.INTEGER, CellKind.NUMBER, CellKind.COMMA)
        case _:
            return kind not in (CellKind.EMPTY, CellKind.LIST)


def _plain(name: str) -> str:
    """Return the last part of a dotted name, letters and digits only, without accents.

    A part that begins with "$" is a type of MongoDB's extended JSON, such as `$numberLong`.
    """
    name = re.sub(r"\.\$\w+$", "", name.lower().rstrip(". "))
    name = re.sub(r"[\W_]", "", name.rpartition(".")[2])
    return unicodedata.normalize(
        "NFC", re.sub("[\u0300-\u036f]", "", unicodedata.normalize("NFD", name))
    )


def _with_owner(name: str) -> str:
    """Return the last two parts of a dotted name such as `customer.id` and `event.name`."""
    owner, _, last = name.lower().rpartition(".")
    is_of_owner = last in ("id", "name", "type")
    return re.sub(r"[\W_]", "", owner.rpartition(".")[2] + last) if is_of_owner else ""


def _share(texts: Any, pattern: str) -> float:
    return float(pc.sum(pc.match_substring_regex(texts, pattern)).as_py() or 0) / max(len(texts), 1)


def _ambiguous(
    role: str, names: Sequence[str], source: str, option: str, rest: str = ""
) -> DataError:
    choice = " or ".join(f"{option} {name}" for name in names)
    return DataError(
        f"{source}: {len(names)} columns could be the {role} ({IS_A[role]}): {choice}{rest}"
    )


def _listed(columns: Mapping[str, Any]) -> str:
    names = [quoted(name) for name in columns]
    return ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")
