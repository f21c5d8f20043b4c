"""Sources of rows that DuckDB reads as a relation of cells: text files (others: `sources.py`).

    c0, c1, ...   cells of the requested columns, null where missing
    state         0: a row; else one of CODES, SKIPPED (no row) or UNSURE (Python parses it)
    line          the text of the row, for rejected.jsonl

Every line of a text file, blank ones too, is a row of the relation. Therefore the index of a row
is its number in the file, and a broken line never affects its neighbours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import quoted
from npu_gr.dataset.cells import (
    is_list_type,
    literal,
    pa,
    text_sql,
)
from npu_gr.dataset.engine import LEAST_MB, PACKED_RATIO
from npu_gr.dataset.header import find_header
from npu_gr.dataset.lines import (
    PACKED,
    OnProgress,
    ParsedRow,
    flat,
    has_like_ends,
    json_cell,
    json_column,
    json_object,
    line_batches,
    read_lines,
    read_rows,
)
from npu_gr.dataset.rejects import CODES, SKIPPED, UNSURE, RejectReason

SAMPLE_ROWS = 10_000  # from which columns and times are guessed
SAMPLE_BYTES = 16 << 20  # of these rows; fewer rows, if they are longer
LINE_BYTES = 1 << 20  # the longest line that DuckDB reads; Python reads longer ones
MAX_COLUMNS = 1000  # of JSON objects, whose keys may be ids
_ATOMIC = re.compile(r"(.+):(token|token_seq|float|float_seq)")


class Relation(NamedTuple):
    """A query that yields cells."""

    sql: str
    failed: Sequence[Exception] = ()  # errors of the Python reader that feeds it


class Mended(NamedTuple):
    """What Python parsed from a row that DuckDB was unsure of."""

    number: int  # row number in the file
    num_more: int  # following rows of the relation that belong to it
    cells: list[Any] | None  # of all columns; None if rejected
    reason: RejectReason | None
    text: str


class Source:
    """Files of one kind, or a frame. Each kind has a class below."""

    place = "row"  # what a row number counts: "line" or "row"
    format = ""  # for the summary: "cells separated by ','"
    first_number = 1  # number in the file of the first row of the relation
    memory_mb = LEAST_MB  # memory limit of DuckDB for reading

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self.name = name  # for messages: the path, or "the frame"
        self.paths = list(paths)
        self.notes: list[str] = []  # for the user of `npu-gr prepare`
        # types that the header of an atomic file declares
        self.types: dict[str, str] = {}
        self.positive: tuple[str, ...] = ()  # condition of behaviours, where the format has one
        self._sample: dict[str, Any] | None = None

    @property
    def num_bytes(self) -> int:
        """Estimated unpacked bytes of the files; 0 for a frame."""
        sizes = (
            (path.stat().st_size, path.suffix in (*PACKED, ".parquet", ".pq"))
            for path in self.paths
            if path.name
        )
        return sum(size * (PACKED_RATIO if is_packed else 1) for size, is_packed in sizes)

    @property
    def sample(self) -> dict[str, Any]:
        """The first cells of all columns, as Arrow arrays.

        Raises:
            DataError: the source cannot be read, or has no row.
        """
        if self._sample is None:
            self._sample = self._read_sample()
        return self._sample

    def kinds(self, columns: Sequence[str]) -> list[str]:
        """Return the DuckDB types of columns in the relation."""
        return [
            "VARCHAR[]" if pa.types.is_list(self.sample[name].type) else "VARCHAR"
            for name in columns
        ]

    def line_sql(self, columns: Sequence[str]) -> str:
        """Return the SQL of a row's text."""
        return "line"

    def relations(
        self, con: Any, path: Path, columns: Sequence[str], show: OnProgress
    ) -> Iterator[Relation]:
        """Yield relations of a file: if DuckDB fails to read one, the next is tried."""
        raise NotImplementedError

    def mend(
        self, path: Path, unsure: Iterator[tuple[int, str]], columns: Sequence[str]
    ) -> Iterator[Mended]:
        """Parse rows that DuckDB was unsure of: (number, line), ascending."""
        return iter(())

    def _read_sample(self) -> dict[str, Any]:
        raise NotImplementedError


class LineSource(Source):
    """Text files of lines."""

    place = "line"

    def relations(
        self, con: Any, path: Path, columns: Sequence[str], show: OnProgress
    ) -> Iterator[Relation]:
        """Read lines with DuckDB, else with Python."""
        packed = {"": "none", ".gz": "gzip", ".zst": "zstd"}.get(
            path.suffix if path.suffix in PACKED else ""
        )
        num_skipped = self.first_number - 1
        if packed is not None and has_like_ends(path):
            lines = (
                f"(SELECT line, 0 AS state FROM read_csv({file_sql(path)}, columns = {{'line': "
                "'VARCHAR'}, delim = E'\\x01\\x02\\x03', quote = '', escape = '', header = "
                f"false, auto_detect = false, skip = {num_skipped}, max_line_size = {LINE_BYTES}, "
                f"buffer_size = {4 * LINE_BYTES}, compression = '{packed}'))"
            )
            yield Relation(self._cells_sql(lines, columns))
        schema = pa.schema([("line", pa.string()), ("state", pa.int8())])
        failed = fed(con, schema, line_batches(path, num_skipped, show))
        yield Relation(self._cells_sql("fed", columns), failed)

    def _cells_sql(self, lines: str, columns: Sequence[str]) -> str:
        raise NotImplementedError


class DelimitedSource(LineSource):
    """CSV, TSV and RecBole's atomic files: the first line names the columns, cells are texts."""

    def __init__(
        self, name: str, paths: Sequence[Path], delimiter: str = "", columns: Sequence[str] = ()
    ) -> None:
        """Read the header.

        Args:
            delimiter: Separator of cells; "" for the most frequent one of the first line.
            columns: Column names, if the file has no header.

        Raises:
            DataError: a file is empty, its header names a column twice, or headers differ.
        """
        super().__init__(name, paths)
        path, header = self.paths[0], find_header(self.paths[0], delimiter)
        self._delimiter, cells = header.delimiter, header.cells
        atomic = [_ATOMIC.fullmatch(cell) for cell in cells]
        self.types = (
            {found[1]: found[2] for found in atomic if found} if all(atomic) and not columns else {}
        )
        self._quote = "" if self.types else '"'
        self.columns = list(columns) or list(self.types) or cells
        self.first_number = 1 if columns else header.number + 1
        if len(self.columns) != len(cells):
            names = ", ".join(self.columns)
            raise DataError(
                f"{path}, line {header.number}: {len(cells)} cells, but --columns has "
                f"{len(self.columns)}: {names}"
            )
        hint = " (if the file has no header, name the columns with --columns a,b,...)"
        reject_twice(self.columns, f"{path}, line {header.number}", "" if columns else hint)
        for other in self.paths[1:] if not columns else ():
            if (found := find_header(other, self._delimiter)) != header:
                raise DataError(
                    f"{other}, line {found.number}: the columns differ from those of {path}; "
                    "prepare only logs with the same columns together"
                )
        shown = "tabs" if self._delimiter == "\t" else repr(self._delimiter)
        self.format = "RecBole atomic file" if self.types else f"cells separated by {shown}"
        if header.number > 1 and not columns:
            self.format += f", their names in line {header.number}"

    def rows(self, path: Path) -> Iterator[ParsedRow]:
        """Parse a file row by row."""
        return read_rows(path, self._delimiter, self._quote, len(self.columns), self.first_number)

    def kinds(self, columns: Sequence[str]) -> list[str]:
        """Return VARCHAR for every column."""
        return ["VARCHAR"] * len(columns)

    def _read_sample(self) -> dict[str, Any]:
        rows = chain.from_iterable(map(self.rows, self.paths))
        cells: list[list[str]] = []
        num_rejected = num_bytes = 0
        for row in rows:
            if row.cells is None:
                num_rejected += 1
            else:
                cells.append(row.cells)
                num_bytes += len(row.text)
            if len(cells) == SAMPLE_ROWS or num_bytes > SAMPLE_BYTES:
                break
        if not cells:
            if not num_rejected and self.first_number > 1:
                raise DataError(
                    f"{self.name}: no row follows the first line, which names the columns"
                )
            raise DataError(
                f"{self.name}: no row has the {len(self.columns)} cells of the first line "
                f"({self.format}); "
                "if the file has no header, name its columns with --columns a,b,..."
            )
        columns = zip(*cells, strict=True)
        return {
            name: pa.array([cell or None for cell in column], pa.string())
            for name, column in zip(self.columns, columns, strict=True)
        }

    def _cells_sql(self, lines: str, columns: Sequence[str]) -> str:
        delimiter = literal(self._delimiter)
        plain = f"string_split(line, {delimiter})"
        wrong, skipped = CODES[RejectReason.CELLS], f"line IS NULL THEN {SKIPPED}"
        places = [self.columns.index(name) + 1 for name in columns]
        if not self._quote:
            cells = ", ".join(f"nullif(cells[{at}], '') AS c{n}" for n, at in enumerate(places))
            return (
                f"SELECT {cells}, CASE WHEN {skipped} WHEN state <> 0 THEN state "
                f"WHEN len(cells) <> {len(self.columns)} THEN {wrong} ELSE 0 END AS state, line "
                f"FROM (SELECT *, {plain} AS cells FROM {lines})"
            )
        # A delimiter inside quotes separates nothing: of the pieces between quotes every second one
        # is inside.
        outside = f"replace(piece, {delimiter}, chr(31))"
        pieces = (
            f"""list_transform(string_split(line, '"'), """
            f"""lambda piece, place: if(place % 2 = 1, {outside}, piece))"""
        )
        quoted_cells = f"""string_split(array_to_string({pieces}, '"'), chr(31))"""
        is_odd = (
            """(length(line) - length(replace(line, '"', ''))) % 2 = 1 OR contains(line, chr(31))"""
        )
        is_broken = """contains(cell, '"') AND NOT regexp_full_match(cell, '(?s)"([^"]|"")*"')"""
        broken = f"len(list_filter(cells, lambda cell: {is_broken}))"
        unquoted = (
            """CASE WHEN starts_with({0}, '"') """
            """THEN replace(substr({0}, 2, length({0}) - 2), '""', '"') ELSE {0} END"""
        )
        cells = ", ".join(
            f"nullif({unquoted.format(f'cells[{at}]')}, '') AS c{n}" for n, at in enumerate(places)
        )
        return (
            f"SELECT {cells}, CASE WHEN {skipped} WHEN state <> 0 THEN state "
            f"WHEN has_quote AND ({is_odd} OR {broken} > 0) THEN {UNSURE} "
            f"WHEN len(cells) <> {len(self.columns)} THEN {wrong} ELSE 0 END AS state, line "
            f"FROM (SELECT *, CASE WHEN has_quote THEN {quoted_cells} ELSE {plain} END AS cells "
            f"""FROM (SELECT *, contains(line, '"') AS has_quote FROM {lines}))"""
        )

    def mend(
        self, path: Path, unsure: Iterator[tuple[int, str]], columns: Sequence[str]
    ) -> Iterator[Mended]:
        """Parse rows with unusual quotes; a row may span several lines."""
        places = [self.columns.index(name) for name in columns]
        only = (number for number, _ in unsure)
        for row in read_rows(path, self._delimiter, self._quote, len(self.columns), only=only):
            cells = None if row.cells is None else [row.cells[at] or None for at in places]
            yield Mended(row.number, row.num_more, cells, row.reason, row.text)


class JsonLinesSource(LineSource):
    """One JSON object per line; cells of nested objects have dotted names."""

    format = "one JSON object per line"

    def _read_sample(self) -> dict[str, Any]:
        lines = chain.from_iterable(chain.from_iterable(map(read_lines, self.paths)))
        rows = sampled_objects(line.removeprefix(b"\xef\xbb\xbf") for line in lines)
        if not rows:
            raise DataError(f"{self.name}: no line is a JSON object")
        return json_columns(rows)

    def _cells_sql(self, lines: str, columns: Sequence[str]) -> str:
        return json_sql(lines, columns, self.kinds(columns))

    def mend(
        self, path: Path, unsure: Iterator[tuple[int, str]], columns: Sequence[str]
    ) -> Iterator[Mended]:
        """Parse rows that only one of the JSON parsers accepts."""
        return mended_json(unsure, columns)


def reject_twice(names: Sequence[str], where: str, hint: str = "") -> None:
    """Raise DataError if two columns have the same name; the message ends with the hint."""
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(
                f"{where}: two columns are named {quoted(name)}; rename one of them{hint}"
            )


def file_sql(path: Path) -> str:
    """Quote a path as an SQL literal, with the characters of patterns escaped."""
    return literal(re.sub(r"([*?\[])", r"[\1]", str(path)))


def sampled_objects(texts: Iterator[bytes | str]) -> list[dict[str, Any]]:
    """Read the first JSON objects as flat rows; texts that are no object are left out."""
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    for text in texts:
        if (row := json_object(text)) is not None:
            rows.append(dict(islice(flat(row).items(), MAX_COLUMNS)))
            num_bytes += len(text)
        if len(rows) == SAMPLE_ROWS or num_bytes > SAMPLE_BYTES:
            break
    return rows


def json_columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Convert JSON objects to Arrow columns."""
    names = list(islice(dict.fromkeys(chain.from_iterable(rows)), MAX_COLUMNS))
    return {name: json_column([row.get(name) for row in rows]) for name in names}


def json_sql(lines: str, columns: Sequence[str], kinds: Sequence[str]) -> str:
    """Return the relation of JSON objects.

    Lines that DuckDB and Python parse differently are UNSURE.
    """
    pointers = list(dict.fromkeys(chain.from_iterable(map(_pointers, columns))))
    listed = ", ".join(map(literal, pointers))
    cells = []
    for n, (name, kind) in enumerate(zip(columns, kinds, strict=True)):
        found = [f"found[{pointers.index(one) + 1}]" for one in _pointers(name)]
        value = found[0] if len(found) == 1 else f"coalesce({', '.join(found)})"
        cells.append(f"{_json_cell_sql(value, is_list=is_list_type(kind))} AS c{n}")
    odd = r"""(?i)[:\[,]\s*[+-]?(nan|inf)|,\s*[\]}]|[-:\[,]\s*\+|^\s*[\[{]\s*,"""
    state = (
        f"CASE WHEN line IS NULL OR trim(line, E' \\t\\r\\n') = '' THEN {SKIPPED} "
        f"WHEN state > 0 THEN {CODES[RejectReason.NOT_JSON]} WHEN state < 0 THEN state "
        f"WHEN NOT json_valid(line) OR regexp_matches(line, {literal(odd)}) THEN {UNSURE} "
        f"WHEN NOT starts_with(ltrim(line), '{{') THEN {CODES[RejectReason.NOT_JSON]} ELSE 0 END"
    )
    return (
        f"SELECT {', '.join(cells)}, state, line FROM (SELECT line, state, "
        f"CASE WHEN state = 0 THEN json_extract(line, [{listed}]) END AS found "
        f"FROM (SELECT line, {state} AS state FROM {lines}))"
    )


def _pointers(name: str) -> list[str]:
    """Return the JSON pointers of a cell: its name as one key, its dotted parts as nested keys."""
    escaped = name.replace("~", "~0").replace("/", "~1")
    return list(dict.fromkeys(("/" + escaped, "/" + escaped.replace(".", "/"))))


def _json_cell_sql(value: str, *, is_list: bool) -> str:
    whole = text_sql(f"CAST({value} AS DOUBLE)", "DOUBLE")
    text = (
        f"CASE json_type({value}) WHEN 'OBJECT' THEN NULL WHEN 'NULL' THEN NULL WHEN 'DOUBLE' THEN "
        f"{whole} WHEN 'ARRAY' THEN (CASE WHEN json_array_length({value}) = 1 THEN "
        f"json_extract_string({value}, '/0') END) ELSE json_extract_string({value}, '$') END"
    )
    if not is_list:
        return text
    many = (
        f"CASE WHEN json_array_length({value}) = 0 THEN [] ELSE json_extract_string({value}, "
        "'$[*]') END"
    )
    return (
        f"CASE WHEN json_type({value}) = 'ARRAY' THEN {many} WHEN {text} IS NOT NULL THEN "
        f"[{text}] END"
    )


def mended_json(unsure: Iterator[tuple[int, str]], columns: Sequence[str]) -> Iterator[Mended]:
    """Parse objects that DuckDB was unsure of."""
    for number, line in unsure:
        row = json_object(line.removeprefix("\ufeff"))
        cells = None if row is None else [json_cell(row, name) for name in columns]
        yield Mended(number, 0, cells, RejectReason.NOT_JSON if row is None else None, line)


def fed(con: Any, schema: Any, batches: Iterator[Any]) -> list[Exception]:
    """Register batches that Python reads as the DuckDB view `fed`.

    Returns a list to which the error of a failing batch is appended.
    """
    failed: list[Exception] = []

    def feed() -> Iterator[Any]:
        try:
            yield from batches
        except Exception as error:
            failed.append(error)
            raise

    con.register("fed", pa.RecordBatchReader.from_batches(schema, feed()))
    return failed
