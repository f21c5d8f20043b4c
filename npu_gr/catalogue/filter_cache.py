"""Make the filter of a request on one version of the catalogue; cache the masks of attribute queries.

Such a mask takes a pass over the whole catalogue, and the same few queries come again and again (stock, country, a
category). Filters of item lists are not cached: they cost time in proportion to the list, not to the catalogue.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np

from npu_gr.catalogue.filters import Filter, allow_all, allow_items, allow_mask, attribute_in, deny_items
from npu_gr.catalogue.versions import Snapshot
from npu_gr.core.arrays import I64

# Attribute -> values. An item passes if, of every attribute named, it has one of the values.
Query = Mapping[str, tuple[bool | int | float | str, ...]]


class FilterCache:
    """Filters of attribute queries; evicts the least recently used beyond a number of bytes. Any thread may call."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[object, ...], Filter] = OrderedDict()
        self.bytes_used = 0

    def filter_for(
        self, snapshot: Snapshot, allow: I64 | None = None, deny: I64 | None = None, query: Query | None = None
    ) -> Filter | None:
        """Combine withdrawals, lists and attributes: an item passes if it passes them all.

        Args:
            snapshot: the version.
            allow: the only item ids that pass; None = no such list. Ids that the catalogue lacks are ignored.
            deny: item ids that do not pass; None = no such list. Ids that the catalogue lacks are ignored.
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
            for name, values in query.items():
                allowed &= attribute_in(snapshot.attributes, name, values)
            if snapshot.available is not None:
                allowed &= snapshot.available.allowed
            return allow_mask(snapshot.trie, allowed)

        # repr tells 1 from True, and "1" from 1: they are equal keys of a dict, or look alike, but other queries.
        terms = (repr((name, sorted(set(values), key=repr))) for name, values in sorted(query.items()))
        return self._get((snapshot.version, *terms), make)

    def _get(self, key: tuple[object, ...], make: Callable[[], Filter]) -> Filter:
        with self._lock:
            if (cached := self._cached.get(key)) is not None:
                self._cached.move_to_end(key)
                return cached
        # Outside the lock: two threads may make the same filter at once. That is rare, and the two are equal.
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
