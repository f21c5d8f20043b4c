"""Files of query logs: JSONL, plain, gzip or zstd, by suffix.

Records are read in time order without holding the file. A recorder writes a request when it is
answered, not when it came; so in a file a record may stand up to `REORDER` places after its time,
and reading restores the order. A file whose records are later than that is rejected.
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
MAX_NAMED = 10  # bad lines whose reasons are kept

BadLines = Literal["fail", "skip"]

_JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")


class QueryLog:
    """The records of a file in time order (of equal times: file order).

    Every `iter` reads the file anew.

    Args:
        path: .jsonl, .jsonl.gz or .jsonl.zst.
        bad_lines: what to do at a line that is no record, or at an end that is missing. "fail"
            stops the reading with a DataError; "skip" counts it in `num_bad` and keeps the first
            `MAX_NAMED` reasons in `bad`.

    Records of users who were erased since are left out, and counted in `num_erased`.

    Iterating raises DataError: names the file, the line and the reason.
    """

    def __init__(self, path: Path, bad_lines: BadLines = "fail") -> None:
        if not path.name.endswith(_JSONL):
            raise DataError(
                f"{path}: expected a name in {', '.join(_JSONL)}; convert sql makes "
                "logs of other files"
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
        """Leave out the users who were erased since: the list beside the file says who."""
        listed = erased.read(self.path.parent)
        for number, record in numbered:
            if listed.hides(UserKey(record.tenant, record.user_id), record.ts):
                self.num_erased += 1
            else:
                yield number, record

    def _set_read_ratio(self, ratio: float) -> None:
        self.read_ratio = ratio

    def _reject(self, number: int, reason: object) -> None:
        """Line `number`, counted from 1, is no record."""
        message = f"{self.path}, line {number}: {reason}"
        if self._bad_lines == "fail":
            raise DataError(message)
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
    """The records of a log in time order; `QueryLog` has the contract."""
    return iter(QueryLog(path, bad_lines))


def in_time_order(name: str, numbered: Iterable[tuple[int, QueryRecord]]) -> Iterator[QueryRecord]:
    """Put records into the order of their times; of equal times, of their numbers.

    Args:
        name: what the numbers count, for the message.
        numbered: records of which none stands over `REORDER` places after its time.

    Raises:
        DataError: one does.
    """
    waiting: list[tuple[float, int, QueryRecord]] = []  # by time, then place in the file
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
    """Write a log and return the number of its records. Never holds them all.

    Raises:
        DataError: the file cannot be written; what stood at `path` before still does.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
    """Open a new file that compresses what is written into it as `suffix` says: .gz, .zst, or not at all.

    Only its owner may read it. What stood there before is deleted.
    """
    make_private(path)
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "wb", compresslevel=3))
    if suffix == ".zst":
        opened: IO[bytes] = zstandard(path).open(path, "wb")
        return opened
    return path.open("wb")


# ---- the recorder's files, one after the other: `<name>.part` is being written

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
            self._path = (
                self._folder / f"traffic-{stamp}-{os.getpid()}-{self._num:04}{self._suffix}{PART}"
            )
            self._began_at = time.monotonic()
            self._open = create(self._path, Path(self._suffix).suffix)
        self._open.write(line)
        # counted before compression, so a compressed file is well below
        if self._open.tell() >= self._max_bytes:
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
        """Go on with a new file, because the disk rejected this one.

        What reached the disk stays there.
        """
        with contextlib.suppress(OSError):
            self.close()
        self._open = None


def name_leftovers(folder: Path) -> None:
    """Give their final names to the files of a process that died: they can be read, up to an end that is missing."""
    for left in folder.glob(f"traffic-*{PART}"):
        left.rename(left.with_suffix(""))
