"""Whatever fails, is erased or runs out, a rank is answered and nothing leaks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from npu_gr.core.arrays import F32
from npu_gr.core.errors import DeviceError, PoolExhausted
from npu_gr.core.history import UserKey
from npu_gr.core.request import Outcome, Reason, Verdict
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.queue import JobOrder
from npu_gr.engine.rank_engine import RankPass
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.relay.prefill_job import PrefillKind
from npu_gr.relay.relay import Lease
from tests.engine.kv_cache.invariants import check_pool
from tests.relay.rig import CANDIDATES, RING, USER, Bench, bench, same, tokens


@pytest.mark.parametrize(
    "where", ["prefill", "reload", "spill", "reserve", "dram_reserve", "verify"]
)
async def test_no_failure_reaches_the_caller(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted failure in each part: the scores are the cold ones, and nothing is left behind."""
    async with bench() as b:
        history = tokens(100)
        want = await b.cold(history)

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("planted")  # on the device thread: becomes a DeviceError

        def exhausted(*_: object, **__: object) -> None:
            raise PoolExhausted("planted")

        assert b.dram is not None
        match where:
            case "prefill":
                monkeypatch.setattr(b.engine.arena, "write", broken)
                b.relay.signal(USER, history)
                await b.idle()
            case "reload":
                await b.rank(history)
                await b.idle()
                b.pool.erase_user(USER)
                monkeypatch.setattr(b.engine.arena, "copy_tokens_from", broken)
            case "spill":
                monkeypatch.setattr(b.dram.arena, "copy_tokens_from", broken)
            case "reserve":
                monkeypatch.setattr(b.pool, "reserve", exhausted)
                assert b.relay.signal(USER, history) is Verdict.SKIP_FOOTPRINT
            case "dram_reserve":
                monkeypatch.setattr(b.dram, "reserve", exhausted)
            case "verify":
                await b.rank(history)
                await b.idle()
                b.pool.erase_user(USER)
                b.dram._epochs[:] = 0
            case _:
                raise AssertionError(where)
        async with b.device_busy():
            leasing = asyncio.create_task(_leased(b, history))
            await asyncio.sleep(0.01)
        lease = await leasing
        assert lease.outcome is Outcome.MISS_FULL
        await b.idle()
        monkeypatch.undo()
        work = RankPass(history, lease.first_token, CANDIDATES, 1_700_000_000)
        assert same((await b.engine.rank(work, float("inf"))).logits, want)
        await b.idle()
        if where != "verify":
            assert not b.has_leaked()
        assert b.pool.reserved_bytes == 0
        planted = {
            "prefill": ["prefill"],
            "reload": ["reload"],
            "spill": ["spill"],
            "verify": ["reload"],
        }
        assert b.errors == planted.get(where, [])


async def _leased(b: Bench, history: Tokens) -> Lease:
    async with b.relay.lease(USER, history, len(CANDIDATES), time.monotonic() + 30.0) as lease:
        return lease


async def test_erasing_a_user_forgets_everything_even_what_is_being_made() -> None:
    async with bench() as b:
        history = tokens(100)
        await b.rank(history)
        await b.idle()
        async with b.device_busy():
            other = tokens(90, seed=3)
            b.relay.signal(USER, other)
            await asyncio.sleep(0)
            erasing = asyncio.create_task(b.relay.erase(USER))
            await asyncio.sleep(0.01)
        await erasing
        await b.idle()
        assert b.pool.free_bytes == b.pool.budget_bytes
        assert b.dram is not None
        assert b.dram.free_bytes == b.dram.budget_bytes
        assert not any(chunk.any() for chunk in b.engine.arena._keys)
        assert not any(chunk.any() for chunk in b.dram.arena._keys)
        lease, _ = await b.rank(history)
        assert lease.outcome is Outcome.MISS_FULL


async def test_a_rank_that_keeps_is_no_pre_infer() -> None:
    """It does not count against those that may run, and an erasure does not wait for it."""
    async with bench(max_inflight=1) as b:
        history, jobs = tokens(100), b.relay.prefills.table
        async with b.relay.lease(USER, history, 1, time.monotonic() + 30) as lease:
            assert lease.keep
            assert b.relay.signal(USER, history) is Verdict.ALREADY_RUNNING
            assert (jobs.in_flight(), jobs.in_flight(PrefillKind.PREFILL)) == (0, 0)
            assert b.relay.signal(UserKey("", "v"), tokens(90, seed=1)) is Verdict.PREINFER
            assert (jobs.in_flight(), jobs.in_flight(PrefillKind.PREFILL)) == (1, 1)
            await b.relay.erase(USER)
        await b.idle()
        assert b.pool.find(USER, "v1", b.pool.arena.layout.layout_id) == []
        assert not b.has_leaked()


async def test_a_user_erased_while_ranked_may_be_ranked_again_meanwhile() -> None:
    """The first pass writes into pages that no lookup will find.

    Who comes meanwhile does without it, at once.
    """
    async with bench(dram_pages=0) as b:
        history = tokens(100)
        async with b.relay.lease(USER, history, 1, time.monotonic() + 30):
            erasing = asyncio.create_task(b.relay.erase(USER))
            await asyncio.sleep(0.01)
            lease, scores = await b.rank(history)
            assert (lease.outcome, lease.reason, lease.keep) == (
                Outcome.MISS_FULL,
                Reason.NO_SIGNAL,
                None,
            )
            assert same(scores, await b.cold(history))
        await erasing
        await b.idle()
        assert not b.has_leaked()
        assert b.pool.free_bytes == b.pool.budget_bytes


async def test_what_a_rank_discards_is_encoded_again_for_those_who_wait() -> None:
    async with bench() as b:
        history = tokens(100)
        async with b.device_busy():
            async with b.relay.lease(USER, history, 1, time.monotonic() + 30) as lease:
                joining = asyncio.create_task(b.rank(history))
                await asyncio.sleep(0.01)
                lease.discard()
            assert not len(b.pool)
        lease, scores = await joining
        assert (lease.outcome, lease.reason) == (Outcome.JOINED, Reason.COMPUTE)
        assert same(scores, await b.cold(history))
        await b.idle()
        assert not b.has_leaked()


@pytest.mark.parametrize("window", [(0, 0), RING])
async def test_who_waits_gets_right_scores_after_a_rank_wrote_and_failed(
    window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ring the failed pass has overwritten what the prefill before it had encoded."""
    async with bench(window=window) as b:
        history, prefill, forward = tokens(150), b.engine.prefill, b.engine.forward
        stopped = list[int]()

        async def half(
            whole: Tokens, keep: tuple[PageRun, ...], deadline_at: float, *_: object
        ) -> int:
            monkeypatch.setattr(b.engine, "prefill", prefill)
            await asyncio.sleep(0.01)
            encoded = await prefill(whole[:100], keep, deadline_at, JobOrder(0.0))
            stopped.append(encoded)
            return encoded

        def fails(passes: Sequence[RankPass]) -> list[F32]:
            scores = forward(passes)
            if passes[0].keep is None or not len(passes[0].candidates):
                return scores
            monkeypatch.setattr(b.engine, "forward", forward)
            raise DeviceError("a planned failure")

        monkeypatch.setattr(b.engine, "prefill", half)
        monkeypatch.setattr(b.engine, "forward", fails)
        b.relay.signal(USER, history)
        await asyncio.sleep(0)
        ranking = asyncio.create_task(b.rank(history))
        await asyncio.sleep(0.005)
        joining = asyncio.create_task(b.rank(history))
        with pytest.raises(DeviceError):
            await ranking
        lease, scores = await joining
        assert lease.outcome is Outcome.JOINED
        assert stopped == [100]
        assert same(scores, await b.cold(history))
        await b.idle()
        assert not b.has_leaked()


async def test_who_has_discarded_publishes_nothing_of_who_adopts_after_it() -> None:
    """A rank discards, its prefill is restarted for a second one, which leaves.

    A third rank adopts it.

    The first rank still runs, without prefix. When it ends, the third has written nothing yet.
    """
    async with bench(dram_pages=0) as b:
        history = tokens(230)
        deadline_at = time.monotonic() + 30
        async with b.device_busy():
            first = b.relay.lease(USER, history, 1, deadline_at)
            lease = await first.__aenter__()
            joining = asyncio.create_task(b.rank(history))
            await asyncio.sleep(0.01)
            lease.discard()
            await asyncio.sleep(0.01)
            joining.cancel()
            await asyncio.wait({joining})
            async with b.relay.lease(USER, history, 1, deadline_at) as third:
                assert third.keep == lease.keep
                await first.__aexit__(None, None, None)
                assert not len(b.pool)
                assert len(b.relay.prefills.table) == 1  # nor does it end what the third writes
            assert len(b.pool) == 1
        await b.idle()
        assert not b.has_leaked()


async def test_an_erased_user_who_comes_back_is_spilled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy of before still runs, and will come to nothing."""
    async with bench() as b:
        history, go, copy = tokens(100), asyncio.Event(), b.engine.copy

        async def held(*args: Any, **options: Any) -> None:
            await go.wait()
            await copy(*args, **options)

        monkeypatch.setattr(b.engine, "copy", held)
        await b.rank(history)
        await b.relay.erase(USER)
        monkeypatch.undo()
        await b.rank(history)
        go.set()
        await b.idle()
        assert b.dram is not None
        assert len(b.dram.find(USER, "v1", b.pool.arena.layout.layout_id)) == 1
        assert not b.has_leaked()


@pytest.mark.parametrize("others", [0, 3])
async def test_a_rank_that_goes_away_while_it_takes_a_pre_infer_over(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the very turn of the loop in which the prefill stops.

    Who has joined gets it all the same.
    """
    async with bench() as b:
        history, go, prefill, errors = tokens(100), asyncio.Event(), b.engine.prefill, list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

        async def cut_short(*_: object) -> int:
            await go.wait()
            monkeypatch.setattr(b.engine, "prefill", prefill)
            return 0

        monkeypatch.setattr(b.engine, "prefill", cut_short)
        b.relay.signal(USER, history)
        await asyncio.sleep(0.01)
        ranking = asyncio.create_task(b.rank(history))
        await asyncio.sleep(0.01)
        joining = [asyncio.create_task(b.rank(history)) for _ in range(others)]
        await asyncio.sleep(0.01)
        go.set()
        ranking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ranking
        want = await b.cold(history)
        for lease, scores in await asyncio.gather(*joining):
            assert lease.outcome is Outcome.JOINED
            assert same(scores, want)
        await b.idle()
        assert not errors
        assert len(b.pool) == (1 if others else 0)
        assert not b.has_leaked()


async def test_erasing_one_user_never_touches_another() -> None:
    """Erased pages are overwritten before another user gets them, however busy the device is."""
    async with bench(num_pages=8, dram_pages=0) as b:
        mine, other = tokens(100), tokens(100, seed=5)
        want = await b.cold(other)
        await b.rank(mine)  # fills 7 of the 8 pages
        async with b.device_busy():
            erasing = asyncio.create_task(b.relay.erase(USER))
            await asyncio.sleep(0)
            assert b.relay.signal(UserKey("", "v"), other) is Verdict.SKIP_FOOTPRINT
            await asyncio.sleep(0.01)
        await erasing
        assert not any(chunk.any() for chunk in b.engine.arena._keys)
        assert b.relay.signal(UserKey("", "v"), other) is Verdict.PREINFER
        await b.idle()
        lease, scores = await b.rank(other, UserKey("", "v"))
        assert lease.outcome is Outcome.HBM_HIT
        assert same(scores, want)


async def test_a_user_erased_while_ranked_is_answered_and_leaves_nothing() -> None:
    """A pass that keeps its prefix and one that reads it are queued when their user is erased."""
    async with bench(dram_pages=0) as b:
        kept, read = tokens(100), tokens(90, seed=3)
        want_kept, want_read = await b.cold(kept), await b.cold(read)
        await b.rank(read)
        async with b.device_busy():
            ranks = [asyncio.create_task(b.rank(history)) for history in (kept, read)]
            await asyncio.sleep(0.01)
            await b.relay.erase(USER)
            other = b.relay.signal(UserKey("", "v"), tokens(80, seed=7))
            assert other is Verdict.PREINFER
        (_, scores_kept), (lease, scores_read) = await asyncio.gather(*ranks)
        assert lease.outcome is Outcome.HBM_HIT
        assert same(scores_kept, want_kept)
        assert same(scores_read, want_read)
        await b.idle()
        _, scores = await b.rank(tokens(80, seed=7), UserKey("", "v"))
        assert same(scores, await b.cold(tokens(80, seed=7)))
        await b.relay.erase(UserKey("", "v"))
        assert not any(chunk.any() for chunk in b.engine.arena._keys)
        assert b.pool.free_bytes == b.pool.budget_bytes
        assert not b.has_leaked()


@pytest.mark.parametrize("streams", [1, 3])
async def test_bytes_never_exceed_the_budget(streams: int) -> None:
    """Signals, ranks and erasures of more users than fit, interleaved at random."""
    async with bench(num_pages=20, dram_pages=10, t_life_s=0.05, streams=streams) as b:
        random = np.random.default_rng(0)
        wants: dict[int, F32] = {}

        async def one(number: int) -> None:
            seed = int(random.integers(0, 6))
            history = tokens(40 + 10 * seed, seed)
            user = UserKey("", str(seed))
            await asyncio.sleep(float(random.random()) * 0.1)
            if random.random() < 0.1:
                await b.relay.erase(user)
            if random.random() < 0.6:
                b.relay.signal(user, history)
                await asyncio.sleep(float(random.random()) * 0.02)
            lease, scores = await b.rank(history, user)
            if seed not in wants:
                wants[seed] = await b.cold(history)
            assert same(scores, wants[seed]), (number, lease)
            check_pool(b.pool)

        await asyncio.gather(*(one(number) for number in range(80)))
        await b.idle()
        assert not b.has_leaked()


@pytest.mark.parametrize("seed", range(4))
async def test_ranks_come_go_and_fail_in_any_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signals, erasures, failing passes, and ranks that are cancelled or discard their lease."""
    random, errors = np.random.default_rng(seed), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with bench(num_pages=40, dram_pages=20, streams=1 + seed % 2) as b:
        histories = [tokens(n, seed=user) for user in range(3) for n in (70, 100)]
        want = [await b.cold(history) for history in histories]
        run, outcomes = b.engine.forward, Counter[Outcome]()

        def fails_at_times(passes: Sequence[RankPass]) -> list[F32]:
            if random.random() < 0.05:
                raise RuntimeError("planted")
            return run(passes)

        monkeypatch.setattr(b.engine, "forward", fails_at_times)

        async def rank(which: int) -> None:
            user, history, deadline_at = (
                UserKey("", str(which // 2)),
                histories[which],
                time.monotonic() + 30,
            )
            async with b.relay.lease(user, history, len(CANDIDATES), deadline_at) as lease:
                if random.random() < 0.1:
                    lease.discard()
                    return
                work = RankPass(
                    history,
                    lease.first_token,
                    CANDIDATES,
                    1_700_000_000,
                    cached=lease.cached,
                    keep=lease.keep,
                )
                scores = (await b.engine.rank(work, deadline_at)).logits
            assert same(scores, want[which])
            outcomes[lease.outcome] += 1

        async def one() -> None:
            which = int(random.integers(len(histories)))
            match random.choice(["signal", "rank", "leave", "erase"], p=[0.3, 0.4, 0.25, 0.05]):
                case "signal":
                    b.relay.signal(UserKey("", str(which // 2)), histories[which])
                case "rank":
                    await rank(which)
                case "leave":
                    task = asyncio.ensure_future(rank(which))
                    await asyncio.sleep(random.random() * 0.005)
                    task.cancel()
                    await asyncio.wait({task})
                    if not task.cancelled():
                        task.result()
                case _:
                    await b.relay.erase(UserKey("", str(which // 2)))

        async def many() -> None:
            for _ in range(60):
                with suppress(DeviceError):
                    await one()
                await asyncio.sleep(random.random() * 0.003)

        async with asyncio.timeout(60):
            await asyncio.gather(*(many() for _ in range(6)))
            await b.idle()
        assert not errors
        assert not b.has_leaked()
        assert {Outcome.HBM_HIT, Outcome.JOINED, Outcome.MISS_FULL} <= set(outcomes)
        for user in range(3):
            await b.relay.erase(UserKey("", str(user)))
        assert b.pool.free_bytes == b.pool.budget_bytes
