"""Open a log, or a file of items, by its name or by what it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from npu_gr.core.errors import DataError
from npu_gr.dataset.delimited import DelimitedSource
from npu_gr.dataset.json_rows import JsonLinesSource, open_json
from npu_gr.dataset.source import Source
from npu_gr.dataset.tables import ArrowStream, FrameSource, ParquetSource

FORMATS = ("csv", "tsv", "parquet", "jsonl", "json", "atomic")
_OF_SUFFIX = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".inter": "atomic",
    ".item": "atomic",
    ".user": "atomic",
}
_PACKED = (".gz", ".zst", ".bz2")


def open_source(log: Path | str | ArrowStream, format: str = "", columns: Sequence[str] = ()) -> Source:  # noqa: A002
    """Open what holds rows.

    Args:
        log: a path, or a frame.
        format: one of `FORMATS`; "" = as the suffix of the path says.
        columns: names of the columns of a file without a header.

    Raises:
        DataError: there is no such file, its format is unknown, or its beginning is broken.
    """
    if not isinstance(log, Path | str):
        if not isinstance(log, ArrowStream):
            raise DataError(f"a {type(log).__name__} is no log: give a path, or a frame with __arrow_c_stream__")
        return FrameSource(log)
    path = Path(log)
    if not path.is_file():
        raise DataError(f"{path}: {'a folder; give a file' if path.is_dir() else 'no such file'}")
    kind = format or _format(path)
    if columns and kind not in ("csv", "tsv"):
        raise DataError(f"--columns: {path} names its columns itself; it is only for CSV and TSV without a header")
    if kind == "parquet":
        return ParquetSource(path)
    if kind == "jsonl":
        return JsonLinesSource(path)
    if kind == "json":
        return open_json(path)
    return DelimitedSource(path, "" if kind == "csv" else "\t", columns)


def _format(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix not in _PACKED]
    found = _OF_SUFFIX.get(suffixes[-1].lower() if suffixes else "")
    if found is None:
        raise DataError(
            f"{path}: the suffix says no format; name it: --format {'|'.join(FORMATS)} "
            f"(known suffixes: {' '.join(_OF_SUFFIX)}, each also with {' '.join(_PACKED)})"
        )
    return found
