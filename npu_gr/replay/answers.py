"""Files of answers, which a comparison reads: one line a request, and nothing of its user."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import msgspec

from npu_gr.core.errors import DataError
from npu_gr.replay.files import QueryLog
from npu_gr.replay.log import SCORED

MAX_LINES = 500  # buffered before the thread writes them


class AnswerLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of one request, as a line of the file."""

    number: int  # of the record, in the log's time order
    kind: str
    # seconds after the run began; named `due_s` in the file
    due_at: float = msgspec.field(name="due_s")
    latency_ms: float
    error: str = ""
    outcome: str = ""
    model_version: str = ""
    digest: str = ""
    scores: dict[str, bytes] = {}  # task -> raw float32; NaN = unknown item
    items: list[int] = []  # returned items


class AnswerFile:
    """Writes answers in a thread, so that the player never waits. Use it with `async with`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[AnswerLine] = []
        self._thread = ThreadPoolExecutor(1, "answers")

    async def __aenter__(self) -> Self:
        try:
            self._file = await asyncio.to_thread(gzip.open, self._path, "wb", 1)
        except OSError as error:
            raise DataError(f"{self._path}: {error.strerror}") from error
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._flush()
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._file.close)

    def add(self, one: AnswerLine) -> None:
        """Add an answer. Event loop only."""
        self._lines.append(one)
        if len(self._lines) >= MAX_LINES:
            self._flush()

    def _flush(self) -> None:
        lines = self._lines
        self._lines = []
        self._thread.submit(self._write, lines)

    def _write(self, lines: list[AnswerLine]) -> None:
        self._file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in lines))


def read_answers(path: Path) -> Iterator[AnswerLine]:
    """Read the answers of a run's file, or those in a recorded log.

    Raises:
        DataError: a line is invalid; the message names the file, the line and the reason.
    """
    if not path.name.startswith("answers"):
        yield from _logged(path)
        return
    decode = msgspec.json.Decoder(AnswerLine).decode
    number = 0
    try:
        with gzip.open(path) as file:
            for text in file:
                yield decode(text)
                number += 1
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise DataError(f"{path}, line {number + 1}: {error}") from error


def _logged(path: Path) -> Iterator[AnswerLine]:
    first_ts = None
    for number, record in enumerate(QueryLog(path)):
        first_ts = record.ts if first_ts is None else first_ts
        if (answer := record.answer) is None or record.kind not in SCORED:
            continue
        yield AnswerLine(
            number=number,
            kind=record.kind,
            due_at=record.ts - first_ts,
            latency_ms=answer.latency_ms or 0.0,
            error="" if answer.status < 300 else str(answer.status),
            outcome=answer.outcome,
            model_version=answer.model_version,
            digest=answer.digest,
            scores=answer.scores,
        )
