"""The catalogue as an immutable trie of semantic IDs, with the items of each.

Source: valid-path filtering as in xGR (arXiv:2512.11529), with the CSR tables of xLLM and the state
ids carried along each beam of STATIC (arXiv:2602.22647).

A semantic ID (SID) has L codes, one for each level. Level 0 has one state, the root; level L has
the leaves, one for each distinct SID:

    state of level l --- edge e of level l: code token[l][e] ---> state e of level l + 1
    edges of state s:  indptr[l][s] .. indptr[l][s + 1] - 1
    items of leaf s:   leaf_ptr[s] .. leaf_ptr[s + 1] - 1, places in leaf_item

Invariants, checked by tests/catalogue/test_trie.py:
  T1  states are numbered in level order: edge e of level l leads to state e of level l + 1, so no
      column of next states is needed
  T2  the children of a state are contiguous and their codes ascend, so leaves ascend by SID
  T3  every state has a leaf below it, and every leaf has an item; except in an empty catalogue
  T4  the items of one SID are sorted by order score, high to low, then by item id, low to high
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.arrays import I64
from npu_gr.core.errors import CatalogueError

I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
U16 = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]
Pointers = npt.NDArray[np.int32] | npt.NDArray[np.int64]

# State of a beam without a valid continuation, and leaf of an unknown item.
DEAD = -1


@dataclass(frozen=True, slots=True)
class Codebooks:
    """The codes of each level, and their tokens in the vocabulary: token = vocab_base[l] + code."""

    code_count: tuple[int, ...]  # codes of level l are 0 .. code_count[l] - 1
    vocab_base: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.code_count or len(self.code_count) != len(self.vocab_base):
            raise CatalogueError(
                f"{len(self.code_count)} code counts and {len(self.vocab_base)} vocabulary bases"
            )
        for level, (count, base) in enumerate(zip(self.code_count, self.vocab_base, strict=True)):
            if not 1 <= count <= 2**31 or base < 0:
                raise CatalogueError(f"level {level}: {count} codes from token {base} on")

    @classmethod
    def stacked(cls, code_count: Sequence[int], first_token: int = 0) -> Codebooks:
        """Make codebooks with adjacent token ranges, from `first_token` on."""
        bases = [first_token]
        for count in code_count[:-1]:
            bases.append(bases[-1] + count)
        return cls(tuple(code_count), tuple(bases))

    def __len__(self) -> int:
        return len(self.code_count)


class Children(NamedTuple):
    """The edges that leave n states: lo .. lo + degree - 1 for each state."""

    lo: I64  # [n] the first edge, which is also the first state of the next level
    degree: I64  # [n] 0 for a dead state


class LeafItems(NamedTuple):
    """The items of n leaves, one leaf after the other."""

    item_ids: I64  # [counts.sum()]
    counts: I64  # [n] items of each leaf


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """One catalogue, made by `build_trie`. Immutable.

    n_l = states of level l, N = items, L = levels.
    """

    codebooks: Codebooks
    indptr: tuple[Pointers, ...]  # L x [n_l + 1] first edge of each state of level l
    token: tuple[U16 | I32, ...]  # L x [n_{l+1}] code of each edge of level l
    leaf_ptr: Pointers  # [n_L + 1] first item of each leaf
    leaf_item: I64  # [N] external item ids
    by_id: I64  # [N] places in leaf_item, by ascending item id

    @property
    def num_levels(self) -> int:
        """L: the number of codes of a SID."""
        return len(self.codebooks)

    @property
    def num_items(self) -> int:
        """N: the number of items. Several may share a SID."""
        return len(self.leaf_item)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables together."""
        return sum(
            table.nbytes
            for table in (*self.indptr, *self.token, self.leaf_ptr, self.leaf_item, self.by_id)
        )

    def width(self, level: int) -> I8:
        """Return, for each state of `level`, the least w with degree <= 2**w: [n_l]."""
        below = np.maximum(np.diff(self.indptr[level]) - 1, 0)
        # the exponent of an integer is its bit length
        widths: I8 = np.frexp(below.astype(np.float64))[1].astype(np.int8)
        return widths

    def children(self, level: int, states: I64) -> Children:
        """Find the edges that leave each state of `level`. [n] -> [n]. A `DEAD` state has none."""
        return _ranges(self.indptr[level], states)

    def parent(self, level: int, states: I64) -> I64:
        """Find the state of `level` above each state of `level + 1`. [n] -> [n]; none `DEAD`."""
        return owner(self.indptr[level], states)

    def sid_of(self, leaves: I64) -> I32:
        """Return the codes of each leaf. [n] -> [n, L]; all -1 for a `DEAD` leaf."""
        codes = np.full((len(leaves), self.num_levels), -1, np.int32)
        alive = np.flatnonzero(leaves != DEAD)
        states = leaves[alive]
        for level in reversed(range(self.num_levels)):
            codes[alive, level] = self.token[level][states]
            states = self.parent(level, states)
        return codes

    def items_of(
        self, leaves: I64, limit_per_sid: int | None = None, allowed: Mask | None = None
    ) -> LeafItems:
        """List the items of each leaf, in the order of T4.

        Args:
            leaves: [n] leaf states; a `DEAD` one has no items.
            limit_per_sid: Most items of each leaf, the first allowed ones; None = no limit.
            allowed: bool [N] by place in `leaf_item`; None = all.
        """
        lo, counts = _ranges(self.leaf_ptr, leaves)
        if allowed is None and limit_per_sid is not None:
            counts = np.minimum(counts, limit_per_sid)
        places = spread(lo, counts)
        if allowed is not None:
            keep = allowed[places]
            # number of allowed items before each place, over all leaves
            num_before = np.concatenate(([0], np.cumsum(keep)))
            ends = np.cumsum(counts)
            starts = ends - counts
            if limit_per_sid is not None:
                keep &= num_before[1:] - np.repeat(num_before[starts], counts) <= limit_per_sid
                num_before = np.concatenate(([0], np.cumsum(keep)))
            places = places[keep]
            counts = num_before[ends] - num_before[starts]
        return LeafItems(self.leaf_item[places], counts)

    def places(self, item_ids: I64) -> I64:
        """Find the place of each item in `leaf_item`; -1 for an unknown item. [n] -> [n]."""
        if not self.num_items:
            return np.full(len(item_ids), -1, np.int64)
        at = np.searchsorted(self.leaf_item, item_ids, sorter=self.by_id).clip(
            max=self.num_items - 1
        )
        places = self.by_id[at]
        return np.where(self.leaf_item[places] == item_ids, places, -1)

    def leaf_of(self, places: I64) -> I64:
        """Find the leaf of each place in `leaf_item`; `DEAD` for place -1. [n] -> [n]."""
        return owner(self.leaf_ptr, places)

    def find(self, item_ids: I64) -> I64:
        """Find the leaf of each item; `DEAD` for an unknown item. [n] -> [n]."""
        return self.leaf_of(self.places(item_ids))

    def digest(self) -> str:
        """Hash the content: 128 bits, in hexadecimal; equal on hosts of the same byte order."""
        hasher = xxhash.xxh3_128(repr(self.codebooks).encode())
        for table in (*self.indptr, *self.token, self.leaf_ptr, self.leaf_item):
            hasher.update(table.dtype.str.encode() + len(table).to_bytes(8, "little"))
            hasher.update(table.view(np.uint8).data)
        return hasher.hexdigest()


def owner(pointers: Pointers, elements: I64) -> I64:
    """Find the state whose range has each element; -1 for element -1. [n_l + 1], [n] -> [n]."""
    # Cast to the pointers' type: with two types, numpy would copy the whole table to the wider.
    return np.searchsorted(pointers, elements.astype(pointers.dtype), side="right") - 1


def spread(lo: I64, counts: I64) -> I64:
    """Concatenate the ranges lo[i] .. lo[i] + counts[i] - 1. [n], [n] -> [counts.sum()]."""
    ends = np.cumsum(counts)
    numbers: I64 = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(
        lo - (ends - counts), counts
    )
    return numbers


def _ranges(pointers: Pointers, states: I64) -> Children:
    # A dead state reads pointers[0], which always exists, for both ends: so its degree is 0.
    alive = states != DEAD
    first = np.where(alive, states, 0)
    lo = pointers[first].astype(np.int64)
    return Children(lo, np.where(alive, pointers[first + alive] - lo, 0))
