"""Connections in clear are accepted a few in a turn, rest while somebody else accepts, and survive a lack of files."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from npu_gr.server.entrance.clear_listener import MOST_AT_ONCE, ClearListener
from npu_gr.server.entrance.shedding import Newcomer
from tests.serving import until


class Known(asyncio.Protocol):
    """A connection that keeps what came."""

    made: list[Known]

    def __init__(self) -> None:
        self.newcomer: Newcomer | None = None
        self.data = b""
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.made.append(self)

    def data_received(self, data: bytes) -> None:
        self.data += data


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[ClearListener, list[Known], Any]]:
    made: list[Known] = []
    told: list[Any] = []

    class Here(Known):
        pass

    Here.made = made
    at = socket.create_server(("127.0.0.1", 0), backlog=128)
    at.setblocking(False)
    address = at.getsockname()
    listener = ClearListener(Here, [at], told.append)  # type: ignore[arg-type]
    try:
        yield listener, made, address
    finally:
        await listener.end()
        assert set(told) == {listener}
        for one in made:
            one.transport.abort()  # type: ignore[union-attr]


def call(address: Any) -> socket.socket:
    caller = socket.create_connection(address)
    caller.settimeout(5)
    return caller


async def test_a_turn_accepts_no_more_than_its_share() -> None:
    async with listening() as (listener, made, address):
        callers = [call(address) for _ in range(3 * MOST_AT_ONCE)]
        for caller in callers:
            caller.sendall(b"hello")
        (at,) = listener.sockets
        listener._accept(at)
        assert len(listener._opening) == MOST_AT_ONCE
        await until(lambda: len(made) == len(callers))
        await until(lambda: all(one.data == b"hello" for one in made))
        for caller in callers:
            caller.close()


async def test_while_it_rests_others_may_accept() -> None:
    async with listening() as (listener, made, address):
        listener.rest()
        listener.rest()
        caller = call(address)
        await asyncio.sleep(0.05)
        assert made == []
        accepted, _ = listener.sockets[0].accept()
        accepted.setblocking(False)
        caller.sendall(b"then")
        await listener.adopt(accepted, Newcomer(0, b"first", 0.0))
        (one,) = made
        assert one.newcomer == Newcomer(0, b"first", 0.0)
        await until(lambda: one.data == b"then")
        listener.go_on()
        listener.go_on()
        call(address).close()
        await until(lambda: len(made) == 2)
        caller.close()


async def test_without_a_descriptor_it_pauses_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as (_listener, made, address):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        caller = socket.socket()
        caller.setblocking(False)
        try:
            os.close(lowest := os.dup(caller.fileno()))
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            with pytest.raises(BlockingIOError):
                caller.connect(address)
            await asyncio.sleep(0.35)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        lines = [record.getMessage() for record in caplog.records if "can be accepted" in record.getMessage()]
        assert 1 <= len(lines) <= 4
        await until(lambda: len(made) == 1)
        caller.close()


async def test_after_the_end_nothing_is_accepted_and_a_late_call_changes_nothing() -> None:
    async with listening() as (listener, made, address):
        await listener.end()
        listener.go_on()
        with pytest.raises(ConnectionRefusedError):
            call(address)
        assert made == []
