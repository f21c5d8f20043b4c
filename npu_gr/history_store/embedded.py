"""The embedded history store: SQLite in WAL mode, one file, one process.

One writer thread commits all queued appends in one transaction (group commit): they share an fsync,
and each is acknowledged only after it. A job that fails is rolled back alone. Rows that an erasure
deletes are overwritten before it is acknowledged (`RowOverwrites`), once for all erasures of a
group. Reads have their own connection and thread, so a read never waits for an append. Events are
stored in chunks of `CHUNK`, so an append rewrites at most one chunk of its user, unless it is late.
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
from npu_gr.history_store.embedded_file import read_names, write_names
from npu_gr.history_store.event_features import check_size
from npu_gr.history_store.row_overwrites import MAX_LOG_BYTES, RowOverwrites
from npu_gr.history_store.store import HistoryConfig, StoredHistory, checked, key_bytes

log = logging.getLogger(__name__)

MAX_GROUP = 512  # jobs that share a transaction
SAMPLE_S = 2.0  # interval between two readings of the free disk space


class _Job(NamedTuple):
    work: Callable[[sqlite3.Connection], Any]
    done: Future[Any]
    erases: bool = False  # answered only after an attempt to overwrite the deleted rows


class _Undone(NamedTuple):
    """The result of a job that failed and was rolled back; the transaction goes on without it."""

    error: Exception


class GroupWriter:
    """The writer thread: commits all queued jobs in one transaction."""

    def __init__(
        self, path: Path, db: sqlite3.Connection, overwrites: RowOverwrites, health: StoreHealth
    ) -> None:
        """Start the thread.

        Args:
            path: Path of the file.
            db: The only connection that writes.
            overwrites: Overwrites deleted rows of the file.
            health: Updated with the results of overwrites and the free disk space.
        """
        self._path = path
        self._db = db
        self._overwrites = overwrites
        self._health = health
        self._max_log_bytes = MAX_LOG_BYTES
        # Committed erasures that are not overwritten and not answered; for the thread only.
        self._erased: list[_Job] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.is_closed = False
        self._sample_disk()
        self._thread = threading.Thread(target=self._run, name="npu_gr-history", daemon=True)
        self._thread.start()

    async def submit(self, work: Callable[[sqlite3.Connection], Any], erases: bool = False) -> Any:
        """Run a job in the next transaction, and return its result once it is on the disk.

        If the caller is cancelled, the job is done all the same.

        Args:
            work: Function that reads and writes the file.
            erases: Also wait for an attempt to overwrite the deleted rows.

        Raises:
            StoreFailed: it could not be written, or the store is closed.
        """
        if self.is_closed:
            raise StoreFailed("the history store is closed")
        job = _Job(work, Future(), erases)
        self._jobs.put(job)
        done = asyncio.wrap_future(job.done)
        done.add_done_callback(_retrieve)
        try:
            # Shielded, since a cancelled caller must not cancel a job that may be half committed.
            return await asyncio.shield(done)
        except sqlite3.Error as error:
            raise file.failed("written", error) from error

    def finish(self) -> None:
        """Do the queued jobs, and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    # ---- its thread

    def _run(self) -> None:
        stopping = False
        sampled_at = time.monotonic()
        self._overwrite()  # rows in the log of a process that was killed
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
        # Otherwise SQLite would copy the log into the file when the connections are closed.
        self._overwrite()

    def _gather(self) -> tuple[list[_Job], bool]:
        """Take up to `MAX_GROUP` jobs, and return them and whether the store is being closed.

        Returns no jobs if none comes within `SAMPLE_S`.
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
        """Do the jobs in one transaction; if it cannot be committed, do each half of them alone."""
        db = self._db
        try:
            db.execute("BEGIN IMMEDIATE")
        except Exception as error:  # noqa: BLE001  (the thread outlives every job)
            for job in group:  # no job is the cause, but e.g. a locked or missing file
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
        """Overwrite deleted rows once, and answer all erasures that wait for it.

        If it cannot be done now, since a reader holds the log or the disk fails, it is tried again
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
        """Do one job, or roll it back alone. Raises if SQLite rolled back the whole transaction."""
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
    """A `HistoryStore` in one file, which only one process may open."""

    def __init__(self, config: HistoryConfig, wall_clock: Callable[[], float] = time.time) -> None:
        """Open or create the file, migrate its schema, and check it for damage.

        Args:
            config: Path of the file, and limits.
            wall_clock: Unix seconds, by which idempotency keys expire.

        Raises:
            StoreInUse: another process has the file open.
            ConfigError: the file cannot be used.
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
                    f"`npu-gr store {path} --repair NEW` saves the undamaged users"
                ) from error
            self._files = files.pop_all()
        if config.check_s:
            self.health.damaged = quick_check(self._reader, path, config.check_s)
        self._group = GroupWriter(path, self._writer, overwrites, self.health)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="npu_gr-history-read")

    async def append(self, user: UserKey, events: Events, key: str | None = None) -> Written:
        return await self._write_one(Write(user, events, Mode.APPEND, key))

    async def write_many(
        self, batch: Sequence[Write]
    ) -> list[Written | StoreFailed | Unprocessable]:
        """Do each write as a job of its own; the jobs share transactions."""
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

    async def read(self, user: UserKey, last: int, all_items: bool = False) -> StoredHistory:
        if self._group.is_closed:
            raise StoreFailed("the history store is closed")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._readers, self._read, key_bytes(user), last, all_items
            )
        except sqlite3.Error as error:
            raise file.failed("read", error) from error

    async def actions(self) -> tuple[str, ...]:
        return tuple(await self._group.submit(read_names))

    async def name_actions(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(await self._group.submit(lambda db: write_names(db, names)))

    async def item_key(self, mine: str) -> str:
        return str(await self._group.submit(lambda db: file.item_key(db, mine)))

    async def erase(self, user: UserKey) -> bool:
        key = key_bytes(user)
        return bool(await self._group.submit(lambda db: file.erase(db, key), erases=True))

    async def close(self) -> None:
        """Finish and close on a thread, so also if the caller is cancelled."""
        self._group.is_closed = True
        await asyncio.to_thread(self._finish)

    def _finish(self) -> None:
        self._group.finish()
        self._readers.shutdown()
        self._files.close()

    # ---- the reader's thread

    def _read(self, key: bytes, last: int, all_items: bool) -> StoredHistory:
        self._reader.execute("BEGIN")  # one snapshot for both tables
        try:
            return file.read(self._reader, key, last, all_items=all_items)
        finally:
            self._reader.execute("ROLLBACK")


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieve the error of a job whose caller was cancelled, or asyncio would log it."""
    if not done.cancelled():
        done.exception()
