"""Query logs as Parquet: a row is a record, columns of integers are lists, the rest of what nests is JSON text.

    ts double, kind, user_id, tenant, base string, {history,events}_{items,timestamps} list<int64>,
    {history,events}_actions list<int16>, candidates list<int64>, num_candidates, timestamp, top_k int64,
    deadline_ms, delay_ms double, features, {history,events}_features, labels, answer and the options of each kind
    (`log.OPTIONS`) string (JSON)

A column that a file lacks counts as empty; a column that is not listed here is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from npu_gr.core.errors import DataError
from npu_gr.replay.log import OPTIONS, LoggedHistory, QueryRecord, column

ROW_GROUP = 1024  # records

_PLAIN = {
    "ts": "float64",
    **dict.fromkeys(("kind", "user_id", "tenant", "base"), "string"),
    **dict.fromkeys(("num_candidates", "timestamp", "top_k"), "int64"),
    **dict.fromkeys(("deadline_ms", "delay_ms"), "float64"),
}
_HISTORIES = ("history", "events")
_COLUMNS = {"items": "int64", "actions": "int16", "timestamps": "int64"}
_JSON = (*OPTIONS, "features", "labels", "answer")


def write_rows(path: Path, records: Iterable[QueryRecord]) -> int:
    """Write a file, one row group at a time, and return the number of its records."""
    arrow, parquet = _modules(path)
    schema = _schema(arrow)
    rest = iter(records)
    total = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := [_row(record) for record in islice(rest, ROW_GROUP)]:
            writer.write_table(arrow.Table.from_pylist(group, schema=schema))
            total += len(group)
    return total


def read_rows(
    path: Path, on_bad: Callable[[int, object], None], on_progress: Callable[[float], None]
) -> Iterator[tuple[int, QueryRecord]]:
    """Read a file.

    Args:
        path: the file.
        on_bad: called with the number of a row that is no record, and the reason.
        on_progress: called with the share of the rows that have been read, 0 to 1.

    Returns:
        Row numbers, counted from 1, and records, in the file's order.

    Raises:
        DataError: the file is no Parquet file, or has a column that no record has.
    """
    arrow, parquet = _modules(path)
    try:
        with parquet.ParquetFile(path) as file:
            schema = _schema(arrow)
            for field in file.schema_arrow:
                if field.name not in schema.names:
                    raise DataError(f"{path}: unknown column {field.name!r}")
            number = 0
            for batch in file.iter_batches(ROW_GROUP):
                for row in batch.to_pylist():
                    number += 1
                    try:
                        yield number, _record(row)
                    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
                        on_bad(number, error)
                on_progress(number / file.metadata.num_rows)
    except OSError as error:
        raise DataError(f"{path}: {error}") from error
    except arrow.ArrowException as error:
        raise DataError(f"{path}: {error}") from error


def _row(record: QueryRecord) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(record, name) for name in _PLAIN}
    row["candidates"] = column(record.candidates)
    for name in _HISTORIES:
        history: LoggedHistory | None = getattr(record, name)
        if history is not None:
            events = history.events()
            row |= {f"{name}_{part}": getattr(events, part) for part in _COLUMNS}
            if history.features is not None:
                row[f"{name}_features"] = msgspec.json.encode(history.features).decode()
    for name in _JSON:
        value = getattr(record, name)
        row[name] = msgspec.json.encode(value).decode() if value else None
    return row


def _record(row: dict[str, Any]) -> QueryRecord:
    table = {name: row[name] for name in _PLAIN if row.get(name) is not None}
    if row.get("candidates"):
        table["candidates"] = row["candidates"]
    for name in _HISTORIES:
        history = {part: row.get(f"{name}_{part}") for part in _COLUMNS}
        if any(values is not None for values in history.values()):
            table[name] = {part: values or [] for part, values in history.items()}
            if row.get(f"{name}_features"):
                table[name]["features"] = msgspec.json.decode(row[f"{name}_features"])
    for name in _JSON:
        if row.get(name):
            table[name] = msgspec.json.decode(row[name])
    return msgspec.convert(table, QueryRecord)


def _schema(arrow: Any) -> Any:
    fields = [(name, getattr(arrow, kind)()) for name, kind in _PLAIN.items()]
    fields.append(("candidates", arrow.list_(arrow.int64())))
    for name in _HISTORIES:
        fields += [(f"{name}_{part}", arrow.list_(getattr(arrow, kind)())) for part, kind in _COLUMNS.items()]
    fields += [(name, arrow.string()) for name in (*(f"{name}_features" for name in _HISTORIES), *_JSON)]
    return arrow.schema(fields)


def _modules(path: Path) -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: Parquet needs pip install 'npu_gr[parquet]'") from error
