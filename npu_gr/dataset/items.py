"""A file of items: the title of each, and its other columns as categorical features.

    text, whole numbers   a value each, if there are few enough distinct ones
    lists, token_seq, and texts with "|"   many values an item
    numbers with fractions, and many distinct whole numbers   ranges with equally many items ("price<=9.99")

A column with too many values, or with a value of its own for nearly every item, says nothing that the item's id does
not say; it is left out and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.core.names import MAX_NAME_BYTES
from npu_gr.core.words import quoted
from npu_gr.dataset.actions import bucket_edges, bucket_names, bucket_of
from npu_gr.dataset.cells import Cells, cells_of, number_of, plain_text, values_of
from npu_gr.dataset.columns import Column, choose_item_columns
from npu_gr.dataset.names import has_point, texts_of, too_long
from npu_gr.dataset.rejects import OnReject, RejectReason
from npu_gr.dataset.source import OnProgress, RowBatch, Source

MAX_VALUES = 1000  # distinct ones of a feature
MAX_VALUE_CHARS = 64  # longer texts are descriptions
MAX_TITLE_CHARS = 256
BUCKETS = 10
_MIN_DISTINCT = 20  # numbers with at most so many distinct values are categories
_OWN = 0.5  # share of distinct values among items over which a column names items rather than describes them


@dataclass(frozen=True, slots=True)
class ItemColumn:
    """A column of the items' file as a feature."""

    column: str
    kind: str  # "one", "many" or "buckets"; in the manifest
    cells: list[list[str]]  # values of each item
    numbers: list[float | None] = field(default_factory=list)  # of each item, where the values are ranges of them


@dataclass(slots=True, kw_only=True)
class ItemTable:
    """What the file says of each item. n = items; of one that is listed twice the last row counts."""

    key: Column
    title: Column | None
    num_again: int = 0  # rows of an item that an earlier one names
    rows: dict[str, int] = field(default_factory=dict)  # name -> place in the lists below
    titles: list[str] = field(default_factory=list)
    features: list[ItemColumn] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # column -> why


def read_items(
    source: Source,
    told: dict[str, str],
    log_item: str,
    wanted: Sequence[str] | None,
    on_reject: OnReject,
    on_progress: OnProgress,
) -> ItemTable:
    """Read a file of items; it must fit in memory, as its items do later.

    Args:
        source: the file.
        told: "item" and "title" -> name of a column.
        log_item: name of the log's column of items.
        wanted: columns that become features; None = all that can.
        on_reject: called for rows without an item.
        on_progress: called as the file is read.

    Raises:
        DataError: no column, or more than one, looks like the item; or a wanted one is missing or cannot be used.
    """
    sample = source.sample()
    key, title = choose_item_columns(sample.columns, told, log_item, source.name)
    others = [name for name in sample.columns if name != key.name and (title is None or name != title.name)]
    if wanted is not None:
        if missing := [name for name in wanted if name not in sample.columns]:
            raise DataError(
                f"{source.name}: --features {missing[0]}: there is no such column; there are {', '.join(others)}"
            )
        others = list(dict.fromkeys(wanted))
    kinds = {name: cells_of(name, sample.columns[name], source) for name in others}
    with_point = has_point(sample.columns[key.name])
    table = ItemTable(key=key, title=title)
    cells: dict[str, list[Any]] = {name: [] for name in others}
    columns = list(dict.fromkeys([key.name, *([title.name] if title else []), *others]))
    for batch in source.batches(columns, on_reject, on_progress):
        for row, name in _names(batch, key.name, with_point, on_reject):
            at = table.rows.setdefault(name, len(table.rows))
            if at == len(table.titles):
                table.titles.append("")
                for column in cells.values():
                    column.append(None)
            else:
                table.num_again += 1
            if title is not None:
                table.titles[at] = (plain_text(batch.columns[title.name][row].as_py()) or "")[:MAX_TITLE_CHARS]
            for column_name, column in cells.items():
                column[at] = batch.columns[column_name][row].as_py()
    for name in others:
        found = _feature(name, kinds[name], cells.pop(name), is_wanted=wanted is not None)
        if isinstance(found, ItemColumn):
            table.features.append(found)
        elif wanted is not None:
            raise DataError(f"{source.name}: --features {name}: {found}")
        else:
            table.left_out[name] = found
    return table


def _names(batch: RowBatch, key: str, with_point: bool, on_reject: OnReject) -> Iterator[tuple[int, str]]:
    encoded, is_missing = texts_of(batch.columns[key], with_point=with_point)
    is_long = too_long(encoded, MAX_NAME_BYTES, in_bytes=True)
    for row, name in enumerate(encoded.to_pylist()):
        if is_missing[row] or is_long[row]:
            reason = RejectReason.NO_ITEM if is_missing[row] else RejectReason.LONG_ITEM
            on_reject(int(batch.numbers[row]), reason, batch.text(row))
        else:
            yield row, name


def _feature(name: str, kind: Cells, cells: list[Any], *, is_wanted: bool) -> ItemColumn | str:
    """Make a feature of a column's cells, or say why not."""
    if kind == "number":
        numbers = [number_of(cell) for cell in cells]
        distinct = {number for number in numbers if number is not None}
        has_fraction = any(number != int(number) for number in distinct)
        if len(distinct) > _MIN_DISTINCT and (has_fraction or len(distinct) > MAX_VALUES or _is_own(distinct, numbers)):
            return _buckets(name, numbers)
    values = [values_of(cell, kind) for cell in cells]
    counts = Counter(value for row in values for value in set(row))
    if not counts:
        return "empty"
    if len(counts) > MAX_VALUES:
        return f"{len(counts):,} distinct values, over {MAX_VALUES:,}"
    if not is_wanted and len(counts) > _MIN_DISTINCT and len(counts) > _OWN * sum(map(bool, values)):
        return f"{len(counts):,} distinct values for {sum(map(bool, values)):,} items: nearly a name of each"
    if any(len(value) > MAX_VALUE_CHARS for value in counts):
        return f"a value has over {MAX_VALUE_CHARS} characters"
    if not is_wanted and len(counts) == 1 and all(values):
        return f"the same for all items: {quoted(next(iter(counts)))}"
    return ItemColumn(name, "one" if kind in ("text", "number") else "many", values)


def _is_own(distinct: set[float], numbers: Sequence[float | None]) -> bool:
    return len(distinct) > _OWN * sum(number is not None for number in numbers)


def _buckets(name: str, numbers: Sequence[float | None]) -> ItemColumn:
    edges = bucket_edges(np.array([number for number in numbers if number is not None]), BUCKETS)
    names = bucket_names(name, edges)
    filled = np.array([np.inf if number is None else number for number in numbers])
    places = bucket_of(filled, edges).tolist()
    cells = [[] if number is None else [names[at]] for number, at in zip(numbers, places, strict=True)]
    return ItemColumn(name, "buckets", cells, list(numbers))
