"""Prepare models for serving, at start or for a reload: load, verify, warm up, allocate pages.

A model that is prepared while another version serves shares the pages of that version.
`Prepared.activate` takes the pages over; nothing fails or waits between that and its first
request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from npu_gr.backend.base import BEAM_OPS, Backend
from npu_gr.catalogue.names import EMPTY, ItemNames, load_actions
from npu_gr.core.errors import ConfigError, DataError, DeltaError, Unavailable
from npu_gr.core.kinds import GENERATE, RANK
from npu_gr.core.names import ActionNames
from npu_gr.core.served import AttentionWay, ModelInfo
from npu_gr.engine.attention import possible
from npu_gr.engine.beam_ways import BeamShape, choose_beam_ways
from npu_gr.engine.device_weights import DeviceWeights
from npu_gr.engine.generate_engine import GenerateEngine, Generator, layout_of
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.mooncake import MOST_VALUE_BYTES, open_pool
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.engine.kv_cache.prefix_pool import PrefixPool
from npu_gr.engine.kv_cache.prefix_store import PrefixStore, SealedStore
from npu_gr.engine.kv_cache.tier import DramStore
from npu_gr.engine.kv_cache.tiers import AUTO_RATIO, AUTO_RATIO_OF_TWO, open_tiers
from npu_gr.engine.page_jobs import PageJobs
from npu_gr.engine.queue import JobResult
from npu_gr.engine.rank_engine import RankEngine
from npu_gr.engine.sanity import check_generator, check_weights
from npu_gr.engine.scheduler import Scheduler
from npu_gr.handlers.config import GenerateConfig
from npu_gr.handlers.generation import Generation, warm_up
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.scored_items import ScoredItems
from npu_gr.handlers.served_catalogue import ServedCatalogue
from npu_gr.metrics.registry import Metrics
from npu_gr.model import generators, hf_files
from npu_gr.model.blend import ScoreBlend
from npu_gr.model.config import HSTUConfig, inexact_fields
from npu_gr.model.decoder import Decoder
from npu_gr.model.delta import ModelIdentity
from npu_gr.model.delta_log import DeltaLog
from npu_gr.model.delta_stream import DeltaStream
from npu_gr.model.generative import GenerativeModel
from npu_gr.model.history_tokenizer import ItemVocabulary
from npu_gr.model.hot_rows import HotRows
from npu_gr.model.hstu import HSTU
from npu_gr.model.served_weights import ServedWeights
from npu_gr.model.t5 import T5
from npu_gr.model.weight_stamps import WeightStamps
from npu_gr.model.weights import Checkpoint
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.relay.config import Calibration
from npu_gr.relay.relay import Relay
from npu_gr.service.config import Config
from npu_gr.service.memory import check_generator_fits, check_ranker_fits
from npu_gr.service.warmup import SELF_TEST_TOKENS, borrowed_pages, choose_attention, verify
from npu_gr.vector_search.encoder_index import EncoderIndex

log = logging.getLogger(__name__)

M = TypeVar("M", Ranking, Generation)


def kv_layout(
    shape: HSTUConfig, config: Config, model_dtype: torch.dtype, backend: Backend
) -> KVLayout:
    """Make the page layout of a ranker's prefix KV.

    Args:
        shape: Shape of the model.
        config: Page size and dtype.
        model_dtype: The default dtype.
        backend: Backend, whose kernels determine the arrangement of a page.
    """
    dtype = config.kv_cache.dtype or str(model_dtype).removeprefix("torch.")
    return KVLayout(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        qk_dim=shape.qk_dim,
        v_dim=shape.v_dim,
        page_tokens=config.kv_cache.page_tokens,
        dtype=dtype,
        arrangement=backend.arrangement(getattr(torch, dtype), config.kv_cache.page_tokens),
        window_tokens=shape.attention_window_tokens,
        first_tokens=shape.attention_first_tokens,
    )


@dataclass(frozen=True, slots=True)
class Prepared(Generic[M]):
    """A model that is ready to serve.

    `activate` makes it take over the pages, and returns it; it cannot fail. A field that is None is
    unchanged.
    """

    activate: Callable[[], M]
    version: str
    actions: tuple[str, ...] | None = None  # action names of a ranker
    names: ItemNames = EMPTY
    scored: ScoredItems | None = None  # of a ranker
    # makes a ranker next to the serving one, which keeps the pages; `returned` lets it serve later
    as_second: Callable[[], Ranking] | None = None
    items: ServedCatalogue | None = None  # catalogue of a generator


async def open_ranking(
    config: Config,
    backend: Backend,
    scheduler: Scheduler,
    metrics: Metrics,
    serving: Ranking | None = None,
    folder: Path | None = None,
) -> Prepared[Ranking]:
    """Load, verify and warm up the ranker of the configured checkpoint.

    Args:
        config, backend, scheduler, metrics: Parts of the instance; the scheduler is started.
        serving: The current ranker, whose pages are shared; returned if the version is the same.
        folder: Folder to read in the place of the configured checkpoint.

    Raises:
        ConfigError: the model cannot be served as configured, or there is no memory for it next to
            the current one.
        DeviceError: it failed the parity self-test.
    """
    assert config.checkpoint is not None
    folder = Path(config.checkpoint) if folder is None else folder
    names = await asyncio.to_thread(_names, folder)
    weights = await asyncio.to_thread(_weights, folder, config)
    if serving is not None:
        if weights.combined() == serving.weights.combined():
            _check_cascade(config, serving.engine.model.config, serving.order)
            return _renamed(serving, names)
        await asyncio.to_thread(check_ranker_fits, folder, config, backend)
    checkpoint = await asyncio.to_thread(_placed, folder, config, backend, weights, names.key)
    version = weights.combined()
    shape = checkpoint.model.config
    _check_cascade(config, shape, checkpoint.order)
    if shape.attention_window_tokens and not backend.has_windows:
        raise ConfigError(
            f"checkpoint: {config.checkpoint} has attention_window_tokens "
            f"{shape.attention_window_tokens}, which the kernels of backend {backend.name} do not "
            "support; serve it with backend cpu"
        )
    if config.kv_cache.dtype == "int8" and not backend.has_int8:
        raise ConfigError(
            f"kv_cache.dtype: int8 is for backends cpu, cuda and reference: backend {backend.name} "
            "has no attention that reads it; use bfloat16"
        )
    layout = kv_layout(shape, config, checkpoint.model.dtype, backend)
    if serving is None:
        test_pages = layout.pages(SELF_TEST_TOKENS)
        tiers = open_tiers(
            config.kv_cache,
            layout,
            backend,
            t_life_s=config.relay.t_life_s,
            clock=time.monotonic,
            auto_ratio=AUTO_RATIO if config.generate is None else AUTO_RATIO_OF_TWO,
            least_pages=test_pages,
        )
        store = await asyncio.to_thread(_pool, config)
    else:
        tiers = serving.relay.tiers
        store = serving.relay.store
        if tiers.pool.arena.layout.layout_id != layout.layout_id:
            raise ConfigError(
                f"checkpoint: {config.checkpoint} needs another page layout than the current one; "
                "restart the instance"
            )
    pool, dram = tiers
    engine = RankEngine(checkpoint.model, backend, scheduler, pool.arena)
    rows = checkpoint.rows
    is_range = rows is not None and rows.about.has_id_range
    vocabulary = ItemVocabulary(checkpoint.item_ids, is_range=is_range)
    engine.objective_s = config.slo.objective_s(RANK.name)
    tried = await _attention(engine, backend, vocabulary, pool, version, config, serving)
    await verify(engine, vocabulary, pool, dram if config.relay.enabled else None, version, config)
    if serving is not None:
        engine.copy_bytes_per_s = serving.engine.copy_bytes_per_s
    if config.recommend is not None and config.recommend.index == "ivf" and shape.retrieval:
        engine.search = EncoderIndex(engine).search  # after the warm-up, whose u are of no user
    scored = ScoredItems(engine, vocabulary)
    model = ModelInfo(
        name=checkpoint.name,
        version=version,
        tasks=shape.tasks,
        actions=checkpoint.action_names or shape.actions,
        num_items=shape.num_items,
        max_history_tokens=shape.max_history_tokens,
        features=shape.features,
        device=backend.name,
        dtype=layout.dtype,
        kernels=backend.kernels,
        ops=engine.backend.ops,
        attention=tried,
        delta=weights.info(),
    )

    def made() -> Ranking:
        calibration = _calibration(config, model.version, backend)
        trigger = config.trigger_with_budget()
        relay = Relay(
            config.relay,
            trigger,
            engine,
            tiers,
            model.version,
            calibration=calibration,
            tenant_weights=config.admission.tenant_weights,
            store=store,
        )
        return Ranking(
            config.service, model, scored, engine, relay, metrics, weights, names, checkpoint.order
        )

    def activate() -> Ranking:
        ranking = made()
        _export(metrics, model.ops, of_beams=False)
        observe_relay(metrics, RANK.name, engine, pool, dram, ranking.relay)
        return ranking

    def as_second() -> Ranking:
        assert serving is not None
        ranking = made()
        serving.relay.take_over()
        return ranking

    return Prepared(
        activate,
        model.version,
        actions=model.actions,
        names=names,
        scored=scored,
        as_second=as_second,
    )


def _check_cascade(config: Config, shape: HSTUConfig, order: ScoreBlend | None) -> None:
    if config.recommend is not None:
        config.recommend.check_ranker(
            str(config.checkpoint),
            retrieves=shape.retrieval,
            has_blend=order is not None,
            has_neighbours=order is not None and order.neighbours is not None,
        )


def _pool(config: Config) -> PrefixStore | None:
    """Open the pool behind the ranker's DRAM tier, if there is one."""
    if config.kv_cache.pool is None:
        return None
    if not config.kv_cache.dram_bytes:
        raise ConfigError("kv_cache.pool: it needs a DRAM tier; set kv_cache.dram_bytes over 0")
    store = open_pool(config.kv_cache.pool, min(config.kv_cache.dram_bytes, MOST_VALUE_BYTES))
    key = config.kv_cache.pool_key
    return store if store is None or key is None else SealedStore(store, key.reveal())


async def _attention(
    engine: RankEngine,
    backend: Backend,
    vocabulary: ItemVocabulary,
    pool: PrefixPool,
    version: str,
    config: Config,
    serving: Ranking | None,
) -> tuple[AttentionWay, ...]:
    """Choose the implementation of attention.

    In a reload, that of the serving ranker has priority.
    """
    if serving is not None and config.attention == "auto":
        way = serving.model.ops["hstu_attention"]
        if way in possible(engine, backend, "auto"):
            engine.backend = backend.running(way)
            return serving.model.attention
    return await choose_attention(engine, backend, vocabulary, pool, version, config)


def _names(folder: Path) -> ItemNames:
    """Read the item names in the folder of a checkpoint."""
    try:
        return ItemNames.load(folder) or EMPTY
    except DataError as error:
        raise ConfigError(str(error)) from error


def _actions(folder: Path) -> ActionNames | None:
    """Read the action names in the folder of a generator."""
    try:
        return load_actions(folder)
    except DataError as error:
        raise ConfigError(str(error)) from error


def _renamed(model: M, names: ItemNames) -> Prepared[M]:
    """Prepare the serving model itself, with new names."""

    def activate() -> M:
        model.names = names
        return model

    return Prepared(activate, model.version, names=names)


def returned(model: M, metrics: Metrics) -> Prepared[M]:
    """Prepare a version that drains to serve again.

    Its prefixes are valid, since their keys have its version, and erasures have visited them.
    """

    def activate() -> M:
        relay, engine = model.relay, model.engine
        relay.take_over()
        is_ranker = isinstance(model, Ranking)
        _export(metrics, engine.backend.ops, of_beams=not is_ranker)
        kind = RANK.name if is_ranker else GENERATE.name
        observe_relay(metrics, kind, engine, *relay.tiers, relay)
        return model

    if isinstance(model, Ranking):
        return Prepared(
            activate,
            model.weights.combined(),
            model.model.actions,
            names=model.names,
            scored=model.items,
        )
    return Prepared(activate, model.version, items=model.items)


def _export(metrics: Metrics, ops: Mapping[str, str], *, of_beams: bool) -> None:
    """Export the implementations that a model chose: of a generator's ops, or of all others."""
    metrics.engine.ops_chosen(
        {op: impl for op, impl in ops.items() if (op in BEAM_OPS) == of_beams}
    )


def describe(backend: Backend) -> str:
    """Describe a device and its kernels."""
    return f"{backend.name} {backend.kernels}".strip()


def _calibration(config: Config, version: str, backend: Backend) -> Calibration | None:
    found = config.calibration
    if found is not None and (found.version, found.device) != (version, describe(backend)):
        log.warning(
            "the calibration of %s on %s is ignored, since this is %s on %s; run npu-gr calibrate",
            *(found.version, found.device, version, describe(backend)),
        )
        return None
    return found


def _weights(folder: Path, config: Config) -> ServedWeights:
    """Open the weights of a checkpoint, and find its deltas.

    Deltas of another checkpoint are left alone: a training has replaced the folder.

    Raises:
        ConfigError: the checkpoint or a delta is damaged.
    """
    assert config.checkpoint is not None
    place, stream = config.models.folder(config.checkpoint), config.models.deltas_stream
    log_ = DeltaLog(place) if stream is None else DeltaStream(place, stream)
    try:
        weights = ServedWeights(folder, log_)
        log_.files()
    except DeltaError as error:
        raise ConfigError(f"{error}; restore the file, or remove it and the later ones") from error
    try:
        weights.way = log_.way(weights.base)
    except DeltaError as error:
        log.warning("%s serves without deltas: %s", folder, error)
    return weights


def _placed(
    folder: Path, config: Config, backend: Backend, weights: ServedWeights, item_key: bytes
) -> Checkpoint:
    """Load the checkpoint to the device in the configured dtype, and freeze the item table."""
    checkpoint = load_checkpoint(folder, is_served=True)
    identity = ModelIdentity.of(checkpoint.model.config, checkpoint.action_names, item_key)
    weights.serve(checkpoint.model, identity)
    if checkpoint.rows is None:
        try:
            weights.replay()
        except DeltaError as error:
            raise ConfigError(str(error)) from error
    if config.relay.enabled and (reasons := inexact_fields(checkpoint.model.config)):
        raise ConfigError("; ".join(reasons))
    if config.dtype != "checkpoint":
        checkpoint.model.cast(getattr(torch, config.dtype))
    check_weights(checkpoint.model, f"checkpoint {folder}")
    model = checkpoint.model.to(backend.device).eval()
    num_spare = config.service.spare_items if model.config.scores_new_items else 0
    if checkpoint.rows is None:
        model.items.freeze(num_spare)
        model.items.drop_residuals()
    else:
        hot_bytes = config.models.hot_item_bytes
        model.items.sharded = HotRows(checkpoint.rows, num_spare, hot_bytes, backend.device)
        _replay_rows(model, weights, backend)
    backend.synchronize()  # before a device thread reads it in another stream
    return checkpoint


def _replay_rows(model: HSTU, weights: ServedWeights, backend: Backend) -> None:
    """Apply the deltas of a sharded checkpoint, whose item rows are not in the model."""
    way, weights.way = weights.way, []
    try:
        patch = weights.patch(way)
    except DeltaError as error:
        raise ConfigError(str(error)) from error
    DeviceWeights(model, backend).write(patch, WeightStamps.none(0))
    weights.way = way


async def open_generation(
    config: Config,
    backend: Backend,
    scheduler: Scheduler,
    metrics: Metrics,
    serving: Generation | None = None,
    folder: Path | None = None,
) -> Prepared[Generation]:
    """Load the generator of the section `generate`, and warm it up over its catalogue.

    Args:
        config, backend, scheduler, metrics: Parts of the instance; the scheduler is started.
        serving: The current generator, whose pages are shared. Its catalogue, with added and
            withdrawn items, is shared too if file and codes are the same; else the new one has its
            changes. It is returned if version and section are the same.
        folder: Folder to read in the place of the configured checkpoint.

    Raises:
        ConfigError: the generator cannot be served as configured, or there is no memory for it next
            to the current one.
    """
    section = config.generate
    assert section is not None
    folder = Path(section.checkpoint) if folder is None else folder
    version = await asyncio.to_thread(hf_files.version, folder)
    names = await asyncio.to_thread(_names, folder)
    actions = await asyncio.to_thread(_actions, folder)
    if serving is not None:
        if (version, section) == (serving.version, serving.config):
            return _renamed(serving, names)
        await asyncio.to_thread(check_generator_fits, folder, config, backend)
    model = await asyncio.to_thread(_generative, folder, config, section, backend)
    layout = layout_of(model, config.kv_cache.page_tokens)
    if serving is None:
        tiers = open_tiers(
            msgspec.structs.replace(
                config.kv_cache, hbm_bytes=section.hbm_bytes, dram_bytes=section.dram_bytes
            ),
            layout,
            backend,
            t_life_s=config.relay.t_life_s,
            clock=time.monotonic,
            section="generate",
        )
    else:
        tiers = serving.relay.tiers
        if tiers.pool.arena.layout.layout_id != layout.layout_id:
            raise ConfigError(
                f"generate.checkpoint: {folder} needs another page layout than the current one; "
                "restart the instance"
            )
    pool, dram = tiers
    if serving is None:
        shape = _beam_shape(model, section)
        backend, _ = await choose_beam_ways(backend, scheduler, shape)
    else:  # as in a ranker's reload
        backend = serving.engine.backend
    engine = await asyncio.to_thread(
        _generate_engine, model, section, backend, scheduler, pool.arena
    )
    engine.objective_s = config.slo.objective_s(GENERATE.name)
    await check_generator(engine, section.codes, section.first_token, f"checkpoint {folder}")
    if serving is not None:
        engine.copy_bytes_per_s = serving.engine.copy_bytes_per_s
    elif dram is not None:
        num_pages = min(tier.budget_bytes for tier in (pool, dram)) // layout.page_bytes
        num_tokens = min(SELF_TEST_TOKENS, num_pages * layout.page_tokens)
        async with borrowed_pages(pool, dram, version, num_tokens) as (runs, dram_runs):
            await engine.measure_copy(dram.arena, dram_runs, runs, num_tokens)
    if serving is not None and section.items == serving.config.items:
        items = serving.items
    else:
        items = ServedCatalogue(section, scheduler, backend.device)
        try:
            await items.reload(predecessor=None if serving is None else serving.items)
        except (DataError, Unavailable) as error:
            raise ConfigError(f"generate.catalogue: {error}") from error
    await warm_up(section, engine, items)

    def activate() -> Generation:
        relay = Relay(
            config.relay,
            config.trigger_with_budget(),
            engine,
            tiers,
            version,
            tenant_weights=config.admission.tenant_weights,
        )
        _export(metrics, engine.backend.ops, of_beams=True)
        observe_relay(metrics, GENERATE.name, engine, pool, dram, relay)
        return Generation(
            section, folder.name, version, engine, relay, items, metrics, names, actions
        )

    return Prepared(activate, version, names=names, items=items)


def _generative(
    folder: Path, config: Config, section: GenerateConfig, backend: Backend
) -> Decoder | T5:
    model = generators.load(folder, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)
    section.check_model(
        section.checkpoint, model.config.vocab_size, is_divisible=model.is_divisible
    )
    section.check_beams(
        section.checkpoint, model.kv_shape, model.config.vocab_size, model.dtype.itemsize
    )
    return model.to(backend.device).eval()


def _beam_shape(model: Decoder | T5, section: GenerateConfig) -> BeamShape:
    layers, kv_heads, head_dim = model.kv_shape
    levels = len(section.codes)
    return BeamShape(
        section.max_beams,
        model.config.num_heads,
        kv_heads,
        head_dim,
        layers,
        levels,
        min(section.max_prompt_tokens, model.longest_prompt(levels)),
        max(section.codes),
        model.dtype,
    )


def _generate_engine(
    model: GenerativeModel,
    section: GenerateConfig,
    backend: Backend,
    scheduler: Scheduler,
    arena: KVArena,
) -> GenerateEngine:
    limits = scheduler.config
    rows = min(limits.max_batch_rows, section.max_beams * limits.max_batch_requests)
    num_levels = len(section.codes)
    longest = section.max_prompt_tokens
    generator = Generator(
        model, backend, section.max_beams, num_levels, limits.streams, rows, longest
    )
    if generator.max_prompt_tokens < num_levels + section.num_frame_tokens:
        raise ConfigError(
            f"generate.checkpoint: {section.checkpoint} takes prompts of "
            f"{generator.max_prompt_tokens} tokens, but one item and the tokens around it take "
            f"{num_levels + section.num_frame_tokens}"
        )
    engine = GenerateEngine(generator, scheduler, arena)
    backend.synchronize()  # before a device thread uses weights and arenas
    return engine


def observe_relay(
    metrics: Metrics,
    kind: str,
    engine: PageJobs,
    pool: PrefixPool,
    dram: DramStore | None,
    relay: Relay[Any],
) -> None:
    """Connect a model's relay and its tiers to the metrics.

    Args:
        metrics: Metrics of the instance.
        kind: "rank" or "generate", the prefix of tier names other than those of rank.
        engine, pool, dram, relay: Observed parts.
    """
    prefix = "" if kind == RANK.name else f"{kind}_"
    relay.on_error = metrics.relay.failed
    relay.on_first_use = metrics.relay.first_used
    pool.on_evict = lambda entry: None if entry.consumed else metrics.relay.wasted(kind)

    def copied(target: KVArena, num_bytes: int, done: JobResult[None]) -> None:
        metrics.relay.copied(
            "reload" if target is pool.arena else "spill", num_bytes, done.queue_s, done.device_s
        )

    engine.on_copied = copied
    if relay.pool_copies is not None:
        relay.pool_copies.on_fetch = metrics.relay.fetched
        relay.pool_copies.on_put = metrics.relay.put
    metrics.relay.observe_relay(
        kind,
        {work: partial(relay.in_flight, work) for work in ("prefill", "reload", "spill")},
        t_life_s=lambda: relay.measured.t_life_p99_s.value,
        prefills_per_s=lambda: relay.measured.q_inst_per_s,
        brownout=lambda: relay.settings.brownout,
    )
    metrics.relay.observe_tier(
        f"{prefix}hbm",
        pool,
        {
            "live": lambda: pool.live_bytes,
            "reserved": lambda: pool.reserved_bytes,
            "evictable": lambda: pool.evictable_bytes,
            "free": lambda: pool.free_bytes,
        },
    )
    if dram is not None:
        states = {"live": lambda: dram.live_bytes, "free": lambda: dram.free_bytes}
        metrics.relay.observe_tier(f"{prefix}dram", dram, states)
