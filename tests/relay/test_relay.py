"""Cold, HBM hit, joined and DRAM hit give the same scores; whatever fails, a rank is answered and nothing leaks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from npu_gr.backend.cpu import CPUBackend
from npu_gr.catalog.items import ItemVocabulary
from npu_gr.catalog.tokens import Tokens, tokenize
from npu_gr.engine.cost import CostModel
from npu_gr.engine.engine import Engine, Pass
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.scheduler import Scheduler
from npu_gr.errors import PoolExhausted
from npu_gr.kv.arena import KVArena
from npu_gr.kv.dram_store import DramStore
from npu_gr.kv.layout import KVLayout
from npu_gr.kv.prefix_pool import PrefixPool
from npu_gr.relay.relay import Lease, Relay, RelayConfig
from npu_gr.relay.trigger import TriggerConfig
from npu_gr.request import F32, Events, Outcome, Reason, UserKey, Verdict
from tests.models import events, tiny_config, tiny_model

USER = UserKey("", "u")
CANDIDATES = np.arange(20, dtype=np.int64)
VOCABULARY = ItemVocabulary(np.arange(300, dtype=np.int64))
PAGE_TOKENS = 16


def tokens(num: int, seed: int = 0) -> Tokens:
    return tokenized(events(num, seed))


def tokenized(history: Events) -> Tokens:
    return tokenize(history, VOCABULARY, 3, max_tokens=2000, cut_step_tokens=16, refuse_unknown=True)


@dataclass
class Bench:
    """A relay over a real engine, with small tiers."""

    relay: Relay[Tokens]
    engine: Engine
    pool: PrefixPool
    dram: DramStore | None
    errors: list[str]

    async def rank(self, history: Tokens, user: UserKey = USER, budget_s: float = 30.0) -> tuple[Lease, F32]:
        due_s = time.monotonic() + budget_s
        async with self.relay.lease(user, history, len(CANDIDATES), due_s) as lease:
            work = Pass(history, lease.first_token, CANDIDATES, 1_700_000_000, cached=lease.cached, keep=lease.keep)
            scored = await self.engine.rank(work, due_s)
        return lease, scored.logits

    async def cold(self, history: Tokens) -> F32:
        return (await self.engine.rank(Pass(history, 0, CANDIDATES, 1_700_000_000), float("inf"))).logits

    async def idle(self) -> None:
        """Every producer and spill has ended."""
        while self.relay._tasks:
            await asyncio.gather(*self.relay._tasks, return_exceptions=True)
            await asyncio.sleep(0)

    def has_leaked(self) -> bool:
        self.pool.check()
        if self.dram:
            self.dram.check()
        return bool(self.relay._producers or self.relay._by_user or self.relay._spilling or self.pool.reserved_bytes)

    @asynccontextmanager
    async def device_busy(self) -> AsyncIterator[None]:
        busy, go = threading.Event(), threading.Event()

        def hold() -> None:
            busy.set()
            go.wait(10)

        task = asyncio.create_task(self.engine.scheduler.call(hold, float("inf"), 0.0))
        await asyncio.to_thread(busy.wait, 10)
        try:
            yield
        finally:
            go.set()
            await task


@asynccontextmanager
async def bench(
    num_pages: int = 32, dram_pages: int = 32, max_inflight: int = 8, streams: int = 1, **config: object
) -> AsyncIterator[Bench]:
    shape = tiny_config()
    layout = KVLayout(num_layers=shape.num_layers, num_heads=2, qk_dim=8, v_dim=16, page_tokens=PAGE_TOKENS)
    cpu = torch.device("cpu")
    arena = KVArena(layout, num_pages, cpu)
    engine = Engine(
        tiny_model(), CPUBackend(), Scheduler(SchedulerConfig(streams=streams, prefill_chunk_tokens=64)), arena
    )
    relay_config = RelayConfig(**config)  # type: ignore[arg-type]
    pool = PrefixPool(arena, num_pages * layout.page_bytes, relay_config.t_life_s, time.monotonic)
    dram = None
    if dram_pages:
        dram = DramStore(
            KVArena(layout, dram_pages, cpu), ttl_s=60.0, ttl_jitter_ratio=0.1, seed=0, clock=time.monotonic
        )
    trigger = TriggerConfig(min_prefix_tokens=4, max_inflight=max_inflight, policy="always")
    relay = Relay(relay_config, trigger, engine, pool, dram, "v1")
    errors: list[str] = []
    relay.on_error = errors.append
    engine.scheduler.start()
    try:
        yield Bench(relay, engine, pool, dram, errors)
    finally:
        await relay.stop()
        await engine.scheduler.stop()


def same(got: F32, want: F32) -> bool:
    return float(np.abs(got - want).max()) <= 1e-5 * float(want.std())


async def test_every_outcome_gives_the_cold_scores() -> None:
    async with bench() as b:
        history = tokens(100)
        want = await b.cold(history)

        lease, scores = await b.rank(history)
        assert (lease.outcome, lease.reason) == (Outcome.MISS_FULL, Reason.NO_SIGNAL)
        assert same(scores, want)
        await b.relay.erase(USER)

        assert b.relay.signal(USER, history) is Verdict.PREINFER
        assert b.relay.signal(USER, history) is Verdict.ALREADY_RUNNING
        lease, scores = await b.rank(history)
        assert (lease.outcome, lease.reason) == (Outcome.JOINED, Reason.COMPUTE)
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


async def test_new_behaviours_are_appended_to_an_old_prefix() -> None:
    async with bench() as b:
        whole = events(130)
        assert b.relay.signal(USER, tokenized(whole[:100])) is Verdict.PREINFER
        lease, scores = await b.rank(tokenized(whole))
        assert lease.cached is not None
        assert lease.cached.num_tokens == 100
        assert same(scores, await b.cold(tokenized(whole)))


async def test_a_signal_encodes_only_what_is_new() -> None:
    async with bench(dram_pages=0) as b:
        whole, computed = events(130), list[int]()
        run = b.engine._run

        def counted(passes: Sequence[Pass]) -> list[F32]:
            computed.extend(work.demand.tokens for work in passes)
            return run(passes)

        assert b.relay.signal(USER, tokenized(whole[:100])) is Verdict.PREINFER
        await b.idle()
        b.engine._run = counted  # type: ignore[method-assign]
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
        order, run = list[int](), b.engine._run

        def noted(passes: Sequence[Pass]) -> list[F32]:
            order.append(len(passes[0].candidates))
            return run(passes)

        b.engine._run = noted  # type: ignore[method-assign]
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
            own = asyncio.create_task(b.rank(long, budget_s=60.0))
            await asyncio.sleep(0.05)
            later = asyncio.create_task(b.rank(other, UserKey("", "w")))  # must be done sooner, is wanted later
            await asyncio.sleep(0.01)
        assert (await own)[0].outcome is Outcome.JOINED
        await later
        assert order[:5] == [0] * 5  # its pre-infer goes by its objective, not by its deadline


async def test_pre_infers_run_one_after_the_other() -> None:
    async with bench(dram_pages=0) as b:
        order, run = list[int](), b.engine._run

        def noted(passes: Sequence[Pass]) -> list[F32]:
            order.append(len(passes[0].tokens))
            return run(passes)

        b.engine._run = noted  # type: ignore[method-assign]
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


async def test_one_producer_for_many_ranks() -> None:
    """Twenty ranks at once, one prefill; a rank that goes away takes nothing with it."""
    async with bench() as b:
        history, prefills = tokens(100), 0
        prefill = b.engine.prefill

        async def counted(*args: object) -> None:
            nonlocal prefills
            prefills += 1
            await prefill(*args)  # type: ignore[arg-type]

        b.engine.prefill = counted  # type: ignore[method-assign, assignment]
        async with b.device_busy():
            b.relay.signal(USER, history)
            ranks = [asyncio.create_task(b.rank(history)) for _ in range(20)]
            await asyncio.sleep(0.01)
            for rank in ranks[:5]:
                rank.cancel()
        results = await asyncio.gather(*ranks, return_exceptions=True)
        want = await b.cold(history)
        assert all(isinstance(r, asyncio.CancelledError) for r in results[:5])
        for result in results[5:]:
            assert not isinstance(result, BaseException)
            assert result[0].outcome is Outcome.JOINED
            assert same(result[1], want)
        assert prefills == 1
        await b.idle()
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
        lease, scores = await b.rank(history, budget_s=30.5)
        assert (lease.outcome, lease.reason) == (Outcome.DEGRADED, Reason.NO_SIGNAL)
        assert lease.first_token == 70
        newest = tokenized(history.events[70:])
        assert same(scores, await b.cold(newest))
        assert b.pool.free_bytes == b.pool.budget_bytes


@pytest.mark.parametrize("where", ["prefill", "reload", "spill", "reserve", "dram_reserve", "verify"])
async def test_no_failure_reaches_the_caller(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted failure in each part: the scores are the cold ones, and nothing is left behind."""
    async with bench() as b:
        history = tokens(100)
        want = await b.cold(history)

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("planted")  # on the device thread: becomes a DeviceError

        def exhausted(*_: object) -> None:
            raise PoolExhausted("planted")

        assert b.dram is not None
        match where:
            case "prefill":
                monkeypatch.setattr(b.engine.arena, "write", broken)
                b.relay.signal(USER, history)
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
        async with b.device_busy():
            leasing = asyncio.create_task(_leased(b, history))
            await asyncio.sleep(0.01)
        lease = await leasing
        assert lease.outcome is Outcome.MISS_FULL
        await b.idle()
        monkeypatch.undo()
        work = Pass(history, lease.first_token, CANDIDATES, 1_700_000_000)
        assert same((await b.engine.rank(work, float("inf"))).logits, want)
        await b.idle()
        if where != "verify":
            assert not b.has_leaked()
        assert b.pool.reserved_bytes == 0
        planted = {"prefill": ["prefill"], "reload": ["reload"], "spill": ["spill"], "verify": ["reload"]}
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
        assert not b.engine.arena._keys.any()
        assert not b.dram.arena._keys.any()
        lease, _ = await b.rank(history)
        assert lease.outcome is Outcome.MISS_FULL


async def test_erasing_one_user_never_touches_another() -> None:
    """What was erased is overwritten before its pages are anybody else's, however busy the device is."""
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
        assert not b.engine.arena._keys.any()
        assert b.relay.signal(UserKey("", "v"), other) is Verdict.PREINFER
        await b.idle()
        lease, scores = await b.rank(other, UserKey("", "v"))
        assert lease.outcome is Outcome.HBM_HIT
        assert same(scores, want)


async def test_a_user_erased_while_ranked_is_answered_and_leaves_nothing() -> None:
    """A pass that keeps its prefix, and one that reads it, are in the queue when their user is erased."""
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
        assert not b.engine.arena._keys.any()
        assert b.pool.free_bytes == b.pool.budget_bytes
        assert not b.has_leaked()


@pytest.mark.parametrize("streams", [1, 3])
async def test_bytes_never_exceed_the_budget(streams: int) -> None:
    """More users than room, signals, ranks and erasures interleaved at random, on one stream and on several."""
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
            b.pool.check()

        await asyncio.gather(*(one(number) for number in range(80)))
        await b.idle()
        assert not b.has_leaked()


async def test_switched_off_it_only_ranks() -> None:
    async with bench(enabled=False) as b:
        history = tokens(50)
        assert b.relay.signal(USER, history) is Verdict.SKIP_DISABLED
        lease, scores = await b.rank(history)
        assert (lease.outcome, lease.reason, lease.keep) == (Outcome.MISS_FULL, Reason.DISABLED, None)
        assert same(scores, await b.cold(history))


@pytest.mark.parametrize(
    ("signal", "reason"),
    [(lambda: tokens(3), Reason.NOT_AT_RISK), (lambda: tokens(600), Reason.REJECTED_FOOTPRINT)],
)
async def test_a_refused_signal_explains_the_miss(signal: Callable[[], Tokens], reason: Reason) -> None:
    async with bench() as b:
        history = signal()
        b.relay.signal(USER, history)
        lease, _ = await b.rank(history)
        assert (lease.outcome, lease.reason) == (Outcome.MISS_FULL, reason)
