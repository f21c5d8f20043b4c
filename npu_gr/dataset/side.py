"""Side files of a log: items with their titles and categories, and users with their features.

    text, whole numbers   one category each, if there are few enough distinct ones
    lists, token_seq, and texts with "|"   several values per item
    other numbers         ranges with equally many items ("price<=9.99")

A column with too many values, or with a different value for nearly every item or user, is no more
than a second name; it is skipped, and the summary says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.core.names import MAX_NAME_BYTES, item_ids, repeated
from npu_gr.core.text_format import counted, quoted
from npu_gr.dataset.actions import bucket_edges, bucket_names, bucket_of
from npu_gr.dataset.cells import Cells, finite_number, has_point, name_sql, plain_text, values_of
from npu_gr.dataset.columns import Column, cells_of, choose_item_columns, choose_user_column
from npu_gr.dataset.line_sources import Source
from npu_gr.dataset.lines import OnProgress
from npu_gr.dataset.log_features import (
    MAX_VALUE_BYTES,
    declared_cells,
    kind_word,
    split_kind,
)
from npu_gr.dataset.rejects import (
    CODES,
    MAX_ROW_CHARS,
    MAX_USER_CHARS,
    UNSURE,
    RejectReason,
    Rejects,
)
from npu_gr.dataset.table import SourceTable
from npu_gr.history_store.interactions import DeclaredKind

MAX_VALUES = 1000  # distinct values of an item feature
MAX_VALUE_CHARS = 64  # longer texts are descriptions
MAX_TITLE_CHARS = 256
BUCKETS = 10
# if the file has a smaller share of the log's items or users, the ids probably do not match
FEW = 0.1
_MIN_DISTINCT = 20  # numbers with at most this many distinct values are categories
# a column with a larger share of distinct values names items or users
_OWN = 0.5
_ROWS = 10_000  # per batch


@dataclass(frozen=True, slots=True)
class ItemColumn:
    """A column of the items' file as a feature."""

    column: str
    kind: str  # "one", "many" or "buckets"; in the manifest
    cells: list[list[str]]  # values of each item
    # of each item, if the values are ranges
    numbers: list[float | None] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ItemTable:
    """The rows of the items' file; the last row of an item counts."""

    key: Column
    title: Column | None
    source: SourceTable | None  # None = the rows are those of the log
    num_again: int = 0  # rows whose item has an earlier row
    rows: dict[str, int] = field(default_factory=dict)  # name -> index in the lists below
    titles: list[str] = field(default_factory=list)
    features: list[ItemColumn] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # column -> why

    def take_rejects(self, logged: Sequence[str], rejects: Rejects, key: bytes) -> None:
        """Pass the rejected rows on, and reject names with the id of an earlier item.

        Args:
            logged: Names of the log's items, which count as earlier.
            rejects: Receives the rows.
            key: Key of the items' ids.
        """
        if self.source is None:
            return
        of_log = set(logged)
        others = [name for name in self.rows if name not in of_log]
        again = repeated(item_ids([*logged, *others], key))
        names = [others[place - len(logged)] for place in again]
        for name in names:
            del self.rows[name]
        if names:
            self.source.reject("name", names, RejectReason.SAME_ID)
        self.source.take_rejects(rejects)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFeature:
    """A column of the users' file as a feature."""

    name: str
    declared: DeclaredKind
    kind: str  # "number", "one" or "many"; in the manifest
    values: list[Any]  # of each user: float, str, list of str, or None


@dataclass(slots=True, kw_only=True)
class UserTable:
    """The rows of the users' file; the last row of a user counts."""

    key: Column
    num_again: int = 0  # rows whose user has an earlier row
    rows: dict[str, int] = field(default_factory=dict)  # name -> index in the values
    features: list[UserFeature] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # column -> why


def read_items(
    con: Any,
    source: Source,
    named: dict[str, str],
    log_item: str,
    wanted: Sequence[str] | None,
    show: OnProgress,
) -> ItemTable:
    """Read a file of items; it must fit in memory. Its rejected rows stay in it.

    Args:
        con: Connection of DuckDB.
        source: The file.
        named: "item" and "title" -> name of a column; missing roles are guessed.
        log_item: Name of the item column in the log.
        wanted: Columns that become features; None for all suitable ones.
        show: Callback for the progress.

    Raises:
        DataError: no column, or more than one, looks like the item; or a wanted one is missing or
            cannot be used.
    """
    sample = source.sample
    key, title = choose_item_columns(sample, named, log_item, source.name)
    others = [name for name in sample if name != key.name and (title is None or name != title.name)]
    if wanted is not None:
        if missing := [name for name in wanted if name not in sample]:
            raise DataError(
                f"{source.name}: --features {missing[0]}: there is no such column; there are "
                f"{', '.join(others)}"
            )
        others = list(dict.fromkeys(wanted))
    kinds = {name: cells_of(name, sample[name], source.types) for name in others}
    cells: dict[str, list[Any]] = {name: [] for name in others}
    columns = list(dict.fromkeys([key.name, *([title.name] if title else []), *others]))
    loaded = _loaded(con, "items_file", source, columns, show)
    table = ItemTable(key=key, title=title, source=loaded)
    for name, row in _rows(con, "items_file", columns):
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
        found = feature_of(name, kinds[name], cells.pop(name), is_wanted=wanted is not None)
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
    named_key: str,
    log_user: str,
    wanted: Sequence[str] | None,
    rejects: Rejects,
    show: OnProgress,
) -> UserTable:
    """Read a file of users; it must fit in memory.

    Args:
        con: Connection of DuckDB.
        source: The file.
        named_key: Name of the user column; "" to guess.
        log_user: Name of the user column in the log.
        wanted: `NAME` or `NAME:KIND` of the columns that become features; None for all suitable
            ones.
        rejects: Receives the rows without a user.
        show: Callback for the progress.

    Raises:
        DataError: no column, or more than one, looks like the user; or a wanted one is missing or
            cannot be used.
    """
    sample = source.sample
    key = choose_user_column(sample, named_key, log_user, source.name)
    others: dict[str, DeclaredKind] = (
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
    kinds = {
        name: declared_cells(name, declared, sample[name], source)
        for name, declared in others.items()
    }
    table = UserTable(key=key)
    cells: dict[str, list[Any]] = {name: [] for name in others}
    columns = list(dict.fromkeys([key.name, *others]))
    _loaded(con, "users_file", source, columns, show).take_rejects(rejects)
    for user, row in _rows(con, "users_file", columns):
        table.num_again += user in table.rows
        at = table.rows.setdefault(user, len(table.rows))
        for name, column in cells.items():
            if at == len(column):
                column.append(None)
            column[at] = row[name]
    for name, declared in others.items():
        values = [_value(cell, kinds[name]) for cell in cells.pop(name)]
        if why := _useless(values, is_wanted=wanted is not None):
            if wanted is not None:
                raise DataError(f"{source.name}: --user-features {name}: {why}")
            table.skipped[name] = why
        else:
            table.features.append(
                UserFeature(
                    name=name, declared=declared, kind=kind_word(kinds[name]), values=values
                )
            )
    return table


def notes_of(
    what: str, logged: Sequence[str], listed: Mapping[str, int], num_again: int
) -> Iterator[str]:
    """Yield a note on repeated rows, and a warning if the log and the file share few names.

    Args:
        what: "item" or "user".
        logged: Item or user names in the log.
        listed: Item or user names in the file -> row.
        num_again: Rows whose name has an earlier row.
    """
    if num_again:
        yield (
            f"{counted(num_again, 'row')} of the {what}s' file repeat a {what}; the last row of "
            f"each counts"
        )
    num_shared = sum(name in listed for name in logged)
    if not logged or num_shared >= FEW * len(logged):
        return
    of_log = next((name for name in logged if name not in listed), logged[0])
    shared = set(logged)
    of_file = next((name for name in listed if name not in shared), None)
    example = (
        f"; the log has {quoted(of_log)}, the file {quoted(of_file)}" if of_file is not None else ""
    )
    yield (
        f"WARNING: the {what}s' file has {num_shared:,} of the log's "
        f"{counted(len(logged), what)}{example}"
    )


def _loaded(
    con: Any, view: str, source: Source, columns: Sequence[str], show: OnProgress
) -> SourceTable:
    """Load a side file; its first column has the names."""
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
            f"SELECT * EXCLUDE line, CASE WHEN reason = {UNSURE} THEN line WHEN reason > 0 THEN "
            f"left(line, {MAX_ROW_CHARS}) END AS line FROM (SELECT * EXCLUDE state, CAST(CASE WHEN "
            f"state <> 0 THEN state {reason} ELSE 0 END AS TINYINT) AS reason FROM (SELECT *, "
            f"{key} AS name{'' if line == 'line' else f', {line} AS line'} FROM ({cells})))"
        )

    table = SourceTable(con, view, source, columns, wrap)
    table.load(show)
    return table


def _rows(con: Any, view: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the usable rows of a side file: the name, and the cells by column."""
    wanted = ", ".join(f"c{place}" for place in range(len(columns)))
    for batch in con.sql(
        f"SELECT name, {wanted} FROM {view} WHERE reason = 0 ORDER BY n"
    ).to_arrow_reader(_ROWS):
        names, *cells = (column.to_pylist() for column in batch.columns)
        for name, *row in zip(names, *cells, strict=True):
            yield name, dict(zip(columns, row, strict=True))


def feature_of(name: str, kind: Cells, cells: list[Any], *, is_wanted: bool) -> ItemColumn | str:
    """Make a feature of a column, or return the reason why not."""
    if kind in ("number", "comma"):
        numbers = [finite_number(cell, has_comma=kind == "comma") for cell in cells]
        distinct = {number for number in numbers if number is not None}
        has_fraction = any(number != int(number) for number in distinct)
        if len(distinct) > _MIN_DISTINCT and (
            has_fraction or len(distinct) > MAX_VALUES or _is_own(distinct, numbers)
        ):
            return _buckets(name, numbers)
        if kind == "comma":
            cells = numbers
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
            f"{len(counts):,} distinct values for {sum(map(bool, values)):,} items: nearly "
            "a different one for each"
        )
    if any(len(value) > MAX_VALUE_CHARS for value in counts):
        return f"a value has over {MAX_VALUE_CHARS} characters"
    if not is_wanted and len(counts) == 1 and all(values):
        return f"the same for all items: {quoted(next(iter(counts)))}"
    return ItemColumn(name, "one" if kind in ("text", "number", "comma") else "many", values)


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
    if cells in ("number", "comma"):
        return finite_number(cell, has_comma=cells == "comma")
    values = values_of(cell, cells)
    if cells == "text":
        return values[0] if values else None
    return values or None


def _useless(values: Sequence[Any], *, is_wanted: bool) -> str:
    """Return the reason why a column cannot be a feature; "" if it can."""
    known = [value for value in values if value is not None]
    if not known:
        return "empty"
    texts = [text for value in known if not isinstance(value, float) for text in _texts(value)]
    if any(len(text.encode()) > MAX_VALUE_BYTES for text in texts):
        return f"a value has over {MAX_VALUE_BYTES} bytes"
    counts = Counter(texts)
    if not is_wanted and len(counts) > _MIN_DISTINCT and len(counts) > _OWN * len(known):
        num_values = f"{len(counts):,} distinct values"
        return f"{num_values} for {len(known):,} users: nearly a different one for each"
    return ""


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
