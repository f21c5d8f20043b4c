"""Inserting and leaving out give the very trie that a build of the same items gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.catalogue.build import insert, restrict
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.core.arrays import F32
from tests.catalogue.catalogues import Record, catalogues, make_trie


def orders(trie: Trie, records: list[Record]) -> F32:
    of = {record.item_id: record.order for record in records}
    return np.array([of[item] for item in trie.leaf_item.tolist()], np.float32)


def same(got: Trie, want: Trie) -> None:
    assert got.digest() == want.digest()
    assert np.array_equal(got.by_id, want.by_id)
    assert not got.leaf_item.flags.writeable


@settings(deadline=None)
@given(catalogue=catalogues(min_items=2), data=st.data())
def test_insert_is_a_build_of_both(
    catalogue: tuple[list[Record], Codebooks], data: st.DataObject
) -> None:
    records, books = catalogue
    cut = data.draw(st.integers(1, len(records) - 1))
    old, new = make_trie(records[:cut], books), make_trie(records[cut:], books)
    got = insert(old, orders(old, records), new, orders(new, records))
    want = make_trie(records, books)
    same(got.trie, want)
    assert np.array_equal(
        np.insert(orders(old, records), got.before, orders(new, records)), orders(want, records)
    )


@settings(deadline=None)
@given(catalogue=catalogues(min_items=1), data=st.data())
def test_restrict_is_a_build_of_the_rest(
    catalogue: tuple[list[Record], Codebooks], data: st.DataObject
) -> None:
    records, books = catalogue
    trie = make_trie(records, books)
    some = data.draw(st.sets(st.sampled_from(trie.leaf_item.tolist()), min_size=1))
    kept = np.isin(trie.leaf_item, list(some))
    same(
        restrict(trie, kept),
        make_trie([record for record in records if record.item_id in some], books),
    )
