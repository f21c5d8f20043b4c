"""Both stores keep the features of events bit for bit, with the events that they came with."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from npu_gr.core.errors import StoreFailed, StoreFault, Unprocessable
from npu_gr.core.feature_schema.columns import Columns, as_columns
from npu_gr.core.history import Events, Mode, UserKey, Write
from npu_gr.core.secret import SecretUrl
from npu_gr.history_store.checksum import row_sum
from npu_gr.history_store.embedded import EmbeddedStore
from npu_gr.history_store.embedded_check import check, repair
from npu_gr.history_store.event_features import (
    check_size,
    join_runs,
    load_runs,
    pack_runs,
    unpack_runs,
)
from npu_gr.history_store.open import open_store
from npu_gr.history_store.redis import check_redis
from npu_gr.history_store.store import HistoryConfig, HistoryStore, key_bytes, merge
from tests.features_of import random_features, values
from tests.history_store.test_store import equal
from tests.models import after, events

USER = UserKey("t", "u")


def featured(num: int, seed: int) -> Events:
    """Events with features of a random schema, some or all of them missing."""
    random = np.random.default_rng(seed)
    features = tuple(one for one in random_features(random) if one.of == "event")
    given = values(features, "event", num, random) if random.random() < 0.8 else {}
    return replace(
        events(num, seed), features=as_columns({one.name: one for one in features}, given, num)
    )


def numbered(num: int, begin: int = 0, value: float | None = None) -> Events:
    """Events whose feature is their own number, or `value`."""
    places = np.arange(begin, begin + num)
    own = places.astype(np.float32) if value is None else np.full(num, value, np.float32)
    tags = np.stack([places, places], 1).astype(np.uint64) * (places[:, None] % 3 == 0)
    return replace(
        Events.make(places % 100, places * 0, 1000 + places),
        features=Columns({"place": own}, {"tags": tags}),
    )


@settings(max_examples=30)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), max_size=6),
    start=st.integers(-50, 50),
)
def test_runs_give_back_the_bits(pieces: list[tuple[int, int]], start: int) -> None:
    whole, runs = Events.empty(), pack_runs(Columns(), 0)
    for num, seed in pieces:
        part = featured(num, seed)
        runs = join_runs(runs, pack_runs(part.features, num, start + len(whole)))
        whole += part
    read = unpack_runs(runs, start + len(whole)) if start + len(whole) > 0 else Columns()
    want = whole[-start:] if start < 0 else whole
    ahead = max(start, 0)
    assert equal(replace(want, features=read.take(slice(ahead, None))), want)
    assert not any(np.isfinite(column[:ahead]).any() for column in read.numbers.values())


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_read_is_what_was_written(store: HistoryStore, seed: int) -> None:
    """In pieces of any size, without features now and then, over chunks, beyond what is kept."""
    random = np.random.default_rng(seed)
    whole = Events.empty()
    while len(whole) < 3200:
        part = featured(int(random.integers(1, 700)), int(random.integers(0, 99)))
        part = after(whole, part)
        whole += part
        await store.append(USER, part)
    for last in (1, 17, 255, 256, 257, 800, 1000):
        read, first, _ = await store.read(USER, last)
        assert first == len(whole) - last
        assert equal(read, whole[-last:])
    await store.write_many([Write(USER, numbered(2000), Mode.REPLACE)])
    await store.append(USER, numbered(30, 2000))
    assert equal((await store.read(USER, 600)).events, numbered(600, 1430))
    await store.erase(USER)
    await store.append(USER, events(5))
    assert equal((await store.read(USER, 99)).events, events(5))


async def test_a_merge_fills_in_what_is_missing(store: HistoryStore) -> None:
    """Stored values stay, a second merge changes nothing, and new events bring their features."""
    plain = replace(numbered(20), features=Columns())
    await store.append(USER, plain)
    for added, filled in ((5, 20), (0, 0)):
        (done,) = await store.write_many([Write(USER, numbered(25), Mode.MERGE)])
        assert (done.num_added, done.num_filled) == (added, filled)  # type: ignore[union-attr]
        assert equal((await store.read(USER, 99)).events, numbered(25))
    other = numbered(25, value=7.5)
    (done,) = await store.write_many([Write(USER, other, Mode.MERGE)])
    assert (done.num_added, done.num_filled) == (0, 0)  # type: ignore[union-attr]
    assert equal((await store.read(USER, 99)).events, numbered(25))


def test_the_later_of_equal_events_is_filled_as_the_later_one() -> None:
    same = Events.make([1, 1, 1], [0, 0, 0], [5, 5, 5])
    stored = replace(same, features=Columns({"a": np.array([1, np.nan, np.nan], np.float32)}))
    given = replace(same, features=Columns({"a": np.array([7, 8, np.nan], np.float32)}))
    merged = merge(stored, given, 10)
    assert (merged.num_added, merged.num_filled, merged.is_append) == (0, 1, False)
    assert np.array_equal(
        merged.events.features.numbers["a"], np.array([1, 8, np.nan], np.float32), equal_nan=True
    )
    assert not merge(merged.events, given, 10).changes


async def test_a_key_with_other_features_is_another_append(store: HistoryStore) -> None:
    assert (await store.append(USER, numbered(3), "a")).num_events == 3
    assert (await store.append(USER, numbered(3), "a")).num_events == 3
    with pytest.raises(Unprocessable, match="idempotency_key"):
        await store.append(USER, numbered(3, value=1.0), "a")
    assert len((await store.read(USER, 99)).events) == 3


async def test_merges_and_appends_at_once_lose_nothing(store: HistoryStore) -> None:
    await asyncio.gather(
        *(store.append(USER, numbered(3, 3 * step)) for step in range(12)),
        store.write_many(
            [Write(USER, numbered(6, 100), Mode.MERGE), Write(USER, numbered(6, 106), Mode.MERGE)]
        ),
    )
    read = (await store.read(USER, 99)).events
    assert len(read) == 48
    assert np.array_equal(
        read.features.numbers["place"], (read.timestamps - 1000).astype(np.float32)
    )


async def test_what_is_too_large_is_rejected_by_name(config: HistoryConfig) -> None:
    opened = await open_store(msgspec.structs.replace(config, max_feature_bytes_per_event=20))
    assert opened is not None
    assert (await opened.append(USER, numbered(2))).num_events == 2, (
        "a number and two names are 20 bytes"
    )
    wide = Columns(numbered(2).features.numbers, {"tags": np.ones((2, 3), np.uint64)})
    with pytest.raises(
        Unprocessable,
        match=r"28 bytes an event, the limit is 20 "
        r"\(history_store.max_feature_bytes",
    ):
        await opened.append(USER, replace(numbered(2), features=wide))
    many = replace(
        events(1), features=Columns({f"f{place}": np.ones(1, np.float32) for place in range(6)})
    )
    good, bad = await opened.write_many([Write(UserKey("", "v"), numbered(2)), Write(USER, many)])
    assert not isinstance(good, Exception)
    assert isinstance(bad, Unprocessable)
    await opened.close()


def test_room_without_values_is_free() -> None:
    """What counts is the widest row of the write, not what the model would let it be."""
    tags = np.zeros((3, 100), np.uint64)
    tags[1, :2] = 5
    given = replace(events(3), features=Columns({}, {"tags": tags}))
    check_size(given, 16)
    (run,) = pack_runs(given.features, 3)
    assert len(run.rows) == 3 * 16


# ---- embedded


def sql(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path, isolation_level=None))


async def filled_file(path: Path, num_users: int = 3) -> None:
    store = EmbeddedStore(HistoryConfig(path=str(path)))
    for number in range(num_users):
        await store.append(UserKey("", str(number)), numbered(600))
    await store.close()


async def test_a_file_of_the_version_before_opens(tmp_path: Path) -> None:
    path = tmp_path / "h.db"
    await filled_file(path)
    with sql(path) as db:  # as version 1 wrote it
        db.execute("UPDATE chunks SET features = NULL")
        db.execute("ALTER TABLE chunks DROP COLUMN features")
        db.execute("PRAGMA user_version = 1")
    assert check(path).num_damaged == 3, "their sums were with features"
    with sql(path) as db:
        for key, chunk, data in db.execute("SELECT user, chunk, data FROM chunks").fetchall():
            own = row_sum(key, chunk, data)
            db.execute("UPDATE chunks SET sum = ? WHERE user = ? AND chunk = ?", (own, key, chunk))
    assert check(path).num_damaged == 0
    plain = replace(numbered(600), features=Columns())
    store = EmbeddedStore(HistoryConfig(path=str(path)))
    assert equal((await store.read(UserKey("", "0"), 999)).events, plain)
    await store.append(UserKey("", "0"), numbered(5, 600))
    assert equal((await store.read(UserKey("", "0"), 999)).events, plain + numbered(5, 600))
    await store.write_many([Write(UserKey("", "1"), numbered(600), Mode.MERGE)])
    assert equal((await store.read(UserKey("", "1"), 999)).events, numbered(600))
    await store.close()
    assert check(path).num_damaged == 0


async def test_damage_of_features_is_found_and_left_out(tmp_path: Path) -> None:
    path, random = tmp_path / "h.db", np.random.default_rng(0)
    await filled_file(path)
    one = UserKey("", "1")
    with sql(path) as db:
        (data,) = db.execute(
            "SELECT features FROM chunks WHERE user = ? AND chunk = 1", (key_bytes(one),)
        ).fetchone()  # fmt: skip
        spoilt = bytearray(data)
        spoilt[random.integers(len(data))] ^= 4
        db.execute(
            "UPDATE chunks SET features = ? WHERE user = ? AND chunk = 1",
            (bytes(spoilt), key_bytes(one)),
        )
    assert check(path).bad_users == {key_bytes(one)}
    store = EmbeddedStore(HistoryConfig(path=str(path)))
    with pytest.raises(StoreFailed) as failed:
        await store.read(one, 600)
    assert failed.value.fault is StoreFault.CORRUPT
    assert equal((await store.read(UserKey("", "2"), 600)).events, numbered(600))
    await store.close()
    done = repair(path, tmp_path / "new.db")
    assert (done.num_users, done.num_lost) == (3, 256)
    store = EmbeddedStore(HistoryConfig(path=str(tmp_path / "new.db")))
    assert equal((await store.read(UserKey("", "2"), 600)).events, numbered(600))
    assert equal((await store.read(one, 600)).events, numbered(256) + numbered(88, 512))
    await store.close()


def test_runs_that_make_no_sense_are_damage() -> None:
    good = pack_runs(numbered(9).features, 9)
    for data in (b"", b"\xff", b"\x91\x01", msgspec.msgpack.encode([[0, b"\x90", b"xx"]])):
        with pytest.raises(StoreFailed):
            unpack_runs(load_runs(data), 9)
    with pytest.raises(StoreFailed):
        unpack_runs([good[0]._replace(rows=good[0].rows[:-1])], 9)
    for layout in (b"", b"\x91\x92\xa1a\xcf" + b"\xff" * 8, msgspec.msgpack.encode([["a", -1]])):
        with pytest.raises(StoreFailed):
            unpack_runs([good[0]._replace(layout=layout)], 9)


# ---- Redis


async def test_redis_finds_damaged_and_stray_features(redis_url: str) -> None:
    import redis.asyncio as redis

    config = HistoryConfig(
        kind="redis", url=SecretUrl(redis_url), timeout_s=30.0, max_events_per_user=100
    )
    store = await open_store(config)
    assert store is not None
    name = base64.urlsafe_b64encode(key_bytes(USER)).decode()
    stream, log = f"npu_gr:{{{name}}}:features", f"npu_gr:{{{name}}}:log"
    client: Any
    async with redis.from_url(redis_url) as client:
        await client.flushall()
        for step in range(60):
            await store.append(USER, numbered(5, 5 * step))
        assert equal((await store.read(USER, 99)).events, numbered(99, 201))
        assert 20 <= await client.xlen(stream) <= 41, "what was given up is gone"
        found = await check_redis(redis_url)
        assert (found.num_damaged, found.num_users) == (0, 1)

        [[entry, row]] = await client.xrevrange(stream, count=1)
        [[layout, rows]] = row.items()
        for spoilt in (
            {layout: rows[:3] + bytes([rows[3] ^ 1]) + rows[4:]},
            {layout: rows[:-1]},
            {layout[:-1] + b"\x03": rows},
        ):
            await client.delete(stream)
            await client.xadd(stream, spoilt, id=entry)
            with pytest.raises(StoreFailed) as failed:
                await store.read(USER, 99)
            assert failed.value.fault is StoreFault.CORRUPT
            assert (await check_redis(redis_url)).bad_users == {key_bytes(USER)}

        await store.write_many([Write(USER, numbered(40), Mode.REPLACE)])
        assert equal((await store.read(USER, 99)).events, numbered(40))
        # good records, at other places
        await client.setrange(log, 0, await client.getrange(log, 22, 43))
        with pytest.raises(StoreFailed, match="checksums of features"):
            await store.read(USER, 99)
        # an older version put fewer events there
        await client.set(log, await client.getrange(log, 0, 21))
        with pytest.raises(StoreFailed, match="checksums of features"):
            await store.read(USER, 99)
        with pytest.raises(StoreFailed, match="events that do not exist"):
            await store.append(USER, numbered(1, 1))
        assert (await check_redis(redis_url)).bad_users == {key_bytes(USER)}
        await store.erase(USER)
        assert await client.keys(f"npu_gr:*{name}*") == []
    await store.close()
