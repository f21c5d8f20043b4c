"""Versions of a catalogue: the served one, and the previous one for a rollback.

A request sees the same version from start to end. A change makes a new snapshot, which
`Catalogue.publish` puts into service; snapshots are immutable:
  withdraw, restore   share the trie and copy the filter, one byte for each item and edge: tens of
                      milliseconds at ten million items
  add                 merges new items in and removes the withdrawn ones: copies each table once and
                      sorts nothing again, three seconds at ten million items, on another thread
                      than the event loop
The arrays of an older version are freed when no request uses it any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import orjson
import xxhash

from npu_gr.catalogue.build import build_trie, insert, restrict
from npu_gr.catalogue.change_log import NO_CHANGES, Changes
from npu_gr.catalogue.filters import Filter, allow_all, allow_mask, deny_items
from npu_gr.catalogue.names import EMPTY, ItemNames
from npu_gr.catalogue.records import Column, Features, Items
from npu_gr.catalogue.trie import Codebooks, Mask, Trie
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import CatalogueError, DataError
from npu_gr.core.lifetime import Published
from npu_gr.core.served import CatalogueInfo
from npu_gr.core.text_format import cut, quoted


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Snapshot:
    """One version of the catalogue. Immutable. N = items of the trie."""

    trie: Trie
    order: F32 | None  # [N] order scores, by place in `trie.leaf_item`
    attributes: dict[str, Column]  # by name, [N] by place in `trie.leaf_item`
    # by item id: features from which a ranker scores items that it was not trained with
    features: Mapping[int, Features]
    content: str  # digest of the fields above
    names: ItemNames = EMPTY  # of hashed items and items with a title; no part of the digests
    changes: Changes = NO_CHANGES  # since the file was read; no part of the digests
    # ids of withdrawn items that were then removed from the trie; ascending
    removed: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    # allows all but the withdrawn items; None = no item is withdrawn
    available: Filter | None = None
    # digest of `content` and of the withdrawn items; equals `content` if there are none
    version: str

    @property
    def num_items(self) -> int:
        """Number of items that are not withdrawn."""
        return (
            int(np.count_nonzero(self.available.allowed)) if self.available else self.trie.num_items
        )

    @property
    def item_ids(self) -> I64:
        """Ids of the items that are not withdrawn, ascending; tens of ms at ten million items."""
        places = self.trie.by_id
        if self.available is not None:
            places = places[self.available.allowed[places]]
        found: I64 = self.trie.leaf_item[places]
        return found

    @property
    def withdrawn_ids(self) -> I64:
        """Ids of all withdrawn items, also those removed from the trie; ascending."""
        if self.available is None:
            return self.removed
        return np.union1d(self.removed, self.trie.leaf_item[~self.available.allowed])

    @property
    def num_bytes(self) -> int:
        """Bytes of the trie, the columns and the filter."""
        columns = [*self.attributes.values()]
        if self.order is not None:
            columns.append(self.order)
        if self.available:
            columns += [self.available.allowed, *self.available.valid]
        return self.trie.num_bytes + sum(column.nbytes for column in columns)


def make_snapshot(items: Items, codebooks: Codebooks) -> Snapshot:
    """Build the trie, and sort the columns in the order of its items.

    Args:
        items: Records of a file.
        codebooks: Codes of each level and their tokens in the vocabulary.

    Raises:
        CatalogueError: the records make no trie (see `build_trie`).
    """
    # Without items the number of levels comes from the codebooks.
    sids = items.sids if len(items) else np.empty((0, len(codebooks)), np.int32)
    trie = build_trie(sids, items.item_ids, codebooks, items.order)
    rows = np.empty(len(items), np.int64)
    # Two sorts take seconds at ten million items; looking each item up would take a minute.
    rows[trie.by_id] = np.argsort(items.item_ids)
    attributes = {
        name: _narrowed(items.attributes[name])[rows] for name in sorted(items.attributes)
    }
    return _snapshot(
        trie, None if items.order is None else items.order[rows], attributes, items.features
    )


def _snapshot(
    trie: Trie, order: F32 | None, attributes: dict[str, Column], features: Mapping[int, Features]
) -> Snapshot:
    hasher = xxhash.xxh3_128(trie.digest().encode())
    for name, column in [("", order), *attributes.items()]:
        if column is not None:
            hasher.update(f"{name!r}{column.dtype.str}".encode())
            hasher.update(column.view(np.uint8).data)
            column.flags.writeable = False
    if features:
        hasher.update(orjson.dumps(sorted(features.items()), option=orjson.OPT_SORT_KEYS))
    content = hasher.hexdigest()
    return Snapshot(
        trie=trie,
        order=order,
        attributes=attributes,
        features=features,
        content=content,
        version=content,
    )


def withdraw(snapshot: Snapshot, item_ids: I64) -> Snapshot:
    """Withdraw items, so that no request gets them. Repeats are allowed.

    Raises:
        CatalogueError: the trie lacks an item.
    """
    _places(snapshot, item_ids)
    base = snapshot.available or allow_all(snapshot.trie)
    return _with_available(snapshot, base.without(deny_items(snapshot.trie, item_ids, base)))


def restore(snapshot: Snapshot, item_ids: I64) -> Snapshot:
    """Restore withdrawn items with their former SIDs. Items that are not withdrawn stay.

    Raises:
        CatalogueError: the trie lacks an item, which must be added again (`add`).
    """
    places = _places(snapshot, item_ids)
    if snapshot.available is None:
        return snapshot
    allowed = snapshot.available.allowed.copy()
    allowed[places] = True
    return _with_available(snapshot, allow_mask(snapshot.trie, allowed))


def add(snapshot: Snapshot, items: Items) -> Snapshot:
    """Merge items into the trie, and remove the withdrawn ones from it.

    A withdrawn item may return with another SID.

    Args:
        snapshot: the version to change.
        items: New items. They must have an order score and attributes if and only if the snapshot's
            items have them, of the same types.

    Raises:
        CatalogueError: an item exists already, the columns differ from the snapshot's, or the items
            make no trie (see `build_trie`). Record numbers count in `items`, from 1.
    """
    added = _added(snapshot, items)
    if added is snapshot:
        return snapshot
    return replace(added, removed=np.setdiff1d(snapshot.withdrawn_ids, items.item_ids))


def _added(snapshot: Snapshot, items: Items) -> Snapshot:
    trie = snapshot.trie
    available = (
        snapshot.available.allowed if snapshot.available else np.ones(trie.num_items, np.bool_)
    )
    if not len(items) and available.all():
        return snapshot
    if not available.any():
        return make_snapshot(items, trie.codebooks)
    if not len(items):
        return _restricted(snapshot, available)
    places = trie.places(items.item_ids)
    repeated = (places >= 0) & available[places]
    if repeated.any():
        row = int(np.argmax(repeated))
        raise CatalogueError(
            f"record {row + 1}: item {items.item_ids[row]} is already in the catalogue"
        )
    if items.sids.shape[1] != trie.num_levels:
        raise CatalogueError(
            f"SIDs of {items.sids.shape[1]} codes, those of the catalogue have {trie.num_levels}"
        )
    _check_columns(snapshot, items)
    base = snapshot if available.all() else _restricted(snapshot, available)
    more = make_snapshot(items, trie.codebooks)
    merged, before = insert(base.trie, base.order, more.trie, more.order)
    order = (
        None
        if base.order is None or more.order is None
        else np.insert(base.order, before, more.order)
    )
    attributes = {
        name: _narrowed(
            np.insert(
                column.astype(np.result_type(column, more.attributes[name])),
                before,
                more.attributes[name],
            )
        )
        for name, column in base.attributes.items()
    }
    return _snapshot(merged, order, attributes, {**base.features, **items.features})


def name(snapshot: Snapshot, ids: I64, names: Sequence[str], titles: Sequence[str]) -> Snapshot:
    """Add names and titles of items to the version, and drop those of items that it lacks.

    Raises:
        DataError: a name occurs twice, or two names have the same id.
    """
    added = ItemNames.make(names, titles, ids=ids)
    retained = snapshot.names.ids[
        (snapshot.trie.places(snapshot.names.ids) >= 0) & (added.find(snapshot.names.ids) < 0)
    ]
    entries = snapshot.names.find(retained)
    table = ItemNames.make(
        [*snapshot.names.names_at(entries), *names],
        [*snapshot.names.titles_at(entries), *titles],
        ids=np.concatenate((retained, ids)),
    )
    return replace(snapshot, names=table)


def _check_columns(snapshot: Snapshot, items: Items) -> None:
    if (items.order is None) != (
        snapshot.order is None
    ) or items.attributes.keys() != snapshot.attributes.keys():
        theirs = (
            ", ".join(["order"] * (snapshot.order is not None) + sorted(snapshot.attributes))
            or "none"
        )
        raise CatalogueError(f"columns {cut(_columns(items))}, those of the catalogue are {theirs}")
    for name, column in items.attributes.items():
        was = snapshot.attributes[name].dtype
        if column.dtype.kind != was.kind and (column.dtype.kind, was.kind) != ("i", "f"):
            raise CatalogueError(
                f"attribute {quoted(name)} of type {column.dtype}, that of the catalogue is {was}"
            )


def _restricted(snapshot: Snapshot, retained: Mask) -> Snapshot:
    """Remove all items but the retained ones, of which there must be at least one."""
    order = None if snapshot.order is None else snapshot.order[retained]
    attributes = {name: _narrowed(column[retained]) for name, column in snapshot.attributes.items()}
    trie = restrict(snapshot.trie, retained)
    ids = np.fromiter(snapshot.features, np.int64)
    features = {item: snapshot.features[item] for item in ids[trie.places(ids) >= 0].tolist()}
    return _snapshot(trie, order, attributes, features)


class Catalogue:
    """The served version and the previous one. Thread-safe.

    Readers take one reference and never wait; publishers wait for each other.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._published: Published[Snapshot] = Published("the catalogue", clock)
        self._turn = threading.Lock()  # from the check of a new version to its publication

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been published."""
        return self._published.is_empty

    def publish(self, snapshot: Snapshot) -> None:
        """Serve this version, and keep the one before, unless an equal one is served already.

        Raises:
            CatalogueError: the version has other codebooks than the served one, with which the
                model was trained; nothing was changed.
        """
        with self._turn:
            if not self._published.is_empty:
                served = self._published.current
                if snapshot.trie.codebooks != served.trie.codebooks:
                    raise CatalogueError(
                        f"{snapshot.trie.codebooks}, the catalogue has {served.trie.codebooks}"
                    )
                if snapshot.version == served.version:
                    self._published.amend(snapshot)  # its changes may be those of another file
                    return
            self._published.publish(snapshot)

    def kept(self) -> Snapshot:
        """Return the version that `rollback` would serve.

        Raises:
            DataError: there is no previous version.
        """
        if (previous := self._published.previous) is None:
            raise DataError("there is no previous version of the catalogue")
        return previous

    def rollback(self) -> None:
        """Swap the served and the previous version; a second rollback undoes the first.

        Raises:
            DataError: there is no previous version; nothing was changed.
        """
        with self._turn:
            self._published.rollback()

    @contextmanager
    def pin(self) -> Iterator[Snapshot]:
        """Hold the served version for the block, whatever is published meanwhile.

        Raises:
            Unavailable: nothing has been published.
        """
        yield self._published.current

    def status(self) -> CatalogueInfo:
        """Describe the served version, as of one instant.

        Raises:
            Unavailable: nothing has been published.
        """
        now = self._published.now
        return CatalogueInfo(
            version=now.current.version,
            num_items=now.current.num_items,
            num_bytes=now.current.num_bytes,
            age_s=self._clock() - now.published_at,
            previous=now.previous.version if now.previous else None,
        )

    def contents(self) -> set[str]:
        """Return `Snapshot.content` of the served and of the previous version.

        Raises:
            Unavailable: nothing has been published.
        """
        now = self._published.now
        return {snapshot.content for snapshot in (now.current, now.previous) if snapshot}


def _places(snapshot: Snapshot, item_ids: I64) -> I64:
    places = snapshot.trie.places(item_ids)
    if (places < 0).any():
        row = int(np.argmax(places < 0))
        raise CatalogueError(f"record {row + 1}: item {item_ids[row]} is not in the catalogue")
    return places


def _with_available(snapshot: Snapshot, available: Filter) -> Snapshot:
    is_all = bool(available.allowed.all())
    digest = xxhash.xxh3_128(snapshot.content.encode() + available.allowed.tobytes()).hexdigest()
    return replace(
        snapshot,
        available=None if is_all else available,
        version=snapshot.content if is_all else digest,
    )


def _columns(items: Items) -> str:
    return ", ".join(["order"] * (items.order is not None) + sorted(items.attributes)) or "none"


def _narrowed(column: Column) -> Column:
    """Convert text to the narrowest dtype, so that equal columns have equal bytes and digests."""
    if column.dtype.kind != "U":
        return column
    return column.astype(f"U{max(1, int(np.char.str_len(column).max(initial=0)))}")
