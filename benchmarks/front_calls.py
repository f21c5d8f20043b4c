"""Python functions that one cached rank calls on the event loop of an engine behind front workers.

Frames go into an engine in this process and come out of it, without a socket, and the ranker answers zeros. CPU time
depends on what else the machine does; this count does not, so it shows what a change saves.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvloop

from benchmarks.front_stub import zeros
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.kinds import RANK
from npu_gr.core.request import RankRequest
from npu_gr.engine.rank_engine import RankEngine
from npu_gr.front import frames
from npu_gr.front.engine.connection import WorkerConnection
from npu_gr.front.engine.door import EngineDoor
from npu_gr.service.app import opened
from npu_gr.service.config import Config

TOGETHER = 4  # ranks that come in one turn of the loop, and share a pass
TURNS = 25
PATIENCE_S = 60.0


def calls_a_rank(config: Config, bodies: Sequence[dict[str, Any]]) -> float:
    """Count the calls.

    Args:
        config: of the engine.
        bodies: ranks, as HTTP has them; each is sent once before, so that its prefix is cached.
    """
    counted: float = uvloop.run(_counted(config, bodies))  # the loop that serves: it has no Python functions
    return counted


class _Answers(asyncio.Transport):
    """The worker's end of the connection: counts the frames that the engine writes."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0
        self._came = asyncio.Event()

    def write(self, data: Any) -> None:
        at = 0
        while at < len(data):
            at += frames.HEADER_BYTES + int.from_bytes(data[at : at + frames.HEADER_BYTES], "little")
            self.num += 1
        self._came.set()

    async def until(self, num: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.num < num:
                self._came.clear()
                await self._came.wait()

    def abort(self) -> None:
        pass


async def _counted(config: Config, bodies: Sequence[dict[str, Any]]) -> float:
    async with opened(config, None, EngineDoor) as instance:
        service = instance.service
        door = service.door
        assert isinstance(door, EngineDoor)

        def nothing(_: Any) -> None:
            pass

        worker = WorkerConnection(
            0, service, door, {}, on_hello=nothing, on_load=nothing, on_stats=nothing, on_lost=lambda _: None
        )
        answers = _Answers()
        worker.peer.connection_made(answers)
        worker.pid = 1
        requests = [_request(body) for body in bodies]
        sent = 0

        async def send(num: int) -> None:
            nonlocal sent
            data = b""
            for _ in range(num):
                sent += 1
                data += _frame(sent, requests[sent % len(requests)])
            worker.peer.get_buffer(-1)[: len(data)] = data
            worker.peer.buffer_updated(len(data))
            await answers.until(sent)

        for _ in requests:
            await send(1)
        with _answering_zeros():
            await send(TOGETHER)
            with _counting() as num_calls:
                for _ in range(TURNS):
                    await send(TOGETHER)
        return num_calls[0] / (TURNS * TOGETHER)


def _request(body: dict[str, Any]) -> Any:
    history = body["history"]
    events = Events.make(history["items"], history["actions"], history["timestamps"])
    request = RankRequest(
        user=UserKey("", body["user_id"]),
        candidates=np.array(body["candidates"], np.int64),
        history=HistoryRef(events=events),
        timestamp=body["timestamp"],
    )
    return frames.pack(frames.BY_KIND[RANK.name].request, request)


def _frame(number: int, request: Any) -> bytes:
    now_at = time.monotonic()
    call = frames.BY_KIND[RANK.name].call(number, now_at + PATIENCE_S, now_at, None, False, request)
    data = frames.encode(call)
    return len(data).to_bytes(frames.HEADER_BYTES, "little") + data


@contextmanager
def _answering_zeros() -> Iterator[None]:
    computed = RankEngine.forward
    RankEngine.forward = zeros  # type: ignore[method-assign]
    try:
        yield
    finally:
        RankEngine.forward = computed  # type: ignore[method-assign]


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Count the calls of Python functions on this thread while the block runs."""
    num = [0]

    def count(_: object, event: str, __: object) -> None:
        num[0] += event == "call"

    sys.setprofile(count)
    try:
        yield num
    finally:
        sys.setprofile(None)
