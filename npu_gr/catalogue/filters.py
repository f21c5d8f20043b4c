"""Which items a request may see, as the edges that the beams may take.

An edge is valid if and only if an allowed item lies below it. Selection masks the others before its top-k, so that no
beam is spent on a path whose items are all denied.

Two ways, by what is cheaper. A mask (of attributes, of what is withdrawn) works out every edge from the leaves up:
time and memory of the whole trie. Lists of items look only at the states above those items: allowing takes
O(items x levels), denying also looks at the children of a state that loses one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from npu_gr.catalogue.records import Column
from npu_gr.catalogue.trie import Mask, Trie, owner, spread
from npu_gr.core.errors import Unprocessable
from npu_gr.core.request import I64

# The kind of a column -> the types of a value that is looked for in it. type() tells True from 1, isinstance does not.
_TYPES: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "f": (int, float), "U": (str,)}


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """What is allowed, by place in the trie's tables. Never changed in place."""

    allowed: Mask  # [N] items, as `Trie.leaf_item`
    valid: tuple[Mask, ...]  # L x [n_{l+1}] edges of level l, as `Trie.token[l]`

    def without(self, denied: Denied) -> Filter:
        """A copy in which the denied ones are off too."""
        allowed = self.allowed.copy()
        allowed[denied.places] = False
        valid = tuple(edges.copy() for edges in self.valid)
        for edges, off in zip(valid, denied.edges, strict=True):
            edges[off] = False
        return Filter(allowed, valid)


@dataclass(frozen=True, slots=True, eq=False)
class Denied:
    """What is not allowed, by place in the trie's tables, ascending and distinct."""

    places: I64  # items, as `Trie.leaf_item`
    edges: tuple[I64, ...]  # L x edges of level l


def allow_all(trie: Trie) -> Filter:
    """Nothing is filtered."""
    return Filter(np.ones(trie.num_items, np.bool_), tuple(np.ones(len(codes), np.bool_) for codes in trie.token))


def allow_mask(trie: Trie, allowed: Mask) -> Filter:
    """From a mask over the items, [N] as `trie.leaf_item`, which the filter keeps."""
    below, valid = allowed, []
    for pointers in (trie.leaf_ptr, *reversed(trie.indptr[1:])):
        # Every state has a child (T3), so no range is empty, which reduceat would read as its first element.
        below = np.logical_or.reduceat(below, pointers[:-1]) if len(below) else below
        valid.append(below)
    return Filter(allowed, tuple(reversed(valid)))


def allow_items(trie: Trie, item_ids: I64, within: Filter | None = None) -> Filter:
    """Only these items; ids that the catalogue lacks count for nothing.

    Only the paths to these items are looked at; the rest of the tables is zeroed memory that nobody touched.

    Args:
        trie: the catalogue.
        item_ids: [n].
        within: what is allowed without this; None: all.
    """
    places = trie.places(item_ids)
    places = places[places >= 0]
    if within is not None:
        places = places[within.allowed[places]]
    allowed = np.zeros(trie.num_items, np.bool_)
    allowed[places] = True
    on, valid = np.unique(places), []
    for pointers in (trie.leaf_ptr, *reversed(trie.indptr[1:])):
        on = np.unique(owner(pointers, on))
        edges = np.zeros(len(pointers) - 1, np.bool_)
        edges[on] = True
        valid.append(edges)
    return Filter(allowed, tuple(reversed(valid)))


def deny_items(trie: Trie, item_ids: I64, within: Filter | None = None) -> Denied:
    """These items, and the edges that lose their last allowed item by it.

    Args:
        trie: the catalogue.
        item_ids: [n]; ids that the catalogue lacks, and repeated ones, count for nothing.
        within: what is allowed without this; None: all.
    """
    places = np.unique(trie.places(item_ids))
    places = places[places >= 0]
    off, edges = places, []
    allowed = within.allowed if within else None
    for level in range(trie.num_levels, 0, -1):
        # `off` are items (at first) or edges of this level; their states are the edges of the level above.
        pointers = trie.leaf_ptr if level == trie.num_levels else trie.indptr[level]
        states = np.unique(owner(pointers, off))
        lo = pointers[states].astype(np.int64)
        degree = pointers[states + 1] - lo
        below = spread(lo, degree)
        alive = ~np.isin(below, off, assume_unique=True)
        if allowed is not None:
            alive &= allowed[below]
        if len(states):
            states = states[~np.logical_or.reduceat(alive, np.cumsum(degree) - degree)]
        allowed = within.valid[level - 1] if within else None
        edges.append(states)
        off = states
    return Denied(places, tuple(reversed(edges)))


def attribute_in(attributes: Mapping[str, Column], name: str, values: Sequence[bool | int | float | str]) -> Mask:
    """The items whose attribute has one of the values: [N], in the order of the columns.

    Raises:
        Unprocessable: no such attribute, or a value of another kind than the attribute's.
    """
    if name not in attributes:
        raise Unprocessable(f"filter: no attribute {name!r}; there are {', '.join(attributes) or 'none'}")
    column = attributes[name]
    for value in values:
        if type(value) not in _TYPES[column.dtype.kind]:
            raise Unprocessable(f"filter: {value!r} is not of the kind of attribute {name!r}")
    found = np.zeros(len(column), np.bool_)
    for value in values:
        found |= column == value  # one pass each, without the sort of np.isin; a request names few values
    return found
