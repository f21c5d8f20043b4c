"""Applies logged changes to the catalogue that its file has now.

If the file is the one that was changed, the result is the version that was served. If it is another
one, for example of a newly trained site:

    added item     dropped if the file has it, since training knows it now; else added again, if
                   its semantic ID and columns fit; a semantic ID that was made of the features is
                   made again, from the new centroids
    withdrawn      stays withdrawn, whatever the file has, until it is restored or added

A withdrawn item that the file lacks is remembered, since other sources may still offer it, and a
later file may have it again.

If that other file has a log of its own, which another instance wrote, what only that log has is
kept too (`with_own`): a move from one site to another puts no item back on sale.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.centroids import Centroids, SidMaker
from npu_gr.catalogue.change_log import Changes
from npu_gr.catalogue.names import ItemNames, collisions
from npu_gr.catalogue.new_items import completed
from npu_gr.catalogue.records import Record, as_items
from npu_gr.catalogue.versions import Snapshot, add, name, restore, withdraw
from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.served import CatalogueChange, NewItem

log = logging.getLogger(__name__)


class Replayed(NamedTuple):
    """A version with its changes, and the added items that it lacks."""

    snapshot: Snapshot
    dropped: dict[str, str]  # name of the item -> reason


def complete(
    snapshot: Snapshot, new: Sequence[NewItem], centroids: Centroids | None
) -> tuple[NewItem, ...]:
    """Give new items the semantic IDs and columns that they lack, as `SidMaker` and `completed`.

    Raises:
        CatalogueError: one cannot be completed; the message has the field.
    """
    sids = SidMaker(snapshot.trie, centroids).all_of(new)
    whole = [replace(one, sid=sid) for one, sid in zip(new, sids, strict=True)]
    records = completed(snapshot, [_record(one) for one in whole])
    return tuple(
        replace(one, has_made_sid=not given.sid, order=record.order, attributes=record.attributes)
        for one, given, record in zip(whole, new, records, strict=True)
    )


class Applied(NamedTuple):
    """A version with a change."""

    snapshot: Snapshot
    change: CatalogueChange  # with all semantic IDs
    rejected: dict[str, str]  # name of a new item that is left out -> reason


def applied(
    snapshot: Snapshot,
    change: CatalogueChange,
    tables: Sequence[ItemNames],
    centroids: Centroids | None,
    *,
    is_strict: bool,
) -> Applied:
    """Apply a change to a version; new items whose id is that of another name are left out.

    Args:
        snapshot: The version.
        change: The change.
        tables: Names of the other items.
        centroids: Centroids in the folder of the file, if any.
        is_strict: Raise if an item is invalid; else what does not fit is left out.

    Raises:
        DataError: an item is invalid.
    """
    if not is_strict:
        change = _fitting(snapshot, change)
        try:
            return applied(snapshot, change, tables, centroids, is_strict=True)
        except DataError as error:
            log.error("the new items of a delta are left out: %s", error)
            change = _fitting(snapshot, replace(change, add=()))
    ids = np.array([new.item_id for new in change.add], np.int64)
    others = collisions([new.name for new in change.add], ids, tables)
    items = [new for new in change.add if new.name not in others]
    whole = replace(change, add=complete(snapshot, items, centroids))
    if items:
        snapshot = with_items(snapshot, whole.add)
    if change.withdraw is not None:
        snapshot = withdraw(snapshot, change.withdraw)
    if change.restore is not None:
        snapshot = restore(snapshot, change.restore)
    return Applied(snapshot, whole, {one: f"has the id of {o!r}" for one, o in others.items()})


def _fitting(snapshot: Snapshot, change: CatalogueChange) -> CatalogueChange:
    """Leave out of a change the items that a version offers already, and those that it lacks."""
    offered = set(_present(snapshot, [new.item_id for new in change.add]).tolist())
    offered -= set(snapshot.withdrawn_ids.tolist())
    add = tuple(new for new in change.add if new.item_id not in offered)
    known = {new.item_id for new in change.add}

    def there(ids: I64 | None) -> I64 | None:
        if ids is None:
            return None
        return ids[(snapshot.trie.places(ids) >= 0) | np.isin(ids, [*known])]

    return CatalogueChange(add=add, withdraw=there(change.withdraw), restore=there(change.restore))


def with_items(snapshot: Snapshot, new: Sequence[NewItem]) -> Snapshot:
    """Add items, with their names and titles, and remove withdrawn ones, as `versions.add`.

    Raises:
        CatalogueError: as `versions.add` and `records.as_items`.
    """
    items = as_items([_record(one) for one in new], lambda row: f"record {row + 1}")
    added = replace(add(snapshot, items), names=snapshot.names)
    named = [one for one in new if one.name or one.title]
    ids = np.array([one.item_id for one in named], np.int64)
    return name(added, ids, [_name(one) for one in named], [one.title for one in named])


def replay(file: Snapshot, changes: Changes, centroids: Centroids | None) -> Replayed:
    """Apply changes to the version of a file.

    Args:
        file: The file as it is now.
        changes: Changes of this file or of an earlier one.
        centroids: Centroids in the folder of the file, if any.
    """
    dropped: dict[str, str] = {}
    if changes.base != file.content:
        changes = _carried(file, changes, centroids, dropped)
    snapshot = file
    if changes.added or changes.removed:
        snapshot = withdraw(snapshot, _present(file, changes.removed))
        snapshot = with_items(snapshot, [*changes.added.values()])
    present = _present(snapshot, changes.withdrawn)
    if len(present):
        snapshot = withdraw(snapshot, present)
    gone = np.array(sorted(changes.removed | changes.withdrawn), np.int64)
    removed = gone[snapshot.trie.places(gone) < 0]
    return Replayed(replace(snapshot, removed=removed, changes=changes), dropped)


def with_own(
    file: Snapshot, changes: Changes, own: Changes, centroids: Centroids | None
) -> Changes:
    """Add what only the log of a file itself has to the changes that another catalogue hands over.

    What both say of an item is as the changes have it. An item that either withdrew is withdrawn,
    unless the changes add it.

    Args:
        file: The file as it is now.
        changes: Changes of the catalogue in service.
        own: Changes in the file's own log.
        centroids: Centroids in the folder of the file, if any.
    """
    if changes.base != file.content:
        changes = _carried(file, changes, centroids, {})
    own = _carried(file, own, centroids, {})
    known = changes.added.keys() | changes.withdrawn | changes.removed
    added = {item: new for item, new in own.added.items() if item not in known}
    return replace(
        changes,
        added={**changes.added, **added},
        withdrawn=changes.withdrawn | (own.withdrawn - changes.added.keys()),
    )


def _carried(
    file: Snapshot, changes: Changes, centroids: Centroids | None, dropped: dict[str, str]
) -> Changes:
    """Return the changes of an earlier file that apply to this one."""
    trie = file.trie
    known = set(_present(file, changes.added).tolist())
    added = {item: new for item, new in changes.added.items() if item not in known}
    maker = SidMaker(trie, centroids)
    for new in added.values():
        if not (new.has_made_sid and centroids):
            maker.take(new.sid)
    for row, new in enumerate([*added.values()]):
        try:
            if new.has_made_sid and centroids:
                new = replace(new, sid=maker.make(row, new.features))
            (record,) = completed(file, [_record(new)])
            items = as_items([record], lambda _: "it")
            build_trie(items.sids, items.item_ids, trie.codebooks, items.order)
            added[new.item_id] = replace(new, order=record.order, attributes=record.attributes)
        except DataError as error:
            dropped[_name(new)] = str(error)
            del added[new.item_id]
    return Changes(
        base=file.content,
        added=added,
        withdrawn=changes.withdrawn | (changes.removed - changes.added.keys()),
        delta=changes.delta,
    )


def _record(new: NewItem) -> Record:
    return Record(new.item_id, list(new.sid), new.order, new.attributes, new.features)


def _name(new: NewItem) -> str:
    return new.name or str(new.item_id)


def _present(snapshot: Snapshot, items: Iterable[int]) -> I64:
    """Return those of the items that the trie has, ascending."""
    ids = np.array(sorted(items), np.int64)
    return ids[snapshot.trie.places(ids) >= 0]
