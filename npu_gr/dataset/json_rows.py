"""JSON: a row a line, a list of rows, or {"user": [item, ...]} with the oldest item first.

A cell inside of objects has a name with dots: `{"properties": {"sku": ...}}` has the column `properties.sku`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from npu_gr.core.errors import DataError
from npu_gr.core.names import value_name
from npu_gr.dataset.arrow import pa
from npu_gr.dataset.blocks import Block, Lines, read_blocks, read_chunks
from npu_gr.dataset.rejects import OnReject, RejectReason
from npu_gr.dataset.source import OnProgress, RowBatch, ignore_progress, ignore_reject

SAMPLE_ROWS = 10_000
MAX_COLUMNS = 1000  # of the first rows; keys that are ids of something are no columns
MAX_DEPTH = 8  # of objects in objects that are looked into
BATCH_EVENTS = 50_000  # of a nested file
USER = "user_id"  # columns of a nested file
ITEM = "item_id"
PLACE = "place"


class JsonLinesSource:
    """A JSON object a line."""

    place = "line"
    format = "a JSON object a line"

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.types: dict[str, str] = {}
        self._path = path

    def sample(self) -> RowBatch:
        """Read the first rows; columns are all that these have."""
        rows: list[tuple[int, dict[str, Any]]] = []
        lines: dict[int, bytes] = {}
        for block in read_blocks(self._path, ignore_progress):
            for number, line, row in _objects(block, ignore_reject):
                rows.append((number, _flat(row)))
                lines[number] = line
                if len(rows) == SAMPLE_ROWS:
                    break
            if rows:
                break
        if not rows:
            raise DataError(f"{self.name}: no line is a JSON object")
        names = _column_names(row for _, row in rows)
        numbers = np.array([number for number, _ in rows], np.int64)
        columns = {name: column([row.get(name) for _, row in rows]) for name in names}
        return RowBatch(
            numbers=numbers, columns=columns, text=lambda row: lines[int(numbers[row])].decode(errors="replace")
        )

    def batches(self, columns: Sequence[str], on_reject: OnReject, on_progress: OnProgress) -> Iterator[RowBatch]:
        """Read all rows; one without a column has null there."""
        getters = [_getter(name) for name in columns]
        for block in read_blocks(self._path, on_progress):
            numbers = []
            cells: list[list[Any]] = [[] for _ in columns]
            for number, _, row in _objects(block, on_reject):
                numbers.append(number)
                for cell, get in zip(cells, getters, strict=True):
                    cell.append(get(row))
            yield RowBatch(
                numbers=np.array(numbers, np.int64),
                columns={name: column(cell) for name, cell in zip(columns, cells, strict=True)},
                text=partial(_line, Lines(block), numbers),
            )


class JsonListSource:
    """A list of JSON objects. It is read whole: a line a row is the format of large logs."""

    place = "row"
    format = "a list of JSON objects"

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.types: dict[str, str] = {}
        try:
            rows = orjson.loads(b"".join(read_chunks(path, ignore_progress)))
        except orjson.JSONDecodeError as error:
            raise DataError(f"{path}: {error}") from error
        self._rows: list[Any] = rows

    def sample(self) -> RowBatch:
        """Read the first rows; columns are all that these have."""
        rows = [_flat(row) for row in self._rows[:SAMPLE_ROWS] if isinstance(row, dict)]
        names = _column_names(rows)
        if not names:
            raise DataError(f"{self.name}: not a list of JSON objects")
        return next(self.batches(names, ignore_reject, ignore_progress))

    def batches(self, columns: Sequence[str], on_reject: OnReject, on_progress: OnProgress) -> Iterator[RowBatch]:
        """Hand out all rows."""
        getters = [_getter(name) for name in columns]
        for start in range(0, len(self._rows), SAMPLE_ROWS):
            numbers = []
            good = []
            for number, row in enumerate(self._rows[start : start + SAMPLE_ROWS], start + 1):
                if isinstance(row, dict):
                    numbers.append(number)
                    good.append(row)
                else:
                    on_reject(number, RejectReason.NOT_JSON, _dumped(row))
            on_progress(min(1.0, (start + SAMPLE_ROWS) / len(self._rows)))
            yield RowBatch(
                numbers=np.array(numbers, np.int64),
                columns={name: column([get(row) for row in good]) for name, get in zip(columns, getters, strict=True)},
                text=partial(_row, good),
            )


class NestedSource:
    """{"user": [item, ...]}, oldest first, as data sets of semantic-ID papers are. An item's place is its time."""

    place = "row"
    format = 'JSON {"user": [item, ...]}'

    _MEMBER = re.compile(rb'\s*(,?)\s*("(?:[^"\\]|\\.)*+")\s*:\s*(\[(?:[^\[\]"{}]|"(?:[^"\\]|\\.)*+")*+\])', re.DOTALL)

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.types: dict[str, str] = {}
        self._path = path

    def sample(self) -> RowBatch:
        """Read the first users."""
        for batch in self.batches((USER, ITEM, PLACE), ignore_reject, ignore_progress):
            if len(batch.numbers):
                return batch
        raise DataError(f"{self.name}: no user has an item")

    def batches(self, columns: Sequence[str], on_reject: OnReject, on_progress: OnProgress) -> Iterator[RowBatch]:
        """Read the users, some at a time."""
        first = 1
        rows: list[tuple[str, Any, int]] = []
        for user, items in self._members(on_progress):
            rows += [(user, item, place) for place, item in enumerate(items)]
            if len(rows) >= BATCH_EVENTS:
                yield self._batch(first, rows)
                first += len(rows)
                rows = []
        if rows:
            yield self._batch(first, rows)

    def _batch(self, first: int, rows: list[tuple[str, Any, int]]) -> RowBatch:
        users, items, places = zip(*rows, strict=True)
        return RowBatch(
            numbers=np.arange(first, first + len(rows)),
            columns={
                USER: pa.array(users, pa.string()),
                ITEM: column(list(items)),
                PLACE: pa.array(places, pa.int64()),
            },
            text=partial(_row, rows),
        )

    def _members(self, on_progress: OnProgress) -> Iterator[tuple[str, list[Any]]]:
        rest = b""
        is_open = False
        is_first = True
        for chunk in read_chunks(self._path, on_progress):
            rest += chunk
            at = 0
            if not is_open:
                at = rest.find(b"{") + 1
                is_open = True
            while found := self._MEMBER.match(rest, at):
                if bool(found[1]) == is_first:
                    raise self._broken(rest, at)
                is_first = False
                try:
                    yield orjson.loads(found[2]), orjson.loads(found[3])
                except orjson.JSONDecodeError as error:
                    raise self._broken(rest, at) from error
                at = found.end()
            rest = rest[at:]
        if rest.strip() != b"}":
            raise self._broken(rest, 0)

    def _broken(self, rest: bytes, at: int) -> DataError:
        return DataError(f'{self.name}: not {{"user": [item, ...]}} from here on: {rest[at : at + 40]!r}')


def open_json(path: Path) -> JsonLinesSource | JsonListSource | NestedSource:
    """Find out which of the three a file is.

    Raises:
        DataError: none of them.
    """
    head = next(read_chunks(path, ignore_progress), b"").lstrip()
    if head.startswith(b"["):
        return JsonListSource(path)
    if re.match(rb'\{\s*("(?:[^"\\]|\\.)*+"\s*:\s*\[|\})', head) and not _is_row(head.partition(b"\n")[0]):
        return NestedSource(path)
    if head.startswith(b"{"):
        return JsonLinesSource(path)
    raise DataError(f'{path}: neither JSON objects, a list of them, nor {{"user": [item, ...]}}')


def column(cells: list[Any]) -> Any:
    """Make an array of JSON values: strings, or lists of strings as soon as one is a list. An object is no value."""
    cells = [None if type(cell) is dict else cell for cell in cells]
    if any(type(cell) is list for cell in cells):
        lists = [None if cell is None else _texts(cell if type(cell) is list else [cell]) for cell in cells]
        return pa.array(lists, pa.list_(pa.string()))
    return pa.array(_texts(cells), pa.string())


def _texts(cells: Iterable[Any]) -> list[str | None]:
    return [cell if type(cell) is str or cell is None else _text(cell) for cell in cells]


def _text(cell: Any) -> str:
    if type(cell) is bool:
        return "true" if cell else "false"
    if type(cell) is float:
        return value_name(cell)
    return str(cell) if type(cell) is int else _dumped(cell)


def _objects(block: Block, on_reject: OnReject) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    for number, line in enumerate(block.data.split(b"\n"), block.first):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except (orjson.JSONDecodeError, RecursionError):
            row = None
        if isinstance(row, dict):
            yield number, line, row
        else:
            on_reject(number, RejectReason.NOT_JSON, line.decode(errors="replace"))


def _is_row(line: bytes) -> bool:
    """Whether a line is an object by itself, of which not every value is a list."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(row, dict) and not all(isinstance(value, list) for value in row.values())


def _column_names(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(islice(dict.fromkeys(chain.from_iterable(rows)), MAX_COLUMNS))


def _flat(row: dict[str, Any], prefix: str = "", depth: int = 1) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict) and depth < MAX_DEPTH:
            flat |= _flat(value, f"{prefix}{name}.", depth + 1)
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _getter(name: str) -> Callable[[dict[str, Any]], Any]:
    """Return what takes a cell out of a row: by its name, or from object to object where the name has dots."""
    path = name.split(".")
    if len(path) == 1:
        return lambda row: row.get(name)

    def get(row: dict[str, Any]) -> Any:
        if name in row:
            return row[name]
        cell: Any = row
        for part in path:
            if not isinstance(cell, dict):
                return None
            cell = cell.get(part)
        return cell

    return get


def _line(lines: Lines, numbers: list[int], row: int) -> str:
    return lines.text(numbers[row])


def _row(rows: list[Any], row: int) -> str:
    return _dumped(rows[row])


def _dumped(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()
