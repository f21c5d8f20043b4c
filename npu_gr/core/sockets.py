"""Sockets that listen."""

from __future__ import annotations

import asyncio
import socket


async def listening_sockets(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listen on every address of a host; the sockets do not block.

    Args:
        host: a name or an address; "" = all addresses of this machine.
        port: 0 = any free one, for each address another.
        backlog: connections that wait to be accepted.

    Raises:
        OSError: an address cannot be bound; none is.
    """
    loop = asyncio.get_running_loop()
    bound: list[socket.socket] = []
    try:
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((one[0], one[4][:2]) for one in found):
            bound.append(socket.create_server(address, family=family, backlog=backlog))
    except OSError:
        for one in bound:
            one.close()
        raise
    for one in bound:
        one.setblocking(False)
    return bound
