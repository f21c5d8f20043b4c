"""Open a log, or a file of items or users, of any format (`open_source`).

The sources of text files are in `line_sources.py`; JSON lists, Parquet and frames are here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import quoted
from npu_gr.dataset.cells import (
    identifier,
    literal,
    pa,
    plain_sql,
    pq,
)
from npu_gr.dataset.converted import (
    found_in,
    from_lists,
    from_sqlite,
    json_texts,
    parsed_lines,
)
from npu_gr.dataset.encodings import GUESSED, UNPACKED, UTF8, guess, transcoded, unpacked
from npu_gr.dataset.engine import duckdb_errors, in_memory
from npu_gr.dataset.formats import format_of, paths_of
from npu_gr.dataset.line_sources import (
    SAMPLE_ROWS,
    DelimitedSource,
    JsonLinesSource,
    Mended,
    Relation,
    Source,
    fed,
    file_sql,
    json_columns,
    json_sql,
    mended_json,
    reject_twice,
    sampled_objects,
)
from npu_gr.dataset.lines import (
    NESTED,
    OnProgress,
    ignore_progress,
    json_object,
    nested_batches,
    read_chunks,
)
from npu_gr.dataset.partitions import Partitioned, partitions
from npu_gr.dataset.rejects import MAX_ROW_CHARS
from npu_gr.dataset.unfold import find_list, unfolded

MAX_LISTS = 3  # within each other, as {"orders": [{"line_items": [...]}]}
SAMPLE_CELLS = 400_000  # of a sample; fewer rows, if they have more columns
OTHERS = "; name other columns with --user, --item, --time ..."


@runtime_checkable
class ArrowStream(Protocol):
    """The interface of frames of pandas, polars and pyarrow.

    https://arrow.apache.org/docs/format/CDataInterface.html
    """

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a capsule with a stream of batches."""
        ...


class JsonListSource(Source):
    """A list of JSON objects."""

    format = "a list of JSON objects"

    def _read_sample(self) -> dict[str, Any]:
        with in_memory(self.memory_mb) as con, duckdb_errors(self.name, self.memory_mb):
            rows = sampled_objects(text for path in self.paths for (text,) in _texts(con, path))
        if not rows:
            raise DataError(f"{self.name}: not a list of JSON objects")
        return json_columns(rows)

    def relations(
        self, con: Any, path: Path, columns: Sequence[str], show: OnProgress
    ) -> Iterator[Relation]:
        """Read the objects of a list."""
        lines = f"(SELECT CAST(json AS VARCHAR) AS line, 0 AS state FROM {_objects(path)})"
        yield Relation(json_sql(lines, columns, self.kinds(columns)))

    def mend(
        self, path: Path, unsure: Iterator[tuple[int, str]], columns: Sequence[str]
    ) -> Iterator[Mended]:
        """Parse rows that only one of the JSON parsers accepts."""
        return mended_json(unsure, columns)


class NestedSource(Source):
    """{"user": [item, ...]}, oldest first: the format of the data sets of semantic-ID papers.

    The index of an item is its time.
    """

    format = 'JSON {"user": [item, ...]}'

    def line_sql(self, columns: Sequence[str]) -> str:
        """Return the SQL of user, item and index as JSON."""
        return "CAST(to_json([c0, c1, CAST(c2 AS VARCHAR)]) AS VARCHAR)"

    def _read_sample(self) -> dict[str, Any]:
        for path in self.paths:
            for batch in nested_batches(path, ignore_progress):
                return {name: batch[name].slice(0, SAMPLE_ROWS) for name in NESTED}
        raise DataError(f"{self.name}: no user has an item")

    def kinds(self, columns: Sequence[str]) -> list[str]:
        """Return BIGINT for the index, else VARCHAR."""
        return ["BIGINT" if name == NESTED[2] else "VARCHAR" for name in columns]

    def relations(
        self, con: Any, path: Path, columns: Sequence[str], show: OnProgress
    ) -> Iterator[Relation]:
        """Feed the events to DuckDB."""
        schema = pa.schema(
            [(NESTED[0], pa.string()), (NESTED[1], pa.string()), (NESTED[2], pa.int64())]
        )
        failed = fed(con, schema, nested_batches(path, show))
        cells = ", ".join(f"{identifier(name)} AS c{n}" for n, name in enumerate(columns))
        yield Relation(f"SELECT {cells}, 0 AS state FROM fed", failed)


class TableSource(Source):
    """Parquet files, or a frame of any library with Arrow's C stream interface."""

    def __init__(self, name: str, paths: Sequence[Path], frame: ArrowStream | None = None) -> None:
        """Read the columns.

        Raises:
            DataError: a file is no Parquet file, or two columns have one name.
        """
        super().__init__(name, paths)
        self.format = "a frame" if frame is not None else "Parquet"
        self._frame = frame
        self._kinds: dict[str, str] = {}
        try:
            schema = pq.read_schema(self.paths[0]) if frame is None else self._stream().schema
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.name}: {error}") from error
        leaves = [leaf for field in schema for leaf in _leaves(field)]
        reject_twice([name for name, _, _ in leaves], self.name)
        self._leaves = {name: (sql, kind) for name, sql, kind in leaves}

    def line_sql(self, columns: Sequence[str]) -> str:
        """Return the SQL of the cells as JSON, long ones cut."""
        kinds = self.kinds(columns)
        cells = [
            f"left(c{n}, {MAX_ROW_CHARS})" if kind == "VARCHAR" else f"c{n}"
            for n, kind in enumerate(kinds)
        ]
        named = ", ".join(
            f"{literal(name)}: {cell}" for name, cell in zip(columns, cells, strict=True)
        )
        return f"CAST(to_json({{{named}}}) AS VARCHAR)"

    def _stream(self) -> Any:
        return pa.RecordBatchReader.from_stream(self._frame)

    def _read_sample(self) -> dict[str, Any]:
        columns = list(self._leaves)
        with in_memory(self.memory_mb) as con, duckdb_errors(self.name, self.memory_mb, OTHERS):
            for path in self.paths:
                for relation in self.relations(con, path, columns, ignore_progress):
                    num_rows = max(1, min(SAMPLE_ROWS, SAMPLE_CELLS // len(columns)))
                    sql = f"SELECT * EXCLUDE state FROM ({relation.sql}) LIMIT {num_rows}"
                    described = con.sql(f"DESCRIBE {sql}").fetchall()
                    self._kinds = {
                        name: kind for name, (_, kind, *_) in zip(columns, described, strict=True)
                    }
                    table = con.sql(sql).to_arrow_table()
                    if table.num_rows:
                        return {
                            name: table[f"c{n}"].combine_chunks() for n, name in enumerate(columns)
                        }
        raise DataError(
            "the frame has no row" if self._frame is not None else f"{self.name}: no row"
        )

    def kinds(self, columns: Sequence[str]) -> list[str]:
        """Return the types of the file or the frame after `plain_sql`."""
        return [self._kinds[name] for name in columns]

    def relations(
        self, con: Any, path: Path, columns: Sequence[str], show: OnProgress
    ) -> Iterator[Relation]:
        """Read a file with DuckDB, or the frame in place."""
        table = "frame" if self._frame is not None else f"read_parquet({file_sql(path)})"
        found = [self._leaves[name] for name in columns]
        raw = (
            f"SELECT {', '.join(f'{sql} AS c{n}' for n, (sql, _) in enumerate(found))} FROM {table}"
        )
        kinds: list[str] = []
        for _ in range(2):  # DESCRIBE may consume a stream
            if self._frame is not None:
                con.register("frame", self._stream())
            kinds = kinds or [kind for _, kind, *_ in con.sql(f"DESCRIBE {raw}").fetchall()]
        cells = [
            f"{plain_sql(f'c{n}', kind, has_uuids=_is_uuid(own))} AS c{n}"
            for n, (kind, (_, own)) in enumerate(zip(kinds, found, strict=True))
        ]
        yield Relation(f"SELECT {', '.join(cells)}, 0 AS state FROM ({raw})")


def open_source(
    log: Path | str | ArrowStream,
    format: str = "",  # noqa: A002  (the option's name)
    columns: Sequence[str] = (),
    encoding: str = "",
    scratch: Path | None = None,
) -> Source:
    """Open a source of rows.

    Args:
        log: A file, a folder, a pattern of paths, or a frame.
        format: One of `FORMATS`; "" for the one of the path's suffix.
        columns: Column names of a CSV or TSV without a header.
        encoding: Encoding of text files; "" = UTF-8, or Windows-1252 where the first 4 MiB have
            its letters.
        scratch: Folder for copies in UTF-8, which the source reads; it need not exist. None = only
            UTF-8 is read.

    Raises:
        DataError: the file does not exist, has an unknown format, or has a broken beginning.
    """
    if not isinstance(log, Path | str):
        if not isinstance(log, ArrowStream):
            raise DataError(
                f"a {type(log).__name__} is not a log; give a path, or a frame with "
                "__arrow_c_stream__"
            )
        return TableSource("the frame", [Path()], log)
    name, paths = str(log), paths_of(Path(log), format)
    parts = partitions(paths)
    if scratch is not None and any(path.suffix in UNPACKED for path in paths):
        if parts:
            raise DataError(f"{name}: unpack the files of a partitioned folder first")
        folders = [scratch / f"unpacked-{place}" for place in range(len(paths))]
        inside = (
            unpacked(path, folder) if path.suffix in UNPACKED else [path]
            for path, folder in zip(paths, folders, strict=True)
        )
        paths = list(chain.from_iterable(inside))
    found = {format or format_of(path) for path in paths}
    if len(found) > 1:
        raise DataError(
            f"{name}: files of {len(found)} formats ({', '.join(sorted(found))}); give files of one"
        )
    (kind,) = found
    if columns and kind not in ("csv", "tsv"):
        raise DataError(
            f"--columns: {name} names its columns itself; --columns is only for CSV and TSV "
            "without a header"
        )
    source = _opened(name, paths, kind, columns, encoding, scratch)
    return Partitioned(source, parts) if parts else source


def _opened(
    name: str,
    paths: list[Path],
    kind: str,
    columns: Sequence[str],
    encoding: str,
    scratch: Path | None,
) -> Source:
    if kind == "parquet":
        return TableSource(name, paths)
    if kind in ("feather", "orc"):
        return TableSource(name, paths[:1], _read_table(paths, kind))
    if kind == "sqlite":
        if scratch is None:
            raise DataError(f"{name}: a database is no side file; export the table as CSV")
        return DelimitedSource(name, from_sqlite(paths[0], scratch / "table"))
    encodings = [encoding or guess(path) for path in paths]
    if scratch is not None:
        paths = [
            path if of.lower().replace("_", "-") in (UTF8, "utf8") else transcoded(path, of, to)
            for path, of, to in (
                (path, of, scratch / str(place))
                for place, (path, of) in enumerate(zip(paths, encodings, strict=True))
            )
        ]
    source = _of_text(name, paths, kind, columns, scratch)
    if not encoding and (num := sum(of != UTF8 for of in encodings)):
        which = name if num == len(paths) else f"{num} of the files of {name}"
        how = " and ".join(sorted({GUESSED[of] for of in encodings if of != UTF8}))
        source.notes.append(
            f"{which} is read as {how}; --encoding NAME names another one, --encoding utf-8 "
            "rejects these rows"
        )
    return source


def _of_text(
    name: str, paths: list[Path], kind: str, columns: Sequence[str], scratch: Path | None
) -> Source:
    if kind == "lists":
        if scratch is None:
            raise DataError(f"{name}: lists of items are no side file")
        lists = NestedSource(name, from_lists(paths, scratch / "lists"))
        lists.format = "a line for each user: the user, then the items, oldest first"
        return lists
    if kind not in ("jsonl", "json"):
        delimited = DelimitedSource(name, paths, "\t" if kind in ("tsv", "atomic") else "", columns)
        if scratch is None or not (convert := found_in(delimited)):
            return delimited
        return _unfolded(convert(delimited, scratch / "converted"), scratch)
    of_json = JsonLinesSource if kind == "jsonl" else _json_kind(paths[0])
    source: Source = of_json(name, paths)
    if scratch is not None and of_json is JsonLinesSource:
        if column := json_texts(source.sample):
            source = parsed_lines(source, column, scratch / "converted")
        return _unfolded(source, scratch)
    return source


def _unfolded(source: Source, scratch: Path, depth: int = 0) -> Source:
    """Unfold the lists of JSON lines, if rows have no other item; also a list within a list."""
    if depth == MAX_LISTS or not (column := find_list(source.sample)):
        return source
    folders = [scratch / f"unfolded-{depth}-{place}" for place in range(len(source.paths))]
    copies = [unfolded(path, column, to) for path, to in zip(source.paths, folders, strict=True)]
    found = JsonLinesSource(source.name, copies)
    found.notes += source.notes
    found.notes.append(
        f"each object of {quoted(column)} is a row, where a row has no item of its own; "
        "the numbers of rejected rows count these"
    )
    return _unfolded(found, scratch, depth + 1)


def _read_table(paths: Sequence[Path], kind: str) -> Any:
    from pyarrow import feather, orc

    try:
        tables = [(feather if kind == "feather" else orc).read_table(path) for path in paths]
        return pa.concat_tables(tables)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{paths[0]}: {error}") from error


def _json_kind(path: Path) -> type[JsonLinesSource | JsonListSource | NestedSource]:
    """Find which of the three JSON structures a file has.

    Raises:
        DataError: none of them.
    """
    head = next(read_chunks(path), b"").lstrip()
    if head.startswith(b"["):
        return JsonListSource
    if re.match(rb'\{\s*("(?:[^"\\]|\\.)*+"\s*:\s*\[|\})', head):
        row = json_object(head.partition(b"\n")[0])
        if row is None or all(isinstance(value, list) for value in row.values()):
            return NestedSource
    if head.startswith(b"{"):
        return JsonLinesSource
    raise DataError(f'{path}: neither JSON objects, a list of them, nor {{"user": [item, ...]}}')


def _is_uuid(kind: Any) -> bool:
    return bool(pa.types.is_fixed_size_binary(kind)) and kind.byte_width == 16


def _leaves(field: Any, prefix: str = "", sql: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the columns, with structs flattened: dotted name, SQL, and Arrow type."""
    name = f"{prefix}{field.name}"
    sql = f"struct_extract({sql}, {literal(field.name)})" if sql else identifier(field.name)
    if pa.types.is_struct(field.type):
        yield from chain.from_iterable(_leaves(inner, f"{name}.", sql) for inner in field.type)
    else:
        yield name, sql, field.type


def _texts(con: Any, path: Path) -> Iterator[tuple[str]]:
    """Yield the texts of the first objects of a list."""
    found = con.execute(f"SELECT CAST(json AS VARCHAR) FROM {_objects(path)} LIMIT {SAMPLE_ROWS}")
    yield from iter(found.fetchone, None)


def _objects(path: Path) -> str:
    packed = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix, "none")
    return f"read_json_objects({file_sql(path)}, format = 'array', compression = '{packed}')"
