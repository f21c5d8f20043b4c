"""Late events go to their place by time, in both stores, as if all had come in order."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from npu_gr.core.feature_schema.columns import Columns
from npu_gr.core.history import Events, Mode, UserKey, Write, in_time_order
from npu_gr.history_store.embedded import EmbeddedStore
from npu_gr.history_store.store import HistoryStore
from tests.history_store.test_store import equal

USER = UserKey("t", "u")


def history(num: int, seed: int, num_times: int) -> Events:
    """Events in the order of their arrival; some have features, and many the same time."""
    random = np.random.default_rng(seed)
    plain = Events.make(
        np.arange(num), random.integers(0, 3, num), 1000 + random.integers(0, num_times, num)
    )
    spent = np.where(np.arange(num) // 50 % 2, np.arange(num), np.nan).astype(np.float32)
    tags = np.where(np.arange(num) % 7, 0, np.arange(num))[:, None].astype(np.uint64)
    return replace(plain, features=Columns({"spent": spent}, {"tags": tags}))


def num_late(part: Events, before: Events) -> int:
    times = [*before.timestamps.tolist(), *part.timestamps.tolist()]
    first = len(before)
    return sum(at < max(times[:place]) for place, at in enumerate(times[1:], 1) if place >= first)


@pytest.mark.parametrize("seed", range(3))
async def test_any_order_gives_the_history_in_time_order(store: HistoryStore, seed: int) -> None:
    """In parts of any size, over several chunks."""
    whole = history(700, seed, num_times=(3, 200, 10**6)[seed])
    cuts = [0, *np.sort(np.random.default_rng(seed).integers(0, 700, 12)).tolist(), 700]
    for place, (begin, end) in enumerate(pairwise(cuts)):
        part = whole[begin:end]
        done = await store.append(USER, part, f"k{place}")
        assert (done.num_events, done.num_added) == (end, end - begin)
        assert done.num_late == num_late(part, whole[:begin])
        again = await store.append(USER, part, f"k{place}")
        assert (again.num_events, again.num_added, again.num_late) == (end, 0, 0)
    want = in_time_order(whole)
    for last in (0, 1, 255, 256, 257, 699, 700):
        read, first, older = await store.read(USER, last, True)
        assert first == 700 - last
        assert equal(read, want[700 - last :])
        assert older is not None
        assert older.tolist() == want.items[: 700 - last].tolist()
    assert (await store.read(USER, 9)).older_items is None


async def test_a_full_history_stays_the_newest_events(store: HistoryStore) -> None:
    """Of 1,000 events at most: one that is older than all of them is not kept."""
    whole = replace(history(1700, 4, 1), timestamps=1000 + 2 * np.arange(1700))
    await store.append(USER, whole[:900])
    await store.append(USER, whole[900:])
    late = Events.make([7001, 7002, 7003], [0, 1, 2], [2999, 1001, 4397])
    assert (await store.append(USER, late)).num_late == 3
    all_events = in_time_order(whole + late)
    read, first, older = await store.read(USER, 5000, True)
    assert first == 703
    assert equal(read, all_events[-1000:])
    assert {7001, 7003} & set(read.items.tolist()) == {7001, 7003}
    assert older is not None
    assert not len(older)
    read, first, older = await store.read(USER, 40, True)
    assert (first, equal(read, all_events[-40:])) == (1663, True)
    assert older is not None
    assert older.tolist() == all_events.items[-1000:-40].tolist()


async def test_every_mode_stores_in_time_order(store: HistoryStore) -> None:
    whole = history(600, 5, 300)
    want = in_time_order(whole)
    for mode in (Mode.REPLACE, Mode.MERGE, Mode.APPEND):
        user = UserKey("t", mode)
        (done,) = await store.write_many([Write(user, whole[:400], mode)])
        assert done.num_late == num_late(whole[:400], Events.empty())  # type: ignore[union-attr]
        second = Mode.APPEND if mode is Mode.REPLACE else mode
        (done,) = await store.write_many([Write(user, whole[400:], second)])
        assert done.num_late == num_late(whole[400:], whole[:400])  # type: ignore[union-attr]
        assert equal((await store.read(user, 999)).events, want)


async def test_late_appends_at_once_count_once(store: HistoryStore) -> None:
    """Each is sent three times, by as many callers as there are appends."""
    whole = replace(history(20, 6, 1), timestamps=1000 + np.arange(20)[::-1])
    calls = [store.append(USER, whole[at : at + 1], f"k{at}") for at in [*range(20)] * 3]
    done = await asyncio.gather(*calls)
    assert sum(one.num_added for one in done) == 20
    assert equal((await store.read(USER, 999)).events, whole.take(np.arange(20)[::-1]))
    other = Events.make([1], [1], [5])
    assert (await store.append(USER, other, "late")).num_late == 1
    assert (await store.append(USER, other, "late")).num_added == 0


async def test_a_late_event_rewrites_only_the_newer_chunks(store: HistoryStore) -> None:
    if not isinstance(store, EmbeddedStore):
        pytest.skip("the store on Redis has no chunks")
    whole = replace(history(900, 7, 1), timestamps=1000 + 2 * np.arange(900))
    await store.append(USER, whole)
    rows = "SELECT chunk, sum FROM chunks ORDER BY chunk"
    before = store._writer.execute(rows).fetchall()
    await store.append(USER, Events.make([7], [1], [1000 + 2 * 600 + 1]))
    after = store._writer.execute(rows).fetchall()
    assert [one == other for one, other in zip(before, after, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
