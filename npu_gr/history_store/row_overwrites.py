"""Deleted rows of the embedded store are overwritten with zeros, in its file and in the log (WAL).

SQLite's `secure_delete` alone is not enough: when rows move to another page of a tree, their old
bytes stay in the unallocated space of the page that they left, between its cell pointers and its
cells. So after a checkpoint that space is zeroed in each page that the log names; then the log is
truncated.

    pages of the log -> checkpoint into the file -> zero their unallocated space -> truncate the log

If the process dies in between, the log still names the pages. SQLite never reads unallocated space,
so a reader in another process is not disturbed.

Invariant: only `RowOverwrites.run` moves pages from the log to the file, so it sees every page.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

from npu_gr.core.file_permissions import open_private

WAIT_MS = 100  # longest wait for a reader, twice in each run
MAX_LOG_BYTES = 4 << 20  # a longer log is checkpointed, even if nothing was erased

_LOG_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_TREE_PAGES = {2: 12, 5: 12, 10: 8, 13: 8}  # first byte of a page -> size of its header
# In a larger file the first byte of a page outside of the trees, part of a page number, could be
# one of these.
_MAX_PAGES = 1 << 25


class RowOverwrites:
    """Checkpoints the log into the file, and zeroes deleted rows in both. Writer thread only."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it, readable only by its owner.

        Call it before SQLite opens the file, and `close` after SQLite closed it: closing any
        descriptor of a file releases all POSIX locks of the process on it.

        Raises:
            OSError: the file cannot be used.
        """
        self._path = path
        self._log_path = path.with_name(path.name + "-wal")
        self._file = open_private(path)
        # Pages that the log has named since the last completed run.
        self._pages: set[int] = set()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    @property
    def log_bytes(self) -> int:
        """Size of the log."""
        try:
            return self._log_path.stat().st_size
        except OSError:
            return 0

    def run(self, db: sqlite3.Connection) -> bool:
        """Overwrite all rows whose deletion was committed.

        Args:
            db: The writer's connection, outside of a transaction.

        Returns:
            True if no deleted row is left. False if a reader holds the log or the file is too
            large: call it again later.

        Raises:
            sqlite3.Error, OSError: the disk fails. Call it again later.
        """
        self._pages |= self._logged()
        db.execute(f"PRAGMA busy_timeout = {WAIT_MS}")
        try:
            return _checkpoint(db, "FULL") and self._zeroed(db) and _checkpoint(db, "TRUNCATE")
        finally:
            db.execute("PRAGMA busy_timeout = 5000")

    def _zeroed(self, db: sqlite3.Connection) -> bool:
        """Zero the unallocated space of the pages, under a lock against all other writers."""
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:  # another process writes
            return False
        try:
            (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
            if os.fstat(self._file).st_size // page_bytes >= _MAX_PAGES:
                return False
            for page in self._pages:
                start = (page - 1) * page_bytes
                data = os.pread(self._file, page_bytes, start)
                if len(data) < page_bytes:  # a damaged log may name pages that do not exist
                    continue
                space = _unallocated(data, is_first=page == 1)
                if space is not None:
                    first, zeros = space
                    os.pwrite(self._file, zeros, start + first)
            os.fdatasync(self._file)
        finally:
            db.execute("ROLLBACK")
            # Drop SQLite's page cache, which holds the old bytes and would write them back.
            db.execute("PRAGMA shrink_memory")
        self._pages.clear()
        return True

    def _logged(self) -> set[int]:
        """Return the pages that the log names, also in frames that SQLite no longer uses."""
        try:
            data = self._log_path.open("rb")
        except FileNotFoundError:
            return set()
        pages = set()
        with closing(data):
            header = data.read(_LOG_HEADER_BYTES)
            if len(header) < _LOG_HEADER_BYTES:
                return set()
            (page_bytes,) = struct.unpack(">I", header[8:12])
            while len(frame := data.read(_FRAME_HEADER_BYTES)) == _FRAME_HEADER_BYTES:
                pages.add(int.from_bytes(frame[:4], "big"))
                data.seek(page_bytes, os.SEEK_CUR)
        pages.discard(0)
        return pages


def _checkpoint(db: sqlite3.Connection, mode: str) -> bool:
    """Run a checkpoint, and return whether the whole log is in the file."""
    try:
        is_busy, logged, done = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return False
        raise
    return not is_busy and logged == done


def _unallocated(page: bytes, is_first: bool) -> tuple[int, bytes] | None:
    """Find the unallocated space of a page: (first byte, zeros); None if it is zero already."""
    at = 100 if is_first else 0  # the file's header
    header_bytes = _TREE_PAGES.get(page[at])
    if header_bytes is None:
        return None
    num_cells, cells_at = struct.unpack(">HH", page[at + 3 : at + 7])
    first = at + header_bytes + 2 * num_cells
    last = min(cells_at or 65536, len(page))
    if not any(page[first:last]):
        return None
    return first, bytes(last - first)
