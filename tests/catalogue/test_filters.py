"""A filter equals brute force: an edge is valid if and only if an allowed item lies below it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.catalogue.filters import (
    Exclusion,
    Filter,
    allow_all,
    allow_items,
    allow_mask,
    attribute_in,
    deny_items,
)
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.core.errors import Unprocessable
from tests.catalogue.catalogues import Record, catalogues, make_trie

exhaustively = settings(deadline=None, derandomize=True)
Drawn = tuple[list[Record], Codebooks]


def some_of(data: st.DataObject, records: list[Record]) -> set[int]:
    """Some of the items, sometimes nearly all, and an id that the catalogue lacks."""
    drawn = {record.item_id for record in records if data.draw(st.booleans())}
    return (
        drawn | {2**63 - 1}
        if data.draw(st.booleans())
        else {record.item_id for record in records} - set([*drawn][:2])
    )


def by_hand(trie: Trie, allowed: set[int]) -> list[list[bool]]:
    """Per level, whether each edge has an allowed item below, from the paths alone."""
    good = set()
    for item, sid in zip(trie.leaf_item, trie.sid_of(trie.find(trie.leaf_item)), strict=True):
        if int(item) in allowed:
            good |= {tuple(sid[:end].tolist()) for end in range(1, len(sid) + 1)}
    leaves = trie.sid_of(np.arange(len(trie.leaf_ptr) - 1)).tolist()
    prefixes = [
        sorted({tuple(sid[: level + 1]) for sid in leaves}) for level in range(trie.num_levels)
    ]
    return [[prefix in good for prefix in level] for level in prefixes]


def check(trie: Trie, found: Filter, allowed: set[int]) -> None:
    assert found.allowed.tolist() == [int(item) in allowed for item in trie.leaf_item]
    assert [edges.tolist() for edges in found.valid] == by_hand(trie, allowed)


@exhaustively
@given(catalogues(), st.data())
def test_allowed_items(drawn: Drawn, data: st.DataObject) -> None:
    trie, chosen = make_trie(*drawn), some_of(data, drawn[0])
    item_ids = np.array([*chosen, *chosen], np.int64)
    check(trie, allow_items(trie, item_ids), chosen)
    others = some_of(data, drawn[0])
    within = allow_items(trie, np.array([*others], np.int64))
    check(trie, allow_items(trie, item_ids, within), chosen & others)
    check(trie, allow_mask(trie, np.isin(trie.leaf_item, item_ids)), chosen)
    check(trie, allow_all(trie), {record.item_id for record in drawn[0]})


@exhaustively
@given(catalogues(), st.data())
def test_denied_items_within_what_is_allowed(drawn: Drawn, data: st.DataObject) -> None:
    trie, everything = make_trie(*drawn), {record.item_id for record in drawn[0]}
    denied, kept = some_of(data, drawn[0]), some_of(data, drawn[0])
    item_ids = np.array([*denied, *denied], np.int64)
    check(trie, allow_all(trie).without(deny_items(trie, item_ids)), everything - denied)
    within = allow_items(trie, np.array([*kept], np.int64))
    check(trie, within.without(deny_items(trie, item_ids, within)), kept - denied)


@exhaustively
@given(catalogues(), st.data())
def test_denied_edges_are_sorted_and_no_more_than_needed(drawn: Drawn, data: st.DataObject) -> None:
    trie, denied = make_trie(*drawn), some_of(data, drawn[0])
    off: Exclusion = deny_items(trie, np.array([*denied], np.int64))
    everything = {record.item_id for record in drawn[0]}
    assert trie.leaf_item[off.places].tolist() == [
        i for i in trie.leaf_item.tolist() if i in denied
    ]
    want = [
        np.flatnonzero(~np.array(level, np.bool_)).tolist()
        for level in by_hand(trie, everything - denied)
    ]
    assert [edges.tolist() for edges in off.edges] == want


def test_a_filter_is_not_changed_by_a_denial() -> None:
    trie = make_trie([Record(3, (0, 1), 0.0), Record(4, (1, 1), 0.0)], Codebooks.stacked([2, 2]))
    whole = allow_all(trie)
    whole.without(deny_items(trie, np.array([3])))
    check(trie, whole, {3, 4})


ATTRIBUTES = {
    "stock": np.array([True, False, True]),
    "shop": np.array([1, 2, 3]),
    "price": np.array([1.0, 2.5, 3.0]),
    "kind": np.array(["book", "film", "bookshelf"]),
}


@pytest.mark.parametrize(
    ("name", "values", "want"),
    [
        ("stock", [True], [True, False, True]),
        ("shop", [3, 2, 9], [False, True, True]),
        ("price", [1, 2.5], [True, True, False]),
        ("kind", ["book", "cd"], [True, False, False]),
        ("kind", [], [False, False, False]),
    ],
)
def test_attribute_in(name: str, values: list[bool | int | float | str], want: list[bool]) -> None:
    assert attribute_in(ATTRIBUTES, name, values).tolist() == want


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("color", 1, "no attribute 'color'; there are stock, shop, price, kind"),
        ("stock", 1, "1 is not of the type of attribute 'stock'"),
        ("shop", True, "True is not of the type"),
        ("shop", 1.0, r"1\.0 is not of the type"),
        ("price", "1", "'1' is not of the type"),
        ("kind", 1, "1 is not of the type"),
    ],
)
def test_bad_predicates(name: str, value: bool | int | float | str, reason: str) -> None:
    with pytest.raises(Unprocessable, match=reason):
        attribute_in(ATTRIBUTES, name, [value])


def test_no_attributes_at_all() -> None:
    with pytest.raises(Unprocessable, match="there are none"):
        attribute_in({}, "stock", [True])
