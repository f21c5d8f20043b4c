"""The aiohttp runner whose connections come through the entrance."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from npu_gr.server.entrance.connection import Connection
from npu_gr.server.entrance.entrance import ENTRANCE, Entrance

_FOREVER_S = 86_400.0 * 365  # aiohttp's own keep-alive timer is not used: the entrance knows what a connection is doing


class DoorRunner(web.AppRunner):
    """An `AppRunner` whose connections come through the entrance of its application."""

    def __init__(self, app: web.Application, **kwargs: Any) -> None:
        super().__init__(app, access_log=None, handler_cancellation=True, **kwargs)
        self._entrance = app[ENTRANCE]

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made, self._entrance)


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

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._entrance, loop=self._loop, **self._kwargs)
