"""The embedded history store: SQLite in WAL mode, one file, one process.

Appends go to one writer thread, which commits all that have gathered in one transaction: concurrent appends share an
fsync, and each is acknowledged only after it. Reads have a connection and a thread of their own, so a read never waits
for an append. Events lie in chunks of `CHUNK`, so an append rewrites at most one chunk of its user.

Events are counted over everything that a user ever did; the columns `first` and `total` of the table `users` say which
are kept:

    [0, first)       given up: over `max_events_per_user`
    [first, total)   kept
"""

from __future__ import annotations

import asyncio
import fcntl
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO, Any

from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.core.request import Events, UserKey
from npu_gr.features.base import EVENT, HistoryConfig, StoredHistory, key_bytes, pack, unpack

CHUNK = 256  # events
MAX_GROUP = 512  # jobs that share a transaction

# BEGIN IMMEDIATE: a file that cannot be written is found at start, not by the first append
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS users (user BLOB PRIMARY KEY, first INTEGER, total INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (user BLOB, chunk INTEGER, data BLOB, PRIMARY KEY (user, chunk)) WITHOUT ROWID;
COMMIT;
"""

_Job = tuple[Callable[[sqlite3.Connection], Any], Future[Any]]


class EmbeddedStore:
    """A `HistoryStore` in one file. A second process that opens it gets a ConfigError."""

    def __init__(self, config: HistoryConfig) -> None:
        path = Path(config.path)
        self._max_events = config.max_events_per_user
        with ExitStack() as files:
            files.enter_context(_locked(path))
            try:
                self._writer = _connected(path, files)
                self._writer.executescript(_SCHEMA)
                self._reader = _connected(path, files)
            except sqlite3.Error as error:
                raise ConfigError(f"features.path: {path} cannot be used: {error}") from error
            self._files = files.pop_all()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="npu_gr-history", daemon=True)
        self._thread.start()
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="npu_gr-history-read")
        self._is_closed = False

    async def append(self, user: UserKey, events: Events) -> int:
        key = key_bytes(user)
        kept: int = await self._submit(lambda db: self._append(db, key, events))
        return kept

    async def append_many(self, batch: list[tuple[UserKey, Events]]) -> None:
        """Append the whole batch, or nothing of it."""
        keyed = [(key_bytes(user), events) for user, events in batch]

        def work(db: sqlite3.Connection) -> None:
            for key, events in keyed:
                self._append(db, key, events)

        await self._submit(work)

    async def read(self, user: UserKey, last: int) -> StoredHistory:
        if self._is_closed:
            raise Unavailable("the history store is closed")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._readers, self._read, key_bytes(user), last)
        except sqlite3.Error as error:
            raise Unavailable(f"the history store cannot be read: {error}") from error

    async def erase(self, user: UserKey) -> None:
        key = key_bytes(user)

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM chunks WHERE user = ?", (key,))
            db.execute("DELETE FROM users WHERE user = ?", (key,))

        await self._submit(work)

    async def close(self) -> None:
        """Finish and close; a thread does it, so it also happens if the caller is cancelled."""
        self._is_closed = True
        await asyncio.to_thread(self._finish)

    def _finish(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._readers.shutdown()
        self._files.close()

    # ---- the writer's thread

    async def _submit(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        if self._is_closed:
            raise Unavailable("the history store is closed")
        future: Future[Any] = Future()
        self._jobs.put((work, future))
        try:
            # shielded: cancelling the caller does not undo what may be half committed
            return await asyncio.shield(asyncio.wrap_future(future))
        except sqlite3.Error as error:
            raise Unavailable(f"the history store cannot be written: {error}") from error

    def _write(self) -> None:
        stopping = False
        while not stopping:
            group, stopping = self._gather()
            if not group:
                continue
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                results = [work(self._writer) for work, _ in group]
                self._writer.execute("COMMIT")
            except Exception as error:  # noqa: BLE001  (the thread outlives every job)
                with suppress(sqlite3.Error):  # no transaction was begun, or SQLite has rolled it back itself
                    self._writer.execute("ROLLBACK")
                for _, future in group:
                    future.set_exception(error)
            else:
                for (_, future), result in zip(group, results, strict=True):
                    future.set_result(result)

    def _gather(self) -> tuple[list[_Job], bool]:
        """The next job and those that wait behind it, `MAX_GROUP` at most; and whether the store is being closed."""
        group: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            group.append(job)
            if len(group) == MAX_GROUP:
                return group, False
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return group, False
        return group, True

    def _append(self, db: sqlite3.Connection, key: bytes, events: Events) -> int:
        first, total = db.execute("SELECT first, total FROM users WHERE user = ?", (key,)).fetchone() or (0, 0)
        data = pack(events)
        at = 0
        while at < len(events):
            room = min(CHUNK - (total + at) % CHUNK, len(events) - at)
            part = data[at * EVENT.itemsize : (at + room) * EVENT.itemsize]
            db.execute(
                "INSERT INTO chunks VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET data = CAST(data || ?3 AS BLOB)",
                (key, (total + at) // CHUNK, part),
            )
            at += room
        total += len(events)
        oldest = max(0, total - self._max_events)
        if oldest // CHUNK > first // CHUNK:
            db.execute("DELETE FROM chunks WHERE user = ? AND chunk < ?", (key, oldest // CHUNK))
        first = max(first, oldest)
        db.execute("INSERT OR REPLACE INTO users VALUES (?, ?, ?)", (key, first, total))
        return total - first

    # ---- the reader's thread

    def _read(self, key: bytes, last: int) -> StoredHistory:
        db = self._reader
        db.execute("BEGIN")  # one snapshot for both tables
        try:
            row = db.execute("SELECT first, total FROM users WHERE user = ?", (key,)).fetchone()
            if row is None:
                return StoredHistory(Events.empty(), 0)
            first, total = row
            start = max(first, total - last)
            rows = db.execute(
                "SELECT data FROM chunks WHERE user = ? AND chunk >= ? ORDER BY chunk", (key, start // CHUNK)
            )
            events = unpack(b"".join(data for (data,) in rows))
        finally:
            db.execute("ROLLBACK")
        return StoredHistory(events[start % CHUNK :], start)


def _connected(path: Path, files: ExitStack) -> sqlite3.Connection:
    connection = files.enter_context(closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)))
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")  # an fsync for each commit, which is the acknowledgement
    return connection


def _locked(path: Path) -> IO[str]:
    """The store's lock file. Closing it, or the end of the process, releases the store."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise
    except BlockingIOError as error:
        raise ConfigError(f"features.path: {path} is in use by another process") from error
    except OSError as error:
        raise ConfigError(f"features.path: {path} cannot be used: {error.strerror}") from error
    return lock
