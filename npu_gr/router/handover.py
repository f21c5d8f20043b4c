"""A router that starts takes the listening sockets over from the one that runs: no connection is refused or reset.

Both hold the same sockets for a moment, with one queue of connections. So there is no instant at which nobody listens,
and nothing in the queue is lost when the old router closes its copies. (With SO_REUSEPORT each would have a queue of
its own, and the kernel resets what is in the old one's when that is closed.)

    old: offers ─────────────────────────► sends its sockets ─────────────► closes its copies, drains, exits
    new: find instances, check them, ask ──────────────► accept, "serving" ────► offers

They meet at an abstract Unix socket that is named after the port: like the port it belongs to the network namespace,
and it leaves no file behind. It has no permissions, so both sides check the other's user: the same one, or root.
If the new router fails before it has said "serving", the old one goes on as if nothing had been.

Linux only. Elsewhere nothing is offered, and a router is restarted behind a balancer.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from npu_gr.core.errors import ConfigError
from npu_gr.core.sockets import listening_sockets
from npu_gr.core.tasks import running

log = logging.getLogger(__name__)
Sockets = dict[str, list[socket.socket]]  # by what is served there: "requests", "admin"
BACKLOG = 4096  # connections that wait to be accepted
_SERVING = b"serving"
_MAX_SOCKETS = 32
_ANSWER_S = 5.0  # how long each side waits for the other


async def bind(field: str, host: str, port: int) -> list[socket.socket]:
    """Listen on every address of a host.

    Args:
        field: names the settings in the error.
        host: a name or an address.
        port: 0 = any free one.

    Raises:
        ConfigError: an address cannot be bound.
    """
    try:
        return await listening_sockets(host, port, BACKLOG)
    except OSError as error:
        hint = "; --take-over takes it over from a router" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"{field}: cannot listen on {host}:{port}: {error}{hint}") from error


class Taken:
    """What a running router gave. Nothing: there was none."""

    def __init__(self, sockets: Sockets, giver: socket.socket | None) -> None:
        self._sockets = sockets
        self._giver = giver

    def take(self, name: str, port: int) -> list[socket.socket]:
        """Take the sockets of this name if they listen on this port, otherwise nothing."""
        given = self._sockets.pop(name, [])
        if all(one.getsockname()[1] == port for one in given):
            return given
        for one in given:
            one.close()
        return []

    def close(self) -> None:
        """Close what was not taken; the router that gave goes on if it was not told otherwise."""
        for one in (*(one for some in self._sockets.values() for one in some), *filter(None, (self._giver,))):
            one.close()

    async def serving(self) -> None:
        """Tell the router that gave that it may go, and wait until it offers nothing any more."""
        if self._giver is None:
            return
        loop = asyncio.get_running_loop()
        giver, self._giver = self._giver, None
        with giver:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await loop.sock_sendall(giver, _SERVING)
                    await loop.sock_recv(giver, 1)
            except OSError as error:  # a TimeoutError is one
                log.warning("the router before did not say that it goes: %s", error)


async def ask(host: str, port: int) -> Taken:
    """Ask the router that listens on this address for its sockets.

    Raises:
        ConfigError: it belongs to another user, or gives nothing.
    """
    if sys.platform != "linux":
        raise ConfigError("--take-over: needs Linux")
    loop = asyncio.get_running_loop()
    giver = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    giver.setblocking(False)
    try:
        async with asyncio.timeout(_ANSWER_S):
            await loop.sock_connect(giver, _address(host, port))
            _check_user(giver)
            await _readable(giver)
            text, fds, _, _ = socket.recv_fds(giver, 4096, _MAX_SOCKETS)
    except ConnectionRefusedError:  # nobody runs
        giver.close()
        return Taken({}, None)
    except TimeoutError as error:
        giver.close()
        raise ConfigError(f"--take-over: the router that runs gives nothing within {_ANSWER_S:g} s") from error
    except OSError as error:
        giver.close()
        raise ConfigError(f"--take-over: {error}") from error
    open_ = [socket.socket(fileno=fd) for fd in fds]
    for one in open_:
        one.setblocking(False)
    sockets = {name: [open_.pop(0) for _ in range(num)] for name, num in json.loads(text or b"{}").items()}
    if not sockets:
        giver.close()
        raise ConfigError("--take-over: the router that runs gives nothing")
    return Taken(sockets, giver)


@asynccontextmanager
async def offering(host: str, sockets: Sockets, on_taken: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Give the sockets to the first router that asks and says that it serves, while the block runs.

    Args:
        host: as configured.
        sockets: they listen; the port of the first of "requests" names the offer.
        on_taken: called once: another router serves, this one is to go. It closes its copies.
    """
    if sys.platform != "linux":
        yield
        return
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.setblocking(False)
    try:
        door.bind(_address(host, sockets["requests"][0].getsockname()[1]))
        door.listen(4)
    except OSError as error:
        door.close()
        log.warning("no other router can take this one's sockets over: %s", error)
        yield
        return
    with door:
        async with running(_give(door, sockets, on_taken)):
            yield


async def _give(door: socket.socket, sockets: Sockets, on_taken: Callable[[], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    text = json.dumps({name: len(some) for name, some in sockets.items()}).encode()
    fds = [one.fileno() for some in sockets.values() for one in some]
    while True:
        taker, _ = await loop.sock_accept(door)
        with taker:
            try:
                _check_user(taker)
                socket.send_fds(taker, [text], fds)
                async with asyncio.timeout(_ANSWER_S):
                    is_taken = await loop.sock_recv(taker, len(_SERVING)) == _SERVING
            except OSError as error:
                log.warning("another router asked for the sockets, in vain: %s", error)
                continue
            if is_taken:
                door.close()  # its name is free before the other one reads the end of this connection
                await on_taken()
                return


def _address(host: str, port: int) -> bytes:
    return b"\0npu-gr-router %s:%d" % (host.encode(), port)


def _check_user(peer: socket.socket) -> None:
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user not in _users():
        raise PermissionError(f"the other router belongs to user {user}, this one to {os.geteuid()}")


def _users() -> tuple[int, ...]:
    return (os.geteuid(), 0)


async def _readable(one: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(one.fileno(), is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(one.fileno())
