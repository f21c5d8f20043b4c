"""Checks the file of the embedded store for damage, and saves undamaged entries into a new file.

Only pages of SQLite's trees are read. Other pages may hold deleted rows: reading them would bring
erased users back.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_gr.core.errors import ConfigError, DataError, StoreFailed
from npu_gr.history_store import embedded_file as file
from npu_gr.history_store.checksum import Found
from npu_gr.history_store.embedded_file import read_names, write_names
from npu_gr.history_store.event_features import CHUNK, Chunk, events_of, load_runs
from npu_gr.history_store.row_overwrites import RowOverwrites
from npu_gr.history_store.store import EVENT, MAX_EVENTS

log = logging.getLogger(__name__)

# Unreadable chunks of a user that a walk tries to skip before it goes on with the next user.
_SKIPPED_CHUNKS = 64
_STEPS = 10_000  # SQLite instructions between two readings of the clock
_HEADER = b"SQLite format 3\0"


def quick_check(db: sqlite3.Connection, path: Path, limit_s: float) -> int:
    """Check for damage for a bounded time, log the result, and return the number of damaged places.

    Args:
        db: Connection to the file, which is not changed.
        path: Path of the file, for the log.
        limit_s: Seconds after which the check ends, complete or not.
    """
    ends_at = time.monotonic() + limit_s
    db.set_progress_handler(lambda: time.monotonic() > ends_at, _STEPS)
    try:
        found = _look(db, "quick_check", lambda: time.monotonic() > ends_at)
    finally:
        db.set_progress_handler(None, 0)
    extent = "all" if found.is_complete else f"a part, in {limit_s:g} s,"
    if found.num_damaged:
        log.error(
            "history store %s: %d damaged places (%s of it was checked); affected users are served "
            "without their stored history: with the instance stopped, `npu-gr store %s` lists the "
            "damage, `npu-gr store %s --repair NEW` saves the undamaged users",
            *(path, found.num_damaged, extent, path, path),
        )
    else:
        log.info(
            "history store %s: %s of it was checked: %d entries, no damage",
            path,
            extent,
            found.num_entries,
        )
    return found.num_damaged


def check(path: Path) -> Found:
    """Read every entry, and compare it with its checksum. The file is not changed.

    Raises:
        ConfigError: an instance has the store open, or there is no such file.
        DataError: the file is no history store.
    """
    with ExitStack() as files:
        db = _open_to_read(path, files)
        return _look(db, "integrity_check", lambda: False)


def _open_to_read(path: Path, files: ExitStack) -> sqlite3.Connection:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    files.enter_context(file.lock(path))
    db = files.enter_context(closing(sqlite3.connect(path, isolation_level=None)))
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        tables = {
            name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        }
    except sqlite3.Error as error:
        raise DataError(f"{path}: cannot be read at all: {error}") from error
    if version > file.SCHEMA or not {"users", "chunks"} <= tables:
        raise DataError(f"{path}: no history store of this version or an older one")
    return db


def _look(db: sqlite3.Connection, pragma: str, is_over: Callable[[], bool]) -> Found:
    found = Found()
    try:
        messages = [text for (text,) in db.execute(f"PRAGMA {pragma}(100)")]
        found.damage += [text for text in messages if text != "ok"]
    except sqlite3.Error as error:
        if is_over():
            found.is_complete = False
            return found
        found.damage.append(str(error))
    reader = _Walk(db)
    extents: dict[bytes, tuple[int, int]] = {}
    for key, (first, total, its_sum) in reader.users():
        if is_over():
            break
        found.num_entries += 1
        found.num_unchecked += its_sum is None
        try:
            file.check_extent(key, first, total, its_sum)
            extents[key] = (first, total)
        except StoreFailed:
            found.bad_users.add(key)
    for key, chunks in reader.chunks():
        if is_over():
            break
        first, total = extents.pop(key, (0, -1))
        found.num_entries += len(chunks)
        found.num_unchecked += sum(row.sum is None for row in chunks)
        good = _good(key, chunks, total)
        found.num_events += sum(len(row.data) for row in good) // EVENT.itemsize
        wanted = range(first // CHUNK, -(-total // CHUNK))
        if [row.chunk for row in good] != list(wanted):
            found.bad_users.add(key)
        else:
            found.num_users += 1
    found.is_complete = not is_over()
    if found.is_complete:
        found.bad_users.update(key for key, (first, total) in extents.items() if total > first)
        found.damage += [f"{gap} cannot be read" for gap in reader.gaps]
    return found


def _good(key: bytes, chunks: list[Chunk], total: int) -> list[Chunk]:
    """Return the undamaged chunks of a user, in order; `total` events, < 0 = unknown."""
    good = []
    for row in sorted(chunks, key=lambda row: row.chunk):
        with suppress(StoreFailed):
            row.check(key, None if total < 0 else min(CHUNK, total - row.chunk * CHUNK))
            load_runs(row.features)
            good.append(row)
    return good


@dataclass(slots=True, kw_only=True)
class Repaired:
    """The result of a repair."""

    num_users: int  # users with at least one event in the new file
    num_events: int  # saved events
    num_lost: int  # events that are known to be lost
    bad_users: set[bytes]  # users that lost events
    damage: list[str]  # places that cannot be read


def repair(path: Path, out: Path) -> Repaired:
    """Save every undamaged entry of a store into a new file; the old one is only read.

    A user that lost events keeps the others, in order. Idempotency keys are not saved.

    Raises:
        ConfigError: `out` exists, or an instance has the store open.
        DataError: nothing can be read.
    """
    if out.exists():
        raise ConfigError(f"{out}: exists already")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    with ExitStack() as files:
        files.enter_context(file.lock(path))
        files.enter_context(file.lock(out))
        folder = Path(
            files.enter_context(
                tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}-copy-")
            )
        )
        old = _open_copy(path, folder, files)
        overwrites = files.enter_context(closing(RowOverwrites(out)))
        new = file.connect(out, files)
        file.prepare(new)
        done = _save(old, new)
        overwrites.run(new)  # the new file may hold copies of rows that moved between pages
        return done


def _open_copy(path: Path, folder: Path, files: ExitStack) -> sqlite3.Connection:
    """Copy a store with its log, fix the header of a truncated file, and open the copy."""
    copy = folder / "copy.db"
    shutil.copyfile(path, copy)
    log_path = path.with_name(path.name + "-wal")
    if log_path.exists():
        shutil.copyfile(log_path, folder / "copy.db-wal")
    with copy.open("r+b") as data:
        header = data.read(100)
        if not header.startswith(_HEADER):
            raise DataError(
                f"{path}: its first page, with the list of tables, is damaged; restore a backup"
            )
        page_bytes = int.from_bytes(header[16:18], "big")
        page_bytes = 65536 if page_bytes == 1 else page_bytes
        num_pages = copy.stat().st_size // page_bytes
        if num_pages < int.from_bytes(header[28:32], "big"):
            data.seek(28)
            data.write(num_pages.to_bytes(4, "big"))
    db = files.enter_context(closing(sqlite3.connect(copy, isolation_level=None)))
    try:
        tables = {
            name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        }
    except sqlite3.Error as error:
        raise DataError(
            f"{path}: its list of tables cannot be read: {error}; restore a backup"
        ) from error
    if not {"users", "chunks"} <= tables:
        raise DataError(f"{path}: no history store")
    return db


def _save(old: sqlite3.Connection, new: sqlite3.Connection) -> Repaired:
    walk = _Walk(old)
    done = Repaired(num_users=0, num_events=0, num_lost=0, bad_users=set(), damage=[])
    extents: dict[bytes, tuple[int, int]] = {}
    for key, (first, total, its_sum) in walk.users():
        try:
            file.check_extent(key, first, total, its_sum)
            extents[key] = (first, total)
        except StoreFailed:
            done.bad_users.add(key)
    new.execute("BEGIN IMMEDIATE")
    # Ignore damaged or missing names of actions: the next append writes them again.
    with suppress(sqlite3.Error, StoreFailed):
        write_names(new, read_names(old))
    for key, chunks in walk.chunks():
        first, total = extents.pop(key, (0, -1))
        good = _good(key, chunks, total)
        is_first = bool(good) and good[0].chunk == first // CHUNK
        # The first chunk may still hold events over the limit, which were given up.
        events = events_of(good, first % CHUNK if is_first else 0)
        lost = max(0, total - first - len(events))
        if lost or total < 0 or len(good) < len(chunks):
            done.bad_users.add(key)
        done.num_lost += lost
        if len(events):
            done.num_users += 1
            done.num_events += file.append(new, key, events, MAX_EVENTS).num_events
    for key, (first, total) in extents.items():
        if total > first:  # none of its chunks is left
            done.bad_users.add(key)
            done.num_lost += total - first
    new.execute("COMMIT")
    done.damage += [f"{gap} cannot be read" for gap in walk.gaps]
    return done


class _Walk:
    """Reads the tables in the order of their keys, and skips places that cannot be read."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._known: dict[str, list[bytes]] = {}  # table -> users, for `_hints`
        self.gaps: list[str] = []  # one entry for each place that cannot be read

    def users(self) -> Iterator[tuple[bytes, tuple[int, int, int | None]]]:
        """Yield the rows of `users`."""
        for key, first, total, its_sum in self._rows("users", ("user",), "first", "total"):
            yield key, (first, total, its_sum)

    def chunks(self) -> Iterator[tuple[bytes, list[Chunk]]]:
        """Yield the rows of `chunks`, user by user."""
        now: bytes | None = None
        gathered: list[Chunk] = []
        for key, *row in self._rows("chunks", ("user", "chunk"), "data", "features"):
            if key != now and now is not None:
                yield now, gathered
                gathered = []
            now = key
            if isinstance(row[0], int):
                gathered.append(Chunk(*row))
        if now is not None:
            yield now, gathered

    def _rows(self, table: str, keys: tuple[str, ...], *more: str) -> Iterator[tuple[Any, ...]]:
        """Yield rows (keys, columns, checksum) by key; a column that the file lacks is None."""
        names = {name for _, name, *_ in self._db.execute(f"PRAGMA table_info({table})")}
        columns = ", ".join(name if name in names else "NULL" for name in (*keys, *more, "sum"))
        at: tuple[Any, ...] | None = (b"", -1)[: len(keys)]
        while at is not None:
            try:
                for row in self._after(table, keys, columns, at):
                    key = row[: len(keys)]
                    # A damaged page may hold keys in any order.
                    if isinstance(key[0], bytes) and key > at:
                        at = key
                        yield row
                return
            except (sqlite3.Error, TypeError):
                self.gaps.append(f"a place in {table}")
            at = self._behind(table, keys, at)

    def _after(
        self, table: str, keys: tuple[str, ...], columns: str, at: tuple[Any, ...]
    ) -> sqlite3.Cursor:
        names = ", ".join(keys)
        marks = ", ".join("?" * len(keys))
        select = f"SELECT {columns} FROM {table} WHERE"  # all names are ours  # noqa: S608
        return self._db.execute(f"{select} ({names}) > ({marks}) ORDER BY {names}", at)

    def _behind(
        self, table: str, keys: tuple[str, ...], at: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Find the key after which to go on; None = nothing after `at` can be read."""
        if (key := self._next(table, keys, at)) is not None:
            return key  # only its row cannot be read, so skip it
        for skipped in range(1, _SKIPPED_CHUNKS if len(keys) > 1 else 1):
            one = (at[0], at[1] + skipped)
            if (key := self._next(table, keys, one)) is not None and key[0] == at[0]:
                return one
        hints = self._hints(table)
        for user in hints[bisect_right(hints, at[0]) :]:
            before = (user[:-1] + bytes((user[-1] - 1,)) if user[-1] else user[:-1], 1 << 62)[
                : len(keys)
            ]
            if before > at and self._next(table, keys, before) is not None:
                return before
        return None

    def _hints(self, table: str) -> list[bytes]:
        """List the users of the other table, sorted.

        It is read from both ends, up to the first place that cannot be read.
        """
        other = "users" if table == "chunks" else "chunks"
        if other not in self._known:
            known: set[bytes] = set()
            for order in ("ASC", "DESC"):
                with suppress(sqlite3.Error):
                    select = f"SELECT user FROM {other} ORDER BY user {order}"  # ours  # noqa: S608
                    for (user,) in self._db.execute(select):
                        if isinstance(user, bytes) and user:
                            known.add(user)
            self._known[other] = sorted(known)
        return self._known[other]

    def _next(
        self, table: str, keys: tuple[str, ...], at: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Return the first key after `at`; None if it cannot be read, or there is none."""
        try:
            key: tuple[Any, ...] | None = self._after(table, keys, ", ".join(keys), at).fetchone()
        except sqlite3.Error:
            return None
        return key if key is not None and isinstance(key[0], bytes) and key > at else None
