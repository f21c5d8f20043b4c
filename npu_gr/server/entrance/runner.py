"""The aiohttp runner whose connections come through the entrance."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial
from ssl import SSLContext
from typing import Any

from aiohttp import web

from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.clear_listener import ClearListener
from npu_gr.server.entrance.connection import Connection
from npu_gr.server.entrance.entrance import ENTRANCE, Entrance
from npu_gr.server.entrance.listener import Listener
from npu_gr.server.entrance.sites import Accepting, Site
from npu_gr.server.tls_listener import TlsListener

_FOREVER_S = 86_400.0 * 365  # aiohttp's own keep-alive timer is not used: the entrance knows what a connection is doing


class DoorRunner(web.AppRunner):
    """An `AppRunner` whose connections come through the entrance of its application."""

    def __init__(self, app: web.Application, **kwargs: Any) -> None:
        super().__init__(app, access_log=None, handler_cancellation=True, **kwargs)
        self._entrance = app[ENTRANCE]

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._entrance)

    async def cleanup(self) -> None:
        await super().cleanup()
        self._entrance.close()

    async def listen(
        self, listener: Listener, config: ServerConfig, tls: SSLContext | None, given: socket.socket | None = None
    ) -> int:
        """Listen at an address; returns its port.

        Args:
            listener: names it, and says what it serves.
            config: limits of connections.
            tls: None = in clear.
            given: listens there already, or is bound to it; None = it is opened here.

        Raises:
            OSError: the address cannot be bound.
        """
        make = self._maker(listener)
        begin: Callable[[Sequence[socket.socket]], Accepting]
        if tls is None:
            begin = partial(self._accept, listener, make)
        else:
            begin = partial(
                TlsListener,
                make,
                context=tls,
                handshake_timeout_s=config.header_timeout_s,
                shutdown_timeout_s=config.write_timeout_s,
                max_handshakes=listener.max_connections,
            )
        site = Site(self, listener.host, listener.port, config.backlog, begin, given)
        await site.start()
        port: int = self.addresses[-1][1]
        return port

    async def listen_at(self, listener: Listener, path: str) -> None:
        """Listen at a Unix socket."""
        site = _UnixSite(self, self._maker(listener), path)
        await site.start()

    def _accept(
        self, listener: Listener, make: Callable[[], Connection], sockets: Sequence[socket.socket]
    ) -> ClearListener:
        made = ClearListener(make, sockets, self._entrance.accepts_no_more)
        if listener.is_public:
            self._entrance.acceptors.append(made)
        return made

    def _maker(self, listener: Listener) -> Callable[[], Connection]:
        assert isinstance(self.server, _Server), "set up first"
        return partial(self.server, listener)


class _UnixSite(web.UnixSite):
    """The same at a Unix socket."""

    def __init__(self, runner: DoorRunner, make: Callable[[], web.RequestHandler], path: str) -> None:
        super().__init__(runner, path)
        self._make = make

    async def start(self) -> None:
        await web.BaseSite.start(self)
        self._server = await asyncio.get_running_loop().create_unix_server(
            self._make, self._path, backlog=self._backlog
        )


class _Server(web.Server):
    def __init__(self, made: web.Server, entrance: Entrance) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            access_log=None,
            auto_decompress=False,  # 1 kB of a caller's may inflate to a gigabyte
            keepalive_timeout=_FOREVER_S,
        )
        self._entrance = entrance

    def __call__(self, listener: Listener | None = None) -> Connection:
        """Make the protocol of a connection; those of aiohttp's own sites are served everything."""
        return Connection(self, self._entrance, listener or self._entrance.everything, loop=self._loop, **self._kwargs)
