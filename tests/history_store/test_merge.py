"""A merge adds what is missing, in time order, and a second one adds nothing, in both stores."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import StoreFailed, Unprocessable
from npu_gr.core.history import Events, Mode, UserKey, Write, Written
from npu_gr.history_store import embedded_file
from npu_gr.history_store.embedded import EmbeddedStore
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig, HistoryStore, merge
from tests.history_store.test_store import equal
from tests.models import events

USER = UserKey("t", "u")
Row = tuple[int, int, int]
rows = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 5)), max_size=12)


def of(rows: list[Row]) -> Events:
    return Events.make([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])


def rows_of(history: Events) -> list[Row]:
    columns = history.items.tolist(), history.actions.tolist(), history.timestamps.tolist()
    return list(zip(*columns, strict=True))


def in_time_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row[2])


@given(stored=rows, log=rows)
def test_it_has_as_many_of_each_as_the_fuller_side(stored: list[Row], log: list[Row]) -> None:
    stored = in_time_order(stored)
    merged = merge(of(stored), of(log), 1000)
    assert Counter(rows_of(merged.events)) == Counter(stored) | Counter(log)
    assert rows_of(merged.events) == in_time_order(rows_of(merged.events))
    assert merged.num_added == (Counter(log) - Counter(stored)).total()
    if merged.is_append:
        assert rows_of(merged.events)[: len(stored)] == stored


@given(stored=rows, log=rows, later=rows, most=st.integers(1, 8))
def test_a_second_merge_adds_nothing(
    stored: list[Row], log: list[Row], later: list[Row], most: int
) -> None:
    """Also where the store has given up events of the log, and whatever came between the two."""
    first = merge(of(in_time_order(stored))[-most:], of(log), most)
    assert len(first.events) <= most
    assert merge(first.events, of(log), most).num_added == 0
    between = first.events + of(
        in_time_order([(item, action, time + 5) for item, action, time in later])
    )
    assert merge(between[-most:], of(log), most).num_added == 0


async def test_a_store_merges(store: HistoryStore) -> None:
    history = events(600)
    assert await store.write_many([Write(USER, history[100:400], Mode.MERGE)]) == [
        Written(300, 300)
    ]
    assert await store.write_many([Write(USER, history[100:400], Mode.MERGE)]) == [Written(300, 0)]
    # a grown log
    assert await store.write_many([Write(USER, history[300:500], Mode.MERGE)]) == [
        Written(400, 100)
    ]
    assert equal((await store.read(USER, 999)).events, history[100:500])
    await store.append(USER, history[500:])
    # older ones
    assert await store.write_many([Write(USER, history[:300], Mode.MERGE)]) == [
        Written(600, 100, num_late=100)
    ]
    read, first, _ = await store.read(USER, 999)
    assert first == 0
    assert equal(read, history)
    assert equal((await store.read(USER, 10)).events, history[590:])


async def test_a_full_user_takes_nothing_old_back(store: HistoryStore) -> None:
    history = events(2500)
    (done,) = await store.write_many([Write(USER, history[:1200], Mode.MERGE)])
    assert done == Written(1000, 1000)  # the newest that it keeps
    for _ in range(2):
        assert await store.write_many([Write(USER, history[:1200], Mode.MERGE)]) == [
            Written(1000, 0)
        ]
    await store.append(USER, history[1200:])
    assert await store.write_many([Write(USER, history, Mode.MERGE)]) == [Written(1000, 0)]
    assert equal((await store.read(USER, 9999)).events, history[1500:])


async def test_a_store_replaces(store: HistoryStore) -> None:
    other = UserKey("t", "v")
    await store.append(USER, events(700, seed=1), "k")
    await store.append(other, events(5, seed=2))
    for _ in range(2):
        assert await store.write_many([Write(USER, events(300), Mode.REPLACE)]) == [
            Written(300, 300)
        ]
        read, first, _ = await store.read(USER, 999)
        assert (equal(read, events(300)), first) == (True, 0)
    assert equal((await store.read(other, 9)).events, events(5, seed=2))
    await store.append(USER, events(700, seed=1), "k")  # its key is still known
    assert (await store.append(USER, events(2, seed=3))).num_events == 302
    assert await store.write_many([Write(USER, events(1200), Mode.REPLACE)]) == [
        Written(1000, 1000)
    ]
    assert equal((await store.read(USER, 9999)).events, events(1200)[200:])


async def test_one_that_fails_fails_alone(store: HistoryStore) -> None:
    names = [UserKey("t", f"u{number}") for number in range(6)]
    await store.append(names[2], events(3), "k")
    batch = [Write(name, events(4, seed=1), Mode.APPEND, "k") for name in names]
    done = await store.write_many(batch)
    assert isinstance(done[2], Unprocessable)
    assert [one for place, one in enumerate(done) if place != 2] == [Written(4, 4)] * 5
    again = await store.write_many(batch)
    assert [one for place, one in enumerate(again) if place != 2] == [Written(4, 0)] * 5
    assert len((await store.read(names[2], 9)).events) == 3


async def test_writes_of_one_user_keep_their_order(store: HistoryStore) -> None:
    batch = [
        Write(USER, Events.make([number], [0], [number]), Mode.APPEND, f"k{number}")
        for number in range(200)
    ]
    done = await store.write_many(batch)
    assert [one.num_events for one in done if isinstance(one, Written)] == [*range(1, 201)]
    assert (await store.read(USER, 999)).events.items.tolist() == [*range(200)]


async def test_merges_that_come_at_once_add_once(store: HistoryStore) -> None:
    history = events(300)
    parts = [history[start : start + 100] for start in (0, 50, 100, 150, 200)] * 6
    done = await asyncio.gather(
        *(store.write_many([Write(USER, part, Mode.MERGE)]) for part in parts)
    )
    assert sum(one.num_added for (one,) in done if isinstance(one, Written)) == 300
    assert equal((await store.read(USER, 999)).events, history)


async def test_who_is_damaged_is_healed_by_a_replacement(tmp_path: Path) -> None:
    opened = await open_store(HistoryConfig(path=str(tmp_path / "h.db")))
    assert isinstance(opened, EmbeddedStore)
    await opened.append(USER, events(300))
    opened._writer.execute("UPDATE chunks SET data = zeroblob(length(data)) WHERE chunk = 0")
    other = UserKey("t", "v")
    damaged, whole = await opened.write_many(
        [Write(one, events(300), Mode.MERGE) for one in (USER, other)]
    )
    assert isinstance(damaged, StoreFailed)
    assert whole == Written(300, 300)
    assert await opened.write_many([Write(USER, events(300), Mode.REPLACE)]) == [Written(300, 300)]
    assert equal((await opened.read(USER, 999)).events, events(300))
    await opened.close()


async def test_a_store_that_fails_for_all_fails_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await open_store(HistoryConfig(path=str(tmp_path / "h.db")))
    assert opened is not None

    def breaks(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(embedded_file, "write", breaks)
        with pytest.raises(StoreFailed, match="disk I/O"):
            await opened.write_many([Write(USER, events(3)), Write(UserKey("", "v"), events(3))])
    assert await opened.write_many([]) == []
    await opened.close()


async def test_a_smaller_limit_keeps_the_newest(config: HistoryConfig) -> None:
    opened = await open_store(msgspec.structs.replace(config, max_events_per_user=10))
    assert opened is not None
    await opened.write_many([Write(USER, events(8), Mode.MERGE)])
    grown = events(30)
    await opened.write_many([Write(USER, grown, Mode.MERGE)])
    assert equal((await opened.read(USER, 99)).events, grown[20:])
    await opened.close()
