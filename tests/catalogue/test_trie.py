"""The trie holds exactly the SIDs and items of the catalogue, in the documented order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.catalogue.build import build_trie, pointers_of
from npu_gr.catalogue.trie import DEAD, Codebooks, Trie, spread
from npu_gr.core.errors import CatalogueError
from tests.catalogue.catalogues import Record, catalogues, make_trie

exhaustively = settings(deadline=None, derandomize=True)


def num_leaves(trie: Trie) -> int:
    return len(trie.leaf_ptr) - 1


def in_order(records: list[Record]) -> dict[tuple[int, ...], list[int]]:
    """The reference: item ids by SID, SIDs ascending."""
    ranked = sorted(records, key=lambda record: (record.sid, -record.order, record.item_id))
    by_sid: dict[tuple[int, ...], list[int]] = {}
    for record in ranked:
        by_sid.setdefault(record.sid, []).append(record.item_id)
    return by_sid


def walk(trie: Trie) -> list[tuple[int, ...]]:
    """Every path from the root, in the order of its last edge."""
    states = np.zeros(1, np.int64)
    paths: list[tuple[int, ...]] = [()]
    for level in range(trie.num_levels):
        lo, degree = trie.children(level, states)
        parents = np.repeat(np.arange(len(states)), degree)
        states = spread(lo, degree)
        codes = trie.token[level][states]
        paths = [(*paths[parent], int(code)) for parent, code in zip(parents, codes, strict=True)]
    assert states.tolist() == list(range(num_leaves(trie)))
    return paths


@exhaustively
@given(catalogues())
def test_the_paths_are_the_sids_and_the_leaves_their_items(
    drawn: tuple[list[Record], Codebooks],
) -> None:
    records, codebooks = drawn
    trie, want = make_trie(records, codebooks), in_order(records)
    leaves = np.arange(num_leaves(trie))
    assert walk(trie) == list(want)
    assert [tuple(sid) for sid in trie.sid_of(leaves).tolist()] == list(want)
    item_ids, counts = trie.items_of(leaves)
    assert counts.tolist() == [len(items) for items in want.values()]
    assert item_ids.tolist() == [item for items in want.values() for item in items]
    assert trie.num_items == len(records)


@exhaustively
@given(catalogues(), st.data())
def test_items_of_any_leaves_limited_and_filtered(
    drawn: tuple[list[Record], Codebooks], data: st.DataObject
) -> None:
    trie, want = make_trie(*drawn), list(in_order(drawn[0]).values())
    leaves = data.draw(st.lists(st.integers(DEAD, num_leaves(trie) - 1), max_size=6))
    limit = data.draw(st.none() | st.integers(0, 3))
    banned = data.draw(
        st.sets(st.sampled_from([record.item_id for record in drawn[0]]))
        if drawn[0]
        else st.just(set())
    )
    allowed = ~np.isin(trie.leaf_item, list(banned)) if data.draw(st.booleans()) else None
    item_ids, counts = trie.items_of(np.array(leaves, np.int64), limit, allowed)
    lists = [want[leaf] if leaf != DEAD else [] for leaf in leaves]
    if allowed is not None:
        lists = [[item for item in items if item not in banned] for items in lists]
    lists = [items[:limit] for items in lists]
    assert item_ids.tolist() == [item for items in lists for item in items]
    assert counts.tolist() == [len(items) for items in lists]


@exhaustively
@given(catalogues(), st.lists(st.integers(-3, 2**62), max_size=5))
def test_find_inverts(drawn: tuple[list[Record], Codebooks], asked: list[int]) -> None:
    records, codebooks = drawn
    trie = make_trie(records, codebooks)
    sid_of = {record.item_id: record.sid for record in records}
    questions = np.array([*sid_of, *asked], np.int64)
    found = trie.sid_of(trie.find(questions))
    missing = (-1,) * len(codebooks)
    assert [tuple(sid) for sid in found.tolist()] == [
        sid_of.get(int(item), missing) for item in questions
    ]


@exhaustively
@given(catalogues())
def test_degrees_parents_and_size(drawn: tuple[list[Record], Codebooks]) -> None:
    trie = make_trie(*drawn)
    num_bytes = trie.leaf_ptr.nbytes + trie.leaf_item.nbytes + trie.by_id.nbytes
    for level in range(trie.num_levels):
        degrees = np.diff(trie.indptr[level])
        assert trie.width(level).tolist() == [
            max(int(degree) - 1, 0).bit_length() for degree in degrees
        ]
        edges = np.arange(len(trie.token[level]))
        assert (
            trie.parent(level, edges).tolist()
            == np.repeat(np.arange(len(degrees)), degrees).tolist()
        )
        num_bytes += trie.indptr[level].nbytes + trie.token[level].nbytes
    assert trie.num_bytes == num_bytes
    assert trie.children(0, np.array([DEAD])).degree.tolist() == [0]


@exhaustively
@given(catalogues(min_items=1), st.randoms())
def test_the_digest_is_of_the_content_not_of_the_order_of_records(
    drawn: tuple[list[Record], Codebooks], random: Any
) -> None:
    records, codebooks = drawn
    shuffled = random.sample(records, len(records))
    digest = make_trie(records, codebooks).digest()
    assert make_trie(shuffled, codebooks).digest() == digest
    assert make_trie(records[1:], codebooks).digest() != digest
    moved = [*records[1:], records[0]._replace(item_id=2**63 - 1)]
    assert make_trie(moved, codebooks).digest() != digest


def test_one_huge_node() -> None:
    codes = np.random.default_rng(0).permutation(70_000)
    sids = np.stack([np.zeros_like(codes), codes], axis=1)
    trie = build_trie(sids, codes + 5, Codebooks.stacked([1, 70_000]))
    assert trie.children(1, np.zeros(1, np.int64)).degree.tolist() == [70_000]
    assert trie.width(1).tolist() == [17]
    assert [table.dtype for table in trie.token] == [np.uint16, np.int32]
    assert np.array_equal(trie.sid_of(trie.find(codes + 5)), sids)


# a SID: with its row in one key, alone in one key, in none
@pytest.mark.parametrize("bits", [2, 30, 31])
def test_the_three_ways_to_sort_agree(bits: int) -> None:
    random = np.random.default_rng(bits)
    sids = random.integers(0, 4, (300, 2)) * (2 ** (bits - 2))
    sids = np.concatenate((sids, np.zeros((300, 1), np.int64)), axis=1)
    item_ids = random.permutation(300)
    # 0.0 and -0.0 too
    order = random.integers(-2, 3, 300).astype(np.float32) * np.float32(0.0 if bits == 2 else 1.5)
    records = [
        Record(int(i), tuple(s), float(o))
        for i, s, o in zip(item_ids, sids.tolist(), order, strict=True)
    ]
    trie = build_trie(sids, item_ids, Codebooks((2**bits, 2**bits, 4), (0, 0, 0)), order)
    want = in_order(records)
    assert walk(trie) == list(want)
    assert trie.leaf_item.tolist() == [item for items in want.values() for item in items]


def test_pointers_grow_with_the_number_of_edges() -> None:
    assert pointers_of(np.array([0, 5]), 2**31 - 1).dtype == np.int32
    assert pointers_of(np.array([0, 5]), 2**31).tolist() == [0, 5, 2**31]


def test_the_snapshot_cannot_be_written() -> None:
    trie = build_trie(np.array([[1]]), np.array([4]), Codebooks.stacked([2]))
    for table in (*trie.indptr, *trie.token, trie.leaf_ptr, trie.leaf_item, trie.by_id):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0


def test_stacked_codebooks() -> None:
    assert Codebooks.stacked([4, 5, 6], 10) == Codebooks((4, 5, 6), (10, 14, 19))


@pytest.mark.parametrize(
    ("code_count", "vocab_base", "reason"),
    [
        ((), (), "0 code counts and 0 vocabulary bases"),
        ((4, 4), (0,), "2 code counts and 1 vocabulary bases"),
        ((4, 0), (0, 4), "level 1: 0 codes from token 4 on"),
        ((4,), (-1,), "level 0: 4 codes from token -1 on"),
        ((2**31 + 1,), (0,), "level 0: 2147483649 codes"),
    ],
)
def test_bad_codebooks(
    code_count: tuple[int, ...], vocab_base: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(CatalogueError, match=reason):
        Codebooks(code_count, vocab_base)


GOOD: dict[str, npt.NDArray[Any]] = {
    "sids": np.array([[0, 1], [2, 3], [0, 1]]),
    "item_ids": np.array([7, 8, 9]),
    "order": np.array([0.5, 0.0, -1.0], np.float32),
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"item_ids": np.array([7, 8, 7])}, "record 3: item 7 is already in record 1"),
        ({"item_ids": np.array([7, -8, 9])}, "record 2: item id -8 is negative"),
        ({"item_ids": np.array([7.0, 8.0, 9.0])}, "item ids of type float64, want int64"),
        (
            {"sids": np.array([[0, 1], [2, -3], [0, 1]])},
            r"record 2: code -3 of level 1, which has "
            r"0\.\.3",
        ),
        (
            {"sids": np.array([[0, 1], [2, 3], [4, 1]])},
            r"record 3: code 4 of level 0, which has "
            r"0\.\.3",
        ),
        ({"sids": np.array([[0], [2], [0]])}, r"SIDs of shape \[3, 1\], want \[3, 2\]"),
        ({"sids": GOOD["sids"][:2]}, r"SIDs of shape \[2, 2\], want \[3, 2\]"),
        ({"sids": GOOD["sids"] * 0.5}, "SIDs of type float64, want integers"),
        (
            {"order": np.array([0, np.nan, 0], np.float32)},
            "record 2: order score nan is not finite",
        ),
        (
            {"order": np.array([np.inf, -np.inf, 0], np.float32)},
            "record 1: order score inf is not finite",
        ),
        ({"order": GOOD["order"][:2]}, r"order scores of shape \[2\], want \[3\]"),
    ],
)
def test_bad_records(change: dict[str, npt.NDArray[Any]], reason: str) -> None:
    with pytest.raises(CatalogueError, match=reason):
        build_trie(codebooks=Codebooks.stacked([4, 4]), **(GOOD | change))
