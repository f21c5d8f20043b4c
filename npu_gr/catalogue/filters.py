"""Filters: the items that a request may get, and the edges of the trie that its beams may follow.

An edge is valid if and only if an allowed item lies below it. Selection masks the other edges
before its top-k, so that no beam is spent on a path whose items are all denied.

There are two ways to find the valid edges:
  a mask of items   (by attributes or withdrawals) computes every edge from the leaves up, so it
                    costs time and memory in proportion to the whole trie
  a list of items   visits only the states above those items: to allow them takes O(items x levels);
                    to deny them also reads the children of each state that loses one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from npu_gr.catalogue.records import Column
from npu_gr.catalogue.trie import Mask, Trie, owner, spread
from npu_gr.core.arrays import I64
from npu_gr.core.errors import Unprocessable
from npu_gr.core.text_format import quoted

# numpy's kind of a column -> the allowed types of a value to search for. Compared with type(),
# since isinstance(True, int) holds.
TYPES: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "f": (int, float), "U": (str,)}


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """The allowed items and the valid edges, as masks over the trie's tables. Immutable."""

    allowed: Mask  # [N] in the order of `Trie.leaf_item`
    valid: tuple[Mask, ...]  # L x [n_{l+1}] edges of level l, in the order of `Trie.token[l]`

    def without(self, exclusion: Exclusion) -> Filter:
        """Return a copy without the excluded items and edges."""
        allowed = self.allowed.copy()
        allowed[exclusion.places] = False
        valid = tuple(edges.copy() for edges in self.valid)
        for edges, off in zip(valid, exclusion.edges, strict=True):
            edges[off] = False
        return Filter(allowed, valid)


@dataclass(frozen=True, slots=True, eq=False)
class Exclusion:
    """Denied items, and edges that no longer lead to an allowed item; both ascending, distinct."""

    places: I64  # into `Trie.leaf_item`
    edges: tuple[I64, ...]  # L x indices into `Trie.token[l]`


def allow_all(trie: Trie) -> Filter:
    """Allow every item of the trie."""
    return Filter(
        np.ones(trie.num_items, np.bool_),
        tuple(np.ones(len(codes), np.bool_) for codes in trie.token),
    )


def allow_mask(trie: Trie, allowed: Mask) -> Filter:
    """Allow the items of a mask, bool [N] in the order of `trie.leaf_item`, which is not copied."""
    below = allowed
    valid = []
    for pointers in (trie.leaf_ptr, *reversed(trie.indptr[1:])):
        # No range is empty, as every state has a child (T3): reduceat would be wrong for one.
        below = np.logical_or.reduceat(below, pointers[:-1]) if len(below) else below
        valid.append(below)
    return Filter(allowed, tuple(reversed(valid)))


def allow_items(trie: Trie, item_ids: I64, within: Filter | None = None) -> Filter:
    """Allow only some items.

    It visits only the paths to these items; the rest of the masks is zeroed memory that is never
    touched.

    Args:
        trie: the catalogue.
        item_ids: [n] external ids; unknown and repeated ones are ignored.
        within: Filter that must allow an item too; None = no other filter.
    """
    places = trie.places(item_ids)
    places = places[places >= 0]
    if within is not None:
        places = places[within.allowed[places]]
    allowed = np.zeros(trie.num_items, np.bool_)
    allowed[places] = True
    on = np.unique(places)
    valid = []
    for pointers in (trie.leaf_ptr, *reversed(trie.indptr[1:])):
        on = np.unique(owner(pointers, on))
        edges = np.zeros(len(pointers) - 1, np.bool_)
        edges[on] = True
        valid.append(edges)
    return Filter(allowed, tuple(reversed(valid)))


def deny_items(trie: Trie, item_ids: I64, within: Filter | None = None) -> Exclusion:
    """Find the places of some items, and the edges that lose their last allowed item with them.

    Args:
        trie: the catalogue.
        item_ids: [n] external ids; unknown and repeated ones are ignored.
        within: Filter to which the exclusion will be applied (`Filter.without`); None =
            `allow_all`.
    """
    # Sorted, since a history has thousands of items: lookups in order touch each part of the tables
    # once.
    places = np.unique(trie.places(np.unique(item_ids)))
    places = places[places >= 0]
    off = places
    edges = []
    allowed = within.allowed if within else None
    for level in range(trie.num_levels, 0, -1):
        # `off` holds items in the first round, then edges of this level. The state above each is an
        # edge of the level above, which is denied too if nothing below it is left.
        pointers = trie.leaf_ptr if level == trie.num_levels else trie.indptr[level]
        states = np.unique(owner(pointers, off))
        lo = pointers[states].astype(np.int64)
        degree = pointers[states + 1] - lo
        below = spread(lo, degree)
        alive = np.ones(len(below), np.bool_)
        alive[np.searchsorted(below, off)] = False  # both ascend, and `below` holds all of `off`
        if allowed is not None:
            alive &= allowed[below]
        if len(states):
            states = states[~np.logical_or.reduceat(alive, np.cumsum(degree) - degree)]
        allowed = within.valid[level - 1] if within else None
        edges.append(states)
        off = states
    return Exclusion(places, tuple(reversed(edges)))


def attribute_in(
    attributes: Mapping[str, Column], name: str, values: Sequence[bool | int | float | str]
) -> Mask:
    """Find the items whose attribute has one of the values.

    Args:
        attributes: columns by name, [N] each.
        name: Name of the attribute.
        values: Values of the column's type; integers are allowed for a column of floats.

    Returns:
        bool [N], in the order of the columns.

    Raises:
        Unprocessable: there is no such attribute, or a value is of another type.
    """
    if name not in attributes:
        raise Unprocessable(
            f"filter: no attribute {quoted(name)}; there are {', '.join(attributes) or 'none'}"
        )
    column = attributes[name]
    for value in values:
        if type(value) not in TYPES[column.dtype.kind]:
            raise Unprocessable(
                f"filter: {quoted(value)} is not of the type of attribute {quoted(name)}"
            )
    found = np.zeros(len(column), np.bool_)
    for value in values:
        # One pass for each value: a request names few, and np.isin would sort the column.
        found |= column == value
    return found
