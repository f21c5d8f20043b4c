"""A spare row keeps its content while anything can read it, and is free afterwards."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from npu_gr.handlers import spare_rows
from npu_gr.handlers.spare_rows import Content, SpareRows
from npu_gr.model.history_tokenizer import UNKNOWN, ItemVocabulary

TRAINED = 3
FIRST = 100  # id of the first new item
NUM_ROWS = 4
ITEMS = range(FIRST, FIRST + 6)


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_rows, "WAIT_S", 0.0)


class Table:
    """A table of vectors whose rows are contents."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self.rows = SpareRows(ItemVocabulary(np.arange(TRAINED, dtype=np.int64)), num_rows)
        self.content: dict[int, Content] = {}  # row -> what was written last

    async def publish(self, version: str, wanted: list[Content]) -> list[Content]:
        """Follow a version of the catalogue as `ScoredItems` does. Returns what got no row."""
        rows = self.rows
        lacking = [one for one in wanted if not rows.has(one)]
        count = min(len(lacking), rows.room(wanted))
        places = await rows.reserve(count, wanted)
        assert not set(places) & set(rows._place.values()) & set(rows._waiting)
        new = dict(zip(lacking, places, strict=False))
        self.content |= {place + TRAINED: one for one, place in new.items()}
        found = [one if one in new or rows.has(one) else rows.known(one[0]) for one in wanted]
        rows.show(version, [one for one in found if one is not None], new)
        return lacking[len(places) :]

    def look_up(self, vocabulary: ItemVocabulary) -> dict[int, Content]:
        """Return the rows that a request may find, with their contents."""
        found = vocabulary.rows(np.array(ITEMS, np.int64)).tolist()
        return {row: self.content[row] for row in found if row != UNKNOWN}

    def check_conserved(self) -> None:
        rows = self.rows
        used, free, waiting = [*rows._place.values()], rows._free, [*rows._waiting]
        assert sorted([*used, *free, *waiting]) == list(range(rows.num_rows))
        assert rows.num_available == rows.num_rows - len(rows._needed | rows._previous)


class Reader(NamedTuple):
    """A request in progress: the vocabulary of its tokens, and what it has looked up."""

    vocabulary: ItemVocabulary
    seen: dict[int, Content]


class Changes(RuleBasedStateMachine):
    """Any series of versions, rollbacks and requests."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.readers: list[Reader] = []
        self.versions: list[list[Content]] = [[], []]  # previous, current
        self.number = 0

    @rule(digests=st.dictionaries(st.sampled_from(ITEMS), st.integers(1, 3), max_size=5))
    def publish(self, digests: dict[int, int]) -> None:
        self._publish([*digests.items()])

    @rule()
    def rollback(self) -> None:
        self._publish(self.versions[0])

    def _publish(self, wanted: list[Content]) -> None:
        self.number += 1
        rows = self.table.rows
        room = rows.num_rows - len(rows._retained(wanted))
        lacking = sum(not rows.has(one) for one in wanted)
        left = asyncio.run(self.table.publish(str(self.number), wanted))
        if not self.readers:
            assert len(left) == max(0, lacking - room)
        self.versions = [self.versions[1], wanted]

    @rule()
    def begin(self) -> None:
        vocabulary = self.table.rows.vocabulary
        self.readers.append(Reader(vocabulary, self.table.look_up(vocabulary)))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def look_up_again(self, data: st.DataObject) -> None:
        """Candidates of a request may be found by a later vocabulary than its history."""
        reader = self.readers[data.draw(st.integers(0, len(self.readers) - 1))]
        reader.seen.update(self.table.look_up(self.table.rows.vocabulary))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))

    @invariant()
    def every_row_is_in_one_state(self) -> None:
        self.table.check_conserved()

    @invariant()
    def a_reader_finds_what_it_looked_up(self) -> None:
        for reader in self.readers:
            for row, content in reader.seen.items():
                assert self.table.content[row] == content
                assert self.table.rows.vocabulary.ids_of(np.array([row])).tolist() == [content[0]]

    @invariant()
    def the_vocabulary_finds_the_right_rows(self) -> None:
        rows = self.table.rows
        for row, content in self.table.look_up(rows.vocabulary).items():
            assert rows.known(content[0]) == content
            assert rows.vocabulary.stamps[row - TRAINED] == content[1]
        for content in rows._needed:
            assert self.table.content[rows._place[content] + TRAINED] == content
            assert rows.known(content[0]) == content


TestChanges = Changes.TestCase
TestChanges.settings = settings(
    deadline=None, derandomize=True, max_examples=150, stateful_step_count=30
)


async def test_ten_thousand_changes_of_items_fit_on_64_rows() -> None:
    """In a review the 64th change of one item left no row for anything new."""
    table = Table(64)

    def versions() -> Iterator[list[Content]]:
        for number in range(10_000):
            stays = [(FIRST + item, number // 40) for item in range(20)]
            yield stays[1:]  # an item is withdrawn, then comes back with other features
            yield [*stays[1:], (FIRST, number)]

    for number, wanted in enumerate(versions()):
        assert not await table.publish(str(number), wanted)
    table.check_conserved()
    assert len(set(table.content.values())) <= 64


async def test_items_that_left_the_catalogue_keep_their_rows_until_others_need_them() -> None:
    table = Table()
    gone = [(item, 1) for item in ITEMS[:3]]
    await table.publish("a", gone)
    await table.publish("b", [])
    await table.publish("c", [])
    assert sorted(table.look_up(table.rows.vocabulary).values()) == gone
    assert table.rows.num_available == NUM_ROWS
    await table.publish("d", [(ITEMS[4], 1), (ITEMS[5], 1)])
    left = sorted(table.look_up(table.rows.vocabulary).values())
    # the item that the first version has first is the longest gone
    assert left == [*gone[1:], (ITEMS[4], 1), (ITEMS[5], 1)]


async def test_a_request_keeps_the_row_that_it_reads() -> None:
    table = Table(1)
    await table.publish("a", [(FIRST, 1)])
    reads = table.rows.vocabulary
    await table.publish("b", [])
    await table.publish("c", [])
    assert await table.publish("d", [(FIRST, 2)]) == [(FIRST, 2)]
    assert table.content[TRAINED] == (FIRST, 1)
    assert table.rows.num_waiting == 1
    del reads
    assert not await table.publish("e", [(FIRST, 2)])
    assert table.content[TRAINED] == (FIRST, 2)


async def test_a_rollback_finds_its_rows_as_they_were() -> None:
    table = Table(2)
    await table.publish("a", [(FIRST, 1)])
    await table.publish("b", [(FIRST, 2)])
    assert table.rows.num_available == 0
    assert await table.publish("c", [(FIRST, 2), (FIRST + 1, 1)]) == []
    assert not await table.publish("b", [(FIRST, 2)])
    assert sorted(table.content.values()) == [(FIRST, 2), (FIRST + 1, 1)]


async def test_a_change_that_waits_for_a_reader_stops_the_process_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each full collection stops every request."""
    monkeypatch.setattr(spare_rows, "WAIT_S", 1.0)
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    table = Table(1)
    await table.publish("a", [(FIRST, 1)])
    reader = table.rows.vocabulary
    await table.publish("b", [])
    await table.publish("c", [])
    assert await table.publish("d", [(FIRST, 2)]), "its reader has not ended"
    assert reader is not None
    assert 1 <= len(collected) <= 4


async def test_a_row_is_free_although_a_request_left_a_cycle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spare_rows, "WAIT_S", 5.0)
    table = Table(1)
    await table.publish("a", [(FIRST, 1)])
    cycle: list[object] = [table.rows.vocabulary]
    cycle.append(cycle)
    del cycle
    await table.publish("b", [])
    await table.publish("c", [])
    assert not await table.publish("d", [(FIRST, 2)])
