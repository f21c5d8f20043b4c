"""A prefix from the pool has the cold scores; nothing that a pool does wrong reaches a request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from npu_gr.core.errors import ConfigError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Fetched, Outcome, Verdict
from npu_gr.core.served import Refreshed
from npu_gr.core.settings import from_table, to_table
from npu_gr.engine.cost import CostModel
from npu_gr.engine.kv_cache.config import KVConfig
from npu_gr.engine.kv_cache.prefix_store import PoolFailed, PrefixStore, SealedStore, user_name
from npu_gr.model.weight_stamps import WeightStamps
from tests.models import events
from tests.relay.rig import RING, USER, Bench, bench, same, tokenized, tokens


class Memory:
    """A pool in a dictionary, with a fault."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.change: Callable[[bytes], bytes] = lambda value: value
        self.goes = threading.Event()
        self.goes.set()
        self.is_dead = self.is_full = False

    def get(self, name: str) -> bytes | None:
        self.goes.wait(10)
        if self.is_dead:
            raise PoolFailed("dead")
        value = self.values.get(name)
        return None if value is None else self.change(value)

    def put(self, name: str, value: bytes, ttl_s: float) -> None:
        if self.is_dead or self.is_full:
            raise PoolFailed("full")
        self.values[name] = value

    def erase(self, user_name: str) -> None:
        self.goes.wait(10)
        if self.is_dead:
            raise PoolFailed("dead")
        for name in list(self.values):
            if name.startswith(user_name + "/"):
                del self.values[name]


@asynccontextmanager
async def instance(
    store: PrefixStore, window: tuple[int, int] = (0, 0), version: str = "v1", **more: Any
) -> AsyncIterator[tuple[Bench, list[Fetched]]]:
    """An instance over a pool, which believes that computing a prefix takes five seconds."""
    async with bench(window=window, store=store, version=version, **more) as b:
        b.engine.cost = CostModel(5.0, 0.0, 0.0, 0.0, 0.0)
        outcomes: list[Fetched] = []
        assert b.relay.pool_copies is not None
        b.relay.pool_copies.on_fetch = outcomes.append
        yield b, outcomes
        await b.idle()
        assert not b.has_leaked()


async def filled(window: tuple[int, int] = (0, 0), num: int = 100) -> Memory:
    """A pool into which another instance has put the user's prefix."""
    store = Memory()
    async with instance(store, window) as (b, _):
        await b.rank(tokens(num))
        await b.idle()
    assert len(store.values) == 1
    return store


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [(0, 0), RING])
async def test_a_prefix_of_an_instance_that_is_gone_has_the_same_scores(
    window: tuple[int, int], dtype: str
) -> None:
    whole = events(130)
    store = Memory()
    async with instance(store, window, dtype=dtype) as (b, _):
        await b.rank(tokenized(whole[:100]))
        await b.idle()
        _, want = await b.rank(tokenized(whole))  # a hit, and 30 events more
    async with instance(store, window, dtype=dtype) as (b, outcomes):
        # what the pool has now is of the whole history; a signal brings it
        assert b.relay.signal(USER, tokenized(whole)) in (Verdict.RELOAD, Verdict.ALREADY_RUNNING)
        await b.idle()
        lease, scores = await b.rank(tokenized(whole))
        assert outcomes == [Fetched.HIT]
        assert lease.outcome is Outcome.HBM_HIT
        assert np.array_equal(scores, want)


async def test_what_lies_in_hbm_is_handed_over() -> None:
    store = Memory()
    async with instance(store) as (b, _):
        b.relay.signal(USER, tokens(100))
        await b.idle()
        assert not store.values  # no rank has used it
        await b.relay.spills.hand_over("v1", 10.0)
    async with instance(store) as (b, outcomes):
        b.relay.signal(USER, tokens(100))
        await b.idle()
        assert outcomes == [Fetched.HIT]


def flipped(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: b"", Fetched.TORN),
        (lambda value: value[:-7], Fetched.TORN),
        (flipped, Fetched.TORN),
    ],
)
async def test_torn_bytes_are_a_miss(change: Callable[[bytes], bytes], reason: Fetched) -> None:
    store = await filled()
    store.change = change
    async with instance(store) as (b, outcomes):
        b.relay.signal(USER, tokens(100))
        await b.idle()
        assert outcomes == [reason]
        assert b.dram is not None
        assert not len(b.dram)
        lease, _ = await b.rank(tokens(100))
        assert lease.outcome is Outcome.HBM_HIT  # it was computed


async def test_a_value_of_another_key_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another user, of another version, and of another history of the same user."""
    store = await filled()
    (value,) = store.values.values()
    store.change = lambda _: value
    other = UserKey("t", "u")
    async with instance(store) as (b, outcomes):
        (name,) = store.values
        assert b.relay.pool_copies is not None
        monkeypatch.setattr(store, "get", lambda _: value)
        b.relay.signal(other, tokens(100))
        b.relay.signal(USER, tokens(100, seed=1))
        await b.idle()
        assert outcomes == [Fetched.FOREIGN, Fetched.MISMATCH]
        assert name.startswith(user_name(USER))
    async with instance(store, version="v2") as (b, outcomes):
        b.relay.signal(USER, tokens(100))
        await b.idle()
        assert outcomes == [Fetched.FOREIGN]


async def test_pages_are_read_as_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another dtype, window or version; also if the name and the checksum are made to fit."""
    kinds: list[dict[str, Any]] = [
        *({"dtype": dtype} for dtype in ("int8", "bfloat16", "float32")),
        {"window": RING},
        {"version": "v2"},
    ]
    store = Memory()
    for kind in kinds:
        async with instance(store, **kind) as (b, outcomes):
            b.relay.signal(USER, tokens(100))
            await b.idle()
            assert outcomes == [Fetched.ABSENT], kind
            await b.rank(tokens(100))
            await b.idle()
    assert len(store.values) == len(kinds)
    values = dict(store.values)
    for name, kind in zip(values, kinds, strict=True):
        for other, value in values.items():
            monkeypatch.setattr(store, "values", {name: value})
            async with instance(store, **kind) as (b, outcomes):
                b.relay.signal(USER, tokens(100))
                await b.idle()
                assert outcomes == [Fetched.HIT if other == name else Fetched.FOREIGN]
            if other != name and "dtype" in kind:
                body = value[16:].replace(other.encode(), name.encode())
                store.values = {name: xxhash.xxh3_128_digest(body) + body}
                async with instance(store, **kind) as (b, outcomes):
                    b.relay.signal(USER, tokens(100))
                    await b.idle()
                    fits = len(value) == len(values[name])
                    assert outcomes == [Fetched.HIT if fits else Fetched.TORN]


async def test_a_value_that_was_put_without_the_key_is_a_miss() -> None:
    """A forger has the pool, the code and values of others, but not the key."""
    memory = await filled()
    store = SealedStore(memory, "the key of this fleet")
    (plain,) = memory.values.values()
    async with instance(store) as (b, outcomes):
        b.relay.signal(USER, tokens(100))
        await b.idle()
        assert outcomes == [Fetched.FORGED]
        _, want = await b.rank(tokens(100))
        await b.idle()
    ((name, sealed),) = memory.values.items()
    assert sealed.endswith(plain[-100:])
    assert len(sealed) == len(plain) + 32
    forged = [sealed[:32] + plain[:-1] + b"x", sealed[:40], b"", plain, bytes(32) + plain]
    for value in [*forged, sealed]:
        memory.values = {name: value}
        for key in ("the key of this fleet", "another key"):
            async with instance(SealedStore(memory, key)) as (b, outcomes):
                b.relay.signal(USER, tokens(100))
                await b.idle()
                is_hit = value == sealed and key == "the key of this fleet"
                assert outcomes == [Fetched.HIT if is_hit else Fetched.FORGED]
                _, scores = await b.rank(tokens(100))
                assert np.array_equal(scores, want)
                await b.relay.spills.hand_over("v1", 0.0)
    await asyncio.to_thread(store.erase, user_name(USER))
    assert not memory.values


def test_a_key_that_can_be_guessed_is_rejected_and_not_shown(tmp_path: Path) -> None:
    table = {"pool_key": {"file": str(tmp_path / "key")}}
    for length, text in ((0, ""), (15, "fifteen letters")):
        (tmp_path / "key").write_text(f"{text}\n")
        assert len(text) == length
        with pytest.raises(ConfigError, match=r"pool_key: has fewer than 16") as error:
            from_table(table, KVConfig)
        assert not text or text not in str(error.value)
    (tmp_path / "key").write_text("sixteen letters!")
    assert "sixteen" not in str(to_table(from_table(table, KVConfig)))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
async def test_after_a_delta_the_pool_has_what_was_encoded_again(dtype: str) -> None:
    """Until then what it has is of weights before, and is a miss."""
    store = Memory()
    history = tokens(150)
    none = WeightStamps.none(300)
    touched = none.rows.copy()
    touched[history.rows[[5]]] = 1
    before, now = history.under(none), history.under(none._replace(rows=touched))
    async with instance(store, dtype=dtype) as (first, _):
        await first.rank(before)
        await first.idle()
        async with instance(store, dtype=dtype) as (b, outcomes):
            b.relay.signal(USER, now)
            await b.idle()
            assert outcomes == [Fetched.MISMATCH]
        (old,) = store.values.values()
        assert await first.relay.refreshing.refresh(USER, now, [before]) is Refreshed.ENCODED
        await first.idle()
        ((name, new),) = store.values.items()
        assert new != old
        _, want = await first.rank(now)
    async with instance(store, dtype=dtype) as (b, outcomes):
        for reading, outcome in ((before, Fetched.MISMATCH), (now, Fetched.HIT)):
            b.relay.signal(USER, reading)
            await b.idle()
            assert outcomes == [outcome]
            if outcome is Fetched.HIT:
                _, scores = await b.rank(now)
                assert np.array_equal(scores, want)
            outcomes.clear()
            await b.relay.erase(USER)
            store.values = {name: new}


async def test_an_old_value_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await filled()
    now = time.time()
    monkeypatch.setattr("npu_gr.relay.pool_copies.time.time", lambda: now + 61.0)
    async with instance(store) as (b, outcomes):
        b.relay.signal(USER, tokens(100))
        await b.idle()
        assert outcomes == [Fetched.EXPIRED]


async def test_no_rank_waits_for_a_slow_pool() -> None:
    store = await filled()
    store.goes.clear()
    async with instance(store) as (b, outcomes):
        want = await b.cold(tokens(100))
        assert b.relay.signal(USER, tokens(100)) is Verdict.RELOAD
        lease, scores = await b.rank(tokens(100))
        assert lease.outcome is Outcome.MISS_FULL
        assert not outcomes
        assert same(scores, want)
        store.goes.set()
        await b.idle()


async def test_a_fetch_that_takes_longer_than_computing_is_given_up() -> None:
    store = await filled()
    store.goes.clear()
    async with instance(store) as (b, outcomes):
        b.engine.cost = CostModel(0.01, 0.0, 0.0, 0.0, 0.0)
        b.relay.signal(USER, tokens(100))
        await b.idle()
        lease, _ = await b.rank(tokens(100))
        assert lease.outcome is Outcome.HBM_HIT  # it was computed
        assert b.relay.signal(UserKey("", "v"), tokens(200)) is Verdict.PREINFER
        assert outcomes == [Fetched.TIMEOUT, Fetched.SLOWER]
        store.goes.set()
        await b.idle()


async def test_a_pool_that_is_dead_or_full_is_left_alone() -> None:
    store = await filled()
    store.is_dead = True
    async with instance(store) as (b, outcomes):
        for seed in range(3):
            user = UserKey("", str(seed))
            b.relay.signal(user, tokens(100, seed))
            await b.idle()
            lease, _ = await b.rank(tokens(100, seed), user)
            assert lease.outcome is Outcome.HBM_HIT
        assert outcomes == [Fetched.FAILED] * 3
        with pytest.raises(PoolFailed):
            await b.relay.erase(USER)
        assert not b.pool.find(USER, "v1", b.pool.arena.layout.layout_id)
    assert not b.errors


async def test_an_erased_user_is_gone_from_the_pool_and_from_what_is_on_its_way() -> None:
    store = await filled()
    async with instance(store) as (b, outcomes):
        assert b.dram is not None
        store.goes.clear()
        b.relay.signal(USER, tokens(100))
        threading.Timer(0.05, store.goes.set).start()
        await b.relay.erase(USER)
        await b.idle()
        assert not store.values
        assert not outcomes
        assert not len(b.dram)
        b.relay.signal(USER, tokens(100))
        await b.idle()
        assert outcomes == [Fetched.ABSENT]
