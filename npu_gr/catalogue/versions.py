"""Versions of a catalogue: one is served, the one before it is kept, and a request sees one from start to end.

A change makes a new snapshot, which `Catalogue.publish` puts into service. Nothing that a request
holds is written:
  withdraw, restore   share the trie and copy the filter, one byte an item and an edge: tens of milliseconds at ten
                      million items
  add                 merges the new items in and removes the withdrawn ones: each table is copied once, nothing is
                      sorted again: three seconds at ten million items, in a thread beside the event
                      loop
Reference counting frees the arrays of a version that is neither served nor kept once no request
holds it.
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
    """One version of the catalogue. N = items of the trie. Never changed in place."""

    trie: Trie
    order: F32 | None  # [N] order scores, by place in `trie.leaf_item`
    attributes: dict[str, Column]  # by name, [N] by place in `trie.leaf_item`
    # by item id: what a ranker may know of an item that it was not trained with
    features: Mapping[int, Features]
    content: str  # digest of the fields above
    names: ItemNames = EMPTY  # of items that came by text or with a title; no part of the digests
    # ids withdrawn, then dropped; ascending
    removed: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    # allows all but the withdrawn items; None: nothing is withdrawn
    available: Filter | None = None
    # digest of `content` and of the withdrawn items; `content` itself if there are none
    version: str

    @property
    def num_items(self) -> int:
        """Number of items that are not withdrawn."""
        return (
            int(np.count_nonzero(self.available.allowed)) if self.available else self.trie.num_items
        )

    @property
    def item_ids(self) -> I64:
        """Ids of the items that are not withdrawn, ascending.

        Ten million take tens of milliseconds.
        """
        places = self.trie.by_id
        if self.available is not None:
            places = places[self.available.allowed[places]]
        found: I64 = self.trie.leaf_item[places]
        return found

    @property
    def withdrawn_ids(self) -> I64:
        """Ids of the withdrawn items, those that the trie no longer holds included; ascending."""
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
    """Build the trie and sort the columns as its items are.

    Args:
        items: the records of a file.
        codebooks: the codes of each level and their tokens in the model's vocabulary.

    Raises:
        CatalogueError: the records do not make a trie, see `build_trie`.
    """
    # An empty file does not say how many codes its SIDs have; the codebooks do.
    sids = items.sids if len(items) else np.empty((0, len(codebooks)), np.int32)
    trie = build_trie(sids, items.item_ids, codebooks, items.order)
    rows = np.empty(len(items), np.int64)
    # seconds at ten million items; looking each up takes a minute
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
    """Withdraw items: requests no longer see them. Items that are withdrawn already stay so.

    Raises:
        CatalogueError: the trie does not hold an item.
    """
    _places(snapshot, item_ids)
    base = snapshot.available or allow_all(snapshot.trie)
    return _with_available(snapshot, base.without(deny_items(snapshot.trie, item_ids, base)))


def restore(snapshot: Snapshot, item_ids: I64) -> Snapshot:
    """Bring withdrawn items back on their former SIDs. Items that were never withdrawn stay.

    Raises:
        CatalogueError: the trie does not hold an item; `add` it.
    """
    places = _places(snapshot, item_ids)
    if snapshot.available is None:
        return snapshot
    allowed = snapshot.available.allowed.copy()
    allowed[places] = True
    return _with_available(snapshot, allow_mask(snapshot.trie, allowed))


def add(snapshot: Snapshot, items: Items) -> Snapshot:
    """Merge items into the trie and remove the withdrawn ones from it.

    A withdrawn item may return on another SID.

    Args:
        snapshot: the version to change.
        items: with an order score and attributes if and only if the snapshot's items have them, of
            the same kinds.

    Raises:
        CatalogueError: an item is there already, the columns differ from the snapshot's, or the
            items do not make a trie (see `build_trie`). Record numbers count the records of
            `items`, from 1.
    """
    added = _added(snapshot, items)
    if added is snapshot:
        return snapshot
    return replace(added, removed=np.setdiff1d(snapshot.withdrawn_ids, items.item_ids))


def _added(snapshot: Snapshot, items: Items) -> Snapshot:
    trie = snapshot.trie
    kept = snapshot.available.allowed if snapshot.available else np.ones(trie.num_items, np.bool_)
    if not len(items) and kept.all():
        return snapshot
    if not kept.any():
        return make_snapshot(items, trie.codebooks)
    if not len(items):
        return _restricted(snapshot, kept)
    places = trie.places(items.item_ids)
    repeated = (places >= 0) & kept[places]
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
    base = snapshot if kept.all() else _restricted(snapshot, kept)
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


def name(snapshot: Snapshot, names: Sequence[str], titles: Sequence[str]) -> Snapshot:
    """Name items of the version; names of items that it lacks are forgotten.

    Raises:
        DataError: an item is named twice, or two names have one id.
    """
    added = ItemNames.make(names, titles)
    kept = snapshot.names.ids[
        (snapshot.trie.places(snapshot.names.ids) >= 0) & (added.find(snapshot.names.ids) < 0)
    ]
    entries = snapshot.names.find(kept)
    table = ItemNames.make(
        [*snapshot.names.names_at(entries), *names], [*snapshot.names.titles_at(entries), *titles]
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


def _restricted(snapshot: Snapshot, kept: Mask) -> Snapshot:
    """Remove the items that are not kept. At least one is kept."""
    order = None if snapshot.order is None else snapshot.order[kept]
    attributes = {name: _narrowed(column[kept]) for name, column in snapshot.attributes.items()}
    trie = restrict(snapshot.trie, kept)
    ids = np.fromiter(snapshot.features, np.int64)
    features = {item: snapshot.features[item] for item in ids[trie.places(ids) >= 0].tolist()}
    return _snapshot(trie, order, attributes, features)


class Catalogue:
    """The version that is served and the one before it. Any thread may call any method.

    Readers take one reference and never wait; publishers take turns.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._published: Published[Snapshot] = Published("the catalogue", clock)
        self._turn = threading.Lock()  # from the check of a new version to its publication

    def publish(self, snapshot: Snapshot) -> None:
        """Serve this version from now on, and keep the one served until now.

        A version that is served stays so.

        Raises:
            CatalogueError: the version has other codebooks than the served one, which the model was
                trained with; nothing was changed.
        """
        with self._turn:
            if not self._published.is_empty:
                served = self._published.current
                if snapshot.trie.codebooks != served.trie.codebooks:
                    raise CatalogueError(
                        f"{snapshot.trie.codebooks}, the catalogue has {served.trie.codebooks}"
                    )
                if snapshot.version == served.version:
                    return
            self._published.publish(snapshot)

    def kept(self) -> Snapshot:
        """Return the version that `rollback` would serve.

        Raises:
            DataError: no earlier version is kept.
        """
        if (previous := self._published.previous) is None:
            raise DataError("no earlier version of the catalogue is kept")
        return previous

    def rollback(self) -> None:
        """Serve the kept version, and keep the one served until now: a second rollback undoes the first.

        Raises:
            DataError: no earlier version is kept; nothing was changed.
        """
        with self._turn:
            self._published.rollback()

    @contextmanager
    def pin(self) -> Iterator[Snapshot]:
        """Hold the version that is served: it stays whole for the block, whatever is published meanwhile.

        Raises:
            Unavailable: nothing has been published.
        """
        yield self._published.current

    def status(self) -> CatalogueInfo:
        """Describe the version that is served; all of it at one moment.

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
        """Return `Snapshot.content` of the version that is served and of the one that is kept.

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
    everything = bool(available.allowed.all())
    digest = xxhash.xxh3_128(snapshot.content.encode() + available.allowed.tobytes()).hexdigest()
    return replace(
        snapshot,
        available=None if everything else available,
        version=snapshot.content if everything else digest,
    )


def _columns(items: Items) -> str:
    return ", ".join(["order"] * (items.order is not None) + sorted(items.attributes)) or "none"


def _narrowed(column: Column) -> Column:
    """Store text in the narrowest type that holds it, so that equal columns have equal bytes and digests."""
    if column.dtype.kind != "U":
        return column
    return column.astype(f"U{max(1, int(np.char.str_len(column).max(initial=0)))}")
