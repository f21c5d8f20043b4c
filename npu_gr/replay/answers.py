"""What a run was answered, request by request, so that two runs can be compared item by item.

`answers.jsonl.gz`: one line a rank or generate, in the order of the answers; scores as raw float32 in base64.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.errors import DataError
from npu_gr.replay.log import SCORED, Log
from npu_gr.replay.player import Sample

FLUSH = 500  # lines

Scores = Mapping[str, Sequence[float | None]] | Mapping[str, npt.NDArray[np.float32]]


class AnswerLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request's answer."""

    number: int  # of its record in the log's time order
    kind: str
    due_at: float
    latency_ms: float
    error: str = ""
    outcome: str = ""
    model_version: str = ""
    digest: str = ""
    scores: dict[str, bytes] = {}  # task -> raw float32; NaN = unknown item
    items: list[int] = []  # of a generate


def digest(scores: Scores, items: Sequence[int] | npt.NDArray[np.int64] = ()) -> str:
    """16 hex digits (xxh3-64) over items (int64) and scores (float32, tasks by name): equal only for equal answers."""
    state = xxhash.xxh3_64(np.asarray(items, "<i8").tobytes())
    for task in sorted(scores):
        state.update(f"{task}\0{len(scores[task])}\0".encode())
        state.update(raw(scores[task]))
    return state.hexdigest()


def raw(values: Sequence[float | None] | npt.NDArray[np.float32]) -> bytes:
    """Little-endian float32; every NaN and null the same bytes."""
    row = np.array(values, "<f4")
    row[np.isnan(row)] = np.nan
    return row.tobytes()


def line(sample: Sample, keep_scores: bool) -> AnswerLine:
    """The line of a rank's or generate's sample."""
    answer = sample.answer
    common = {
        "number": sample.number,
        "kind": sample.record.kind,
        "due_s": round(sample.due_at, 6),
        "latency_ms": round(sample.latency_s * 1e3, 4),
    }
    if answer is None:
        return AnswerLine(**common, error=sample.error)  # type: ignore[arg-type]
    items = answer.get("items", [])
    return AnswerLine(
        **common,  # type: ignore[arg-type]
        outcome=answer["outcome"],
        model_version=answer.get("model_version", ""),
        digest=digest(answer["scores"], items),
        scores={task: raw(values) for task, values in answer["scores"].items()} if keep_scores else {},
        items=items,
    )


class AnswerFile:
    """Writes answers without making the player wait: `async with`, then `add` on the event loop."""

    def __init__(self, path: Path, keep_scores: bool) -> None:
        self._path, self._keep_scores = path, keep_scores
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

    def add(self, sample: Sample) -> None:
        """A request is over; of those with scores a line is kept."""
        if sample.record.kind in SCORED:
            self._lines.append(line(sample, self._keep_scores))
            if len(self._lines) >= FLUSH:
                self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        self._thread.submit(self._write, lines)

    def _write(self, lines: list[AnswerLine]) -> None:
        self._file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in lines))


def read_answers(path: Path) -> Iterator[AnswerLine]:
    """The answers of a run's file, or those that a recorded log carries.

    Raises:
        DataError: names the file, the line and the reason.
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
    first_s = None
    for number, record in enumerate(Log(path)):
        first_s = record.ts if first_s is None else first_s
        if (answer := record.answer) is None or record.kind not in SCORED:
            continue
        yield AnswerLine(
            number=number,
            kind=record.kind,
            due_at=record.ts - first_s,
            latency_ms=answer.latency_ms or 0.0,
            error="" if answer.status < 300 else str(answer.status),
            outcome=answer.outcome,
            model_version=answer.model_version,
            digest=answer.digest,
            scores=answer.scores,
        )
