"""Builds a `Trie` from item ids and their semantic IDs, inserts items into it, and removes items.

Building sorts the semantic IDs (SIDs) once. If a SID and its row number fit into 63 bits (three
levels of 8,192 codes and 16 M items do), it is one in-place sort of integers, several times faster
than sorting rows of codes.

Inserting and removing copy each table once and sort nothing again: level by level, the edges of a
small trie of the new items are inserted among the old ones. The result equals the trie that
`build_trie` makes of the same items (tests/catalogue/test_merge.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.catalogue.filters import allow_mask
from npu_gr.catalogue.trie import I32, U16, Codebooks, Mask, Pointers, Trie
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import CatalogueError

_KEY_BITS = 63  # an int64 that is not negative
_MAX_INT32 = 2**31 - 1

Codes = npt.NDArray[np.integer[Any]]


def build_trie(sids: Codes, item_ids: I64, codebooks: Codebooks, order: F32 | None = None) -> Trie:
    """Build the trie of a catalogue.

    Args:
        sids: [N, L] integer codes. Several items may share a SID.
        item_ids: int64 [N], distinct, not negative.
        codebooks: the codes of each of the L levels.
        order: float32 [N], finite; among items that share a SID the highest score comes first.
            None = all scores are equal.

    Raises:
        CatalogueError: names the first bad record (row 0 is record 1) and the reason.
    """
    _check(sids, item_ids, codebooks, order)
    rows, column = _sorted_rows(sids, codebooks)
    num_items = len(item_ids)
    # For each item in SID order: is it the first one below its state of the current level?
    begins = np.zeros(num_items, np.bool_)
    begins[:1] = True
    indptr: list[Pointers] = []
    token: list[U16 | I32] = []
    starts = np.zeros(min(num_items, 1), np.int64)
    for level, count in enumerate(codebooks.code_count):
        codes = column(level)
        above = begins.copy()
        begins[1:] |= codes[1:] != codes[:-1]
        starts = np.flatnonzero(begins)
        indptr.append(pointers_of(np.flatnonzero(above[starts]), len(starts)))
        first = codes[starts]
        token.append(first.astype(np.uint16) if count <= 2**16 else first.astype(np.int32))
    if not num_items:
        indptr[0] = np.zeros(2, np.int32)  # an empty catalogue has a root without children
    del column  # frees the sorted keys (8 bytes an item) before the sort by item id
    _order_shared(rows, begins, item_ids, order)
    leaf_item = item_ids[rows]
    del rows
    by_id = _by_id(leaf_item, item_ids)
    leaf_ptr = pointers_of(starts, num_items)
    return freeze(Trie(codebooks, tuple(indptr), tuple(token), leaf_ptr, leaf_item, by_id))


def freeze(trie: Trie) -> Trie:
    """Make the trie's tables read-only, so that no request can change what others read."""
    for table in (*trie.indptr, *trie.token, trie.leaf_ptr, trie.leaf_item, trie.by_id):
        table.flags.writeable = False
    return trie


def _check(sids: Codes, item_ids: I64, codebooks: Codebooks, order: F32 | None) -> None:
    num_items = len(item_ids)
    num_levels = len(codebooks)
    if sids.shape != (num_items, num_levels):
        raise CatalogueError(f"SIDs of shape {list(sids.shape)}, want [{num_items}, {num_levels}]")
    if not np.issubdtype(sids.dtype, np.integer):
        raise CatalogueError(f"SIDs of type {sids.dtype}, want integers")
    if item_ids.dtype != np.int64:
        raise CatalogueError(f"item ids of type {item_ids.dtype}, want int64")
    if order is not None and order.shape != (num_items,):
        raise CatalogueError(f"order scores of shape {list(order.shape)}, want [{num_items}]")
    if not num_items:
        return
    if int(item_ids.min()) < 0:
        row = int(np.argmax(item_ids < 0))
        raise CatalogueError(f"record {row + 1}: item id {item_ids[row]} is negative")
    for level, count in enumerate(codebooks.code_count):
        codes = sids[:, level]
        if int(codes.min()) < 0 or int(codes.max()) >= count:
            row = int(np.argmax((codes < 0) | (codes >= count)))
            raise CatalogueError(
                f"record {row + 1}: code {codes[row]} of level {level}, which has 0..{count - 1}"
            )
    if order is not None and not np.isfinite(order).all():
        row = int(np.argmin(np.isfinite(order)))
        raise CatalogueError(f"record {row + 1}: order score {order[row]} is not finite")


def _sorted_rows(sids: Codes, codebooks: Codebooks) -> tuple[I64, Callable[[int], Codes]]:
    """Sort the rows by SID.

    Returns:
        [N] the rows in ascending order of SID, and a function: level -> [N] its codes in that
        order.
    """
    bits = [max(1, (count - 1).bit_length()) for count in codebooks.code_count]
    if sum(bits) > _KEY_BITS:
        rows = np.lexsort([sids[:, level] for level in reversed(range(len(bits)))])
        return rows, lambda level: sids[rows, level]
    keys = np.zeros(len(sids), np.int64)
    for level, width in enumerate(bits):
        keys <<= width
        keys |= sids[:, level]
    row_bits = max(len(sids) - 1, 0).bit_length()
    if sum(bits) + row_bits <= _KEY_BITS:
        keys <<= row_bits
        keys |= np.arange(len(keys))
        keys.sort()
        rows = keys & ((1 << row_bits) - 1)
        keys >>= row_bits
    else:
        rows = np.argsort(keys)
        keys = keys[rows]
    return rows, lambda level: (keys >> sum(bits[level + 1 :])) & ((1 << bits[level]) - 1)


def _order_shared(rows: I64, begins: Mask, item_ids: I64, order: F32 | None) -> None:
    """Sort the rows of items that share a SID by order score and item id (T4), in place."""
    shared = ~begins
    shared[:-1] |= shared[1:]
    at = np.flatnonzero(shared)
    if not len(at):
        return
    mine = rows[at]
    ranked = np.argsort(item_ids[mine])
    if order is not None:
        # The bits of a float, read as an integer, ascend with the float if those of negative floats
        # are inverted. Adding 0.0 turns -0.0 into 0.0, since the two are equal scores.
        bits = (order[mine].astype(np.float32) + np.float32(0.0)).view(np.int32)
        ranked = _stable_sort(~np.where(bits < 0, bits ^ _MAX_INT32, bits), ranked)
    rows[at] = mine[_stable_sort(np.cumsum(begins[at], dtype=np.int32), ranked)]


def _stable_sort(keys: I32, ranked: I64) -> I64:
    """Sort `ranked` by the keys of its elements, stably.

    One integer holds key and rank: to sort integers in place is several times faster than a stable
    argsort.

    Args:
        keys: int32 [n], n up to 2**32; `keys[i]` belongs to element i.
        ranked: int64 [n], a permutation of 0 .. n - 1.
    """
    pairs = keys[ranked].astype(np.int64) << 32
    pairs |= np.arange(len(pairs))
    pairs.sort()
    pairs &= 2**32 - 1
    in_order: I64 = ranked[pairs]
    return in_order


def _by_id(leaf_item: I64, item_ids: I64) -> I64:
    by_id = np.argsort(leaf_item)
    ascending = leaf_item[by_id]
    repeated = ascending[1:] == ascending[:-1]
    if repeated.any():
        item_id = ascending[int(np.argmax(repeated))]
        first, second = np.flatnonzero(item_ids == item_id)[:2]
        raise CatalogueError(
            f"record {second + 1}: item {item_id} is already in record {first + 1}"
        )
    return by_id


def pointers_of(firsts: I64, end: int) -> Pointers:
    """Make the row pointers [n + 1] of a CSR table: the first element of each row, then `end`.

    They are int32 if they fit, int64 otherwise.
    """
    pointers = np.append(firsts, end)
    return pointers.astype(np.int32) if end <= _MAX_INT32 else pointers


Table = npt.NDArray[Any]


class Inserted(NamedTuple):
    """A trie with more items. M = new items."""

    trie: Trie
    # [M] for np.insert: the place in the old `leaf_item` before which each new item is inserted
    before: I64


def insert(old: Trie, order: F32 | None, new: Trie, new_order: F32 | None) -> Inserted:
    """Merge two tries into one with the items of both.

    Args:
        old: Trie with at least one item.
        order: float32 [N] order scores by place in `old.leaf_item`; None if and only if `new_order`
            is None.
        new: Trie with at least one item, none of them in `old`, and the same codebooks.
        new_order: float32 [M] by place in `new.leaf_item`.
    """
    assert old.codebooks == new.codebooks
    # The number of each state of the level in the merged trie. The root is state 0 of both tries.
    of_old = of_new = np.zeros(1, np.int64)
    num_states = 1
    indptr = []
    token = []
    for level in range(old.num_levels):
        old_parent = _parents(old.indptr[level], of_old)
        new_parent = _parents(new.indptr[level], of_new)
        # (parent, code) as one integer: ascending in both tries (T1, T2), so a binary search finds
        # each new edge.
        count = old.codebooks.code_count[level]
        keys = old_parent * count + old.token[level]
        new_keys = new_parent * count + new.token[level]
        at = np.searchsorted(keys, new_keys)
        fresh = keys[np.minimum(at, len(keys) - 1)] != new_keys
        before = at[fresh]
        degree = np.bincount(old_parent, minlength=num_states) + np.bincount(
            new_parent[fresh], minlength=num_states
        )
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
    by_id = _merged_by_id(old, new, items_before)
    return Inserted(
        _trie(old, indptr, token, _from_degrees(degree), leaf_item, by_id), items_before
    )


def restrict(trie: Trie, retained: Mask) -> Trie:
    """Remove all items but the retained ones.

    Args:
        trie: The catalogue.
        retained: bool [N] in the order of `trie.leaf_item`, with at least one True.
    """
    valid = allow_mask(trie, retained).valid
    alive: Mask = np.ones(1, np.bool_)  # states of the level that stay, at first the root
    indptr = []
    token = []
    for pointers, codes, edges in zip(trie.indptr, trie.token, valid, strict=True):
        indptr.append(_from_degrees(_count_in(pointers, edges)[alive]))
        token.append(codes[edges])
        alive = edges
    leaf_ptr = _from_degrees(_count_in(trie.leaf_ptr, retained)[alive])
    by_id = (np.cumsum(retained) - 1)[trie.by_id[retained[trie.by_id]]]
    return _trie(trie, indptr, token, leaf_ptr, trie.leaf_item[retained], by_id)


def _parents(pointers: Pointers, merged: I64) -> I64:
    """Return the number, in the merged trie, of the state above each edge."""
    parents: I64 = np.repeat(merged, np.diff(pointers))
    return parents


def _places_before(
    old: Trie, order: F32 | None, new: Trie, new_order: F32 | None, of_old: I64, of_new: I64
) -> I64:
    """Find the place of each new item by T4, by one vectorised binary search within the leaves."""
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


def _merged_by_id(old: Trie, new: Trie, before: I64) -> I64:
    moved = np.cumsum(np.bincount(before, minlength=old.num_items + 1))[:-1]
    places = (before + np.arange(len(before)))[new.by_id]
    at = np.searchsorted(old.leaf_item, new.leaf_item[new.by_id], sorter=old.by_id)
    by_id: I64 = np.insert(old.by_id + moved[old.by_id], at, places)
    return by_id


def _count_in(pointers: Pointers, mask: Mask) -> I64:
    """Count the set elements of each state."""
    counts: I64 = np.add.reduceat(mask, pointers[:-1], dtype=np.int64)  # no range is empty (T3)
    return counts


def _from_degrees(degree: I64) -> Pointers:
    ends = np.cumsum(degree)
    return pointers_of(ends - degree, int(ends[-1]))


def _trie(
    like: Trie,
    indptr: list[Pointers],
    token: list[Table],
    leaf_ptr: Pointers,
    leaf_item: I64,
    by_id: I64,
) -> Trie:
    return freeze(Trie(like.codebooks, tuple(indptr), tuple(token), leaf_ptr, leaf_item, by_id))
