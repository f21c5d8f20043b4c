"""The lines of a file, plain or compressed (`.gz`, `.zst`)."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from npu_gr.core.errors import DataError

_CHUNK_BYTES = 1 << 20


def read_lines(path: Path) -> list[bytes]:
    """Every line, without its end.

    Raises:
        DataError: the file cannot be opened, is damaged or was cut short; the message names it.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        elif path.suffix == ".zst":
            data = _unzstd(path, data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {error}") from error
    return data.splitlines()


def _unzstd(path: Path, data: bytes) -> bytes:
    """Decompress every frame. The library's own reader stops silently at a frame that is cut short; this one raises."""
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{path}: zstd needs pip install 'npu_gr[zstd]'") from error
    unpacked = []
    frame = None
    for start in range(0, len(data), _CHUNK_BYTES):
        packed = data[start : start + _CHUNK_BYTES]
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                unpacked.append(frame.decompress(packed))
            except zstandard.ZstdError as error:
                raise DataError(f"{path}: {error}") from error
            packed = frame.unused_data
            if frame.eof:
                frame = None
    if frame:
        raise EOFError("the file ends inside a zstd frame")
    return b"".join(unpacked)
