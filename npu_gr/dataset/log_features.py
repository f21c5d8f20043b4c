"""Features in the columns of a log: of the event, the request, or the user-item pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy.typing as npt

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import quoted
from npu_gr.dataset.cells import (
    JOINT,
    Cells,
    is_list_type,
    name_sql,
    number_sql,
    pa,
    pc,
    values_of,
    values_sql,
)
from npu_gr.dataset.columns import cells_of
from npu_gr.dataset.line_sources import Source
from npu_gr.history_store.interactions import DeclaredKind, LogFeatureOf

MAX_VALUE_BYTES = 512  # of a feature's cell; longer ones are descriptions
_KINDS = tuple(kind for kind in get_args(DeclaredKind) if kind)


def split_kind(text: str) -> tuple[str, DeclaredKind]:
    """Split `NAME:KIND`; without a known kind after the last colon, the text is the name."""
    name, _, kind = text.rpartition(":")
    return (name, kind) if name and kind in _KINDS else (text, "")  # type: ignore[return-value]


def kind_word(cells: Cells) -> str:
    """Return the kind of the values as in the manifest: "number", "one" or "many"."""
    return {"number": "number", "comma": "number", "text": "one"}.get(cells, "many")


def declared_cells(name: str, declared: DeclaredKind, array: Any, source: Source) -> Cells:
    """Find how cells hold values: by the declared kind, else by the first cells."""
    found = cells_of(name, array, source.types)
    if declared == "number":
        return found if found == "comma" else "number"
    return "text" if declared and found in ("number", "comma") else found


class LogFeature:
    """A column of the log that is a feature of the event, the request, or the user-item pair.

    Until it is written, a number is a float64 (NaN if missing) and a text is its code (-1 if
    missing).
    """

    def __init__(self, name: str, of: LogFeatureOf, declared: DeclaredKind, cells: Cells) -> None:
        self.name = name
        self.of = of
        self.declared = declared
        self.cells = cells

    @property
    def kind(self) -> str:
        """Kind of the values: "number", "one" or "many"."""
        return kind_word(self.cells)

    @property
    def arrow_type(self) -> Any:
        """Arrow type of the column in the dataset."""
        return {"number": pa.float64(), "one": pa.string(), "many": pa.list_(pa.string())}[
            self.kind
        ]

    def sql(self, column: str, kind: str) -> str:
        """Return the SQL that reads cells of a DuckDB type."""
        if self.cells == "comma":
            return number_sql(column, kind, has_comma=True)
        if self.cells == "number":
            return number_sql(column, kind, has_booleans=True)
        if self.cells == "list" and is_list_type(kind):
            return name_sql(values_sql(column), "VARCHAR")
        return name_sql(column, kind)

    def values(self, texts: Sequence[str]) -> Any:
        """Return the values by code, as an Arrow array of the dataset's type.

        Raises:
            DataError: a cell is too long.
        """
        if long := [text for text in texts if len(text.encode()) > MAX_VALUE_BYTES]:
            raise DataError(
                f"feature {quoted(self.name)}: {quoted(long[0], 40)} has {len(long[0].encode()):,} "
                f"bytes, the limit is {MAX_VALUE_BYTES}; drop the column from the features"
            )
        if self.kind == "one":
            return pa.array(texts, pa.string())
        lists = [
            text.split(JOINT) if self.cells == "list" else values_of(text, self.cells)
            for text in texts
        ]
        return pa.array(lists, pa.list_(pa.string()))

    def column(self, codes: npt.NDArray[Any], values: Any) -> Any:
        """Convert codes or numbers of rows to a column of the dataset, null where missing."""
        if self.kind == "number":
            return pa.array(codes, pa.float64(), from_pandas=True)
        return pc.take(values, pa.array(codes, pa.int32(), mask=codes < 0))


def log_features(
    columns: Mapping[str, Any],
    wanted: Mapping[LogFeatureOf, Sequence[str]],
    source: Source,
    kinds: Mapping[str, str],
) -> tuple[LogFeature, ...]:
    """Find the columns that are features.

    Args:
        columns: the first cells of all columns.
        wanted: "event", "request" or "cross" -> `NAME` or `NAME:KIND` of each column.
        source: The log.
        kinds: Kind of the values by name, where a dataset has decided it.

    Raises:
        DataError: there is no such column, or a name is given twice.
    """
    found: list[LogFeature] = []
    for of, names in wanted.items():
        for text in names:
            name, declared = split_kind(text)
            option = f"{source.name}: --{of}-features {name}"
            if name not in columns:
                raise DataError(
                    f"{option}: there is no such column; there are {', '.join(columns)}"
                )
            if name in (one.name for one in found):
                raise DataError(
                    f"{option}: it is a feature already; give a column to only one of "
                    "event, request and cross"
                )
            cells = declared_cells(name, declared, columns[name], source)
            if (kind := kinds.get(name, "")) and kind != kind_word(cells):
                cells = {"number": "number", "one": "text"}.get(kind, "bars")  # type: ignore[assignment]
            found.append(LogFeature(name, of, declared, cells))
    return tuple(found)
