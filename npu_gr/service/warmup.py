"""Verify and warm up a model before its first request, on borrowed pages.

In a reload another model serves meanwhile, whose requests have priority.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import overload

import numpy as np

from npu_gr.backend.base import Backend
from npu_gr.core.errors import PoolExhausted
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.history import Events, UserKey
from npu_gr.core.served import AttentionWay
from npu_gr.engine.attention import NEW_TOKENS, Trial, choose_way, possible
from npu_gr.engine.graph_capture import capture_graphs
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.kv_cache.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.engine.kv_cache.tier import DramEntry, DramStore, PrefixKey
from npu_gr.engine.rank_engine import RankEngine
from npu_gr.engine.sanity import check_ranker, int8_drift, parity
from npu_gr.engine.ways import PLAIN
from npu_gr.model.config import HSTUConfig
from npu_gr.model.history_tokenizer import ItemVocabulary, Tokens, tokenize
from npu_gr.service.config import Config

log = logging.getLogger(__name__)

SELF_TEST_TOKENS = 256
RESERVE_S = 30.0  # a self-test waits this long for free pages
WARM_UP_LENGTHS = (16, 128, 512, 1024)
WARM_UP_CANDIDATES = (8, 128)
MOST_CANDIDATES = 512  # of ranks that measure implementations of attention


async def verify(
    engine: RankEngine,
    vocabulary: ItemVocabulary,
    pool: PrefixPool,
    dram: DramStore | None,
    version: str,
    config: Config,
) -> None:
    """Run the self-tests (parity only with a relay) and the warm-up on seeded histories.

    Requests have priority.
    """
    shape = engine.model.config
    longest = min(shape.max_history_tokens, max(WARM_UP_LENGTHS))
    tokens = seeded_tokens(vocabulary, shape, longest)
    head = tokens[: min(longest, SELF_TEST_TOKENS)]
    candidates = np.unique(np.random.default_rng(1).integers(0, shape.num_items, 32))
    histories = (
        [head, seeded_tokens(vocabulary, shape, len(head), seed=2)]
        if shape.num_items > 1
        else [head]
    )
    await check_ranker(
        engine, histories, candidates, shape.tasks, f"checkpoint {config.checkpoint}"
    )
    drift = 0.0
    if engine.arena.layout.dtype == "int8":
        limit = config.service.selfcheck_max_int8_drift
        rounding = await int8_drift(engine, head, candidates, limit)
        log.info("keys and values in int8 move scores by %.1e of their spread", rounding)
    if config.relay.enabled:
        async with borrowed_pages(pool, dram, version, len(head)) as (runs, dram_runs):
            drift = await parity(
                engine, runs, None if dram is None else dram.arena, dram_runs, head, candidates
            )
            if dram is not None:
                await engine.measure_copy(dram.arena, dram_runs, runs, len(head))
    began_at = time.perf_counter()
    lengths = [n for n in WARM_UP_LENGTHS if n <= longest] or [longest]
    cost = await engine.warm_up(tokens, lengths, WARM_UP_CANDIDATES)
    device = engine.scheduler.config
    shapes = engine.backend.graph_shapes(
        device.max_batch_requests, shape.max_history_tokens, device.prefill_chunk_tokens
    )
    if shapes:
        whole = seeded_tokens(vocabulary, shape, shape.max_history_tokens)
        async with borrowed_pages(pool, None, version, 1) as ((page, *_), _):
            await capture_graphs(engine, shapes, whole, page)
    log.info(
        "parity %.1e of the logits' spread; warm-up %.1f s; full rank of 1,000 tokens and 100 "
        "candidates %.1f ms; DRAM to HBM %.1f GB/s",
        drift,
        time.perf_counter() - began_at,
        cost.full_s(1000, 100) * 1e3,
        engine.copy_bytes_per_s / 1e9,
    )


async def choose_attention(
    engine: RankEngine,
    backend: Backend,
    vocabulary: ItemVocabulary,
    pool: PrefixPool,
    version: str,
    config: Config,
) -> tuple[AttentionWay, ...]:
    """Choose the engine's implementation of attention, and return those that were tried.

    If there is a choice, they are measured on the longest history and the most candidates.

    Raises:
        ConfigError: the configured `attention` cannot run this ranker, or its results differ.
        DeviceError: no implementation works.
    """
    ways = possible(engine, backend, config.attention)
    if ways == (PLAIN,) or (config.attention == "auto" and len(ways) == 1):
        engine.backend = backend.running(ways[0])
        return ()
    shape = engine.model.config
    layout = pool.arena.layout
    num_tokens = min(
        shape.max_history_tokens, pool.budget_bytes // layout.page_bytes * layout.page_tokens
    )
    cached = max(1, num_tokens - NEW_TOKENS)
    chunk = min(cached, engine.scheduler.config.prefill_chunk_tokens)
    num_candidates = min(config.server.max_candidates, MOST_CANDIDATES)
    candidates = np.random.default_rng(1).integers(0, shape.num_items, num_candidates)
    tokens, other = (seeded_tokens(vocabulary, shape, num_tokens, seed) for seed in range(2))
    async with borrowed_pages(pool, None, version, num_tokens) as (runs, _):
        return await choose_way(
            engine, backend, ways, Trial(tokens, cached, chunk, candidates, runs, other)
        )


@asynccontextmanager
async def borrowed_pages(
    pool: PrefixPool, dram: DramStore | None, version: str, num_tokens: int
) -> AsyncIterator[tuple[tuple[PageRun, ...], tuple[PageRun, ...]]]:
    """Borrow pages of both tiers for the block; none of an absent DRAM tier."""
    key = PrefixKey(UserKey("", ""), version, pool.arena.layout.layout_id, "self-test")
    entry = await _reserved(pool, key, num_tokens)
    try:
        room = None if dram is None else await _reserved(dram, key, num_tokens)
        try:
            yield entry.runs, () if room is None else room.runs
        finally:
            if dram is not None and room is not None:
                dram.abandon(room)
    finally:
        pool.abandon(entry)


@overload
async def _reserved(tier: PrefixPool, key: PrefixKey, num_tokens: int) -> PrefixEntry: ...
@overload
async def _reserved(tier: DramStore, key: PrefixKey, num_tokens: int) -> DramEntry: ...
async def _reserved(
    tier: PrefixPool | DramStore, key: PrefixKey, num_tokens: int
) -> PrefixEntry | DramEntry:
    """Reserve pages, waiting for live prefixes to release theirs."""
    give_up_at = time.monotonic() + RESERVE_S
    while True:
        try:
            return tier.reserve(key, num_tokens, is_own=True)
        except PoolExhausted:
            if time.monotonic() > give_up_at:
                raise
        await asyncio.sleep(0.05)


def seeded_tokens(
    vocabulary: ItemVocabulary, shape: HSTUConfig, num_tokens: int, seed: int = 0
) -> Tokens:
    """Make a reproducible history of the model's items.

    Args:
        vocabulary: Vocabulary of the model.
        shape: Shape of the model.
        num_tokens: Length of the history, including user tokens.
        seed: Seed of the history.
    """
    random = np.random.default_rng(seed)
    features = ModelFeatures(shape.features, shape.num_user_tokens)
    per_event = shape.tokens_per_event
    num_events = max(-(-(num_tokens - features.num_user_tokens) // per_event), 1)
    events = Events.make(
        vocabulary.ids_of(random.integers(0, shape.num_items, num_events)),
        random.integers(0, len(shape.actions), num_events),
        np.cumsum(random.integers(0, 86_400, num_events)),
    )
    tokens = tokenize(
        events,
        vocabulary,
        len(shape.actions),
        max_tokens=num_events * per_event,
        cut_step_tokens=1,
        reject_unknown=True,
        features=features,
        tokens_per_event=per_event,
    )
    return tokens[:num_tokens]
