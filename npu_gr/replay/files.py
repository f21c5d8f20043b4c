"""Files of query logs: JSONL, plain, gzip or zstd, by suffix.

Records are read in time order without loading the file. A recorder writes a request when it is
answered, not when it arrived; therefore a record may be up to `REORDER` lines late, and reading
restores the order. A file with later records is rejected.
"""

from __future__ import annotations

import contextlib
import gzip
import heapq
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal, cast

import msgspec

from npu_gr.core.errors import DataError
from npu_gr.core.file_permissions import make_private
from npu_gr.core.history import UserKey
from npu_gr.core.lines import raw_lines, zstandard
from npu_gr.replay import erased
from npu_gr.replay.log import QueryRecord

REORDER = 4096  # records
MAX_NAMED = 10  # bad lines with a stored reason

BadLines = Literal["fail", "skip"]

_JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")


class QueryLog:
    """The records of a file in time order, ties in file order.

    Every `iter` reads the file again.

    Args:
        path: File with the suffix .jsonl, .jsonl.gz or .jsonl.zst.
        bad_lines: How to treat an invalid line or a truncated file. "fail" raises DataError;
            "skip" counts it in `num_bad` and stores the first `MAX_NAMED` reasons in `bad`.

    Records of erased users are skipped, and counted in `num_erased`. A DataError names the file,
    the line and the reason.
    """

    def __init__(self, path: Path, bad_lines: BadLines = "fail") -> None:
        if not path.name.endswith(_JSONL):
            raise DataError(
                f"{path}: the suffix must be one of {', '.join(_JSONL)}; convert other files with "
                "npu-gr replay convert sql"
            )
        self.path = path
        self._bad_lines = bad_lines
        self.num_bad = 0
        self.num_erased = 0
        self.bad: list[str] = []
        self.read_ratio = 0.0  # of the file's bytes; for progress bars

    def __iter__(self) -> Iterator[QueryRecord]:
        self.num_bad = 0
        self.num_erased = 0
        self.bad = []
        self.read_ratio = 0.0
        return in_time_order(f"{self.path}, line", self._not_erased(self._parsed()))

    def _not_erased(
        self, numbered: Iterator[tuple[int, QueryRecord]]
    ) -> Iterator[tuple[int, QueryRecord]]:
        """Skip the users in the folder's list of erased users."""
        listed = erased.read(self.path.parent)
        for number, record in numbered:
            if listed.hides(UserKey(record.tenant, record.user_id), record.ts):
                self.num_erased += 1
            else:
                yield number, record

    def _set_read_ratio(self, ratio: float) -> None:
        self.read_ratio = ratio

    def _reject(self, number: int, reason: object) -> None:
        """Count or raise an invalid line; `number` is from 1."""
        message = f"{self.path}, line {number}: {reason}"
        if self._bad_lines == "fail":
            raise DataError(f"{message}; `npu-gr replay run --bad-lines skip` leaves it out")
        self.num_bad += 1
        if len(self.bad) < MAX_NAMED:
            self.bad.append(message)

    def _parsed(self) -> Iterator[tuple[int, QueryRecord]]:
        decode = msgspec.json.Decoder(QueryRecord).decode
        number = 0
        try:
            for number, line in enumerate(raw_lines(self.path, self._set_read_ratio), 1):
                if not line.strip():
                    continue
                try:
                    record = decode(line)
                except (msgspec.MsgspecError, ValueError) as error:
                    self._reject(number, error)
                else:
                    yield number, record
        except (OSError, EOFError, zlib.error) as error:
            if not number and isinstance(
                error, FileNotFoundError | PermissionError | IsADirectoryError
            ):
                raise DataError(f"{self.path}: {error.strerror}") from error
            self._reject(number + 1, error)


def read(path: Path, bad_lines: BadLines = "fail") -> Iterator[QueryRecord]:
    """Iterate over the records of a log; see `QueryLog`."""
    return iter(QueryLog(path, bad_lines))


def in_time_order(name: str, numbered: Iterable[tuple[int, QueryRecord]]) -> Iterator[QueryRecord]:
    """Sort records by time, ties by number.

    Args:
        name: What a number counts, for messages.
        numbered: (number, record) pairs, at most `REORDER` places late.

    Raises:
        DataError: a record is later than that.
    """
    waiting: list[tuple[float, int, QueryRecord]] = []  # a heap of (time, number, record)
    last_ts = -float("inf")
    for number, record in numbered:
        if record.ts < last_ts:
            raise DataError(
                f"{name} {number}: more than {REORDER} records out of time order; sort them by time"
            )
        heapq.heappush(waiting, (record.ts, number, record))
        if len(waiting) > REORDER:
            last_ts, _, earliest = heapq.heappop(waiting)
            yield earliest
    while waiting:
        yield heapq.heappop(waiting)[2]


def write(path: Path, records: Iterable[QueryRecord]) -> int:
    """Write a log, streaming, and return the number of its records.

    Raises:
        DataError: the file cannot be written; `path` is unchanged.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        num_records = 0
        encode = msgspec.json.Encoder().encode
        with create(temporary, path.suffix) as file:
            for num_records, record in enumerate(records, 1):  # noqa: B007  (returned below)
                file.write(encode(record) + b"\n")
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return num_records


def create(path: Path, suffix: str) -> IO[bytes]:
    """Create a file, compressed if `suffix` is .gz or .zst.

    Only its owner may read it. An existing file is replaced.
    """
    make_private(path)
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "wb", compresslevel=3))
    if suffix == ".zst":
        opened: IO[bytes] = zstandard(path).open(path, "wb")
        return opened
    return path.open("wb")


# ---- the recorder's files: `<name>.part` is the one being written

PATTERN = "traffic-*.jsonl*"  # our files, including `.part`
PART = ".part"  # suffix of the file being written


class RotatingFile:
    """The current file of a recording, which is rotated by size and age. Not thread-safe.

    Args:
        folder: Existing folder.
        suffix: .jsonl, .jsonl.gz or .jsonl.zst.
        max_bytes: Uncompressed size at which the next file begins.
        max_s: Age at which the next `flush` completes the file.
    """

    def __init__(self, folder: Path, suffix: str, max_bytes: int, max_s: float) -> None:
        self._folder = folder
        self._suffix = suffix
        self._max_bytes = max_bytes
        self._max_s = max_s
        self._open: IO[bytes] | None = None
        self._path = folder
        self._began_at = 0.0  # of time.monotonic()
        self._num = 0  # files so far

    def write(self, line: bytes) -> None:
        """Append a line, to a new file if none is open."""
        if self._open is None:
            self._num += 1
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            self._path = (
                self._folder / f"traffic-{stamp}-{os.getpid()}-{self._num:04}{self._suffix}{PART}"
            )
            self._began_at = time.monotonic()
            self._open = create(self._path, Path(self._suffix).suffix)
        self._open.write(line)
        # the size before compression, so a compressed file is much smaller
        if self._open.tell() >= self._max_bytes:
            self.close()

    def flush(self, is_over: bool) -> None:
        """Flush to the operating system, so that a crash of this process loses nothing.

        Args:
            is_over: Whether the recording has ended, which completes the file.
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
        """Continue with a new file after an I/O error."""
        with contextlib.suppress(OSError):
            self.close()
        self._open = None


def name_leftovers(folder: Path) -> None:
    """Rename the unfinished files of a process that died; they are readable up to the cut."""
    for left in folder.glob(f"traffic-*{PART}"):
        left.rename(left.with_suffix(""))
