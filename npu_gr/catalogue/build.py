"""Build a `Trie` from item ids and their semantic IDs, vectorised.

One sort puts the semantic IDs (SIDs) in order. If a SID and its row number fit together into 63 bits (three levels of
8,192 codes and 16 M items do), it is one in-place sort of integers: several times faster than sorting rows of codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

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
        order: float32 [N], finite; of the items that share a SID the highest score comes first. None: all are equal.

    Raises:
        CatalogueError: names the first bad record, counted from 1 (row 0 is record 1), and the reason.
    """
    _check(sids, item_ids, codebooks, order)
    rows, column = _sorted_rows(sids, codebooks)
    num_items = len(item_ids)
    # In SID order: whether the item is the first one below its state of this level.
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
            raise CatalogueError(f"record {row + 1}: code {codes[row]} of level {level}, which has 0..{count - 1}")
    if order is not None and not np.isfinite(order).all():
        row = int(np.argmin(np.isfinite(order)))
        raise CatalogueError(f"record {row + 1}: order score {order[row]} is not finite")


def _sorted_rows(sids: Codes, codebooks: Codebooks) -> tuple[I64, Callable[[int], Codes]]:
    """Sort the rows by SID.

    Returns:
        The rows in ascending order of SID, [N], and a function: level -> its codes in that order, [N].
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
    """Sort the rows of items that share a SID by order score and item id (T4), in place; no other row moves."""
    shared = ~begins
    shared[:-1] |= shared[1:]
    at = np.flatnonzero(shared)
    if not len(at):
        return
    mine = rows[at]
    ranked = np.argsort(item_ids[mine])
    if order is not None:
        # The bits of a float, read as an integer, ascend with it once those of a negative float are inverted.
        # Adding 0.0 turns -0.0 into 0.0: the two are equal scores.
        bits = (order[mine].astype(np.float32) + np.float32(0.0)).view(np.int32)
        ranked = _stable_sort(~np.where(bits < 0, bits ^ _MAX_INT32, bits), ranked)
    rows[at] = mine[_stable_sort(np.cumsum(begins[at], dtype=np.int32), ranked)]


def _stable_sort(keys: I32, ranked: I64) -> I64:
    """Sort `ranked` by the keys of its elements; elements of equal keys keep their order.

    One integer holds key and rank, because sorting integers in place is several times faster than a stable argsort.

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
        raise CatalogueError(f"record {second + 1}: item {item_id} is already in record {first + 1}")
    return by_id


def pointers_of(firsts: I64, end: int) -> Pointers:
    """Row pointers of a CSR table: the first element of each row, [n], then the number of elements: [n + 1].

    They are int32 if they fit, int64 otherwise.
    """
    pointers = np.append(firsts, end)
    return pointers.astype(np.int32) if end <= _MAX_INT32 else pointers
