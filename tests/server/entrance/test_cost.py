"""Requests stay cheap, counted in calls of Python functions: they are the same on a busy machine and a quiet one."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.runner import DoorRunner
from npu_gr.server.routes import build_web_app
from tests.server.entrance.test_connection import WHOLE
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, metrics_of_all_kinds

MOST_CALLS = 35  # of one refusal; 31 when this was written, and 41 before
MOST_CALLS_OF_A_RANK = 235  # from its bytes to its answer's, without the service; 223, and 275 by aiohttp's own loop


_OURS = re.compile(r"/(npu_gr|aiohttp|prometheus_client)/")


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bytes] = []
        self.has_written = asyncio.Event()
        self._socket = socket.socket(socket.AF_UNIX)

    def write(self, data: Any) -> None:
        self.answers.append(bytes(data))
        self.has_written.set()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def close(self) -> None:
        self._socket.close()


class Counted:
    """Calls of Python functions of ours and of aiohttp while the block runs."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def __enter__(self) -> Counter[str]:
        sys.setprofile(self._count)
        return self.calls

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and _OURS.search(frame.f_code.co_filename):
            self.calls[frame.f_code.co_qualname] += 1


@asynccontextmanager
async def connected(service: FakeService) -> AsyncIterator[tuple[Any, Written]]:
    runner = DoorRunner(build_web_app(service, ServerConfig(), metrics_of_all_kinds()))
    await runner.setup()
    transport = Written()
    connection = runner._maker(runner._entrance.everything)()
    connection.connection_made(transport)
    try:
        yield connection, transport
    finally:
        connection.connection_lost(None)
        transport.close()
        await runner.cleanup()


async def test_a_refusal_takes_few_calls() -> None:
    service = FakeService({})
    async with connected(service) as (connection, transport):
        service.door._lanes["rank"].pace.seconds = 10.0  # so nobody who comes while it is full can be in time
        with await service.fill():
            connection.data_received(WHOLE)
            connection.refused_at = float("-inf")
            with Counted() as calls:
                connection.data_received(WHOLE)
                connection._entrance.refusals.write()
    assert [answer.split(b"\r\n")[0] for answer in transport.answers] == [b"HTTP/1.1 429 Too Many Requests"] * 2
    assert calls["Door.arrive"] == 1
    assert calls.total() <= MOST_CALLS, calls.most_common()


async def test_a_rank_takes_few_calls() -> None:
    service = FakeService({"rank": EXAMPLES["rank"].answer})
    async with connected(service) as (connection, transport):
        counts = []
        for _ in range(2):
            transport.has_written.clear()
            with Counted() as calls:
                connection.data_received(WHOLE)
                await transport.has_written.wait()
            counts.append(calls)
    assert [answer.split(b"\r\n")[0] for answer in transport.answers] == [b"HTTP/1.1 200 OK"] * 2
    assert len(service.served) == 2
    assert counts[1].total() <= MOST_CALLS_OF_A_RANK, counts[1].most_common()
