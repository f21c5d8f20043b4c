"""The embedded history store: SQLite in WAL mode, one file, one process.

Appends go to one writer thread, which commits all that have gathered in one transaction: concurrent
appends share an fsync, and each is acknowledged only after it. A job that fails is undone alone.
What an erasure deletes is overwritten before the erasure is acknowledged (`RowOverwrites`), once
for all erasures of a group. Reads have a connection and a thread of their own, so a read never
waits for an append. Events lie in chunks of `CHUNK`, so an append rewrites at most one chunk of its
user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from npu_gr.core.errors import ConfigError, StoreFailed, Unprocessable
from npu_gr.core.file_permissions import warn_if_shared
from npu_gr.core.history import Events, Mode, StoreHealth, UserKey, Write, Written
from npu_gr.history_store import embedded_file as file
from npu_gr.history_store.embedded_check import quick_check
from npu_gr.history_store.embedded_file import MAX_LOG_BYTES, RowOverwrites, read_names, write_names
from npu_gr.history_store.event_features import check_size
from npu_gr.history_store.store import HistoryConfig, StoredHistory, checked, key_bytes

log = logging.getLogger(__name__)

MAX_GROUP = 512  # jobs that share a transaction
SAMPLE_S = 2.0  # between two looks at the space that the disk has left


class _Job(NamedTuple):
    work: Callable[[sqlite3.Connection], Any]
    done: Future[Any]
    erases: bool = False  # done when what it deleted is overwritten, or cannot be overwritten yet


class _Undone(NamedTuple):
    """The result of a job that failed; the transaction goes on without it."""

    error: Exception


class GroupWriter:
    """The thread that writes: it commits all jobs that have gathered in one transaction."""

    def __init__(
        self, path: Path, db: sqlite3.Connection, overwrites: RowOverwrites, health: StoreHealth
    ) -> None:
        """Start the thread.

        Args:
            path: of the file.
            db: the connection that nobody else writes by.
            overwrites: of the file.
            health: told how the overwrites and the disk do.
        """
        self._path = path
        self._db = db
        self._overwrites = overwrites
        self._health = health
        self._max_log_bytes = MAX_LOG_BYTES
        # committed, not overwritten, and not answered; the thread only
        self._erased: list[_Job] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.is_closed = False
        self._sample_disk()
        self._thread = threading.Thread(target=self._run, name="npu_gr-history", daemon=True)
        self._thread.start()

    async def submit(self, work: Callable[[sqlite3.Connection], Any], erases: bool = False) -> Any:
        """Run a job in the next transaction.

        Returns its result when that is on the disk, whoever is cancelled.

        Args:
            work: reads and writes the file.
            erases: wait until what it deleted is overwritten, or cannot be yet.

        Raises:
            StoreFailed: it could not be written, or the store is closed.
        """
        if self.is_closed:
            raise StoreFailed("the history store is closed")
        job = _Job(work, Future(), erases)
        self._jobs.put(job)
        done = asyncio.wrap_future(job.done)
        done.add_done_callback(_look_at)
        try:
            # shielded: cancelling the caller does not undo what may be half committed
            return await asyncio.shield(done)
        except sqlite3.Error as error:
            raise file.failed("written", error) from error

    def finish(self) -> None:
        """Do the jobs that wait, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    # ---- its thread

    def _run(self) -> None:
        stopping = False
        sampled_at = time.monotonic()
        self._overwrite()  # the log of a process that died
        while not stopping:
            group, stopping = self._gather()
            if group:
                self._commit(group)
            is_due = time.monotonic() - sampled_at >= SAMPLE_S
            is_late = is_due and self._health.erased_at is not None
            if self._erased or is_late or self._overwrites.log_bytes > self._max_log_bytes:
                self._overwrite()
            if is_due:
                self._sample_disk()
                sampled_at = time.monotonic()
        # else SQLite brings the log into the file itself, when the connections are closed
        self._overwrite()

    def _gather(self) -> tuple[list[_Job], bool]:
        """The next job and those that wait behind it, `MAX_GROUP` at most.

        And whether the store is being closed.

        Nothing if no job comes for `SAMPLE_S`.
        """
        group: list[_Job] = []
        try:
            job = self._jobs.get(timeout=SAMPLE_S)
            while job is not None:
                if job.done.set_running_or_notify_cancel():  # from now on it cannot be cancelled
                    group.append(job)
                if len(group) == MAX_GROUP:
                    return group, False
                job = self._jobs.get_nowait()
        except queue.Empty:
            return group, False
        return group, True

    def _commit(self, group: Sequence[_Job]) -> None:
        """Do the jobs in one transaction.

        If it cannot be committed, each half of them is tried alone.
        """
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
        except Exception as error:  # noqa: BLE001  (the thread outlives every job)
            for job in group:  # the file is locked, or gone: no job is the cause
                job.done.set_exception(error)
            return
        try:
            results = [self._attempt(job) for job in group]
            db.execute("COMMIT")
        except Exception as error:  # noqa: BLE001
            with suppress(sqlite3.Error):  # SQLite has rolled it back itself
                db.execute("ROLLBACK")
            if len(group) == 1:
                group[0].done.set_exception(error)
                return
            self._commit(group[: len(group) // 2])
            self._commit(group[len(group) // 2 :])
            return
        for job, result in zip(group, results, strict=True):
            if isinstance(result, _Undone):
                job.done.set_exception(result.error)
            elif job.erases:
                self._erased.append(job)
            else:
                job.done.set_result(result)

    def _overwrite(self) -> None:
        """Overwrite what was deleted, and answer the erasures that wait for it, once for all of them.

        What cannot be done now, because a reader holds the log or the disk rejects, is tried again
        every `SAMPLE_S`.
        """
        try:
            is_done = self._overwrites.run(self._db)
            result = "ok" if is_done else "held"
        except Exception as error:  # noqa: BLE001  (the thread outlives every job)
            log.error(
                "history store %s: deleted rows are not overwritten yet: %s", self._path, error
            )
            is_done, result = False, "failed"
        self._health.overwrites[result] += 1
        if is_done:
            self._health.erased_at = None
            self._max_log_bytes = MAX_LOG_BYTES
        else:
            self._max_log_bytes = self._overwrites.log_bytes + MAX_LOG_BYTES
            if self._erased and self._health.erased_at is None:
                self._health.erased_at = time.time()
        for job in self._erased:
            job.done.set_result(is_done)
        self._erased.clear()

    def _attempt(self, job: _Job) -> Any:
        """Do one job, or undo it alone. Raises where SQLite has given up the whole transaction."""
        db = self._db
        db.execute("SAVEPOINT job")
        try:
            result = job.work(db)
        except Exception as error:
            if not db.in_transaction:
                raise
            db.execute("ROLLBACK TO job")
            result = _Undone(error)
        db.execute("RELEASE job")
        return result

    def _sample_disk(self) -> None:
        with suppress(OSError):
            disk = os.statvfs(self._path.parent)
            self._health.free_bytes = disk.f_bavail * disk.f_frsize
            self._health.disk_bytes = disk.f_blocks * disk.f_frsize


class EmbeddedStore:
    """A `HistoryStore` in one file. A second process that opens it gets StoreInUse."""

    def __init__(self, config: HistoryConfig, wall_clock: Callable[[], float] = time.time) -> None:
        """Open or make the file, bring its schema up to date, and look for damage.

        Args:
            config: names the file.
            wall_clock: unix seconds; idempotency keys expire by it.

        Raises:
            StoreInUse: another process has the file. ConfigError: it cannot be used.
        """
        path = Path(config.path)
        self._config = config
        self._wall_clock = wall_clock
        self.health = StoreHealth()
        with ExitStack() as files:
            files.enter_context(file.lock(path))
            try:
                overwrites = files.enter_context(closing(RowOverwrites(path)))
            except OSError as error:
                raise ConfigError(
                    f"history_store.path: {path} cannot be used: {error.strerror}"
                ) from error
            warn_if_shared(*(path.with_name(path.name + end) for end in ("", "-wal", "-shm")))
            try:
                self._writer = file.connect(path, files)
                file.prepare(self._writer)
                self._reader = file.connect(path, files)
            except sqlite3.Error as error:
                raise ConfigError(
                    f"history_store.path: {path} cannot be used: {error}; "
                    f"`npu-gr store {path} --repair NEW` saves what is left"
                ) from error
            self._files = files.pop_all()
        if config.check_s:
            self.health.damaged = quick_check(self._reader, path, config.check_s)
        self._group = GroupWriter(path, self._writer, overwrites, self.health)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="npu_gr-history-read")

    async def append(self, user: UserKey, events: Events, key: str | None = None) -> int:
        return (await self._write_one(Write(user, events, Mode.APPEND, key))).num_events

    async def write_many(
        self, batch: Sequence[Write]
    ) -> list[Written | StoreFailed | Unprocessable]:
        """Do the writes as jobs of their own, which share transactions."""
        done = await asyncio.gather(
            *(self._write_one(one) for one in batch), return_exceptions=True
        )
        results: list[Written | StoreFailed | Unprocessable] = []
        for one in done:
            if isinstance(one, BaseException) and not isinstance(one, StoreFailed | Unprocessable):
                raise one
            results.append(one)
        return checked(results)

    async def _write_one(self, one: Write) -> Written:
        check_size(one.events, self._config.max_feature_bytes_per_event)
        limits = file.KeyLimits(
            int(self._wall_clock()), self._config.idempotency_s, self._config.max_idempotency_keys
        )
        max_events = self._config.max_events_per_user
        written: Written = await self._group.submit(
            lambda db: file.write(db, one, max_events, limits)
        )
        return written

    async def read(self, user: UserKey, last: int) -> StoredHistory:
        if self._group.is_closed:
            raise StoreFailed("the history store is closed")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._readers, self._read, key_bytes(user), last)
        except sqlite3.Error as error:
            raise file.failed("read", error) from error

    async def actions(self) -> tuple[str, ...]:
        return tuple(await self._group.submit(read_names))

    async def name_actions(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(await self._group.submit(lambda db: write_names(db, names)))

    async def erase(self, user: UserKey) -> bool:
        key = key_bytes(user)
        return bool(await self._group.submit(lambda db: file.erase(db, key), erases=True))

    async def close(self) -> None:
        """Finish and close; a thread does it, so it also happens if the caller is cancelled."""
        self._group.is_closed = True
        await asyncio.to_thread(self._finish)

    def _finish(self) -> None:
        self._group.finish()
        self._readers.shutdown()
        self._files.close()

    # ---- the reader's thread

    def _read(self, key: bytes, last: int) -> StoredHistory:
        self._reader.execute("BEGIN")  # one snapshot for both tables
        try:
            return file.read(self._reader, key, last)
        finally:
            self._reader.execute("ROLLBACK")


def _look_at(done: asyncio.Future[Any]) -> None:
    """Look at the result that nobody waits for any more: asyncio would log it as forgotten."""
    if not done.cancelled():
        done.exception()
