"""Both stores keep every acknowledged event in order, also if the process is killed."""

from __future__ import annotations

import asyncio
import base64
import gc
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from npu_gr.core.errors import ConfigError, StoreFailed, StoreFault, Unavailable, Unprocessable
from npu_gr.core.history import Events, UserKey, Write, Written
from npu_gr.core.secret import SecretUrl
from npu_gr.history_store import embedded_file
from npu_gr.history_store.embedded import EmbeddedStore
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig, HistoryStore, key_bytes
from tests.models import after, events

USER = UserKey("t", "u")


def equal(a: Events, b: Events) -> bool:
    return a.fingerprint() == b.fingerprint()


async def test_order_and_the_newest(store: HistoryStore) -> None:
    history = events(700)
    kept = 0
    for start in range(0, 700, 90):
        part = history[start : start + 90]
        kept += len(part)
        assert (await store.append(USER, part)).num_events == kept
    read, first, _ = await store.read(USER, 10_000)
    assert first == 0
    assert equal(read, history)
    for last in (1, 255, 256, 257, 699):
        read, first, _ = await store.read(USER, last)
        assert first == 700 - last
        assert equal(read, history[700 - last :])


async def test_an_unknown_user_has_no_history(store: HistoryStore) -> None:
    read, first, _ = await store.read(UserKey("", "unknown"), 10)
    assert (len(read), first) == (0, 0)


async def test_old_events_are_given_up_and_indices_go_on(store: HistoryStore) -> None:
    history = events(3000)
    kept = 0
    for start in range(0, 3000, 100):
        kept = (await store.append(USER, history[start : start + 100])).num_events
    assert kept == 1000
    read, first, _ = await store.read(USER, 1000)
    assert first == 2000
    assert equal(read, history[2000:])


async def test_users_do_not_mix(store: HistoryStore) -> None:
    names = [
        ("a", "bc"),
        ("ab", "c"),
        ("", "abc"),
        ("abc", ""),
        ("ü☃", "%_'\"\\"),
        ("ü", "☃%_'\"\\"),
        ("{a}", "{b}"),
    ]
    for number, name in enumerate(names):
        await store.append(UserKey(*name), events(5, seed=number))
    for number, name in enumerate(names):
        assert equal((await store.read(UserKey(*name), 99)).events, events(5, seed=number))


async def test_erasing(store: HistoryStore) -> None:
    other = UserKey("t", "v")
    await store.write_many([Write(USER, events(300)), Write(other, events(5, seed=1))])
    await store.erase(USER)
    assert len((await store.read(USER, 999)).events) == 0
    assert equal((await store.read(other, 999)).events, events(5, seed=1))
    await store.append(USER, events(4, seed=2))
    assert equal((await store.read(USER, 999)).events, events(4, seed=2))


async def test_concurrent_appends_keep_every_event(store: HistoryStore) -> None:
    async def one(number: int) -> None:
        for step in range(5):
            await store.append(
                UserKey("", f"u{number % 4}"), Events.make([number * 10 + step], [0], [1])
            )

    await asyncio.gather(*(one(number) for number in range(40)))
    found = [
        (await store.read(UserKey("", f"u{user}"), 999)).events.items.tolist() for user in range(4)
    ]
    for user, items in enumerate(found):
        assert sorted(items) == sorted(n * 10 + s for n in range(user, 40, 4) for s in range(5))
        for n in range(user, 40, 4):  # one caller's appends stay in order
            assert [i for i in items if i // 10 == n] == [n * 10 + s for s in range(5)]


async def test_it_is_there_after_reopening(config: HistoryConfig) -> None:
    for round_ in range(2):
        opened = await open_store(config)
        assert opened is not None
        if not round_:
            await opened.append(USER, events(300))
        else:
            assert equal((await opened.read(USER, 999)).events, events(300))
        await opened.close()


async def test_a_burst_of_callers_waits_its_turn(store: HistoryStore) -> None:
    """More at once than a pool has connections, or a group has jobs."""
    await asyncio.gather(
        *(store.append(UserKey("", f"u{number}"), events(3)) for number in range(700))
    )
    reads = await asyncio.gather(
        *(store.read(UserKey("", f"u{number}"), 9) for number in range(700))
    )
    assert all(equal(read.events, events(3)) for read in reads)


async def test_any_user_id_does(store: HistoryStore) -> None:
    """A lone surrogate neither fails nor collides with another user."""
    await store.append(UserKey("", "\ud800"), events(3))
    await store.append(UserKey("", "?"), events(2, seed=1))
    assert equal((await store.read(UserKey("", "\ud800"), 9)).events, events(3))
    await store.erase(UserKey("", "\ud800"))
    assert equal((await store.read(UserKey("", "?"), 9)).events, events(2, seed=1))


async def test_a_job_that_breaks_does_not_stop_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(HistoryConfig(path=str(tmp_path / "h.db")))
    assert isinstance(store, EmbeddedStore)
    with monkeypatch.context() as patch:
        patch.setattr(embedded_file, "pack", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await store.append(USER, events(3))
    assert (await store.append(USER, events(3))).num_events == 3
    await store.close()


async def test_a_caller_that_goes_away_breaks_nothing(store: HistoryStore) -> None:
    gone = asyncio.create_task(store.append(USER, events(10)))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    newer = after(events(10), events(3, seed=1))
    await store.append(USER, newer)
    read = (await store.read(USER, 99)).events
    assert equal(read[-3:], newer)
    assert len(read) in (3, 13)


_WRITER = """
import asyncio, sys
import numpy as np
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig
from npu_gr.core.request import Events, UserKey

async def main():
    store = await open_store(HistoryConfig(path=sys.argv[1]))
    number = 0
    while True:
        await store.append(UserKey("", "u"), Events.make([number], [1], [number]))
        print(number, flush=True)
        number += 1

asyncio.run(main())
"""


def test_kill_minus_nine_loses_no_acknowledged_event(tmp_path: Path) -> None:
    path = str(tmp_path / "h.db")
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, path], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(200)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]

    async def read() -> list[int]:
        opened = await open_store(HistoryConfig(path=path))
        assert opened is not None
        found = (await opened.read(UserKey("", "u"), 100_000)).events
        await opened.close()
        items: list[int] = found.items.tolist()
        return items

    found = asyncio.run(read())
    assert found[: len(acknowledged)] == acknowledged
    assert len(found) <= len(acknowledged) + 1


async def test_one_process_a_file(tmp_path: Path) -> None:
    config = HistoryConfig(path=str(tmp_path / "h.db"))
    first = await open_store(config)
    assert first is not None
    with pytest.raises(ConfigError, match="in use by another process"):
        await open_store(config)
    await first.close()
    with pytest.raises(Unavailable, match="closed"):
        await first.append(USER, events(1))


async def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"history_store\.path: .*file"):
        await open_store(HistoryConfig(path=str(tmp_path / "file" / "h.db")))
    (tmp_path / "bad.db").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match=r"history_store\.path: .*bad\.db"):
        await open_store(HistoryConfig(path=str(tmp_path / "bad.db")))
    with pytest.raises(ConfigError, match=r"history_store\.url"):
        await open_store(HistoryConfig(kind="redis", url=SecretUrl(f"unix://{tmp_path}/none.sock")))
    with pytest.raises(ConfigError, match=r"history_store\.url"):
        await open_store(HistoryConfig(kind="redis", url=SecretUrl("nonsense")))
    assert await open_store(HistoryConfig(kind="none")) is None


def test_records_are_packed() -> None:
    from npu_gr.history_store.store import EVENT, pack, unpack

    history = events(50)
    assert len(pack(history)) == 50 * EVENT.itemsize == 900
    assert equal(unpack(pack(history)), history)
    assert np.array_equal(unpack(b"").items, [])


# ---- idempotency keys


async def test_a_key_is_applied_once(store: HistoryStore) -> None:
    history = events(3)
    assert (await store.append(USER, history, "a")).num_events == 3
    assert (await store.append(USER, events(4, seed=1))).num_events == 7
    # what it answered the first time
    assert (await store.append(USER, history, "a")).num_events == 3
    assert (await store.append(USER, history, "b")).num_events == 10
    # another user's key is another key
    assert (await store.append(UserKey("t", "v"), history, "a")).num_events == 3
    assert len((await store.read(USER, 99)).events) == 10


async def test_a_key_with_other_events_is_rejected(store: HistoryStore) -> None:
    await store.append(USER, events(3), "a")
    with pytest.raises(Unprocessable, match="idempotency_key"):
        await store.append(USER, events(3, seed=1), "a")
    assert len((await store.read(USER, 99)).events) == 3


async def test_a_key_is_applied_once_by_all_who_come_at_once(store: HistoryStore) -> None:
    history = events(2)
    kept = await asyncio.gather(
        *(store.append(USER, history, f"k{number % 5}") for number in range(50))
    )
    assert sorted(one.num_events for one in kept) == sorted([2, 4, 6, 8, 10] * 10)
    assert len((await store.read(USER, 99)).events) == 10


async def test_erasing_forgets_the_keys(store: HistoryStore) -> None:
    await store.append(USER, events(3), "a")
    await store.erase(USER)
    assert (await store.append(USER, events(3), "a")).num_events == 3


async def test_keys_are_bounded_in_number(config: HistoryConfig) -> None:
    opened = await open_store(msgspec.structs.replace(config, max_idempotency_keys=4))
    assert opened is not None
    for number in range(6):
        await opened.append(USER, events(1), f"k{number}")
    again = [await opened.append(USER, events(1), f"k{number}") for number in (2, 3, 4, 5)]
    assert [one.num_events for one in again] == [3, 4, 5, 6]
    assert (await opened.append(USER, events(1), "k0")).num_events == 7  # forgotten
    await opened.close()


async def test_keys_expire(tmp_path: Path) -> None:
    now = [1000.0]
    config = HistoryConfig(path=str(tmp_path / "h.db"), idempotency_s=60.0)
    store = EmbeddedStore(config, wall_clock=lambda: now[0])
    for number in range(20):
        await store.append(USER, events(1), f"k{number}")
    now[0] += 59
    assert (await store.append(USER, events(1), "k0")).num_events == 1
    now[0] += 2
    assert (await store.append(USER, events(1), "k0")).num_events == 21
    for number in range(3):
        await store.append(USER, events(1), f"new{number}")
    (left,) = store._reader.execute("SELECT count(*) FROM keys").fetchone()
    assert left == 4
    await store.close()


async def test_keys_expire_in_redis(redis_url: str) -> None:
    import redis.asyncio as redis

    store = await open_store(
        HistoryConfig(kind="redis", url=SecretUrl(redis_url), timeout_s=30.0, idempotency_s=1.0)
    )
    assert store is not None
    user = UserKey("", "expiring")
    name = base64.urlsafe_b64encode(key_bytes(user)).decode()
    await store.append(user, events(1), "a")
    async with redis.from_url(redis_url) as client, asyncio.timeout(10):
        while [name async for name in client.scan_iter(f"npu_gr:*{name}*:keys")]:  # noqa: ASYNC110  (another process)
            await asyncio.sleep(0.05)
    assert (await store.append(user, events(1), "a")).num_events == 2
    await store.close()


# ---- one bad append


async def test_one_that_fails_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of appends those before and after the one that breaks are there."""
    store = await open_store(HistoryConfig(path=str(tmp_path / "h.db")))
    assert isinstance(store, EmbeddedStore)
    whole = embedded_file.append

    def breaks(db: sqlite3.Connection, key: bytes, history: Events, max_events: int) -> Written:
        kept = whole(db, key, history, max_events)
        if len(history) == 7:
            raise sqlite3.DatabaseError("database disk image is malformed")
        return kept

    monkeypatch.setattr(embedded_file, "append", breaks)
    lengths = [3, 7, 4, 7, 5]
    done = await asyncio.gather(
        *(store.append(UserKey("", f"u{number}"), events(n)) for number, n in enumerate(lengths)),
        return_exceptions=True,
    )
    assert [one.num_events if isinstance(one, Written) else type(one) for one in done] == [
        3,
        StoreFailed,
        4,
        StoreFailed,
        5,
    ]
    for number, n in enumerate(lengths):
        assert len((await store.read(UserKey("", f"u{number}"), 99)).events) == (0 if n == 7 else n)
    await store.close()


async def test_a_group_that_cannot_be_committed_is_tried_in_parts(tmp_path: Path) -> None:
    """The file may grow by a few pages only: small appends succeed, the large one fails."""
    store = await open_store(HistoryConfig(path=str(tmp_path / "h.db")))
    assert isinstance(store, EmbeddedStore)
    (pages,) = store._writer.execute("PRAGMA page_count").fetchone()
    store._writer.execute(f"PRAGMA max_page_count = {pages + 8}")
    large = store.append(UserKey("", "large"), events(20_000))
    small = [store.append(UserKey("", f"u{number}"), events(3)) for number in range(20)]
    failed, *kept = await asyncio.gather(large, *small, return_exceptions=True)
    assert isinstance(failed, StoreFailed)
    assert failed.fault is StoreFault.DISK_FULL
    assert kept == [Written(3, 3)] * 20
    await store.close()


async def test_the_failure_of_a_cancelled_call_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = await open_store(HistoryConfig(path=str(tmp_path / "h.db")))
    assert isinstance(store, EmbeddedStore)

    def breaks(*_: object) -> int:
        raise sqlite3.OperationalError("database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(embedded_file, "append", breaks)
        gone = asyncio.create_task(store.append(USER, events(1)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        with pytest.raises(StoreFailed, match="database is locked"):
            await store.append(USER, events(1))
    await store.close()
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
