"""A body that is passed on while it still arrives is ended exactly once; otherwise the connection is not reused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from npu_gr.core.settings import from_table
from npu_gr.router.config import RouterConfig
from npu_gr.router.run import listening
from tests.router.fake import site

_HEAD = b"POST /v1/rank HTTP/1.1\r\nHost: a\r\nX-User-Id: u\r\n"
_CHUNK = b"%x\r\n%s\r\n" % (300_000, b"x" * 300_000)  # over `stream_over_bytes`


async def test_a_request_behind_a_streamed_one_does_not_repeat_its_end() -> None:
    async with site(1) as s:
        s.fakes[0].delay_s = 0.3
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNK)
        await s.until(lambda: s.router.in_flight)
        writer.write(b"0\r\n\r\n")
        await s.until(lambda: s.fakes[0].bodies)
        for _ in range(2):
            writer.write(_HEAD + b"Content-Length: 1\r\n\r\na")
            await asyncio.sleep(0.05)
        answers = [await reader.readuntil(b"}") for _ in range(3)]
        writer.close()
        assert [answer[:13] for answer in answers] == [b"HTTP/1.1 200 "] * 3
        assert [b'"size": %d' % size in answer for size, answer in zip((300_000, 1, 1), answers, strict=True)] == [
            True
        ] * 3
        assert [len(body) for body in s.fakes[0].bodies] == [300_000, 1, 1]


class Hasty:
    """An instance that answers slowly before it has read the body, and keeps what each connection sends."""

    def __init__(self) -> None:
        self.received: list[bytearray] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = bytearray()
        while line := await reader.read(65536):
            received += line
            if received.startswith(b"GET /readyz"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                received.clear()
            elif b"POST" in received and not any(received is one for one in self.received):
                self.received.append(received)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
                asyncio.get_running_loop().call_later(0.3, writer.write, b"k")
        writer.close()


@asynccontextmanager
async def hasty() -> AsyncIterator[tuple[Hasty, int]]:
    instance = Hasty()
    server = await asyncio.start_server(instance.serve, "127.0.0.1", 0)
    row = {"name": "one", "host": "127.0.0.1", "port": server.sockets[0].getsockname()[1]}
    config = from_table({"port": 0, "admin_port": 0, "discovery": {"instances": [row]}}, RouterConfig)
    async with server, listening(config) as (_, port, _admin):
        yield instance, port


async def test_a_connection_whose_request_was_not_sent_to_its_end_is_not_used_again() -> None:
    async with hasty() as (instance, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNK)
        assert (await reader.readuntil(b"o")).startswith(b"HTTP/1.1 200 ")
        await reader.readuntil(b"\r\n\r\no")
        writer.write(b"0\r\n\r\n")  # the answer has begun: the rest of the body goes nowhere
        assert await reader.read() == b"k"
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_HEAD + b"Content-Length: 1\r\n\r\na")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        writer.close()
        assert len(instance.received) == 2, "the second request went into the first one's body"
