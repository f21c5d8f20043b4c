"""A TCP proxy on loopback that breaks on demand, as a network or a sick server does.

    async with FaultProxy("127.0.0.1", 6379) as proxy:
        ... connect to 127.0.0.1:proxy.port ...
        proxy.set("late", late_s=0.3)

A mode holds for open connections too, from the next bytes on.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Literal, Self

Mode = Literal["pass", "hang", "late", "reset", "half"]


class FaultProxy:
    """Passes bytes between its clients and one server.

    pass    as they come
    hang    neither way: clients connect and hear nothing; what was held goes on in the next mode
    late    answers wait for `late_s`
    reset   every connection is reset, new ones as soon as they are made
    half    of the next answer half of the bytes come, then the connection is reset
    """

    def __init__(self, host: str | None, port: int | None, *, path: str | None = None) -> None:
        """Listen nowhere yet.

        Args:
            host, port: of the server.
            path: of the server's Unix socket, in their place.
        """
        self._host = host
        self._port = port
        self._path = path
        self._mode: Mode = "pass"
        self._late_s = 0.0
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self._reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set(self, mode: Mode, *, late_s: float = 0.0) -> None:
        """Change the mode, for open and for new connections."""
        self._mode = mode
        self._late_s = late_s
        self._changed.set()
        self._changed = asyncio.Event()
        if mode == "reset":
            self._reset()

    @property
    def num_connections(self) -> int:
        """Connections of clients that are open."""
        return len(self._writers) // 2

    def _reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._mode == "reset":
            writer.transport.abort()
            return
        try:
            if self._path is not None:
                its_reader, its_writer = await asyncio.open_unix_connection(self._path)
            else:
                its_reader, its_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, its_writer}
        self._writers |= both
        pumps = [
            asyncio.ensure_future(self._ask(reader, its_writer)),
            asyncio.ensure_future(self._answer(its_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            return  # the proxy is being closed; asyncio.start_server would log the cancellation
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers -= both
            for one in both:
                one.transport.abort()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._while_hanging()
            writer.write(data)
            await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._while_hanging()
            if self._mode == "late":
                await asyncio.sleep(self._late_s)
            if self._mode == "half":
                writer.write(data[: len(data) // 2])
                await writer.drain()
                return
            writer.write(data)
            await writer.drain()

    async def _while_hanging(self) -> None:
        while self._mode == "hang":
            await self._changed.wait()
