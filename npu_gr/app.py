"""The composition root: builds everything once, starts it, drains it, stops it. The only place that constructs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from aiohttp import web
from prometheus_client import CollectorRegistry

from npu_gr import config as configuration
from npu_gr.backend.base import Backend
from npu_gr.backend.choose import choose
from npu_gr.catalog.items import ItemVocabulary
from npu_gr.catalog.tokens import Tokens, tokenize
from npu_gr.config import Config
from npu_gr.engine.engine import Engine
from npu_gr.engine.generate import GenerateEngine, Generator, layout_of
from npu_gr.engine.selftest import parity
from npu_gr.errors import ConfigError
from npu_gr.features.store import open_store
from npu_gr.generation import GenerateConfig, Generation
from npu_gr.kv.arena import KVArena
from npu_gr.kv.dram_store import DramStore
from npu_gr.kv.layout import KVLayout
from npu_gr.kv.prefix_pool import PrefixPool
from npu_gr.metrics.catalogue import Metrics
from npu_gr.model import hf
from npu_gr.model.config import HSTUConfig, inexact_fields
from npu_gr.model.weights import Checkpoint
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.relay.relay import Relay
from npu_gr.request import Events, ModelInfo
from npu_gr.server.routes import build_web_app
from npu_gr.server.run import serve
from npu_gr.service import Service

log = logging.getLogger(__name__)

SELF_TEST_TOKENS = 256
WARM_UP_LENGTHS = (16, 128, 512, 1024)
WARM_UP_CANDIDATES = (8, 128)


@asynccontextmanager
async def instance(config: Config) -> AsyncIterator[tuple[web.Application, Service]]:
    """A ready instance: model loaded, tiers allocated, parity tested, warmed up; stopped at the block's end.

    Raises:
        ConfigError: a setting, a file or a device is not as configured; nothing is left running.
    """
    backend = choose(config.backend, config.native)
    torch.set_num_threads(config.threads)
    checkpoint = load_checkpoint(Path(config.checkpoint))
    shape = checkpoint.model.config
    if config.relay.enabled and (reasons := inexact_fields(shape)):
        raise ConfigError("; ".join(reasons))
    _place(checkpoint, config, backend)
    layout = kv_layout(shape, config, checkpoint, backend)
    pages = config.kv.hbm_bytes // layout.page_bytes
    test_pages = layout.pages(SELF_TEST_TOKENS)
    if pages < test_pages:
        raise ConfigError(
            f"kv.hbm_bytes: {config.kv.hbm_bytes} holds {pages} pages of {layout.page_bytes} bytes, "
            f"at least {test_pages} are needed"
        )
    arena = KVArena(layout, pages, backend.device, pack=backend.pack_kv)
    engine = Engine(checkpoint.model, backend, config.scheduler, arena)
    pool = PrefixPool(arena, config.kv.hbm_bytes, config.relay.t_life_s, time.monotonic)
    dram = _dram(config, config.kv.dram_bytes, layout, backend)
    relay = Relay(config.relay, config.trigger, engine, pool, dram, checkpoint.version)
    metrics = Metrics(CollectorRegistry(), {"rank": config.slo.rank_s, "signal": config.slo.signal_s})
    vocabulary = ItemVocabulary(checkpoint.item_ids)
    info = ModelInfo(
        name=checkpoint.name,
        version=checkpoint.version,
        tasks=shape.tasks,
        actions=shape.actions,
        num_items=shape.num_items,
        max_history_tokens=shape.max_history_tokens,
        device=backend.name,
        dtype=layout.dtype,
        kernels=backend.kernels,
    )
    store = await open_store(config.features)
    try:
        generation = None if config.generate is None else _generation(config, config.generate, engine, metrics)
        table = configuration.to_table(config)
        service = Service(config.service, info, vocabulary, engine, relay, store, metrics, table, generation)
        observe(metrics, engine, pool, dram, relay, info)
        engine.scheduler.start()
        try:
            await _prove(engine, dram, shape, vocabulary, config.relay.enabled)
            if generation is not None:
                await generation.start()
            service.set_ready()
            try:
                yield build_web_app(service, config.server, metrics), service
            finally:
                service.set_ready("stopping")
                await service.stop()
        finally:
            await engine.scheduler.stop()
    finally:
        if store is not None:
            await store.close()


async def run(config: Config, ready: asyncio.Event | None = None) -> None:
    """Serve until SIGTERM, then drain and stop."""
    async with instance(config) as (app, service):

        async def drain() -> None:
            service.set_ready("draining")

        await serve(app, config.server, on_drain=drain, ready=ready)


def kv_layout(shape: HSTUConfig, config: Config, checkpoint: Checkpoint, backend: Backend) -> KVLayout:
    """How prefix KV of this model lies in a page."""
    dtype = config.kv.dtype or str(checkpoint.model.dtype).removeprefix("torch.")
    return KVLayout(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
        page_tokens=config.kv.page_tokens,
        dtype=dtype,
        arrangement=backend.arrangement(getattr(torch, dtype), config.kv.page_tokens),
    )


def _generation(config: Config, section: GenerateConfig, engine: Engine, metrics: Metrics) -> Generation:
    """The generator beside the ranker: its own pages and relay, the same device thread."""
    backend, folder = engine.backend, Path(section.checkpoint)
    decoder = hf.load(folder, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32).to(backend.device).eval()
    last_token = section.first_token + sum(section.codes)
    if last_token > decoder.config.vocab_size:
        raise ConfigError(
            f"generate.codes: the last token would be {last_token - 1}, "
            f"the vocabulary of {folder} has {decoder.config.vocab_size}"
        )
    layout = layout_of(decoder, config.kv.page_tokens)
    pages = section.hbm_bytes // layout.page_bytes
    if pages < 1:
        raise ConfigError(f"generate.hbm_bytes: {section.hbm_bytes} holds no page of {layout.page_bytes} bytes")
    arena = KVArena(layout, pages, backend.device)
    pool = PrefixPool(arena, section.hbm_bytes, config.relay.t_life_s, time.monotonic)
    dram = _dram(config, section.dram_bytes, layout, backend)
    generator = Generator(decoder, backend, section.max_beams, len(section.codes))
    generate_engine = GenerateEngine(generator, engine.scheduler, arena)
    version = hf.version(folder)
    relay = Relay(config.relay, config.trigger, generate_engine, pool, dram, version)
    relay.on_error = metrics.relay_error
    metrics.observe_tier("generate_hbm", pool, {"free": lambda: pool.free_bytes, "live": lambda: pool.live_bytes})
    if dram is not None:
        metrics.observe_tier("generate_dram", dram, {"free": lambda: dram.free_bytes, "live": lambda: dram.live_bytes})
    return Generation(section, folder.name, version, generate_engine, relay)


def _place(checkpoint: Checkpoint, config: Config, backend: Backend) -> None:
    """The model in its dtype, on its device, with side features folded in."""
    if config.dtype != "checkpoint":
        checkpoint.model.cast(getattr(torch, config.dtype))
    checkpoint.model.to(backend.device).eval().freeze_items()


def _dram(config: Config, num_bytes: int, layout: KVLayout, backend: Backend) -> DramStore | None:
    pages = num_bytes // layout.page_bytes
    if not pages:
        return None
    arena = KVArena(layout, pages, torch.device("cpu"), pinned=backend.pins_host_memory)
    return DramStore(
        arena,
        ttl_s=config.kv.dram_ttl_s,
        ttl_jitter_ratio=config.kv.dram_ttl_jitter_ratio,
        seed=0,
        clock=time.monotonic,
    )


async def _prove(
    engine: Engine, dram: DramStore | None, shape: HSTUConfig, vocabulary: ItemVocabulary, is_cached: bool
) -> None:
    """Parity self-test (where prefixes are cached) and warm-up, on a seeded history."""
    longest = min(shape.max_history_tokens, max(WARM_UP_LENGTHS))
    tokens = _seeded(shape, vocabulary, longest)
    short = min(longest, SELF_TEST_TOKENS)
    head = Tokens(tokens.events[:short], tokens.rows[:short], tokens.report)
    candidates = np.random.default_rng(1).integers(0, shape.num_items, 32)
    drift = await parity(engine, None if dram is None else dram.arena, head, candidates) if is_cached else 0.0
    began_s = time.perf_counter()
    cost = await engine.warm_up(tokens, [n for n in WARM_UP_LENGTHS if n <= longest], WARM_UP_CANDIDATES)
    log.info(
        "parity %.1e of the logits' spread; warm-up %.1f s; 1,000 tokens and 100 candidates: %.1f ms full",
        drift,
        time.perf_counter() - began_s,
        cost.full_s(1000, 100) * 1e3,
    )


def _seeded(shape: HSTUConfig, vocabulary: ItemVocabulary, num_tokens: int) -> Tokens:
    random = np.random.default_rng(0)
    events = Events.make(
        vocabulary.ids[random.integers(0, shape.num_items, num_tokens)],
        random.integers(0, len(shape.actions), num_tokens),
        np.cumsum(random.integers(0, 86_400, num_tokens)),
    )
    return tokenize(
        events,
        vocabulary,
        len(shape.actions),
        max_tokens=num_tokens,
        cut_step_tokens=1,
        refuse_unknown=True,
    )


def observe(
    metrics: Metrics, engine: Engine, pool: PrefixPool, dram: DramStore | None, relay: Relay[Tokens], info: ModelInfo
) -> None:
    """Connect what changes by itself to the metrics; nothing below `app` knows them but the service."""
    engine.scheduler.on_batch = metrics.batch_done
    relay.on_error = metrics.relay_error
    pool.on_evict = lambda entry: None if entry.consumed else metrics.prefill_wasted()
    metrics.observe_queue(lambda: engine.scheduler.depth)
    metrics.observe_tier(
        "hbm",
        pool,
        {
            "free": lambda: pool.free_bytes,
            "reserved": lambda: pool.reserved_bytes,
            "live": lambda: pool.live_bytes,
            "evictable": lambda: pool.evictable_bytes,
        },
    )
    if dram is not None:
        metrics.observe_tier("dram", dram, {"free": lambda: dram.free_bytes, "live": lambda: dram.live_bytes})
    metrics.build_info(info)
