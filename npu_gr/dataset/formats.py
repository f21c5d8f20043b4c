"""The files of a log, and the format of each by its name; text files by their first lines."""

from __future__ import annotations

from glob import glob, has_magic
from itertools import chain, islice
from pathlib import Path

from npu_gr.core.errors import DataError
from npu_gr.dataset.encodings import UNPACKED
from npu_gr.dataset.header import DELIMITERS
from npu_gr.dataset.lines import PACKED, read_lines

FORMATS = ("csv", "tsv", "parquet", "jsonl", "json", "atomic", "feather", "orc", "sqlite", "lists")
OF_SUFFIX = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".feather": "feather",
    ".arrow": "feather",
    ".orc": "orc",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".inter": "atomic",
    ".item": "atomic",
    ".user": "atomic",
    ".sqlite": "sqlite",
    ".sqlite3": "sqlite",
    ".db": "sqlite",
    ".txt": "text",
    ".dat": "text",
}
_TEXT_LINES = 1000  # of which the format of a text file is seen
_MOST_CELLS = 4  # of an event that is written with blanks: user, item, rating, time


def paths_of(log: Path, kind: str) -> list[Path]:
    """List the files of a path, a folder or a pattern, sorted by name.

    Hidden files and files that begin with "_" (Spark's markers) are skipped in a folder.
    """
    if log.is_file():
        return [log]
    if log.is_dir():
        inside = (path for path in sorted(log.rglob("*")) if path.is_file())
        inside = (
            path
            for path in inside
            if not any(part[0] in "._" for part in path.relative_to(log).parts)
        )
        if not (paths := [path for path in inside if kind or suffix_of(path) in OF_SUFFIX]):
            raise DataError(f"{log}: no log in the folder; known suffixes: {' '.join(OF_SUFFIX)}")
        return paths
    if not has_magic(str(log)) or not (
        paths := sorted(filter(Path.is_file, map(Path, glob(str(log), recursive=True))))
    ):
        raise DataError(f"{log}: no such file")
    return paths


def suffix_of(path: Path) -> str:
    """Return the last suffix of a path without those of packed files, in lower case."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in (*PACKED, *UNPACKED)]
    return suffixes[-1].lower() if suffixes else ""


def format_of(path: Path) -> str:
    """Return the format of a file by its suffix, one of `FORMATS`.

    Raises:
        DataError: the suffix is unknown; the message has the option or the command that helps.
    """
    found = OF_SUFFIX.get(suffix := suffix_of(path))
    if suffix in (".xlsx", ".xls"):
        raise DataError(
            f'{path}: a workbook; save the sheet as CSV, or: python -c "import pandas; '
            f"pandas.read_excel('{path}', dtype=str).to_csv('{path.stem}.csv', index=False)\""
        )
    if found == "text":
        return _text_format(path)
    if found is None:
        raise DataError(
            f"{path}: unknown suffix; name the format: --format {'|'.join(FORMATS)} "
            f"(known suffixes: {' '.join(OF_SUFFIX)}, each also with "
            f"{' '.join((*PACKED, *UNPACKED))})"
        )
    return found


def _text_format(path: Path) -> str:
    """Tell delimited cells from lines of `user item item ...`.

    Raises:
        DataError: they are neither.
    """
    lines = [line.decode(errors="replace") for line in _first_lines(path)]
    if not lines:
        raise DataError(f"{path}: the file is empty")
    if "::" in lines[0]:
        raise DataError(
            f"{path}: cells separated by '::'; write them with tabs: sed 's/::/\\t/g' {path} > "
            f"{path.stem}.tsv, and name the columns with --columns a,b,..."
        )
    if any(mark in lines[0] for mark in DELIMITERS):
        return "csv"
    cells = [line.split() for line in lines]
    is_long = len({len(row) for row in cells}) > 1 or len(cells[0]) > _MOST_CELLS
    if is_long and len({row[0] for row in cells}) == len(cells):
        return "lists"
    raise DataError(
        f"{path}: cells separated by blanks; if each line is a user and the items, oldest first, "
        f"give --format lists; else write them with tabs: tr ' ' '\\t' < {path} > "
        f"{path.stem}.tsv, and name the columns with --columns a,b,..."
    )


def _first_lines(path: Path) -> list[bytes]:
    lines = chain.from_iterable(read_lines(path))
    return [line for line in islice(lines, _TEXT_LINES) if line.strip()]
