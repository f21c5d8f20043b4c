"""Accepts connections and shakes hands; a connection that is silent meanwhile is known, counted and bounded.

asyncio's own servers tell nobody of a connection before its handshake is over: a caller that connects and says nothing
would hold a descriptor that no limit counts.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Callable, Sequence
from socket import socket
from typing import Protocol, runtime_checkable

log = logging.getLogger(__name__)

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
READ_AHEAD_BYTES = 65_536
_PAUSE_S = 0.1  # before the next connection is accepted, when there is no descriptor for it


@runtime_checkable
class Greeted(Protocol):
    """A connection that wants to know of itself before its handshake is over. Others hear of it afterwards."""

    def accepted(self, abort: Callable[[], object]) -> None:
        """TCP is there, TLS is not yet; `abort` ends the connection."""
        ...

    def not_secured(self) -> None:
        """The handshake failed, or was too late, or was aborted: the connection is gone."""
        ...


def bound_read_ahead(transport: asyncio.BaseTransport) -> None:
    """Limit what TLS decrypts of a connection that is not read; no other limit counts those bytes."""
    if transport.get_extra_info("sslcontext") is not None:
        transport.set_read_buffer_limits(READ_AHEAD_BYTES)  # type: ignore[attr-defined]


class TlsListener:
    """Connections over TLS from some listening sockets. Event loop only. What it has is like an asyncio server's."""

    def __init__(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        sockets: Sequence[socket],
        context: ssl.SSLContext,
        *,
        handshake_timeout_s: float,
        shutdown_timeout_s: float,
        max_handshakes: int,
    ) -> None:
        """Accept from now on.

        Args:
            factory: makes the protocol of a connection.
            sockets: they listen and do not block; `close` closes them.
            context: of the handshakes.
            handshake_timeout_s: a handshake takes no longer.
            shutdown_timeout_s: for the end of a connection: what was written leaves, and the caller agrees.
            max_handshakes: at the same time; one more ends the oldest.
        """
        self._factory = factory
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._max_handshakes = max_handshakes
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self.sockets = tuple(sockets)
        loop = asyncio.get_running_loop()
        self._accepting = [loop.create_task(self._accept(one)) for one in self.sockets]

    @property
    def num_handshakes(self) -> int:
        """How many connections shake hands now."""
        return len(self._handshakes)

    def close(self) -> None:
        """Accept nothing more; handshakes go on."""
        for task in self._accepting:
            task.cancel()
        for one in self.sockets:
            one.close()

    async def end(self) -> None:
        """Close, and end the handshakes."""
        self.close()
        tasks = [*self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listening: socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    log.error("no connection can be accepted: %s", error.strerror)
                    await asyncio.sleep(_PAUSE_S)
                continue  # the caller left before it was accepted
            task = loop.create_task(self._shake_hands(accepted, self._factory()))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))
            if len(self._handshakes) > self._max_handshakes:
                next(iter(self._handshakes)).cancel()

    async def _shake_hands(self, accepted: socket, protocol: asyncio.BaseProtocol) -> None:
        task = asyncio.current_task()
        assert task is not None
        is_secured = False
        if isinstance(protocol, Greeted):
            protocol.accepted(task.cancel)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_timeout_s,
                ssl_shutdown_timeout=self._shutdown_timeout_s,
            )
            is_secured = True
        except OSError as error:  # of TLS too; a stranger's noise, so it is no line in the log
            log.debug("a handshake failed: %s", error)
        finally:
            if not is_secured:
                accepted.close()
                if isinstance(protocol, Greeted):
                    protocol.not_secured()
