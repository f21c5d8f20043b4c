"""Insert items into a built trie, or remove some: each table is copied once, nothing is sorted again.

The result equals the trie that `build_trie` makes of the same items (tests/catalogue/test_merge.py), in the time of a
copy: level by level, the edges of a small trie of the new items are inserted at their places among the old ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.catalogue.build import freeze, pointers_of
from npu_gr.catalogue.filters import allow_mask
from npu_gr.catalogue.trie import Mask, Pointers, Trie
from npu_gr.core.arrays import F32, I64

Table = npt.NDArray[Any]


class Inserted(NamedTuple):
    """A trie with more items. M = new items."""

    trie: Trie
    before: I64  # [M] for np.insert: the place in the old `leaf_item` that each item of the new trie goes before


def insert(old: Trie, order: F32 | None, new: Trie, new_order: F32 | None) -> Inserted:
    """Merge two tries into one with the items of both.

    Args:
        old: not empty.
        order: float32 [N] order scores by place in `old.leaf_item`; None if and only if `new_order` is.
        new: not empty, of the same codebooks, without an item of `old`.
        new_order: float32 [M] by place in `new.leaf_item`.
    """
    assert old.codebooks == new.codebooks
    # The number that each state of the level has in the merged trie. Both tries have the one root, state 0.
    of_old = of_new = np.zeros(1, np.int64)
    num_states = 1
    indptr = []
    token = []
    for level in range(old.num_levels):
        old_parent = _parents(old.indptr[level], of_old)
        new_parent = _parents(new.indptr[level], of_new)
        # (parent, code) as one integer: ascending in both tries (T1, T2), so a binary search finds each new edge.
        count = old.codebooks.code_count[level]
        keys = old_parent * count + old.token[level]
        new_keys = new_parent * count + new.token[level]
        at = np.searchsorted(keys, new_keys)
        fresh = keys[np.minimum(at, len(keys) - 1)] != new_keys
        before = at[fresh]
        degree = np.bincount(old_parent, minlength=num_states) + np.bincount(new_parent[fresh], minlength=num_states)
        indptr.append(_from_degrees(degree))
        token.append(np.insert(old.token[level], before, new.token[level][fresh]))
        of_old = np.arange(len(keys)) + np.cumsum(np.bincount(before, minlength=len(keys) + 1))[:-1]
        of_new = np.empty(len(new_keys), np.int64)
        of_new[fresh] = before + np.arange(len(before))
        of_new[~fresh] = of_old[at[~fresh]]
        num_states = len(keys) + len(before)
    items_before = _places_before(old, order, new, new_order, of_old, of_new)
    degree = np.zeros(num_states, np.int64)
    degree[of_old] += np.diff(old.leaf_ptr)
    degree[of_new] += np.diff(new.leaf_ptr)
    leaf_item = np.insert(old.leaf_item, items_before, new.leaf_item)
    by_id = _by_id(old, new, items_before)
    return Inserted(_trie(old, indptr, token, _from_degrees(degree), leaf_item, by_id), items_before)


def restrict(trie: Trie, kept: Mask) -> Trie:
    """Remove all other items. `kept` is bool [N] in the order of `trie.leaf_item`, with at least one True."""
    valid = allow_mask(trie, kept).valid
    alive: Mask = np.ones(1, np.bool_)  # states of the level that stay; the root does
    indptr = []
    token = []
    for pointers, codes, edges in zip(trie.indptr, trie.token, valid, strict=True):
        indptr.append(_from_degrees(_count_in(pointers, edges)[alive]))
        token.append(codes[edges])
        alive = edges
    leaf_ptr = _from_degrees(_count_in(trie.leaf_ptr, kept)[alive])
    by_id = (np.cumsum(kept) - 1)[trie.by_id[kept[trie.by_id]]]
    return _trie(trie, indptr, token, leaf_ptr, trie.leaf_item[kept], by_id)


def _parents(pointers: Pointers, merged: I64) -> I64:
    """Number, in the merged trie, of the state above each edge."""
    parents: I64 = np.repeat(merged, np.diff(pointers))
    return parents


def _places_before(old: Trie, order: F32 | None, new: Trie, new_order: F32 | None, of_old: I64, of_new: I64) -> I64:
    """Find the place of each new item by T4: one binary search within its leaf, for all new items at once."""
    leaf = np.repeat(of_new, np.diff(new.leaf_ptr))
    own = np.searchsorted(of_old, leaf)  # the old leaf of the same SID, or the next one
    shares = (own < len(of_old)) & (of_old[np.minimum(own, len(of_old) - 1)] == leaf)
    low = old.leaf_ptr[own].astype(np.int64)
    high = np.where(shares, old.leaf_ptr[np.minimum(own + 1, len(of_old))], low).astype(np.int64)
    while (open_ := low < high).any():
        middle = (low + high) // 2
        at = np.minimum(middle, old.num_items - 1)
        comes_first = old.leaf_item[at] < new.leaf_item
        if order is not None and new_order is not None:
            comes_first = (order[at] > new_order) | ((order[at] == new_order) & comes_first)
        low = np.where(open_ & comes_first, middle + 1, low)
        high = np.where(open_ & ~comes_first, middle, high)
    return low


def _by_id(old: Trie, new: Trie, before: I64) -> I64:
    moved = np.cumsum(np.bincount(before, minlength=old.num_items + 1))[:-1]
    places = (before + np.arange(len(before)))[new.by_id]
    at = np.searchsorted(old.leaf_item, new.leaf_item[new.by_id], sorter=old.by_id)
    by_id: I64 = np.insert(old.by_id + moved[old.by_id], at, places)
    return by_id


def _count_in(pointers: Pointers, mask: Mask) -> I64:
    """Count the elements of each state that are set."""
    counts: I64 = np.add.reduceat(mask, pointers[:-1], dtype=np.int64)  # no range is empty (T3)
    return counts


def _from_degrees(degree: I64) -> Pointers:
    ends = np.cumsum(degree)
    return pointers_of(ends - degree, int(ends[-1]))


def _trie(
    like: Trie, indptr: list[Pointers], token: list[Table], leaf_ptr: Pointers, leaf_item: I64, by_id: I64
) -> Trie:
    return freeze(Trie(like.codebooks, tuple(indptr), tuple(token), leaf_ptr, leaf_item, by_id))
