"""Read the lines of a file, plain or compressed (`.gz`, `.zst`)."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from npu_gr.core.errors import DataError

_CHUNK_BYTES = 1 << 20


def read_lines(path: Path) -> list[bytes]:
    """Read all lines, without line ends.

    Raises:
        DataError: the file cannot be opened, is damaged or truncated; the message names it.
    """
    try:
        return [line.removesuffix(b"\r") for line in raw_lines(path)]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {error}") from error


def raw_lines(
    path: Path,
    on_progress: Callable[[float], None] = lambda _ratio: None,
    suffix: str | None = None,
) -> Iterator[bytes]:
    """Iterate over the unpacked lines of a file, without line ends.

    Args:
        path: The file; compressed if its suffix is .gz or .zst.
        on_progress: Callback with the share of the bytes that was read.
        suffix: Suffix that overrides the file's.

    Raises:
        OSError, EOFError, zlib.error: the file is damaged or truncated, after the lines so far.
    """
    size = max(path.stat().st_size, 1)
    with path.open("rb") as file:
        rest = b""
        for chunk in _unpacked(file, path, path.suffix if suffix is None else suffix):
            on_progress(file.tell() / size)
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
        if rest:
            yield rest


def _unpacked(file: IO[bytes], path: Path, suffix: str) -> Iterator[bytes]:
    if suffix == ".zst":
        yield from _unzstd(file, zstandard(path))
        return
    source: Any = gzip.GzipFile(fileobj=file) if suffix == ".gz" else file
    while chunk := source.read1(_CHUNK_BYTES):
        yield chunk


def zstandard(path: Path) -> Any:
    """Import the library for `.zst`.

    Raises:
        DataError: it is not installed.
    """
    try:
        return import_module("zstandard")
    except ImportError as error:
        raise DataError(f"{path}: zstd needs pip install 'npu_gr[zstd]'") from error


def _unzstd(file: IO[bytes], library: Any) -> Iterator[bytes]:
    """Decompress all frames, since the library's reader ignores a truncated frame."""
    frame = None
    while packed := file.read(_CHUNK_BYTES):
        while packed:
            frame = frame or library.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(packed)
            except library.ZstdError as error:
                raise OSError(str(error)) from error
            packed = frame.unused_data
            if frame.eof:
                frame = None
    if frame:
        raise EOFError("the file ends inside a zstd frame")
