"""Listen, drain and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from aiohttp import web

from npu_gr.core.errors import ConfigError
from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.runner import DoorRunner
from npu_gr.server.entrance.site import TLS, site_of

log = logging.getLogger(__name__)


async def serve(
    app: web.Application,
    config: ServerConfig,
    *,
    on_drain: Callable[[], Awaitable[None]],
    ready: asyncio.Event | None = None,
    on_listening: Callable[[int], None] = lambda _port: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once.

    Draining: `on_drain` makes the service unready. Everything is still served for `drain_grace_s`, so that balancers
    notice. Then the listener closes, and requests in flight get `shutdown_timeout_s` to end.

    Args:
        app: the application.
        config: address, grace and timeout.
        on_drain: called once, when draining begins.
        ready: set once the server listens.
        on_listening: called with the port, which is the system's choice where the configured one is 0.

    Raises:
        ConfigError: the address cannot be bound.
    """
    runner = DoorRunner(app, shutdown_timeout=config.shutdown_timeout_s)
    await runner.setup()
    try:
        tls = app.get(TLS)
        site = site_of(runner, config.host, config.port, config, None if tls is None else tls.public)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"server.host, server.port: cannot listen on {config.host}:{config.port}: {error}"
            ) from error
        port = runner.addresses[0][1]
        log.info("listening on %s:%d%s", config.host, port, "" if tls is None else ", TLS")
        on_listening(port)
        if ready is not None:
            ready.set()
        with stop_signals() as received:
            await received.get()
            log.info("draining for %.1f s", config.drain_grace_s)
            await on_drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(received.get(), config.drain_grace_s)
    finally:
        await runner.cleanup()
    log.info("stopped")


@contextlib.contextmanager
def stop_signals() -> Iterator[asyncio.Queue[int]]:
    """Put every SIGTERM and SIGINT into a queue while the block runs."""
    loop = asyncio.get_running_loop()
    received = asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def on_hangup(work: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Start `work` at every SIGHUP while the block runs. Work that still runs at the block's end is cancelled."""
    loop = asyncio.get_running_loop()
    tasks = set[asyncio.Task[None]]()

    def start() -> None:
        tasks.add(task := loop.create_task(work()))
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, start)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in tasks:
            task.cancel()
