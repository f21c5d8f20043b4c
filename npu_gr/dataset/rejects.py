"""Rejected rows: counted by reason, and the first ones written to rejected.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import StrEnum
from typing import IO, NamedTuple

from npu_gr.core.names import MAX_NAME_BYTES

MAX_WRITTEN = 10_000  # rows in the file; the counts include all
MAX_ROW_CHARS = 500  # of a row in the file
MAX_USER_CHARS = 128  # the limit of a user id on the wire
MAX_EVENT_CHARS = 64


class RejectReason(StrEnum):
    """Why a row cannot be used; in the manifest, the summary and rejected.jsonl."""

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
    SAME_ID = "item: another name with the id of an earlier item"


CODES = {reason: code for code, reason in enumerate(RejectReason, 1)}
"""Reasons as integers in DuckDB; 0: the row can be used."""
SKIPPED, UNSURE = -1, -2  # codes of a line that is no row, and of one that Python must parse
LEFT_OUT = -3  # code of a row that the conditions of `row_filter` leave out
SHOWN = -4  # code of a row that `--positive` does not meet: its item was shown alone
_REASONS = list(RejectReason)


class RejectedRow(NamedTuple):
    """A row that cannot be used."""

    file: str
    number: int  # of its line or row in the file, from 1
    reason: int  # one of CODES
    text: str


class Rejects:
    """Counts the rejected rows of one source, and writes the first ones to a file."""

    def __init__(self, file: IO[str], place: str) -> None:
        """Begin with no rows.

        Args:
            file: Output; several sources may share it.
            place: What a row number counts: "line" or "row".
        """
        self._file = file
        self._place = place
        self._found: dict[RejectReason, tuple[int, int]] = {}

    def take(self, counts: Iterable[tuple[int, int, int]], rows: Iterable[RejectedRow]) -> None:
        """Record the rejected rows; called once.

        Args:
            counts: (code of the reason, number of rows, number of the first row) per reason.
            rows: The first rejected rows, at most `MAX_WRITTEN`.
        """
        found = {_REASONS[code - 1]: (count, first) for code, count, first in counts}
        self._found = dict(sorted(found.items(), key=lambda one: -one[1][0]))
        for row in rows:
            reason = _REASONS[row.reason - 1].value
            record = {
                "file": row.file,
                self._place: row.number,
                "reason": reason,
                "text": row.text[:MAX_ROW_CHARS],
            }
            self._file.write(json.dumps(record) + "\n")

    @property
    def total(self) -> int:
        """Number of rejected rows."""
        return sum(count for count, _ in self._found.values())

    def words(self) -> str:
        """Name the reasons, most frequent first, each with its first row."""
        return "; ".join(
            f"{count:,} x {reason} (first: {self._place} {first:,})"
            for reason, (count, first) in self._found.items()
        )

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return counts and first rows by reason, most frequent first, for the manifest."""
        return {
            reason.value: {"rows": count, "first": first}
            for reason, (count, first) in self._found.items()
        }
