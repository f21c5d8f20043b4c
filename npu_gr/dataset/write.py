"""Write the files of a dataset: events by user and time, users, and items with features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.arrays import I64
from npu_gr.core.file_permissions import make_private
from npu_gr.core.names import item_ids
from npu_gr.dataset.actions import ActionKind, Actions
from npu_gr.dataset.cells import pa, pq
from npu_gr.dataset.files import FEATURE, ITEMS, NUMBER, POSITION, USERS
from npu_gr.dataset.lines import OnProgress
from npu_gr.dataset.logs import Log, Rows
from npu_gr.dataset.side import ItemTable, UserTable
from npu_gr.dataset.times import US_PER_S

GROUP_ROWS = 1 << 17  # per row group of events.parquet; readers load one group at a time
COMPRESSION = "zstd"


class EventCounts:
    """Counts and the digest of the written events."""

    def __init__(self, num_actions: int) -> None:
        self._of_action = np.zeros(num_actions, np.int64)
        self._digest = xxhash.xxh3_128()
        self.num_duplicates = 0
        self.first_time = int(np.iinfo(np.int64).max)
        self.last_time = 0

    def add(self, columns: list[Any], actions: I64, times: I64) -> None:
        """Count some events, at least one."""
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
        """xxh3 digest of all events, hexadecimal."""
        return self._digest.hexdigest()


class ItemCounts(NamedTuple):
    """Counts of items, in the manifest."""

    all: int  # of the log and of the items' file
    with_events: int
    with_title: int
    without_row: int  # of the log, and not in the items' file
    without_events: int  # in the items' file only


def write_events(
    path: Path, log: Log, actions: Actions, *, keep_duplicates: bool, show: OnProgress
) -> EventCounts:
    """Write the events.

    Args:
        path: File to write.
        log: The loaded log.
        actions: The actions of its rows.
        keep_duplicates: Keep rows that are equal in all columns; else only the first of them.
        show: Callback for the progress.

    Raises:
        OSError: the file cannot be written.
    """
    features = log.features
    has_value = actions.kind in (ActionKind.RATINGS, ActionKind.BUCKETS)
    fields = [
        ("user", pa.int32()),
        ("item", pa.int64()),
        ("action", pa.int16()),
        ("time", pa.int64()),
    ]
    if has_value:
        fields.append(("value", pa.float64()))
    if log.position is not None:
        fields.append((POSITION, pa.int16()))
    of_features = [(FEATURE + one.name, one.arrow_type) for one in features]
    schema = pa.schema([*fields, *of_features])
    counts = EventCounts(len(actions.names))
    make_private(path)
    done = 0
    with (
        path.open("wb") as file,
        pq.ParquetWriter(file, schema, compression=COMPRESSION) as writer,
        ThreadPoolExecutor(1) as compressor,  # compresses a group while DuckDB reads the next one
    ):
        packing: Future[None] | None = None
        for rows in _grouped(_distinct(log.sorted_rows(), counts, keep_duplicates)):
            action = actions.of(rows)
            time = rows["time_us"] // US_PER_S
            columns = [rows["user"], rows["item"], action.astype(np.int16), time]
            columns += [rows["value"]] if has_value else []
            columns += [rows[POSITION]] if log.position is not None else []
            columns += [rows[f"f{place}"] for place in range(len(features))]
            columns = [np.ascontiguousarray(column) for column in columns]
            counts.add(columns, action, time)
            arrays = [pa.array(column) for column in columns[: len(fields)]]
            for one, known, cells in zip(
                features, log.feature_values, columns[len(fields) :], strict=True
            ):
                arrays.append(one.column(cells, known))
            if packing is not None:
                packing.result()
            packing = compressor.submit(writer.write_table, pa.table(arrays, schema=schema))
            done += len(action)
            show(done / log.num_rows)
        if packing is not None:
            packing.result()
    show(1.0)
    return counts


def write_users(folder: Path, names: Any, table: UserTable | None, earlier: Any = None) -> int:
    """Write the names and features of users by code.

    Args:
        folder: Output folder.
        names: Names of all users, an Arrow array.
        table: The users' file.
        earlier: Table of the first of these users, whose features stay where there is no file.

    Returns:
        The number of users without a row in the users' file.
    """
    rows = [table.rows.get(name) for name in names.to_pylist()] if table else []
    columns: dict[str, Any] = {"name": names}
    types = {"number": pa.float64(), "one": pa.string(), "many": pa.list_(pa.string())}
    for feature in table.features if table else ():
        values = [None if row is None else feature.values[row] for row in rows]
        columns[FEATURE + feature.name] = pa.array(values, types[feature.kind])
    found = pa.table(columns)
    if table is None and earlier is not None:
        new = found.slice(len(earlier))
        found = pa.concat_tables([earlier, new], promote_options="default").combine_chunks()
    write_private(found, folder / USERS)
    return sum(row is None for row in rows)


def write_private(table: Any, path: Path) -> None:
    """Write a table that only the owner may read."""
    make_private(path)
    with path.open("wb") as file:
        pq.write_table(table, file, compression=COMPRESSION)


def write_items(
    folder: Path,
    logged: Sequence[str],
    table: ItemTable,
    key: bytes,
) -> ItemCounts:
    """Write the items of the log and of the items' file, by id.

    Args:
        folder: Folder of the dataset.
        logged: Names of the log's items.
        table: Rows of the items' file, or what the log says of its items.
        key: Key of the items' ids.

    Raises:
        OSError: the file cannot be written.
    """
    listed = table.rows
    of_log = set(logged)
    names = [*logged, *(name for name in listed if name not in of_log)]
    rows = [listed.get(name) for name in names]
    titles = ["" if row is None else table.titles[row] for row in rows]
    ids = item_ids(names, key)
    by_id = np.argsort(ids).tolist()
    columns: dict[str, Any] = {
        "id": pa.array(ids[by_id]),
        "name": pa.array([names[place] for place in by_id], pa.string()),
        "title": pa.array([titles[place] for place in by_id], pa.string()),
    }
    for feature in table.features:
        cells = [[] if (row := rows[place]) is None else feature.cells[row] for place in by_id]
        if feature.kind == "many":
            columns[FEATURE + feature.column] = pa.array(cells, pa.list_(pa.string()))
        else:
            columns[FEATURE + feature.column] = pa.array(
                [cell[0] if cell else None for cell in cells], pa.string()
            )
        if feature.numbers:
            own = [
                None if (row := rows[place]) is None else feature.numbers[row] for place in by_id
            ]
            columns[NUMBER + feature.column] = pa.array(own, pa.float64())
    pq.write_table(pa.table(columns), folder / ITEMS, compression=COMPRESSION)
    return ItemCounts(
        all=len(names),
        with_events=len(logged),
        with_title=sum(map(bool, titles)),
        without_row=sum(row is None for row in rows),
        without_events=len(names) - len(logged),
    )


def _distinct(parts: Iterable[Rows], counts: EventCounts, keep_duplicates: bool) -> Iterator[Rows]:
    """Count rows that are equal to an earlier one in all columns, and drop them."""
    for rows in _by_second(parts):
        is_again = _is_again(rows)
        counts.num_duplicates += int(is_again.sum())
        yield rows if keep_duplicates or not is_again.any() else _of(rows, ~is_again)


def _by_second(parts: Iterable[Rows]) -> Iterator[Rows]:
    """Repartition rows so that rows of the same user and time are in the same part."""
    waiting: list[Rows] = []
    for rows in parts:
        is_new = np.flatnonzero(_changes(rows))
        if not len(is_new):
            waiting.append(rows)
            continue
        cut = int(is_new[-1]) + 1
        yield _joined([*waiting, _of(rows, slice(cut))])
        waiting = [_of(rows, slice(cut, None))]
    if waiting:
        yield _joined(waiting)


def _changes(rows: Rows) -> npt.NDArray[np.bool_]:
    """Whether user or time changes after each row: bool [n - 1]."""
    user, time = rows["user"], rows["time_us"]
    changes: npt.NDArray[np.bool_] = (user[1:] != user[:-1]) | (time[1:] != time[:-1])
    return changes


def _is_again(rows: Rows) -> npt.NDArray[np.bool_]:
    """Whether each row is equal to an earlier one in all columns: bool [n].

    Rows are sorted by user and time.
    """
    is_tie = np.zeros(len(rows["user"]), np.bool_)
    is_same = ~_changes(rows)
    is_tie[1:] |= is_same
    is_tie[:-1] |= is_same
    ties = np.flatnonzero(is_tie)
    last = ("time_us", "user")
    names = [*(name for name in rows if name not in last), *last]
    order = ties[np.lexsort([rows[name][ties] for name in names])] if len(ties) else ties
    is_equal = np.ones(max(0, len(order) - 1), np.bool_)
    for name in names:
        column = rows[name][order]
        # NaN is equal to NaN here
        is_equal &= (column[1:] == column[:-1]) | (
            (column[1:] != column[1:]) & (column[:-1] != column[:-1])
        )
    is_again = np.zeros(len(is_tie), np.bool_)
    is_again[order[1:]] = is_equal
    return is_again


def _grouped(parts: Iterator[Rows]) -> Iterator[Rows]:
    """Join and split parts into groups of `GROUP_ROWS` rows; only the last may be smaller."""
    waiting: list[Rows] = []
    num_waiting = 0
    for rows in parts:
        waiting.append(rows)
        num_waiting += len(rows["user"])
        if num_waiting >= GROUP_ROWS:
            joined = _joined(waiting)
            cut = num_waiting // GROUP_ROWS * GROUP_ROWS
            for at in range(0, cut, GROUP_ROWS):
                yield _of(joined, slice(at, at + GROUP_ROWS))
            waiting = [_of(joined, slice(cut, None))]
            num_waiting -= cut
    if num_waiting:
        yield _joined(waiting)


def _joined(parts: Sequence[Rows]) -> Rows:
    return (
        parts[0]
        if len(parts) == 1
        else {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}
    )


def _of(rows: Rows, places: Any) -> Rows:
    return {name: column[places] for name, column in rows.items()}
