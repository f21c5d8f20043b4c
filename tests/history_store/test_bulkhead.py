"""A breaker opens after failures, permits one probe at a time, and closes when one succeeds.

The bulkhead: bounded calls, a bounded queue and a bounded time, whatever the store behind it does.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from npu_gr.core.errors import StoreFailed, StoreFault, Unprocessable
from npu_gr.core.health import Health
from npu_gr.core.history import Events, StoreHealth, UserKey, Write, Written
from npu_gr.core.secret import SecretUrl
from npu_gr.history_store.bulkhead import NEWEST, GuardedStore, StoreBreaker
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig, StoredHistory
from tests.fault_proxy import FaultProxy
from tests.history_store.redis_server import redis_path
from tests.models import events


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made_breaker() -> tuple[StoreBreaker, Clock]:
    clock = Clock()
    return StoreBreaker(3, 0.1, clock), clock


def passed(breaker: StoreBreaker) -> int:
    era = breaker.enter()
    assert era is not None
    return era


def opened() -> tuple[StoreBreaker, Clock]:
    breaker, clock = made_breaker()
    for _ in range(3):
        breaker.failed(passed(breaker))
    assert breaker.is_open
    return breaker, clock


def test_failures_in_a_row_open_it_and_a_success_starts_anew() -> None:
    breaker, _ = made_breaker()
    for _ in range(2):
        assert not breaker.failed(passed(breaker))
    breaker.succeeded(passed(breaker))
    for _ in range(2):
        assert not breaker.failed(passed(breaker))
    assert not breaker.is_open
    assert breaker.failed(passed(breaker))
    assert breaker.is_open
    assert breaker.enter() is None


def test_half_of_the_newest_open_it() -> None:
    breaker, _ = made_breaker()
    for turn in range(NEWEST):
        assert not breaker.is_open
        (breaker.failed if turn % 2 else breaker.succeeded)(passed(breaker))
    assert breaker.is_open


def test_one_probe_at_a_time_and_a_success_closes_it() -> None:
    breaker, clock = opened()
    clock.now = 0.11
    probe = passed(breaker)
    assert breaker.enter() is None
    assert breaker.succeeded(probe)
    assert not breaker.is_open
    passed(breaker)


def test_a_probe_that_fails_waits_again() -> None:
    breaker, clock = opened()
    clock.now = 0.11
    breaker.failed(passed(breaker))
    clock.now = 0.2
    assert breaker.enter() is None
    clock.now = 0.22
    breaker.given_up(passed(breaker))
    passed(breaker)  # one that was not made leaves its turn to the next


def test_calls_from_before_do_not_count() -> None:
    breaker, clock = made_breaker()
    early = [passed(breaker) for _ in range(6)]
    for era in early[:3]:
        breaker.failed(era)
    assert breaker.is_open
    assert not breaker.succeeded(early[3])
    assert breaker.is_open
    clock.now = 0.11
    breaker.succeeded(passed(breaker))
    for era in early[3:]:
        breaker.failed(era)
    assert not breaker.is_open


@pytest.mark.parametrize("works", [True, False])
@settings(deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["enter", "ok", "bad", "give up", "wait"])))
def test_whatever_happens_it_recovers(works: bool, steps: list[str]) -> None:
    """A dependency that works is used again within two calls, one that fails is not."""
    breaker, clock = made_breaker()
    out: list[int] = []
    for step in steps:
        if step == "wait":
            clock.now += 0.06
        elif step == "enter":
            era = breaker.enter()
            if era is not None:
                out.append(era)
        elif out:
            {"ok": breaker.succeeded, "bad": breaker.failed, "give up": breaker.given_up}[step](
                out.pop()
            )
    for era in out:
        breaker.given_up(era)
    for _ in range(10):
        clock.now += 0.2
        era = breaker.enter()
        assert era is not None
        (breaker.succeeded if works else breaker.failed)(era)
    assert breaker.is_open != works


USER = UserKey("t", "u")
SHORT = HistoryConfig(
    read_timeout_s=0.03, timeout_s=0.1, max_calls=3, max_queue=2, max_failures=3, retry_s=0.01
)


class Seen:
    """Counts what is reported."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def called(self, operation: str, result: str, took_s: float) -> None:
        assert took_s >= 0
        self.calls[operation, result] += 1


class Scripted:
    """A store that works, fails, or hangs until it is released, as set by the test."""

    def __init__(self) -> None:
        self.health = StoreHealth()
        self.error: Exception | None = None
        self.release = asyncio.Event()
        self.release.set()
        self.running = 0
        self.most = 0
        self.began = 0

    async def _do(self) -> None:
        self.began += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.release.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.running -= 1

    async def append(self, user: UserKey, events: Events, key: str | None = None) -> Written:
        await self._do()
        return Written(1, 1)

    async def write_many(
        self, batch: Sequence[Write]
    ) -> list[Written | StoreFailed | Unprocessable]:
        await self._do()
        return [Written(1, 1)] * len(batch)

    async def read(self, user: UserKey, last: int, all_items: bool = False) -> StoredHistory:
        await self._do()
        return StoredHistory(events(3), 0)

    async def actions(self) -> tuple[str, ...]:
        raise NotImplementedError

    async def item_key(self, mine: str) -> str:
        return mine

    async def name_actions(self, names: Sequence[str]) -> tuple[str, ...]:
        raise NotImplementedError

    async def erase(self, user: UserKey) -> bool:
        await self._do()
        return True

    async def close(self) -> None:
        pass


def made(config: HistoryConfig = SHORT) -> tuple[GuardedStore, Scripted, Seen]:
    store, seen = Scripted(), Seen()
    return GuardedStore(store, config, seen), store, seen


async def fault_of(call: asyncio.Future[object] | asyncio.Task[object]) -> StoreFault | None:
    try:
        await call
    except StoreFailed as error:
        return error.fault
    return None


async def test_a_store_that_hangs_holds_its_calls_and_no_caller() -> None:
    health = Health()
    # a probe that is due before the test asks once more would be let through
    guard, store, seen = made(structs.replace(SHORT, retry_s=0.5))
    health.add("history_reads", guard.reads.worker)
    store.release.clear()
    reads = [
        asyncio.ensure_future(fault_of(asyncio.ensure_future(guard.read(USER, 9))))
        for _ in range(12)
    ]
    faults = Counter(await asyncio.gather(*reads))
    assert faults == {StoreFault.SLOW: 3, StoreFault.BUSY: 9}
    assert store.most == 3  # and all of them are still there
    assert guard.reads.num_calls == 3
    assert guard.reads.waiting == 0
    assert guard.reads.is_open
    assert seen.calls["read", "store_slow"] == 3
    with pytest.raises(StoreFailed, match="did not answer within 100 ms; it is tried again"):
        await guard.read(USER, 9)
    assert store.began == 3
    assert seen.calls["read", "rejected"] == 1
    assert health.ages_s()["history_reads"] > 0
    store.release.set()
    await until_closed(guard)
    await settled()
    assert guard.reads.num_calls == 0
    assert health.ages_s()["history_reads"] == 0
    await guard.close()


async def settled() -> None:
    """Every task that can go on has gone on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until_closed(guard: GuardedStore) -> None:
    async with asyncio.timeout(10):
        while guard.reads.is_open:
            await asyncio.sleep(0.005)
            try:
                await guard.read(USER, 9)
            except StoreFailed:
                continue


async def test_appends_that_hang_stop_no_read() -> None:
    guard, store, _ = made()
    store.release.clear()
    appends = [
        asyncio.ensure_future(fault_of(asyncio.ensure_future(guard.append(USER, events(1)))))
        for _ in range(9)
    ]
    await settled()
    assert store.most == 3
    store.most = 0
    reading = asyncio.ensure_future(guard.read(USER, 9))
    await settled()
    assert store.began == 4
    store.release.set()
    assert len((await reading).events) == 3
    assert Counter(await asyncio.gather(*appends))[StoreFault.BUSY] == 4
    await guard.close()


async def test_a_caller_that_gives_up_leaves_its_call_behind() -> None:
    guard, store, seen = made()
    store.release.clear()
    gone = asyncio.create_task(guard.append(USER, events(1)))
    await settled()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert store.running == 1
    assert guard.writes.num_calls == 1
    store.release.set()
    await settled()
    assert guard.writes.num_calls == 0
    assert seen.calls == {("append", "ok"): 1}
    await guard.close()


async def test_a_caller_that_gives_up_in_the_queue_never_begins() -> None:
    guard, store, _ = made()
    store.release.clear()
    calls = [asyncio.create_task(guard.append(USER, events(1))) for _ in range(5)]
    await settled()
    assert guard.writes.waiting == 2
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert guard.writes.waiting == 0
    store.release.set()
    await settled()
    assert guard.writes.num_calls == 0
    assert store.began == 3
    assert await guard.append(USER, events(1)) == Written(1, 1)
    await guard.close()


async def test_what_is_wrong_with_one_entry_opens_nothing() -> None:
    guard, store, seen = made()
    for error in (
        StoreFailed("a checksum is wrong", StoreFault.CORRUPT),
        Unprocessable("idempotency_key: ..."),
    ):
        store.error = error
        for _ in range(9):
            with pytest.raises(type(error)):
                await guard.append(USER, events(1))
        assert not guard.writes.is_open
    assert seen.calls == {("append", "entry_corrupt"): 9, ("append", "ok"): 9}
    await guard.close()


async def test_failures_are_logged_with_their_cause_but_not_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, seen = Scripted(), Seen()
    store.error = StoreFailed(
        "the history store cannot be written: database or disk is full", StoreFault.DISK_FULL
    )
    now = [0.0]
    config = HistoryConfig(max_failures=1000)
    guard = GuardedStore(store, config, seen, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, "npu_gr.history_store.bulkhead"):
        for _ in range(18):
            with pytest.raises(StoreFailed):
                await guard.append(USER, events(1))
        now[0] = 1.1
        with pytest.raises(StoreFailed):
            await guard.append(USER, events(1))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "append: the history store cannot be written: database or disk is full",
        "append: the history store cannot be written: database or disk is full (and 17 more "
        "before it)",
    ]
    assert seen.calls == {("append", "disk_full"): 19}
    await guard.close()


async def test_a_blocked_event_loop_is_not_the_stores_fault() -> None:
    """The loop was blocked and could not read the answer: the limit begins again, once."""
    import time

    guard, store, seen = made(HistoryConfig(read_timeout_s=0.05, timeout_s=0.05))
    store.release.clear()
    reading = asyncio.ensure_future(guard.read(USER, 9))
    await settled()
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, 0.2)
    loop.call_soon(loop.call_later, 0.0, store.release.set)
    assert len((await reading).events) == 3
    assert seen.calls == {("read", "ok"): 1}
    await guard.close()


async def test_a_full_disk_has_its_name(tmp_path: Path) -> None:
    """SQLite's own limit on the file's size gives the error that a full disk gives."""
    config = HistoryConfig(path=str(tmp_path / "h.db"), max_failures=3, retry_s=0.01)
    store = await open_store(config)
    assert store is not None
    seen = Seen()
    guard = GuardedStore(store, config, seen)
    writer: sqlite3.Connection = store._writer  # type: ignore[attr-defined]
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count = {pages + 4}")
    async with asyncio.timeout(30):
        while not guard.writes.is_open:
            assert await fault_of(asyncio.ensure_future(guard.append(USER, events(250)))) in (
                None,
                StoreFault.DISK_FULL,
            )
    with pytest.raises(StoreFailed, match="database or disk is full; it is tried again") as failed:
        await guard.append(USER, events(1))
    assert failed.value.fault is StoreFault.DISK_FULL
    assert len((await guard.read(USER, 9)).events) == 9  # reads go on
    writer.execute("PRAGMA max_page_count = 100000")
    await asyncio.sleep(0.02)
    assert (await guard.append(USER, events(1))).num_events > 0
    assert not guard.writes.is_open
    await guard.close()


@pytest.mark.parametrize("mode", ["hang", "late", "reset", "half"])
async def test_redis_behind_a_network_that_fails(mode: str, tmp_path: Path) -> None:
    """Each fault opens the breaker within a few calls.

    Once it is over, calls succeed again within a moment.
    """
    with redis_path(tmp_path) as path:
        async with FaultProxy(None, None, path=path) as proxy:
            config = HistoryConfig(
                kind="redis",
                url=SecretUrl(f"redis://127.0.0.1:{proxy.port}/0"),
                timeout_s=0.2,
                read_timeout_s=0.1,
                retry_s=0.02,
            )
            store = await open_store(config)
            assert store is not None
            seen = Seen()
            guard = GuardedStore(store, config, seen)
            await guard.append(USER, events(20))
            assert len((await guard.read(USER, 9)).events) == 9
            proxy.set(mode, late_s=0.3)  # type: ignore[arg-type]
            async with asyncio.timeout(20):
                while not guard.reads.is_open:
                    assert await fault_of(asyncio.ensure_future(guard.read(USER, 9))) is not None
            assert sum(count for (_, result), count in seen.calls.items() if result != "ok") <= 6
            proxy.set("pass")
            await until_closed(guard)
            assert len((await guard.read(USER, 99)).events) == 20
            await guard.close()
