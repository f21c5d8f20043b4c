"""The composition root: build, start, drain and stop all parts. `build.py` makes the models.

Start: backend -> device threads -> models (loaded, verified, warmed up) -> history store ->
handlers -> service -> HTTP. Stop in reverse order: unready -> HTTP drained -> recorder -> handlers
and models -> history store -> device threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from aiohttp import web
from prometheus_client import CollectorRegistry

from npu_gr.backend.base import Backend
from npu_gr.backend.choose import choose
from npu_gr.catalogue.names import key_of
from npu_gr.core.errors import (
    ConfigError,
    DeltaError,
    NpuGrError,
    StoreFailed,
    StoreFault,
    Unavailable,
)
from npu_gr.core.health import DEAD_S
from npu_gr.core.lifetime import running
from npu_gr.core.names import difference
from npu_gr.core.process import end_if_blocked, end_within, trim_heap
from npu_gr.core.settings import LiveConfig
from npu_gr.engine.scheduler import Scheduler
from npu_gr.feature_store.user_features import UserFeatures, open_source
from npu_gr.handlers.admin import CatalogueOfGenerator, VectorsOfMatch
from npu_gr.handlers.deltas import Deltas
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.match import ServedVectors
from npu_gr.handlers.prefix_histories import PrefixHistoryCache
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.refresh import Refreshes
from npu_gr.handlers.service import Parts, Service
from npu_gr.handlers.versions import ServedNames, Versions
from npu_gr.history_store.bulkhead import GuardedStore
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryStore, check_item_key
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.registry.process import Reloaded
from npu_gr.relay.brownout import BrownoutControl
from npu_gr.replay.recorder import Recorder
from npu_gr.server.access_log import spans
from npu_gr.server.admission.controller import AdmissionController
from npu_gr.server.recording import OwnRecorder, RecordingService, add_record_routes
from npu_gr.server.routes import build_web_app
from npu_gr.server.run import on_sighup, serve
from npu_gr.server.service_protocol import ServiceProtocol
from npu_gr.service.build import Prepared, open_generation, open_ranking, returned
from npu_gr.service.config import Config
from npu_gr.service.greeting import greeting
from npu_gr.service.idle_heap import IdleHeap
from npu_gr.service.job_table import Shared, build_jobs, cascade_of, coverage_rule, lookups
from npu_gr.service.memory import check_sizes
from npu_gr.service.reload import Reload
from npu_gr.service.shadow import Shadows

log = logging.getLogger(__name__)

AWAY_S = 1.0  # interval at which a history store that failed at the start is checked again
# Longest time to stop after the requests: to write queued appends and records, and to wait for
# what hangs. It stands in the grace periods in `deploy`.
END_S = 15.0


class OpenedInstance(NamedTuple):
    """A ready instance, without HTTP."""

    service: Service
    served: ServiceProtocol  # the service, wrapped by the recorder if there is one
    metrics: Metrics
    recorder: Recorder | None


@asynccontextmanager
async def instance(
    config: Config, read: Callable[[], Config] | None = None
) -> AsyncIterator[tuple[web.Application, Service]]:
    """Run a ready instance in this process for the block.

    Args:
        config: Configuration of the instance.
        read: Function that reads the configuration again; None to disable reloads.

    Raises:
        ConfigError: a setting, file or device cannot be used; nothing is left running.
    """
    async with opened(config, read) as ready:
        worker, count = ready.metrics.health.add("tracing"), ready.metrics.process.spans
        with spans(config.server, worker, count) as tracing:
            app = build_web_app(ready.served, config.server, ready.metrics, tracing)
            add_record_routes(app, OwnRecorder(ready.recorder))
            yield app, ready.service


@asynccontextmanager
async def opened(
    config: Config, read: Callable[[], Config] | None = None
) -> AsyncIterator[OpenedInstance]:
    """Run an instance without HTTP: models loaded, tiers allocated, parity tested, warmed up.

    Args:
        config: Configuration of the instance.
        read: See `instance`.

    Raises:
        ConfigError: a setting, file or device cannot be used; nothing is left running.
    """
    settings = LiveConfig(config)
    metrics = Metrics(CollectorRegistry(), config.slo.objectives())
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(check_sizes, config)
        backend = open_backend(config, metrics)
        scheduler = Scheduler(config.scheduler, backend.stream, release=backend.release_memory)
        scheduler.weigh(config.admission.tenant_weights)
        for name, worker in scheduler.workers.items():
            metrics.health.add(name, worker, is_vital=True)
        scheduler.start()
        stack.push_async_callback(scheduler.stop)
        versions = await open_models(config, backend, scheduler, metrics)
        stack.push_async_callback(versions.stop)
        store, is_away = None, False
        of_store = config.history_store
        opened = await open_store(of_store, may_be_away=of_store.on_failure != "fail")
        if opened is not None:
            store = GuardedStore(opened, of_store, metrics.store)
            metrics.health.add("history_reads", store.reads.worker)
            metrics.health.add("history_writes", store.writes.worker)
            stack.push_async_callback(store.close)
            try:
                await check_store(opened, versions, config)
            except StoreFailed as error:
                log.error("the actions of the history store could not be read: %s", error)
                is_away = error.fault is not StoreFault.CORRUPT
                if is_away:
                    store.trip(error)
            metrics.store.observe(
                store.kind, {"reads": store.reads, "writes": store.writes}, store.health
            )
        of_users = None
        if config.feature_store is not None:
            source = await asyncio.to_thread(open_source, config.feature_store)
            of_users = UserFeatures(source, config.feature_store, metrics.source)
            metrics.health.add("feature_source", of_users.lane.worker)
            stack.push_async_callback(of_users.close)
            metrics.source.observe(of_users.lane)
        shared = Shared(
            settings=settings,
            versions=versions,
            histories=_histories(settings, store, of_users, versions, metrics),
            vectors=None if config.match is None else ServedVectors(config.match, backend),
            scheduler=scheduler,
            metrics=metrics,
        )
        jobs = await build_jobs(shared)
        tables = versions.item_tables()
        if shared.vectors is not None:
            tables["match.vectors"] = shared.vectors.current.names
        key_of(tables)
        coverage = coverage_rule(shared, jobs)
        await coverage.start()
        admission = AdmissionController(
            config.admission,
            config.slo.objective_s,
            batch_requests=config.scheduler.max_batch_requests * config.scheduler.streams,
        )
        brownout = BrownoutControl(config.brownout)
        service = Service(
            Parts(
                settings=settings,
                admission=admission,
                brownout=brownout,
                scheduler=scheduler,
                jobs=jobs,
                versions=versions,
                histories=shared.histories,
                catalogue=CatalogueOfGenerator(versions, coverage, metrics.reloads),
                vectors=VectorsOfMatch(shared.vectors, coverage, metrics.reloads),
                names=ServedNames(shared.histories, versions, shared.vectors),
                lookups=lookups(shared, jobs),
                metrics=metrics,
            )
        )
        stack.push_async_callback(service.stop)
        observe(metrics, settings, scheduler, service)
        one_at_a_time = asyncio.Lock()

        async def open_ranking_next(
            new: Config, old: Ranking, folder: Path | None
        ) -> Prepared[Ranking]:
            return await open_ranking(new, backend, scheduler, metrics, old, folder)

        if versions.rankers is not None:
            refreshes = Refreshes(versions, shared.histories.cache, metrics.relay.refreshed)
            metrics.relay.observe_refreshes(lambda: refreshes.num_pending)
            await stack.enter_async_context(running(refreshes.run()))
            deltas = Deltas(
                versions,
                one_at_a_time,
                lambda: settings.config.relay.max_stale_s,
                metrics.reloads,
                partial(setattr, metrics.health, "fault"),
                refreshes,
                service.catalogue,
            )
            service.deltas = deltas
            # a folder of another checkpoint is left alone; without Redis its copy is served
            with suppress(DeltaError, Unavailable):
                await deltas.follow()  # its items, since the weights were read with it
            if config.models.is_following:
                worker = metrics.health.add("deltas")
                await stack.enter_async_context(running(deltas.watch(worker)))
        reload = None
        if read is not None:
            reload = Reload(
                settings=settings,
                versions=versions,
                admission=admission,
                scheduler=scheduler,
                brownout=brownout,
                histories=shared.histories,
                coverage=coverage,
                cascade=cascade_of(jobs),
                vectors=shared.vectors,
                read=read,
                open_ranking=open_ranking_next,
                open_generation=lambda new, old, folder: open_generation(
                    new, backend, scheduler, metrics, old, folder
                ),
                ranking_returned=lambda old: returned(old, metrics),
                generation_returned=lambda old: returned(old, metrics),
                metrics=metrics.reloads,
                one_at_a_time=one_at_a_time,
            )
            service.on_reload, service.on_rollback = reload, reload.roll_back
        if versions.rankers is not None:
            shadows = Shadows(
                settings=settings,
                versions=versions,
                metrics=metrics,
                admission=admission,
                scheduler=scheduler,
                open_ranking=open_ranking_next,
                one_at_a_time=one_at_a_time,
                reload=reload,
            )
            service.shadow = shadows
            stack.push_async_callback(shadows.close)
            worker = metrics.health.add("shadow")
            await stack.enter_async_context(running(shadows.watch(worker)))
        await asyncio.to_thread(trim_heap)
        service.set_ready()
        stack.callback(service.set_ready, "stopping")
        recorder = (
            stack.enter_context(Recorder(config.record, metrics.process.recorded))
            if config.record
            else None
        )
        if config.record is not None and recorder is not None:
            purger = recorder.purger
            metrics.process.observe_recorder(
                lambda: recorder.is_on, is_enabled=config.record.enabled
            )
            metrics.health.add("recorder", recorder.worker)
            metrics.health.add("purge", purger.worker)
            metrics.erasures.observe("recordings", lambda: purger.erased_at, lambda: purger.runs)
        served = RecordingService(service, recorder) if recorder else service
        if store is not None and is_away:
            await stack.enter_async_context(
                running(_check_when_back(store, versions, config, service))
            )
        await stack.enter_async_context(running(service.watch()))
        heap = await asyncio.to_thread(IdleHeap, service)
        await stack.enter_async_context(running(heap.watch(metrics.health.add("heap"))))
        yield OpenedInstance(service, served, metrics, recorder)


async def run(
    config: Config,
    ready: asyncio.Event | None = None,
    read: Callable[[], Config] | None = None,
    *,
    owns_process: bool = False,
) -> bool:
    """Serve until SIGTERM, then drain and stop; SIGHUP reloads the configuration.

    It also ends once something that it cannot work without has hung for too long.

    Args:
        config: Configuration of the instance.
        ready: Set once requests are accepted.
        read: See `instance`.
        owns_process: Whether to end the process if it cannot stop, or if the event loop is blocked.

    Returns:
        Whether something hung, so that this process must not go on.

    Raises:
        ConfigError: see `instance`.
    """
    async with instance(config, read) as (app, service):

        async def drain() -> None:
            service.set_ready("draining")
            server = config.server
            if owns_process:
                end_within(server.drain_grace_s + server.shutdown_timeout_s + END_S)

        async def reload() -> None:
            with suppress(NpuGrError):  # it has been logged
                await service.reload_models()

        def greet(port: int, admin_port: int) -> None:
            for line in greeting(service, config.server, port, admin_port):
                log.info("%s", line)

        if owns_process:
            end_if_blocked(round(DEAD_S))
        with on_sighup(reload):
            why_dead = await serve(
                app,
                config.server,
                on_drain=drain,
                ready=ready,
                on_listening=greet,
                why_dead=service.why_dead,
            )
    return bool(why_dead or service.parts.metrics.health.why_late())


def open_backend(config: Config, metrics: Metrics) -> Backend:
    """Choose the configured backend, and export the implementations of its operators.

    Raises:
        ConfigError: the backend cannot be loaded.
    """
    backend = choose(
        config.backend, config.native, config.hstu_library, config.attention, config.device
    )
    torch.set_num_threads(config.threads)
    metrics.engine.ops_chosen(backend.ops)
    backend.on_fallback = metrics.engine.fell_back
    backend.on_graph = metrics.engine.graph_used
    backend.on_padding = metrics.engine.graph_padded
    return backend


async def open_models(
    config: Config, backend: Backend, scheduler: Scheduler, metrics: Metrics
) -> Versions:
    """Load, verify and warm up the configured models.

    Args:
        config: Configuration of the instance.
        backend, scheduler: Backend, and a started scheduler.
        metrics: Metrics of the models.

    Raises:
        ConfigError: a model cannot be served as configured.
        DeviceError: a model failed the parity self-test.
    """
    ranking = generation = None
    if config.checkpoint is not None:
        ranking = (await open_ranking(config, backend, scheduler, metrics)).activate()
    if config.generate is not None:
        generation = (await open_generation(config, backend, scheduler, metrics)).activate()
    versions = Versions(ranking, generation, metrics.process.runs)
    if generation is not None:
        generation.items.follow = versions.follow
        (await generation.items.followed())()
    metrics.process.runs(versions.models()[0])
    return versions


async def check_store(store: HistoryStore, versions: Versions, config: Config) -> None:
    """Check that the store's action names, and the key of its items, are those of the models.

    Raises:
        ConfigError: they differ.
        StoreFailed: the store failed.
    """
    stored = await store.actions()
    await check_item_key(store, key_of(versions.item_tables()))
    if versions.rankers is None:
        return
    if changed := difference(stored, versions.ranker().model.actions):
        raise ConfigError(
            "history_store: the history store was filled with other actions than "
            f"{config.checkpoint} has: {changed}; use a checkpoint whose actions begin with those "
            "of the store, or another store (history_store.path, history_store.url), and load the "
            "log into it"
        )


async def _check_when_back(
    store: HistoryStore, versions: Versions, config: Config, service: Service
) -> None:
    """Check a store that failed at the start once it works; if it is wrong, become unready."""
    try:
        while True:
            await asyncio.sleep(AWAY_S)
            with suppress(StoreFailed):
                return await check_store(store, versions, config)
    except ConfigError as error:
        log.error("%s", error)
        service.set_ready(str(error))


def _histories(
    settings: LiveConfig[Config],
    store: HistoryStore | None,
    of_users: UserFeatures | None,
    versions: Versions,
    metrics: Metrics,
) -> Histories:
    config = settings.config
    cache = PrefixHistoryCache(config.service.known_prefix_bytes)
    cache.resize(config.service.known_prefix_bytes, config.admission.tenant_weights)
    return Histories(
        store,
        cache,
        config.service.cut_step_tokens,
        config.history_store.on_failure,
        metrics,
        lambda: () if versions.rankers is None else versions.rankers.current.model.actions,
        config.service.unsorted_history,
        of_users,
        config.history_store.read_timeout_s,
    )


def observe(
    metrics: Metrics, settings: LiveConfig[Config], scheduler: Scheduler, service: Service
) -> None:
    """Connect gauges, which read the current settings when they are scraped.

    Args:
        metrics: Metrics of the instance.
        settings: Current configuration.
        scheduler, service: Observed parts.
    """
    scheduler.on_batch = metrics.engine.batch_done
    scheduler.on_worked = metrics.engine.worked
    metrics.engine.observe_queue(lambda: scheduler.depth)
    metrics.relay.observe_t_life(lambda: settings.config.relay.t_life_s)
    metrics.process.observe_limits(
        {
            "inflight_requests": lambda: settings.config.admission.max_inflight,
            "queue_jobs": lambda: settings.config.scheduler.max_queue,
            "streams": lambda: settings.config.scheduler.streams,
            "batch_requests": lambda: settings.config.scheduler.max_batch_requests,
            "batch_tokens": lambda: settings.config.scheduler.max_batch_tokens,
            "batch_rows": lambda: settings.config.scheduler.max_batch_rows,
            "candidates": lambda: settings.config.server.max_candidates,
            "inflight_prefills": lambda: settings.config.trigger.max_inflight,
            "budget_s": lambda: settings.config.server.max_budget_s,
        }
    )
    metrics.reloads.loaded(Reloaded.CONFIGURATION)
    if settings.config.match is not None:
        metrics.reloads.loaded(Reloaded.VECTORS)
    versions = service.versions
    if versions.rankers is not None:
        metrics.process.observe_limits(
            {
                "history_tokens": lambda: versions.ranker().max_events,
                "spare_item_rows": lambda: versions.ranker().items.spare.num_rows,
            }
        )
        metrics.rank.observe_switch(lambda: versions.ranker().relay.settings.is_switched_off)
        metrics.rank.observe_rows(lambda: versions.ranker().engine.weights.row_reads._asdict())
        metrics.rank.observe_items(
            lambda: versions.ranker().items.spare.num_known,
            lambda: versions.ranker().items.num_unscored,
            lambda: versions.ranker().items.spare.num_available,
        )
    if versions.generators is not None:
        metrics.process.observe_limits(
            {
                "prompt_tokens": lambda: versions.generator().config.max_prompt_tokens,
                "beams": lambda: versions.generator().config.max_beams,
            }
        )
        metrics.reloads.loaded(Reloaded.CATALOGUE)
        metrics.generate.observe_catalogue(
            lambda: versions.generator().items.info(), service.catalogue.num_paths
        )
