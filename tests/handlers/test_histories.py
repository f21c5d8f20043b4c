"""A history's own fingerprint stands in for that of its tokens only where both are the same."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter

from npu_gr.core.errors import StoreFailed, StoreFault, UnknownPrefix
from npu_gr.core.feature_schema.columns import NO_COLUMNS, Columns
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.handlers.histories import Histories, StoreReads
from npu_gr.handlers.prefix_histories import PrefixHistoryCache, UserHistory
from npu_gr.history_store.store import StoredHistory
from tests.models import events
from tests.server.fake import metrics_of_all_kinds

USER = UserKey("t", "u")
WINDOW = 20
SPENT = Columns({"spent": np.arange(12, dtype=np.float32)})


@pytest.mark.parametrize(
    ("history", "first_index", "of_user", "is_known"),
    [
        (events(12), 0, None, True),
        (events(WINDOW), 0, {}, True),
        (events(0), 0, None, True),
        (events(WINDOW + 1), 0, None, False),  # it is named by its newest events
        (events(12), 5, None, False),  # and by where they begin
        (events(12), 0, {"age": 30}, False),
        (replace(events(12), features=SPENT), 0, None, False),
    ],
)
def test_a_plain_fingerprint_is_that_of_the_events(
    history: Events, first_index: int, of_user: dict[str, int] | None, is_known: bool
) -> None:
    found = UserHistory.of(history, first_index, WINDOW, of_user)
    plain = replace(found.events, features=NO_COLUMNS).fingerprint()
    assert found.plain_fingerprint == (plain if is_known else "")
    assert (found.fingerprint == plain) == is_known


class SlowStore:
    """A store that answers when the test lets it; reads alone."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def read(self, user: UserKey, last: int, all_items: bool = False) -> StoredHistory:
        await self.may_answer.wait()
        return StoredHistory(events(last), 0)


def made(wait_s: float) -> tuple[StoreReads, PrefixHistoryCache]:
    cache = PrefixHistoryCache(1 << 20)
    late = Counter("late_events", "Late events.", registry=CollectorRegistry())
    return StoreReads(cache, wait_s, late, caches=True), cache


async def read(reads: StoreReads, store: SlowStore, left_s: float) -> StoredHistory:
    deadline_at = time.monotonic() + left_s
    return await reads.read(store, USER, 5, deadline_at, 5, False)  # type: ignore[arg-type]


async def test_a_read_waits_as_long_as_the_request_can() -> None:
    reads, cache = made(0.01)
    store = SlowStore()
    reading = asyncio.ensure_future(read(reads, store, 60.0))
    await asyncio.sleep(0.1)
    assert not reading.done()  # nothing is known of the user
    store.may_answer.set()
    assert len((await reading).events) == 5
    store.may_answer.clear()
    with pytest.raises(StoreFailed, match="did not answer within 10 ms") as failed:
        await read(reads, store, 60.0)  # there is a history in its place
    assert failed.value.fault is StoreFault.SLOW
    cache.forget(USER)
    with pytest.raises(StoreFailed, match="did not answer within"):
        await read(reads, store, 0.05)  # no more time
    assert not cache.knows(USER)
    store.may_answer.set()
    await asyncio.sleep(0.01)
    assert cache.knows(USER)  # what came late serves the next request


class StoreOfTwelve:
    """A store in which every user has the same events; reads alone."""

    num_events = 12

    async def read(self, user: UserKey, last: int, all_items: bool = False) -> StoredHistory:
        if not self.num_events:
            raise StoreFailed("down", StoreFault.UNAVAILABLE)
        return StoredHistory(events(self.num_events), 0)


async def test_a_base_of_the_store_is_known_after_a_restart() -> None:
    store = StoreOfTwelve()

    def started() -> Histories:
        cache = PrefixHistoryCache(1 << 20)
        return Histories(store, cache, 4, "nothing", metrics_of_all_kinds())  # type: ignore[arg-type]

    whole = await started().read(USER, HistoryRef(), WINDOW)
    assert len(whole.events) == 12
    found = await started().read(USER, HistoryRef(base=whole.fingerprint), WINDOW)
    assert found.fingerprint == whole.fingerprint
    assert found.events.items.tolist() == whole.events.items.tolist()
    for num_events in (13, 0):  # an event was appended; the store is down
        store.num_events = num_events
        with pytest.raises(UnknownPrefix):
            await started().read(USER, HistoryRef(base=whole.fingerprint), WINDOW)


async def test_a_blocked_event_loop_is_not_the_stores_fault() -> None:
    reads, _ = made(0.05)
    store = SlowStore()
    store.may_answer.set()
    await read(reads, store, 60.0)
    store.may_answer.clear()
    reading = asyncio.ensure_future(read(reads, store, 60.0))
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, 0.2)
    loop.call_soon(loop.call_later, 0.0, store.may_answer.set)
    assert len((await reading).events) == 5
