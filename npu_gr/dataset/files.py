"""The folder of a dataset: its files, and how to read them.

    manifest.json    chosen columns and why, actions, counts; `"kind": "npu_gr dataset"`
    events.parquet   by user, oldest first: user int32 (row of users.parquet), item int64,
                     action int16, value float64 (of ratings and ranges), time int64 (unix
                     seconds), and `feature.X` of each feature X of the log: a number, a text,
                     or a list of texts; events-0001.parquet, ... of logs that were added
    impressions.parquet   items that were shown, and no behaviour: user, item, time, position
    users.parquet    name, and `feature.X` of each feature X of users
    items.parquet    id int64, name, title, and `feature.X`: a text, or a list of texts
    rejected.jsonl   the first rejected rows, each with its reason

events, users and rejected hold personal data: only their owner may read them (mode 0600).

A dataset is written to a temporary sibling folder and then renamed, so that an interrupted run
leaves the previous one:

    .data.new   the folder being written; deleted when the run ends, or by the next run
    .data.old   the previous dataset between two renames; the next run puts it back
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.errors import DataError
from npu_gr.core.feature_schema.values import name_of
from npu_gr.dataset.actions import ActionKind
from npu_gr.dataset.cells import pa, pc, pq
from npu_gr.history_store.interactions import (
    DeclaredKind,
    FeatureColumn,
    Impressions,
    Interactions,
    ItemValues,
    LogFeatureOf,
)

KIND = "npu_gr dataset"
FORMAT, MANY_FILES = 1, 2  # of the manifest; 2: with files of logs that were added
MANIFEST = "manifest.json"
EVENTS = "events.parquet"
IMPRESSIONS = "impressions.parquet"
ADDED = ("events-*.parquet", "impressions-*.parquet")  # of logs that were added
POSITION = "position"  # column of the place of an item among those shown; -1 = not known
USERS = "users.parquet"
ITEMS = "items.parquet"
REJECTED = "rejected.jsonl"
FEATURE = "feature."  # prefix of a feature's column
NUMBER = "number."  # prefix of the column of numbers whose ranges are the feature
# users are sorted by code modulo this; the digest of a dataset depends on it
NUM_PARTS = 64
DECLARED_KIND = "told"  # key of the manifest: the kind that --...-features NAME:KIND gave


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset; its files are read on demand."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def action_names(self) -> tuple[str, ...]:
        """Names of the actions by index; ratings are named by their number."""
        return tuple(self.manifest["actions"]["names"])

    @property
    def item_key(self) -> bytes:
        """Key of the items' ids; empty = they have none, as in datasets of older versions."""
        return bytes.fromhex(self.manifest.get("item_key", ""))

    @property
    def event_files(self) -> list[dict[str, Any]]:
        """The files of events, oldest log first: name, counts, first and last time, digest."""
        found: list[dict[str, Any]] = self.manifest.get("event_files", [])
        keys = ("events", "first_time", "last_time", "digest")
        return found or [{"name": EVENTS} | {key: self.manifest[key] for key in keys}]

    def interactions(self, only: Collection[str] | None = None) -> Interactions:
        """Read all events, in time order (of equal times: by user, then as the log has them).

        A value is the index of the event's action, or the rating itself if the actions are
        ratings.

        Args:
            only: Names of the files of events to read; None = all.

        Raises:
            DataError: a file is missing or damaged.
        """
        is_rated = self.manifest["actions"]["kind"] == ActionKind.RATINGS
        columns = ["user", "item", "value" if is_rated else "action", "time"]
        wanted = columns + [FEATURE + one["name"] for one in self._features("log_features")]
        files = [one["name"] for one in self.event_files if only is None or one["name"] in only]
        has_position = all(POSITION in self._columns_of(name) for name in files)
        wanted += [POSITION] if has_position else []
        table = pa.concat_tables(self._read(name, wanted) for name in files)
        users, items, values, times = (table[name].to_numpy() for name in columns)
        if len(files) > 1:  # the order that one file would have
            order = np.lexsort((users, users % NUM_PARTS, times))
        else:
            order = np.argsort(times, kind="stable")
        listed = self._read(
            USERS, ["name", *(FEATURE + one["name"] for one in self._features("user_features"))]
        )
        names = listed["name"].to_pylist()
        if len(users) and not 0 <= users.min() <= users.max() < len(names):
            raise DataError(f"{self.folder / EVENTS}: a user is not in {USERS}")
        shown = None
        if self.manifest.get("impressions"):
            tables = [
                self._read(impressions_of(name), ["user", "item", "time", POSITION])
                for name in files
                if (self.folder / impressions_of(name)).exists()
            ]
            joined = pa.concat_tables(tables)
            shown = Impressions(
                joined["user"].to_numpy(),
                joined["item"].to_numpy(),
                joined["time"].to_numpy(),
                joined[POSITION].to_numpy(),
                table[POSITION].to_numpy()[order] if has_position else None,
            )
        return Interactions(
            users[order],
            items[order],
            values[order].astype(np.float64),
            times[order],
            names,
            () if is_rated else self.action_names,
            (
                *(self._column(one, "user", listed) for one in self._features("user_features")),
                *(
                    self._column(one, one["of"], table).of_events(order)
                    for one in self._features("log_features")
                ),
            ),
            shown,
            self.item_key,
        )

    def _features(self, key: str) -> list[dict[str, Any]]:
        """Read a list of features from the manifest; older manifests have none."""
        found: list[dict[str, Any]] = self.manifest.get(key, [])
        return found

    @staticmethod
    def _column(one: Mapping[str, Any], of: LogFeatureOf, table: Any) -> FeatureColumn:
        return _feature_column(one["name"], of, one[DECLARED_KIND], table[FEATURE + one["name"]])

    def item_features(self) -> list[ItemValues]:
        """Read the features of items.

        Raises:
            DataError: a file is missing or damaged.
        """
        columns = {one["name"]: FEATURE + one["name"] for one in self.manifest["features"]}
        there = self._columns_of(ITEMS)
        numbers = {name: NUMBER + name for name in columns if NUMBER + name in there}
        table = self._read(ITEMS, ["id", *columns.values(), *numbers.values()])
        ids = table["id"].to_pylist()
        found = [
            _values(name, ids, table[column].combine_chunks()) for name, column in columns.items()
        ]
        for one in found:
            if one.name in numbers:
                own = zip(ids, table[numbers[one.name]].to_pylist(), strict=True)
                one.numbers.update((item, number) for item, number in own if number is not None)
        return found

    @cached_property
    def users(self) -> Any:
        """The table of users.parquet."""
        return pq.read_table(self.folder / USERS).combine_chunks()

    @cached_property
    def items(self) -> Any:
        """The table of items.parquet."""
        return pq.read_table(self.folder / ITEMS).combine_chunks()

    @cached_property
    def names(self) -> ItemNames:
        """Names and titles of all items of the log and of the items' file.

        Raises:
            DataError: a file is missing or damaged.
        """
        table = self._read(ITEMS, ["name", "title"])
        names, titles = table["name"].to_pylist(), table["title"].to_pylist()
        return ItemNames.make(names, titles, self.item_key)

    def _columns_of(self, name: str) -> list[str]:
        path = self.folder / name
        try:
            return list(pq.read_schema(path).names)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: {error}; npu-gr prepare makes it anew") from error

    def _read(self, name: str, columns: list[str]) -> Any:
        path = self.folder / name
        try:
            return pq.read_table(path, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: {error}; npu-gr prepare makes it anew") from error


def impressions_of(events: str) -> str:
    """Return the file of impressions next to a file of events."""
    return events.replace("events", "impressions", 1)


def is_dataset(folder: Path) -> bool:
    """Whether the manifest of a folder says that it is a dataset."""
    try:
        return bool(json.loads((folder / MANIFEST).read_bytes()).get("kind") == KIND)
    except (OSError, ValueError, AttributeError):
        return False


def read_dataset(folder: Path | str) -> Dataset:
    """Open a dataset.

    Raises:
        DataError: the folder is not a dataset; the message has the command that makes one.
    """
    folder = Path(folder)
    if not is_dataset(folder):
        raise DataError(f"{folder}: no dataset; npu-gr prepare LOG --out {folder} makes one")
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if manifest["format"] not in (FORMAT, MANY_FILES):
        raise DataError(
            f"{folder}: the dataset has format {manifest['format']}, this version reads {FORMAT} "
            f"and {MANY_FILES}; prepare it anew"
        )
    return Dataset(folder=folder, manifest=manifest)


def _values(name: str, ids: list[int], column: Any) -> ItemValues:
    """Read one feature: texts or lists of texts, null or empty where an item has no value."""
    if pa.types.is_list(column.type):
        encoded = pc.list_flatten(column).dictionary_encode()
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        places = np.split(encoded.indices.to_numpy(), np.cumsum(counts)[:-1])
        of_item = {item: found.tolist() for item, found in zip(ids, places, strict=True)}
    else:
        encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        of_item = {
            item: [] if at is None else [at]
            for item, at in zip(ids, encoded.indices.to_pylist(), strict=True)
        }
    # spellings of one name are one value, as for the service
    known: dict[str | None, int] = {}
    texts: list[str] = encoded.dictionary.to_pylist()
    place_of = [known.setdefault(name_of(text), len(known)) for text in texts]
    if len(known) < len(texts):
        values = [texts[place_of.index(place)] for place in range(len(known))]
        merged = {
            item: [*dict.fromkeys(place_of[at] for at in one)] for item, one in of_item.items()
        }
        return ItemValues(name, values, merged)
    return ItemValues(name, texts, of_item)


def _feature_column(
    name: str, of: LogFeatureOf, declared: DeclaredKind, column: Any
) -> FeatureColumn:
    """Read a feature of the log or of users: numbers, texts, or lists of texts."""
    joined = column.combine_chunks()
    if pa.types.is_floating(joined.type):
        values = pc.fill_null(joined, np.nan).to_numpy(zero_copy_only=False)
    else:
        values = np.fromiter(joined.to_pylist(), np.object_, len(joined))
    return FeatureColumn(name=name, of=of, values=values, kind=declared)


@contextmanager
def replaced_folder(
    out: Path, is_ours: Callable[[Path], bool], files: tuple[str, ...]
) -> Iterator[Path]:
    """Yield an empty temporary folder that replaces `out` at the end of the block.

    Args:
        out: The folder; it is missing, empty, or one that we wrote.
        is_ours: Function that returns whether we wrote a folder.
        files: Names and patterns of all files that such a folder may have.

    Raises:
        DataError: `out` holds other files, another process writes it, or it cannot be written; it
            is unchanged.
    """
    out = out.resolve()  # replaces the target of a link, not the link
    new, old = (out.with_name(f".{out.name}.{word}") for word in ("new", "old"))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        new.mkdir(exist_ok=True)
        held = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror}") from error
    try:
        _lock(held, new, out)
        try:
            if old.exists() and not out.exists():
                old.rename(out)
            shutil.rmtree(old, ignore_errors=True)
            _check(out, is_ours, files)
            for path in new.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield new
            for path in new.iterdir():
                _sync(path)
            _sync(new)
            if out.exists():
                out.rename(old)
            new.rename(out)
            _sync(out.parent)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise DataError(f"{out}: cannot be written: {error.strerror or error}") from error
        finally:
            # after our rename, `new` may be another run's folder
            if _is_held(held, new):
                shutil.rmtree(new, ignore_errors=True)
    finally:
        os.close(held)


def _lock(held: int, new: Path, out: Path) -> None:
    """Lock the folder while the process lives.

    It is not ours if another run has just renamed it to `out`.
    """
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = _is_held(held, new)
    except BlockingIOError:
        is_ours = False
    if not is_ours:
        raise DataError(
            f"{out}: another npu-gr prepare is writing it; run this one again when that has ended"
        )


def _is_held(held: int, new: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held), new.stat())
    except FileNotFoundError:
        return False


def _check(out: Path, is_ours: Callable[[Path], bool], files: tuple[str, ...]) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out}: a file; --out must name a folder")
    names = sorted(path.name for path in out.iterdir())
    others = [name for name in names if not any(fnmatch(name, one) for one in files)]
    if others or (any(out.iterdir()) and not is_ours(out)):
        what = f"holds {others[0]}, which is no file of a dataset" if others else "holds no dataset"
        raise DataError(
            f"{out}: {what}; --out must name a new folder, or one that npu-gr prepare wrote"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
