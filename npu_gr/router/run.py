"""Starts, drains, hands over and stops a router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from socket import socket
from ssl import SSLContext

from prometheus_client import CollectorRegistry

from npu_gr.core.errors import ConfigError
from npu_gr.core.signals import stop_signals
from npu_gr.core.tasks import running
from npu_gr.core.tls import ServerTls, following
from npu_gr.router.admin import build_admin_app
from npu_gr.router.admin_runner import AdminRunner
from npu_gr.router.client import ClientConnection
from npu_gr.router.config import RouterConfig
from npu_gr.router.handover import BACKLOG, Taken, ask, bind, offering
from npu_gr.router.metrics import RouterMetrics
from npu_gr.router.router import Router
from npu_gr.server.auth.browsers import is_loopback_name
from npu_gr.server.loop_lag import probe_loop_lag
from npu_gr.server.tls_listener import TlsListener

log = logging.getLogger(__name__)


@asynccontextmanager
async def listening(config: RouterConfig, takes_over: bool = False) -> AsyncIterator[tuple[Router, int, int]]:
    """Serve until the block ends; then wait for the requests in flight, at most `shutdown_timeout_s`.

    Args:
        config: all settings.
        takes_over: from the router that listens on the same port, if there is one.

    Yields:
        The router, its port and its admin port. Its `taken_over` tells that another router serves in its place.

    Raises:
        ConfigError: the instances cannot be found, a certificate cannot be used, an address cannot be bound, or
            nothing is handed over.
    """
    router = Router(config, RouterMetrics(CollectorRegistry()))
    tls = None if config.tls is None else ServerTls(config.tls, "tls")
    if tls is not None:
        router.metrics.observe_certificate("server", tls.expiry)
    lag = probe_loop_lag(router.metrics.loop_lag_s.observe, router.metrics.loop_freezes.inc)
    async with router.running(), lag, following(tls), AsyncExitStack() as stack:
        taken = await ask(config.host, config.port) if takes_over else Taken({}, None)
        stack.callback(taken.close)
        admins = taken.take("admin", config.admin_port)
        admins = admins or await bind("admin_host, admin_port", config.admin_host, config.admin_port)
        admin = AdminRunner(build_admin_app(router), config.idle_s)
        stack.push_async_callback(admin.cleanup)
        await admin.setup()
        assert admin.server is not None
        admin_tls = None if tls is None or is_loopback_name(config.admin_host) else tls.admin
        admin_servers = await _listen(admin.server, admins, config, admin_tls, stack)
        sockets = taken.take("requests", config.port) or await bind("host, port", config.host, config.port)
        port: int = sockets[0].getsockname()[1]
        admin_port: int = admins[0].getsockname()[1]
        public_tls = None if tls is None else tls.public
        servers = await _listen(lambda: ClientConnection(router), sockets, config, public_tls, stack)
        given = {"requests": sockets, "admin": admins}
        if config.picker is not None:
            given["picker"] = taken.take("picker", config.picker.port) or await bind(
                "picker.host, picker.port", config.picker.host, config.picker.port
            )
            connection, picker_tls = await _start_picker(router, stack)
            servers = [*servers, *await _listen(connection, given["picker"], config, picker_tls, stack)]

        async def go() -> None:
            for server in (*servers, *admin_servers):
                server.close()
            router.taken_over.set()

        try:
            await taken.serving()
            async with offering(config.host, given, go):
                yield router, port, admin_port
        finally:
            router.is_draining = True
            for server in servers:
                server.close()
            await router.connections.close(config.shutdown_timeout_s)


async def _start_picker(
    router: Router, stack: AsyncExitStack
) -> tuple[Callable[[], asyncio.BaseProtocol], SSLContext | None]:
    """Start what the picker needs. Returns what makes the protocol of a connection, and TLS of the address.

    Raises:
        ConfigError: a package is missing, or a certificate cannot be used.
    """
    try:
        from npu_gr.router.picker.addresses import Addresses
        from npu_gr.router.picker.serve import Picker
    except ImportError as error:
        raise ConfigError(f"picker: needs pip install 'npu_gr[picker]' ({error})") from error
    config = router.config
    addresses = Addresses(config, router.members)
    await addresses.look_up()
    await stack.enter_async_context(running(addresses.keep_looking()))
    assert config.picker is not None
    given = config.picker.tls or config.tls
    if given is None:
        return Picker(router, addresses).connection, None
    tls = ServerTls(given, "tls" if config.picker.tls is None else "picker.tls", "h2")
    if config.picker.tls is not None:
        router.metrics.observe_certificate("picker", tls.expiry)
    await stack.enter_async_context(following(tls))
    return Picker(router, addresses).connection, tls.public


async def _listen(
    factory: Callable[[], asyncio.BaseProtocol],
    sockets: list[socket],
    config: RouterConfig,
    tls: SSLContext | None,
    stack: AsyncExitStack,
) -> Sequence[asyncio.Server | TlsListener]:
    if tls is not None:
        listener = TlsListener(
            factory,
            sockets,
            tls,
            handshake_timeout_s=config.header_timeout_s,
            shutdown_timeout_s=config.header_timeout_s,
            max_handshakes=config.limits.max_connections,
        )
        stack.push_async_callback(listener.end)
        return [listener]
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(factory, sock=one, backlog=BACKLOG) for one in sockets]
    for server in servers:
        stack.callback(server.close)
    return servers


async def run(
    config: RouterConfig,
    on_listening: Callable[[int, int], None] = lambda _port, _admin: None,
    takes_over: bool = False,
) -> None:
    """Serve until SIGTERM, SIGINT or a router that takes over; then drain. A second signal stops at once.

    Args:
        config: all settings.
        on_listening: called with the port and the admin port.
        takes_over: from the router that listens on the same port, if there is one.
    """
    async with listening(config, takes_over) as (router, port, admin_port):
        log.info("listening on %s:%d, admin on %s:%d", config.host, port, config.admin_host, admin_port)
        on_listening(port, admin_port)
        with stop_signals() as signals:
            signalled = asyncio.ensure_future(signals.get())
            taken_over = asyncio.ensure_future(router.taken_over.wait())
            await asyncio.wait((signalled, taken_over), return_when=asyncio.FIRST_COMPLETED)
            taken_over.cancel()
            if signalled.done():
                log.info("draining for %.1f s", config.drain_grace_s)
                router.is_draining = True
                signalled = asyncio.ensure_future(signals.get())
            else:
                log.info("another router took over; connections that are open get %.1f s", config.drain_grace_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(signalled, config.drain_grace_s)
    log.info("stopped")
