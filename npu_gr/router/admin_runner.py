"""The aiohttp runner of the operators' address: it has few connections, and none that says nothing stays.

Without a limit, callers who reach that address could take all descriptors of the process, and the public address's too.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiohttp import web

MAX_CONNECTIONS = 64


class AdminRunner(web.AppRunner):
    """An `AppRunner` with a limit of connections, which inflates nothing."""

    def __init__(self, app: web.Application, idle_s: float) -> None:
        """Make it.

        Args:
            app: the application.
            idle_s: a connection that waits for a request, or for the rest of its headers, ends after this time.
        """
        super().__init__(app, access_log=None)
        self._idle_s = idle_s

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            access_log=None,
            auto_decompress=False,  # 1 kB of a caller's may inflate to a gigabyte
            keepalive_timeout=self._idle_s,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def make_room(self) -> None:
        """End connections that wait, the oldest first, if there are more than the limit; if none waits, the newest."""
        connections = cast("list[_Connection]", self.connections)
        waiting = [one for one in connections if one.is_waiting]
        for one in (waiting or connections[::-1])[: max(0, len(connections) - MAX_CONNECTIONS)]:
            one.force_close()


class _Connection(web.RequestHandler):
    def __init__(self, server: _Server, **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._server = server

    @property
    def is_waiting(self) -> bool:
        """Whether it has no whole request."""
        return self._current_request is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.make_room()
