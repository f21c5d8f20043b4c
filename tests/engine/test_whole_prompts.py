"""A T5 generator: equals brute force, gives the same bits from every tier, leaks no page."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.core.errors import DeadlineExceeded
from npu_gr.core.history import UserKey
from npu_gr.core.request import Outcome, Reason, Verdict
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import (
    Frame,
    GeneratedItems,
    GenerateEngine,
    GeneratePass,
    Generator,
    Prompt,
    layout_of,
    make_prompt,
)
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.prefix_pool import PrefixPool
from npu_gr.engine.kv_cache.tier import DramStore
from npu_gr.engine.kv_cache.tiers import Tiers
from npu_gr.engine.queue import JobOrder, SchedulerConfig
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model import t5
from npu_gr.model.generative import UnsharedKV
from npu_gr.model.t5 import T5Config
from npu_gr.relay.config import RelayConfig, TriggerConfig
from npu_gr.relay.relay import Lease, Relay
from tests.encoder_decoders import Encoded
from tests.engine.kv_cache.invariants import check_pool

CPU = CPUBackend()
USER = UserKey("", "u")
FRAME = Frame((2, 19), (1,))  # begin, the user's, end
HISTORY = [0, 7, 21, 70, 7, 14]


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> t5.T5:
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=20,
        dim=16,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        head_dim=8,
        mlp_dim=32,
        activation="relu",
        is_gated=False,
        num_buckets=8,
        max_distance=20,
        norm_eps=1e-6,
        start_token=0,
        scales_head=True,
    )
    made = t5.T5(config).to(dtype).eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.7)
    return made


def catalogue() -> Trie:
    sids = np.random.default_rng(0).integers(0, 5, (60, 3))
    return build_trie(sids, np.arange(60) * 7, Codebooks.stacked([5] * 3, first_token=3))


def prompt_of(trie: Trie, history: list[int]) -> Prompt:
    return make_prompt(trie, np.array(history), 60, 4, frame=FRAME, is_divisible=False)


def brute_force(decoder: t5.T5, trie: Trie, prompt: Prompt) -> dict[tuple[int, ...], float]:
    """The log-probability of every semantic ID: a row for each, no search."""
    encoded = Encoded(decoder, prompt.tokens)
    sids = torch.from_numpy(trie.sid_of(np.arange(len(trie.leaf_ptr) - 1)).astype(np.int64))
    num_layers, num_heads, head_dim = decoder.kv_shape
    keys, values = torch.zeros(2, num_layers, len(sids), trie.num_levels, num_heads, head_dim)
    total, hidden = torch.zeros(len(sids)), encoded.begun.hidden.expand(len(sids), -1)
    for level in range(trie.num_levels):
        tokens = trie.codebooks.vocab_base[level] + sids[:, level]
        total += decoder.logits(hidden).log_softmax(1).gather(1, tokens[:, None])[:, 0]
        own = UnsharedKV(slabs=lambda layer: (keys[layer], values[layer]), step=level)
        hidden = decoder.decode(CPU, [encoded.step(tokens, own)])
    return dict(zip(map(tuple, sids.tolist()), total.tolist(), strict=True))


@asynccontextmanager
async def relayed(
    num_pages: int = 60, max_beams: int = 125, **limits: Any
) -> AsyncIterator[tuple[Relay[Prompt], GenerateEngine, PrefixPool]]:
    decoder = model()
    arena = KVArena(layout_of(decoder, page_tokens=4), num_pages, CPU.device)
    scheduling = SchedulerConfig(**limits)
    scheduler = Scheduler(scheduling)
    rows = max_beams * scheduling.max_batch_requests
    engine = GenerateEngine(
        Generator(decoder, CPU, max_beams, 3, scheduling.streams, rows, 60), scheduler, arena
    )
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
    relay: Relay[Prompt],
    engine: GenerateEngine,
    trie: Trie,
    prompt: Prompt,
    user: UserKey = USER,
    width: int = 125,
) -> tuple[Lease, GeneratedItems]:
    deadline_at = time.monotonic() + 30
    async with relay.lease(user, prompt, width, deadline_at) as lease:
        work = GeneratePass(
            trie=trie,
            tables=Tables.upload(trie, CPU.device),
            prompt=prompt,
            options=SearchOptions(width=width),
            num_items=60,
            cached=lease.cached,
            keep=lease.keep,
        )
        return lease, (await engine.generate(work, deadline_at)).value


def same_bits(got: GeneratedItems, want: GeneratedItems) -> None:
    assert got.item_ids.tolist() == want.item_ids.tolist()
    assert got.scores.tobytes() == want.scores.tobytes()


async def drop_all(pool: PrefixPool) -> None:
    await asyncio.sleep(0)
    for entry in pool.find(USER, "v1", pool.arena.layout.layout_id):
        pool.drop(entry)


def test_a_prompt_has_a_frame_and_the_newest_items_that_fit_with_it() -> None:
    trie = catalogue()
    items = [
        [code + 3 + 5 * level for level, code in enumerate(sid)]
        for sid in trie.sid_of(trie.find(np.array(HISTORY)))
    ]
    flat = list(itertools.chain(*items))
    prompt = prompt_of(trie, HISTORY)
    assert prompt.tokens.tolist() == [2, 19, *flat, 1]
    assert prompt.newest(len(prompt) - 1, 3).tokens.tolist() == [2, 19, *flat[3:], 1]
    assert prompt.newest(1, 3).tokens.tolist() == [2, 19, *flat[-3:], 1]
    short = make_prompt(trie, np.array(HISTORY), 13, 4, frame=FRAME, is_divisible=False)
    # three items: the start moves in steps of one
    assert short.tokens.tolist() == [2, 19, *flat[-9:], 1]
    assert short.cut_items == 3
    assert not len(make_prompt(trie, np.array([1]), 11, frame=FRAME))


def test_no_prompt_is_the_beginning_of_another() -> None:
    """Not even of one whose tokens begin with all of its own."""
    trie = catalogue()
    shorter, longer, again = (
        make_prompt(trie, np.array(history), 60, is_divisible=False)
        for history in (HISTORY[:-1], HISTORY, HISTORY)
    )
    assert longer.tokens[: len(shorter)].tolist() == shorter.tokens.tolist()
    assert longer.fingerprint(len(longer)) == again.fingerprint(len(again))
    for num_tokens in range(1, len(shorter) + 1):
        assert longer.fingerprint(num_tokens) != shorter.fingerprint(len(shorter))
        assert longer.fingerprint(num_tokens) != longer.fingerprint(len(longer))


async def test_a_beam_as_wide_as_the_catalogue_is_brute_force() -> None:
    trie = catalogue()
    async with relayed() as (relay, engine, _):
        for history in ([21], HISTORY):
            prompt = prompt_of(trie, history)
            want = brute_force(engine.generator.model, trie, prompt)  # type: ignore[arg-type]
            _, got = await ask(relay, engine, trie, prompt)
            assert sorted(map(tuple, got.sids.tolist())) == sorted(
                map(tuple, trie.sid_of(trie.find(np.arange(60) * 7)).tolist())
            )
            np.testing.assert_allclose(
                got.scores, [want[tuple(sid)] for sid in got.sids.tolist()], rtol=1e-5
            )
            assert (np.diff(got.scores) <= 0).all()


async def test_every_way_to_the_prompt_gives_the_cold_bits() -> None:
    """Cold, kept by an earlier request, from DRAM, joined after a signal, in scratch pages.

    A longer one is anew.
    """
    trie = catalogue()
    prompt, longer = prompt_of(trie, HISTORY), prompt_of(trie, [*HISTORY, 28])
    async with relayed() as (relay, engine, pool):
        lease, cold = await ask(relay, engine, trie, prompt)
        assert (lease.outcome, lease.cached) == (Outcome.MISS_FULL, None)
        lease, got = await ask(relay, engine, trie, prompt)
        assert lease.outcome is Outcome.HBM_HIT
        same_bits(got, cold)
        await relay.settled()  # the copy to DRAM
        await drop_all(pool)
        lease, got = await ask(relay, engine, trie, prompt)
        assert lease.outcome is Outcome.DRAM_HIT
        same_bits(got, cold)
        lease, after = await ask(relay, engine, trie, longer)
        assert (lease.outcome, lease.reason, lease.cached) == (
            Outcome.MISS_FULL,
            Reason.FINGERPRINT_MISMATCH,
            None,
        )
        await relay.erase(USER)
        await relay.settled()  # the copy of the longer one read its pages
        assert not any(chunk.any() for chunk in engine.arena._keys)
        lease, got = await ask(relay, engine, trie, longer)
        assert lease.outcome is Outcome.MISS_FULL
        same_bits(got, after)
        await relay.erase(USER)
        assert relay.signal(USER, prompt) is Verdict.PREINFER
        lease, got = await ask(relay, engine, trie, prompt)
        assert (lease.outcome, lease.reason) == (Outcome.JOINED, Reason.COMPUTE)
        same_bits(got, cold)
        assert relay.signal(USER, longer) is Verdict.PREINFER  # and no EXTEND
        lease, got = await ask(relay, engine, trie, longer)
        assert lease.outcome is Outcome.JOINED
        same_bits(got, after)
        check_pool(pool)
    async with relayed(num_pages=1) as (relay, engine, pool):
        lease, got = await ask(relay, engine, trie, prompt)  # no room to keep it
        assert (lease.outcome, lease.keep) == (Outcome.MISS_FULL, None)
        same_bits(got, cold)


@pytest.mark.parametrize(
    "limits", [{"max_batch_requests": 4}, {"streams": 3, "max_batch_requests": 2}], ids=str
)
async def test_many_at_once_find_what_each_finds_alone(limits: dict[str, int]) -> None:
    trie, random = catalogue(), np.random.default_rng(0)
    histories = [random.choice(trie.leaf_item, 1 + number % 7).tolist() for number in range(12)]
    async with relayed() as (relay, engine, _):
        alone = [
            (await ask(relay, engine, trie, prompt_of(trie, each), UserKey("", "a"), 20))[1]
            for each in histories
        ]
    sizes = list[int]()
    async with relayed(20, **limits) as (relay, engine, pool):
        engine.scheduler.on_batch = lambda _kind, size, _rows: sizes.append(size)
        asks = [ask(relay, engine, trie, prompt_of(trie, each), width=20) for each in histories]
        for (_, got), want in zip(await asyncio.gather(*asks), alone, strict=True):
            assert np.array_equal(got.item_ids, want.item_ids)
            np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)
        await relay.settled()
        check_pool(pool)
    assert max(sizes) > 1


async def test_a_prefill_lets_others_run_between_its_steps_and_gives_the_same_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long prompt is as many steps as a decoder's would be.

    Cut off in the middle it holds nothing.
    """
    monkeypatch.setattr(t5, "ROWS", 8)
    trie = catalogue()
    random = np.random.default_rng(1)
    prompt = make_prompt(
        trie, random.choice(trie.leaf_item, 60), 150, frame=FRAME, is_divisible=False
    )
    async with relayed(num_pages=120, prefill_chunk_tokens=64) as (_, engine, pool):
        ran = list[str]()
        engine.scheduler.on_worked = lambda kind, _seconds: ran.append(kind)
        runs = pool._pages.allocate(engine.arena.layout.pages(len(prompt)))
        assert await engine.prefill(prompt, runs, 1e9, JobOrder(1e9)) == len(prompt)
        assert ran == ["prefill"] * 3
        kept = [
            [plane.clone() for plane in engine.arena.views(layer, runs, len(prompt))[0]]
            for layer in range(2)
        ]
        engine.arena.zero(runs)
        order = JobOrder(1e9)
        stopped = list[int]()

        def stop(_kind: str, _seconds: float) -> None:
            stopped.append(1)
            loop.call_soon_threadsafe(order.cancel_at_step)

        loop = asyncio.get_running_loop()
        engine.scheduler.on_worked = stop
        encoded = await engine.prefill(prompt, runs, 1e9, order)
        assert encoded == (len(prompt) if len(stopped) == 3 else 0)
        engine.scheduler.on_worked = lambda _kind, _seconds: None
        assert await engine.prefill(prompt, runs, 1e9, JobOrder(1e9), 0) == len(prompt)
        for layer, planes in enumerate(kept):
            for plane, again in zip(
                planes, engine.arena.views(layer, runs, len(prompt))[0], strict=True
            ):
                assert torch.equal(plane, again)
        pool._pages.free(runs)


async def test_what_ends_in_the_middle_of_an_encoding_leaves_no_page_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an erasure, a cancelled rank or a deadline, the next rank gets the cold items."""
    monkeypatch.setattr(t5, "ROWS", 8)
    trie = catalogue()
    prompt = make_prompt(
        trie,
        np.random.default_rng(1).choice(trie.leaf_item, 40),
        120,
        frame=FRAME,
        is_divisible=False,
    )
    async with relayed(num_pages=120, prefill_chunk_tokens=64) as (relay, engine, pool):
        engine.generator.max_prompt_tokens = 120
        budget = pool.free_bytes
        worked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def has_worked(_kind: str, _seconds: float) -> None:
            loop.call_soon_threadsafe(worked.set)

        engine.scheduler.on_worked = has_worked
        assert relay.signal(USER, prompt) is Verdict.PREINFER
        await worked.wait()  # at least one step has run
        await relay.erase(USER)
        await relay.settled()
        check_pool(pool)
        assert pool.free_bytes == budget
        assert relay.signal(USER, prompt) is Verdict.PREINFER
        waiting = asyncio.create_task(ask(relay, engine, trie, prompt))
        await asyncio.sleep(0)
        # the rank that joined goes, the prefill of its signal ends as if it had not come
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await relay.settled()
        check_pool(pool)
        assert pool.reserved_bytes == 0
        await drop_all(pool)
        with pytest.raises(DeadlineExceeded):
            await engine.prefill(
                prompt, pool._pages.allocate(0), time.monotonic() - 1, JobOrder(0.0)
            )
        assert pool.free_bytes == budget
