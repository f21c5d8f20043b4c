"""The served catalogue of a generator: versions of a file, their log, their tables on the device.

Two versions of a generator that name the same file and codes share one served catalogue.

`FilterCache` makes the filter of a request, and caches the masks of attribute queries, since a mask
takes a pass over the full catalogue, and few queries repeat (stock, country, a category). Filters
of item lists are not cached, since their cost is proportional to the list.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from npu_gr.catalogue.centroids import Centroids
from npu_gr.catalogue.change_log import NO_CHANGES, ChangeLog, Changes, log_path, read_log
from npu_gr.catalogue.filters import (
    Filter,
    allow_all,
    allow_items,
    allow_mask,
    attribute_in,
    deny_items,
)
from npu_gr.catalogue.names import EMPTY, ItemNames, key_of
from npu_gr.catalogue.records import read_items
from npu_gr.catalogue.replay import Applied, applied, replay, with_own
from npu_gr.catalogue.trie import Codebooks
from npu_gr.catalogue.versions import Catalogue, Snapshot, make_snapshot
from npu_gr.core.arrays import I64
from npu_gr.core.errors import CatalogueError
from npu_gr.core.lifetime import to_the_end
from npu_gr.core.memory import free_memory, misfit
from npu_gr.core.served import CatalogueChange, CatalogueInfo, DeltaMark
from npu_gr.engine.beam_search import Tables
from npu_gr.engine.queue import JobOrder
from npu_gr.engine.scheduler import Scheduler
from npu_gr.handlers.config import GenerateConfig
from npu_gr.handlers.scored_items import Before, Commit, Follow, accept_any, no_follower

log = logging.getLogger(__name__)

Around = Callable[[Callable[[], Awaitable[None]]], Coroutine[Any, Any, None]]
"""Calls the function that it gets, which makes a change durable, among other work."""


async def _alone(keep: Callable[[], Awaitable[None]]) -> None:
    await keep()


class FromDeltas(NamedTuple):
    """Deltas whose items a catalogue is to have."""

    mark: DeltaMark  # the last of them
    around: Around  # writes what else they change, in the same step
    is_strict: bool  # an invalid item is an error; else what does not fit is left out


# Attribute -> values. An item passes if it has one of the values of every attribute.
Query = Mapping[str, tuple[bool | int | float | str, ...]]


# Memory that reading a file of JSON lines takes at most, by its size: 8 to 11 were measured on
# 400,000 items.
LOADS = 12.0


class FilterCache:
    """An LRU cache of filters of attribute queries, limited in bytes. Thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[object, ...], Filter] = OrderedDict()
        self.bytes_used = 0

    def filter_for(
        self,
        snapshot: Snapshot,
        allow: I64 | None = None,
        deny: I64 | None = None,
        query: Query | None = None,
    ) -> Filter | None:
        """Combine withdrawals, item lists and attributes: an item must pass all of them.

        Args:
            snapshot: Version of the catalogue.
            allow: Item ids that may pass; None for all. Unknown ids are ignored.
            deny: Item ids that do not pass, if any. Unknown ids are ignored.
            query: Attributes that an item must have.

        Returns:
            The filter; None if all items of the trie pass.

        Raises:
            Unprocessable: an attribute does not exist, or a value has another type.
        """
        passing = self._queried(snapshot, query) if query else snapshot.available
        if allow is not None:
            passing = allow_items(snapshot.trie, allow, passing)
        if deny is not None:
            base = passing or self._get((snapshot.content,), lambda: allow_all(snapshot.trie))
            passing = base.without(deny_items(snapshot.trie, deny, base))
        return passing

    def _queried(self, snapshot: Snapshot, query: Query) -> Filter:
        def make() -> Filter:
            allowed = np.ones(snapshot.trie.num_items, np.bool_)
            for attribute, values in query.items():
                allowed &= attribute_in(snapshot.attributes, attribute, values)
            if snapshot.available is not None:
                allowed &= snapshot.available.allowed
            return allow_mask(snapshot.trie, allowed)

        # repr distinguishes 1, True and "1", which are equal keys of a dict or look alike.
        terms = (
            repr((name, sorted(set(values), key=repr))) for name, values in sorted(query.items())
        )
        return self._get((snapshot.version, *terms), make)

    def _get(self, key: tuple[object, ...], make: Callable[[], Filter]) -> Filter:
        with self._lock:
            if (cached := self._cached.get(key)) is not None:
                self._cached.move_to_end(key)
                return cached
        # Without the lock, so two threads may make the same filter; that is rare and harmless.
        made = make()
        size = _bytes(made)
        with self._lock:
            if key not in self._cached and size <= self._capacity_bytes:
                self._cached[key] = made
                self.bytes_used += size
                while self.bytes_used > self._capacity_bytes:
                    self.bytes_used -= _bytes(self._cached.popitem(last=False)[1])
        return made


def _bytes(filter_: Filter) -> int:
    return filter_.allowed.nbytes + sum(level.nbytes for level in filter_.valid)


class ServedCatalogue:
    """Versions of one catalogue file; empty until `reload`. Event loop only.

    A change is in the log before it is served, and the log is applied to the file whenever the file
    is read, so both survive a restart together. A rollback to a version of another file lasts until
    the next start or reload.
    """

    def __init__(self, section: GenerateConfig, scheduler: Scheduler, device: torch.device) -> None:
        """Prepare; `reload` reads the file.

        Args:
            section: Paths of the file and its log, codes of semantic IDs and their tokens.
            scheduler: Uploads the tables.
            device: Device of the tables.
        """
        self._path = Path(section.catalogue)
        self._codes = section.codes
        self._first_token = section.first_token
        self._scheduler = scheduler
        self._device = device
        self._catalogue = Catalogue()
        self.names = EMPTY  # in the folder of the file
        self._centroids: Centroids | None = None  # in the folder of the file
        self.filters = FilterCache(section.filter_cache_bytes)
        # called before a version is published, which it may reject
        self.follow: Follow = no_follower
        # content -> tables, of the current and the previous version
        self._tables: dict[str, Tables] = {}
        self._publishing = asyncio.Lock()
        path = log_path(section.catalogue, section.change_log)
        self._log = None if path is None else ChangeLog(path)
        # changes of the catalogue in service that this one is to succeed; None = it is in service
        self.carried: Changes | None = None
        # logs that this instance has written, and their last sequence numbers as it left them
        self._left: dict[Path, int] = {}

    @contextmanager
    def pin(self) -> Iterator[tuple[Snapshot, Tables]]:
        """Pin the current version and its tables for the block."""
        with self._catalogue.pin() as snapshot:
            yield snapshot, self._tables[snapshot.content]

    def tables(self) -> list[ItemNames]:
        """Return the item names of changes of this version, and those in the folder of its file."""
        with self._catalogue.pin() as snapshot:
            return [snapshot.names, self.names]

    @property
    def changes(self) -> Changes:
        """The changes of the current version since its file was read."""
        with self._catalogue.pin() as snapshot:
            return snapshot.changes

    async def reload(
        self, before: Before = accept_any, predecessor: ServedCatalogue | None = None
    ) -> CatalogueInfo:
        """Serve the file and its names as they are now, with all changes.

        Requests in progress keep their version.

        Args:
            before: Awaited with the items of the new version; its errors prevent the version.
            predecessor: The catalogue in service that this one is to succeed, whose changes it
                gets, with what only its own log has if another instance wrote that. None = the
                changes of the current version, or at the start those in the log.

        Raises:
            DataError: the file is invalid; the current version stays.
            ConfigError: its items have another key, or the log is damaged or cannot be used.
            Unavailable: the log cannot be written; the current version stays.
        """
        names = await asyncio.to_thread(ItemNames.load, self._path.parent) or EMPTY
        key_of({"the served catalogue": self.names, "the file": names})
        centroids = await asyncio.to_thread(Centroids.load, self._path.parent)

        carried = None if predecessor is None else predecessor.changes

        def read() -> Snapshot:
            file = self._read()
            if carried is not None and predecessor is not None:
                changes = _with_own_log(self._log, file, carried, predecessor, centroids)
            elif not self._catalogue.is_empty:
                changes = self.changes
            else:
                changes = NO_CHANGES if self._log is None else self._log.load()
            snapshot, dropped = replay(file, changes, centroids)
            if dropped:
                item, why = next(iter(dropped.items()))
                log.warning(
                    "%s: %d added items do not fit it and are dropped, the first is %s: %s",
                    *(self._path, len(dropped), item, why),
                )
            return snapshot

        def write(snapshot: Snapshot) -> None:
            if self._log is not None and self.carried is None:
                self._log.write(snapshot.changes)

        self.carried = carried
        info = await self._publish(read, before, write, is_strict=False)
        self.names = names
        self._centroids = centroids
        return info

    async def succeed(self, predecessor: ServedCatalogue) -> None:
        """Take the log of the catalogue in service, whose changes this one has, and close its own.

        Raises:
            Unavailable: the log cannot be written; the predecessor still has its own.
        """
        theirs, ours = predecessor._log, self._log
        if theirs is not None and ours is not None and theirs.path == ours.path:
            ours = self._log = theirs
        if ours is not None:
            await to_the_end(asyncio.to_thread(ours.take_over, theirs, self.changes))
        self._left = dict(predecessor._left)
        if theirs is not ours:
            predecessor.close()
            if theirs is not None:
                self._left[theirs.path] = theirs.sequence
        self.carried = None
        predecessor.carried = self.changes  # so a rollback to it need not read its file again

    def close(self) -> None:
        """Release the log."""
        if self._log is not None:
            self._log.close()

    async def update(
        self,
        changes: Sequence[CatalogueChange],
        before: Before = accept_any,
        deltas: FromDeltas | None = None,
    ) -> CatalogueInfo:
        """Serve a version with items added, withdrawn and restored, and keep it in the log.

        An item without a semantic ID gets one by the centroids in the folder of the file; it is in
        the result. So are new items whose id is that of another name; they are left out.

        Args:
            changes: One change; of deltas any number, in order.
            before: Awaited before the version is published; its errors prevent it.
            deltas: The deltas that have them.

        Raises:
            DataError: an item is invalid; the current version stays. Also after errors of `before`.
            Unavailable: the log cannot be written; the current version stays.
        """
        made = list[Applied]()

        def changed() -> Snapshot:
            with self._catalogue.pin() as served:
                snapshot = served
                for change in changes:
                    one = applied(
                        snapshot,
                        change,
                        [snapshot.names, self.names],
                        self._centroids,
                        is_strict=deltas is None or deltas.is_strict,
                    )
                    made.append(one)
                    snapshot = one.snapshot
                after = served.changes.then(*(one.change for one in made))
                if deltas is not None:
                    return replace(snapshot, changes=replace(after, delta=deltas.mark))
                return (
                    served
                    if snapshot.version == served.version
                    else replace(snapshot, changes=after)
                )

        def write(snapshot: Snapshot) -> None:
            if self._log is None or snapshot.changes is self.changes:
                return
            if deltas is None:
                self._log.append(made[0].change, snapshot.changes)
            else:
                self._log.write(snapshot.changes)

        info = await self._publish(
            changed,
            before,
            write,
            is_strict=deltas is None or deltas.is_strict,
            around=_alone if deltas is None else deltas.around,
        )
        items = [new for one in made for new in one.change.add if new.has_made_sid]
        return replace(
            info,
            sids={new.name or str(new.item_id): new.sid for new in items},
            rejected={name: why for one in made for name, why in one.rejected.items()},
        )

    async def _publish(
        self,
        make: Callable[[], Snapshot],
        before: Before,
        write: Callable[[Snapshot], None],
        *,
        is_strict: bool,
        around: Around = _alone,
    ) -> CatalogueInfo:
        async with self._publishing:
            snapshot = await asyncio.to_thread(make)
            await before(lambda: snapshot.item_ids)
            if snapshot.content not in self._tables:
                uploaded = await self._scheduler.call(
                    lambda: Tables.upload(snapshot.trie, self._device),
                    float("inf"),
                    order=JobOrder(0.0),
                )
                self._tables[snapshot.content] = uploaded.value
            commit = await self.follow(snapshot, is_strict)

            async def finish() -> None:
                await around(partial(asyncio.to_thread, write, snapshot))
                self._catalogue.publish(snapshot)
                commit()

            # from here on nothing fails or is cancelled: what is in the log is served
            await to_the_end(finish())
            retained = self._catalogue.contents()
            self._tables = {
                content: tables for content, tables in self._tables.items() if content in retained
            }
        return self.info()

    def _read(self) -> Snapshot:
        if self._tables and self._path.suffix == ".jsonl" and self._path.exists():
            size = LOADS * self._path.stat().st_size
            if words := misfit(self._path, size, free_memory()):
                raise CatalogueError(words)
        items = read_items(self._path)
        if len(items) and items.sids.shape[1] != len(self._codes):
            raise CatalogueError(
                f"{self._path}: semantic IDs have {items.sids.shape[1]} codes, but generate.codes "
                f"has {len(self._codes)}"
            )
        return make_snapshot(items, Codebooks.stacked(self._codes, self._first_token))

    async def rollback(self) -> CatalogueInfo:
        """Serve the previous version, and keep its changes in the log.

        Raises:
            DataError: there is no previous version.
            Unavailable: the log cannot be written; the current version stays.
        """
        async with self._publishing:
            previous = self._catalogue.kept()
            # the items of a delta are not taken from its folder again
            changes = replace(previous.changes, delta=self.changes.delta)
            commit = await self.follow(previous, False)
            if self._log is not None:
                await to_the_end(asyncio.to_thread(self._log.write, changes))
            self._catalogue.rollback()
            self._catalogue.publish(replace(previous, changes=changes))
            commit()
        return self.info()

    async def followed(self) -> Commit:
        """Let `follow` prepare for the current version."""
        with self._catalogue.pin() as snapshot:
            return await self.follow(snapshot, False)

    def info(self) -> CatalogueInfo:
        """Describe the current version."""
        return replace(self._catalogue.status(), durable=self._log is not None)

    def item_ids(self) -> I64:
        """Return the ids of all available items, ascending. Thread-safe.

        Ten million items take tens of milliseconds.
        """
        with self._catalogue.pin() as snapshot:
            return snapshot.item_ids

    def num_paths(self) -> tuple[int, ...]:
        """Return the number of semantic-ID paths of 1, 2, ... codes in the current version."""
        with self._catalogue.pin() as snapshot:
            return tuple(len(level) for level in snapshot.trie.token)


def _with_own_log(
    own: ChangeLog | None,
    file: Snapshot,
    carried: Changes,
    predecessor: ServedCatalogue,
    centroids: Centroids | None,
) -> Changes:
    """Add to the changes of a predecessor what only the own log has, if another wrote it.

    Raises:
        ConfigError: the own log is damaged.
    """
    theirs = predecessor._log
    if own is None or (theirs is not None and theirs.path == own.path):
        return carried
    found = read_log(own.path)
    if found is None or predecessor._left.get(own.path) == found.sequence:
        return carried
    changes = with_own(file, carried, found.changes, centroids)
    if more := changes.withdrawn - carried.withdrawn - carried.removed:
        log.warning(
            "%s: %d items that only this log withdraws stay withdrawn, the first is %d; "
            "restore those that are on sale again",
            *(own.path, len(more), min(more)),
        )
    return changes
