"""Columns of a log that are features: of what happened, of the request, or of the user and the item together.

    text, token            a value
    lists, token_seq, "|"  many values
    numbers                numbers; `NAME:category` makes names of them

On its way through the spill a number is a float64 with NaN where it is missing; a text is the code of what its cell
says, -1 where it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from npu_gr.core.errors import DataError
from npu_gr.core.words import quoted
from npu_gr.dataset.arrow import as_numbers, pa, pc
from npu_gr.dataset.cells import Cells, cells_of, values_of
from npu_gr.dataset.names import Codes, codes_of, texts_of
from npu_gr.dataset.source import Source
from npu_gr.features.interactions import FeatureColumn, LogFeatureOf, ToldKind

MAX_VALUE_BYTES = 512  # of a cell; longer ones are descriptions
_JOINT = "\x1f"  # between the values of a list
_TOLD = tuple(kind for kind in get_args(ToldKind) if kind)


def split_kind(text: str) -> tuple[str, ToldKind]:
    """Read `NAME` or `NAME:KIND`; a name with a colon and no kind after it is a name."""
    name, _, kind = text.rpartition(":")
    return (name, kind) if name and kind in _TOLD else (text, "")  # type: ignore[return-value]


def kind_word(cells: Cells) -> str:
    """Say what the values are: "number", "one" or "many"; in the manifest."""
    return {"number": "number", "text": "one"}.get(cells, "many")


def told_cells(name: str, told: ToldKind, array: Any, source: Source) -> Cells:
    """Find out how cells hold values, as their owner or their looks say."""
    if told == "number":
        return "number"
    found = cells_of(name, array, source)
    return "text" if told and found == "number" else found


class LogFeature:
    """One of these columns, and every text that came."""

    def __init__(self, name: str, of: LogFeatureOf, told: ToldKind, cells: Cells) -> None:
        self.name = name
        self.of = of
        self.told = told
        self._cells = cells
        self._texts = Codes()

    @property
    def kind(self) -> str:
        """What the values are: "number", "one" or "many"."""
        return kind_word(self._cells)

    @property
    def dtype(self) -> str:
        """Of the numbers that rows hold."""
        return "<f8" if self._cells == "number" else "<i4"

    @property
    def arrow_type(self) -> Any:
        """Of the column in the dataset."""
        return {"number": pa.float64(), "one": pa.string(), "many": pa.list_(pa.string())}[self.kind]

    def read(self, array: Any) -> npt.NDArray[Any]:
        """Translate cells into what rows hold."""
        if self._cells == "number":
            return np.asarray(pc.fill_null(as_numbers(array), np.nan).to_numpy(zero_copy_only=False))
        if self._cells == "list":
            array = pa.array([_JOINT.join(values_of(cell, "list")) for cell in array.to_pylist()], pa.string())
        return codes_of(texts_of(array)[0], self._texts.code)

    def values(self) -> Any:
        """The column's values by code, as the dataset holds them.

        Raises:
            DataError: a cell is too long.
        """
        texts = self._texts.names()
        if too_long := [text for text in texts if len(text.encode()) > MAX_VALUE_BYTES]:
            raise DataError(
                f"feature {quoted(self.name)}: {quoted(too_long[0], 40)} has {len(too_long[0].encode()):,} bytes, the "
                f"limit is {MAX_VALUE_BYTES}: it describes rather than names"
            )
        if self.kind == "one":
            return pa.array(texts, pa.string())
        lists = [text.split(_JOINT) if self._cells == "list" else values_of(text, self._cells) for text in texts]
        return pa.array(lists, pa.list_(pa.string()))

    def column(self, cells: npt.NDArray[Any], values: Any) -> Any:
        """Translate what rows hold into a column of the dataset, null where it is missing.

        Args:
            cells: of some rows.
            values: as `values` has them; of numbers nothing.
        """
        if self._cells == "number":
            return pa.array(cells, pa.float64(), from_pandas=True)
        return pc.take(values, pa.array(cells, pa.int32(), mask=cells < 0))


def log_features(
    columns: Mapping[str, Any], wanted: Mapping[LogFeatureOf, Sequence[str]], source: Source
) -> tuple[LogFeature, ...]:
    """Choose the columns that are features.

    Args:
        columns: the first cells of all columns.
        wanted: what each feature is of -> `NAME` or `NAME:KIND` of each.
        source: the log.

    Raises:
        DataError: there is no such column, or a name stands twice.
    """
    found: list[LogFeature] = []
    for of, names in wanted.items():
        for text in names:
            name, told = split_kind(text)
            option = f"{source.name}: --{of}-features {name}"
            if name not in columns:
                raise DataError(f"{option}: there is no such column; there are {', '.join(columns)}")
            if name in (one.name for one in found):
                raise DataError(f"{option}: it is a feature already; a column is one of the event, request or cross")
            found.append(LogFeature(name, of, told, told_cells(name, told, columns[name], source)))
    return tuple(found)


def check_names(found: Sequence[LogFeature], users: Sequence[str], items: Sequence[str]) -> None:
    """Check that no two features have one name, whatever they are of.

    Raises:
        DataError: two have.
    """
    seen: set[str] = set()
    for name in (*(one.name for one in found), *users, *items):
        if name in seen:
            raise DataError(f"two features have the name {quoted(name)}; rename a column, or leave one out")
        seen.add(name)


def read_column(name: str, of: LogFeatureOf, told: ToldKind, column: Any) -> FeatureColumn:
    """Read a column of a dataset.

    Args:
        name: of the feature.
        of: what it is of.
        told: its kind, if its owner said it.
        column: arrow column of numbers, texts, or lists of texts.
    """
    whole = column.combine_chunks()
    if pa.types.is_floating(whole.type):
        values = pc.fill_null(whole, np.nan).to_numpy(zero_copy_only=False)
    else:
        values = np.fromiter(whole.to_pylist(), np.object_, len(whole))
    return FeatureColumn(name=name, of=of, values=values, kind=told)
