"""The picker on grpcio instead of our own frames: the same `Pick`, the same messages, another server under them.

python -m benchmarks.picker_grpcio CONFIG aio|threads

Serves at `picker.port` of a router's configuration until the process is ended.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgspec
import uvloop

from npu_gr.router.config import RouterConfig, load
from npu_gr.router.picker import external_processor_pb2 as pb
from npu_gr.router.picker.addresses import Addresses
from npu_gr.router.picker.pick import Pick, Picks
from npu_gr.router.picker.streams import CallStatus
from npu_gr.router.run import listening

_SERVING = pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVING).SerializeToString()
_NUM_THREADS = 64  # a call keeps its own until the request is over


class _Outbox:
    """Keeps what a pick sends, as its stream."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self._messages: list[bytes] = []
        self.is_over = False

    def send(self, message: bytes) -> None:
        self._messages.append(message)

    def end(self, _status: CallStatus = CallStatus.OK, _text: str = "") -> None:
        self.is_over = True

    def take(self) -> list[bytes]:
        messages, self._messages = self._messages, []
        return messages


MakePick = Callable[[_Outbox], Pick]


class _Aio:
    """The call on grpcio's event loop."""

    def __init__(self, picks: MakePick) -> None:
        self._picks = picks

    async def process(self, _: Any, context: Any) -> None:
        outbox = _Outbox()
        pick = self._picks(outbox)
        try:
            while not outbox.is_over and isinstance(message := await context.read(), bytes):
                pick.received(message)
                for answer in outbox.take():
                    await context.write(answer)
        finally:
            pick.dropped()

    async def check(self, _message: bytes, _context: Any) -> bytes:
        return _SERVING


class _Threads:
    """The call on a pool of threads. One of them is at the router's state at a time."""

    def __init__(self, picks: MakePick) -> None:
        self._picks = picks
        self._lock = threading.Lock()

    def process(self, messages: Iterator[bytes], _context: Any) -> Iterator[bytes]:
        outbox = _Outbox()
        pick = self._picks(outbox)
        try:
            for message in messages:
                with self._lock:
                    pick.received(message)
                yield from outbox.take()
                if outbox.is_over:
                    return
        finally:
            with self._lock:
                pick.dropped()

    def check(self, _message: bytes, _context: Any) -> bytes:
        return _SERVING


def _handlers(call: _Aio | _Threads) -> list[Any]:
    process = grpc.stream_stream_rpc_method_handler(call.process)
    check = grpc.unary_unary_rpc_method_handler(call.check)
    return [
        grpc.method_handlers_generic_handler("envoy.service.ext_proc.v3.ExternalProcessor", {"Process": process}),
        grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
    ]


async def main(config: RouterConfig, how: str) -> None:
    """Serve until the process is ended."""
    assert config.picker is not None
    async with listening(msgspec.structs.replace(config, picker=None)) as (router, _, _):
        shared = Picks(router, Addresses(config, router.members))

        def picks(outbox: _Outbox) -> Pick:
            return Pick(shared, outbox)  # type: ignore[arg-type]  # it has all that a pick uses

        server: Any
        if how == "aio":
            server = grpc.aio.server(handlers=_handlers(_Aio(picks)))
        else:
            server = grpc.server(ThreadPoolExecutor(_NUM_THREADS), handlers=_handlers(_Threads(picks)))
        server.add_insecure_port(f"127.0.0.1:{config.picker.port}")
        started = server.start()
        if how == "aio":
            await started
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(load(Path(sys.argv[1])), sys.argv[2]))
