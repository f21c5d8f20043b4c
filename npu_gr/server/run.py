"""Listen, drain and stop, by aiohttp's public API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from npu_gr.core.errors import ConfigError
from npu_gr.core.process import stop_signals
from npu_gr.core.tls import ServerTls
from npu_gr.server.auth.rules import Address, is_loopback_name
from npu_gr.server.config import ServerConfig
from npu_gr.server.grpc.server import RPC
from npu_gr.server.middleware import Pipeline

log = logging.getLogger(__name__)

PIPELINE = web.AppKey("pipeline", Pipeline)
TLS = web.AppKey("tls", ServerTls)
# for the rest of a body after an answer that closes; else a reset could overtake the answer
LINGER_S = 2.0
AGENT_TIMEOUT_S = 1.0  # for a proxy to take the agent's line


async def serve(
    app: web.Application,
    config: ServerConfig,
    *,
    on_drain: Callable[[], Awaitable[None]],
    ready: asyncio.Event | None = None,
    on_listening: Callable[[int, int], None] = lambda _port, _admin: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once.

    Draining: `on_drain` makes the service unready. Everything is still served for `drain_grace_s`,
    so that balancers notice. Then the listener closes, and requests in flight get
    `shutdown_timeout_s` to end.

    Args:
        app: the application.
        config: addresses, grace and timeout.
        on_drain: called once, when draining begins.
        ready: set once the server listens.
        on_listening: called with the port and the admin port, which are the system's choice where
            the configured are 0.

    Raises:
        ConfigError: an address cannot be bound.
    """
    runner = make_runner(app, config)
    app[PIPELINE].addresses = {}  # nothing is served at an address before it is known
    rpc = app.get(RPC)
    await runner.setup()
    try:
        ports = [await _listen(runner, app, config, address) for address in make_addresses(config)]
        async with agent(app[PIPELINE], config):
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


class _Malformed(logging.Filter):
    """Counts messages that are no HTTP instead of logging each with a traceback: they are a stranger's noise."""

    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__()
        self._count = count

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self._count()
            return False
        return True


def make_runner(app: web.Application, config: ServerConfig) -> web.AppRunner:
    """Make the runner of an application; nothing listens yet."""
    connections = logging.Logger(f"{__name__}.connections")
    connections.parent = log
    connections.addFilter(_Malformed(app[PIPELINE].malformed))
    return web.AppRunner(
        app,
        access_log=None,
        logger=connections,
        auto_decompress=False,  # 1 kB of a client's may inflate to a gigabyte
        handler_cancellation=True,  # a client that disconnects frees what its request holds
        keepalive_timeout=config.idle_timeout_s,
        lingering_time=LINGER_S,
        shutdown_timeout=config.shutdown_timeout_s,
    )


def make_addresses(config: ServerConfig) -> list[Address]:
    """Say what an instance serves at its public address and at its admin one, or at one for both."""
    public = Address(
        is_admin=config.has_one_address,
        # another site's page has no key, so keys are enough here: the names of proxies are not
        # known
        rejects_foreign_hosts=is_loopback_name(config.host) and not config.api_keys_file,
    )
    if config.has_one_address:
        return [public]
    return [
        public,
        Address(is_public=False, rejects_foreign_hosts=is_loopback_name(config.admin_host)),
    ]


async def _listen(
    runner: web.AppRunner, app: web.Application, config: ServerConfig, address: Address
) -> int:
    tls = app.get(TLS)
    field = "" if address.is_public else "admin_"
    host, port = (
        (config.host, config.port) if address.is_public else (config.admin_host, config.admin_port)
    )
    context = None
    if tls is not None and address.is_public:
        context = tls.public
    elif tls is not None and not is_loopback_name(host):
        context = tls.admin
    site = web.TCPSite(runner, host, port, ssl_context=context, backlog=config.backlog)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(
            f"server.{field}host, server.{field}port: cannot listen on {host}:{port}: {error}"
        ) from error
    port = int(runner.addresses[-1][1])
    app[PIPELINE].serve_at(port, address)
    what = field.replace("_", " ")
    log.info("%slistening on %s:%d%s", what, host, port, "" if context is None else ", TLS")
    return port


async def listen_at(
    runner: web.AppRunner, app: web.Application, address: Address, path: str
) -> None:
    """Listen at a Unix socket."""
    app[PIPELINE].serve_at(path, address)
    await web.UnixSite(runner, path).start()


@asynccontextmanager
async def agent(pipeline: Pipeline, config: ServerConfig) -> AsyncIterator[int | None]:
    """Answer HAProxy's agent-check while the block runs.

    Yields the port, None where none is configured.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if config.agent_port is None:
        yield None
        return

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(AGENT_TIMEOUT_S):
                writer.write(pipeline.agent_line(writer.get_extra_info("peername")[0]))
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, config.host, config.agent_port)
    except OSError as error:
        raise ConfigError(
            f"server.agent_port: cannot listen on {config.host}:{config.agent_port}: {error}"
        ) from error
    async with server:
        port: int = server.sockets[0].getsockname()[1]
        log.info("agent-check on %s:%d", config.host, port)
        yield port


@contextlib.contextmanager
def on_hangup(work: Callable[[], Coroutine[Any, Any, Any]]) -> Iterator[None]:
    """Start `work` at every SIGHUP while the block runs.

    Work that still runs at the block's end is cancelled.
    """
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
