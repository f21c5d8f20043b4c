"""Rows that cannot be used: counted by reason, the first of them written to a file for whoever mends the export."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import IO

from npu_gr.core.names import MAX_NAME_BYTES

MAX_WRITTEN = 10_000  # rows in the file; all are counted
MAX_ROW_CHARS = 500  # of a row in the file
MAX_USER_CHARS = 128  # the limit of a user id on the wire
MAX_EVENT_CHARS = 64


class RejectReason(StrEnum):
    """Why a row cannot be used; in the manifest, the table and the file."""

    CELLS = "wrong number of cells"
    QUOTE = "a quote is not closed"
    NOT_UTF8 = "not UTF-8"
    NOT_JSON = "not a JSON object"
    NO_USER = "no user"
    NO_ITEM = "no item"
    NO_TIME = "no time"
    NO_EVENT = "no event"
    NO_VALUE = "no value"
    LONG_USER = f"user: over {MAX_USER_CHARS} characters"
    LONG_ITEM = f"item: over {MAX_NAME_BYTES} bytes"
    LONG_EVENT = f"event: over {MAX_EVENT_CHARS} characters"
    ROUNDED = "a name that a tool took for a number and rounded, as 1.2E+12"
    UNREADABLE_TIME = "time: unreadable"
    OTHER_UNIT = "time: another unit than most rows"
    EARLY = "time: before 1970, or 0"
    LATE = "time: after 2099"
    NO_NUMBER = "value: not a number"


CODES = {reason: code for code, reason in enumerate(RejectReason, 1)}
"""A reason in an array of int8; 0 = the row can be used."""

OnReject = Callable[[int, RejectReason, str], None]
"""Called with the line (or row) number of a row, counted from 1, the reason, and the row as text."""


class Rejects:
    """Counts the rows of one source that cannot be used, and writes the first of them to a file."""

    def __init__(self, file: IO[str], name: str, place: str) -> None:
        """Count nothing yet.

        Args:
            file: what to write to; several sources may share it.
            name: of the source.
            place: what its numbers count: "line" or "row".
        """
        self._file = file
        self._name = name
        self._place = place
        self.counts: Counter[RejectReason] = Counter()
        self.first: dict[RejectReason, int] = {}  # number of the first row with each reason

    def add(self, number: int, reason: RejectReason, row: str) -> None:
        """Count one row."""
        self.counts[reason] += 1
        self.first.setdefault(reason, number)
        if self.total <= MAX_WRITTEN:
            record = {"file": self._name, self._place: number, "reason": reason.value, "text": row[:MAX_ROW_CHARS]}
            self._file.write(json.dumps(record) + "\n")

    @property
    def total(self) -> int:
        """Rows that were rejected."""
        return self.counts.total()

    def words(self) -> str:
        """Name the reasons, most frequent first, each with its first row."""
        return "; ".join(
            f"{count:,} x {reason} (first: {self._place} {self.first[reason]:,})"
            for reason, count in self.counts.most_common()
        )

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts and first rows by reason, most frequent first, as the manifest has them."""
        return {
            reason.value: {"rows": count, "first": self.first[reason]} for reason, count in self.counts.most_common()
        }
