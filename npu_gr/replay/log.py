"""Query logs, format 1: one request a record, as JSONL (gzip or zstd by suffix) or Parquet.

A record says when (`ts`), who, what was asked (`kind` and its fields, named as in the HTTP bodies), how long the answer
might take, and what the answer was. Columns of integers are lists, or raw little-endian bytes in base64, as on the
wire: items, timestamps and candidates int64, actions int16.

Records are read in time order without being held: of files whose records are up to `REORDER` places late (a recorder
writes a request when it is answered, not when it came) the order is restored, others are refused.
"""

from __future__ import annotations

import gzip
import heapq
import zlib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Annotated, Any, Literal, cast

import msgspec
import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.core.request import I64, Events

REORDER = 4096  # records
NAMED = 10  # bad lines that a report names

_CHUNK_BYTES = 1 << 20
_JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")

Column = list[int] | bytes
Label = Annotated[int, msgspec.Meta(ge=0, le=1)] | None
Kind = Literal["rank", "signal", "generate", "match", "recommend", "events"]
SCORED: tuple[Kind, ...] = ("rank", "generate", "match", "recommend")  # kinds whose answers have scores
UNRANKED = "unranked"  # the outcome of a recommend whose rank failed
BadLines = Literal["fail", "skip"]


def column(values: Column, dtype: str = "<i8") -> Any:
    """A column as an array."""
    return np.frombuffer(values, dtype) if isinstance(values, bytes) else np.array(values, dtype)


def count(values: Column, width_bytes: int = 8) -> int:
    """Entries of a column. Raises ValueError where raw bytes hold no whole number of them."""
    if not isinstance(values, bytes):
        return len(values)
    if len(values) % width_bytes:
        raise ValueError(f"{len(values)} bytes are no whole number of {width_bytes}-byte integers")
    return len(values) // width_bytes


class LoggedHistory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Behaviours as columns, oldest first."""

    items: Column
    actions: Column
    timestamps: Column  # unix seconds

    def __post_init__(self) -> None:
        lengths = count(self.items), count(self.actions, 2), count(self.timestamps)
        if len(set(lengths)) > 1:
            raise ValueError("items, actions and timestamps have {}, {} and {} entries".format(*lengths))

    def __len__(self) -> int:
        return count(self.items)

    def events(self) -> Events:
        """As arrays."""
        return Events(column(self.items), column(self.actions, "<i2"), column(self.timestamps))

    @classmethod
    def of(cls, events: Events) -> LoggedHistory:
        """Raw columns of arrays."""
        raw = (events.items.astype("<i8"), events.actions.astype("<i2"), events.timestamps.astype("<i8"))
        items, actions, timestamps = (row.tobytes() for row in raw)
        return cls(items=items, actions=actions, timestamps=timestamps)


class LoggedGenerate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a generate asked for; absent fields are the service's own."""

    num_items: int = 50
    beam_width: int | None = None
    normalise: Literal["vocabulary", "codebook", "valid"] = "vocabulary"
    temperature: float = 1.0
    allow_items: Column | None = None
    deny_items: Column | None = None
    attributes: dict[str, list[bool | int | float | str]] = {}


class LoggedMatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a match asked for."""

    num_items: int = 50
    exclude_seen: bool = True
    allow_items: Column | None = None
    deny_items: Column | None = None


class LoggedRecommend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a recommend asked for; absent fields are the service's own."""

    num_items: int = 10
    num_candidates: int | None = None
    exclude_seen: bool | None = None
    deny_items: Column | None = None
    context: dict[str, bool | int | float | str] = {}


class LoggedAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the service answered when the log was made."""

    status: int = 200
    latency_ms: float | None = None  # in the service
    outcome: str = ""  # of a match: its basis
    model_version: str = ""  # of a match: its vectors'
    fingerprint: str = ""  # of the history; what a later delta names as its base
    digest: str = ""  # of the scores, or of the generated items: `answers.digest`
    scores: dict[str, bytes] = {}  # task -> raw float32 a candidate, NaN = unknown item; where values were kept


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One logged request. A rank may carry what the user did with its candidates."""

    ts: float  # seconds, epoch or relative: when the request came
    kind: Kind
    user_id: str
    tenant: str = ""
    history: LoggedHistory | None = None  # absent: the service's history store has it
    base: str | None = None  # then `history` continues the prefix of this fingerprint
    candidates: Column = []
    num_candidates: int | None = None  # of a signal: how many its rank will bring
    timestamp: int | None = None  # unix seconds the candidates were shown at
    top_k: int | None = None
    deadline_ms: float | None = None
    delay_ms: float | None = None  # of a rank: `ts` is the user's arrival, retrieval and pre-processing took this long
    generate: LoggedGenerate | None = None
    match: LoggedMatch | None = None
    recommend: LoggedRecommend | None = None
    labels: dict[str, list[Label]] = {}  # task -> one of 0, 1, null (not known) a candidate
    events: LoggedHistory | None = None  # of kind "events"
    answer: LoggedAnswer | None = None

    def __post_init__(self) -> None:
        num = count(self.candidates)
        if self.ts != self.ts or abs(self.ts) == float("inf"):
            raise ValueError(f"ts: {self.ts} is no time")
        if self.kind == "rank" and not num:
            raise ValueError("candidates: a rank needs at least one")
        if self.kind == "events" and self.events is None:
            raise ValueError("events: missing")
        for name in ("deadline_ms", "delay_ms"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 3.6e6:
                raise ValueError(f"{name}: {value} is not in 0 .. 3,600,000")
        for task, labels in self.labels.items():
            if len(labels) != num:
                raise ValueError(f"labels.{task}: {len(labels)} for {num} candidates")

    def candidate_ids(self) -> I64:
        """[c] external item ids."""
        ids: I64 = column(self.candidates)
        return ids


class Log:
    """The records of a file in time order (of equal times: file order); every `iter` reads it anew.

    Args:
        path: .jsonl, .jsonl.gz, .jsonl.zst or .parquet.
        bad_lines: what a line that is no record, or an end that is missing, does: stop the reading with a DataError,
            or be counted in `num_bad`, with the first `NAMED` reasons in `bad`.

    Iterating raises DataError: names the file, the line and the reason.
    """

    def __init__(self, path: Path, bad_lines: BadLines = "fail") -> None:
        if path.suffix != ".parquet" and not path.name.endswith(_JSONL):
            raise DataError(f"{path}: expected a name in .jsonl, .jsonl.gz, .jsonl.zst or .parquet")
        self.path, self._bad_lines = path, bad_lines
        self.num_bad, self.bad = 0, list[str]()
        self.read_ratio = 0.0  # of the file's bytes; for progress bars

    def __iter__(self) -> Iterator[Record]:
        self.num_bad, self.bad, self.read_ratio = 0, [], 0.0
        if self.path.suffix == ".parquet":
            from npu_gr.replay.parquet import rows

            found = rows(self)
        else:
            found = self._parsed()
        return _in_time_order(self.path, found)

    def reject(self, number: int, reason: object) -> None:
        """Line `number`, counted from 1, is no record."""
        message = f"{self.path}, line {number}: {reason}"
        if self._bad_lines == "fail":
            raise DataError(message)
        self.num_bad += 1
        if len(self.bad) < NAMED:
            self.bad.append(message)

    def _parsed(self) -> Iterator[tuple[int, Record]]:
        decode = msgspec.json.Decoder(Record).decode
        number = 0
        try:
            for number, line in enumerate(_lines(self), 1):
                if not line.strip():
                    continue
                try:
                    record = decode(line)
                except (msgspec.MsgspecError, ValueError) as error:
                    self.reject(number, error)
                else:
                    yield number, record
        except (OSError, EOFError, zlib.error) as error:
            if not number and isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
                raise DataError(f"{self.path}: {error.strerror}") from error
            self.reject(number + 1, error)


def read(path: Path, bad_lines: BadLines = "fail") -> Iterator[Record]:
    """The records of a log in time order; see `Log`."""
    return iter(Log(path, bad_lines))


def _in_time_order(path: Path, numbered: Iterable[tuple[int, Record]]) -> Iterator[Record]:
    waiting: list[tuple[float, int, Record]] = []  # by time, then place in the file
    last_s = -float("inf")
    for number, record in numbered:
        if record.ts < last_s:
            raise DataError(
                f"{path}, line {number}: more than {REORDER} records out of time order; npu-gr replay convert sorts it"
            )
        heapq.heappush(waiting, (record.ts, number, record))
        if len(waiting) > REORDER:
            last_s, _, earliest = heapq.heappop(waiting)
            yield earliest
    while waiting:
        yield heapq.heappop(waiting)[2]


def write(path: Path, records: Iterable[Record]) -> int:
    """A log, whole or not at all, without holding it; how many records it has."""
    beside = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            from npu_gr.replay.parquet import write_rows

            num_records = write_rows(beside, records)
        else:
            num_records = 0
            encode = msgspec.json.Encoder().encode
            with create(beside, path.suffix) as file:
                for num_records, record in enumerate(records, 1):  # noqa: B007  (it is what is returned)
                    file.write(encode(record) + b"\n")
        beside.replace(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)
    return num_records


def create(path: Path, suffix: str) -> IO[bytes]:
    """A new file that packs what is written into it as `suffix` says."""
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "wb", compresslevel=3))
    if suffix == ".zst":
        opened: IO[bytes] = _zstandard(path).open(path, "wb")
        return opened
    return path.open("wb")


def _lines(log: Log) -> Iterator[bytes]:
    """Lines without their ends; the last may have none."""
    size = max(log.path.stat().st_size, 1)
    with log.path.open("rb") as file:
        rest = b""
        for chunk in _unpacked(file, log.path):
            log.read_ratio = file.tell() / size
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
        if rest:
            yield rest


def _unpacked(file: IO[bytes], path: Path) -> Iterator[bytes]:
    if path.suffix == ".zst":
        yield from _unzstd(file, _zstandard(path))
        return
    source: Any = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    while chunk := source.read1(_CHUNK_BYTES):
        yield chunk


def _zstandard(path: Path) -> Any:
    try:
        return import_module("zstandard")
    except ImportError as error:
        raise DataError(f"{path}: zstd needs pip install 'npu_gr[zstd]'") from error


def _unzstd(file: IO[bytes], zstandard: Any) -> Iterator[bytes]:
    """Every frame of the file. The library's own reader stops silently where a frame is cut short."""
    frame = None
    while packed := file.read(_CHUNK_BYTES):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            packed = frame.unused_data
            if frame.eof:
                frame = None
    if frame:
        raise EOFError("the file ends inside a zstd frame")
