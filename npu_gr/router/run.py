"""Starts, drains and stops a router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry

from npu_gr.core.errors import ConfigError
from npu_gr.router.admin import build_admin_app
from npu_gr.router.client import ClientConnection
from npu_gr.router.config import RouterConfig
from npu_gr.router.metrics import RouterMetrics
from npu_gr.router.router import Router
from npu_gr.server.loop_lag import probe_loop_lag
from npu_gr.server.run import stop_signals

log = logging.getLogger(__name__)


@asynccontextmanager
async def listening(config: RouterConfig) -> AsyncIterator[tuple[Router, int, int]]:
    """Serve until the block ends; then wait for the requests in flight, at most `shutdown_timeout_s`.

    Yields:
        The router, its port and its admin port.

    Raises:
        ConfigError: the instances cannot be found, or an address cannot be bound.
    """
    router = Router(config, RouterMetrics(CollectorRegistry()))
    loop = asyncio.get_running_loop()
    lag = probe_loop_lag(router.metrics.loop_lag_s.observe, router.metrics.loop_freezes.inc)
    async with router.running(), lag:
        admin = web.AppRunner(build_admin_app(router), access_log=None)
        await admin.setup()
        try:
            site = web.TCPSite(admin, config.admin_host, config.admin_port)
            with _named("admin_host, admin_port", config.admin_host, config.admin_port):
                await site.start()
            with _named("host, port", config.host, config.port):
                server = await loop.create_server(
                    lambda: ClientConnection(router), config.host, config.port, backlog=4096
                )
            try:
                yield router, server.sockets[0].getsockname()[1], admin.addresses[0][1]
            finally:
                router.is_draining = True
                server.close()
                await router.connections.close(config.shutdown_timeout_s)
        finally:
            await admin.cleanup()


async def run(config: RouterConfig, on_listening: Callable[[int, int], None] = lambda _port, _admin: None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once."""
    async with listening(config) as (router, port, admin_port):
        log.info("listening on %s:%d, admin on %s:%d", config.host, port, config.admin_host, admin_port)
        on_listening(port, admin_port)
        with stop_signals() as signals:
            await signals.get()
            log.info("draining for %.1f s", config.drain_grace_s)
            router.is_draining = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(signals.get(), config.drain_grace_s)
    log.info("stopped")


@contextlib.contextmanager
def _named(fields: str, host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{fields}: cannot listen on {host}:{port}: {error}") from error
