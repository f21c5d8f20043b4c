"""Folders named `dt=2024-03-01`: each such name is a column of the files in the folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from npu_gr.core.errors import DataError
from npu_gr.dataset.cells import literal, pa
from npu_gr.dataset.line_sources import Mended, Relation, Source
from npu_gr.dataset.lines import OnProgress

_MISSING = "__HIVE_DEFAULT_PARTITION__"
Values = Mapping[str, str | None]
"""Column -> value, of the folders of one file."""


def partitions(paths: Sequence[Path]) -> list[Values]:
    """Return the columns that the folders of each file name; [] = there are none.

    Args:
        paths: Files of the log.

    Raises:
        DataError: not all files have the same columns.
    """
    found: list[Values] = [_values(path) for path in paths]
    if len({tuple(values) for values in found}) > 1:
        raise DataError(
            f"{paths[0]}: not all files are in folders such as {next(filter(None, found))}; "
            "prepare only files of one layout together"
        )
    return found if found and found[0] else []


def _values(path: Path) -> dict[str, str | None]:
    parts = (part.partition("=") for part in path.parent.parts)
    return {
        name: None if value == _MISSING else unquote(value) for name, mark, value in parts if mark
    }


class Partitioned(Source):
    """A source with columns that are named by folders."""

    def __init__(self, inner: Source, values: Sequence[Values]) -> None:
        """Add columns to a source; a column that its files have already is theirs.

        Args:
            inner: The source.
            values: Columns of each of its files.
        """
        super().__init__(inner.name, inner.paths)
        own = inner.sample
        self.inner = inner
        self._values = [
            {name: value for name, value in one.items() if name not in own} for one in values
        ]
        self.place, self.format = inner.place, inner.format
        self.first_number, self.types = inner.first_number, inner.types
        self.notes, self.positive = inner.notes, inner.positive

    def _read_sample(self) -> dict[str, Any]:
        found = dict(self.inner.sample)
        size = len(next(iter(found.values())))
        for name in self._values[0]:
            every = cycle([one[name] for one in self._values])
            found[name] = pa.array(islice(every, max(size, len(self._values))), pa.string())
        return found

    def kinds(self, columns: Sequence[str]) -> list[str]:
        """Return the types of the source; a folder's name is VARCHAR."""
        kinds = dict(zip(own := self._own(columns), self.inner.kinds(own), strict=True))
        return [kinds.get(name, "VARCHAR") for name in columns]

    def line_sql(self, columns: Sequence[str]) -> str:
        """Return the SQL of a row's text."""
        if (line := self.inner.line_sql([])) == "line":
            return line
        named = ", ".join(f"{literal(name)}: c{n}" for n, name in enumerate(columns))
        return f"CAST(to_json({{{named}}}) AS VARCHAR)"

    def relations(
        self, con: Any, path: Path, columns: Sequence[str], show: OnProgress
    ) -> Iterator[Relation]:
        """Read a file, and add the columns of its folders."""
        self.inner.memory_mb = self.memory_mb
        own, values = self._own(columns), self._values[self.paths.index(path)]
        cells = []
        for n, name in enumerate(columns):
            value = values.get(name)
            text = "CAST(NULL AS VARCHAR)" if value is None else literal(value)
            cells.append(f"{f'c{own.index(name)}' if name in own else text} AS c{n}")
        line = ", line" if self.inner.line_sql([]) == "line" else ""
        for one in self.inner.relations(con, path, own, show):
            sql = f"SELECT {', '.join(cells)}, state{line} FROM ({one.sql})"
            yield Relation(sql, one.failed)

    def mend(
        self, path: Path, unsure: Iterator[tuple[int, str]], columns: Sequence[str]
    ) -> Iterator[Mended]:
        """Parse rows that DuckDB was unsure of."""
        own, values = self._own(columns), self._values[self.paths.index(path)]
        for row in self.inner.mend(path, unsure, own):
            if row.cells is None:
                yield row
                continue
            cells = dict(zip(own, row.cells, strict=True))
            yield row._replace(cells=[cells.get(name, values.get(name)) for name in columns])

    def _own(self, columns: Sequence[str]) -> list[str]:
        return [name for name in columns if name not in self._values[0]]
