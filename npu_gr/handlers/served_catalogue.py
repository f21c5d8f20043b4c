"""The catalogue that a generator finds items in: versions of a file, and their tables on the device.

Two versions of a generator that name the same file and codes share one served catalogue.

`FilterCache` makes the filter of a request, and keeps the masks of attribute queries: such a mask
takes a pass over the whole catalogue, and the same few queries come again and again (stock,
country, a category). Filters of item lists are not kept: they cost time in proportion to the list.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from npu_gr.catalogue.centroids import Centroids, SidMaker
from npu_gr.catalogue.filters import (
    Filter,
    allow_all,
    allow_items,
    allow_mask,
    attribute_in,
    deny_items,
)
from npu_gr.catalogue.names import EMPTY, ItemNames
from npu_gr.catalogue.records import Record, as_items, read_items
from npu_gr.catalogue.trie import Codebooks
from npu_gr.catalogue.versions import (
    Catalogue,
    Snapshot,
    add,
    make_snapshot,
    name,
    restore,
    withdraw,
)
from npu_gr.core.arrays import I64
from npu_gr.core.errors import CatalogueError
from npu_gr.core.served import CatalogueChange, CatalogueInfo
from npu_gr.engine.beam_search import Tables
from npu_gr.engine.queue import JobOrder
from npu_gr.engine.scheduler import Scheduler
from npu_gr.handlers.scored_items import Before, Commit, Follow, anything, nobody

# Attribute -> values. An item passes if, of every attribute named, it has one of the values.
Query = Mapping[str, tuple[bool | int | float | str, ...]]


class FilterCache:
    """Filters of attribute queries; evicts the least recently used beyond a number of bytes.

    Any thread may call.
    """

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
        """Combine withdrawals, lists and attributes: an item passes if it passes them all.

        Args:
            snapshot: the version.
            allow: the only item ids that pass; None = no such list. Ids that the catalogue lacks
                are ignored.
            deny: item ids that do not pass; None = no such list. Ids that the catalogue lacks are
                ignored.
            query: attributes that an item must have.

        Returns:
            The filter; None = every item of the trie passes.

        Raises:
            Unprocessable: no such attribute, or a value of another kind than the attribute's.
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

        # repr tells 1 from True, and "1" from 1: they are equal keys of a dict, or look alike, but
        # other queries.
        terms = (
            repr((name, sorted(set(values), key=repr))) for name, values in sorted(query.items())
        )
        return self._get((snapshot.version, *terms), make)

    def _get(self, key: tuple[object, ...], make: Callable[[], Filter]) -> Filter:
        with self._lock:
            if (cached := self._cached.get(key)) is not None:
                self._cached.move_to_end(key)
                return cached
        # Outside the lock: two threads may make the same filter at once. That is rare, and the two
        # are equal.
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
    """Versions of one catalogue file; empty until `reload`. Event loop only."""

    def __init__(
        self,
        path: Path,
        codes: tuple[int, ...],
        first_token: int,
        filter_cache_bytes: int,
        scheduler: Scheduler,
        device: torch.device,
    ) -> None:
        """Nothing is read yet.

        Args:
            path: .jsonl, .parquet or .bin: items and their semantic IDs.
            codes: number of codes of each level of a semantic ID.
            first_token: token of the first level's code 0; the other levels follow.
            filter_cache_bytes: for the masks of attribute queries.
            scheduler: uploads the tables.
            device: where the tables go.
        """
        self._path = path
        self._codes = codes
        self._first_token = first_token
        self._scheduler = scheduler
        self._device = device
        self._catalogue = Catalogue()
        self._names = EMPTY
        self._centroids: Centroids | None = None  # beside the file
        self.filters = FilterCache(filter_cache_bytes)
        # asked before a version comes into service, which it may reject
        self.follow: Follow = nobody
        # content -> tables, of the version in service and of the one kept
        self._tables: dict[str, Tables] = {}
        self._publishing = asyncio.Lock()

    @contextmanager
    def pin(self) -> Iterator[tuple[Snapshot, Tables]]:
        """Keep the version in service, and its tables, while the block runs."""
        with self._catalogue.pin() as snapshot:
            yield snapshot, self._tables[snapshot.content]

    def tables(self) -> list[ItemNames]:
        """List the names of items that the changes of this version brought, and those beside its file."""
        with self._catalogue.pin() as snapshot:
            return [snapshot.names, self._names]

    async def reload(self, before: Before = anything) -> CatalogueInfo:
        """Read the file again, and the names beside it, and serve it.

        Requests in progress keep their version.

        Raises:
            DataError: names the file, the record and the reason; the version served before still
                is. What `before` raises; the same.
        """
        names = await asyncio.to_thread(ItemNames.load, self._path.parent) or EMPTY
        centroids = await asyncio.to_thread(Centroids.load, self._path.parent)
        info = await self._publish(self._read, before, is_strict=False)
        self._names = names
        self._centroids = centroids
        return info

    async def update(self, change: CatalogueChange, before: Before = anything) -> CatalogueInfo:
        """Serve a version with items added, withdrawn and restored.

        The file does not change, so a reload undoes this.

        An item without a semantic ID gets one by the centroids beside the file; the answer has it.

        Raises:
            DataError: names the item and the reason; the version served before still is.
            What `before` raises; the same.
        """
        made: dict[str, tuple[int, ...]] = {}

        def changed() -> Snapshot:
            with self._catalogue.pin() as snapshot:
                if change.add:
                    sids = SidMaker(snapshot.trie, self._centroids).all_of(change.add)
                    records = [
                        Record(new.item_id, list(sid), new.order, new.attributes, new.features)
                        for new, sid in zip(change.add, sids, strict=True)
                    ]
                    pairs = zip(change.add, sids, strict=True)
                    made.update(
                        (new.name or str(new.item_id), sid) for new, sid in pairs if not new.sid
                    )
                    names = snapshot.names
                    snapshot = add(snapshot, as_items(records, lambda row: f"record {row + 1}"))
                    named = [new for new in change.add if new.name or new.title]
                    texts = [new.name or str(new.item_id) for new in named]
                    snapshot = name(
                        replace(snapshot, names=names), texts, [new.title for new in named]
                    )
                if change.withdraw is not None:
                    snapshot = withdraw(snapshot, change.withdraw)
                return snapshot if change.restore is None else restore(snapshot, change.restore)

        return replace(await self._publish(changed, before, is_strict=True), sids=made)

    async def _publish(
        self, make: Callable[[], Snapshot], before: Before, *, is_strict: bool
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
            self._catalogue.publish(snapshot)
            commit()
            kept = self._catalogue.contents()
            self._tables = {
                content: tables for content, tables in self._tables.items() if content in kept
            }
        return self.info()

    def _read(self) -> Snapshot:
        items = read_items(self._path)
        if len(items) and items.sids.shape[1] != len(self._codes):
            raise CatalogueError(
                f"{self._path}: semantic IDs of {items.sids.shape[1]} codes, generate.codes names "
                f"{len(self._codes)}"
            )
        return make_snapshot(items, Codebooks.stacked(self._codes, self._first_token))

    async def rollback(self) -> CatalogueInfo:
        """Serve the version before.

        Raises:
            DataError: no earlier version is kept.
        """
        async with self._publishing:
            commit = await self.follow(self._catalogue.kept(), False)
            self._catalogue.rollback()
            commit()
        return self.info()

    async def followed(self) -> Commit:
        """Ask who follows to prepare for the version in service."""
        with self._catalogue.pin() as snapshot:
            return await self.follow(snapshot, False)

    def info(self) -> CatalogueInfo:
        """Describe the version in service."""
        return self._catalogue.status()

    def item_ids(self) -> I64:
        """List the items that can be found, in ascending order.

        Ten million take tens of milliseconds. Any thread.
        """
        with self._catalogue.pin() as snapshot:
            return snapshot.item_ids

    def num_paths(self) -> tuple[int, ...]:
        """Count the semantic-ID paths of 1, 2, ... codes in the version in service."""
        with self._catalogue.pin() as snapshot:
            return tuple(len(level) for level in snapshot.trie.token)
