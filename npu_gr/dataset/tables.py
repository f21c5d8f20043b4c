"""Parquet files, and frames of pandas, polars or pyarrow: tables whose columns have types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import orjson

from npu_gr.core.errors import DataError
from npu_gr.core.words import quoted
from npu_gr.dataset.arrow import pa, plain, pq
from npu_gr.dataset.rejects import OnReject
from npu_gr.dataset.source import OnProgress, RowBatch, ignore_progress, ignore_reject

BATCH_ROWS = 1 << 16


@runtime_checkable
class ArrowStream(Protocol):
    """What frames of pandas, polars and pyarrow have: https://arrow.apache.org/docs/format/CDataInterface.html."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a capsule with the stream of batches."""
        ...


class ParquetSource:
    """A Parquet file."""

    place = "row"
    format = "Parquet"

    def __init__(self, path: Path) -> None:
        """Read its schema.

        Raises:
            DataError: it is no Parquet file.
        """
        self.name = str(path)
        self.types: dict[str, str] = {}
        self._path = path
        self._columns = _columns(self._file().schema_arrow, self.name)

    def sample(self) -> RowBatch:
        """Read the first rows."""
        for batch in self.batches(self._columns, ignore_reject, ignore_progress):
            if len(batch.numbers):
                return batch
        raise DataError(f"{self.name}: no row")

    def batches(self, columns: Sequence[str], on_reject: OnReject, on_progress: OnProgress) -> Iterator[RowBatch]:
        """Read all rows."""
        number = 1
        with self._file() as file:
            num_rows = max(file.metadata.num_rows, 1)
            try:
                for batch in file.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=False):
                    yield _batch(number, batch, columns)
                    number += batch.num_rows
                    on_progress((number - 1) / num_rows)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.name}: {error}") from error

    def _file(self) -> Any:
        try:
            return pq.ParquetFile(self._path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self._path}: {error}") from error


class FrameSource:
    """A frame in memory, of any library that speaks Arrow's C stream interface."""

    name = "the frame"
    place = "row"
    format = "a frame"

    def __init__(self, frame: ArrowStream) -> None:
        self.types: dict[str, str] = {}
        self._frame = frame

    def sample(self) -> RowBatch:
        """Take the first rows."""
        stream = self._stream()
        columns = _columns(stream.schema, self.name)
        for batch in stream:
            if batch.num_rows:
                return _batch(1, batch.slice(0, BATCH_ROWS), columns)
        raise DataError("the frame has no row")

    def batches(self, columns: Sequence[str], on_reject: OnReject, on_progress: OnProgress) -> Iterator[RowBatch]:
        """Take all rows."""
        number = 1
        for whole in self._stream():
            for start in range(0, whole.num_rows, BATCH_ROWS):
                batch = whole.slice(start, BATCH_ROWS)
                yield _batch(number, batch, columns)
                number += batch.num_rows

    def _stream(self) -> Any:
        return pa.RecordBatchReader.from_stream(self._frame)


def _columns(schema: Any, source: str) -> list[str]:
    """Name the columns. Raises DataError where two have one name."""
    names = [leaf for field in schema for leaf in _leaves(field)]
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(f"{source}: the column {quoted(name)} stands there twice; rename one of them")
    return names


def _leaves(field: Any, prefix: str = "") -> Iterator[str]:
    name = f"{prefix}{field.name}"
    if pa.types.is_struct(field.type):
        yield from chain.from_iterable(_leaves(inner, f"{name}.") for inner in field.type)
    else:
        yield name


def _batch(first: int, batch: Any, columns: Sequence[str]) -> RowBatch:
    table = pa.Table.from_batches([batch])
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    arrays = {name: plain(table[name].combine_chunks()) for name in columns}
    return RowBatch(
        numbers=np.arange(first, first + batch.num_rows),
        columns=arrays,
        text=lambda row: orjson.dumps(
            {name: array[row].as_py() for name, array in arrays.items()}, default=str, option=orjson.OPT_NON_STR_KEYS
        ).decode(),
    )
