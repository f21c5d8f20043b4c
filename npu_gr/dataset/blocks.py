"""Text files in blocks of whole lines, unpacked as their suffix says; memory does not grow with the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from npu_gr.core.errors import DataError
from npu_gr.core.words import counted
from npu_gr.dataset.arrow import pa
from npu_gr.dataset.source import OnProgress

BLOCK_BYTES = 4 << 20
MAX_ROW_BYTES = 1 << 20  # of a row whose cells have newlines; a quote that is open for longer is a stray one
MAX_ROW_LINES = 100  # over which the cells of a row may go
MAX_LINE_BYTES = 64 << 20
_PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class Block(NamedTuple):
    """Whole lines of a file."""

    first: int  # number of the first line, counted from 1
    data: bytes  # ends with a newline, but for the last line of a file


class Lines:
    """The lines of a block, parted when the first one is asked for."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._lines: list[bytes] | None = None

    def all(self) -> list[bytes]:
        """List them, without their newlines; an empty one stands after the last newline."""
        if self._lines is None:
            self._lines = self._block.data.split(b"\n")
        return self._lines

    def text(self, number: int) -> str:
        """Return a line by its number in the file, for a person."""
        return self.all()[number - self._block.first].decode(errors="replace").rstrip("\r")


def read_chunks(path: Path, on_progress: OnProgress) -> Iterator[bytes]:
    """Read a file from its beginning, unpacked.

    Raises:
        DataError: it cannot be read, is damaged, was cut short, or is not UTF-8 by its first bytes.
    """
    packed = _PACKED.get(path.suffix)
    num_bytes = 0
    try:
        size = max(path.stat().st_size, 1)
        with pa.OSFile(str(path)) as raw:
            stream = pa.CompressedInputStream(raw, packed) if packed else raw
            is_first = True
            while chunk := stream.read(BLOCK_BYTES):
                if is_first and chunk.startswith(_UTF16_MARKS):
                    raise DataError(f"{path}: UTF-16, not UTF-8; iconv -f UTF-16 -t UTF-8 {path} > NEW converts it")
                yield chunk.removeprefix(_UTF8_MARK) if is_first else chunk
                is_first = False
                num_bytes += len(chunk)
                on_progress(raw.tell() / size)
    except OSError as error:
        if packed is None or error.strerror:
            raise DataError(f"{path}: {error.strerror or error}") from error
        raise DataError(
            f"{path}: damaged or cut short as a {packed} file, after {counted(num_bytes, 'byte')} unpacked: {error}"
        ) from error


def read_blocks(path: Path, on_progress: OnProgress, *, has_quotes: bool = False) -> Iterator[Block]:
    """Read a file's lines.

    Args:
        path: of the file; .gz, .zst and .bz2 are unpacked.
        on_progress: called after each block.
        has_quotes: a block does not end between two quotes, where that can be helped.

    Raises:
        DataError: as `read_chunks`; or a line is too long for a text log.
    """
    rest = b""
    first = 1
    for chunk in read_chunks(path, on_progress):
        data = rest + chunk
        cut = data.rfind(b"\n") + 1
        if has_quotes and cut:
            cut = _outside_quotes(data, cut) or (cut if len(data) > BLOCK_BYTES + MAX_ROW_BYTES else 0)
        if not cut and len(data) > MAX_LINE_BYTES:
            raise DataError(f"{path}, line {first}: over {MAX_LINE_BYTES >> 20} MiB, so this is no log of lines")
        rest = data[cut:]
        if cut:
            yield Block(first, data[:cut])
            first += data.count(b"\n", 0, cut)
    if rest:
        yield Block(first, rest)


def _outside_quotes(data: bytes, cut: int) -> int:
    """Find the last end of a line that no quote spans: `cut`, or a bounded way before it; 0 = there is none."""
    is_inside = data.count(b'"', 0, cut) % 2
    steps = 0
    while is_inside and cut and steps < MAX_ROW_LINES:
        start = data.rfind(b"\n", 0, data.rfind(b'"', 0, cut)) + 1
        is_inside ^= data.count(b'"', start, cut) % 2
        cut = start
        steps += 1
    return cut
