"""CSV, TSV and RecBole's atomic files. Every cell is read as text; its meaning is found out later.

pyarrow reads a block at a time. A block whose rows are not its lines (a quote stands alone, a cell has a newline) or
that is not UTF-8 is read again line by line, so that one broken row never takes its neighbours with it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.words import quoted
from npu_gr.dataset.arrow import pa, pa_csv
from npu_gr.dataset.blocks import MAX_ROW_LINES, Block, Lines, read_blocks
from npu_gr.dataset.rejects import OnReject, RejectReason
from npu_gr.dataset.source import OnProgress, RowBatch, ignore_progress

_DELIMITERS = ",;\t|"
_ATOMIC = re.compile(r"(.+):(token|token_seq|float|float_seq)")


class DelimitedSource:
    """A file of rows of cells; its first line names the columns."""

    place = "line"

    def __init__(self, path: Path, delimiter: str = "", columns: Sequence[str] = ()) -> None:
        """Read the header.

        Args:
            path: of the file.
            delimiter: between cells; "" = what the first line has most of.
            columns: names of the columns of a file without a header.

        Raises:
            DataError: the file is empty, or its header names a column twice.
        """
        self.name = str(path)
        self._path = path
        block = next(iter(read_blocks(path, ignore_progress)), None)
        if block is None:
            raise DataError(f"{path}: the file is empty")
        try:
            line = block.data.partition(b"\n")[0].decode().rstrip("\r")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line 1: not UTF-8; iconv converts it") from error
        if not line.strip():
            raise DataError(f"{path}: the first line is empty; it must name the columns")
        self._delimiter = delimiter or max(_DELIMITERS, key=line.count)
        try:
            cells = [cell.strip() for cell in _parse(line, self._delimiter, '"')]
        except csv.Error as error:
            raise DataError(f"{path}, line 1: {error}; it must name the columns") from error
        atomic = [_ATOMIC.fullmatch(cell) for cell in cells]
        self.types = {found[1]: found[2] for found in atomic if found} if all(atomic) and not columns else {}
        self._quote = "" if self.types else '"'
        self._columns = list(columns) or list(self.types) or cells
        self._has_header = not columns
        if len(self._columns) != len(cells):
            raise DataError(
                f"{path}, line 1: {len(cells)} cells, but {len(self._columns)} names: {', '.join(self._columns)}"
            )
        if len(set(self._columns)) != len(cells):
            twice = next(name for name in self._columns if self._columns.count(name) > 1)
            raise DataError(f"{path}, line 1: the column {quoted(twice)} stands there twice; rename one of them")
        shown = "tabs" if self._delimiter == "\t" else repr(self._delimiter)
        self.format = "RecBole atomic file" if self.types else f"cells separated by {shown}"

    def sample(self) -> RowBatch:
        """Read the first block."""
        num_rejected = 0

        def count(*_: object) -> None:
            nonlocal num_rejected
            num_rejected += 1

        for batch in self.batches(self._columns, count, ignore_progress):
            if len(batch.numbers):
                return batch
        if not num_rejected and self._has_header:
            raise DataError(f"{self.name}: no row stands below the first line, which names the columns")
        raise DataError(
            f"{self.name}: no row has the {len(self._columns)} cells of the first line ({self.format}); "
            "--columns a,b,... names the columns of a file without a header"
        )

    def batches(self, columns: Sequence[str], on_reject: OnReject, on_progress: OnProgress) -> Iterator[RowBatch]:
        """Read all rows."""
        for block in read_blocks(self._path, on_progress, has_quotes=bool(self._quote)):
            if block.first == 1 and self._has_header:
                block = Block(2, block.data.partition(b"\n")[2])
            if block.data.strip(b"\r\n"):
                yield self._batch(block, columns, on_reject)

    def _batch(self, block: Block, columns: Sequence[str], on_reject: OnReject) -> RowBatch:
        lines = Lines(block)
        read = self._at_once(block, columns, lines, on_reject)
        numbers, cells = read or self._line_by_line(block.first, lines, columns, on_reject)
        return RowBatch(numbers=numbers, columns=cells, text=lambda row: lines.text(int(numbers[row])))

    def _at_once(
        self, block: Block, columns: Sequence[str], lines: Lines, on_reject: OnReject
    ) -> tuple[I64, dict[str, Any]] | None:
        """Read a block whose rows are its lines: numbers of the good ones, and their cells.

        Returns None for other blocks; for those that are not UTF-8: pyarrow would not call `skip`; and for those with
        a bare carriage return, which ends a row to pyarrow.
        """
        if block.data.count(b"\r") != block.data.count(b"\r\n"):
            return None
        bad: list[int] = []

        def skip(row: Any) -> str:
            bad.append(row.number)
            return "skip"

        try:
            block.data.decode()
            table = pa_csv.read_csv(
                pa.py_buffer(block.data),
                pa_csv.ReadOptions(
                    column_names=self._columns, use_threads=False, block_size=max(len(block.data) + 1, 1 << 10)
                ),
                pa_csv.ParseOptions(
                    delimiter=self._delimiter,
                    quote_char=self._quote or False,
                    newlines_in_values=bool(self._quote),
                    invalid_row_handler=skip,
                ),
                pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(columns, pa.string()),
                    include_columns=list(columns),
                    null_values=[""],
                    strings_can_be_null=True,
                    check_utf8=False,
                ),
            )
        except (UnicodeDecodeError, pa.ArrowInvalid):
            return None
        num_rows = table.num_rows + len(bad)
        num_lines = block.data.count(b"\n") + (not block.data.endswith(b"\n"))
        if num_rows == num_lines:
            rows = np.arange(num_lines)
        else:
            rows = np.array([at for at, line in enumerate(lines.all()) if line.rstrip(b"\r")], np.int64)
            if len(rows) != num_rows:
                return None
        bad_rows = np.array(bad, np.int64) - 1
        good = np.delete(rows, bad_rows)
        cells = {name: table[name].combine_chunks() for name in columns}
        for number in (rows[bad_rows] + block.first).tolist():
            on_reject(number, RejectReason.CELLS, lines.text(number))
        return good + block.first, cells

    def _line_by_line(
        self, first: int, lines: Lines, columns: Sequence[str], on_reject: OnReject
    ) -> tuple[I64, dict[str, Any]]:
        """Read a block with stray quotes or bytes, or with newlines in cells."""
        where = [self._columns.index(name) for name in columns]
        numbers = []
        cells: list[list[str | None]] = [[] for _ in columns]
        rest = iter(enumerate(lines.all(), first))
        for number, line in rest:
            if not line.rstrip(b"\r"):
                continue
            try:
                row, num_more = self._row(line, lines.all()[number - first + 1 : number - first + 1 + MAX_ROW_LINES])
            except UnicodeError:
                on_reject(number, RejectReason.NOT_UTF8, lines.text(number))
                continue
            except csv.Error:
                on_reject(number, RejectReason.QUOTE, lines.text(number))
                continue
            for _ in islice(rest, num_more):
                pass
            if len(row) != len(self._columns):
                on_reject(number, RejectReason.CELLS, lines.text(number))
                continue
            numbers.append(number)
            for column, at in zip(cells, where, strict=True):
                column.append(row[at] or None)
        arrays = {name: pa.array(column, pa.string()) for name, column in zip(columns, cells, strict=True)}
        return np.array(numbers, np.int64), arrays

    def _row(self, line: bytes, following: Sequence[bytes]) -> tuple[list[str], int]:
        """Parse a row, which may go on over following lines if a quote is open: its cells, and how many lines more.

        Raises:
            UnicodeError, csv.Error: the line is no row, and no beginning of one.
        """
        text = line.decode().rstrip("\r")
        if not _is_open(text, self._delimiter, self._quote):
            return _parse(text, self._delimiter, self._quote), 0
        for num_more, more in enumerate(following, 1):
            text += "\n" + more.decode(errors="surrogateescape").rstrip("\r")
            if b'"' in more and not _is_open(text, self._delimiter, self._quote):
                text.encode()  # raises where a line was not UTF-8
                row = _parse(text, self._delimiter, self._quote)
                if len(row) == len(self._columns):
                    return row, num_more
                break
        raise csv.Error("a quote is not closed")


def _is_open(text: str, delimiter: str, quote: str) -> bool:
    """Whether a quote is open at the end of a text.

    Raises:
        csv.Error: a quote is closed where no cell ends.
    """
    if not quote:
        return False
    try:
        _parse(text, delimiter, quote)
    except csv.Error as error:
        if "unexpected end of data" not in str(error):
            raise
        return True
    return False


def _parse(text: str, delimiter: str, quote: str) -> list[str]:
    """Part a row into its cells.

    Raises:
        csv.Error: quotes are not where they may be.
    """
    if not quote:
        return text.split(delimiter)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quotechar=quote, strict=True)
    cells = next(reader, [])
    if next(reader, None) is not None:
        raise csv.Error("more than a row")
    return cells
