"""After an erasure no byte of the user is in any file of the store, however rows have moved.

Others are whole.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from npu_gr.core.feature_schema.columns import Columns
from npu_gr.core.history import Events, UserKey
from npu_gr.history_store import embedded, row_overwrites
from npu_gr.history_store.embedded import EmbeddedStore
from npu_gr.history_store.embedded_check import check, repair
from npu_gr.history_store.store import HistoryConfig


def of(number: int, length: int) -> Events:
    """Events with the user's number in every item, and in a feature of each."""
    items = np.arange(length) + (number + 1) * 1_000_003_000_000
    own = (items[:, None] << 8).astype(np.uint64)
    return replace(
        Events.make(items, [0] * length, [1] * length), features=Columns({}, {"own": own})
    )


def raw(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def traces(folder: Path, name: str, items: list[int]) -> list[str]:
    """What of a user the files hold."""
    data = raw(folder)
    found = [name] if name.encode() in data else []
    features = [f"feature of {item}" for item in items if (item << 8).to_bytes(8, "little") in data]
    return found + [str(item) for item in items if item.to_bytes(8, "little") in data] + features


def rooms(path: Path) -> list[int]:
    """Pages with something in the room that rows have left."""
    data = path.read_bytes()
    pages = [data[start : start + 4096] for start in range(0, len(data), 4096)]
    return [
        page
        for page, one in enumerate(pages, 1)
        if row_overwrites._unallocated(one, is_first=page == 1)
    ]


def store_in(folder: Path) -> EmbeddedStore:
    return EmbeddedStore(
        HistoryConfig(path=str(folder / "h.db"), max_events_per_user=700, check_s=0)
    )


async def filled(store: EmbeddedStore, num_users: int, seed: int) -> dict[str, Events]:
    """Appends in random order, so that rows move from page to page."""
    rng = random.Random(seed)
    known: dict[str, Events] = {}
    numbers = [rng.randrange(num_users) for _ in range(num_users * 8)]
    for start in range(0, len(numbers), 64):
        batch = []
        for turn, number in enumerate(numbers[start : start + 64], start):
            name = f"user-{number}-{number * 7919 % 10007:08d}"
            events = of(number, rng.choice((1, 7, 90)))
            known[name] = events if name not in known else known[name] + events
            batch.append(store.append(UserKey("t", name), events, f"key-{turn}"))
        await asyncio.gather(*batch)
    return known


@pytest.mark.parametrize("seed", range(3))
async def test_no_byte_of_erased_users_is_left(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the log is brought into the file many times
    monkeypatch.setattr(embedded, "MAX_LOG_BYTES", 300_000)
    store = store_in(tmp_path)
    known = await filled(store, 250, seed)
    gone = list(known)[::5]
    # the test sees what is there
    assert all(traces(tmp_path, name, [int(known[name].items[-1])]) for name in gone)
    answers = await asyncio.gather(*(store.erase(UserKey("t", name)) for name in gone))
    assert all(answers)
    for name in gone:
        assert traces(tmp_path, name, known[name].items[-3:].tolist()) == []
    assert (tmp_path / "h.db-wal").stat().st_size == 0
    for name in set(known) - set(gone):
        stored = await store.read(UserKey("t", name), 700)
        assert stored.events.items.tolist() == known[name].items[-700:].tolist()
    for name in set(known) - set(gone):  # pages in memory bring nothing back
        await store.append(UserKey("t", name), of(9999, 1))
    assert not any(traces(tmp_path, name, []) for name in gone)
    await store.close()
    assert not any(traces(tmp_path, name, known[name].items[-3:].tolist()) for name in gone)
    assert check(tmp_path / "h.db").num_damaged == 0


async def test_rows_that_moved_before_the_store_was_closed_and_opened(tmp_path: Path) -> None:
    """Closed, SQLite would bring the log into the file as it is."""
    store = store_in(tmp_path)
    known = await filled(store, 300, 0)
    await store.close()
    assert rooms(tmp_path / "h.db") == []
    store = store_in(tmp_path)
    gone = list(known)[::3]
    assert all(await asyncio.gather(*(store.erase(UserKey("t", name)) for name in gone)))
    assert not any(traces(tmp_path, name, known[name].items[-3:].tolist()) for name in gone)
    await store.close()


async def test_erasures_of_one_group_share_a_run(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    await asyncio.gather(
        *(store.append(UserKey("", f"u{number}"), of(number, 3)) for number in range(200))
    )
    before = store.health.overwrites["ok"]
    await asyncio.gather(*(store.erase(UserKey("", f"u{number}")) for number in range(200)))
    assert store.health.overwrites["ok"] - before <= 3
    await store.close()


async def test_a_reader_that_holds_the_log_delays_the_overwriting_not_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SAMPLE_S", 0.05)
    store = store_in(tmp_path)
    await store.append(UserKey("", "somebody"), of(1, 300))
    other = sqlite3.connect(tmp_path / "h.db", isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM users").fetchone()
    assert not await store.erase(UserKey("", "somebody"))
    assert store.health.erased_at is not None
    assert store.health.overwrites["held"] >= 1
    assert len((await store.read(UserKey("", "somebody"), 9)).events) == 0
    await store.append(UserKey("", "else"), of(2, 3))  # no other job waits for the reader
    other.execute("ROLLBACK")
    for _ in range(200):
        if store.health.erased_at is None:
            break
        await asyncio.sleep(0.05)
    assert traces(tmp_path, "somebody", of(1, 300).items.tolist()) == []
    other.close()
    await store.close()


async def test_a_disk_that_rejects_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SAMPLE_S", 0.05)
    store = store_in(tmp_path)
    await store.append(UserKey("", "somebody"), of(1, 300))

    def reject(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fdatasync", reject)
        assert not await store.erase(UserKey("", "somebody"))
        assert store.health.overwrites["failed"] >= 1
    for _ in range(200):
        if store.health.erased_at is None:
            break
        await asyncio.sleep(0.05)
    assert traces(tmp_path, "somebody", of(1, 300).items.tolist()) == []
    await store.close()


_DIES = """
import asyncio, os, sys
sys.path.insert(0, {root!r})
from tests.history_store.test_embedded_overwrite import *

async def work():
    store = store_in(Path({folder!r}))
    known = await filled(store, 100, 5)
    store._group._overwrites.run = lambda _: False
    for name in list(known)[::5]:
        await store.erase(UserKey("t", name))
    os.kill(os.getpid(), 9)
asyncio.run(work())
"""


async def test_what_a_process_did_not_overwrite_before_it_died_the_next_one_does(
    tmp_path: Path,
) -> None:
    code = _DIES.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code])
    assert done.returncode == -9
    names = [f"user-{number}-{number * 7919 % 10007:08d}" for number in range(100)]
    assert all(name.encode() in raw(tmp_path) for name in names)
    store = store_in(tmp_path)
    await store.close()
    left = [name for name in names if name.encode() in raw(tmp_path)]
    assert len(left) == 80
    assert check(tmp_path / "h.db").num_damaged == 0


async def test_a_log_of_nonsense_names_no_page_that_is_changed(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    known = await filled(store, 20, 1)
    await store.close()
    (tmp_path / "h.db-wal").write_bytes(random.Random(1).randbytes(100_000))
    store = store_in(tmp_path)
    for name, events in known.items():
        assert len((await store.read(UserKey("t", name), 700)).events) == len(events)
    assert await store.erase(UserKey("t", "unknown"))
    await store.close()
    assert check(tmp_path / "h.db").num_damaged == 0


async def test_a_repaired_store_can_forget_its_users(tmp_path: Path) -> None:
    store = store_in(tmp_path / "old")
    known = await filled(store, 120, 3)
    await store.close()
    (tmp_path / "new").mkdir()
    repair(tmp_path / "old" / "h.db", tmp_path / "new" / "h.db")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["h.db", "h.db.lock"]
    assert rooms(tmp_path / "new" / "h.db") == []
    store = store_in(tmp_path / "new")
    gone = list(known)[::4]
    assert all(await asyncio.gather(*(store.erase(UserKey("t", name)) for name in gone)))
    assert not any(traces(tmp_path / "new", name, known[name].items[-3:].tolist()) for name in gone)
    await store.close()


async def test_files_are_their_owners_alone_whatever_the_umask(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.umask(0)
    try:
        store = store_in(tmp_path / "deep")
        await store.append(UserKey("", "u"), of(1, 3))
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "deep").iterdir()}
        assert modes == dict.fromkeys(("h.db", "h.db-wal", "h.db-shm", "h.db.lock"), 0o600)
        await store.close()
        repair(tmp_path / "deep" / "h.db", tmp_path / "new.db")
        assert (tmp_path / "new.db").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    (tmp_path / "deep" / "h.db").chmod(0o644)
    await store_in(tmp_path / "deep").close()
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning == (
        f"{tmp_path}/deep/h.db has personal data and mode 0644, so other users may access it; "
        "chmod 600 it"
    )


def test_the_room_of_a_page_ends_where_its_cells_begin() -> None:
    leaf = bytearray(
        b"\x0a\0\0\0\2\0\x40\0" + bytes([0x40, 0x41, 0x42, 0x43]) + b"old" + bytes(49) + b"x" * 64
    )
    assert row_overwrites._unallocated(bytes(leaf), is_first=False) == (12, bytes(52))
    leaf[12:15] = bytes(3)
    assert row_overwrites._unallocated(bytes(leaf), is_first=False) is None
    # belongs to no tree
    assert row_overwrites._unallocated(b"\0\0\0\7" + b"x" * 508, is_first=False) is None
