"""A refusal stays cheap, counted in calls of Python functions: they are the same on a busy machine and a quiet one."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import Counter
from types import FrameType
from typing import Any

from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.runner import DoorRunner
from npu_gr.server.routes import build_web_app
from tests.server.entrance.test_connection import WHOLE
from tests.server.fake import FakeService, metrics_of_all_kinds

MOST_CALLS = 35  # of one refusal; 31 when this was written, and 41 before


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX)

    def write(self, data: Any) -> None:
        self.answers.append(bytes(data))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket if name == "socket" else default

    def close(self) -> None:
        self._socket.close()


async def test_a_refusal_takes_few_calls() -> None:
    service = FakeService({})
    runner = DoorRunner(build_web_app(service, ServerConfig(), metrics_of_all_kinds()))
    await runner.setup()
    transport = Written()
    connection = runner._maker(runner._entrance.everything)()
    connection.connection_made(transport)
    service.door._lanes["rank"].pace.seconds = 10.0  # so nobody who comes while it is full can be in time
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    try:
        with await service.fill():
            connection.data_received(WHOLE)
            connection.refused_at = float("-inf")  # type: ignore[attr-defined]
            sys.setprofile(count)
            connection.data_received(WHOLE)
            sys.setprofile(None)
    finally:
        connection.connection_lost(None)
        transport.close()
        await runner.cleanup()
    assert [answer.split(b"\r\n")[0] for answer in transport.answers] == [b"HTTP/1.1 429 Too Many Requests"] * 2
    assert calls["Door.arrive"] == 1
    assert calls.total() <= MOST_CALLS, calls.most_common()
