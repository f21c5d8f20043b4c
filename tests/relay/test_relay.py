"""Cold, HBM hit, joined and DRAM hit give the same scores, and each lease names its outcome."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from npu_gr.core.arrays import F32
from npu_gr.core.history import UserKey
from npu_gr.core.request import Brownout, Outcome, Reason, Verdict
from npu_gr.engine.cost import CostModel
from npu_gr.engine.rank_engine import RankPass
from npu_gr.model.history_tokenizer import Tokens
from tests.models import events
from tests.relay.rig import (
    CANDIDATES,
    PAGE_TOKENS,
    RING,
    USER,
    bench,
    same,
    tokenized,
    tokens,
)


@pytest.mark.parametrize("window", [(0, 0), RING])
async def test_every_outcome_gives_the_cold_scores(window: tuple[int, int]) -> None:
    async with bench(window=window) as b:
        history = tokens(100)
        want = await b.cold(history)

        lease, scores = await b.rank(history)
        assert (lease.outcome, lease.reason) == (Outcome.MISS_FULL, Reason.NO_SIGNAL)
        assert same(scores, want)
        await b.relay.erase(USER)

        assert b.relay.signal(USER, history) is Verdict.PREINFER
        assert b.relay.signal(USER, history) is Verdict.ALREADY_RUNNING
        lease, scores = await b.rank(history)
        assert (lease.outcome, lease.reason, lease.cached) == (
            Outcome.MISS_FULL,
            Reason.NOT_BEGUN,
            None,
        )
        assert same(scores, want)

        assert b.relay.signal(USER, history) is Verdict.ALREADY_RESIDENT
        lease, scores = await b.rank(history)
        assert (lease.outcome, lease.reason) == (Outcome.HBM_HIT, Reason.NONE)
        assert same(scores, want)

        await b.idle()
        b.pool.erase_user(USER)
        lease, scores = await b.rank(history)
        assert lease.outcome is Outcome.DRAM_HIT
        assert same(scores, want)
        await b.idle()
        assert not b.has_leaked()
        assert not b.errors


async def test_a_signal_brings_a_spilled_prefix_back() -> None:
    async with bench() as b:
        history = tokens(100)
        await b.rank(history)
        await b.idle()
        b.pool.erase_user(USER)
        async with b.device_busy():
            assert b.relay.signal(USER, history) is Verdict.RELOAD
            ranking = asyncio.create_task(b.rank(history))
            await asyncio.sleep(0.01)
        lease, scores = await ranking
        assert (lease.outcome, lease.reason) == (Outcome.JOINED, Reason.RELOAD)
        assert same(scores, await b.cold(history))


@pytest.mark.parametrize("window", [(0, 0), RING])
async def test_new_behaviours_are_appended_to_an_old_prefix(window: tuple[int, int]) -> None:
    async with bench(window=window) as b:
        whole = events(130)
        assert b.relay.signal(USER, tokenized(whole[:100])) is Verdict.PREINFER
        lease, scores = await b.rank(tokenized(whole))
        assert lease.cached is not None
        assert lease.cached.num_tokens == 100
        assert same(scores, await b.cold(tokenized(whole)))


async def test_a_ring_has_the_cold_scores_after_every_delta_and_the_same_pages() -> None:
    """By signals and ranks, out of DRAM, with two versions in the tiers; erasing empties both."""
    async with bench(window=RING) as b, b.next_version(window=RING) as newer:
        whole = events(400)
        for place, stop in enumerate((20, 90, 91, 150, 260, 399)):
            history = tokenized(whole[:stop])
            if place % 3 == 1:
                b.relay.signal(USER, history)
                await b.idle()
            if place % 3 == 2:
                b.pool.erase_user(USER)  # the copy in DRAM is what is left
            lease, scores = await b.rank(history)
            assert same(scores, await b.cold(history)), stop
            assert lease.cached is not None or not place
            await b.idle()
            held = b.pool.find(USER, "v1", b.pool.arena.layout.layout_id)
            assert held[0].num_pages == min(-(-stop // PAGE_TOKENS), 4)
            lease, scores = await newer.rank(history)
            assert same(scores, await newer.cold(history)), stop
            await newer.idle()
        await b.relay.erase(USER)
        assert b.dram is not None
        assert b.pool.free_bytes == b.pool.budget_bytes
        assert b.dram.free_bytes == b.dram.budget_bytes
        assert not any(chunk.any() for chunk in b.engine.arena._keys + b.dram.arena._keys)
        assert not b.has_leaked()


async def test_a_signal_encodes_only_what_is_new() -> None:
    async with bench(dram_pages=0) as b:
        whole, computed = events(130), list[int]()
        run = b.engine.forward

        def counted(passes: Sequence[RankPass]) -> list[F32]:
            computed.extend(work.demand.tokens for work in passes)
            return run(passes)

        assert b.relay.signal(USER, tokenized(whole[:100])) is Verdict.PREINFER
        await b.idle()
        b.engine.forward = counted  # type: ignore[method-assign]
        assert b.relay.signal(USER, tokenized(whole)) is Verdict.EXTEND
        await b.idle()
        assert sum(computed) == 30
        lease, scores = await b.rank(tokenized(whole))
        assert lease.outcome is Outcome.HBM_HIT
        assert same(scores, await b.cold(tokenized(whole)))
        assert len(b.pool) == 1  # the old one went
        assert not b.has_leaked()


async def test_a_pre_infer_delays_a_rank_by_one_chunk_at_most_until_its_own_rank_waits() -> None:
    async with bench(dram_pages=0) as b:
        order, run = list[int](), b.engine.forward

        def noted(passes: Sequence[RankPass]) -> list[F32]:
            order.extend(len(each.candidates) for each in passes)
            return run(passes)

        b.engine.forward = noted  # type: ignore[method-assign]
        b.engine.objective_s = 0.1
        long, other = tokens(300), tokens(20, seed=1)
        async with b.device_busy():
            assert b.relay.signal(USER, long) is Verdict.PREINFER
            await asyncio.sleep(0.01)
            ranking = asyncio.create_task(b.rank(other, UserKey("", "v")))
            await asyncio.sleep(0.01)
        await ranking
        await b.idle()
        assert order == [20, 0, 0, 0, 0, 0]  # the rank, then five chunks of 64
        order.clear()
        await b.relay.erase(USER)
        async with b.device_busy():
            b.relay.signal(USER, long)
            await asyncio.sleep(0.01)
            own = asyncio.create_task(b.rank(long, budget_s=60.0))
            await asyncio.sleep(0.05)
            # must be done sooner, is wanted later
            later = asyncio.create_task(b.rank(other, UserKey("", "w")))
            await asyncio.sleep(0.01)
        assert (await own)[0].reason is Reason.NOT_BEGUN
        await later
        await b.idle()
        assert order == [20, 20]  # one pass each: nothing is left of the prefill


async def test_pre_infers_run_one_after_the_other() -> None:
    async with bench(dram_pages=0) as b:
        order, run = list[int](), b.engine.forward

        def noted(passes: Sequence[RankPass]) -> list[F32]:
            order.append(len(passes[0].tokens))
            return run(passes)

        b.engine.forward = noted  # type: ignore[method-assign]
        async with b.device_busy():
            b.relay.signal(USER, tokens(200))
            await asyncio.sleep(0.01)
            b.relay.signal(UserKey("", "v"), tokens(150))
            await asyncio.sleep(0.01)
        await b.idle()
        assert order == [64, 128, 192, 200, 64, 128, 150]


async def test_another_history_is_not_a_hit() -> None:
    async with bench() as b:
        b.relay.signal(USER, tokens(100))
        await b.idle()
        other = tokens(100, seed=1)
        lease, scores = await b.rank(other)
        assert (lease.outcome, lease.reason) == (Outcome.MISS_FULL, Reason.FINGERPRINT_MISMATCH)
        assert same(scores, await b.cold(other))


@pytest.mark.parametrize("is_signalled", [False, True])
@pytest.mark.parametrize("num_gone", [0, 5])
async def test_many_ranks_encode_once(num_gone: int, is_signalled: bool) -> None:
    """Twenty at once: the first encodes, the others join it, and go on if it goes away."""
    async with bench() as b:
        history, encoded, run = tokens(100), list[int](), b.engine.forward

        def noted(passes: Sequence[RankPass]) -> list[F32]:
            encoded.extend(each.demand.tokens for each in passes)
            return run(passes)

        b.engine.forward = noted  # type: ignore[method-assign]
        async with b.device_busy():
            if is_signalled:
                b.relay.signal(USER, history)
            await asyncio.sleep(0.01)
            ranks = [asyncio.create_task(b.rank(history)) for _ in range(20)]
            await asyncio.sleep(0.01)
            for rank in ranks[:num_gone]:
                rank.cancel()
            await asyncio.sleep(0.01)
        results = await asyncio.gather(*ranks, return_exceptions=True)
        assert [isinstance(r, asyncio.CancelledError) for r in results] == [True] * num_gone + [
            False
        ] * (20 - num_gone)
        assert sum(encoded) == len(history)
        want, outcomes = await b.cold(history), Counter[Outcome]()
        for result in results[num_gone:]:
            assert not isinstance(result, BaseException)
            outcomes[result[0].outcome] += 1
            assert same(result[1], want)
        first = {} if num_gone else {Outcome.MISS_FULL: 1}
        assert outcomes == {**first, Outcome.JOINED: 20 - max(1, num_gone)}
        await b.idle()
        assert not b.has_leaked()


async def test_a_rank_goes_on_from_where_its_pre_infer_is() -> None:
    """It comes while the second chunk of four runs.

    What follows is one pass, whose prefix the next rank reads.
    """
    async with bench(dram_pages=0) as b:
        history, ran, run = tokens(230), list[tuple[int, int]](), b.engine.forward
        reached, go = threading.Event(), threading.Event()

        def noted(passes: Sequence[RankPass]) -> list[F32]:
            ran.extend((each.demand.tokens, each.demand.rows) for each in passes)
            if len(ran) == 2:
                reached.set()
                go.wait(10)
            return run(passes)

        b.engine.forward = noted  # type: ignore[method-assign]
        b.relay.signal(USER, history)
        await asyncio.to_thread(reached.wait, 10)
        ranking = asyncio.create_task(b.rank(history))
        await asyncio.sleep(0.01)
        go.set()
        lease, scores = await ranking
        assert (lease.outcome, lease.reason) == (Outcome.JOINED, Reason.COMPUTE)
        assert lease.cached is not None
        assert lease.cached.num_tokens == 128
        assert ran == [(64, 0), (64, 0), (102, len(CANDIDATES))]
        want = await b.cold(history)
        assert same(scores, want)
        lease, scores = await b.rank(history)
        assert lease.outcome is Outcome.HBM_HIT
        assert same(scores, want)
        assert not b.has_leaked()


@pytest.mark.parametrize("reason", [Reason.JOIN_TIMEOUT, Reason.BROWNOUT])
async def test_what_is_left_of_a_pre_infer_may_be_too_much(reason: Reason) -> None:
    async with bench(dram_pages=0, brownout_tokens=30) as b:
        history = tokens(100)
        if reason is Reason.JOIN_TIMEOUT:
            b.engine.cost = CostModel(0.0, 1.0, 0.0, 0.0, 0.0)  # a second a token
        async with b.device_busy():
            b.relay.signal(USER, history)
            await asyncio.sleep(0.01)
            if reason is Reason.BROWNOUT:
                b.relay.settings.brownout = Brownout.TRUNCATE
            ranking = asyncio.create_task(b.rank(history, budget_s=30.5))
            await asyncio.sleep(0.01)
        lease, scores = await ranking
        assert (lease.outcome, lease.reason) == (Outcome.DEGRADED, reason)
        assert same(scores, await b.cold(tokenized(history.events[lease.first_token :])))
        assert not b.has_leaked()


async def test_a_join_keeps_time_to_do_without() -> None:
    async with bench(dram_pages=0, margin_s=0.05) as b:
        history = tokens(100)
        b.engine.cost = CostModel(0.1, 0.0, 0.0, 0.0, 0.0)
        release = asyncio.Event()

        async def stuck(*_: object) -> None:
            await release.wait()

        b.engine.prefill = stuck  # type: ignore[method-assign, assignment]
        b.relay.signal(USER, history)
        lease, scores = await b.rank(history, budget_s=0.4)
        assert (lease.outcome, lease.reason) == (Outcome.MISS_FULL, Reason.JOIN_TIMEOUT)
        assert same(scores, await b.cold(history))
        release.set()


async def test_what_does_not_fit_the_budget_is_truncated() -> None:
    async with bench() as b:
        b.engine.cost = CostModel(0.0, 1.0, 0.0, 0.0, 0.0)  # a second a token
        history = tokens(100)
        lease, scores = await b.rank(history, budget_s=40.5)
        assert (lease.outcome, lease.reason) == (Outcome.DEGRADED, Reason.NO_SIGNAL)
        assert lease.first_token == 60
        newest = tokenized(history.events[60:])
        assert same(scores, await b.cold(newest))
        assert b.pool.free_bytes == b.pool.budget_bytes


async def test_switched_off_it_only_ranks() -> None:
    async with bench(enabled=False) as b:
        history = tokens(50)
        assert b.relay.signal(USER, history) is Verdict.SKIP_DISABLED
        lease, scores = await b.rank(history)
        assert (lease.outcome, lease.reason, lease.keep) == (
            Outcome.MISS_FULL,
            Reason.DISABLED,
            None,
        )
        assert same(scores, await b.cold(history))


@pytest.mark.parametrize(
    ("signal", "reason"),
    [(lambda: tokens(3), Reason.NOT_AT_RISK), (lambda: tokens(600), Reason.REJECTED_FOOTPRINT)],
)
async def test_a_rejected_signal_explains_the_miss(
    signal: Callable[[], Tokens], reason: Reason
) -> None:
    async with bench() as b:
        history = signal()
        b.relay.signal(USER, history)
        lease, _ = await b.rank(history)
        assert (lease.outcome, lease.reason) == (Outcome.MISS_FULL, reason)
