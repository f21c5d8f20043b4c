"""Files beside a log: of items, with the title of each and its other columns as categories.

And of users, as features.

    text, whole numbers   a value each, if there are few enough distinct ones
    lists, token_seq, and texts with "|"   many values an item
    numbers with fractions, and many distinct whole numbers   ranges with equally many items ("price<=9.99")

A column with too many values, or with a value of its own for nearly every item or user, says
nothing that the name does not say; it is left out and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.core.names import MAX_NAME_BYTES
from npu_gr.core.text_format import counted, quoted
from npu_gr.dataset.actions import bucket_edges, bucket_names, bucket_of
from npu_gr.dataset.cells import Cells, has_point, name_sql, number_of, plain_text, values_of
from npu_gr.dataset.columns import Column, cells_of, choose_item_columns, choose_user_column
from npu_gr.dataset.line_sources import Source
from npu_gr.dataset.lines import OnProgress
from npu_gr.dataset.logs import MAX_VALUE_BYTES, kind_word, split_kind, told_cells
from npu_gr.dataset.rejects import (
    CODES,
    MAX_ROW_CHARS,
    MAX_USER_CHARS,
    UNSURE,
    RejectReason,
    Rejects,
)
from npu_gr.dataset.table import SourceTable
from npu_gr.history_store.interactions import ToldKind

MAX_VALUES = 1000  # distinct ones of a feature of items
MAX_VALUE_CHARS = 64  # longer texts are descriptions
MAX_TITLE_CHARS = 256
BUCKETS = 10
# share of the log's items or users in the file, below which the names are probably others
FEW = 0.1
_MIN_DISTINCT = 20  # values with at most so many distinct ones are categories
# share of distinct values over which a column names items or users rather than describes them
_OWN = 0.5
_ROWS = 10_000  # that are looked at together


@dataclass(frozen=True, slots=True)
class ItemColumn:
    """A column of the items' file as a feature."""

    column: str
    kind: str  # "one", "many" or "buckets"; in the manifest
    cells: list[list[str]]  # values of each item
    # of each item, where the values are ranges of them
    numbers: list[float | None] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ItemTable:
    """What the file says of each item. n = items.

    Of one that is listed twice the last row counts.
    """

    key: Column
    title: Column | None
    num_again: int = 0  # rows of an item that an earlier one names
    rows: dict[str, int] = field(default_factory=dict)  # name -> place in the lists below
    titles: list[str] = field(default_factory=list)
    features: list[ItemColumn] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # column -> why


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFeature:
    """A column of the users' file as a feature."""

    name: str
    told: ToldKind
    kind: str  # "number", "one" or "many"; in the manifest
    values: list[Any]  # of each user: float, str, list of str, or None


@dataclass(slots=True, kw_only=True)
class UserTable:
    """What the file says of each user; of one that is listed twice the last row counts."""

    key: Column
    num_again: int = 0  # rows of a user whom an earlier one names
    rows: dict[str, int] = field(default_factory=dict)  # name -> place in the values
    features: list[UserFeature] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # column -> why


def read_items(
    con: Any,
    source: Source,
    told: dict[str, str],
    log_item: str,
    wanted: Sequence[str] | None,
    rejects: Rejects,
    show: OnProgress,
) -> ItemTable:
    """Read a file of items; it must fit in memory, as its items do later.

    Args:
        con: DuckDB.
        source: the file.
        told: "item" and "title" -> name of a column.
        log_item: name of the log's column of items.
        wanted: columns that become features; None = all that can.
        rejects: take the rows without an item.
        show: called as the file is read.

    Raises:
        DataError: no column, or more than one, looks like the item; or a wanted one is missing or
            cannot be used.
    """
    sample = source.sample
    key, title = choose_item_columns(sample, told, log_item, source.name)
    others = [name for name in sample if name != key.name and (title is None or name != title.name)]
    if wanted is not None:
        if missing := [name for name in wanted if name not in sample]:
            raise DataError(
                f"{source.name}: --features {missing[0]}: there is no such column; there are "
                f"{', '.join(others)}"
            )
        others = list(dict.fromkeys(wanted))
    kinds = {name: cells_of(name, sample[name], source.types) for name in others}
    table = ItemTable(key=key, title=title)
    cells: dict[str, list[Any]] = {name: [] for name in others}
    columns = list(dict.fromkeys([key.name, *([title.name] if title else []), *others]))
    for name, row in _rows(con, "items_file", source, columns, rejects, show):
        at = table.rows.setdefault(name, len(table.rows))
        if at == len(table.titles):
            table.titles.append("")
            for column in cells.values():
                column.append(None)
        else:
            table.num_again += 1
        if title is not None:
            table.titles[at] = plain_text(row[title.name])[:MAX_TITLE_CHARS]
        for column_name, column in cells.items():
            column[at] = row[column_name]
    for name in others:
        found = _feature(name, kinds[name], cells.pop(name), is_wanted=wanted is not None)
        if isinstance(found, ItemColumn):
            table.features.append(found)
        elif wanted is not None:
            raise DataError(f"{source.name}: --features {name}: {found}")
        else:
            table.skipped[name] = found
    return table


def read_users(
    con: Any,
    source: Source,
    told_key: str,
    log_user: str,
    wanted: Sequence[str] | None,
    rejects: Rejects,
    show: OnProgress,
) -> UserTable:
    """Read a file of users; it must fit in memory.

    Args:
        con: DuckDB.
        source: the file.
        told_key: name of its column of users; "" = guessed.
        log_user: name of the log's column of users.
        wanted: `NAME` or `NAME:KIND` of the columns that become features; None = all that can.
        rejects: take the rows without a user.
        show: called as the file is read.

    Raises:
        DataError: no column, or more than one, looks like the user; or a wanted one is missing or
            cannot be used.
    """
    sample = source.sample
    key = choose_user_column(sample, told_key, log_user, source.name)
    others: dict[str, ToldKind] = (
        {name: "" for name in sample if name != key.name}
        if wanted is None
        else dict(map(split_kind, wanted))
    )
    if missing := [name for name in others if name not in sample]:
        there = ", ".join(sample)
        raise DataError(
            f"{source.name}: --user-features {missing[0]}: there is no such column; "
            f"there are {there}"
        )
    kinds = {name: told_cells(name, told, sample[name], source) for name, told in others.items()}
    table = UserTable(key=key)
    cells: dict[str, list[Any]] = {name: [] for name in others}
    columns = list(dict.fromkeys([key.name, *others]))
    for user, row in _rows(con, "users_file", source, columns, rejects, show):
        table.num_again += user in table.rows
        at = table.rows.setdefault(user, len(table.rows))
        for name, column in cells.items():
            if at == len(column):
                column.append(None)
            column[at] = row[name]
    for name, told in others.items():
        values = [_value(cell, kinds[name]) for cell in cells.pop(name)]
        if why := _useless(values, is_wanted=wanted is not None):
            if wanted is not None:
                raise DataError(f"{source.name}: --user-features {name}: {why}")
            table.skipped[name] = why
        else:
            table.features.append(
                UserFeature(name=name, told=told, kind=kind_word(kinds[name]), values=values)
            )
    return table


def notes_of(
    what: str, logged: Sequence[str], listed: Mapping[str, int], num_again: int
) -> Iterator[str]:
    """Warn where the log and the file hardly share a name, and say how many rows come again.

    Args:
        what: "item" or "user".
        logged: names in the log.
        listed: names in the file.
        num_again: rows of the file whose name an earlier one has.
    """
    if num_again:
        yield (
            f"{counted(num_again, 'row')} of the {what}s' file name one again: of each {what} "
            "the last row counts"
        )
    num_shared = sum(name in listed for name in logged)
    if not logged or num_shared >= FEW * len(logged):
        return
    of_log = next((name for name in logged if name not in listed), logged[0])
    shared = set(logged)
    of_file = next((name for name in listed if name not in shared), None)
    beside = (
        (f"; the log has {quoted(of_log)}, the file {quoted(of_file)}")
        if of_file is not None
        else ""
    )
    yield (
        f"WARNING: the {what}s' file has {num_shared:,} of the log's "
        f"{counted(len(logged), what)}{beside}"
    )


def _rows(
    con: Any, view: str, source: Source, columns: Sequence[str], rejects: Rejects, show: OnProgress
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a file beside the log: of each row that can be used its name, of the first column, and its cells."""
    kinds = source.kinds(columns)
    key = name_sql("c0", kinds[0], with_point=has_point(source.sample[columns[0]]))
    if view == "items_file":
        reason = (
            f"WHEN name IS NULL THEN {CODES[RejectReason.NO_ITEM]} "
            f"WHEN strlen(name) > {MAX_NAME_BYTES} THEN {CODES[RejectReason.LONG_ITEM]}"
        )
    else:
        reason = (
            f"WHEN name IS NULL THEN {CODES[RejectReason.NO_USER]} "
            f"WHEN length(name) > {MAX_USER_CHARS} THEN {CODES[RejectReason.LONG_USER]}"
        )

    def wrap(cells: str) -> str:
        line = source.line_sql(columns)
        return (
            f"SELECT * EXCLUDE line, CASE WHEN reason = {UNSURE} THEN line WHEN reason > 0 "
            f"THEN left(line, {MAX_ROW_CHARS}) END AS line FROM (SELECT * EXCLUDE state, "
            f"CAST(CASE WHEN state <> 0 THEN state {reason} ELSE 0 END AS TINYINT) AS reason "
            f"FROM (SELECT *, {key} AS name{'' if line == 'line' else f', {line} AS line'} FROM "
            f"({cells})))"
        )

    table = SourceTable(con, view, source, columns, wrap)
    table.load(show)
    table.take_rejects(rejects)
    wanted = ", ".join(f"c{place}" for place in range(len(columns)))
    for batch in con.sql(
        f"SELECT name, {wanted} FROM {view} WHERE reason = 0 ORDER BY n"
    ).to_arrow_reader(_ROWS):
        names, *cells = (column.to_pylist() for column in batch.columns)
        for name, *row in zip(names, *cells, strict=True):
            yield name, dict(zip(columns, row, strict=True))


def _feature(name: str, kind: Cells, cells: list[Any], *, is_wanted: bool) -> ItemColumn | str:
    """Make a feature of a column's cells, or say why not."""
    if kind == "number":
        numbers = [number_of(cell) for cell in cells]
        distinct = {number for number in numbers if number is not None}
        has_fraction = any(number != int(number) for number in distinct)
        if len(distinct) > _MIN_DISTINCT and (
            has_fraction or len(distinct) > MAX_VALUES or _is_own(distinct, numbers)
        ):
            return _buckets(name, numbers)
    values = [values_of(cell, kind) for cell in cells]
    counts = Counter(value for row in values for value in set(row))
    if not counts:
        return "empty"
    if len(counts) > MAX_VALUES:
        return f"{len(counts):,} distinct values, over {MAX_VALUES:,}"
    if (
        not is_wanted
        and len(counts) > _MIN_DISTINCT
        and len(counts) > _OWN * sum(map(bool, values))
    ):
        return (
            f"{len(counts):,} distinct values for {sum(map(bool, values)):,} items: nearly a "
            "name of each"
        )
    if any(len(value) > MAX_VALUE_CHARS for value in counts):
        return f"a value has over {MAX_VALUE_CHARS} characters"
    if not is_wanted and len(counts) == 1 and all(values):
        return f"the same for all items: {quoted(next(iter(counts)))}"
    return ItemColumn(name, "one" if kind in ("text", "number") else "many", values)


def _is_own(distinct: set[float], numbers: Sequence[float | None]) -> bool:
    return len(distinct) > _OWN * sum(number is not None for number in numbers)


def _buckets(name: str, numbers: Sequence[float | None]) -> ItemColumn:
    edges = bucket_edges(np.array([number for number in numbers if number is not None]), BUCKETS)
    names = bucket_names(name, edges)
    filled = np.array([np.inf if number is None else number for number in numbers])
    places = bucket_of(filled, edges).tolist()
    cells = [
        [] if number is None else [names[at]] for number, at in zip(numbers, places, strict=True)
    ]
    return ItemColumn(name, "buckets", cells, list(numbers))


def _value(cell: Any, cells: Cells) -> float | str | list[str] | None:
    if cells == "number":
        return number_of(cell)
    values = values_of(cell, cells)
    if cells == "text":
        return values[0] if values else None
    return values or None


def _useless(values: Sequence[Any], *, is_wanted: bool) -> str:
    """Say why a column is no feature; "" = it is one."""
    known = [value for value in values if value is not None]
    if not known:
        return "empty"
    texts = [text for value in known if not isinstance(value, float) for text in _texts(value)]
    if any(len(text.encode()) > MAX_VALUE_BYTES for text in texts):
        return f"a value has over {MAX_VALUE_BYTES} bytes"
    counts = Counter(texts)
    if not is_wanted and len(counts) > _MIN_DISTINCT and len(counts) > _OWN * len(known):
        return f"{len(counts):,} distinct values for {len(known):,} users: nearly a name of each"
    return ""


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
