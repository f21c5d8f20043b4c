"""Make a dataset of a log: `npu-gr prepare`, and `npu_gr.dataset.prepare` in Python.

    read     DuckDB reads the log into a temporary table: names as texts, times in microseconds, and
             the reason why a row is rejected
    sort     rows by user and time, without exact duplicates, into events.parquet
    publish  the finished folder replaces `out`

Memory is bounded by `PrepareOptions.memory_mb`, except for the names of users and items and the
files of items and users, which are held in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

from npu_gr import __version__
from npu_gr.core.errors import DataError
from npu_gr.core.file_permissions import make_private
from npu_gr.core.text_format import quoted
from npu_gr.dataset.actions import Actions, OldActions
from npu_gr.dataset.added import Earlier, kept_options, options_of
from npu_gr.dataset.engine import duckdb_errors, memory_for, opened
from npu_gr.dataset.files import (
    ADDED,
    DECLARED_KIND,
    EVENTS,
    FORMAT,
    IMPRESSIONS,
    ITEMS,
    KIND,
    MANIFEST,
    REJECTED,
    USERS,
    Dataset,
    impressions_of,
    is_dataset,
    read_dataset,
    replaced_folder,
)
from npu_gr.dataset.item_columns import item_features
from npu_gr.dataset.line_sources import Source
from npu_gr.dataset.log_facts import busiest_user, examples, lost_events, month_days
from npu_gr.dataset.log_features import LogFeature
from npu_gr.dataset.logs import Log
from npu_gr.dataset.options import PrepareOptions
from npu_gr.dataset.plausible import findings
from npu_gr.dataset.rejects import Rejects
from npu_gr.dataset.side import ItemTable, UserTable, notes_of, read_items, read_users
from npu_gr.dataset.sources import OTHERS, ArrowStream, open_source
from npu_gr.dataset.write import (
    EventCounts,
    ItemCounts,
    write_events,
    write_items,
    write_private,
    write_users,
)

FILES = (MANIFEST, EVENTS, IMPRESSIONS, *ADDED, USERS, ITEMS, REJECTED)
OnStage = Callable[[str, float], None]
"""Called with the name of the stage and its progress, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedDataset:
    """What `prepare` made."""

    dataset: Dataset
    num_rejected: int  # rows of the log, and of the files of items and users

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of manifest.json; its `notes` are for the user."""
        return dict(self.dataset.manifest)


class _Sources(NamedTuple):
    log: Source
    items: Source | None
    users: Source | None


def ignore_stage(stage: str, ratio: float) -> None:
    """Ignore the progress."""


@contextmanager
def _sources(
    log: Path | str | ArrowStream,
    items: Path | str | ArrowStream | None,
    users: Path | str | ArrowStream | None,
    options: PrepareOptions,
) -> Iterator[_Sources]:
    """Open the log and the files of items and users."""
    with TemporaryDirectory(prefix="npu-gr-utf8-") as scratch:
        source, item_source, user_source = (
            open_source(one, kind, columns, options.encoding, Path(scratch) / role)
            if one is not None
            else None
            for role, one, kind, columns in (
                ("log", log, options.format, options.columns),
                ("items", items, "", ()),
                ("users", users, "", ()),
            )
        )
        assert source is not None
        for one in (source, item_source, user_source):
            if one is not None:
                one.memory_mb = options.memory_mb or memory_for(source.num_bytes)
        yield _Sources(source, item_source, user_source)


def prepare(
    log: Path | str | ArrowStream,
    out: Path | str,
    options: PrepareOptions | None = None,
    *,
    items: Path | str | ArrowStream | None = None,
    users: Path | str | ArrowStream | None = None,
    on_stage: OnStage = ignore_stage,
) -> PreparedDataset:
    """Make a dataset.

    Args:
        log: A file, folder or pattern (CSV, TSV, Parquet, JSON, RecBole's atomic files, also
            packed), or a frame of pandas or polars.
        out: Folder of the dataset. An existing dataset is replaced at the end, and its actions
            keep their indices.
        options: Settings that are otherwise guessed from the log.
        items: A file or frame with titles and features of items.
        users: A file or frame with features of users.
        on_stage: Callback for the progress.

    Raises:
        DataError: the log cannot be read or understood; the message names the row or the option.
            `out` is unchanged.
    """
    out = Path(out)
    options = options or PrepareOptions()
    with (
        _sources(log, items, users, options) as sources,
        replaced_folder(out, is_dataset, FILES) as folder,
    ):
        like = Path(options.like) if options.like else out
        if options.like and not is_dataset(like):
            raise DataError(f"--like {like}: not a dataset of `npu-gr prepare`")
        before = read_dataset(like) if is_dataset(like) else None
        old = OldActions() if before is None else actions_of(before)
        # a folder of its own for each day: its features are those of the day before
        decided = _features_of_log(before) if before is not None and options.like else None
        num_rejected = _write(sources, folder, options, old, None, decided, on_stage)
    return PreparedDataset(dataset=read_dataset(out), num_rejected=num_rejected)


def add(
    log: Path | str | ArrowStream,
    dataset: Path | str,
    options: PrepareOptions | None = None,
    *,
    items: Path | str | ArrowStream | None = None,
    users: Path | str | ArrowStream | None = None,
    on_stage: OnStage = ignore_stage,
) -> PreparedDataset:
    """Add a log to a dataset, without reading the earlier logs again.

    Args:
        log: A file, folder, pattern or frame, as for `prepare`.
        dataset: Folder of the dataset. It is replaced as a whole at the end.
        options: Settings that differ from those of the dataset.
        items: The whole file or frame of items; None = earlier items keep their features.
        users: The whole file or frame of users; None = earlier users keep their features.
        on_stage: Callback for the progress.

    Raises:
        DataError: the log cannot be read or understood, or does not fit the dataset, which is
            unchanged.
    """
    folder = Path(dataset)
    # first, because it puts a dataset back whose replacement was interrupted
    with replaced_folder(folder, is_dataset, FILES) as new:
        earlier = Earlier(dataset=read_dataset(folder))
        options = options_of(earlier.manifest, options or PrepareOptions())
        with _sources(log, items, users, options) as sources:
            old = actions_of(earlier.dataset)
            decided = _features_of_log(earlier.dataset)
            num_rejected = _write(sources, new, options, old, earlier, decided, on_stage)
    return PreparedDataset(dataset=read_dataset(folder), num_rejected=num_rejected)


def _features_of_log(dataset: Dataset) -> tuple[str, ...]:
    """List the features of items that are columns of its log."""
    return tuple(one["name"] for one in dataset.manifest["features"] if one.get("of_log"))


def actions_of(dataset: Dataset) -> OldActions:
    """Return the actions and the key that a dataset which replaces this one keeps."""
    before = dataset.manifest["actions"]
    return OldActions(
        folder=str(dataset.folder),
        kind=before["kind"],
        names=before["names"],
        edges=before["edges"],
        item_key=dataset.item_key,
    )


def _write(
    sources: _Sources,
    folder: Path,
    options: PrepareOptions,
    old: OldActions,
    earlier: Earlier | None,
    decided: tuple[str, ...] | None,
    on_stage: OnStage,
) -> int:
    """Write all files of a dataset, and return the number of rejected rows."""
    make_private(folder / REJECTED)
    with (folder / REJECTED).open("w", encoding="utf-8") as rejected:
        build = _Build(*sources, options, rejected, earlier, decided)
        memory_mb = sources.log.memory_mb
        with (
            opened(folder / "spill", memory_mb) as con,
            duckdb_errors(sources.log.name, memory_mb, OTHERS),
        ):
            manifest = build.run(con, folder, old, on_stage)
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return build.num_rejected


class _Build:
    """One run: the constructor chooses the columns of the log, `run` does the rest."""

    def __init__(
        self,
        source: Source,
        item_source: Source | None,
        user_source: Source | None,
        options: PrepareOptions,
        rejected: IO[str],
        earlier: Earlier | None,
        decided: tuple[str, ...] | None,
    ) -> None:
        self._source = source
        self._item_source = item_source
        self._user_source = user_source
        self._options = options
        self._rejects = Rejects(rejected, source.place)
        self._item_rejects = Rejects(rejected, item_source.place) if item_source else None
        self._user_rejects = Rejects(rejected, user_source.place) if user_source else None
        self._decided = decided if options.features is None or earlier else None
        self._log = Log(
            source,
            options,
            earlier.kinds if earlier else None,
            describes_items=item_source is None,
            decided=self._decided,
        )
        self._earlier = earlier

    @property
    def num_rejected(self) -> int:
        """Rows of the log, and of the files of items and users, that could not be used."""
        every = (self._rejects, self._item_rejects, self._user_rejects)
        return sum(rejects.total for rejects in every if rejects)

    def run(self, con: Any, folder: Path, old: OldActions, on_stage: OnStage) -> dict[str, Any]:
        """Write all files except the manifest, and return that."""
        log, earlier = self._log, self._earlier
        # the short files first, so that an error in them comes early
        table = self._read_items(con, on_stage)
        users = self._read_users(con, on_stage)
        _check_names(
            log.features,
            [one.name for one in users.features] if users else [],
            [one.column for one in table.features] if table else [],
        )
        log.load(
            con,
            self._rejects,
            lambda ratio: on_stage("reading", ratio),
            earlier.dataset.users["name"].combine_chunks() if earlier else None,
            earlier.dataset.items["name"].to_pylist() if earlier else (),
            old.item_key,
        )
        if table is not None and self._item_rejects is not None:
            table.take_rejects(log.item_names(), self._item_rejects, log.item_key)
        actions = log.actions(old)
        counts = write_events(
            path := folder / (earlier.next_file if earlier else EVENTS),
            log,
            actions,
            keep_duplicates=self._options.keep_duplicates,
            show=lambda ratio: on_stage("sorting", ratio),
        )
        names, item_names = log.user_names(), log.item_names()
        shown = log.impressions() if log.has_impressions else None
        if earlier:
            if not self._options.keep_duplicates:
                counts = earlier.without_known(con, path, counts)
            if shown is not None:
                shown = earlier.without_shown(con, shown)
            if not sum(counts.of_action) and not (shown and len(shown)):
                path.unlink()
            item_names = earlier.names_with_events(con, item_names)
        num_without = write_users(folder, names, users, earlier.dataset.users if earlier else None)
        described = table or self._described_by_log(
            con, [one.name for one in users.features] if users else []
        )
        if earlier and table is None:
            items = earlier.write_items(folder, item_names, described)
        else:
            items = write_items(folder, item_names, described, log.item_key)
        notes = [*actions.notes, *self._source.notes]
        if table is not None:
            notes += notes_of("item", item_names, table.rows, table.num_again)
        if users is not None:
            notes += notes_of("user", names.to_pylist(), users.rows, users.num_again)
        manifest = self._manifest(actions, table, described, counts, items, notes)
        if shown is not None and len(shown):
            write_private(shown, folder / impressions_of(path.name))
        manifest["impressions"] = 0 if shown is None else len(shown)
        manifest["examples"] = examples(con, log.columns)
        manifest |= {"users": len(names)} | self._features(users, num_without)
        if earlier:
            place = earlier.link_events(folder, actions.names)
            has = {"has_items": table is not None, "has_users": users is not None}
            manifest = earlier.joined(manifest, place, **has)
        facts = lost_events(con, log.columns), busiest_user(con)
        is_order = manifest.get("is_order", False)
        are_days = is_order and log.time_kind is not None and month_days(con)
        found = list(findings(manifest, item_names, *facts, are_days=are_days))
        if found and self._options.strict:
            raise DataError("\n".join(["--strict:", *found]))
        manifest["notes"] += found
        return manifest

    def _described_by_log(self, con: Any, taken: Sequence[str]) -> ItemTable:
        """Describe the log's items by its own columns."""
        log = self._log
        names, titles = log.item_names(), log.titles()
        features, skipped = item_features(
            con,
            log.item_columns,
            names,
            taken,
            is_wanted=self._options.features is not None and self._decided is None,
            is_decided=self._decided is not None,
        )
        used = {one.column for one in features} | skipped.keys()
        log.unused = [one for one in log.unused if one["name"] not in used]
        return ItemTable(
            key=log.columns.item,
            title=log.title,
            source=None,
            rows={name: row for row, name in enumerate(names)},
            titles=[titles.get(name, "") for name in names],
            features=features,
            skipped=skipped,
        )

    def _read_items(self, con: Any, on_stage: OnStage) -> ItemTable | None:
        if self._item_source is None:
            return None
        options = self._options
        named_columns = {
            role: name
            for role, name in (("item", options.items_key), ("title", options.title))
            if name
        }
        return read_items(
            con,
            self._item_source,
            named_columns,
            self._log.columns.item.name,
            options.features,
            lambda ratio: on_stage("items", ratio),
        )

    def _read_users(self, con: Any, on_stage: OnStage) -> UserTable | None:
        options = self._options
        if self._user_source is None or self._user_rejects is None:
            if options.user_features or options.users_key:
                raise DataError(
                    "--user-features and --users-key name columns of the users' file; give it "
                    "with --users"
                )
            return None
        return read_users(
            con,
            self._user_source,
            options.users_key,
            self._log.columns.user.name,
            options.user_features,
            self._user_rejects,
            lambda ratio: on_stage("users", ratio),
        )

    def _features(self, users: UserTable | None, num_without: int) -> dict[str, Any]:
        """Build the manifest's keys of features of users and of the log."""
        of_users = users.features if users else []
        return {
            "user_features": [
                {"name": one.name, "kind": one.kind, DECLARED_KIND: one.declared}
                for one in of_users
            ],
            "log_features": [
                {"name": one.name, "of": one.of, "kind": one.kind, DECLARED_KIND: one.declared}
                for one in self._log.features
            ],
            "users_without_row": num_without,
            "skipped_users": users.skipped if users else {},
            "rejected_users": self._user_rejects.as_dict() if self._user_rejects else {},
        }

    def _manifest(
        self,
        actions: Actions,
        table: ItemTable | None,
        described: ItemTable,
        counts: EventCounts,
        items: ItemCounts,
        notes: Sequence[str],
    ) -> dict[str, Any]:
        columns = self._log.columns
        taken = {
            "user": columns.user,
            "item": columns.item,
            "time": columns.time,
            "event": columns.event,
            "value": columns.value,
            "items: item": table.key if table else None,
            "items: title": table.title if table else None,
            "title": None if table else self._log.title,
            "position": self._log.position,
        }
        time_kind = self._log.time_kind
        of_action = counts.of_action
        return {
            "kind": KIND,
            "format": FORMAT,
            "made_by": f"npu_gr {__version__}",
            "log": {"name": self._source.name, "format": self._source.format},
            "columns": {
                role: {"name": one.name, "why": one.why}
                for role, one in taken.items()
                if one is not None
            },
            "times": time_kind.words
            if time_kind
            else "none: the row number in the log is its time",
            "is_order": time_kind is None or time_kind.least_us == 0,
            "first_time": counts.first_time,
            "last_time": counts.last_time,
            "actions": {
                "kind": actions.kind,
                "names": actions.names,
                "edges": actions.edges,
                "events": of_action,
            },
            "events": sum(of_action),
            "digest": counts.digest,
            "options": kept_options(self._options, time_kind.pattern if time_kind else ""),
            "items": items._asdict(),
            "item_key": self._log.item_key.hex(),
            "features": [
                {"name": one.column, "kind": one.kind} | ({} if table else {"of_log": True})
                for one in described.features
            ],
            "skipped": described.skipped,
            "unused": self._log.unused,
            "filtered": self._log.num_left_out,
            "duplicates": {"rows": counts.num_duplicates, "kept": self._options.keep_duplicates},
            "trimmed": self._log.num_trimmed,
            "rejected": self._rejects.as_dict(),
            "rejected_items": self._item_rejects.as_dict() if self._item_rejects else {},
            "notes": list(notes),
        }


def _check_names(found: Sequence[LogFeature], users: Sequence[str], items: Sequence[str]) -> None:
    """Check that no two features have the same name.

    Raises:
        DataError: two features do.
    """
    seen: set[str] = set()
    for name in (*(one.name for one in found), *users, *items):
        if name in seen:
            raise DataError(
                f"two features have the name {quoted(name)}; rename a column, or drop one of them"
            )
        seen.add(name)
