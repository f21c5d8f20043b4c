"""Remove the records of erased users: `npu-gr record --purge FOLDER`, and a process per instance.

A file with such records is rewritten to a temporary file, synced, and renamed. Invalid lines are
removed too, since their user is unknown. An unfinished file (`.part`) is not changed; users who may
be in it stay in the list of `erased.py`.
"""

from __future__ import annotations

import calendar
import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from npu_gr.core.durable_files import sync_folder
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.file_permissions import open_private
from npu_gr.core.health import STOP_S, Worker
from npu_gr.core.history import UserKey
from npu_gr.core.lines import raw_lines
from npu_gr.replay import erased
from npu_gr.replay.erased import ErasedUsers
from npu_gr.replay.files import PART, PATTERN, create

HELD = 3  # exit code: an unfinished file or another purge prevents the removal of some
_TEMPORARY = ".purge-"
_LOCK = ".purge.lock"


class _Who(msgspec.Struct, frozen=True):
    """The fields of a record that identify its user and time."""

    ts: float
    user_id: str
    tenant: str = ""


class Purged(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a purge."""

    num_files: int  # files read
    num_rewritten: int
    num_removed: int  # records of erased users
    num_unreadable: int  # invalid lines, removed too
    num_left: int  # pseudonyms of erased users that a file may still have
    failed: list[str]  # files that could not be rewritten, each with the reason


def purge(folder: Path) -> Purged:
    """Remove the records of all users in the list.

    Raises:
        ConfigError: another purge of the folder is running.
        DataError: the list cannot be read.
        OSError: the folder cannot be read.
    """
    with _alone(folder):
        for left in folder.glob(f"{_TEMPORARY}*"):
            left.unlink()  # a temporary file of a killed purge
        listed = erased.read(folder)
        # before the loop, since one may be completed meanwhile
        written = [_began_at(path) for path in folder.glob(f"{PATTERN}{PART}")]
        newest_at = max(listed.until.values(), default=float("-inf"))
        num_files = num_rewritten = num_removed = num_unreadable = 0
        failed = []
        for path in sorted(folder.glob(PATTERN)):
            if path.name.endswith(PART) or _began_at(path) > newest_at:
                continue
            try:
                removed, unreadable = _purge_file(path, listed)
            except FileNotFoundError:  # deleted by the recorder because of its age
                continue
            except (OSError, DataError) as error:
                failed.append(f"{path.name}: {error}")
                continue
            num_files += 1
            num_rewritten += removed + unreadable > 0
            num_removed += removed
            num_unreadable += unreadable
        # users who were erased before the oldest unfinished file began are not in it
        is_held_until = min(written, default=float("inf"))
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
    """Rewrite a file without erased records and invalid lines, and return how many of each."""
    removed = unreadable = num_kept = 0
    for _, verdict in _classified(path, listed):
        removed += verdict == "erased"
        unreadable += verdict == "unreadable"
        num_kept += verdict == "kept"
    if not removed + unreadable:
        return 0, 0
    temporary = path.with_name(_TEMPORARY + path.name)
    try:
        if num_kept:
            with create(temporary, path.suffix) as file:
                for line, verdict in _classified(path, listed):
                    if verdict == "kept":
                        file.write(line + b"\n")
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            path.stat()  # raises if the recorder has deleted it meanwhile
            temporary.replace(path)
        else:
            path.unlink()
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return removed, unreadable


def _classified(path: Path, listed: ErasedUsers) -> Iterator[tuple[bytes, str]]:
    """Yield each line with "kept", "erased" or "unreadable".

    The rest of a file after damage counts as one unreadable line.
    """
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
            raise  # an I/O error, not a damaged file
        yield b"", "unreadable"


def _began_at(path: Path) -> float:
    """Return the start time in a recording's name as unix seconds; 0 if it has none."""
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
        raise ConfigError(f"{folder}: another purge is running") from error
    finally:
        os.close(handle)


def main() -> None:
    """Purge the folder of the command line at the lowest priority.

    Exit code: 0 if all records were removed, 1 after an error, else `HELD`.
    """
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


# ---- the process of an instance

log = logging.getLogger(__name__)

EVERY_S = 3600.0  # between runs, since each reads all files
LIMIT_S = 3600.0  # time limit of a run


class Purger:
    """Runs purges of a folder in a process, from a thread. Call `start` and `close`.

    Args:
        folder: Existing folder of the recordings.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # unix seconds of the oldest erasure that is not complete; read by any thread
        self.erased_at: float | None = None
        self.runs: Counter[str] = Counter()  # by result: ok, held, failed
        self._wake = threading.Event()
        self._stopping = False
        self._process: subprocess.Popen[str] | None = None
        self.worker = Worker()
        self._thread = threading.Thread(target=self._run, name="recordings-purge", daemon=True)

    def start(self) -> None:
        """Start the thread, which begins with users already in the list."""
        self._thread.start()

    def listed(self, at: float) -> None:
        """Note that a user was added to the list at this time."""
        if self.erased_at is None:
            self.erased_at = at
        self._wake.set()

    def close(self) -> None:
        """Stop a running purge; the next start continues it."""
        self._stopping = True
        self._wake.set()
        if (process := self._process) is not None:
            process.terminate()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        next_at = time.monotonic()
        self._look()
        while not self._stopping:
            if self.erased_at is None:
                self._wake.wait()
            else:
                self._wake.wait(max(0.0, next_at - time.monotonic()))
            self._wake.clear()
            if self._stopping or self.erased_at is None or time.monotonic() < next_at:
                continue
            with self.worker.busy(2 * LIMIT_S):  # the process has a limit of its own
                result, why = self._purge()
            self._look()
            if not self._stopping:
                self.runs[result] += 1
                if result == "failed":
                    log.error(
                        "purging %s failed, so it still has records of erased users; it will be "
                        "retried: %s",
                        self._folder,
                        why,
                    )
            next_at = time.monotonic() + EVERY_S

    def _purge(self) -> tuple[str, str]:
        """Run the process; return its result, and the reason of a failure."""
        command = [sys.executable, "-P", "-m", "npu_gr.replay.purge", str(self._folder)]
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            process = subprocess.Popen(  # noqa: S603  (ourselves, with our own paths)
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
        except OSError as error:
            return "failed", str(error)
        with process:
            self._process = process
            if self._stopping:
                process.terminate()
            try:
                _, said = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return "failed", f"not done within {LIMIT_S:g} s"
            finally:
                self._process = None
        result = {0: "ok", HELD: "held"}.get(process.returncode, "failed")
        return result, said[-500:]

    def _look(self) -> None:
        """Read the list again."""
        try:
            until = erased.read(self._folder).until
        except DataError as error:
            log.error("recordings: %s", error)
            self.erased_at = self.erased_at or time.time()
            return
        self.erased_at = min(until.values(), default=None)
