"""Query logs: JSONL, one request a line; gzip or zstd by suffix."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec

from npu_gr.errors import DataError

_CHUNK_BYTES = 1 << 20

Label = Annotated[int, msgspec.Meta(ge=0, le=1)] | None


class LoggedHistory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Behaviours as columns, oldest first."""

    items: list[int]
    actions: list[int]
    timestamps: list[int]

    def __post_init__(self) -> None:
        if not len(self.items) == len(self.actions) == len(self.timestamps):
            lengths = f"{len(self.items)}, {len(self.actions)} and {len(self.timestamps)}"
            raise ValueError(f"items, actions and timestamps have {lengths} entries")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One logged request. A rank may carry what the user did with its candidates."""

    ts: float  # seconds, epoch or relative
    kind: Literal["rank", "signal", "events"]
    user_id: str
    tenant: str = ""
    history: LoggedHistory | None = None  # absent: the service's history store has it
    candidates: list[int] = []
    timestamp: int | None = None  # unix seconds the candidates were shown at
    top_k: int | None = None
    deadline_ms: float | None = None
    labels: dict[str, list[Label]] = {}  # task -> one of 0, 1, null (not known) a candidate
    events: LoggedHistory | None = None  # of kind "events"

    def __post_init__(self) -> None:
        if self.kind == "rank" and not self.candidates:
            raise ValueError("candidates: a rank needs at least one")
        if self.kind == "events" and self.events is None:
            raise ValueError("events: missing")
        for task, labels in self.labels.items():
            if len(labels) != len(self.candidates):
                raise ValueError(f"labels.{task}: {len(labels)} for {len(self.candidates)} candidates")


def read(path: Path) -> list[Record]:
    """The whole log in time order (of equal times: file order).

    Raises:
        DataError: names the file, the line and the reason.
    """
    decoder = msgspec.json.Decoder(Record)
    records = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            records.append(decoder.decode(line))
        except (msgspec.MsgspecError, ValueError) as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    return sorted(records, key=lambda record: record.ts)


def write(path: Path, records: Iterable[Record]) -> None:
    """A log, whole or not at all."""
    encoder = msgspec.json.Encoder()
    data = b"".join(encoder.encode(record) + b"\n" for record in records)
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = _zstandard(path).ZstdCompressor().compress(data)
    beside = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _lines(path: Path) -> Iterator[bytes]:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        elif path.suffix == ".zst":
            data = b"".join(_unpack(io.BytesIO(data), _zstandard(path)))
        elif path.suffix != ".jsonl":
            raise DataError(f"{path}: expected a name in .jsonl, .jsonl.gz or .jsonl.zst")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: {error}") from error
    yield from data.splitlines()


def _zstandard(path: Path) -> Any:
    try:
        return import_module("zstandard")
    except ImportError as error:
        raise DataError(f"{path}: zstd needs pip install 'npu_gr[zstd]'") from error


def _unpack(file: IO[bytes], zstandard: Any) -> Iterator[bytes]:
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
