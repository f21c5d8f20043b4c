"""Logs that are converted before they are read: databases, lists of items, cells of many values.

SQLite        the only table, as CSV
lists         lines of `user item item ...`, as {"user": [item, ...]}
JSON in text  a column whose cells are JSON texts, as JSON lines
shown items   a column of `N1-1 N2-0` (MIND), a row for each shown item: item_id, click, position
"""

from __future__ import annotations

import csv
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import quoted
from npu_gr.dataset.cells import is_text, pc
from npu_gr.dataset.columns import is_item_name
from npu_gr.dataset.line_sources import DelimitedSource, JsonLinesSource, Source
from npu_gr.dataset.lines import ParsedRow, json_object, read_lines

_SHOWN = r"^\s*\S+-[01](\s+\S+-[01])*\s*$"
_MOST = 0.9  # share of the cells that must have the form
_HISTORY = frozenset({"history", "clickhistory", "clickedhistory"})
Convert = Callable[[DelimitedSource, Path], Source]


def from_sqlite(path: Path, folder: Path) -> list[Path]:
    """Write the only table of a database as CSV into a folder.

    Raises:
        DataError: it is no database, or has not one table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / f"{path.stem}.csv"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as con:
            tables = con.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            ).fetchall()
            if len(tables) != 1:
                names = ", ".join(name for (name,) in tables)
                raise DataError(
                    f"{path}: the database has {len(tables)} tables ({names}); export one: sqlite3 "
                    f"-header -csv {path} 'SELECT * FROM TABLE' > TABLE.csv"
                )
            rows = con.execute('SELECT * FROM "{}"'.format(tables[0][0].replace('"', '""')))
            with found.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow([name for name, *_ in rows.description])
                writer.writerows(rows)
    except sqlite3.Error as error:
        raise DataError(f"{path}: not a database of SQLite: {error}") from error
    return [found]


def from_lists(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write lines of a user and the items as {"user": [item, ...]} into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [folder / f"{place}.json" for place in range(len(paths))]
    for path, to in zip(paths, found, strict=True):
        with to.open("wb") as file:
            mark = b"{"
            for line in chain.from_iterable(read_lines(path)):
                if cells := line.decode(errors="replace").split():
                    file.write(mark + orjson.dumps(cells[0]) + b": " + orjson.dumps(cells[1:]))
                    mark = b",\n"
            file.write(b"}" if mark != b"{" else b"{}")
    return found


def json_texts(columns: Mapping[str, Any]) -> str:
    """Find a column of JSON texts, if no column is the item; "" = there is none."""
    if any(map(is_item_name, columns)):
        return ""
    for name, array in columns.items():
        cells = pc.drop_null(array).to_pylist() if is_text(array) else []
        if cells and sum(map(_is_json, cells)) >= _MOST * len(cells):
            return name
    return ""


def found_in(source: DelimitedSource) -> Convert | None:
    """Find what a delimited file has to be converted from; None = nothing."""
    columns = source.sample
    if any(map(is_item_name, columns)):
        return None
    for name, array in columns.items():
        texts = pc.drop_null(array)
        if len(texts) and pc.mean(pc.match_substring_regex(texts, _SHOWN)).as_py() >= _MOST:
            return _shown_in(name)
    if column := json_texts(columns):
        return lambda source, folder: _converted(
            source, folder, lambda row: [row | {column: _parsed(row[column])}], _note(column)
        )
    return None


def parsed_lines(source: Source, column: str, folder: Path) -> Source:
    """Convert JSON lines with a column of JSON texts."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for place, path in enumerate(source.paths):
        copies.append(folder / f"{place}.jsonl")
        with copies[-1].open("wb") as file:
            for line in chain.from_iterable(read_lines(path)):
                row = json_object(line.decode(errors="replace"))
                if row is None or not isinstance(row.get(column), str):
                    file.write(line + b"\n")
                else:
                    file.write(orjson.dumps(row | {column: _parsed(row[column])}) + b"\n")
    found = JsonLinesSource(source.name, copies)
    found.notes.append(_note(column))
    return found


def _note(column: str) -> str:
    return f"the cells of {quoted(column)} are JSON texts and read as such"


def _is_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[") and isinstance(_parsed(text), dict | list)


def _parsed(text: str | None) -> Any:
    try:
        return None if text is None else orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _shown_in(column: str) -> Convert:
    """Make the conversion of a column of shown items, each with -1 if it was clicked, or -0."""

    def convert(source: DelimitedSource, folder: Path) -> Source:
        plain = {re.sub(r"[\W_]", "", name.lower()): name for name in source.columns}
        history = next((plain[name] for name in _HISTORY if name in plain), "")
        users = [name for name in plain if name in ("userid", "user", "uid")]
        user = plain[users[0]] if users else ""
        seen: set[str | None] = set()

        def rows(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
            shown, before = row.pop(column), row.pop(history, None)
            if user and row[user] not in seen:
                seen.add(row[user])
                for item in (before or "").split():
                    yield row | {"item_id": item, "click": 1, "position": None}
            for place, one in enumerate((shown or "").split()):
                item, _, click = one.rpartition("-")
                yield row | {"item_id": item, "click": int(click == "1"), "position": place}

        had = f", and the items of {quoted(history)} are events before them" if history else ""
        note = f"each shown item of {quoted(column)} is a row, those with -1 are clicked{had}"
        found = _converted(source, folder, rows, note)
        found.positive = ("click=1",)
        return found

    return convert


def _converted(
    source: DelimitedSource,
    folder: Path,
    convert: Callable[[dict[str, Any]], Any],
    note: str,
) -> Source:
    """Write the rows of a delimited file as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for place, path in enumerate(source.paths):
        copies.append(folder / f"{place}.jsonl")
        with copies[-1].open("wb") as file:
            for row in source.rows(path):
                file.writelines(one + b"\n" for one in _lines(row, source.columns, convert))
    found = JsonLinesSource(source.name, copies)
    found.notes.append(f"{note}; the numbers of rejected rows count these")
    return found


def _lines(
    row: ParsedRow, columns: Sequence[str], convert: Callable[[dict[str, Any]], Any]
) -> Iterator[bytes]:
    if row.cells is None:
        yield orjson.dumps(row.text)  # no JSON object, so the row is rejected and counted
        return
    cells = [cell or None for cell in row.cells]
    yield from map(orjson.dumps, convert(dict(zip(columns, cells, strict=True))))
