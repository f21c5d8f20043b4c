"""The file of the embedded store: lock, connections, tables, operations.

    users    user -> first, total: events [0, first) were given up, [first, total) are stored
    chunks   user, chunk -> `CHUNK` events with their features; the last chunk may be shorter. The
             events of a user are in time order
    keys     user, idempotency key -> digest of the append's events, and its answer
    actions  number -> name of an action: a list that only grows at its end, written before the
             first event that uses a number. So a model with other actions is detected before it
             reads a `buy` as a `view`

Each row has a checksum of its fields, which is checked whenever the row is read. Rows of schema 0
have none until they are written again; rows of schema 1 have no features.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from npu_gr.core import durable_files
from npu_gr.core.arrays import smallest
from npu_gr.core.errors import ConfigError, StoreFailed, StoreFault, Unprocessable
from npu_gr.core.history import Events, Mode, Write, Written, count_late, in_time_order
from npu_gr.core.names import difference
from npu_gr.history_store.checksum import check_row, damaged, row_sum
from npu_gr.history_store.event_features import (
    CHUNK,
    Chunk,
    dump_runs,
    events_of,
    join_runs,
    load_runs,
    pack_runs,
)
from npu_gr.history_store.store import (
    EVENT,
    NO_ITEMS,
    IdempotencyKey,
    StoredHistory,
    key_bytes,
    merge,
    pack,
)

SCHEMA = 2  # 0: rows without checksums, no keys; 1: events without features
CLEANED = 8  # oldest keys that an append visits, and removes if they have expired

_TABLES = """
CREATE TABLE IF NOT EXISTS users (
  user BLOB PRIMARY KEY, first INTEGER, total INTEGER, sum INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (
  user BLOB, chunk INTEGER, data BLOB, sum INTEGER, features BLOB, PRIMARY KEY (user, chunk)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
  id INTEGER PRIMARY KEY, user BLOB, key BLOB, digest BLOB, num_events INTEGER, at INTEGER,
  sum INTEGER, UNIQUE (user, key)
);
"""
_ACTIONS = "CREATE TABLE IF NOT EXISTS actions (number INTEGER PRIMARY KEY, name BLOB, sum INTEGER)"


class KeyLimits(NamedTuple):
    """How long idempotency keys are remembered, and how many."""

    now: int  # unix seconds
    keep_s: float
    max_keys: int  # for each user


def lock(path: Path) -> IO[str]:
    """Lock the store for this process, as `durable_files.lock`."""
    return durable_files.lock(path, "history_store.path")


def connect(path: Path, files: ExitStack) -> sqlite3.Connection:
    """Connect; `files` closes the connection. The file must exist: its log gets the same mode."""
    connection = files.enter_context(
        closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
    )
    connection.execute("PRAGMA journal_mode=WAL")
    # An fsync for each commit, since a commit is acknowledged.
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA wal_autocheckpoint=0")  # `row_overwrites.py` checkpoints
    return connection


def prepare(db: sqlite3.Connection) -> None:
    """Create the tables, or migrate those of an older version.

    Raises:
        ConfigError: a newer version wrote the file.
        sqlite3.Error: the file cannot be written.
    """
    # A write transaction, so that a read-only file is detected at start, not by the first append.
    db.execute("BEGIN IMMEDIATE")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA:
        db.execute("ROLLBACK")
        raise ConfigError(
            f"history_store.path: its schema is {version}, and this version reads up to {SCHEMA}"
        )
    if version < SCHEMA:
        tables = {
            name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        }
        for table in sorted(tables & {"users", "chunks"}) if version < 1 else ():
            # NULL until the row is written again
            db.execute(f"ALTER TABLE {table} ADD COLUMN sum INTEGER")
        if "chunks" in tables:
            db.execute("ALTER TABLE chunks ADD COLUMN features BLOB")
        for statement in filter(str.strip, _TABLES.split(";")):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA}")
    db.execute(_ACTIONS)  # older versions ignore the table, so the schema number stays
    db.execute("COMMIT")


def failed(what: str, error: sqlite3.Error) -> StoreFailed:
    """Convert an error of SQLite; `what` is "read" or "written"."""
    faults = {
        sqlite3.SQLITE_FULL: StoreFault.DISK_FULL,
        sqlite3.SQLITE_CORRUPT: StoreFault.CORRUPT,
        sqlite3.SQLITE_NOTADB: StoreFault.CORRUPT,
    }
    fault = faults.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, StoreFault.UNAVAILABLE)
    return StoreFailed(f"the history store cannot be {what}: {error}", fault)


# ---- one user's rows, inside a transaction


def append(db: sqlite3.Connection, key: bytes, events: Events, max_events: int) -> Written:
    """Add events in time order, and delete the oldest over `max_events`.

    The result is as if all events had come in order: late ones, which are older than stored ones,
    go to their place, and the chunks from there on are written again.

    Raises:
        StoreFailed: the rows to be changed are damaged.
    """
    num_added = len(events)
    first, total = _extent(db, key) or (0, 0)
    last = None  # the chunk that the events continue
    if num_added and total:
        last = _chunk(db, key, (total - 1) // CHUNK, (total - 1) % CHUNK + 1)
    num_late = count_late(events.timestamps, last.newest if last else None)
    if last is not None and (oldest := smallest(events.timestamps)) < last.newest:
        total, newer = _take_newer(db, key, first, total, oldest)
        events = newer + events
    events = in_time_order(events)
    at = 0
    while at < len(events):
        chunk, filled = divmod(total + at, CHUNK)
        room = min(CHUNK - filled, len(events) - at)
        part = events[at : at + room]
        data, runs = pack(part), pack_runs(part.features, room, filled)
        if filled:
            assert last is not None
            data, runs = last.data + data, join_runs(load_runs(last.features), runs)
        row = Chunk.make(key, chunk, data, dump_runs(runs))
        db.execute(
            "INSERT OR REPLACE INTO chunks (user, chunk, data, features, sum) VALUES (?, ?, ?, "
            "?, ?)",
            (key, *row),
        )
        at += room
    total += len(events)
    oldest = max(0, total - max_events)
    if oldest // CHUNK > first // CHUNK:
        db.execute("DELETE FROM chunks WHERE user = ? AND chunk < ?", (key, oldest // CHUNK))
    first = max(first, oldest)
    extent = (key, first, total, row_sum(key, first, total))
    db.execute("INSERT OR REPLACE INTO users (user, first, total, sum) VALUES (?, ?, ?, ?)", extent)
    return Written(total - first, num_added, num_late=num_late)


def _take_newer(
    db: sqlite3.Connection, key: bytes, first: int, total: int, time: int
) -> tuple[int, Events]:
    """Delete the chunks from the first one with an event after `time` on.

    Returns:
        Number of events of the user without them, and their events.
    """
    chunk = -(-total // CHUNK)
    rows: list[Chunk] = []
    while chunk * CHUNK > first:
        row = _chunk(db, key, chunk - 1, min(CHUNK, total - (chunk - 1) * CHUNK))
        if row.newest <= time:
            break
        rows.insert(0, row)
        chunk -= 1
    db.execute("DELETE FROM chunks WHERE user = ? AND chunk >= ?", (key, chunk))
    return chunk * CHUNK, events_of(rows)


def replace(db: sqlite3.Connection, key: bytes, events: Events, max_events: int) -> Written:
    """Replace a user's history, which may be damaged, by the newest `max_events` of `events`.

    The history counts from 0 again. Idempotency keys stay, so a repeated append is still detected.
    """
    for table in ("chunks", "users"):
        db.execute(f"DELETE FROM {table} WHERE user = ?", (key,))  # two names above  # noqa: S608
    num_late = count_late(events.timestamps)
    kept = in_time_order(events)[-max_events:]
    return append(db, key, kept, max_events)._replace(num_late=num_late)


def merge_into(db: sqlite3.Connection, key: bytes, events: Events, max_events: int) -> Written:
    """Merge events into a user's history. Raises StoreFailed if that is damaged."""
    stored = read(db, key, max_events).events
    merged = merge(stored, events, max_events)
    if not merged.changes:
        return Written(len(stored), 0)
    if merged.is_append:
        done = append(db, key, merged.events[-merged.num_added :], max_events)
    else:
        done = replace(db, key, merged.events, max_events)
    return Written(done.num_events, merged.num_added, merged.num_filled, merged.num_late)


def read(
    db: sqlite3.Connection, key: bytes, last: int, *, all_items: bool = False
) -> StoredHistory:
    """Read the newest `last` events, and with `all_items` the items of all older ones.

    Raises:
        StoreFailed: a row is damaged or missing.
    """
    extent = _extent(db, key)
    if extent is None:
        return StoredHistory(Events.empty(), 0, NO_ITEMS)
    first, total = extent
    start = max(first, total - last)
    begin = first if all_items else start
    found = db.execute(
        "SELECT chunk, data, features, sum FROM chunks WHERE user = ? AND chunk >= ? ORDER "
        "BY chunk",
        (key, begin // CHUNK),
    )
    rows = [Chunk(*row) for row in found]
    if [row.chunk for row in rows] != list(range(begin // CHUNK, -(-total // CHUNK))):
        raise damaged("a chunk is missing")
    for row in rows:
        row.check(key, min(CHUNK, total - row.chunk * CHUNK))
    num_older = start // CHUNK - begin // CHUNK
    events = events_of(rows[num_older:], start % CHUNK)
    if not all_items:
        return StoredHistory(events, start)
    records = np.frombuffer(b"".join(row.data for row in rows[: num_older + 1]), EVENT)
    older = records["item"][begin % CHUNK :][: start - begin]
    return StoredHistory(events, start, older.astype(np.int64))


def erase(db: sqlite3.Connection, key: bytes) -> None:
    """Delete all rows of a user."""
    for table in ("chunks", "users", "keys"):
        db.execute(f"DELETE FROM {table} WHERE user = ?", (key,))  # three names above  # noqa: S608


def _extent(db: sqlite3.Connection, key: bytes) -> tuple[int, int] | None:
    row = db.execute("SELECT first, total, sum FROM users WHERE user = ?", (key,)).fetchone()
    if row is None:
        return None
    check_extent(key, *row)
    first, total, _ = row
    return first, total


def check_extent(key: bytes, first: object, total: object, found: int | None) -> None:
    """Check a row of `users`. Raises StoreFailed if it is damaged."""
    if not (isinstance(first, int) and isinstance(total, int) and 0 <= first <= total):
        raise damaged("its extent is invalid")
    check_row(found, key, first, total)


def _chunk(db: sqlite3.Connection, key: bytes, chunk: int, num_events: int) -> Chunk:
    row = db.execute(
        "SELECT data, features, sum FROM chunks WHERE user = ? AND chunk = ?", (key, chunk)
    ).fetchone()
    if row is None:
        raise damaged("a chunk is missing")
    found = Chunk(chunk, *row)
    found.check(key, num_events)
    return found


# ---- idempotency keys


def applied(
    db: sqlite3.Connection, user: bytes, key: IdempotencyKey, limits: KeyLimits
) -> int | None:
    """Return the answer of the append with this key; None if it is unknown or has expired.

    Raises:
        Unprocessable: the key was used for other events.
        StoreFailed: the row is damaged.
    """
    row = db.execute(
        "SELECT digest, num_events, at, sum FROM keys WHERE user = ? AND key = ?", (user, key.key)
    ).fetchone()
    if row is None:
        return None
    digest, num_events, at, found = row
    check_row(found, user, key.key, digest, num_events, at)
    if at + limits.keep_s <= limits.now:
        return None
    if digest != key.events:
        raise Unprocessable("idempotency_key: it was used for other events")
    return int(num_events)


def remember(
    db: sqlite3.Connection, user: bytes, key: IdempotencyKey, num_events: int, limits: KeyLimits
) -> None:
    """Store a key with the answer of its append.

    Deletes a few expired keys, and the user's oldest key over the limit.
    """
    fields = (user, key.key, key.events, num_events, limits.now)
    db.execute(
        "INSERT OR REPLACE INTO keys (user, key, digest, num_events, at, sum) VALUES (?, ?, ?, "
        "?, ?, ?)",
        (*fields, row_sum(*fields)),
    )
    db.execute(
        "DELETE FROM keys WHERE id IN (SELECT id FROM keys ORDER BY id LIMIT ?) AND at <= ?",
        (CLEANED, int(limits.now - limits.keep_s)),
    )
    db.execute(
        "DELETE FROM keys WHERE user = ?1 AND id <= "
        "(SELECT id FROM keys WHERE user = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
        (user, limits.max_keys),
    )


def append_once(
    db: sqlite3.Connection,
    user: bytes,
    events: Events,
    key: IdempotencyKey,
    max_events: int,
    limits: KeyLimits,
) -> Written:
    """Append events, unless an append with this idempotency key was done before.

    Args:
        db: Connection with an open transaction.
        user: Key of the user (`key_bytes`).
        events: Events in any order.
        key: Idempotency key of the append.
        max_events: see `append`.
        limits: Limits of the idempotency keys.

    Returns:
        The answer of the first append with this key, with 0 added events if this is a later one.
    """
    known = applied(db, user, key, limits)
    if known is not None:
        return Written(known, 0)
    done = append(db, user, events, max_events)
    remember(db, user, key, done.num_events, limits)
    return done


def write(db: sqlite3.Connection, one: Write, max_events: int, limits: KeyLimits) -> Written:
    """Do one write of any mode.

    Raises:
        StoreFailed: rows that it needs are damaged.
        Unprocessable: its idempotency key was used for other events.
    """
    user = key_bytes(one.user)
    match one.mode:
        case Mode.MERGE:
            return merge_into(db, user, one.events, max_events)
        case Mode.REPLACE:
            done = replace(db, user, one.events, max_events)
            return done._replace(num_added=done.num_events)
        case Mode.APPEND if one.key is None:
            return append(db, user, one.events, max_events)
        case Mode.APPEND:
            key = IdempotencyKey.make(one.key, one.events)
            return append_once(db, user, one.events, key, max_events, limits)


def read_names(db: sqlite3.Connection) -> tuple[str, ...]:
    """Read the names of actions by number.

    Raises:
        StoreFailed: a row is damaged or missing.
    """
    rows = db.execute(
        "SELECT number, name, sum FROM actions WHERE number >= 0 ORDER BY number"
    ).fetchall()
    for place, (number, name, found) in enumerate(rows):
        if number != place or not isinstance(name, bytes) or found != row_sum(number, name):
            raise StoreFailed("the history store has damaged names of actions", StoreFault.CORRUPT)
    return tuple(name.decode("utf-8", "surrogatepass") for _, name, _ in rows)


def write_names(db: sqlite3.Connection, names: Sequence[str]) -> tuple[str, ...]:
    """Extend the list of action names to `names`, if these begin with it; in a transaction.

    Returns:
        The list that is stored now.

    Raises:
        StoreFailed: a row is damaged or missing.
    """
    kept = read_names(db)
    if difference(kept, names):
        return kept
    for number, name in list(enumerate(names))[len(kept) :]:
        raw = name.encode("utf-8", "surrogatepass")
        db.execute(
            "INSERT INTO actions (number, name, sum) VALUES (?, ?, ?)",
            (number, raw, row_sum(number, raw)),
        )
    return tuple(names)


_ITEM_KEY = -1  # number of its row among the actions, so that older versions reject the file


def item_key(db: sqlite3.Connection, mine: str) -> str:
    """Return the fingerprint of the key of the items' ids; a new file takes `mine`.

    Raises:
        StoreFailed: the row is damaged.
    """
    if mine and not read_names(db):
        raw = mine.encode()
        row = (_ITEM_KEY, raw, row_sum(_ITEM_KEY, raw))
        db.execute("INSERT OR IGNORE INTO actions (number, name, sum) VALUES (?, ?, ?)", row)
    rows = db.execute("SELECT name, sum FROM actions WHERE number = ?", (_ITEM_KEY,)).fetchall()
    if any(found != row_sum(_ITEM_KEY, raw) for raw, found in rows):
        raise StoreFailed("the history store has a damaged key of items", StoreFault.CORRUPT)
    return rows[0][0].decode() if rows else ""
