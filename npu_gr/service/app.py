"""The composition root: builds everything once (models: `opening.py`), starts it, drains it, stops it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

import torch
from aiohttp import web
from prometheus_client import CollectorRegistry

from npu_gr.admission.brownout import BrownoutControl
from npu_gr.backend.choose import choose
from npu_gr.core.errors import NpuGrError
from npu_gr.engine.scheduler import Scheduler
from npu_gr.features.store import open_store
from npu_gr.jobs.generate import Generation
from npu_gr.jobs.match import Matching
from npu_gr.jobs.recommend import Cascade, Sized, Source, from_generation, from_matching
from npu_gr.metrics.registry import Metrics
from npu_gr.replay.recorder import Recorder
from npu_gr.server.recording import RecordingDoor, add_record_routes
from npu_gr.server.routes import build_web_app
from npu_gr.server.run import on_hangup, serve
from npu_gr.server.tracing import spans
from npu_gr.service import config as configuration
from npu_gr.service.build import open_generation, open_ranking
from npu_gr.service.config import Config
from npu_gr.service.reload import Reload
from npu_gr.service.service import Service

log = logging.getLogger(__name__)


@asynccontextmanager
async def instance(
    config: Config, read: Callable[[], Config] | None = None
) -> AsyncIterator[tuple[web.Application, Service]]:
    """A ready instance: models loaded, tiers allocated, parity tested, warmed up; stopped at the block's end.

    Args:
        config: what it serves.
        read: the configuration again, for a reload; None = it cannot be reloaded.

    Raises:
        ConfigError: a setting, a file or a device is not as configured; nothing is left running.
    """
    backend = choose(config.backend, config.native)
    torch.set_num_threads(config.threads)
    scheduler = Scheduler(config.scheduler, backend.stream)
    metrics = Metrics(CollectorRegistry(), config.slo.objectives())
    metrics.backend_ops(backend.ops)
    backend.on_fallback = metrics.op_fell_back
    scheduler.start()
    try:
        ranking = generation = None
        if config.checkpoint is not None:
            ranking = (await open_ranking(config, backend, scheduler, metrics))()
        if config.generate is not None:
            generation = (await open_generation(config, backend, scheduler, metrics))()
        matching = None if config.match is None else Matching(config.match, scheduler, backend)
        store = await open_store(config.features)
        try:
            table = configuration.to_table(config)
            control = BrownoutControl(config.brownout)
            cascade = build_cascade(config, lambda: service.generation, matching, metrics)
            service = Service(
                config.service,
                scheduler,
                ranking,
                generation,
                store,
                metrics,
                table,
                config.slo,
                control,
                matching,
                cascade,
            )
            del ranking, generation  # the service's alone: a replaced one must not be held here
            observe(metrics, config, scheduler)
            if read is not None:
                service.on_reload = Reload(
                    service,
                    config,
                    read,
                    lambda new, old: open_ranking(new, backend, scheduler, metrics, old),
                    lambda new, old: open_generation(new, backend, scheduler, metrics, old),
                )
            if config.generate is not None:
                metrics.observe_catalogue(service.catalogue, lambda: service.generation.items.num_paths())
            if matching is not None:
                matching.on_pass = metrics.match_pass_done
                await matching.start()
            metrics.build_info(service.versions.models()[0])
            service.set_ready()
            try:
                recording = Recorder(config.record, metrics.recorded) if config.record else nullcontext()
                with recording as recorder, spans(config.server) as tracing:
                    door = RecordingDoor(service, recorder) if recorder else service
                    app = build_web_app(door, config.server, metrics, tracing)
                    add_record_routes(app, recorder)
                    async with service.watched():
                        yield app, service
            finally:
                service.set_ready("stopping")
                await service.stop()
        finally:
            if store is not None:
                await store.close()
    finally:
        await scheduler.stop()


async def run(config: Config, ready: asyncio.Event | None = None, read: Callable[[], Config] | None = None) -> None:
    """Serve until SIGTERM, then drain and stop; SIGHUP reloads, see `instance`."""
    async with instance(config, read) as (app, service):

        async def drain() -> None:
            service.set_ready("draining")

        async def reload() -> None:
            try:
                await service.reload_models()
            except NpuGrError as error:
                log.error("%s; the one before goes on", error)

        with on_hangup(reload):
            await serve(app, config.server, on_drain=drain, ready=ready)


def build_cascade(
    config: Config, generation: Callable[[], Generation], matching: Matching | None, metrics: Metrics
) -> Cascade | None:
    """The configured sources before the ranker; None without a section `recommend`.

    Raises:
        ConfigError: its hook or its list of popular items cannot be used.
    """
    if config.recommend is None:
        return None
    made: dict[str, Source] = {}
    if config.generate is not None:
        made["generate"] = from_generation(generation, metrics)
    if matching is not None:
        made["match"] = from_matching(matching, metrics)
    sources = {str(name): Sized(made[name], size) for name, size in config.recommend.sources.items()}
    return Cascade(config.recommend, sources, metrics)


def observe(metrics: Metrics, config: Config, scheduler: Scheduler) -> None:
    """Connect what changes by itself to the metrics; nothing below `app` knows them but the service."""
    scheduler.on_batch = lambda _kind, requests, rows: metrics.batch_done(requests, rows)
    scheduler.on_worked = metrics.device_worked
    metrics.observe_queue(lambda: scheduler.depth)
    metrics.t_life(config.relay.t_life_s)
    metrics.limits(
        {
            "inflight_requests": config.service.max_inflight,
            "queue_jobs": config.scheduler.max_queue,
            "streams": config.scheduler.streams,
            "batch_requests": config.scheduler.max_batch_requests,
            "batch_tokens": config.scheduler.max_batch_tokens,
            "batch_rows": config.scheduler.max_batch_rows,
            "candidates": config.server.max_candidates,
            "inflight_prefills": config.trigger.max_inflight,
            "budget_s": config.server.max_budget_s,
        }
    )
