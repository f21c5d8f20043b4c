"""A relay over a real engine with small tiers, for the tests of this folder."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import torch

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.arrays import F32
from npu_gr.core.history import Events, UserKey
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.engine.kv_cache.prefix_pool import PrefixPool
from npu_gr.engine.kv_cache.prefix_store import PrefixStore
from npu_gr.engine.kv_cache.tier import DramStore
from npu_gr.engine.kv_cache.tiers import Tiers
from npu_gr.engine.queue import JobOrder, SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.history_tokenizer import ItemVocabulary, Tokens, tokenize
from npu_gr.model.hstu import HSTU
from npu_gr.relay.config import RelayConfig, TriggerConfig
from npu_gr.relay.relay import Lease, Relay
from tests.engine.kv_cache.invariants import check_dram, check_pool
from tests.models import events, tiny_model

USER = UserKey("", "u")
CANDIDATES = np.arange(20, dtype=np.int64)
VOCABULARY = ItemVocabulary(np.arange(300, dtype=np.int64))
PAGE_TOKENS = 16
RING = (30, 5)  # a window of a semi-local ranker, in a ring of three pages behind one of the first


def tokens(num: int, seed: int = 0) -> Tokens:
    return tokenized(events(num, seed))


def tokenized(history: Events) -> Tokens:
    return tokenize(
        history, VOCABULARY, 3, max_tokens=2000, cut_step_tokens=16, reject_unknown=True
    )


def windowed(window: tuple[int, int], seed: int = 0) -> HSTU:
    recent, first = window
    return tiny_model(seed=seed, attention_window_tokens=recent, attention_first_tokens=first)


@dataclass
class Bench:
    """A relay over a real engine, with small tiers."""

    relay: Relay[Tokens]
    engine: RankEngine
    pool: PrefixPool
    dram: DramStore | None
    errors: list[str]

    async def rank(
        self, history: Tokens, user: UserKey = USER, budget_s: float = 30.0
    ) -> tuple[Lease, F32]:
        deadline_at = time.monotonic() + budget_s
        async with self.relay.lease(user, history, len(CANDIDATES), deadline_at) as lease:
            work = RankPass(
                history,
                lease.first_token,
                CANDIDATES,
                1_700_000_000,
                cached=lease.cached,
                keep=lease.keep,
            )
            scored = await self.engine.rank(work, deadline_at)
        return lease, scored.logits

    async def cold(self, history: Tokens) -> F32:
        return (
            await self.engine.rank(RankPass(history, 0, CANDIDATES, 1_700_000_000), float("inf"))
        ).logits

    async def idle(self) -> None:
        """Every prefill job and spill has ended."""
        await self.relay.settled()

    def has_leaked(self) -> bool:
        check_pool(self.pool)
        if self.dram is not None:
            check_dram(self.dram)
        return self.relay.is_busy or bool(self.pool.reserved_bytes)

    @asynccontextmanager
    async def next_version(self, window: tuple[int, int]) -> AsyncIterator[Bench]:
        """Another model over the same tiers and scheduler."""
        model = windowed(window, seed=1)
        engine = RankEngine(model, CPUBackend(), self.engine.scheduler, self.engine.arena)
        settings = RelayConfig(), TriggerConfig(min_prefix_tokens=4, policy="always")
        relay = Relay(*settings, engine, self.relay.tiers, "v2")
        self.relay.take_over()
        yield Bench(relay, engine, self.pool, self.dram, self.errors)
        await relay.stop()

    @asynccontextmanager
    async def device_busy(self) -> AsyncIterator[None]:
        busy, go = threading.Event(), threading.Event()

        def hold() -> None:
            busy.set()
            go.wait(10)

        task = asyncio.create_task(self.engine.scheduler.call(hold, float("inf"), JobOrder(0.0)))
        await asyncio.to_thread(busy.wait, 10)
        try:
            yield
        finally:
            go.set()
            await task


@asynccontextmanager
async def bench(
    num_pages: int = 32,
    dram_pages: int = 32,
    max_inflight: int = 8,
    streams: int = 1,
    window: tuple[int, int] = (0, 0),
    store: PrefixStore | None = None,
    version: str = "v1",
    dtype: str = "float32",
    **config: object,
) -> AsyncIterator[Bench]:
    """Open a relay; `window`: recent and first tokens, 0 = full attention; `dtype`: of pages."""
    model = windowed(window)
    layout = KVLayout(
        num_layers=model.config.num_layers,
        num_heads=2,
        qk_dim=8,
        v_dim=16,
        page_tokens=PAGE_TOKENS,
        dtype=dtype,
        window_tokens=model.config.attention_window_tokens,
        first_tokens=model.config.attention_first_tokens,
    )
    cpu = torch.device("cpu")
    arena = KVArena(layout, num_pages, cpu)
    engine = RankEngine(
        model,
        CPUBackend(),
        Scheduler(SchedulerConfig(streams=streams, prefill_chunk_tokens=64)),
        arena,
    )
    relay_config = RelayConfig(**config)  # type: ignore[arg-type]
    pool = PrefixPool(arena, num_pages * layout.page_bytes, relay_config.t_life_s, time.monotonic)
    dram = None
    if dram_pages:
        dram = DramStore(
            KVArena(layout, dram_pages, cpu),
            ttl_s=60.0,
            ttl_jitter_ratio=0.1,
            seed=0,
            clock=time.monotonic,
        )
    trigger = TriggerConfig(min_prefix_tokens=4, max_inflight=max_inflight, policy="always")
    relay = Relay(relay_config, trigger, engine, Tiers(pool, dram), version, store=store)
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
