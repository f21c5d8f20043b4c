"""A listening address of a runner over TLS.

`app[TLS]` has the contexts of an instance: `public`, and `admin`, which asks nobody for a certificate.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from ssl import SSLContext

from aiohttp import web

from npu_gr.access.tls import ServerTls
from npu_gr.access.tls_listener import TlsListener
from npu_gr.core.sockets import listening_sockets
from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.listener import Listener

TLS = web.AppKey("tls", ServerTls)


class TlsSite(web.BaseSite):
    """An address that listens over TLS. `start` raises OSError where it cannot be bound, as TCPSite's does."""

    def __init__(
        self,
        runner: web.BaseRunner,
        make: Callable[[], web.RequestHandler],
        listener: Listener,
        config: ServerConfig,
        tls: SSLContext,
        given: socket.socket | None = None,
    ) -> None:
        """Nothing listens yet.

        Args:
            runner: what is served there.
            make: the protocol of a connection.
            listener: names the address.
            config: limits of connections.
            tls: of the handshakes.
            given: listens there already, or is bound to it; None = it is opened here.
        """
        super().__init__(runner, backlog=config.backlog)
        self._make = make
        self._at = listener
        self._config = config
        self._tls = tls
        self._given = given
        self._listener: TlsListener | None = None

    @property
    def name(self) -> str:
        """The address, for aiohttp."""
        return f"https://{self._at.host}:{self._at.port}"

    async def start(self) -> None:
        """Listen on every address of the host."""
        await super().start()
        if self._given is None:
            sockets = await listening_sockets(self._at.host, self._at.port, self._backlog)
        else:
            self._given.listen(self._backlog)
            sockets = [self._given]
        self._listener = TlsListener(
            self._make,
            sockets,
            self._tls,
            handshake_timeout_s=self._config.header_timeout_s,
            shutdown_timeout_s=self._config.write_timeout_s,
            max_handshakes=self._at.max_connections,
        )
        self._server = self._listener  # type: ignore[assignment]  # aiohttp reads its sockets, and closes it

    async def stop(self) -> None:
        """Accept nothing more, and end the handshakes."""
        await super().stop()
        if self._listener is not None:
            await self._listener.end()
