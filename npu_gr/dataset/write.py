"""Write the files of a dataset: events sorted by user and time, names of users, and items with titles and features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.arrays import I64
from npu_gr.core.names import item_ids
from npu_gr.core.private import make_private
from npu_gr.dataset.actions import ActionKind, Actions
from npu_gr.dataset.arrow import pa, pq
from npu_gr.dataset.files import EVENTS, FEATURE, ITEMS, NUMBER, USERS
from npu_gr.dataset.items import ItemTable
from npu_gr.dataset.log_features import LogFeature
from npu_gr.dataset.names import LoggedItems
from npu_gr.dataset.source import OnProgress
from npu_gr.dataset.spill import Rows
from npu_gr.dataset.times import US_PER_S
from npu_gr.dataset.users import UserTable

GROUP_ROWS = 1 << 17  # of events.parquet; readers take one group at a time
_COMPRESSION = "zstd"


class EventCounts:
    """What is counted while events are written."""

    def __init__(self, num_actions: int) -> None:
        self._of_action = np.zeros(num_actions, np.int64)
        self._digest = xxhash.xxh3_128()
        self.num_duplicates = 0
        self.first_time = int(np.iinfo(np.int64).max)
        self.last_time = 0

    def add(self, columns: list[Any], actions: I64, times: I64) -> None:
        """Count some events, of which there is one at least."""
        for column in columns:
            self._digest.update(column)
        self._of_action += np.bincount(actions, minlength=len(self._of_action))
        self.first_time = min(self.first_time, int(times.min()))
        self.last_time = max(self.last_time, int(times.max()))

    @property
    def of_action(self) -> list[int]:
        """Events of each action."""
        counts: list[int] = self._of_action.tolist()
        return counts

    @property
    def digest(self) -> str:
        """Of all events."""
        return self._digest.hexdigest()


class ItemCounts(NamedTuple):
    """Items by what is known of them; in the manifest."""

    all: int  # of the log and of the items' file
    with_events: int
    with_title: int
    without_row: int  # of the log, and not in the items' file
    without_events: int  # in the items' file only


def write_events(
    folder: Path,
    parts: Iterator[Rows],
    actions: Actions,
    features: Sequence[LogFeature],
    *,
    keep_duplicates: bool,
    num_rows: int,
    show: OnProgress,
) -> EventCounts:
    """Write the events.

    Args:
        folder: to write into.
        parts: rows, each part sorted by user and time.
        actions: what the codes and values of the rows mean.
        features: of the rows.
        keep_duplicates: keep rows that are equal in everything, rather than the first of them.
        num_rows: of all parts.
        show: called with the progress.

    Raises:
        DataError: a value of a feature is too long.
        OSError: the file cannot be written.
    """
    has_value = actions.kind in (ActionKind.RATINGS, ActionKind.BUCKETS)
    fields = [("user", pa.int32()), ("item", pa.int64()), ("action", pa.int16()), ("time", pa.int64())]
    if has_value:
        fields.append(("value", pa.float64()))
    of_features = [(FEATURE + one.name, one.arrow_type) for one in features]
    schema = pa.schema([*fields, *of_features])
    values = [None if one.kind == "number" else one.values() for one in features]
    counts = EventCounts(len(actions.names))
    path = folder / EVENTS
    make_private(path)
    done = 0
    with path.open("wb") as file, pq.ParquetWriter(file, schema, compression=_COMPRESSION) as writer:
        for rows in _grouped(_distinct(part, counts, keep_duplicates) for part in parts):
            action = actions.of(rows)
            time = rows["time_us"] // US_PER_S
            columns = [rows["user"], rows["item"], action.astype(np.int16), time, rows["value"]][: len(fields)]
            columns += [rows[f"f{place}"] for place in range(len(features))]
            columns = [np.ascontiguousarray(column) for column in columns]
            counts.add(columns, action, time)
            arrays = [pa.array(column) for column in columns[: len(fields)]]
            for one, known, cells in zip(features, values, columns[len(fields) :], strict=True):
                arrays.append(one.column(cells, known))
            writer.write_table(pa.table(arrays, schema=schema))
            done += len(rows)
            show(done / num_rows)
    show(1.0)
    return counts


def write_users(folder: Path, names: list[str], table: UserTable | None) -> int:
    """Write the names and features of users by code.

    Returns:
        How many of them the users' file lacks.
    """
    listed = table.rows if table else {}
    rows = [listed.get(name) for name in names]
    columns: dict[str, Any] = {"name": pa.array(names, pa.string())}
    types = {"number": pa.float64(), "one": pa.string(), "many": pa.list_(pa.string())}
    for feature in table.features if table else ():
        values = [None if row is None else feature.values[row] for row in rows]
        columns[FEATURE + feature.name] = pa.array(values, types[feature.kind])
    path = folder / USERS
    make_private(path)
    with path.open("wb") as file:
        pq.write_table(pa.table(columns), file, compression=_COMPRESSION)
    return sum(row is None for row in rows) if table else 0


def write_items(folder: Path, logged: LoggedItems, table: ItemTable | None) -> ItemCounts:
    """Write the items of the log and of the items' file, by id.

    Raises:
        DataError: two names share an id.
        OSError: the file cannot be written.
    """
    listed = table.rows if table else {}
    names = logged.names() + [name for name in listed if name not in logged]
    rows = [listed.get(name) for name in names]
    titles = ["" if table is None or row is None else table.titles[row] for row in rows]
    ids = ItemNames.make(names, titles).ids  # refuses two names with the same id
    by_id = np.argsort(item_ids(names), kind="stable").tolist()
    columns: dict[str, Any] = {
        "id": pa.array(ids),
        "name": pa.array([names[place] for place in by_id], pa.string()),
        "title": pa.array([titles[place] for place in by_id], pa.string()),
    }
    for feature in table.features if table else ():
        cells = [[] if (row := rows[place]) is None else feature.cells[row] for place in by_id]
        if feature.kind == "many":
            columns[FEATURE + feature.column] = pa.array(cells, pa.list_(pa.string()))
        else:
            columns[FEATURE + feature.column] = pa.array([cell[0] if cell else None for cell in cells], pa.string())
        if feature.numbers:
            own = [None if (row := rows[place]) is None else feature.numbers[row] for place in by_id]
            columns[NUMBER + feature.column] = pa.array(own, pa.float64())
    pq.write_table(pa.table(columns), folder / ITEMS, compression=_COMPRESSION)
    return ItemCounts(
        all=len(names),
        with_events=len(logged),
        with_title=sum(map(bool, titles)),
        without_row=sum(row is None for row in rows) if table else 0,
        without_events=len(names) - len(logged),
    )


def _distinct(rows: Rows, counts: EventCounts, keep_duplicates: bool) -> Rows:
    """Count rows that are equal to an earlier one in everything, and leave them out."""
    last = ("value", "action", "item", "time_us", "user")
    names = [name for name in rows.dtype.names or () if name not in last]
    order = np.lexsort([rows[name] for name in (*names, *last)])
    is_equal = np.ones(max(0, len(rows) - 1), np.bool_)
    for name in (*names, *last):
        column = rows[name][order]
        is_equal &= (column[1:] == column[:-1]) | ((column[1:] != column[1:]) & (column[:-1] != column[:-1]))  # NaN
    is_again = np.zeros(len(rows), np.bool_)
    is_again[order[1:]] = is_equal
    counts.num_duplicates += int(is_again.sum())
    return rows if keep_duplicates else rows[~is_again]


def _grouped(parts: Iterator[Rows]) -> Iterator[Rows]:
    """Join small parts, and cut large ones, into groups of `GROUP_ROWS` rows; the last one is smaller, none empty."""
    waiting: list[Rows] = []
    num_waiting = 0
    for rows in parts:
        waiting.append(rows)
        num_waiting += len(rows)
        if num_waiting >= GROUP_ROWS:
            whole = np.concatenate(waiting)
            cut = num_waiting // GROUP_ROWS * GROUP_ROWS
            for at in range(0, cut, GROUP_ROWS):
                yield whole[at : at + GROUP_ROWS]
            waiting = [whole[cut:]]
            num_waiting -= cut
    if num_waiting:
        yield np.concatenate(waiting)
