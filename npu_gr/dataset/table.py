"""Load a source into a DuckDB table, and collect its rejected rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from npu_gr.dataset.cells import duckdb, is_list_type, pa
from npu_gr.dataset.engine import duckdb_errors, raise_if_full
from npu_gr.dataset.line_sources import Mended, Source
from npu_gr.dataset.lines import OnProgress, json_column
from npu_gr.dataset.rejects import (
    CODES,
    MAX_ROW_CHARS,
    MAX_WRITTEN,
    UNSURE,
    RejectedRow,
    RejectReason,
    Rejects,
)

MENDED_ROWS = 20_000  # per insert
_POLL_S = 0.2


class SourceTable:
    """A source as a DuckDB view `name`, with the index `n` of each row over all files."""

    def __init__(
        self,
        con: Any,
        name: str,
        source: Source,
        columns: Sequence[str],
        wrap: Callable[[str], str],
    ) -> None:
        """Prepare the table; `load` reads the source.

        Args:
            con: Connection of DuckDB.
            name: Name of the view.
            columns: Columns of the source, which become the cells c0, c1, ...
            wrap: Function from the query of the cells to that of the table, which has every row
                with `reason` (its state, or why it is rejected) and `line`.
        """
        self._con = con
        self._name = name
        self._source = source
        self._columns = columns
        self._wrap = wrap
        self._starts: list[int] = []  # index of the first row of each file
        self._tables = [f"{name}_rows"]

    def load(self, show: OnProgress) -> None:
        """Read all files.

        Raises:
            DataError: a file cannot be read to its end.
            OSError: the disk is full.
        """
        con, name = self._con, self._name
        num_mended = 0
        for at, path in enumerate(self._source.paths):
            done = at / len(self._source.paths)
            share = 1 / len(self._source.paths)
            self._starts.append(self._num_rows() if at else 0)
            self._read(path, lambda ratio, done=done, share=share: show(done + ratio * share))  # type: ignore[misc]
            num_mended += self._mend(path)
        show(1.0)
        rows = f"SELECT rowid AS n, * FROM {name}_rows"
        if num_mended:
            self._tables.append(f"{name}_mended")
            con.execute(f"DELETE FROM {name}_rows WHERE rowid IN (SELECT n FROM {name}_gone)")
            rows += (
                f" UNION ALL SELECT p.n, m.* FROM {name}_mended m JOIN {name}_places p ON "
                "m.rowid = p.rowid"
            )
        con.execute(f"CREATE VIEW {name} AS {rows}")

    def reject(self, column: str, names: Sequence[str], reason: RejectReason) -> None:
        """Reject the rows that have one of the names in a column."""
        con = self._con
        con.register("rejected", pa.table({"name": pa.array(names, pa.string())}))
        for table in self._tables:
            con.execute(
                f"UPDATE {table} SET reason = {CODES[reason]}, line = left({column}, "
                f"{MAX_ROW_CHARS}) WHERE reason = 0 AND {column} IN (SELECT name FROM rejected)"
            )
        con.unregister("rejected")

    def take_rejects(self, rejects: Rejects) -> None:
        """Pass the rejected rows on."""
        con = self._con
        found = con.execute(
            f"SELECT reason, count(*), min(n) FROM {self._name} WHERE reason > 0 GROUP BY reason "
            "ORDER BY min(n)"
        ).fetchall()
        rows = con.execute(
            f"SELECT n, reason, line FROM {self._name} WHERE reason > 0 ORDER BY n LIMIT "
            f"{MAX_WRITTEN}"
        ).fetchall()
        rejects.take(
            ((reason, count, self._number(first)[1]) for reason, count, first in found),
            (RejectedRow(*self._number(n), reason, line) for n, reason, line in rows),
        )

    def _number(self, n: int) -> tuple[str, int]:
        """Return the file of a row, and the line or row number there."""
        at = bisect_right(self._starts, n) - 1
        name = str(self._source.paths[at]) if len(self._source.paths) > 1 else self._source.name
        return name, n - self._starts[at] + self._source.first_number

    def _num_rows(self) -> int:
        # Fetch all: an unfinished result blocks the next `register`.
        ((found,),) = self._con.execute(
            f"SELECT coalesce(max(rowid) + 1, 0) FROM {self._name}_rows"
        ).fetchall()
        return int(found)

    def _read(self, path: Path, show: OnProgress) -> None:
        con = self._con
        verb = (
            f"INSERT INTO {self._name}_rows"
            if len(self._starts) > 1
            else f"CREATE TABLE {self._name}_rows AS"
        )
        rejected: Exception | None = None
        with duckdb_errors(
            self._source.name if len(self._source.paths) == 1 else str(path), self._source.memory_mb
        ):
            for relation in self._source.relations(con, path, self._columns, show):
                try:
                    with _watched(con, show):
                        con.execute(f"{verb} {self._wrap(relation.sql)}")
                except duckdb.InterruptException:
                    raise
                except duckdb.Error as error:
                    raise_if_full(error)
                    if relation.failed:
                        raise relation.failed[0] from None
                    rejected = error
                else:
                    return
            if rejected is not None:
                raise rejected

    def _mend(self, path: Path) -> int:
        """Parse the rows that DuckDB was unsure of, and replace them; return their number."""
        cursor = self._con.cursor()
        start, first = self._starts[-1], self._source.first_number
        cursor.execute(
            f"SELECT rowid, line FROM {self._name}_rows WHERE reason = {UNSURE} AND rowid >= "
            f"{start} ORDER BY rowid"
        )
        unsure = (
            (n - start + first, line)
            for some in iter(lambda: cursor.fetchmany(1000), [])
            for n, line in some
        )
        num_mended = 0
        waiting: list[Mended] = []
        for row in self._source.mend(path, unsure, self._columns):
            waiting.append(row)
            num_mended += 1
            if len(waiting) == MENDED_ROWS:
                self._add(waiting)
                waiting.clear()
        if waiting:
            self._add(waiting)
        cursor.close()
        return num_mended

    def _add(self, mended: Sequence[Mended]) -> None:
        con, name = self._con, self._name
        start, first = self._starts[-1], self._source.first_number
        kinds = self._source.kinds(self._columns)
        empty = [None] * len(kinds)
        columns = zip(*(row.cells or empty for row in mended), strict=True)
        cells = {
            f"c{at}": json_column(list(column), is_list=is_list_type(kind))
            for at, (column, kind) in enumerate(zip(columns, kinds, strict=True))
        }
        states = [0 if row.reason is None else CODES[row.reason] for row in mended]
        lines = [row.text[:MAX_ROW_CHARS] for row in mended]
        table = {
            **cells,
            "state": pa.array(states, pa.int8()),
            "line": pa.array(lines, pa.string()),
        }
        places = [row.number - first + start for row in mended]
        gone = [
            n + more
            for n, row in zip(places, mended, strict=True)
            for more in range(row.num_more + 1)
        ]
        for of, found, columns_of in (
            (f"{name}_mended", table, self._wrap("SELECT * FROM more")),
            (f"{name}_places", {"n": pa.array(places, pa.int64())}, "SELECT * FROM more"),
            (f"{name}_gone", {"n": pa.array(gone, pa.int64())}, "SELECT * FROM more"),
        ):
            con.register("more", pa.table(found))
            with suppress(duckdb.CatalogException):
                con.execute(f"CREATE TABLE {of} AS {columns_of} LIMIT 0")
            con.execute(f"INSERT INTO {of} {columns_of}")
        con.unregister("more")


@contextmanager
def _watched(con: Any, show: OnProgress) -> Iterator[None]:
    """Report the progress of the query that the block runs."""
    is_done = Event()

    def watch() -> None:
        while not is_done.wait(_POLL_S):
            with suppress(duckdb.Error):
                if (percent := con.query_progress()) > 0:
                    show(min(percent / 100, 1.0))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
