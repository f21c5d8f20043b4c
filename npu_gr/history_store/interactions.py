"""Reads interaction logs: RecBole atomic files (`.inter`, `.item`), JSONL (also .gz, .zst), JSON.

A `.json` file is {"user": [item, ...]}, oldest first, as in data sets of semantic-ID papers. Its
events get the value 1, and their index in the list as timestamp.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.history import UserKey
from npu_gr.core.lines import read_lines

LogFeatureOf = Literal["user", "event", "request", "cross"]
DeclaredKind = Literal["", "category", "hashed", "number"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureColumn:
    """One feature of a log, of one of four kinds.

    An event answers a request, which showed the item to the user.

    user     a property of the user
    event    a property of the event, known only afterwards
    request  a property of the request, known before its items are
    cross    a property of the user and the item, known when the item is shown
    """

    name: str
    of: LogFeatureOf
    # one for each event, or each user: float64 and NaN, or objects: str, list of str, None
    values: npt.NDArray[Any]
    kind: DeclaredKind = ""  # what its owner says that it is; "" = as its values look

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers."""
        return self.values.dtype != np.object_

    def of_events(self, part: npt.NDArray[Any] | slice) -> FeatureColumn:
        """Select or reorder events; a feature of users stays as it is."""
        return self if self.of == "user" else replace(self, values=self.values[part])


# Also `12.0`, which tools write for integers in a column with gaps.
_INTEGER = re.compile(r"(-?\d+)(\.0*)?", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class Impressions:
    """Items that were shown to users without a behaviour. m = impressions."""

    users: npt.NDArray[np.int32]  # [m] index into user_names
    items: I64  # [m] external ids
    timestamps: I64  # [m] unix seconds
    positions: npt.NDArray[np.int16]  # [m] place among the shown items; -1 = not known
    # [n] the same of each event; None = the log has no positions
    of_events: npt.NDArray[np.int16] | None


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Events of all users, in time order, ties in file order. n = number of events."""

    users: npt.NDArray[np.int32]  # [n] index into user_names
    items: I64  # [n] external ids
    values: npt.NDArray[np.float64]  # [n] action or rating
    timestamps: I64  # [n] unix seconds
    user_names: list[str]
    # value v is action_names[int(v)]; empty = values are numbers, such as ratings
    action_names: tuple[str, ...] = ()
    columns: tuple[FeatureColumn, ...] = ()  # features of users and of these events
    impressions: Impressions | None = None  # None = the log has none; a part of a log has none
    item_key: bytes = b""  # key of the ids of `items`; empty = they have none

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, part: npt.NDArray[Any] | slice) -> Interactions:
        return Interactions(
            self.users[part],
            self.items[part],
            self.values[part],
            self.timestamps[part],
            self.user_names,
            self.action_names,
            tuple(column.of_events(part) for column in self.columns),
            item_key=self.item_key,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ItemValues:
    """One side feature and its values for each item."""

    name: str
    values: list[str]  # vocabulary
    of_item: dict[int, list[int]]  # external item id -> indices into `values`
    # external item id -> number, if the values are ranges of it; else empty
    numbers: dict[int, float] = field(default_factory=dict)


def read_interactions(
    path: Path,
    *,
    user_column: str = "user_id",
    item_column: str = "item_id",
    value_column: str = "rating",
    time_column: str = "timestamp",
) -> Interactions:
    """Read a log. Blank lines are skipped; fractions of a second are dropped.

    Args:
        path: Path that ends with .inter, .jsonl (also .gz, .zst) or .json.
        user_column, item_column, value_column, time_column: Column names; unused for .json.

    Raises:
        DataError: names the file, the line and the reason.
    """
    if path.suffix == ".json":
        return _read_sequences(path)
    columns = (user_column, item_column, value_column, time_column)
    rows = (
        _jsonl_rows(path, columns) if ".jsonl" in path.suffixes else _atomic_rows(path, columns)[1]
    )
    codes: dict[str, int] = {}
    users = []
    items = []
    values = []
    times = []
    for number, (user, item, value, time) in rows:
        try:
            users.append(codes.setdefault(_name(user), len(codes)))
            items.append(_integer(item))
            values.append(_number(value))
            times.append(_int64(math.floor(_number(time))))
        except (ValueError, TypeError, OverflowError) as error:
            raise _bad(path, number, error) from error
    order = np.argsort(np.array(times, np.int64), kind="stable")
    return Interactions(
        np.array(users, np.int32)[order],
        np.array(items, np.int64)[order],
        np.array(values, np.float64)[order],
        np.array(times, np.int64)[order],
        list(codes),
    )


def _read_sequences(path: Path) -> Interactions:
    try:
        table = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(items, list) for items in table.values()):
        raise DataError(f'{path}: not {{"user": [item, ...]}}')
    rows: list[I64] = []
    for user, items in table.items():
        try:
            rows.append(np.array([_integer(item) for item in items], np.int64))
        except ValueError as error:
            raise DataError(f"{path}, user {user!r}: {error}") from error
    lengths = np.array([len(row) for row in rows], np.int64)
    times = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    order = np.argsort(times, kind="stable")
    return Interactions(
        np.repeat(np.arange(len(rows), dtype=np.int32), lengths)[order],
        np.concatenate([*rows, np.empty(0, np.int64)])[order],
        np.ones(len(times)),
        times[order],
        list(table),
    )


def read_edges(
    path: Path,
    *,
    user_column: str = "user_id",
    item_column: str = "item_id",
    tenant: str = "",
    tenant_column: str | None = None,
) -> tuple[list[UserKey], I64]:
    """Read pairs of users and items, in file order, without times and values.

    Args:
        path: A log (see `read_interactions`), or a plain TSV without a header, which has the user
            and the item in its first two columns, separated by tabs or blanks.
        user_column, item_column: Column names; unused for a plain TSV.
        tenant: Tenant of all users, if there is no `tenant_column`.
        tenant_column: Column name of the tenant; not for a plain TSV.

    Returns:
        Users, and [n] external item ids.

    Raises:
        DataError: names the file, the line and the reason.
    """
    columns = (user_column, item_column, *([] if tenant_column is None else [tenant_column]))
    if ".jsonl" in path.suffixes:
        rows: Iterator[tuple[int, list[Any]]] = _jsonl_rows(path, columns)
    else:
        first = next(iter(read_lines(path)), b"")
        is_plain = b":" not in first.split(b"\t")[0]
        if is_plain and tenant_column is not None:
            raise _bad(path, 1, f"no column {tenant_column!r}: a plain TSV has no header")
        rows = _plain_rows(path) if is_plain else _atomic_rows(path, columns)[1]
    users = []
    items = []
    for number, (user, item, *tenants) in rows:
        try:
            users.append(UserKey(_tenant(tenants[0]) if tenants else tenant, _name(user)))
            items.append(_integer(item))
        except ValueError as error:
            raise _bad(path, number, error) from error
    return users, np.array(items, np.int64)


def read_item_features(
    path: Path, columns: Sequence[str], *, item_column: str = "item_id"
) -> list[ItemValues]:
    """Read columns of an atomic `.item` file.

    An empty cell is no value. If an item occurs twice, its last line counts.

    Args:
        path: Path of the file.
        columns: Column names, of type `token` or `token_seq` (values separated by blanks).
        item_column: Column name of the item id.

    Raises:
        DataError: names the file, the line and the reason; also if a column has another type.
    """
    kinds, rows = _atomic_rows(path, (item_column, *columns))
    for name, kind in zip(columns, kinds[1:], strict=True):
        if kind not in ("token", "token_seq"):
            raise _bad(path, 1, f"column {name!r} is {kind}; only token and token_seq are read")
    codes: list[dict[str, int]] = [{} for _ in columns]
    of_item: list[dict[int, list[int]]] = [{} for _ in columns]
    for number, (text, *cells) in rows:
        try:
            item = _integer(text)
        except ValueError as error:
            raise _bad(path, number, error) from error
        for known, found, cell, kind in zip(codes, of_item, cells, kinds[1:], strict=True):
            names = cell.split(" ") if kind == "token_seq" else [cell]
            found[item] = [known.setdefault(name, len(known)) for name in names if name]
    return [
        ItemValues(name, list(known), found)
        for name, known, found in zip(columns, codes, of_item, strict=True)
    ]


def movielens_100k() -> Path:
    """Find `ml-100k.inter` in the installed package `recbole`, without importing it.

    Raises:
        DataError: the package is not installed; the message has the command.
    """
    try:
        files = importlib.metadata.files("recbole") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError("MovieLens-100K: run pip install --no-deps recbole==1.2.1 first") from error
    for file in files:
        if file.name == "ml-100k.inter":
            return Path(str(file.locate()))
    raise DataError(
        "MovieLens-100K: this version of recbole does not contain it; use recbole==1.2.1"
    )


def _atomic_rows(
    path: Path, columns: Sequence[str]
) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the types of the columns, and for each line its number and its cells of the columns.

    A header is e.g. `user_id:token<TAB>rating:float`.
    """
    lines = read_lines(path)
    try:
        header = [cell.split(":") for cell in lines[0].decode().split("\t")] if lines else []
    except UnicodeDecodeError as error:
        raise _bad(path, 1, error) from error
    if not header or any(len(cell) != 2 for cell in header):
        raise _bad(path, 1, "not the header of an atomic file (name:type, tab-separated)")
    names = [name for name, _ in header]
    missing = [name for name in columns if name not in names]
    if missing:
        raise _bad(path, 1, f"no column {missing[0]!r}; there are {', '.join(names)}")
    where = [names.index(name) for name in columns]

    def rows() -> Iterator[tuple[int, list[str]]]:
        for number, line in enumerate(lines[1:], 2):
            if not line:
                continue
            try:
                cells = line.decode().split("\t")
            except UnicodeDecodeError as error:
                raise _bad(path, number, error) from error
            if len(cells) != len(names):
                raise _bad(path, number, f"{len(cells)} columns, the header has {len(names)}")
            yield number, [cells[index] for index in where]

    return [header[index][1] for index in where], rows()


def _plain_rows(path: Path) -> Iterator[tuple[int, list[Any]]]:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            cells = line.decode().split()
        except UnicodeDecodeError as error:
            raise _bad(path, number, error) from error
        if len(cells) < 2:
            raise _bad(path, number, "needs a user and an item, separated by a tab")
        yield number, cells[:2]


def _jsonl_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise _bad(path, number, error) from error
        if not isinstance(record, dict):
            raise _bad(path, number, "not a JSON object")
        missing = [name for name in columns if name not in record]
        if missing:
            raise _bad(path, number, f"no {missing[0]!r}")
        yield number, [record[name] for name in columns]


def _bad(path: Path, number: int, reason: object) -> DataError:
    return DataError(f"{path}, line {number}: {reason}")


def _name(cell: object) -> str:
    """Convert a cell to the name of a user: text, or a JSON integer."""
    if cell == "" or isinstance(cell, bool) or not isinstance(cell, str | int):
        raise ValueError(f"{cell!r} is not a user")
    return str(cell)


def _tenant(cell: object) -> str:
    if not isinstance(cell, str):
        raise ValueError(f"{cell!r} is not a tenant")
    return cell


def _integer(cell: object) -> int:
    """Convert a cell to an item id; rejects rounded floats, and spellings such as `1_000`."""
    if isinstance(cell, str) and (match := _INTEGER.fullmatch(cell)):
        return _int64(int(match[1]))
    if isinstance(cell, int) and not isinstance(cell, bool):
        return _int64(cell)
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53:
        return int(cell)
    raise ValueError(f"{cell!r} is not an integer")


def _int64(number: int) -> int:
    if not -(2**63) <= number < 2**63:
        raise ValueError("a number that does not fit into 64 bits")
    return number


def _number(cell: Any) -> float:
    if isinstance(cell, bool) or (isinstance(cell, str) and "_" in cell):
        raise ValueError(f"{cell!r} is not a number")
    number = float(cell)
    if not math.isfinite(number):
        raise ValueError(f"{cell!r} is not finite")
    return number
