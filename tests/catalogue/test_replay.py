"""A replay of the log makes the version that was served; another file has its say as documented."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from npu_gr.catalogue.centroids import Centroids, CodedFeature
from npu_gr.catalogue.change_log import NO_CHANGES, Changes
from npu_gr.catalogue.replay import replay, with_items
from npu_gr.catalogue.trie import Codebooks
from npu_gr.catalogue.versions import Snapshot, make_snapshot, restore, withdraw
from npu_gr.core.names import item_id
from npu_gr.core.served import CatalogueChange, NewItem
from tests.catalogue.test_versions import BOOKS, THREE, Row, as_items, ids

FILE = make_snapshot(as_items(THREE), BOOKS)


def new(number: int, sid: tuple[int, ...] = (1, 1), kind: str = "book", **more: Any) -> NewItem:
    features: Any = {"kinds": [kind]} if kind else {}
    attributes: Any = {"kind": kind}
    settings: dict[str, Any] = {"order": 0.5, "attributes": attributes, "features": features}
    return NewItem(item_id=number, sid=sid, **{**settings, **more})


def applied(snapshot: Snapshot, change: CatalogueChange) -> Snapshot:
    """Serve a change as `ServedCatalogue.update` does."""
    changes = snapshot.changes.then(change)
    if change.add:
        snapshot = with_items(snapshot, change.add)
    if change.withdraw is not None:
        snapshot = withdraw(snapshot, change.withdraw)
    if change.restore is not None:
        snapshot = restore(snapshot, change.restore)
    return replace(snapshot, changes=changes)


def changed(*changes: CatalogueChange, file: Snapshot = FILE) -> Changes:
    snapshot = replay(file, NO_CHANGES, None).snapshot
    for change in changes:
        snapshot = applied(snapshot, change)
    return snapshot.changes


class Series(RuleBasedStateMachine):
    """Any series of changes, replayed after each."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshot = replay(FILE, NO_CHANGES, None).snapshot

    @property
    def places(self) -> list[int]:
        return sorted(self.snapshot.trie.leaf_item.tolist())

    @rule(
        number=st.integers(0, 9),
        sid=st.tuples(st.integers(0, 2), st.integers(0, 3)),
        kind=st.sampled_from(["", "a", "long"]),
        title=st.sampled_from(["", "Title"]),
    )
    def add(self, number: int, sid: tuple[int, int], kind: str, title: str) -> None:
        if number not in self.snapshot.item_ids.tolist():
            change = CatalogueChange(add=(new(number, sid, kind, title=title),))
            self.snapshot = applied(self.snapshot, change)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def withdraw_and_restore(self, data: st.DataObject) -> None:
        some = st.lists(st.sampled_from(self.places), max_size=3)
        change = CatalogueChange(withdraw=ids(*data.draw(some)), restore=ids(*data.draw(some)))
        self.snapshot = applied(self.snapshot, change)

    @invariant()
    def a_replay_makes_the_same_version(self) -> None:
        again, dropped = replay(FILE, self.snapshot.changes, None)
        assert not dropped
        assert again.version == self.snapshot.version
        assert again.withdrawn_ids.tolist() == self.snapshot.withdrawn_ids.tolist()
        assert again.item_ids.tolist() == self.snapshot.item_ids.tolist()
        assert again.changes is self.snapshot.changes
        every = ids(*range(10))
        assert again.names.titles(every) == self.snapshot.names.titles(every)


TestSeries = Series.TestCase
TestSeries.settings = settings(
    deadline=None, derandomize=True, max_examples=60, stateful_step_count=15
)


def served(rows: list[Row], changes: Changes, books: Codebooks = BOOKS) -> tuple[Snapshot, Any]:
    file = make_snapshot(as_items(rows), books)
    snapshot, dropped = replay(file, changes, None)
    assert snapshot.changes.base == file.content
    # what was carried over is what the next start reads
    again, _ = replay(file, snapshot.changes, None)
    assert again.version == snapshot.version
    return snapshot, dropped


def of(snapshot: Snapshot, item: int) -> Any:
    return snapshot.features[item]


def test_a_file_that_has_an_added_item_wins() -> None:
    changes = changed(CatalogueChange(add=(new(9, kind="old"), new(10, kind="old"))))
    snapshot, dropped = served([*THREE, (9, (2, 2), 0.0, "new")], changes)
    assert not dropped
    assert snapshot.item_ids.tolist() == [5, 6, 7, 9, 10]
    assert (of(snapshot, 9), of(snapshot, 10)) == ({"kinds": ["new"]}, {"kinds": ["old"]})
    assert set(snapshot.changes.added) == {10}


def test_a_changed_item_is_as_the_next_file_has_it() -> None:
    changes = changed(
        CatalogueChange(withdraw=ids(5)), CatalogueChange(add=(new(5, kind="changed"),))
    )
    assert of(replay(FILE, changes, None).snapshot, 5) == {"kinds": ["changed"]}
    snapshot, _ = served([(5, (0, 0), 0.0, "trained"), *THREE[1:]], changes)
    assert of(snapshot, 5) == {"kinds": ["trained"]}
    assert not snapshot.changes
    # a file without it still gets the changed one
    snapshot, _ = served(THREE[1:], changes)
    assert of(snapshot, 5) == {"kinds": ["changed"]}


def test_a_withdrawn_item_stays_away_whatever_a_file_has() -> None:
    changes = changed(
        CatalogueChange(withdraw=ids(6)),
        CatalogueChange(add=(new(9),)),  # takes it out of the trie
        CatalogueChange(withdraw=ids(9, 7)),
    )
    more: list[Row] = [*THREE, (9, (2, 2), 0.0, "new")]
    snapshot, _ = served(more, changes)
    assert snapshot.item_ids.tolist() == [5]
    assert snapshot.withdrawn_ids.tolist() == [6, 7, 9]
    back = applied(snapshot, CatalogueChange(restore=ids(6, 9)))
    assert back.item_ids.tolist() == [5, 6, 9]
    # a file that lacks one remembers it for the file after
    without, _ = served([THREE[0]], changes)
    assert without.withdrawn_ids.tolist() == [6, 7, 9]
    assert served(more, without.changes)[0].item_ids.tolist() == [5]


def test_items_that_do_not_fit_a_file_are_dropped_with_the_reason() -> None:
    named = item_id("a name")
    changes = changed(CatalogueChange(add=(new(9, (2, 3)), new(named, (0, 1), name="a name"))))
    small = Codebooks.stacked([2, 4])
    snapshot, dropped = served([THREE[0]], changes, small)
    assert dropped == {"9": "record 1: code 2 of level 0, which has 0..1"}
    assert snapshot.item_ids.tolist() == [5, named]
    assert snapshot.names.names(ids(named)) == ["a name"]
    other = as_items([THREE[0]])
    other.attributes["stock"] = np.array([True])
    file = make_snapshot(other, BOOKS)
    assert replay(file, changes, None).dropped.keys() == {"9", "a name"}


def test_semantic_ids_that_were_made_are_made_again_for_another_file(tmp_path: Path) -> None:
    levels = tuple(np.eye(count, 4, dtype=np.float32) for count in (3, 4))
    coded = CodedFeature("kinds", ["a", "b", "c"])
    centroids = Centroids(levels, (coded,))
    changes = changed(
        CatalogueChange(add=(new(9, (0, 0), "a", has_made_sid=True), new(10, (0, 3), "a")))
    )
    same = replay(FILE, changes, centroids).snapshot
    assert same.trie.sid_of(same.trie.find(ids(9, 10))).tolist() == [[0, 0], [0, 3]]
    file = make_snapshot(as_items(THREE[:2]), BOOKS)
    other, dropped = replay(file, changes, centroids)
    assert not dropped
    found = other.trie.sid_of(other.trie.find(ids(9, 10))).tolist()
    assert found[0] != [0, 0]
    assert found[1] == [0, 3]
    # without a known value there is nothing to make one of
    unknown = changed(CatalogueChange(add=(new(9, (0, 0), "z", has_made_sid=True),)))
    assert "give a known value" in replay(file, unknown, centroids).dropped["9"]


@pytest.mark.parametrize("rows", [[], THREE])
def test_an_empty_catalogue_takes_changes_too(rows: list[Row]) -> None:
    empty = make_snapshot(as_items([]), BOOKS)
    changes = changed(CatalogueChange(add=(new(9),)), file=empty)
    assert replay(empty, changes, None).snapshot.item_ids.tolist() == [9]
    snapshot, dropped = served(rows, changes)
    assert not dropped
    assert 9 in snapshot.item_ids.tolist()
