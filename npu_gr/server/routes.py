"""Builds the aiohttp application: groups of routes, and one middleware around all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from npu_gr.core.lifetime import running
from npu_gr.core.tls import ServerTls, following
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.registry.process import noted_pauses
from npu_gr.server.access_log import AccessLog, Tracing
from npu_gr.server.admin_routes import (
    CatalogueRoutes,
    HealthRoutes,
    ItemRoutes,
    ModelRoutes,
    ObservabilityRoutes,
    UserRoutes,
    VectorsRoutes,
)
from npu_gr.server.admission.middleware import Admission
from npu_gr.server.auth.keys import KeyRejection, KeyRing
from npu_gr.server.config import ServerConfig
from npu_gr.server.grpc.server import RPC, RpcServer
from npu_gr.server.kind_routes import Reader, kind_handlers, kind_routes
from npu_gr.server.lookup_routes import LookupRoutes
from npu_gr.server.loop_lag import probe_loop_lag
from npu_gr.server.middleware import Pipeline, RequestLifecycle
from npu_gr.server.oip.routes import Inference, InferenceRoutes
from npu_gr.server.run import PIPELINE, TLS
from npu_gr.server.service_protocol import ServiceProtocol
from npu_gr.server.status import DebugViews, OwnDebugViews


def build_web_app(
    service: ServiceProtocol,
    config: ServerConfig,
    metrics: Metrics,
    tracing: Tracing | None = None,
    make_debug_views: Callable[[AccessLog], DebugViews] | None = None,
) -> web.Application:
    """Build the HTTP application in front of a service.

    Args:
        service: Answers the requests.
        config: Section `server`.
        metrics: Metrics of the instance; they hold the objective of every kind.
        tracing: None = trace ids without spans.
        make_debug_views: Factory of the operators' views, given the access log; None = the views of
            this process.

    Raises:
        ConfigError: The key file or the certificate cannot be used.
    """
    keys = KeyRing(Path(config.api_keys_file) if config.api_keys_file else None)
    keys.on_rejected = metrics.keys.rejected
    metrics.keys.observe(KeyRejection, lambda: len(keys), lambda: keys.is_stale)
    tls = None if config.tls is None else ServerTls(config.tls, "server.tls")
    access_log = AccessLog(config, metrics.requests.objectives.values())
    admission = Admission(service.admission, config, metrics)
    metrics.process.observe_ready(service.is_ready)
    lifecycle = RequestLifecycle(
        metrics=metrics,
        keys=keys,
        access_log=access_log,
        tracing=tracing or Tracing(),
        config=config,
    )
    pipeline = Pipeline(service, lifecycle, admission)
    debug_views = (
        make_debug_views(access_log)
        if make_debug_views
        else OwnDebugViews(service, metrics, access_log.newest)
    )
    app = web.Application(
        client_max_size=config.max_body_bytes, middlewares=[pipeline.middleware()]
    )
    reader = Reader(config)
    app.add_routes(kind_routes(kind_handlers(service, lifecycle, reader)))
    inference = Inference(service, lifecycle, reader, debug_views)
    for group in (
        ModelRoutes(service),
        ItemRoutes(service),
        LookupRoutes(service, lifecycle),
        CatalogueRoutes(service, config, reader),
        VectorsRoutes(service),
        HealthRoutes(service),
        InferenceRoutes(inference),
        ObservabilityRoutes(service, config, debug_views),
        UserRoutes(service),
    ):
        app.add_routes(group.routes())

    process, health = metrics.process, metrics.health

    async def background(_: web.Application) -> AsyncIterator[None]:
        with noted_pauses(process.gc_paused) as drain:
            lag = probe_loop_lag(process.loop_lagged, process.loop_froze, drain)
            async with (
                lag,
                running(keys.follow(health.add("api_keys"))),
                running(admission.watch(health.add("rejections_log"))),
                following(tls, worker=health.add("tls")),
            ):
                yield

    app.cleanup_ctx.append(background)
    app.on_response_prepare.append(pipeline.count_others)
    app[PIPELINE] = pipeline
    if config.grpc_port is not None:
        app[RPC] = RpcServer(inference)
    if tls is not None:
        app[TLS] = tls
        process.observe_certificate("server", tls.expiry)
    return app
