"""What was deleted from the embedded store is overwritten: in the file, and in its log.

SQLite's `secure_delete` writes zeros over the rows that it deletes, but not everywhere: where rows move to another page
of a tree, the page that they leave keeps their old bytes in the room between its list of cells and its cells. So each
page that was written is looked at once it is in the file, and that room is filled with zeros. Then the log is cut.

    pages of the log -> checkpoint into the file -> zeros into the rooms of those pages -> the log is cut to nothing

Whatever the process dies of, the log names the pages until they are done. The room of a page means nothing to SQLite:
a reader in another process may read on.

Invariant: what this process writes reaches the file by `RowOverwrites.run` alone, so it sees every page.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

from npu_gr.core.private import open_private

WAIT_MS = 100  # for a reader, twice in each run
MAX_LOG_BYTES = 4 << 20  # then the log is brought into the file, though nothing was erased

_LOG_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_TREE_PAGES = {2: 12, 5: 12, 10: 8, 13: 8}  # first byte of a page -> size of its header
# From here on the first byte of a page that belongs to no tree, which is a part of a page number, may look like theirs.
_MAX_PAGES = 1 << 25


class RowOverwrites:
    """Brings the log into the file, and leaves nothing in either that was deleted. The writer's thread only."""

    def __init__(self, path: Path) -> None:
        """Open the file, and make it if it is missing, readable by its owner alone.

        Call it before SQLite opens the file, and `close` it after: closing any descriptor of a file gives up all locks
        that the process has on it.

        Raises:
            OSError: the file cannot be used.
        """
        self._path = path
        self._log_path = path.with_name(path.name + "-wal")
        self._file = open_private(path)
        self._pages: set[int] = set()  # that the log has named since the last run that was completed

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    @property
    def log_bytes(self) -> int:
        """Size of the log now."""
        try:
            return self._log_path.stat().st_size
        except OSError:
            return 0

    def run(self, db: sqlite3.Connection) -> bool:
        """Do it for all that was committed.

        Args:
            db: the writer's connection, outside of a transaction.

        Returns:
            Whether nothing deleted is left. False: a reader holds the log, or the file is too large; try again.

        Raises:
            sqlite3.Error, OSError: the disk refuses. Try again.
        """
        self._pages |= self._logged()
        db.execute(f"PRAGMA busy_timeout = {WAIT_MS}")
        try:
            return self._all_in_the_file(db) and self._filled(db) and _checkpoint(db, "TRUNCATE")
        finally:
            db.execute("PRAGMA busy_timeout = 5000")

    def _all_in_the_file(self, db: sqlite3.Connection) -> bool:
        return _checkpoint(db, "FULL")

    def _filled(self, db: sqlite3.Connection) -> bool:
        """Write the zeros. Nobody else can write meanwhile, neither the log nor the file."""
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:  # somebody else writes: that cannot be us
            return False
        try:
            (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
            if os.fstat(self._file).st_size // page_bytes >= _MAX_PAGES:
                return False
            for page in self._pages:
                start = (page - 1) * page_bytes
                data = os.pread(self._file, page_bytes, start)
                if len(data) < page_bytes:  # a damaged log may name any page
                    continue
                room = _room(data, is_first=page == 1)
                if room is not None:
                    first, zeros = room
                    os.pwrite(self._file, zeros, start + first)
            os.fdatasync(self._file)
        finally:
            db.execute("ROLLBACK")
            db.execute("PRAGMA shrink_memory")  # pages in memory have the old rooms, and would be written with them
        self._pages.clear()
        return True

    def _logged(self) -> set[int]:
        """The pages that the log names, also those of frames that SQLite would not use any more."""
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
    """Run a checkpoint, and return whether all of the log is in the file."""
    try:
        is_busy, logged, done = db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return False
        raise
    return not is_busy and logged == done


def _room(page: bytes, is_first: bool) -> tuple[int, bytes] | None:
    """Where a page of a tree has room that is not zeros, and the zeros; None if there is nothing to do."""
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
