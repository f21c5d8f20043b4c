"""Add a log to a dataset: `npu-gr prepare DAY --add-to FOLDER`, in time that the day's log needs.

    events.parquet        events of the first log
    events-0001.parquet   events of the first added log, and so on

The files of earlier logs are linked into the new folder and not read. The dataset decides what has
to agree: columns, conditions, and the indices of actions and users. Events that the dataset has
already are left out, so a log that is added twice changes nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.file_permissions import make_private
from npu_gr.core.names import item_ids
from npu_gr.dataset.cells import finite_number, identifier, pa, pq, values_of
from npu_gr.dataset.columns import NONE
from npu_gr.dataset.files import (
    FEATURE,
    ITEMS,
    MANY_FILES,
    NUMBER,
    POSITION,
    Dataset,
    impressions_of,
)
from npu_gr.dataset.item_columns import bucket_of_known
from npu_gr.dataset.line_sources import file_sql
from npu_gr.dataset.lines import NESTED
from npu_gr.dataset.options import PrepareOptions
from npu_gr.dataset.side import ItemTable
from npu_gr.dataset.write import COMPRESSION, EventCounts, ItemCounts, write_private

# options that the dataset decides unless they are given
_KEPT = (
    *(
        "positive",
        "drop",
        "where",
        "position",
        "event_features",
        "request_features",
        "cross_features",
    ),
    *("columns", "encoding", "format", "time_unit", "time_format", "keep_duplicates", "items_key"),
    *("title", "features", "users_key", "user_features"),
)


def kept_options(options: PrepareOptions, time_format: str) -> dict[str, Any]:
    """Return the options that logs which are added later are read with, for the manifest.

    Args:
        options: Options of the first log.
        time_format: Recognised format of its times; "" = they have none.
    """
    kept = {name: getattr(options, name) for name in _KEPT}
    return kept | {"time_format": options.time_format or time_format}


def options_of(manifest: Mapping[str, Any], given: PrepareOptions) -> PrepareOptions:
    """Take the options that are not given from a dataset.

    Raises:
        DataError: the log has no times, or an option contradicts the dataset.
    """
    columns = manifest["columns"]
    if not given.has_time or "time" not in columns or columns["time"]["name"] == NESTED[2]:
        raise DataError("--add-to: the log has no times; prepare the whole log again")
    if given.like:
        raise DataError("--add-to and --like exclude each other; the dataset decides the actions")
    plain = PrepareOptions()
    kept: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in manifest.get("options", {}).items()
    }
    for role in ("user", "item", "time", "event", "value"):
        kept[role] = columns[role]["name"] if role in columns else NONE
    known = {one.name for one in fields(PrepareOptions)}
    chosen = {
        name: value
        for name, value in kept.items()
        if name in known and getattr(given, name) == getattr(plain, name)
    }
    return replace(given, **chosen)


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The dataset that a log is added to."""

    dataset: Dataset

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The manifest of the dataset."""
        return self.dataset.manifest

    @property
    def _files(self) -> list[dict[str, Any]]:
        return self.dataset.event_files

    @property
    def kinds(self) -> dict[str, str]:
        """Kinds of the features of the log by name: "number", "one" or "many"."""
        return {one["name"]: one["kind"] for one in self.manifest.get("log_features", [])}

    @property
    def next_file(self) -> str:
        """The file of the events that are added."""
        return f"events-{len(self._files):04}.parquet"

    def without_known(self, con: Any, path: Path, counts: EventCounts) -> EventCounts:
        """Remove the events that the dataset has already from a file of events.

        Only files whose times overlap those of the new events are read.

        Args:
            con: Connection of DuckDB.
            path: File of the new events; it is deleted if none is left.
            counts: Counts of its events.

        Returns:
            Counts of the events that are left.
        """
        first, last = counts.first_time, counts.last_time
        overlap = [
            self.dataset.folder / one["name"]
            for one in self._files
            if one["first_time"] <= last and one["last_time"] >= first
        ]
        if not overlap:
            return counts
        names = pq.read_schema(path).names
        same = " AND ".join(
            f"a.{one} IS NOT DISTINCT FROM b.{one}" for one in map(identifier, names)
        )
        listed = ", ".join(map(file_sql, overlap))
        new = f"read_parquet({file_sql(path)}, file_row_number = true)"
        known = f"read_parquet([{listed}], union_by_name = true)"
        known = f"(FROM {known} WHERE time BETWEEN {first} AND {last})"
        key = " AND ".join(f"a.{one} = b.{one}" for one in ("user", "item", "time"))
        found = con.execute(
            f"SELECT a.file_row_number FROM {new} a SEMI JOIN {known} b ON {key} AND {same}"
        ).fetchnumpy()["file_row_number"]
        if not len(found):
            return counts
        table = pq.read_table(path)
        is_new = np.ones(len(table), np.bool_)
        is_new[found] = False
        table = table.filter(pa.array(is_new)).combine_chunks()
        left = EventCounts(len(counts.of_action))
        left.num_duplicates = counts.num_duplicates + len(found)
        if not len(table):
            pq.write_table(table, path)  # its impressions may be new
            return left
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        left.add([sink.getvalue()], table["action"].to_numpy(), table["time"].to_numpy())
        write_private(table, path)
        return left

    def without_shown(self, con: Any, shown: Any) -> Any:
        """Remove the impressions that the dataset has already from a table of impressions."""
        paths = [self.dataset.folder / impressions_of(one["name"]) for one in self._files]
        there = ", ".join(file_sql(path) for path in paths if path.exists())
        if not there or not len(shown):
            return shown
        con.register("shown", shown)
        found = con.sql(
            f"FROM shown a ANTI JOIN (FROM read_parquet([{there}])) b ON a.user = b.user AND "
            f"a.item = b.item AND a.time = b.time AND a.{POSITION} = b.{POSITION} ORDER BY ALL"
        ).to_arrow_table()
        con.unregister("shown")
        return found

    def link_events(self, folder: Path, actions: Sequence[str]) -> I64:
        """Link the files of earlier events into the new folder.

        Args:
            folder: The new folder.
            actions: Names of the actions in the new order. Where a new rating has moved the earlier
                ones, the files are written again.

        Returns:
            int64 [earlier actions] index of each earlier action among the new ones.
        """
        before = self.manifest["actions"]["names"]
        place = np.array([actions.index(name) for name in before], np.int64)
        names = [one["name"] for one in self._files]
        for name in map(impressions_of, names):
            if (self.dataset.folder / name).exists():
                _link(self.dataset.folder / name, folder / name)
        for name in names:
            source, target = self.dataset.folder / name, folder / name
            if place.tolist() == list(range(len(before))):
                _link(source, target)
                continue
            make_private(target)
            with (
                pq.ParquetFile(source) as file,
                target.open("wb") as out,
                pq.ParquetWriter(out, file.schema_arrow, compression=COMPRESSION) as writer,
            ):
                at = file.schema_arrow.get_field_index("action")
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group)
                    moved = pa.array(place[table["action"].to_numpy()].astype(np.int16))
                    writer.write_table(table.set_column(at, "action", moved))
        return place

    def names_with_events(self, con: Any, logged: Sequence[str]) -> list[str]:
        """List the items with events: those of the dataset, then those of the added log."""
        names: list[str] = self.dataset.items["name"].to_pylist()
        if self.manifest["items"]["without_events"]:
            paths = [file_sql(self.dataset.folder / one["name"]) for one in self._files]
            ids = con.execute(
                f"SELECT DISTINCT item FROM read_parquet([{', '.join(paths)}])"
            ).fetchnumpy()["item"]
            is_there = np.isin(self.dataset.items["id"].to_numpy(), ids)
            names = [name for name, there in zip(names, is_there.tolist(), strict=True) if there]
        return list(dict.fromkeys([*names, *logged]))

    def write_items(
        self, folder: Path, with_events: Sequence[str], described: ItemTable
    ) -> ItemCounts:
        """Write the items with the features that they have; new ones have those of the log.

        Args:
            folder: The new folder.
            with_events: Names of the items with events.
            described: What the added log says of its items; its titles count.
        """
        known = set(self.dataset.items["name"].to_pylist())
        new = [name for name in with_events if name not in known]
        added = {"id": item_ids(new, self.dataset.item_key), "name": pa.array(new, pa.string())}
        added |= self._features_of(new, described)
        table = pa.concat_tables([self.dataset.items, pa.table(added)], promote_options="default")
        old = table["title"].to_pylist()
        rows = described.rows
        found = [
            (described.titles[rows[name]] if name in rows else "") or title or ""
            for name, title in zip(table["name"].to_pylist(), old, strict=True)
        ]
        at = table.schema.get_field_index("title")
        table = table.set_column(at, "title", pa.array(found, pa.string()))
        table = table.take(pa.array(np.argsort(table["id"].to_numpy())))
        pq.write_table(table.combine_chunks(), folder / ITEMS, compression=COMPRESSION)
        before = self.manifest["items"]
        has_file = "items: item" in self.manifest["columns"]
        return ItemCounts(
            all=len(table),
            with_events=len(with_events),
            with_title=sum(map(bool, found)),
            without_row=before["without_row"] + has_file * len(new),
            without_events=len(table) - len(with_events),
        )

    def _features_of(self, new: Sequence[str], described: ItemTable) -> dict[str, Any]:
        """Make the columns of features of new items, as items.parquet has them."""
        columns: dict[str, Any] = {}
        rows = [described.rows[name] for name in new]
        for one in described.features:
            name = FEATURE + one.column
            if name not in self.dataset.items.column_names:
                continue
            numbers = [one.numbers[row] if one.numbers else None for row in rows]
            cells: list[Any] = [
                one.cells[row] if number is None else values_of(number, "number")
                for row, number in zip(rows, numbers, strict=True)
            ]
            kind = self.dataset.items.schema.field(name).type
            if NUMBER + one.column in self.dataset.items.column_names:
                numbers = [finite_number(cell[0]) if cell else None for cell in cells]
                known = (
                    self.dataset.items[NUMBER + one.column].to_pylist(),
                    self.dataset.items[name].to_pylist(),
                )
                columns[NUMBER + one.column] = pa.array(numbers, pa.float64())
                cells = bucket_of_known(numbers, *known)
            elif not pa.types.is_list(kind):
                cells = [cell[0] if cell else None for cell in cells]
            columns[name] = pa.array(cells, kind)
        return columns

    def joined(
        self, added: dict[str, Any], place: I64, *, has_items: bool, has_users: bool
    ) -> dict[str, Any]:
        """Join the manifest of the dataset and that of the added log.

        What is counted is counted over all logs. What was left out or rejected is that of the added
        log.

        Args:
            added: Manifest of the added log.
            place: Result of `link_events`.
            has_items: Whether a file of items was given; else the features stay.
            has_users: Whether a file of users was given; else the features stay.
        """
        before = self.manifest
        files = self._files
        if added["events"] or added["impressions"]:
            keys = ("events", "first_time", "last_time", "digest")
            files = [*files, {"name": self.next_file} | {key: added[key] for key in keys}]
        of_action = np.array(added["actions"]["events"], np.int64)
        of_action[place] += np.array(before["actions"]["events"], np.int64)
        joined = added | {
            "format": MANY_FILES if len(files) > 1 else before["format"],
            "event_files": files,
            "actions": added["actions"] | {"events": of_action.tolist()},
            "events": before["events"] + added["events"],
            "first_time": min(before["first_time"], added["first_time"]),
            "last_time": max(before["last_time"], added["last_time"]),
            "digest": before["digest"],
            "columns": before["columns"],
            "options": before.get("options", added["options"]),
            "added": added["events"],
            "impressions": before.get("impressions", 0) + added["impressions"],
        }
        if added["events"]:
            digests = "".join(one["digest"] for one in files)
            joined["digest"] = xxhash.xxh3_128_hexdigest(digests.encode())
        if not has_items:
            joined |= {name: before[name] for name in ("features", "skipped")}
        else:
            of_items = {role: one for role, one in added["columns"].items() if "items" in role}
            joined["columns"] = before["columns"] | of_items
        if not has_users:
            joined |= {
                name: before[name] for name in ("user_features", "skipped_users") if name in before
            }
            if before.get("user_features"):
                new = added["users"] - before["users"]
                joined["users_without_row"] = before["users_without_row"] + new
        return joined


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
