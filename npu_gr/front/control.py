"""What the supervisor and its processes say to each other: short messages over a socket pair, with sockets in them.

    to the engine    worker N STARTS + socket, unready WHY, drain, reload, stop
    to a worker      listen COUNTS + sockets, engine + socket, stop
    from the engine  ready, alive, stuck N WHY
    from a worker    listening

Its end is the end of the supervisor: whoever reads it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

_MOST_BYTES = 65_536
_MOST_SOCKETS = 64


class Message(NamedTuple):
    """One message."""

    name: str
    values: list[Any]
    sockets: list[socket.socket]


class Control:
    """One end. Event loop only."""

    def __init__(self, sock: socket.socket) -> None:
        """Say nothing yet.

        Args:
            sock: of a pair of SOCK_SEQPACKET.
        """
        sock.setblocking(False)
        self._socket = sock
        self._queue = asyncio.Queue[Message | None]()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)
        self._is_open = True

    def send(self, name: str, *values: Any, sockets: Sequence[socket.socket] = ()) -> None:
        """Send a message; nothing happens where the other side is gone, or takes nothing."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [msgspec.msgpack.encode([name, *values])], [one.fileno() for one in sockets])

    async def receive(self) -> Message | None:
        """Wait for a message; None = the other side is gone."""
        return await self._queue.get()

    def close(self) -> None:
        """Close this end."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, _MOST_SOCKETS)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._loop.remove_reader(self._socket)
            self._queue.put_nowait(None)
            return
        name, *values = msgspec.msgpack.decode(data)
        self._queue.put_nowait(Message(name, values, [socket.socket(fileno=fd) for fd in fds]))
