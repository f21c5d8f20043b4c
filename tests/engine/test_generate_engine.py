"""Generates: cold equals cached, filters hold, and requests over a limit are rejected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.filters import allow_items
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.core.errors import DeadlineExceeded, Unprocessable
from npu_gr.core.history import UserKey
from npu_gr.core.request import Outcome, Reason, Verdict
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import (
    GeneratedItems,
    GenerateEngine,
    GeneratePass,
    Generator,
    Prompt,
    PromptKV,
    layout_of,
    make_prompt,
)
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.kv_cache.prefix_pool import PrefixPool
from npu_gr.engine.kv_cache.tier import DramStore, PrefixKey
from npu_gr.engine.kv_cache.tiers import Tiers
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.queue import JobOrder, SchedulerConfig
from npu_gr.engine.scheduler import Scheduler
from npu_gr.relay.config import RelayConfig, TriggerConfig
from npu_gr.relay.relay import Lease, Relay
from tests.engine.kv_cache.invariants import check_pool
from tests.engine.test_beam_search import model

CPU = CPUBackend()
RUNS = (PageRun(4, 2), PageRun(0, 3))  # pages out of order
MORE = (PageRun(3, 1), PageRun(6, 5))


def catalogue(num_items: int = 60) -> Trie:
    random = np.random.default_rng(0)
    sids = random.integers(0, 5, (num_items, 3))
    return build_trie(sids, np.arange(num_items) * 7, Codebooks.stacked([5] * 3))


class Made(NamedTuple):
    generator: Generator
    arena: KVArena


def made(num_levels: int = 3, max_beams: int = 20) -> Made:
    decoder = model(20)
    arena = KVArena(layout_of(decoder, page_tokens=4), 11, CPU.device)
    return Made(Generator(decoder, CPU, max_beams, num_levels), arena)


def run(
    it: Made,
    trie: Trie,
    history: list[int],
    num_items: int = 10,
    cut: int = 0,
    longest: int = 18,
    **how: Any,
) -> GeneratedItems:
    """`cut`: tokens that are encoded first, into pages of their own."""
    tokens = make_prompt(trie, np.array(history), longest).tokens
    parts: list[PromptKV] = []
    for runs, some in ((RUNS, tokens[:cut]), (MORE, tokens[cut:])):
        if len(some):
            parts.append(PromptKV(it.arena, runs, len(some)))
            it.generator.encode(some, parts[:-1], parts[-1])
    tables, options = Tables.upload(trie, CPU.device), SearchOptions(width=it.generator.max_beams)
    return it.generator.generate(trie, tables, tokens, parts, options, num_items, **how)


def test_history_to_tokens() -> None:
    trie = catalogue()
    sids = trie.sid_of(trie.find(np.array([7, 14])))
    got = make_prompt(trie, np.array([7, 8, 14]), 100)
    assert got.tokens.tolist() == [
        code + 5 * level for sid in sids.tolist() for level, code in enumerate(sid)
    ]
    assert got.unknown_items == 1
    assert make_prompt(trie, np.array([7, 14]), 5).tokens.tolist() == got.tokens.tolist()[3:]
    assert not len(make_prompt(trie, np.array([1, 2]), 5).tokens)


def test_a_prompt_encoded_before_or_in_parts_gives_what_a_cold_one_gives() -> None:
    trie, history = catalogue(), [0, 7, 21, 70, 7]
    cold = run(made(), trie, history)
    it = made()
    run(it, trie, [14, 28, 35, 0])  # another request, whose KV and beams are left behind
    for cut in (3, 5, 14, 15):
        got = run(it, trie, history, cut=cut)
        assert np.array_equal(got.item_ids, cold.item_ids)
        np.testing.assert_allclose(got.scores, cold.scores, rtol=1e-6)
    assert (np.diff(cold.scores) <= 0).all()
    assert not cold.is_cut
    assert np.array_equal(trie.sid_of(trie.find(cold.item_ids)), cold.sids)


def test_items_of_one_semantic_id_come_together() -> None:
    trie = build_trie(
        np.array([[1, 2], [1, 2], [0, 3]]), np.array([9, 4, 5]), Codebooks.stacked([5, 5])
    )
    got = run(made(num_levels=2), trie, [5], num_items=8)
    assert sorted(got.item_ids.tolist()) == [4, 5, 9]
    at = got.item_ids.tolist().index(4)
    assert got.item_ids[at + 1] == 9
    assert got.scores[at] == got.scores[at + 1]
    assert not got.is_cut  # there are no others


def test_a_filter_leaves_what_it_allows() -> None:
    trie = catalogue()
    wanted = np.array([7, 14, 21, 700])
    got = run(made(), trie, [0, 7], allow=allow_items(trie, wanted))
    assert sorted(got.item_ids.tolist()) == [7, 14, 21]
    assert not got.is_cut
    nothing = run(made(), trie, [0, 7], allow=allow_items(trie, np.array([1])))
    assert (len(nothing.item_ids), nothing.sids.shape, nothing.is_cut) == (0, (0, 3), False)


def test_what_does_not_fit_is_rejected() -> None:
    trie, it = catalogue(), made()
    tables = Tables.upload(trie, CPU.device)
    with pytest.raises(Unprocessable, match="beam_width: 21, the limit is 20"):
        it.generator.generate(trie, tables, np.array([1]), [], SearchOptions(width=21), 5)
    with pytest.raises(Unprocessable, match="history: 0 tokens, the model takes 1 to 62"):
        it.generator.generate(trie, tables, np.empty(0, np.int64), [], SearchOptions(width=8), 5)
    with pytest.raises(Unprocessable, match="history: 63 tokens"):
        it.generator.generate(trie, tables, np.ones(63, np.int64), [], SearchOptions(width=8), 5)


# ---- behind a relay

USER = UserKey("", "u")


@asynccontextmanager
async def relayed(
    num_pages: int = 40, **config: int
) -> AsyncIterator[tuple[Relay[Prompt], GenerateEngine, PrefixPool]]:
    decoder = model(20)
    arena = KVArena(layout_of(decoder, page_tokens=4), num_pages, CPU.device)
    limits = SchedulerConfig(**config)
    scheduler = Scheduler(limits)
    generator = Generator(decoder, CPU, 20, 3, limits.streams, 20 * limits.max_batch_requests)
    engine = GenerateEngine(generator, scheduler, arena)
    relaying = RelayConfig(degrade=False)
    pool = PrefixPool(arena, num_pages * arena.layout.page_bytes, relaying.t_life_s, time.monotonic)
    dram = DramStore(
        KVArena(arena.layout, num_pages, CPU.device),
        ttl_s=60.0,
        ttl_jitter_ratio=0.0,
        seed=0,
        clock=time.monotonic,
    )
    relay = Relay(
        relaying,
        TriggerConfig(min_prefix_tokens=3, policy="always"),
        engine,
        Tiers(pool, dram),
        "v1",
    )
    scheduler.start()
    try:
        yield relay, engine, pool
    finally:
        await relay.stop()
        await scheduler.stop()


async def ask(
    relay: Relay[Prompt], engine: GenerateEngine, trie: Trie, prompt: Prompt
) -> tuple[Lease, GeneratedItems]:
    deadline_at, tables = time.monotonic() + 30, Tables.upload(trie, CPU.device)
    async with relay.lease(USER, prompt, 20, deadline_at) as lease:
        work = GeneratePass(
            trie=trie,
            tables=tables,
            prompt=prompt,
            options=SearchOptions(width=20),
            num_items=10,
            cached=lease.cached,
            keep=lease.keep,
        )
        return lease, (await engine.generate(work, deadline_at)).value


async def test_every_way_to_the_prompt_gives_the_cold_items() -> None:
    """Cold, kept, joined, reloaded from DRAM, and a longer history on an old prefix."""
    trie, history = catalogue(), [0, 7, 21, 70, 7, 14]
    prompt = make_prompt(trie, np.array(history), 60)
    longer = make_prompt(trie, np.array([*history, 28, 35]), 60)
    cold, cold_longer = (
        run(made(), trie, history, longest=60),
        run(made(), trie, [*history, 28, 35], longest=60),
    )

    def same(got: GeneratedItems, want: GeneratedItems) -> None:
        assert np.array_equal(got.item_ids, want.item_ids)
        np.testing.assert_allclose(got.scores, want.scores, rtol=1e-6)

    async with relayed() as (relay, engine, pool):
        lease, got = await ask(relay, engine, trie, prompt)
        assert lease.outcome is Outcome.MISS_FULL
        same(got, cold)
        lease, got = await ask(relay, engine, trie, prompt)
        assert lease.outcome is Outcome.HBM_HIT
        same(got, cold)
        lease, got = await ask(relay, engine, trie, longer)
        assert lease.outcome is Outcome.HBM_HIT
        assert lease.cached is not None
        assert lease.cached.num_tokens == len(prompt)
        same(got, cold_longer)
        await relay.settled()  # the copies to DRAM
        await asyncio.sleep(0)
        for entry in pool.find(USER, "v1", pool.arena.layout.layout_id):
            pool.drop(entry)
        lease, got = await ask(relay, engine, trie, prompt)
        assert lease.outcome is Outcome.DRAM_HIT
        same(got, cold)
        await relay.erase(USER)
        assert not any(chunk.any() for chunk in engine.arena._keys)
        assert relay.signal(USER, prompt) is Verdict.PREINFER
        lease, got = await ask(relay, engine, trie, prompt)
        assert (lease.outcome, lease.reason) == (Outcome.MISS_FULL, Reason.NOT_BEGUN)
        same(got, cold)
        check_pool(pool)


@pytest.mark.parametrize("encoded", [3, 9])
async def test_a_generate_goes_on_in_the_pages_of_its_pre_infer(encoded: int) -> None:
    trie, history = catalogue(), [0, 7, 21, 70, 7, 14]
    prompt, tables = make_prompt(trie, np.array(history), 60), Tables.upload(trie, CPU.device)
    async with relayed() as (_, engine, pool):
        entry = pool.reserve(PrefixKey(USER, "v1", pool.arena.layout.layout_id, ""), len(prompt))
        runs = tuple(entry.runs)
        begun = Prompt(prompt.tokens[:encoded], 0)
        assert await engine.prefill(begun, runs, 1e9, JobOrder(1e9)) == encoded
        work = GeneratePass(
            trie=trie, tables=tables, prompt=prompt, options=SearchOptions(width=20), num_items=10,
            keep=runs, cached=CachedPrefix(runs, encoded),
        )  # fmt: skip
        again = replace(work, cached=CachedPrefix(runs, len(prompt)), keep=None)
        for each in (work, again):  # the second reads what the first has left
            got, cold = (
                (await engine.generate(each, 1e9)).value,
                run(made(), trie, history, longest=60),
            )
            assert np.array_equal(got.item_ids, cold.item_ids)
            np.testing.assert_allclose(got.scores, cold.scores, rtol=1e-6)


@pytest.mark.parametrize(
    "limits", [{"max_batch_requests": 4}, {"streams": 3, "max_batch_requests": 2}], ids=str
)
async def test_many_at_once_find_what_each_finds_alone(limits: dict[str, int]) -> None:
    """Batches and streams: prompts of several lengths, some kept, some in scratch pages, mixed."""
    trie, random = catalogue(), np.random.default_rng(0)
    histories = [random.choice(trie.leaf_item, 2 + number % 7).tolist() for number in range(16)]
    alone = [run(made(), trie, history, longest=60) for history in histories]
    sizes = list[int]()
    async with relayed(20, **limits) as (relay, engine, pool):
        engine.scheduler.on_batch = lambda _kind, size, _rows: sizes.append(size)
        asks = [
            ask(relay, engine, trie, make_prompt(trie, np.array(history), 60))
            for history in histories
        ]
        for (_, got), want in zip(await asyncio.gather(*asks), alone, strict=True):
            assert np.array_equal(got.item_ids, want.item_ids)
            np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)
        await relay.settled()
        check_pool(pool)
    assert sum(sizes) == 16
    assert max(sizes) > 1


async def test_the_warm_up_fits_a_cost() -> None:
    trie = catalogue()
    async with relayed() as (_, engine, _):
        cost = await engine.warm_up(trie, Tables.upload(trie, CPU.device), (6, 30, 60), (2, 20))
        assert 0 < cost.full_s(6, 2) <= cost.full_s(60, 20)


async def test_a_request_whose_time_is_up_costs_nothing() -> None:
    trie = catalogue()
    async with relayed() as (_, engine, _):
        work = GeneratePass(
            trie=trie,
            tables=Tables.upload(trie, CPU.device),
            prompt=make_prompt(trie, np.array([0, 7]), 60),
            options=SearchOptions(width=5),
            num_items=5,
        )
        with pytest.raises(DeadlineExceeded):
            await engine.generate(work, time.monotonic() - 1)


def test_a_long_history_begins_at_a_step() -> None:
    trie = catalogue()
    prompts = [make_prompt(trie, np.arange(num) * 7, 24, cut_step_items=4) for num in range(10, 14)]
    assert [prompt.cut_items for prompt in prompts] == [4, 4, 4, 8]
    prompt = prompts[-1]
    newest = prompt.newest(7, 3)
    assert newest.tokens.tolist() == prompt.tokens[-6:].tolist()
