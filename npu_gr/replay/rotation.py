"""The recorder's files, one after the other.

A file begins when there is something to write, and ends at its size, its age or the end of the recording. A file
`<name>.part` is being written; a file without that ending is complete.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import IO

from npu_gr.replay.files import create

PATTERN = "traffic-*.jsonl*"  # our files in a folder, `.part` included
PART = ".part"  # of a file that is being written


class RotatingFile:
    """The file of one folder that is being written. One thread uses it.

    Args:
        folder: it exists.
        suffix: .jsonl, .jsonl.gz or .jsonl.zst.
        max_bytes: a file that holds so many, before compression, ends.
        max_s: a file that is so old ends at the next `flush`.
    """

    def __init__(self, folder: Path, suffix: str, max_bytes: int, max_s: float) -> None:
        self._folder = folder
        self._suffix = suffix
        self._max_bytes = max_bytes
        self._max_s = max_s
        self._open: IO[bytes] | None = None
        self._path = folder
        self._began_at = 0.0  # of time.monotonic()
        self._num = 0  # files begun

    def write(self, line: bytes) -> None:
        """Append, to a new file if none is open."""
        if self._open is None:
            self._num += 1
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            self._path = self._folder / f"traffic-{stamp}-{os.getpid()}-{self._num:04}{self._suffix}{PART}"
            self._began_at = time.monotonic()
            self._open = create(self._path, Path(self._suffix).suffix)
        self._open.write(line)
        if self._open.tell() >= self._max_bytes:  # counted before compression, so a compressed file is well below
            self.close()

    def flush(self, is_over: bool) -> None:
        """Hand everything to the operating system, so that a crash of this process now would lose none of it.

        Args:
            is_over: the recording has ended, so the file ends too.
        """
        if self._open is None:
            return
        if is_over or time.monotonic() - self._began_at >= self._max_s:
            self.close()
        else:
            self._open.flush()

    def close(self) -> None:
        """Complete the file and give it its final name."""
        if self._open is not None:
            self._open.close()
            self._open = None
            self._path.rename(self._path.with_suffix(""))

    def abandon(self) -> None:
        """Go on with a new file, because the disk refused this one. What reached the disk stays there."""
        with contextlib.suppress(OSError):
            self.close()
        self._open = None


def name_leftovers(folder: Path) -> None:
    """Give their final names to the files of a process that died: they can be read, up to an end that is missing."""
    for left in folder.glob(f"traffic-*{PART}"):
        left.rename(left.with_suffix(""))
