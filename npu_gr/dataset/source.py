"""What every reader of a log gives: batches of rows, a column an array, with the place of each row in its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from npu_gr.core.arrays import I64
from npu_gr.dataset.rejects import OnReject

OnProgress = Callable[[float], None]
"""Called with the share of the source that was read, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBatch:
    """Some rows. n = number of rows."""

    numbers: I64  # [n] line or row of each, counted from 1
    columns: dict[str, Any]  # name -> plain pyarrow array [n] (arrow.py); missing cells are null
    text: Callable[[int], str]  # row i as its file has it, for a person


class Source(Protocol):
    """A log, or a file of items, that can be read from its beginning again and again."""

    name: str  # in messages: its path, or "the frame"
    format: str  # for a person: "CSV, cells separated by ','"
    place: str  # what `RowBatch.numbers` count: "line" or "row"
    types: dict[str, str]  # types of columns that the header declares, as atomic files do

    def sample(self) -> RowBatch:
        """Read the first rows, with all columns.

        Raises:
            DataError: it cannot be read, or has no row.
        """
        ...

    def batches(self, columns: Sequence[str], on_reject: OnReject, on_progress: OnProgress) -> Iterator[RowBatch]:
        """Read all rows, only some columns.

        Raises:
            DataError: it cannot be read to its end.
        """
        ...


def ignore_reject(number: int, reason: object, row: str) -> None:
    """Take a rejected row and do nothing: what reads a sample counts none."""


def ignore_progress(ratio: float) -> None:
    """Take a progress and do nothing."""
