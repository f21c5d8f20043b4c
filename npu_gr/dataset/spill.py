"""Rows on disk, parted by user, so that a log larger than memory can be sorted: by user, then time, then file order.

A part of more than `MAX_ROWS` rows is parted again, and so on. Only a single user with more rows than that is sorted
in as much memory as it needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from npu_gr.core.private import make_private

NUM_PARTS = 64
MAX_ROWS = 1 << 20  # of a part that is sorted at once: 32 MiB, and three times that while it is sorted
ROW = np.dtype([("user", "<i4"), ("action", "<i4"), ("item", "<i8"), ("time_us", "<i8"), ("value", "<f8")])
Rows = npt.NDArray[Any]
"""Of dtype `row_dtype`."""


def row_dtype(features: Sequence[str] = ()) -> np.dtype[Any]:
    """Make the dtype of rows: ROW, then the features of the log in the fields f0, f1, ...

    Args:
        features: dtype of each.
    """
    return np.dtype([*ROW.descr, *((f"f{place}", dtype) for place, dtype in enumerate(features))])


class Spill:
    """Files of rows: user u stands in file (u // divisor) % NUM_PARTS."""

    def __init__(self, folder: Path, divisor: int = 1, dtype: np.dtype[Any] = ROW) -> None:
        """Make the files, which only their owner may read.

        Args:
            folder: made; deleted when everything has been read.
            divisor: NUM_PARTS to the power of the parts that this one is a part of.
            dtype: of the rows.
        """
        folder.mkdir(mode=0o700)
        self._folder = folder
        self._divisor = divisor
        self._dtype = dtype
        self._paths = [folder / str(part) for part in range(NUM_PARTS)]
        self._files = ExitStack()
        for path in self._paths:
            make_private(path)
        self._open = [self._files.enter_context(path.open("ab", buffering=0)) for path in self._paths]

    def add(self, rows: Rows) -> None:
        """Append rows; of one user, in file order.

        Raises:
            OSError: they cannot be written.
        """
        parts = rows["user"] // self._divisor % NUM_PARTS
        order = np.argsort(parts, kind="stable")
        rows = rows[order]
        ends = np.searchsorted(parts[order], np.arange(NUM_PARTS + 1))
        for part, file in enumerate(self._open):
            if chunk := rows[ends[part] : ends[part + 1]].tobytes():
                _write_all(file.fileno(), chunk)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def parts(self) -> Iterator[Rows]:
        """Read all rows, a part at a time, each sorted by user, time and file order; the files are deleted."""
        self.close()
        for part, path in enumerate(self._paths):
            num_rows = path.stat().st_size // self._dtype.itemsize
            if num_rows > MAX_ROWS and (finer := self._finer(path, self._folder / f"{part}.parts")) is not None:
                path.unlink()
                yield from finer.parts()
                continue
            whole = np.fromfile(path, self._dtype)
            path.unlink()
            if len(whole):
                yield whole[np.lexsort((whole["time_us"], whole["user"]))]
        self._folder.rmdir()

    def _finer(self, path: Path, folder: Path) -> Spill | None:
        """Part a file again; None if it holds one user only."""
        rows = np.memmap(path, self._dtype, "r")
        first = int(rows["user"][0])
        if all((rows["user"][at : at + MAX_ROWS] == first).all() for at in range(0, len(rows), MAX_ROWS)):
            return None
        finer = Spill(folder, self._divisor * NUM_PARTS, self._dtype)
        for at in range(0, len(rows), MAX_ROWS):
            finer.add(np.array(rows[at : at + MAX_ROWS]))
        return finer


def _write_all(descriptor: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
