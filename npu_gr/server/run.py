"""Listens, drains and stops, with aiohttp's public API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
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
# Time to read the rest of a body after a response that closes the connection; without it a TCP
# reset could overtake the response.
LINGER_S = 2.0
AGENT_TIMEOUT_S = 1.0  # time for a proxy to read the answer to its agent-check, and to close
LOOK_S = 1.0  # interval between two looks at what hangs


async def serve(
    app: web.Application,
    config: ServerConfig,
    *,
    on_drain: Callable[[], Awaitable[None]],
    ready: asyncio.Event | None = None,
    on_listening: Callable[[int, int], None] = lambda _port, _admin: None,
    why_dead: Callable[[], str] = str,
) -> str:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once.

    Draining: `on_drain` makes the service unready. Requests are still served for `drain_grace_s`,
    until load balancers have noticed. Then the listener closes, and requests in flight get
    `shutdown_timeout_s` to end.

    Args:
        app: Application of `build_web_app`.
        config: Section `server`: addresses, grace and timeouts.
        on_drain: Callback when draining begins.
        ready: Set once the server listens.
        on_listening: Receives the port and the admin port; the system chooses those that are 0.
        why_dead: Function that says what hangs, so that the process must end; "" = nothing.

    Returns:
        What hung; "" = a signal came.

    Raises:
        ConfigError: An address cannot be bound.
    """
    runner = make_runner(app, config)
    app[PIPELINE].addresses = {}  # until an address is registered, it serves the public routes only
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
                dead = await _until_end(received, why_dead)
                if dead:
                    log.critical("%s: the process ends", dead)
                log.info(
                    "draining: not ready, closing the listener in %.1f s", config.drain_grace_s
                )
                await on_drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(received.get(), config.drain_grace_s)
    finally:
        await asyncio.gather(runner.cleanup(), *([] if rpc is None else [rpc.stop()]))
    log.info("stopped")
    return dead


async def _until_end(received: asyncio.Queue[int], why_dead: Callable[[], str]) -> str:
    """Wait for a signal, or until two looks in a row find that something hangs.

    After a standstill of the whole process, one look finds what has had no time to move.
    """
    before = ""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await received.get()
                return ""
        now = why_dead()
        if now and before:
            return now
        before = now


class _Malformed(logging.Filter):
    """Counts malformed HTTP messages instead of logging a traceback of each.

    Port scanners send them.
    """

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
    """Make the runner of an application; it does not listen yet."""
    connections = logging.Logger(f"{__name__}.connections")
    connections.parent = log
    connections.addFilter(_Malformed(app[PIPELINE].malformed))
    return web.AppRunner(
        app,
        access_log=None,
        logger=connections,
        auto_decompress=False,  # 1 MB from a client may inflate to a gigabyte
        handler_cancellation=True,  # the request of a client that disconnects is cancelled
        keepalive_timeout=config.idle_timeout_s,
        lingering_time=LINGER_S,
        shutdown_timeout=config.shutdown_timeout_s,
    )


def make_addresses(config: ServerConfig) -> list[Address]:
    """Describe the public and the admin address of an instance, or the one address for both."""
    public = Address(
        is_admin=config.has_one_address,
        # with keys the Host header is not checked: a page of another site has no key, and the
        # host names of proxies are not known here
        rejects_foreign_hosts=is_loopback_name(config.host) and not config.api_keys_file,
    )
    if config.has_one_address:
        return [public]
    return [
        public,
        Address(is_public=False, rejects_foreign_hosts=is_loopback_name(config.admin_host)),
    ]


def check_ports(config: ServerConfig) -> None:
    """Check that the addresses can be bound, before models are loaded.

    Raises:
        ConfigError: One cannot; most often another process listens there.
    """
    for field in ("", "admin_"):
        host, port = getattr(config, f"{field}host"), getattr(config, f"{field}port")
        if port == 0:
            continue
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise _not_bound(field, host, port, error) from error


def _not_bound(field: str, host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"server.{field}host, server.{field}port: cannot listen on {host}:{port}: {error}"
    )


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
        raise _not_bound(field, host, port, error) from error
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

    Yields:
        The port; None = no agent-check is configured.

    Raises:
        ConfigError: The address cannot be bound.
    """
    if config.agent_port is None:
        yield None
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_proxy = False
        try:
            async with asyncio.timeout(AGENT_TIMEOUT_S):
                writer.write(pipeline.agent_line())
                writer.write_eof()
                # HAProxy sends nothing; a browser that a page leads here sends its request
                is_proxy = not await reader.read(1)
        except ConnectionResetError:
            is_proxy = True
        except (OSError, TimeoutError):
            pass
        if is_proxy:
            pipeline.agent_asked(writer.get_extra_info("peername")[0])
        writer.close()

    try:
        server = await asyncio.start_server(answer, config.host, config.agent_port)
    except OSError as error:
        raise ConfigError(
            f"server.agent_port: cannot listen on {config.host}:{config.agent_port}: {error}"
        ) from error
    async with server:
        port: int = server.sockets[0].getsockname()[1]
        log.info("agent-check listening on %s:%d", config.host, port)
        yield port


@contextlib.contextmanager
def on_sighup(work: Callable[[], Coroutine[Any, Any, Any]]) -> Iterator[None]:
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
