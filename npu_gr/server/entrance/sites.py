"""An address of a runner: it opens the sockets, and whoever it begins accepts from them.

`app[TLS]` has the contexts of an instance: `public`, and `admin`, which asks nobody for a certificate.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web

from npu_gr.core.sockets import listening_sockets
from npu_gr.core.tls import ServerTls

TLS = web.AppKey("tls", ServerTls)


class Accepting(Protocol):
    """Whoever accepts connections from sockets."""

    sockets: tuple[socket.socket, ...]

    def close(self) -> None:
        """Accept nothing more, and close the sockets."""
        ...

    async def end(self) -> None:
        """Close, and give up connections that are not ready."""
        ...


class Site(web.BaseSite):
    """An address. `start` raises OSError where it cannot be bound, as TCPSite's does."""

    def __init__(
        self,
        runner: web.BaseRunner,
        host: str,
        port: int,
        backlog: int,
        begin: Callable[[Sequence[socket.socket]], Accepting],
        given: socket.socket | None = None,
    ) -> None:
        """Nothing listens yet.

        Args:
            runner: what is served there.
            host: to listen on.
            port: likewise; 0 = the system's choice.
            backlog: connections that wait to be accepted.
            begin: accepts from sockets, which listen and do not block.
            given: listens there already, or is bound to it; None = it is opened here.
        """
        super().__init__(runner, backlog=backlog)
        self._host = host
        self._port = port
        self._begin = begin
        self._given = given
        self._accepting: Accepting | None = None

    @property
    def name(self) -> str:
        """The address, for aiohttp."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen on every address of the host."""
        await super().start()
        if self._given is None:
            sockets = await listening_sockets(self._host, self._port, self._backlog)
        else:
            self._given.listen(self._backlog)
            self._given.setblocking(False)
            sockets = [self._given]
        self._accepting = self._begin(sockets)
        self._server = self._accepting  # type: ignore[assignment]  # aiohttp reads its sockets, and closes it

    async def stop(self) -> None:
        """Accept nothing more, and give up connections that are not ready."""
        await super().stop()
        if self._accepting is not None:
            await self._accepting.end()
