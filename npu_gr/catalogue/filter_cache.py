"""What one request may see of a version, with the expensive part kept: a mask an attribute query.

Working out a mask is a pass over the whole catalogue; the same few queries come again and again (stock, country, a
category). Lists of items cost what the lists are long, and are worked out for each request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np

from npu_gr.catalogue.filters import Filter, allow_all, allow_items, allow_mask, attribute_in, deny_items
from npu_gr.catalogue.versions import Snapshot
from npu_gr.core.request import I64

Query = Mapping[str, tuple[bool | int | float | str, ...]]  # attribute -> the values of which an item has one


class FilterCache:
    """Filters of attribute queries, least recently used out by bytes. Any thread may call."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[object, ...], Filter] = OrderedDict()
        self.bytes_used = 0

    def of(
        self, snapshot: Snapshot, allow: I64 | None = None, deny: I64 | None = None, query: Query | None = None
    ) -> Filter | None:
        """What is not withdrawn, allowed, not denied, and has the attributes. None = everything.

        Args:
            snapshot: the version.
            allow, deny: item ids; None = no such list. Ids that the catalogue lacks count for nothing.
            query: attributes.

        Raises:
            Unprocessable: no such attribute, or a value of another kind than the attribute's.
        """
        seen = snapshot.available
        if query:
            seen = self._queried(snapshot, query)
        if allow is not None:
            seen = allow_items(snapshot.trie, allow, seen)
        if deny is not None:
            every = seen or self._get((snapshot.content,), lambda: allow_all(snapshot.trie))
            seen = every.without(deny_items(snapshot.trie, deny, every))
        return seen

    def _queried(self, snapshot: Snapshot, query: Query) -> Filter:
        def make() -> Filter:
            allowed = np.ones(snapshot.trie.num_items, np.bool_)
            for name, values in query.items():
                allowed &= attribute_in(snapshot.attributes, name, values)
            if snapshot.available is not None:
                allowed &= snapshot.available.allowed
            return allow_mask(snapshot.trie, allowed)

        # repr tells 1 from True, and "1" from 1
        asked = (repr((name, sorted(set(values), key=repr))) for name, values in sorted(query.items()))
        return self._get((snapshot.version, *asked), make)

    def _get(self, key: tuple[object, ...], make: Callable[[], Filter]) -> Filter:
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        made = make()  # two threads may make the same one: rarely, and both are right
        size = _bytes(made)
        with self._lock:
            if key not in self._kept and size <= self._capacity_bytes:
                self._kept[key] = made
                self.bytes_used += size
                while self.bytes_used > self._capacity_bytes:
                    self.bytes_used -= _bytes(self._kept.popitem(last=False)[1])
        return made


def _bytes(filter_: Filter) -> int:
    return filter_.allowed.nbytes + sum(level.nbytes for level in filter_.valid)
