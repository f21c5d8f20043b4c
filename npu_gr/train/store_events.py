"""Write the events of a dataset to mapped files, by user: a `StoredLog`.

The dataset's files are read twice, some rows at a time: to count the events of each user, and to
put each event behind the user's earlier ones. Where the files of added logs overlap in time, a
user's events are sorted at the end, a block of users at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.dataset.actions import ActionKind
from npu_gr.dataset.cells import pa, pq
from npu_gr.dataset.files import ITEMS, USERS, Dataset, read_dataset
from npu_gr.history_store.interactions import ItemValues
from npu_gr.train.data import BLOCK_EVENTS, InteractionLog, blocks_of_users
from npu_gr.train.stored_log import COLUMNS, StoredLog

_READ_ROWS = 1 << 18  # rows of a file that are in memory at a time


@contextmanager
def stored(
    log: Path,
    features: Sequence[ItemValues],
    most_events: int,
    folder: Path,
    *,
    leaves_out: bool = False,
) -> Iterator[StoredLog | None]:
    """Store a dataset that has more than so many events, while the block runs; else yield None.

    Args:
        log: Folder of a dataset.
        features, most_events, folder: See `store`.
        leaves_out: Leave out features of users and events, and impressions, not reject them.

    Raises:
        DataError: See `store`.
        ConfigError: The dataset has features of users or events, or impressions.
    """
    dataset = read_dataset(log)
    if dataset.manifest["events"] <= most_events:
        yield None
        return
    own = [
        key for key in ("user_features", "log_features", "impressions") if dataset.manifest.get(key)
    ]
    if own and not leaves_out:
        raise ConfigError(
            f"{dataset.folder}: more than {most_events:,} events (memory_events) are read from the "
            f"disk, without its {own[0]}: prepare it without them, or raise memory_events"
        )
    try:
        yield store(dataset, features, folder, most_events)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def store(
    dataset: Dataset, features: Sequence[ItemValues], folder: Path, most_events: int
) -> StoredLog:
    """Write the events of a dataset to files, by user; they are those of `build_log`.

    Features of users and events, and impressions, are left out.

    Memory: about 40 bytes a user, and the items.

    Args:
        dataset: Dataset to read.
        features: Side features of items; items without events get a row too.
        folder: Folder for the files, which is made; its files are replaced.
        most_events: See `StoredLog`.

    Raises:
        DataError: A file of the dataset is damaged, or one cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _store(dataset, features, folder, most_events)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{dataset.folder}, in {folder}: {error}") from error


def _store(
    dataset: Dataset, features: Sequence[ItemValues], folder: Path, most_events: int
) -> StoredLog:
    is_rated = dataset.manifest["actions"]["kind"] == ActionKind.RATINGS
    known = np.sort(pq.read_table(dataset.folder / ITEMS, columns=["id"])["id"].to_numpy())
    is_used = np.isin(known, [item for one in features for item in one.of_item])
    num_users = pq.read_metadata(dataset.folder / USERS).num_rows
    counts = np.zeros(num_users, np.int64)
    values = np.empty(0)
    for users, items, actions, _ in _read(dataset, is_rated):
        if len(users) and not 0 <= users.min() <= users.max() < num_users:
            raise DataError(f"{dataset.folder}: an event's user is not in {USERS}")
        counts += np.bincount(users, minlength=num_users)
        is_used[np.searchsorted(known, items)] = True
        values = np.union1d(values, actions) if is_rated else values
    ids = known[is_used]
    names = () if is_rated else dataset.action_names
    values = values if is_rated else np.arange(len(names), dtype=np.float64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    columns = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.int64, (int(starts[-1]),))
        for name in COLUMNS
    }
    free = starts[:-1].copy()  # where each user's next event goes
    for users, items, actions, times in _read(dataset, is_rated):
        order = np.argsort(users, kind="stable")
        own, first, sizes = np.unique(users[order], return_index=True, return_counts=True)
        places = np.repeat(free[own] - first, sizes) + np.arange(len(users))
        columns["items"][places] = np.searchsorted(ids, items[order])
        columns["actions"][places] = (
            np.searchsorted(values, actions[order]) if is_rated else actions[order]
        )
        columns["times"][places] = times[order]
        free[own] += sizes
    log = InteractionLog(
        items=columns["items"],
        actions=columns["actions"],
        times=columns["times"],
        starts=starts,
        num_trained=np.zeros(num_users, np.int64),
        item_ids=ids,
        action_values=tuple(values.tolist()),
        action_names=names,
        item_key=dataset.item_key,
    )
    _order(log)
    digests = " ".join(one["digest"] for one in dataset.event_files)
    return StoredLog(log=log, made_from=digests, most_events=most_events)


def _read(dataset: Dataset, is_rated: bool) -> Iterator[tuple[Any, ...]]:
    """Read users, items, values or actions, and times, some rows at a time."""
    wanted = ["user", "item", "value" if is_rated else "action", "time"]
    for one in dataset.event_files:
        with pq.ParquetFile(dataset.folder / one["name"]) as file:
            for batch in file.iter_batches(_READ_ROWS, columns=wanted):
                yield tuple(batch[name].to_numpy() for name in wanted)


def _order(log: InteractionLog) -> None:
    """Put each user's events in order of time where files of added logs overlap; stable."""
    for users in blocks_of_users(log, BLOCK_EVENTS):
        part = slice(int(log.starts[users.start]), int(log.starts[users.stop]))
        own = np.repeat(np.arange(users.start, users.stop), np.diff(log.starts)[users])
        order = np.lexsort((log.times[part], own))
        if (np.diff(order) != 1).any():
            for name in COLUMNS:
                column = getattr(log, name)
                column[part] = column[part][order]
