"""Changes give the documented version, a pinned one stays, and a bad change changes nothing."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from npu_gr.catalogue.filters import allow_items
from npu_gr.catalogue.records import Items
from npu_gr.catalogue.trie import Codebooks
from npu_gr.catalogue.versions import Catalogue, Snapshot, add, make_snapshot, restore, withdraw
from npu_gr.core.errors import CatalogueError, DataError, Unavailable
from npu_gr.core.served import CatalogueInfo

BOOKS = Codebooks.stacked([3, 4])
Row = tuple[int, tuple[int, ...], float, str]  # item id, SID, order score, kind


def as_items(rows: list[Row]) -> Items:
    return Items(
        np.array([row[0] for row in rows], np.int64),
        np.array([row[1] for row in rows], np.int32).reshape(len(rows), 2),
        np.array([row[2] for row in rows], np.float32),
        {"kind": np.array([row[3] for row in rows], np.str_)},
        {row[0]: {"kinds": [row[3]]} for row in rows if row[3]},
    )


def ids(*item_ids: int) -> Any:
    return np.array(item_ids, np.int64)


THREE: list[Row] = [
    (5, (0, 1), 1.0, "book"),
    (6, (0, 1), 2.0, "film"),
    (7, (2, 3), 0.0, "audiobook"),
]


class Changes(RuleBasedStateMachine):
    """Any series of changes against dictionaries."""

    rows = st.tuples(
        st.integers(0, 12),
        st.tuples(st.integers(0, 2), st.integers(0, 3)),
        st.sampled_from([0.0, 0.5, -1.0]),
        st.sampled_from(["", "a", "long"]),
    )

    def __init__(self) -> None:
        super().__init__()
        self.snapshot = make_snapshot(as_items([]), BOOKS)
        self.held: dict[int, Row] = {}  # in the trie
        self.withdrawn: set[int] = set()
        self.removed: set[int] = set()  # withdrawn, then dropped from the trie

    @rule(rows=st.lists(rows, max_size=4, unique_by=lambda row: row[0]))
    def add(self, rows: list[Row]) -> None:
        if any(row[0] in self.held and row[0] not in self.withdrawn for row in rows):
            with pytest.raises(CatalogueError, match="already in the catalogue"):
                add(self.snapshot, as_items(rows))
            return
        self.snapshot = add(self.snapshot, as_items(rows))
        self.held = {i: row for i, row in self.held.items() if i not in self.withdrawn} | {
            row[0]: row for row in rows
        }
        self.removed = (self.removed | self.withdrawn) - {row[0] for row in rows}
        self.withdrawn = set()
        assert (
            self.snapshot.version
            == make_snapshot(as_items(list(self.held.values())), BOOKS).version
        )

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4))
        self.snapshot = withdraw(self.snapshot, ids(*some))
        self.withdrawn |= set(some)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4))
        self.snapshot = restore(self.snapshot, ids(*some))
        self.withdrawn -= set(some)

    @invariant()
    def holds_what_it_should(self) -> None:
        trie, available = self.snapshot.trie, self.snapshot.available
        sids = [tuple(sid) for sid in trie.sid_of(trie.find(trie.leaf_item)).tolist()]
        found = {}
        for place, item in enumerate(trie.leaf_item.tolist()):
            assert self.snapshot.order is not None
            kind = str(self.snapshot.attributes["kind"][place])
            found[item] = (item, sids[place], float(self.snapshot.order[place]), kind)
        assert found == self.held
        assert self.snapshot.features == {
            item: {"kinds": [row[3]]} for item, row in self.held.items() if row[3]
        }
        assert self.snapshot.item_ids.tolist() == sorted(self.held.keys() - self.withdrawn)
        assert self.snapshot.withdrawn_ids.tolist() == sorted(self.withdrawn | self.removed)
        assert (available is None) == (not self.withdrawn)
        assert self.snapshot.num_items == len(self.held) - len(self.withdrawn)
        if available:
            want = allow_items(trie, ids(*(self.held.keys() - self.withdrawn)))
            assert available.allowed.tolist() == want.allowed.tolist()
            assert [edges.tolist() for edges in available.valid] == [
                edges.tolist() for edges in want.valid
            ]
        else:
            assert self.snapshot.version == self.snapshot.content


TestChanges = Changes.TestCase
TestChanges.settings = settings(
    deadline=None, derandomize=True, max_examples=60, stateful_step_count=15
)


def test_the_version_is_of_the_content() -> None:
    version = make_snapshot(as_items(THREE), BOOKS).version
    assert make_snapshot(as_items(THREE[::-1]), BOOKS).version == version
    others = [
        make_snapshot(as_items([(5, (0, 1), 1.0, "bool"), *THREE[1:]]), BOOKS),
        make_snapshot(as_items([(5, (0, 1), 1.5, "book"), *THREE[1:]]), BOOKS),
        make_snapshot(as_items([(5, (0, 2), 1.0, "book"), *THREE[1:]]), BOOKS),
        make_snapshot(replace(as_items(THREE), features={5: {"kinds": ["novel"]}}), BOOKS),
        withdraw(make_snapshot(as_items(THREE), BOOKS), ids(5)),
        withdraw(make_snapshot(as_items(THREE), BOOKS), ids(6)),
    ]
    assert len({version, *(other.version for other in others)}) == 7


def test_num_bytes_counts_columns_and_filter() -> None:
    snapshot = make_snapshot(as_items(THREE), BOOKS)
    assert snapshot.num_bytes == snapshot.trie.num_bytes + 3 * 4 + 3 * 4 * len("audiobook")
    assert withdraw(snapshot, ids(5)).num_bytes == snapshot.num_bytes + 3 + 2 + 2


def test_columns_cannot_be_written() -> None:
    snapshot = make_snapshot(as_items(THREE), BOOKS)
    for column in (snapshot.order, *snapshot.attributes.values()):
        assert column is not None
        with pytest.raises(ValueError, match="read-only"):
            column[0] = column[1]


def test_a_pinned_version_lives_on_and_then_goes() -> None:
    catalogue = Catalogue()
    first = make_snapshot(as_items(THREE), BOOKS)
    table = weakref.ref(first.trie.leaf_item)
    catalogue.publish(first)
    del first
    with catalogue.pin() as pinned:
        # two: the first version is no longer kept for a rollback
        for rows in (THREE[:1], THREE[:2]):
            catalogue.publish(make_snapshot(as_items(rows), BOOKS))
        assert pinned.num_items == 3
        assert pinned.trie.items_of(pinned.trie.find(ids(5))).item_ids.tolist() == [6, 5]
        with catalogue.pin() as newer:
            assert newer.num_items == 2
    assert table() is not None
    del pinned
    assert table() is None


def test_publish_rollback_and_status() -> None:
    now = [10.0]
    catalogue = Catalogue(clock=lambda: now[0])
    old, new = make_snapshot(as_items(THREE), BOOKS), make_snapshot(as_items(THREE[:1]), BOOKS)
    catalogue.publish(old)
    now[0] = 15.0
    assert catalogue.status() == CatalogueInfo(
        version=old.version, num_items=3, num_bytes=old.num_bytes, age_s=5.0, previous=None
    )
    with pytest.raises(DataError, match="no previous version"):
        catalogue.rollback()
    catalogue.publish(new)
    now[0] = 16.0
    # the same again: nothing to serve anew
    catalogue.publish(make_snapshot(as_items(THREE[:1]), BOOKS))
    assert catalogue.status() == CatalogueInfo(
        version=new.version, num_items=1, num_bytes=new.num_bytes, age_s=1.0, previous=old.version
    )
    catalogue.rollback()
    assert (catalogue.status().version, catalogue.status().age_s) == (old.version, 0.0)
    catalogue.rollback()
    assert (catalogue.status().version, catalogue.status().previous) == (new.version, old.version)


def test_nothing_published() -> None:
    with (
        pytest.raises(Unavailable, match="no version of the catalogue has been published"),
        Catalogue().pin(),
    ):
        pass
    with pytest.raises(Unavailable):
        Catalogue().status()
    with pytest.raises(DataError, match="there is no previous version of the catalogue"):
        Catalogue().rollback()


def test_other_codebooks_are_rejected() -> None:
    catalogue = Catalogue()
    served = make_snapshot(as_items(THREE), BOOKS)
    catalogue.publish(served)
    with pytest.raises(CatalogueError, match="the catalogue has Codebooks"):
        catalogue.publish(make_snapshot(as_items(THREE), Codebooks.stacked([3, 5])))
    assert catalogue.status().version == served.version


def test_many_publishers_lose_no_version() -> None:
    catalogue = Catalogue()
    versions = [make_snapshot(as_items([(i, (0, 0), 0.0, "")]), BOOKS) for i in range(8)]
    threads = [threading.Thread(target=catalogue.publish, args=(version,)) for version in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = catalogue.status()
    assert status.previous is not None
    assert {status.version, status.previous} < {version.version for version in versions}


def without(items: Items, **change: Any) -> Items:
    fields: dict[str, Any] = {
        name: getattr(items, name) for name in ("item_ids", "sids", "order", "attributes")
    }
    return Items(**(fields | change))


MORE = as_items([(8, (1, 1), 0.0, "x"), (9, (1, 1), 0.0, "y")])


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (without(MORE, item_ids=ids(8, 6)), "record 2: item 6 is already in the catalogue"),
        (without(MORE, item_ids=ids(8, 8)), "record 2: item 8 is already in record 1"),
        (without(MORE, sids=np.array([[0, 0], [0, 4]], np.int32)), "record 2: code 4 of level 1"),
        (
            without(MORE, sids=np.array([[0], [0]], np.int32)),
            "SIDs of 1 codes, those of the catalogue have 2",
        ),
        (without(MORE, order=None), "columns kind, those of the catalogue are order, kind"),
        (without(MORE, attributes={}), "columns order, those of the catalogue are order, kind"),
        (without(MORE, order=None, attributes={}), "columns none, those"),
        (
            without(MORE, attributes={"kind": ids(1, 2)}),
            "attribute 'kind' of type int64, that of the catalogue is <U9",
        ),
    ],
)
def test_bad_additions(items: Items, reason: str) -> None:
    snapshot = make_snapshot(as_items(THREE), BOOKS)
    with pytest.raises(CatalogueError, match=reason):
        add(snapshot, items)


def test_whole_numbers_join_a_column_of_fractions() -> None:
    one = Items(ids(1), np.array([[0, 0]], np.int32), None, {"price": np.array([0.5])})
    two = Items(ids(2), np.array([[0, 0]], np.int32), None, {"price": ids(3)})
    both: Snapshot = add(make_snapshot(one, BOOKS), two)
    assert both.attributes["price"].tolist() == [0.5, 3.0]


@pytest.mark.parametrize("change", [withdraw, restore])
def test_unknown_items_are_rejected(change: Any) -> None:
    with pytest.raises(CatalogueError, match="record 2: item 99 is not in the catalogue"):
        change(make_snapshot(as_items(THREE), BOOKS), ids(5, 99))


def test_a_file_without_records_is_an_empty_catalogue() -> None:
    empty = make_snapshot(Items(ids(), np.empty((0, 0), np.int32), None, {}), BOOKS)
    assert (empty.num_items, len(empty.trie.leaf_item)) == (0, 0)
    assert empty.trie.children(0, ids(0)).degree.tolist() == [0]
    assert add(empty, as_items(THREE)).version == make_snapshot(as_items(THREE), BOOKS).version
