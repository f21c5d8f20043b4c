"""Merge datasets of a log's parts: `npu-gr prepare 'parts/*' --merge --out site/data`.

Whatever made the parts, on however many machines: each holds all events of its users. Then the
merged dataset is that of one run over the parts' logs in the same order, bit for bit:

    users    those of the first part, then those of the second, and so on
    items    by id; the key of the ids is a function of facts that parts can tell (`items_key`)
    events   DuckDB sorts them anew, within its memory limit
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from npu_gr import __version__
from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.file_permissions import make_private
from npu_gr.core.names import is_hashed, item_ids, repeated
from npu_gr.core.text_format import quoted
from npu_gr.dataset.actions import (
    ActionKind,
    OldActions,
)
from npu_gr.dataset.build import FILES, OnStage, PreparedDataset, actions_of, ignore_stage
from npu_gr.dataset.cells import identifier, pa, pq
from npu_gr.dataset.engine import MOST_MB, duckdb_errors, opened
from npu_gr.dataset.files import (
    EVENTS,
    FEATURE,
    FORMAT,
    IMPRESSIONS,
    ITEMS,
    MANIFEST,
    NUM_PARTS,
    REJECTED,
    USERS,
    is_dataset,
    read_dataset,
    replaced_folder,
)
from npu_gr.dataset.line_sources import file_sql
from npu_gr.dataset.log_facts import EXAMPLE_EVENTS, EXAMPLE_USERS
from npu_gr.dataset.logs import BATCH_ROWS, items_key
from npu_gr.dataset.options import PrepareOptions
from npu_gr.dataset.parts import LogPart, event_names, merged_actions, opened_parts
from npu_gr.dataset.plausible import findings
from npu_gr.dataset.rejects import MAX_WRITTEN
from npu_gr.dataset.write import COMPRESSION, GROUP_ROWS, ItemCounts, write_private

SORTED_ROWS = 2_000_000  # events that are sorted at a time, some 200 MB


def merge(
    parts: Path | str | Sequence[Path],
    out: Path | str,
    options: PrepareOptions | None = None,
    *,
    on_stage: OnStage = ignore_stage,
) -> PreparedDataset:
    """Merge datasets that each hold all events of their users.

    Args:
        parts: Folders of the datasets, or a pattern of them, in order of their names.
        out: Folder of the merged dataset; an existing one is replaced at the end, and its actions
            and the key of its items stay.
        options: `like`, `strict` and `memory_mb` count; the others were those of the parts.
        on_stage: Callback for the progress.

    Raises:
        DataError: the parts do not fit together; the message names the part, and the option that
            it should be made with. `out` is unchanged.
    """
    out, options = Path(out), options or PrepareOptions()
    found = opened_parts(parts)
    memory_mb = options.memory_mb or MOST_MB
    with replaced_folder(out, is_dataset, FILES) as folder:
        like = Path(options.like) if options.like else out
        if options.like and not is_dataset(like):
            raise DataError(f"--like {like}: not a dataset of `npu-gr prepare`")
        old = actions_of(read_dataset(like)) if is_dataset(like) else OldActions()
        with opened(folder / "spill", memory_mb) as con, duckdb_errors("--merge", memory_mb):
            manifest = _Merged(con, found, old).write(folder, on_stage, options.strict)
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")
    rejected = ("rejected", "rejected_items", "rejected_users")
    total = sum(one["rows"] for key in rejected for one in manifest[key].values())
    return PreparedDataset(dataset=read_dataset(out), num_rejected=total)


class _Merged:
    """One merge."""

    def __init__(self, con: Any, parts: list[LogPart], old: OldActions) -> None:
        self._con = con
        self._parts = parts
        self._actions = merged_actions(parts, old)
        self._seen = self._items_with_events()
        every = [name for part in parts for name in part.dataset.items["name"].to_pylist()]
        self._names = list(dict.fromkeys([*self._seen, *every]))
        self._key = items_key(self._names, con, _FACTS_IN_ORDER, old.item_key)
        self._ids = item_ids(self._names, self._key)
        if again := repeated(self._ids):
            raise DataError(
                f"--merge: {quoted(self._names[again[0]])} has the id of another item; prepare "
                "the whole log at once, which rejects its rows"
            )

    def _items_with_events(self) -> list[str]:
        """Collect the facts that the key is made of, and return the names in order."""
        selects = []
        for place, part in enumerate(self._parts):
            codes = np.arange(len(part.dataset.users))
            self._con.register(f"users_{place}", part.dataset.users.append_column("code", [codes]))
            self._con.register(f"items_{place}", part.dataset.items.select(["id", "name"]))
            listed = ", ".join(map(file_sql, part.event_paths))
            selects.append(
                f"SELECT i.name AS item, e.time, u.name AS user FROM read_parquet([{listed}], "
                f"union_by_name = true) e JOIN items_{place} i ON i.id = e.item "
                f"JOIN users_{place} u ON u.code = e.user"
            )
        self._con.execute(
            "CREATE TABLE facts AS SELECT item, min(time), max(time), min(user), max(user) "
            f"FROM ({' UNION ALL '.join(selects)}) GROUP BY item"
        )
        names: list[str] = self._con.sql(_FACTS_IN_ORDER).to_arrow_table()["item"].to_pylist()
        return names

    def write(self, folder: Path, on_stage: OnStage, is_strict: bool) -> dict[str, Any]:
        """Write all files except the manifest, and return that.

        Raises:
            DataError: `is_strict`, and the checks at the end find something implausible.
        """
        for place, part in enumerate(self._parts):
            old = part.dataset.items["id"].to_numpy()
            new = item_ids(part.dataset.items["name"].to_pylist(), self._key)
            self._con.register(f"ids_{place}", pa.table({"old": old, "new": new}))
        self._write_events(folder / EVENTS, on_stage)
        num_shown = self._write_impressions(folder / IMPRESSIONS)
        users = [part.dataset.users for part in self._parts]
        write_private(pa.concat_tables(users).combine_chunks(), folder / USERS)
        items = self._write_items(folder / ITEMS)
        self._write_rejected(folder / REJECTED)
        manifest = self._manifest(items, num_shown)
        found = list(findings(manifest, self._seen, [], self._busiest()))
        if found and is_strict:
            raise DataError("\n".join(["--strict:", *found]))
        return manifest | {"notes": [*self._actions.notes, *found]}

    def _write_events(self, path: Path, on_stage: OnStage) -> None:
        schema = pq.read_schema(self._parts[0].event_paths[0])
        rest = schema.names[schema.names.index("action") + 1 :]
        selects = []
        for place, part in enumerate(self._parts):
            moved = self._places_of(part).tolist()
            columns = [
                f"CAST(e.user + {part.first_user} AS INTEGER) AS user",
                "i.new AS item",
                f"CAST({moved}[e.action + 1] AS SMALLINT) AS action",
                *(f"e.{identifier(name)}" for name in rest),
            ]
            for number, file in enumerate(part.event_paths):
                read = f"read_parquet({file_sql(file)}, file_row_number = true)"
                selects.append(
                    f"SELECT {', '.join(columns)}, {number} AS npu_gr_file, e.file_row_number AS "
                    f"npu_gr_row FROM {read} e JOIN ids_{place} i ON i.old = e.item"
                )
        total = sum(part.manifest["events"] for part in self._parts)
        make_private(path)
        with (
            path.open("wb") as out,
            pq.ParquetWriter(out, schema, compression=COMPRESSION) as writer,
        ):
            done = 0
            for table in _grouped(self._in_order(" UNION ALL ".join(selects), total)):
                writer.write_table(table.cast(schema).combine_chunks())
                done += len(table)
                on_stage("merging", done / max(1, total))
        if done != total:
            raise DataError(
                f"--merge: {total - done:,} events name an item that is not in their part's "
                f"{ITEMS}; prepare that part anew"
            )

    def _in_order(self, events: str, total: int) -> Iterator[Any]:
        """Sort the events of a query, some of the users at a time: DuckDB's sort needs memory."""
        users = max(1, NUM_PARTS * SORTED_ROWS // max(1, total))  # of the `NUM_PARTS`
        for first in range(0, NUM_PARTS, users):
            yield from self._con.sql(
                f"SELECT * EXCLUDE (npu_gr_file, npu_gr_row) FROM ({events}) "
                f"WHERE user % {NUM_PARTS} BETWEEN {first} AND {first + users - 1} "
                f"ORDER BY user % {NUM_PARTS}, user, time, npu_gr_file, npu_gr_row"
            ).to_arrow_reader(BATCH_ROWS)

    def _places_of(self, part: LogPart) -> I64:
        """Find each action of a part among the merged ones."""
        names = part.manifest["actions"]["names"]
        if self._actions.kind is not ActionKind.EVENTS:
            return np.array([self._actions.names.index(name) for name in names], np.int64)
        every = event_names(self._parts)
        return self._actions.places[[every.index(name) for name in names]]

    def _write_impressions(self, path: Path) -> int:
        selects = [
            f"SELECT CAST(e.user + {part.first_user} AS INTEGER) AS user, coalesce(i.new, e.item) "
            "AS item, e.* EXCLUDE (user, item), i.new IS NULL AND "
            f"{part.dataset.item_key != self._key} AS npu_gr_lost FROM "
            f"read_parquet({file_sql(file)}) e LEFT JOIN ids_{place} i ON i.old = e.item"
            for place, part in enumerate(self._parts)
            for file in part.impression_paths
        ]
        if not selects:
            return 0
        table = self._con.sql(f"{' UNION ALL '.join(selects)} ORDER BY ALL").to_arrow_table()
        is_lost = table["npu_gr_lost"].to_numpy() & is_hashed(table["item"].to_numpy())
        if is_lost.any():
            raise DataError(
                f"--merge: {int(is_lost.sum()):,} impressions are of items without an event, whose "
                "names are not known; make the parts with --like PART, so that all have one key"
            )
        write_private(table.drop_columns(["npu_gr_lost"]).combine_chunks(), path)
        return len(table)

    def _write_items(self, path: Path) -> ItemCounts:
        """Write each item once: of each feature the first cell that a part has, the last title."""
        table = pa.concat_tables([part.dataset.items for part in self._parts]).combine_chunks()
        names: list[str] = table["name"].to_pylist()
        titles = dict.fromkeys(self._names, "")
        first: dict[str, int] = {}
        for place, (name, title) in enumerate(zip(names, table["title"].to_pylist(), strict=True)):
            first.setdefault(name, place)
            titles[name] = title or titles[name]
        found = table
        table = table.take(pa.array([first[name] for name in self._names]))
        columns = {"id": self._ids, "title": [*titles.values()]}
        for column in table.column_names:
            if column.startswith(FEATURE):
                columns[column] = _first_cells(names, found[column].to_pylist(), self._names)
        for column, values in columns.items():
            at = table.schema.get_field_index(column)
            field = table.schema.field(column)
            table = table.set_column(at, field, [pa.array(values, field.type)])
        with_events = table.slice(0, len(self._seen))
        known = [
            with_events[name].is_valid().to_numpy()
            for name in table.column_names
            if name.startswith(FEATURE)
        ]
        has_row = np.array([bool(titles[name]) for name in self._seen])
        for valid in known:
            has_row |= valid
        has_file = "items: item" in self._parts[0].manifest["columns"]
        table = table.take(pa.array(np.argsort(self._ids)))
        pq.write_table(table.combine_chunks(), path, compression=COMPRESSION)
        return ItemCounts(
            all=len(table),
            with_events=len(self._seen),
            with_title=sum(map(bool, titles.values())),
            without_row=int((~has_row).sum()) if has_file else 0,
            without_events=len(table) - len(self._seen),
        )

    def _write_rejected(self, path: Path) -> None:
        make_private(path)
        left = MAX_WRITTEN
        with path.open("w", encoding="utf-8") as out:
            for part in self._parts:
                with (part.dataset.folder / REJECTED).open(encoding="utf-8") as lines:
                    for line in lines:
                        if left:
                            out.write(line)
                            left -= 1

    def _manifest(self, items: ItemCounts, num_shown: int) -> dict[str, Any]:
        manifests = [part.manifest for part in self._parts]
        of_action = np.zeros(len(self._actions.names), np.int64)
        for part in self._parts:
            np.add.at(of_action, self._places_of(part), part.manifest["actions"]["events"])
        digests = "".join(one["digest"] for one in manifests)
        examples = [one for manifest in manifests for one in manifest["examples"]]
        examples.sort(key=lambda one: len(one["events"]) < EXAMPLE_EVENTS)
        first = manifests[0]
        manifest = {
            **first,
            "format": FORMAT,
            "made_by": f"npu_gr {__version__}",
            "log": {"name": f"{len(manifests)} parts", "format": first["log"]["format"]},
            "first_time": min(one["first_time"] for one in manifests),
            "last_time": max(one["last_time"] for one in manifests),
            "actions": {
                "kind": self._actions.kind,
                "names": self._actions.names,
                "edges": self._actions.edges,
                "events": of_action.tolist(),
            },
            "digest": xxhash.xxh3_128_hexdigest(digests.encode()),
            "items": items._asdict(),
            "item_key": self._key.hex(),
            "impressions": num_shown,
            "examples": examples[:EXAMPLE_USERS],
            "duplicates": {
                "rows": sum(one["duplicates"]["rows"] for one in manifests),
                "kept": first["duplicates"]["kept"],
            },
            **{
                key: sum(one[key] for one in manifests)
                for key in ("events", "users", "users_without_row", "filtered", "trimmed")
            },
            **{
                key: _summed(one[key] for one in manifests)
                for key in ("rejected", "rejected_items", "rejected_users")
            },
        }
        for key in ("event_files", "added"):
            manifest.pop(key, None)
        return manifest

    def _busiest(self) -> tuple[str, int, int]:
        """Find the user with the most events: name, events of the user, events of all."""
        found: list[tuple[str, int]] = []
        total = 0
        for place, part in enumerate(self._parts):
            listed = ", ".join(map(file_sql, part.event_paths))
            found += self._con.execute(
                f"SELECT u.name, count(*) FROM read_parquet([{listed}], union_by_name = true) e "
                f"JOIN users_{place} u ON u.code = e.user GROUP BY u.name "
                "ORDER BY 2 DESC, 1 LIMIT 1"
            ).fetchall()
            total += part.manifest["events"]
        name, count = max(found, key=lambda one: one[1])
        return name, count, total


_FACTS_IN_ORDER = "FROM facts ORDER BY item"


def _first_cells(items: Sequence[str], cells: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Return the first cell of each name that is not empty, of the cells of items."""
    known: dict[str, Any] = {}
    for item, cell in zip(items, cells, strict=True):
        if not known.get(item):
            known[item] = cell
    return [known[name] for name in names]


def _grouped(batches: Any) -> Iterator[Any]:
    """Join and split batches into tables of `GROUP_ROWS` rows; only the last may be smaller."""
    waiting = None
    for batch in batches:
        table = pa.Table.from_batches([batch])
        waiting = table if waiting is None else pa.concat_tables([waiting, table])
        while len(waiting) >= GROUP_ROWS:
            yield waiting.slice(0, GROUP_ROWS)
            waiting = waiting.slice(GROUP_ROWS)
    if waiting is not None and len(waiting):
        yield waiting


def _summed(every: Iterator[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Add the rows of each reason; the first row is that of the first part that has one."""
    rows: Counter[str] = Counter()
    first: dict[str, int] = {}
    for found in every:
        for reason, one in found.items():
            rows[reason] += one["rows"]
            first.setdefault(reason, one["first"])
    return {reason: {"rows": count, "first": first[reason]} for reason, count in rows.most_common()}
