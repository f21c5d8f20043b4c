"""Find the line of a delimited file that names its columns.

It is the first line, or stands below `sep=;`, which spreadsheets write, or below rows of titles:
lines of few cells, as reports have them, above a line of as many cells as most others.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from npu_gr.core.errors import DataError
from npu_gr.dataset.lines import parse, read_lines

DELIMITERS = ",;\t|"
_LINES = 200  # of which the usual number of cells is seen
_MOST_TITLES = 30
_LONG_BYTES = 1 << 14  # of a line: its cells take far more memory than its bytes
_LEAST_CELLS = 3  # of rows below titles: with fewer, a title may be a header without a cell
_SEP = re.compile(r'"?sep=(.)"?[,;\t ]*', re.IGNORECASE)
_VALUE = re.compile(r"[+-]?[\d.,]+|\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}.*")  # a number or a date


class Header(NamedTuple):
    """The line that names the columns."""

    cells: list[str]  # the names
    delimiter: str
    number: int = 1  # of the line, from 1


def find_header(path: Path, delimiter: str = "") -> Header:
    """Find the line that names the columns.

    Args:
        path: The file, in UTF-8.
        delimiter: Separator of cells; "" for the most frequent one of the line.

    Raises:
        DataError: the file is empty, or no line can name columns.
    """
    raw = _first_lines(path)
    if not raw:
        raise DataError(f"{path}: the file is empty")
    lines = [line.decode(errors="replace") for line in raw]
    number = 1
    if (said := _SEP.fullmatch(lines[0])) and len(lines) > 1:
        number, delimiter = 2, said[1]
    elif found := _below_titles(lines, delimiter or DELIMITERS):
        return found
    try:
        line = raw[number - 1].decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8; convert the file with iconv") from error
    if not line.strip():
        which = "the first line" if number == 1 else f"line {number}"
        raise DataError(f"{path}: {which} is empty; it must name the columns")
    delimiter = delimiter or max(DELIMITERS, key=line.count)
    try:
        cells = parse(line, delimiter, '"')
    except csv.Error as error:
        raise DataError(
            f"{path}, line {number}: {error}; the line must name the columns"
        ) from error
    return Header([cell.strip() for cell in cells], delimiter, number)


def _first_lines(path: Path) -> list[bytes]:
    """Read up to `_LINES` lines, up to a long one; only the first may be one itself."""
    found: list[bytes] = []
    for line in islice(chain.from_iterable(read_lines(path)), _LINES):
        if len(line) > _LONG_BYTES:
            return found or [line]
        found.append(line)
    return found


def _below_titles(lines: Sequence[str], delimiters: str) -> Header | None:
    """Find a header below rows of titles; None = the first line is one, or nothing is sure."""
    if len(lines) < 2:
        return None
    shapes = []
    for delimiter in delimiters:
        rows = [_cells(line, delimiter) for line in lines]
        sizes = Counter(map(len, filter(None, rows)))
        usual, count = sizes.most_common(1)[0] if sizes else (0, 0)
        shapes.append((count if usual >= _LEAST_CELLS else 0, usual, delimiter, rows))
    own = max(shapes, key=lambda shape: lines[0].count(shape[2]))
    if own[2] in lines[0] and _is_header(own[3][0], own[1]):
        return None
    count, usual, delimiter, rows = max(shapes, key=lambda shape: shape[:2])
    if 2 * count < len(lines):
        return None
    for place, cells in enumerate(rows[:_MOST_TITLES]):
        if _is_header(cells, usual):
            below = list(filter(None, rows[place + 1 :]))
            num_other = sum(len(row) != usual for row in below)  # sums at the end, broken rows
            fits = num_other <= max(2, len(below) / 10) and num_other < len(below)
            return Header(cells, delimiter, place + 1) if place and fits else None
        if 2 * sum(map(bool, cells)) > usual:  # a row, or a header that lacks a name
            return None
    return None


def _is_header(cells: Sequence[str], usual: int) -> bool:
    """Whether cells are as many names as most rows have cells."""
    is_full = len(cells) == usual and all(cells) and len(set(cells)) == usual
    return is_full and not any(map(_VALUE.fullmatch, cells))


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return [cell.strip() for cell in parse(line, delimiter, '"')] if line.strip() else []
    except csv.Error:
        return []
