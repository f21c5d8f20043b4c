"""Make a dataset of a company's log: `npu-gr prepare`, and `npu_gr.dataset.prepare` in Python.

    read     batch by batch: names to codes, times to microseconds; rows go to disk, parted by user
    sort     part by part: by time, without exact duplicates, into events.parquet
    publish  the finished folder takes the place of `out`

Memory does not grow with the rows, only with users and items. Disk: 32 bytes a row beside `out` until the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from npu_gr import __version__
from npu_gr.catalogue.item_names import ItemNames
from npu_gr.core.errors import DataError
from npu_gr.core.names import item_ids
from npu_gr.core.private import make_private
from npu_gr.core.words import quoted
from npu_gr.dataset.actions import (
    MAX_RATINGS,
    ONE,
    ActionKind,
    ValueSample,
    bucket_names,
    bucket_of,
    check_kind,
    in_order,
)
from npu_gr.dataset.arrow import as_numbers, pa, pc, pq
from npu_gr.dataset.aside import written_aside
from npu_gr.dataset.columns import MAX_EVENT_TYPES, Column, LogColumns, choose_log_columns
from npu_gr.dataset.files import (
    EVENTS,
    FEATURE,
    FORMAT,
    ITEMS,
    KIND,
    MANIFEST,
    REJECTED,
    USERS,
    Dataset,
    is_dataset,
    read_dataset,
)
from npu_gr.dataset.items import ItemTable, read_items
from npu_gr.dataset.json_rows import PLACE, NestedSource
from npu_gr.dataset.names import (
    EVENT_LIMIT,
    ITEM_LIMIT,
    USER_LIMIT,
    Codes,
    Items,
    codes_of,
    has_point,
    texts_of,
    too_long,
)
from npu_gr.dataset.rejects import CODES, Reason, Rejects
from npu_gr.dataset.source import Batch, Source
from npu_gr.dataset.sources import open_source
from npu_gr.dataset.spill import ROW, Rows, Spill
from npu_gr.dataset.tables import ArrowStream
from npu_gr.dataset.times import US_PER_S, TimeKind, recognise

GROUP_ROWS = 1 << 17  # of events.parquet; readers take one group at a time
FILES = (MANIFEST, EVENTS, USERS, ITEMS, REJECTED)
OnStage = Callable[[str, float], None]
"""Called with what is being done, and the share of it that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What is told rather than guessed. Names of columns: "" = guess, "none" = the log has none."""

    user: str = ""
    item: str = ""
    time: str = ""
    event: str = ""
    value: str = ""
    title: str = ""  # in the items' file
    items_key: str = ""  # the column of the item in the items' file
    features: tuple[str, ...] | None = None  # columns of the items' file; None = all that can be
    columns: tuple[str, ...] = ()  # names of the columns of a CSV or TSV without a header
    format: str = ""  # one of `sources.FORMATS`; "" = as the suffix says
    has_time: bool = True  # False: rows are in time order, and no column says when
    time_unit: str = ""  # s, ms, us, ns or iso
    time_format: str = ""  # as strptime has it
    num_buckets: int = 10  # of a continuous value
    keep_duplicates: bool = False
    max_rejected_ratio: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """What `prepare` made."""

    dataset: Dataset
    notes: list[str]  # what a person should know, a sentence each
    num_rejected: int

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest, as the folder has it."""
        return dict(self.dataset.manifest)


def ignore_stage(stage: str, ratio: float) -> None:
    """Take a progress and do nothing."""


def prepare(
    log: Path | str | ArrowStream,
    out: Path | str,
    options: PrepareOptions | None = None,
    *,
    items: Path | str | ArrowStream | None = None,
    on_stage: OnStage = ignore_stage,
) -> Prepared:
    """Make a dataset.

    Args:
        log: a file (CSV, TSV, Parquet, JSON, RecBole's atomic files, also packed), or a frame of pandas or polars.
        out: folder of the dataset. One that is there is replaced at the end, and its actions keep their places.
        options: what is told rather than guessed.
        items: a file or frame with titles and features of items.
        on_stage: called with the progress.

    Raises:
        DataError: the log cannot be read or understood; the message names the row or the option. What stood in `out`
            before still does.
    """
    out = Path(out)
    options = options or PrepareOptions()
    source = open_source(log, options.format, options.columns)
    item_source = open_source(items) if items is not None else None
    with written_aside(out, is_dataset, FILES) as folder:
        old = read_dataset(out).manifest if is_dataset(out) else None
        make_private(folder / REJECTED)
        with (folder / REJECTED).open("w", encoding="utf-8") as rejected:
            manifest, notes, num_rejected = _Build(source, item_source, options, folder, rejected, on_stage).run(
                old, out
            )
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return Prepared(dataset=read_dataset(out), notes=notes, num_rejected=num_rejected)


class _Build:
    """One run: the columns are chosen when it is made, `run` does the rest."""

    def __init__(
        self,
        source: Source,
        item_source: Source | None,
        options: PrepareOptions,
        folder: Path,
        rejected: IO[str],
        on_stage: OnStage,
    ) -> None:
        self._source = source
        self._item_source = item_source
        self._options = options
        self._folder = folder
        self._on_stage = on_stage
        self._rejects = Rejects(rejected, source.name, source.place)
        self._item_rejects = Rejects(rejected, item_source.name, item_source.place) if item_source else None
        self._users = Codes()
        self._items = Items()
        self._events = Codes()
        self._values = ValueSample()
        self._notes: list[str] = []
        self._num_rows = 0  # that are used
        sample = source.sample()
        self._columns = self._choose(sample)
        self._time_kind = self._recognise(sample)
        self._has_point = {
            name: has_point(sample.columns[name]) for name in (self._columns.user.name, self._columns.item.name)
        }

    def _choose(self, sample: Batch) -> LogColumns:
        options = self._options
        told = {"user": options.user, "item": options.item, "event": options.event, "value": options.value}
        told = {role: name for role, name in told.items() if name}
        if isinstance(self._source, NestedSource):
            columns = choose_log_columns(sample.columns, told, has_time=False, source=self._source.name)
            return LogColumns(
                user=columns.user,
                item=columns.item,
                time=Column(PLACE, "the place of an item in its user's list"),
                event=None,
                value=None,
            )
        if options.time:
            told["time"] = options.time
        return choose_log_columns(sample.columns, told, has_time=options.has_time, source=self._source.name)

    def _recognise(self, sample: Batch) -> TimeKind | None:
        time = self._columns.time
        if time is None:
            return None
        if isinstance(self._source, NestedSource):
            return TimeKind(unit="s", words="places in lists, taken as seconds", is_guess=False, least_us=0)
        name = f"{self._source.name}: {time.name}"
        return recognise(sample.columns[time.name], name, self._options.time_unit, self._options.time_format)

    def run(self, old: Any, out: Path) -> tuple[dict[str, Any], list[str], int]:
        """Read, sort and write; `old` is the manifest of the dataset in `out`, if there is one."""
        spill = Spill(self._folder / "spill")
        try:
            self._read(spill)
        finally:
            spill.close()
        self._check_rejected()
        kind, names, edges = self._actions(old, out)
        table = self._read_items()
        counted = self._write_events(spill, kind, names, edges)
        self._write_users()
        items = self._write_items(table)
        num_rejected = self._rejects.total + (self._item_rejects.total if self._item_rejects else 0)
        manifest = {
            "kind": KIND,
            "format": FORMAT,
            "made_by": f"npu_gr {__version__}",
            "log": {"name": self._source.name, "format": self._source.format},
            "columns": self._column_manifest(table),
            "times": self._time_kind.words if self._time_kind else "none: the place of a row in the log is its time",
            "actions": {
                "kind": kind,
                "names": names,
                "edges": edges,
                "events": counted.actions,
            },
            "events": counted.num_events,
            "users": len(self._users),
            "items": items,
            "first_time": counted.first_time,
            "last_time": counted.last_time,
            "duplicates": {"rows": counted.num_duplicates, "kept": self._options.keep_duplicates},
            "rejected": self._rejects.as_dict(),
            "rejected_items": self._item_rejects.as_dict() if self._item_rejects else {},
            "features": [{"name": one.column, "kind": one.kind} for one in (table.features if table else ())],
            "left_out": table.left_out if table else {},
            "notes": self._notes,
        }
        return manifest, self._notes, num_rejected

    def _read(self, spill: Spill) -> None:
        def on_progress(ratio: float) -> None:
            self._on_stage("reading", ratio)

        for batch in self._source.batches(self._columns.names(), self._rejects.add, on_progress):
            if len(batch.numbers):
                spill.add(self._rows(batch))
        self._on_stage("reading", 1.0)

    def _rows(self, batch: Batch) -> Rows:
        """Translate the rows of a batch that can be used; reject the others."""
        columns = self._columns
        num_rows = len(batch.numbers)
        reasons = np.zeros(num_rows, np.int8)
        value = np.zeros(num_rows)
        event = None
        if columns.event is not None:
            event = self._names(batch, columns.event, reasons, Reason.NO_EVENT, EVENT_LIMIT)
        elif columns.value is not None:
            value = _numbers(batch.columns[columns.value.name], reasons)
        if self._time_kind is None or columns.time is None:
            time_us = batch.numbers * US_PER_S
        else:
            time_us, late = self._time_kind.read(batch.columns[columns.time.name])
            reasons = np.where(late, late, reasons)
        item = self._names(batch, columns.item, reasons, Reason.NO_ITEM, ITEM_LIMIT)
        user = self._names(batch, columns.user, reasons, Reason.NO_USER, USER_LIMIT)
        is_good = reasons == 0
        for row in np.flatnonzero(~is_good).tolist():
            self._rejects.add(int(batch.numbers[row]), list(Reason)[reasons[row] - 1], batch.text(row))
        rows = np.zeros(int(is_good.sum()), ROW)
        rows["user"] = codes_of(_kept(user, is_good), self._users.code)
        rows["item"] = codes_of(_kept(item, is_good), self._items.id)
        rows["time_us"] = time_us[is_good]
        rows["value"] = value[is_good]
        if event is not None:
            rows["action"] = codes_of(_kept(event, is_good), self._events.code)
            self._check_events()
        elif columns.value is not None:
            self._values.add(rows["value"])
        self._num_rows += len(rows)
        return rows

    def _names(
        self,
        batch: Batch,
        column: Column,
        reasons: npt.NDArray[np.int8],
        missing: Reason,
        limit: tuple[Reason, int, bool],
    ) -> Any:
        encoded, is_missing = texts_of(batch.columns[column.name], with_point=self._has_point.get(column.name, False))
        reason, most, in_bytes = limit
        reasons[too_long(encoded, most, in_bytes=in_bytes)] = CODES[reason]
        reasons[is_missing] = CODES[missing]
        return encoded

    def _check_events(self) -> None:
        if len(self._events) > MAX_EVENT_TYPES and self._columns.event is not None:
            some = ", ".join(quoted(name, 24) for name in islice(self._events.names(), 5))
            raise DataError(
                f"{self._source.name}: {quoted(self._columns.event.name)} has over {MAX_EVENT_TYPES} distinct values "
                f"({some} ...), so it is no event type; --event names another column, --event none says there is none"
            )

    def _check_rejected(self) -> None:
        rejects = self._rejects
        if not self._num_rows:
            raise DataError(f"{self._source.name}: no row can be used: {rejects.words() or 'there is none'}")
        ratio = rejects.total / (rejects.total + self._num_rows)
        if ratio > self._options.max_rejected_ratio:
            most = self._options.max_rejected_ratio
            raise DataError(
                f"{self._source.name}: {ratio:.0%} of the rows cannot be used, over {most:.0%}: {rejects.words()}; "
                f"name the right columns, or allow it: --max-rejected {min(1.0, ratio + 0.01):.2f}"
            )

    def _actions(self, old: Any, out: Path) -> tuple[ActionKind, list[str], list[float]]:
        """Decide what the actions are; those of the dataset before keep their places."""
        before: dict[str, Any] = old["actions"] if old else {"kind": "", "names": [], "edges": []}
        columns = self._columns
        edges: list[float] = []
        if columns.event is not None:
            kind = ActionKind.EVENTS
            check_kind(kind, before["kind"], str(out))
            names = in_order(self._events.names(), before["names"])
        elif columns.value is None or (len(self._values.distinct) == 1 and before["kind"] in ("", ActionKind.ONE)):
            kind = ActionKind.ONE
            check_kind(kind, before["kind"], str(out))
            names = [ONE]
            if columns.value is not None:
                only = f"{next(iter(self._values.distinct)):g}"
                self._notes.append(
                    f"{quoted(columns.value.name)} is {only} in every row and says nothing; it is left out"
                )
        elif self._values.is_few and before["kind"] != ActionKind.BUCKETS:
            kind = ActionKind.RATINGS
            check_kind(kind, before["kind"], str(out))
            known = {float(name) for name in before["names"]}
            names = [
                f"{value:.17g}" if float(f"{value:g}") != value else f"{value:g}"
                for value in sorted(known | self._values.distinct)
            ]
            if known and names[: len(known)] != before["names"]:
                self._notes.append(
                    "warning: ratings that are new stand between those of the dataset before; a service refuses to "
                    "reload a model of it. Prepare into a new folder, and load the histories anew"
                )
        else:
            kind = ActionKind.BUCKETS
            check_kind(kind, before["kind"], str(out))
            edges = before["edges"] or self._values.edges(self._options.num_buckets)
            names = bucket_names(columns.value.name, edges)
            kept = "edges kept from the dataset before" if before["edges"] else "equally many rows in each"
            self._notes.append(
                f"warning: {quoted(columns.value.name)} is continuous (over {MAX_RATINGS} distinct values): "
                f"{len(names)} ranges are the actions ({kept}); --buckets N makes others, --value none takes none"
            )
        if before["names"] and len(names) > len(before["names"]):
            self._notes.append(f"actions that are new: {', '.join(names[len(before['names']) :])}")
        return kind, names, edges

    def _read_items(self) -> ItemTable | None:
        if self._item_source is None or self._item_rejects is None:
            return None
        options = self._options
        told = {role: name for role, name in (("item", options.items_key), ("title", options.title)) if name}
        return read_items(
            self._item_source,
            told,
            self._columns.item.name,
            options.features,
            self._item_rejects.add,
            lambda ratio: self._on_stage("items", ratio),
        )

    def _write_events(self, spill: Spill, kind: ActionKind, names: list[str], edges: list[float]) -> _Counted:
        has_value = kind in (ActionKind.RATINGS, ActionKind.BUCKETS)
        fields = [("user", pa.int32()), ("item", pa.int64()), ("action", pa.int16()), ("time", pa.int64())]
        schema = pa.schema([*fields, ("value", pa.float64())] if has_value else fields)
        place = {name: at for at, name in enumerate(names)}
        of_event = np.array([place.get(name, -1) for name in self._events.names()] or [0], np.int64)
        ratings = np.array(sorted(map(float, names))) if kind is ActionKind.RATINGS else np.empty(0)
        counted = _Counted(len(names))
        path = self._folder / EVENTS
        make_private(path)
        with path.open("wb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
            done = 0
            for rows in _grouped(self._finished(spill.parts(), counted)):
                match kind:
                    case ActionKind.EVENTS:
                        action = of_event[rows["action"]]
                    case ActionKind.RATINGS:
                        action = np.searchsorted(ratings, rows["value"])
                    case ActionKind.BUCKETS:
                        action = bucket_of(rows["value"], edges)
                    case _:
                        action = np.zeros(len(rows), np.int64)
                time = rows["time_us"] // US_PER_S
                counted.add(action, time)
                arrays = [rows["user"], rows["item"], action.astype(np.int16), time]
                if has_value:
                    arrays.append(rows["value"])
                writer.write_table(pa.table([pa.array(np.ascontiguousarray(one)) for one in arrays], schema=schema))
                done += len(rows)
                self._on_stage("sorting", done / self._num_rows)
        self._on_stage("sorting", 1.0)
        return counted

    def _finished(self, parts: Iterator[Rows], counted: _Counted) -> Iterator[Rows]:
        """Leave out all but the first of rows that are equal in everything."""
        for rows in parts:
            order = np.lexsort((rows["value"], rows["action"], rows["item"], rows["time_us"], rows["user"]))
            ranked = rows[order]
            is_again = np.zeros(len(rows), np.bool_)
            is_again[order[1:]] = ranked[1:] == ranked[:-1]
            counted.num_duplicates += int(is_again.sum())
            yield rows if self._options.keep_duplicates else rows[~is_again]

    def _write_users(self) -> None:
        path = self._folder / USERS
        make_private(path)
        with path.open("wb") as file:
            pq.write_table(pa.table({"name": pa.array(self._users.names(), pa.string())}), file, compression="zstd")

    def _write_items(self, table: ItemTable | None) -> dict[str, int]:
        """Write the items of the log and of the items' file; return their counts.

        Raises:
            DataError: two names share an id.
        """
        listed = table.rows if table else {}
        names = self._items.names() + [name for name in listed if name not in self._items]
        at = [listed.get(name) for name in names]
        titles = ["" if table is None or row is None else table.titles[row] for row in at]
        ids = ItemNames.make(names, titles).ids  # it refuses two names with the same id
        by_id = np.argsort(item_ids(names), kind="stable").tolist()
        columns: dict[str, Any] = {
            "id": pa.array(ids),
            "name": pa.array([names[place] for place in by_id], pa.string()),
            "title": pa.array([titles[place] for place in by_id], pa.string()),
        }
        for feature in table.features if table else ():
            cells = [[] if (row := at[place]) is None else feature.cells[row] for place in by_id]
            if feature.kind == "many":
                columns[FEATURE + feature.column] = pa.array(cells, pa.list_(pa.string()))
            else:
                columns[FEATURE + feature.column] = pa.array([cell[0] if cell else None for cell in cells], pa.string())
        pq.write_table(pa.table(columns), self._folder / ITEMS, compression="zstd")
        return {
            "all": len(names),
            "with_events": len(self._items),
            "with_title": sum(map(bool, titles)),
            "without_row": sum(row is None for row in at) if table else 0,
            "without_events": len(names) - len(self._items),
        }

    def _column_manifest(self, table: ItemTable | None) -> dict[str, dict[str, str]]:
        columns = self._columns
        taken = {
            "user": columns.user,
            "item": columns.item,
            "time": columns.time,
            "event": columns.event,
            "value": columns.value,
            "items file's item": table.key if table else None,
            "items file's title": table.title if table else None,
        }
        return {role: {"name": one.name, "why": one.why} for role, one in taken.items() if one is not None}


class _Counted:
    """What is counted while events are written."""

    def __init__(self, num_actions: int) -> None:
        self._actions = np.zeros(num_actions, np.int64)
        self.num_duplicates = 0
        self.first_time = np.iinfo(np.int64).max
        self.last_time = 0

    def add(self, actions: npt.NDArray[np.int64], times: npt.NDArray[np.int64]) -> None:
        """Count some events."""
        self._actions += np.bincount(actions, minlength=len(self._actions))
        self.first_time = min(self.first_time, int(times.min()))
        self.last_time = max(self.last_time, int(times.max()))

    @property
    def actions(self) -> list[int]:
        """Events of each action."""
        return self._actions.tolist()

    @property
    def num_events(self) -> int:
        """All events."""
        return int(self._actions.sum())


def _grouped(parts: Iterator[Rows]) -> Iterator[Rows]:
    """Join small parts, and cut large ones, into groups of about `GROUP_ROWS` rows; none is empty."""
    waiting: list[Rows] = []
    for rows in parts:
        waiting.append(rows)
        if sum(map(len, waiting)) >= GROUP_ROWS:
            whole = np.concatenate(waiting)
            for at in range(0, len(whole) - GROUP_ROWS + 1, GROUP_ROWS):
                yield whole[at : at + GROUP_ROWS]
            waiting = [whole[len(whole) // GROUP_ROWS * GROUP_ROWS :]]
    if sum(map(len, waiting)):
        yield np.concatenate(waiting)


def _kept(encoded: Any, is_good: npt.NDArray[np.bool_]) -> Any:
    """Leave out rows, and the names that only they have."""
    return encoded if is_good.all() else encoded.filter(pa.array(is_good)).dictionary_decode().dictionary_encode()


def _numbers(array: Any, reasons: npt.NDArray[np.int8]) -> npt.NDArray[np.float64]:
    numbers = as_numbers(array)
    is_number = pc.is_valid(numbers).to_numpy(zero_copy_only=False)
    reasons[~is_number] = CODES[Reason.NO_NUMBER]
    is_missing = pc.is_null(array, nan_is_null=pa.types.is_floating(array.type)).to_numpy(zero_copy_only=False)
    reasons[is_missing] = CODES[Reason.NO_VALUE]
    filled: npt.NDArray[np.float64] = pc.fill_null(numbers, 0.0).to_numpy(zero_copy_only=False)
    return filled
