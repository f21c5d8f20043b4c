"""Remove the records of erased users from recordings: `npu-gr record --purge FOLDER`, and a process beside an instance.

A file that holds such records is written anew beside itself, synced, and renamed over; until then it is whole. A line
that is no record is removed too, because nobody can tell whose it is. A file that is being written (`.part`) is not
touched: users who may be in it stay in the list of `erased.py`.
"""

from __future__ import annotations

import calendar
import fcntl
import os
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.history import UserKey
from npu_gr.core.private import open_private
from npu_gr.replay import erased
from npu_gr.replay.erased import ErasedUsers
from npu_gr.replay.files import create, raw_lines
from npu_gr.replay.rotation import PART, PATTERN

HELD = 3  # exit code: a file that is being written, or another purge, holds some
_BESIDE = ".purge-"
_LOCK = ".purge.lock"


class _Who(msgspec.Struct, frozen=True):
    """What of a record says whose it is; the rest is skipped."""

    ts: float
    user_id: str
    tenant: str = ""


class Purged(msgspec.Struct, frozen=True, kw_only=True):
    """What a purge has done."""

    num_files: int  # that were read
    num_rewritten: int
    num_removed: int  # records of erased users
    num_unreadable: int  # lines that are no records, removed too
    num_left: int  # names of erased users that a file may still hold
    failed: list[str]  # files that could not be written anew, each with its reason


def purge(folder: Path) -> Purged:
    """Remove the records of every user who is in the list now.

    Raises:
        ConfigError: another purge of the folder runs. DataError: the list cannot be read. OSError: nor the folder.
    """
    with _alone(folder):
        for left in folder.glob(f"{_BESIDE}*"):
            left.unlink()  # of a purge that was killed
        listed = erased.read(folder)
        written = [_began_at(path) for path in folder.glob(f"{PATTERN}{PART}")]  # first: one may be completed meanwhile
        newest_at = max(listed.until.values(), default=float("-inf"))
        num_files = num_rewritten = num_removed = num_unreadable = 0
        failed = []
        for path in sorted(folder.glob(PATTERN)):
            if path.name.endswith(PART) or _began_at(path) > newest_at:
                continue
            try:
                removed, unreadable = _purge_file(path, listed)
            except FileNotFoundError:  # too old: the recorder has deleted it
                continue
            except (OSError, DataError) as error:
                failed.append(f"{path.name}: {error}")
                continue
            num_files += 1
            num_rewritten += removed + unreadable > 0
            num_removed += removed
            num_unreadable += unreadable
        is_held_until = min(written, default=float("inf"))  # who was erased before it began is not in it
        done = {who: at for who, at in listed.until.items() if not failed and at < is_held_until}
        if done:
            erased.drop(folder, done)
    return Purged(
        num_files=num_files,
        num_rewritten=num_rewritten,
        num_removed=num_removed,
        num_unreadable=num_unreadable,
        num_left=len(listed.until) - len(done),
        failed=failed,
    )


def _purge_file(path: Path, listed: ErasedUsers) -> tuple[int, int]:
    """Write a file anew without what is erased; return how many records and lines that are none were removed."""
    removed = unreadable = kept = 0
    for _, verdict in _judged(path, listed):
        removed += verdict == "erased"
        unreadable += verdict == "unreadable"
        kept += verdict == "kept"
    if not removed + unreadable:
        return 0, 0
    beside = path.with_name(_BESIDE + path.name)
    try:
        if kept:
            with create(beside, path.suffix) as file:
                for line, verdict in _judged(path, listed):
                    if verdict == "kept":
                        file.write(line + b"\n")
            with beside.open("rb") as written:
                os.fsync(written.fileno())
            path.stat()  # the recorder may have deleted it meanwhile: then it stays deleted
            beside.replace(path)
        else:
            path.unlink()
        erased.sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)
    return removed, unreadable


def _judged(path: Path, listed: ErasedUsers) -> Iterator[tuple[bytes, str]]:
    """Each line, and whether it is kept, erased or unreadable. What follows a place that cannot be read is one line."""
    decode = msgspec.json.Decoder(_Who).decode
    try:
        for line in raw_lines(path):
            if not line.strip():
                continue
            try:
                record = decode(line)
                names = UserKey(record.tenant, record.user_id)
                yield line, "erased" if listed.hides(names, record.ts) else "kept"
            except (msgspec.MsgspecError, ValueError):
                yield line, "unreadable"
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the file
        yield b"", "unreadable"


def _began_at(path: Path) -> float:
    """When a recording began, by its name; 0 if the name does not say so."""
    with suppress(ValueError, IndexError):
        return float(calendar.timegm(time.strptime(path.name.split("-")[1], "%Y%m%dT%H%M%SZ")))
    return 0.0


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    handle = open_private(folder / _LOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"{folder}: another purge runs") from error
    finally:
        os.close(handle)


def main() -> None:
    """Purge the folder that the command line names, at the lowest priority. Exit code: 0 = all removed, 1, `HELD`."""
    os.nice(19)
    try:
        done = purge(Path(sys.argv[1]))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(HELD)
    except (DataError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    sys.stderr.write("\n".join(done.failed))
    sys.exit(1 if done.failed else HELD if done.num_left else 0)


if __name__ == "__main__":
    main()
