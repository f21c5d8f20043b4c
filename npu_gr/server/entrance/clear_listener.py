"""Accepts connections in clear, a few in a turn of the event loop, or lets the shedder accept them.

An event loop's own servers accept all that wait in one turn: a thousand callers who connect anew at once would hold it
for a quarter of a second. And nobody can accept in their place, which the shedder does while requests are refused.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from socket import socket

from npu_gr.server.entrance.connection import Connection
from npu_gr.server.entrance.shedding import Acceptor, Newcomer

log = logging.getLogger(__name__)

MOST_AT_ONCE = 16  # connections of a socket in a turn
PAUSE_S = 0.1  # before the next connection is accepted, when there is no descriptor for it
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ClearListener:
    """Connections from some listening sockets. Event loop only."""

    def __init__(
        self, factory: Callable[[], Connection], sockets: Sequence[socket], closes: Callable[[Acceptor], None]
    ) -> None:
        """Accept from now on.

        Args:
            factory: makes the protocol of a connection.
            sockets: they listen and do not block; `close` closes them.
            closes: told before the sockets are closed.
        """
        self._factory = factory
        self._closes = closes
        self.sockets = tuple(sockets)
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._rests = True
        self._is_closed = False
        self._pause: asyncio.TimerHandle | None = None  # there is no descriptor
        self.go_on()

    def rest(self) -> None:
        """Accept nothing until `go_on`: the shedder does."""
        if self._pause is not None:
            self._pause.cancel()
        if not self._rests:
            self._rests = True
            for one in self.sockets:
                self._loop.remove_reader(one)

    def go_on(self) -> None:
        """Accept again."""
        if self._rests and not self._is_closed:
            self._rests = False
            for one in self.sockets:
                self._loop.add_reader(one, self._accept, one)

    def close(self) -> None:
        """Accept nothing more."""
        self._closes(self)
        self.rest()
        self._is_closed = True
        for one in self.sockets:
            one.close()

    async def end(self) -> None:
        """Close, and give up connections that are not ready."""
        self.close()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self, listening: socket) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                accepted, _address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    continue  # the caller left before it was accepted
                log.error("no connection can be accepted: %s", error.strerror)
                self.rest()
                self._pause = self._loop.call_later(PAUSE_S, self.go_on)
                return
            accepted.setblocking(False)
            self.adopt(accepted)

    def adopt(self, accepted: socket, newcomer: Newcomer | None = None) -> asyncio.Task[None]:
        """Make a connection of a socket; done when it can be read.

        Args:
            accepted: does not block.
            newcomer: what the shedder says of it.
        """
        task = self._loop.create_task(self._open(accepted, newcomer))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return task

    async def _open(self, accepted: socket, newcomer: Newcomer | None) -> None:
        protocol = self._factory()
        protocol.newcomer = newcomer
        is_open = False
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted)
            is_open = True
        except OSError as error:
            log.debug("a connection came to nothing: %s", error)
        finally:
            if not is_open:
                accepted.close()
