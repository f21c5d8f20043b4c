"""Interaction logs: RecBole atomic files (`.inter`, `.item`) and JSONL (`.jsonl`, `.jsonl.gz`, `.jsonl.zst`)."""

from __future__ import annotations

import gzip
import importlib.metadata
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from npu_gr.errors import DataError
from npu_gr.request import I64


@dataclass(frozen=True, slots=True, eq=False)
class Interactions:
    """Events of all users, in time order (of equal times: file order). n = number of events."""

    users: npt.NDArray[np.int32]  # [n] index into user_names
    items: I64  # [n] external ids
    values: npt.NDArray[np.float64]  # [n] what the user did, e.g. a rating
    timestamps: I64  # [n] unix seconds
    user_names: list[str]

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, part: npt.NDArray[Any] | slice) -> Interactions:
        return Interactions(
            self.users[part], self.items[part], self.values[part], self.timestamps[part], self.user_names
        )


@dataclass(frozen=True, slots=True, eq=False)
class ItemValues:
    """One side feature: each item's values."""

    name: str
    values: list[str]  # vocabulary
    of_item: dict[int, list[int]]  # external item id -> indices into `values`


def read_interactions(
    path: Path,
    *,
    user_column: str = "user_id",
    item_column: str = "item_id",
    value_column: str = "rating",
    time_column: str = "timestamp",
) -> Interactions:
    """Read a log whole.

    Raises:
        DataError: names the file, the line and the reason; nothing is returned.
    """
    columns = (user_column, item_column, value_column, time_column)
    rows = _jsonl_rows(path, columns) if ".jsonl" in path.suffixes else _atomic_rows(path, columns)
    codes: dict[str, int] = {}
    users, items, values, times = [], [], [], []
    for number, (user, item, value, time) in rows:
        try:
            items.append(_integer(item))
            values.append(float(value))
            times.append(_integer(time))
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        users.append(codes.setdefault(str(user), len(codes)))
    order = np.argsort(np.array(times, np.int64), kind="stable")
    return Interactions(
        np.array(users, np.int32)[order],
        np.array(items, np.int64)[order],
        np.array(values, np.float64)[order],
        np.array(times, np.int64)[order],
        list(codes),
    )


def read_item_features(path: Path, columns: Sequence[str], *, item_column: str = "item_id") -> list[ItemValues]:
    """Token columns of an atomic `.item` file; a `token_seq` holds values separated by blanks.

    Raises:
        DataError: as `read_interactions`.
    """
    found = [ItemValues(name, [], {}) for name in columns]
    codes: list[dict[str, int]] = [{} for _ in columns]
    with _opened(path) as file:
        where, kinds = _header(path, file.readline(), (item_column, *columns))
        for number, line in enumerate(file, 2):
            cells = line.rstrip("\r\n").split("\t")
            try:
                item = _integer(cells[where[0]])
                texts = [cells[index] for index in where[1:]]
            except (ValueError, IndexError) as error:
                raise DataError(f"{path}, line {number}: {error}") from error
            for feature, known, text, kind in zip(found, codes, texts, kinds[1:], strict=True):
                names = text.split(" ") if kind == "token_seq" else [text]
                feature.of_item[item] = [known.setdefault(name, len(known)) for name in names if name]
    for feature, known in zip(found, codes, strict=True):
        feature.values.extend(known)
    return found


def movielens_100k() -> Path:
    """`ml-100k.inter` out of the installed package `recbole`, which is never imported.

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
    raise DataError("MovieLens-100K: this version of recbole does not carry it; use recbole==1.2.1")


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as file:
                yield file
        elif path.suffix == ".zst":
            try:
                import zstandard
            except ImportError as error:
                raise DataError(f"{path}: zstd needs pip install 'npu_gr[zstd]'") from error
            with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
                yield io.TextIOWrapper(stream, encoding="utf-8")
        else:
            with path.open(encoding="utf-8") as plain:
                yield plain
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise DataError(f"{path}: {error}") from error


def _header(path: Path, line: str, columns: Sequence[str]) -> tuple[list[int], list[str]]:
    """Where each wanted column is, and its type, from a header like `user_id:token<TAB>rating:float`."""
    cells = [cell.split(":") for cell in line.rstrip("\r\n").split("\t")]
    if any(len(cell) != 2 for cell in cells):
        raise DataError(f"{path}, line 1: not the header of an atomic file (name:type, tab-separated)")
    names = [name for name, _ in cells]
    missing = [name for name in columns if name not in names]
    if missing:
        raise DataError(f"{path}, line 1: no column {missing[0]!r}; there are {', '.join(names)}")
    where = [names.index(name) for name in columns]
    return where, [cells[index][1] for index in where]


def _atomic_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    with _opened(path) as file:
        where, _ = _header(path, file.readline(), columns)
        for number, line in enumerate(file, 2):
            cells = line.rstrip("\r\n").split("\t")
            if len(cells) <= max(where):
                raise DataError(f"{path}, line {number}: {len(cells)} columns, {max(where) + 1} are needed")
            yield number, [cells[index] for index in where]


def _jsonl_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                yield number, [record[name] for name in columns]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}, line {number}: {type(error).__name__}: {error}") from error


def _integer(value: Any) -> int:
    """Of an id or a time; `12.0` counts, `12.5` does not."""
    if isinstance(value, str):
        return int(value) if value.lstrip("-").isdigit() else _integer(float(value))
    if value != int(value):
        raise ValueError(f"{value!r} is not an integer")
    return int(value)
