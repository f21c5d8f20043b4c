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
from npu_gr.core.signals import stop_signals
from npu_gr.core.tls import ServerTls
from npu_gr.server.auth.browsers import is_loopback_name
from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.entrance import ENTRANCE
from npu_gr.server.entrance.listener import Listener
from npu_gr.server.entrance.runner import DoorRunner
from npu_gr.server.entrance.sites import TLS
from npu_gr.server.rpc.server import RPC

log = logging.getLogger(__name__)


async def serve(
    app: web.Application,
    config: ServerConfig,
    *,
    on_drain: Callable[[], Awaitable[None]],
    ready: asyncio.Event | None = None,
    on_listening: Callable[[int, int], None] = lambda _port, _admin: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once.

    Draining: `on_drain` makes the service unready. Everything is still served for `drain_grace_s`, so that balancers
    notice. Then the listener closes, and requests in flight get `shutdown_timeout_s` to end.

    Args:
        app: the application.
        config: addresses, grace and timeout.
        on_drain: called once, when draining begins.
        ready: set once the server listens.
        on_listening: called with the port and the admin port, which are the system's choice where the configured are 0.

    Raises:
        ConfigError: an address cannot be bound.
    """
    runner = DoorRunner(app, shutdown_timeout=config.shutdown_timeout_s)
    rpc = app.get(RPC)
    await runner.setup()
    try:
        ports = [await _listen(runner, listener, config, app.get(TLS)) for listener in app[ENTRANCE].listeners]
        if rpc is not None:
            await rpc.listen()
        on_listening(ports[0], ports[-1])
        if ready is not None:
            ready.set()
        with stop_signals() as received:
            await received.get()
            log.info("draining for %.1f s", config.drain_grace_s)
            await on_drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(received.get(), config.drain_grace_s)
    finally:
        await asyncio.gather(runner.cleanup(), *([] if rpc is None else [rpc.stop()]))
    log.info("stopped")


async def _listen(runner: DoorRunner, listener: Listener, config: ServerConfig, tls: ServerTls | None) -> int:
    field = "" if listener.is_public else "admin_"
    context = None
    if tls is not None and listener.is_public:
        context = tls.public
    elif tls is not None and not is_loopback_name(listener.host):
        context = tls.admin
    try:
        port = await runner.listen(listener, config, context)
    except OSError as error:
        raise ConfigError(
            f"server.{field}host, server.{field}port: cannot listen on {listener.host}:{listener.port}: {error}"
        ) from error
    what = "" if listener.is_public else "admin "
    log.info("%slistening on %s:%d%s", what, listener.host, port, "" if context is None else ", TLS")
    return port


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
