"""The listening address of a runner, in clear or over TLS.

`app[TLS]` has the contexts of an instance: `public`, and `admin`, which asks nobody for a certificate.
"""

from __future__ import annotations

from ssl import SSLContext

from aiohttp import web

from npu_gr.access.tls import ServerTls
from npu_gr.access.tls_listener import TlsListener
from npu_gr.core.sockets import listening_sockets
from npu_gr.server.config import ServerConfig

TLS = web.AppKey("tls", ServerTls)


def site_of(runner: web.BaseRunner, host: str, port: int, config: ServerConfig, tls: SSLContext | None) -> web.BaseSite:
    """Make the site of an address; `start` listens.

    Args:
        runner: what is served there.
        host: a name or an address.
        port: 0 = any free one.
        config: its limits.
        tls: None = in clear.
    """
    if tls is None:
        return web.TCPSite(runner, host, port, backlog=config.backlog)
    return TlsSite(runner, host, port, config, tls)


class TlsSite(web.BaseSite):
    """An address that listens over TLS. `start` raises OSError where it cannot be bound, as TCPSite's does."""

    def __init__(self, runner: web.BaseRunner, host: str, port: int, config: ServerConfig, tls: SSLContext) -> None:
        super().__init__(runner, backlog=config.backlog)
        self._host = host
        self._port = port
        self._config = config
        self._tls = tls
        self._listener: TlsListener | None = None

    @property
    def name(self) -> str:
        """The address, for aiohttp."""
        return f"https://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen on every address of the host."""
        await super().start()
        server = self._runner.server
        assert server is not None
        self._listener = TlsListener(
            server,
            await listening_sockets(self._host, self._port, self._backlog),
            self._tls,
            handshake_timeout_s=self._config.header_timeout_s,
            shutdown_timeout_s=self._config.write_timeout_s,
            max_handshakes=self._config.max_connections,
        )
        self._server = self._listener  # type: ignore[assignment]  # aiohttp reads its sockets, and closes it

    async def stop(self) -> None:
        """Accept nothing more, and end the handshakes."""
        await super().stop()
        if self._listener is not None:
            await self._listener.end()
