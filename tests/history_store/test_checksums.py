"""Damage is detected by a read, costs only the affected users, and a repair saves the others."""

from __future__ import annotations

import asyncio
import base64
import logging
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import ConfigError, StoreFailed, StoreFault
from npu_gr.core.history import Events, UserKey, Write
from npu_gr.core.secret import SecretUrl
from npu_gr.history_store.checksum import CHECKED, pack_checked, unpack_checked
from npu_gr.history_store.embedded import EmbeddedStore
from npu_gr.history_store.embedded_check import check, repair
from npu_gr.history_store.redis import RedisStore
from npu_gr.history_store.store import EVENT, HistoryConfig, key_bytes, pack
from tests.history_store.redis_server import redis_path
from tests.models import after, events

NUM_USERS = 60


def user(number: int) -> UserKey:
    return UserKey("tenant", f"user-{number:03}")


def length(number: int) -> int:
    return 20 + 37 * number % 700


def equal(a: Events, b: Events) -> bool:
    return a.fingerprint() == b.fingerprint()


def config(path: Path) -> HistoryConfig:
    return HistoryConfig(path=str(path))


def fill(path: Path) -> None:
    async def work() -> None:
        store = EmbeddedStore(config(path))
        await store.write_many(
            [Write(user(n), events(length(n), seed=n)) for n in range(NUM_USERS)]
        )
        newer = after(events(length(0), seed=0), events(5, seed=99))
        await store.append(user(0), newer, "a key")
        await store.close()

    asyncio.run(work())


@contextmanager
def sql(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        yield db


def outcomes(path: Path) -> tuple[list[int], list[int]]:
    """Users who are read as they were, and users who fail.

    A test fails if anybody's history is another one.
    """

    async def work() -> tuple[list[int], list[int]]:
        store = EmbeddedStore(config(path))
        good, bad = [], []
        faults = set()
        for number in range(NUM_USERS):
            try:
                read = (await store.read(user(number), 9999)).events
            except StoreFailed as error:
                faults.add(error.fault)
                bad.append(number)
                continue
            wanted = events(length(number), seed=number)
            assert equal(read[: len(wanted)], wanted), number
            good.append(number)
        await store.close()
        assert faults <= {StoreFault.CORRUPT}
        return good, bad

    return asyncio.run(work())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "h.db"
    fill(path)
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    shutil.copyfile(whole, tmp_path / "h.db")
    return tmp_path / "h.db"


def test_a_whole_store_has_no_damage(path: Path) -> None:
    found = check(path)
    assert (found.num_users, found.num_damaged, found.num_unchecked) == (NUM_USERS, 0, 0)
    assert found.num_events == 5 + sum(length(number) for number in range(NUM_USERS))


@pytest.mark.parametrize("at", [0, 3, 11, 17])
def test_a_flipped_byte_is_found(path: Path, at: int) -> None:
    """Whatever byte of whatever field of an event: SQLite notices nothing, the checksum does."""
    key = key_bytes(user(7))
    with sql(path) as db:
        (data,) = db.execute(
            "SELECT data FROM chunks WHERE user = ? AND chunk = 0", (key,)
        ).fetchone()
        spoilt = bytearray(data)
        spoilt[at] ^= 4
        db.execute("UPDATE chunks SET data = ? WHERE user = ? AND chunk = 0", (bytes(spoilt), key))
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert outcomes(path)[1] == [7]
    found = check(path)
    assert found.bad_users == {key}


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE users SET total = total + 1 WHERE user = ?",
        "UPDATE users SET first = first + 1 WHERE user = ?",
        "UPDATE users SET total = 'x' WHERE user = ?",
        "UPDATE chunks SET sum = sum + 1 WHERE user = ?",
        "DELETE FROM chunks WHERE user = ?",
        "UPDATE chunks SET chunk = chunk + 1000 WHERE user = ?",
    ],
)
def test_rows_that_do_not_fit_are_found(path: Path, change: str) -> None:
    with sql(path) as db:
        db.execute(change, (key_bytes(user(9)),))
    assert outcomes(path)[1] == [9]
    assert check(path).bad_users == {key_bytes(user(9))}


def test_another_users_rows_are_not_his(path: Path) -> None:
    """A page in the place of another one has valid rows, but of other users."""
    with sql(path) as db:
        rows = db.execute(
            "SELECT chunk, data, sum, features FROM chunks WHERE user = ?", (key_bytes(user(3)),)
        ).fetchall()
        db.execute("DELETE FROM chunks WHERE user = ?", (key_bytes(user(4)),))
        for row in rows:
            db.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?)", (key_bytes(user(4)), *row))
    assert outcomes(path)[1] == [4]


async def test_nothing_is_appended_to_what_is_damaged(path: Path) -> None:
    """Its checksum would make the damage look whole."""
    key = key_bytes(user(7))
    with sql(path) as db:
        db.execute("UPDATE chunks SET data = zeroblob(length(data)) WHERE user = ?", (key,))
    store = EmbeddedStore(config(path))
    for call in (store.append(user(7), events(1)), store.read(user(7), 9)):
        with pytest.raises(StoreFailed) as failed:
            await call
        assert failed.value.fault is StoreFault.CORRUPT
    await store.erase(user(7))
    assert (await store.append(user(7), events(1))).num_events == 1  # an erased user begins anew
    await store.close()


async def test_a_damaged_key_is_no_other_body(path: Path) -> None:
    with sql(path) as db:
        db.execute("UPDATE keys SET digest = zeroblob(16)")
    store = EmbeddedStore(config(path))
    with pytest.raises(StoreFailed) as failed:
        await store.append(user(0), events(5, seed=99), "a key")
    assert failed.value.fault is StoreFault.CORRUPT
    await store.close()


def spoil(path: Path, page: int) -> None:
    data = bytearray(path.read_bytes())
    random = np.random.default_rng(page)
    data[page * 4096 : (page + 1) * 4096] = random.integers(0, 256, 4096, np.uint8).tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize("part", [0.3, 0.5, 0.7, 0.9])
def test_a_spoilt_page_costs_its_users_and_no_other(
    path: Path, tmp_path: Path, part: float
) -> None:
    num_pages = path.stat().st_size // 4096
    spoil(path, int(num_pages * part))
    good, bad = outcomes(path)
    assert len(good) >= NUM_USERS // 2
    if not check(path).num_damaged:
        assert not bad  # a page that no tree has
    done = repair(path, tmp_path / "new.db")
    assert check(tmp_path / "new.db").num_damaged == 0
    saved, _ = outcomes_of_repaired(tmp_path / "new.db")
    assert set(good) <= set(saved)
    if bad:
        assert done.num_lost
        assert {key_bytes(user(number)) for number in bad} >= done.bad_users - {b""}


def outcomes_of_repaired(path: Path) -> tuple[list[int], list[int]]:
    """Users who have every event, and users who lost some; what is left of theirs is in order."""

    async def work() -> tuple[list[int], list[int]]:
        store = EmbeddedStore(config(path))
        complete, less = [], []
        for number in range(NUM_USERS):
            read = (await store.read(user(number), 9999)).events
            wanted = events(length(number), seed=number)
            if equal(read[: len(wanted)], wanted):
                complete.append(number)
                continue
            less.append(number)
            rows = {one.tobytes() for one in np.frombuffer(pack(wanted), f"V{EVENT.itemsize}")}
            assert all(
                one.tobytes() in rows for one in np.frombuffer(pack(read), f"V{EVENT.itemsize}")
            )
        await store.close()
        return complete, less

    return asyncio.run(work())


def test_a_file_that_was_cut_is_repaired(path: Path, tmp_path: Path) -> None:
    size = path.stat().st_size
    before = path.read_bytes()
    with path.open("r+b") as data:
        data.truncate(size * 4 // 5)
    with pytest.raises(ConfigError, match=r"npu-gr store .* --repair NEW"):
        EmbeddedStore(config(path))
    done = repair(path, tmp_path / "new.db")
    assert path.read_bytes() == before[: size * 4 // 5]
    assert 0 < done.num_users < NUM_USERS
    complete, less = outcomes_of_repaired(tmp_path / "new.db")
    assert complete
    assert less


def test_a_repair_loses_nothing_of_a_whole_store(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    done = repair(path, tmp_path / "new.db")
    assert path.read_bytes() == before
    assert (done.num_users, done.num_lost, done.bad_users, done.damage) == (NUM_USERS, 0, set(), [])
    assert outcomes(tmp_path / "new.db")[0] == list(range(NUM_USERS))
    with pytest.raises(ConfigError, match="exists already"):
        repair(path, tmp_path / "new.db")


def test_the_start_tells(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.chmod(0o600)
    with caplog.at_level(logging.INFO, "npu_gr.history_store.embedded_check"):
        asyncio.run(opened_health(path, 0))
        with sql(path) as db:
            db.execute(
                "UPDATE chunks SET data = zeroblob(length(data)) WHERE user = ?",
                (key_bytes(user(7)),),
            )
        asyncio.run(opened_health(path, 1))
    assert "no damage" in caplog.records[0].message
    assert caplog.records[1].levelno == logging.ERROR
    assert "1 damaged place" in caplog.records[1].message


async def opened_health(path: Path, damaged: int) -> None:
    store = EmbeddedStore(HistoryConfig(path=str(path), check_s=30.0))
    assert store.health.damaged == damaged
    assert 0 < (store.health.free_bytes or 0) <= (store.health.disk_bytes or 0)
    await store.close()


async def test_the_check_at_the_start_is_bounded(path: Path) -> None:
    store = EmbeddedStore(HistoryConfig(path=str(path), check_s=1e-9))
    assert store.health.damaged == 0
    assert len((await store.read(user(5), 9)).events) == 9
    await store.close()


def test_an_older_file_is_read_and_gets_its_checksums(tmp_path: Path) -> None:
    """As the version before wrote it: no sums, no keys."""
    path = tmp_path / "h.db"
    key, history = key_bytes(user(1)), events(300)
    with sql(path) as db:
        db.executescript(
            "CREATE TABLE users (user BLOB PRIMARY KEY, first INTEGER, total INTEGER) WITHOUT "
            "ROWID;"
            "CREATE TABLE chunks (user BLOB, chunk INTEGER, data BLOB, PRIMARY KEY (user, chunk)) "
            "WITHOUT ROWID;"
        )
        db.execute("INSERT INTO users VALUES (?, 0, 300)", (key,))
        for chunk in range(2):
            db.execute(
                "INSERT INTO chunks VALUES (?, ?, ?)",
                (key, chunk, pack(history[chunk * 256 : (chunk + 1) * 256])),
            )
    assert check(path).num_unchecked == 3

    async def work() -> None:
        store = EmbeddedStore(config(path))
        assert equal((await store.read(user(1), 999)).events, history)
        newer = after(history, events(4, seed=1))
        assert (await store.append(user(1), newer, "k")).num_events == 304
        read = (await store.read(user(1), 999)).events
        assert equal(read, history + newer)
        await store.close()

    asyncio.run(work())
    found = check(path)
    # the first chunk was not written again
    assert (found.num_unchecked, found.num_damaged) == (1, 0)
    repair(path, tmp_path / "new.db")
    assert check(tmp_path / "new.db").num_unchecked == 0


def test_a_newer_file_is_rejected(tmp_path: Path) -> None:
    with sql(tmp_path / "h.db") as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(ConfigError, match="schema is 7"):
        EmbeddedStore(config(tmp_path / "h.db"))


# ---- the commands


def test_the_commands(path: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(main, ["store", str(path)])
    assert done.exit_code == 0, done.output
    assert f"{NUM_USERS} users" in done.output
    with sql(path) as db:
        db.execute(
            "UPDATE chunks SET data = zeroblob(length(data)) WHERE user = ?", (key_bytes(user(7)),)
        )
    done = run(main, ["store", str(path)])
    assert done.exit_code == 1
    assert "1 users" in done.output
    assert "user-007" not in done.output
    assert "user-007" in run(main, ["store", str(path), "--verbose"]).output
    out = tmp_path / "new.db"
    done = run(main, ["store", str(path), "--repair", str(out)])
    assert done.exit_code == 1, done.output  # something was lost
    assert f"{length(7)} events" in done.output
    assert run(main, ["store", str(out)]).exit_code == 0
    assert run(main, ["store", str(tmp_path / "none.db")]).exit_code == 2


async def command(*words: str) -> tuple[int, str]:
    """Exit code and output of a command in a process of its own."""
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "npu_gr", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await done.communicate()
    return done.returncode or 0, output.decode()


async def test_a_store_that_is_open_is_not_checked(path: Path) -> None:
    store = EmbeddedStore(config(path))
    code, output = await command("store", str(path))
    assert code == 2
    assert "in use by another process" in output
    await store.close()


# ---- Redis


def test_a_changed_bit_of_a_record_is_found() -> None:
    key, history = key_bytes(user(1)), events(40)
    data = pack_checked(key, history)
    assert len(data) == 40 * CHECKED.itemsize
    assert equal(unpack_checked(key, data), history)
    random = np.random.default_rng(0)
    for _ in range(300):
        spoilt = bytearray(data)
        spoilt[random.integers(len(data))] ^= 1 << int(random.integers(8))
        with pytest.raises(StoreFailed):
            unpack_checked(key, bytes(spoilt))
    with pytest.raises(StoreFailed):
        unpack_checked(key_bytes(user(2)), data)
    with pytest.raises(StoreFailed):
        unpack_checked(key, data[:-1])


async def test_redis_finds_damage_and_moves_what_an_older_version_wrote(tmp_path: Path) -> None:
    import redis.asyncio as redis

    with redis_path(tmp_path) as path:
        url = f"unix://{path}"
        config = HistoryConfig(
            kind="redis", url=SecretUrl(url), timeout_s=30.0, max_events_per_user=100
        )
        store = await RedisStore.connect(config)
        async with redis.from_url(url) as client:

            def name(number: int, part: str) -> str:
                encoded = base64.urlsafe_b64encode(key_bytes(user(number))).decode()
                return f"npu_gr:{{{encoded}}}:{part}"

            await client.set(name(1, "events"), pack(events(30)))
            await client.set(name(1, "first"), 12)
            newer = after(events(30), events(3, seed=1))
            assert (await store.append(user(1), newer)).num_events == 33
            read, first, _ = await store.read(user(1), 99)
            assert first == 12
            assert equal(read, events(30) + newer)
            assert not await client.exists(name(1, "events"))
            await client.set(name(2, "events"), pack(events(30)))
            await store.write_many([Write(user(2), newer), Write(user(3), events(2))])
            assert equal((await store.read(user(2), 99)).events, events(30) + newer)

            await client.setrange(name(3, "log"), 5, b"\xff")
            with pytest.raises(StoreFailed) as failed:
                await store.read(user(3), 99)
            assert failed.value.fault is StoreFault.CORRUPT
            await store.append(user(5), events(4))
            await client.append(name(5, "log"), b"\1\2\3")
            with pytest.raises(StoreFailed, match="whole number of records") as failed:
                await store.read(user(5), 99)
            assert failed.value.fault is StoreFault.CORRUPT
            with pytest.raises(StoreFailed) as failed:  # nothing goes on behind them
                await store.append(user(5), events(2))
            assert failed.value.fault is StoreFault.CORRUPT
            await store.erase(user(5))
            await store.append(user(4), events(2), "k")
            [field] = await client.hkeys(name(4, "keys"))
            known = await client.hget(name(4, "keys"), field)
            assert isinstance(known, bytes)
            spoilt = bytearray(known)
            spoilt[45] ^= 1
            await client.hset(name(4, "keys"), field, bytes(spoilt))
            with pytest.raises(StoreFailed) as failed:
                await store.append(user(4), events(2), "k")
            assert failed.value.fault is StoreFault.CORRUPT
            code, output = await command("store", url)
            assert code == 1, output
            assert "3 users are intact" in output
            assert "1 users have damaged" in output
            await store.erase(user(3))
            await store.erase(user(4))
            code, output = await command("store", url)
            assert code == 0, output
            assert [key async for key in client.scan_iter(name(3, "*"))] == []
        await store.close()
