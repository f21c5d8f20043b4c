"""After a delta a touched prefix is replaced by an exact one, and gives way to everything else."""

from __future__ import annotations

import asyncio

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.history import UserKey
from npu_gr.core.request import Outcome, Reason, Verdict
from npu_gr.core.served import Refreshed
from npu_gr.engine.kv_cache.prefix_pool import by_use
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.weight_stamps import WeightStamps
from tests.relay.rig import USER, Bench, bench, same, tokens

NONE = WeightStamps.none(300)


def after(touched: I64, number: int = 1) -> WeightStamps:
    """Return the stamps after a delta that has changed these item rows."""
    rows = NONE.rows.copy()
    rows[touched] = number
    return NONE._replace(rows=rows)


def read_before_and_after(history: Tokens) -> tuple[Tokens, Tokens]:
    return history.under(NONE), history.under(after(history.rows[[5]]))


def keys(b: Bench, user: UserKey = USER) -> tuple[list[str], list[str]]:
    """Return the fingerprints of a user's prefixes in HBM and DRAM."""
    assert b.dram is not None
    layout = b.pool.arena.layout.layout_id
    found = (tier.find(user, "v1", layout) for tier in (b.pool, b.dram))
    hbm, dram = ([entry.key.fingerprint for entry in tier] for tier in found)
    return hbm, dram


async def test_a_touched_prefix_is_replaced_in_every_tier() -> None:
    for max_stale_s in (0.0, 60.0):
        async with bench(max_stale_s=max_stale_s) as b:
            before, now = read_before_and_after(tokens(150))
            assert await b.relay.refreshing.refresh(USER, now, [before]) is Refreshed.GONE
            await b.rank(before)
            await b.idle()
            assert keys(b) == ([before.fingerprint(150)], [before.fingerprint(150)])
            assert await b.relay.refreshing.refresh(USER, now, [before]) is Refreshed.ENCODED
            await b.idle()
            assert keys(b) == ([now.fingerprint(150)], [now.fingerprint(150)])
            lease, scores = await b.rank(now)
            assert (lease.outcome, lease.reason) == (Outcome.HBM_HIT, Reason.NONE)
            assert same(scores, await b.cold(now))
            assert await b.relay.refreshing.refresh(USER, now, [before]) is Refreshed.EXACT
            await b.idle()
            assert not b.has_leaked()
            assert not b.errors


async def test_an_untouched_prefix_stays() -> None:
    async with bench() as b:
        before = tokens(100).under(NONE)
        others = np.setdiff1d(np.arange(300), before.rows)
        now = before.under(after(others))
        await b.rank(before)
        await b.idle()
        (entry,) = by_use(b.pool)
        assert await b.relay.refreshing.refresh(USER, now, [before]) is Refreshed.EXACT
        assert by_use(b.pool) == [entry]
        assert len(keys(b)[1]) == 1


async def test_a_longer_touched_prefix_of_several_deltas_leaves_nothing_behind() -> None:
    """A signal has encoded a part again; the rest and all older ones are replaced."""
    async with bench(max_stale_s=60.0) as b:
        history = tokens(120)
        first = history.under(NONE)
        second = history.under(after(history.rows[[100]], 1))
        third = history.under(after(history.rows[[100]], 2))
        for reading in (first, second):
            await b.rank(reading)
            await b.idle()
        assert await b.relay.refreshing.refresh(USER, third, [first, second]) is Refreshed.ENCODED
        await b.idle()
        assert keys(b) == ([third.fingerprint(120)], [third.fingerprint(120)])
        assert not b.has_leaked()


async def test_an_erased_user_is_not_encoded_again() -> None:
    async with bench() as b:
        before, now = read_before_and_after(tokens(100))
        await b.rank(before)
        await b.idle()
        async with b.device_busy():
            waiting = asyncio.create_task(b.relay.refreshing.refresh(USER, now, [before]))
            await asyncio.sleep(0.01)
            erasing = asyncio.create_task(b.relay.erase(USER))
            await asyncio.sleep(0.01)
        assert await waiting is Refreshed.FAILED
        await erasing
        assert keys(b) == ([], [])
        assert not b.has_leaked()


async def test_a_refresh_goes_behind_the_prefill_of_a_later_signal() -> None:
    async with bench() as b:
        before, now = read_before_and_after(tokens(100))
        other = UserKey("", "other")
        await b.rank(before)
        await b.idle()
        async with b.device_busy():
            waiting = asyncio.create_task(b.relay.refreshing.refresh(USER, now, [before]))
            await asyncio.sleep(0.01)
            assert b.relay.signal(other, tokens(60, seed=1)) is Verdict.PREINFER
            await asyncio.sleep(0.01)  # until its job is queued
        assert await waiting is Refreshed.ENCODED
        assert len(keys(b, other)[0]) == 1
        await b.idle()


async def test_a_refresh_gives_way_to_ranks_and_signals() -> None:
    async with bench(max_inflight=1) as b:
        before, now = read_before_and_after(tokens(100))
        other, history = UserKey("", "other"), tokens(60, seed=1)
        await b.rank(before)
        await b.idle()
        async with b.device_busy():
            waiting = asyncio.create_task(b.relay.refreshing.refresh(USER, now, [before]))
            await asyncio.sleep(0.01)
            # it takes no slot of the trigger
            assert b.relay.signal(other, history) is Verdict.PREINFER
            # its own rank takes it over
            ranking = asyncio.create_task(b.rank(now))
            await asyncio.sleep(0.01)
        lease, scores = await ranking
        assert (lease.outcome, lease.reason) == (Outcome.MISS_FULL, Reason.NOT_BEGUN)
        assert same(scores, await b.cold(now))
        assert await waiting is Refreshed.ENCODED
        await b.idle()
        assert (await b.rank(history, user=other))[0].outcome is Outcome.HBM_HIT
        await b.idle()
        assert not b.has_leaked()
        assert not b.errors


async def test_the_most_useful_prefixes_come_first_and_are_evicted_last() -> None:
    async with bench(num_pages=12, dram_pages=0) as b:
        users = [UserKey("", name) for name in "abcd"]
        for user in users:
            await b.rank(tokens(40), user=user)  # three pages each
        a, b_, c, d = users
        assert b.relay.refreshing.users_by_use() == [d, c, b_, a]
        assert b.relay.signal(b_, tokens(40)) is Verdict.ALREADY_RESIDENT
        assert b.relay.refreshing.users_by_use() == [b_, d, c, a]  # it waits for a rank
        await b.rank(tokens(40), user=b_)
        b.relay.refreshing.evict_last([c, a])
        await b.rank(tokens(40, seed=1), user=UserKey("", "e"))
        assert b.relay.refreshing.users_by_use()[1:] == [a, c, b_]
        assert not b.has_leaked()
