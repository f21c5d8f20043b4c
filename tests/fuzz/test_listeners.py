"""No byte costs more than its bound of CPU, on any listener, whatever is open.

The floods go to a process that has every listener of ours. The bound is in seconds of CPU of the
whole process, all threads, so neighbours on the machine change nothing:

    .1 s, for what asks for health meanwhile + 5 ms a connection or message + 3 us a byte sent

On the machine that this was written on floods cost .02 to .6 us a byte, so one that is five times
slower passes. The bound has to stop what grows with what is open: a walk over 900 open calls for
each frame of SETTINGS takes 5 us a byte, and over 4,000 22 us (a server of our own did that). A
small request costs 5 us a byte by itself, for which the 5 ms are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import grpc
import pytest

from npu_gr.route.picker import SERVICE
from npu_gr.server.grpc.inference import INFERENCE
from tests.fuzz import frames
from tests.fuzz.messages import Maker, Message, bombs
from tests.fuzz.test_fuzz import (
    AGAIN,
    GROWTH_BYTES,
    LONGEST_S,
    PATIENCE_S,
    SEED,
    Caller,
    Fuzzed,
    framed,
    reproducible,
    unframed,
)
from tests.server.oip.inputs import inputs_of, json_body

pytestmark = pytest.mark.asyncio(loop_scope="module")
log = logging.getLogger(__name__)
MEANWHILE_S = 0.1
EACH_S = 5e-3
BYTE_S = 3e-6
MESSAGES = 60
HEALTH = "/grpc.health.v1.Health/Check"
GRPC = {
    "grpc": (f"/{INFERENCE}/ModelInfer".encode(), frames.inference_bodies(4_000_000)),
    "picker": (f"/{SERVICE}/Process".encode(), frames.picker_bodies(1_000_000)),
}


class Cost:
    """Checks what each attack costs the process."""

    def __init__(self, fuzzed: Fuzzed) -> None:
        self.fuzzed = fuzzed
        self.over: dict[str, str] = {}

    async def of(
        self, name: str, attack: Callable[[], Awaitable[None]], num: int, size: int
    ) -> None:
        """Check an attack of `num` messages that together have `size` bytes."""

        async def prepared() -> Callable[[], Awaitable[None]]:
            return attack

        await self.behind(prepared, name, num, size)

    async def behind(
        self,
        prepare: Callable[[], Awaitable[Callable[[], Awaitable[None]]]],
        name: str,
        num: int,
        size: int,
    ) -> None:
        """Check the attack that `prepare` returns; what `prepare` itself does is free.

        An attack that costs too much is tried again: what is to blame costs too much each time.
        """
        about = ""
        for _ in range(1 + AGAIN):
            attack = await prepare()
            before_s = (await self.fuzzed.figures())["cpu_s"]
            await attack()
            figures = await self.fuzzed.figures()
            took_s = figures["cpu_s"] - before_s
            allowed_s = self.fuzzed.slowness * (MEANWHILE_S + num * EACH_S + size * BYTE_S)
            about = f"{took_s:.3f} of {allowed_s:.3f} s, {1e6 * took_s / size:.2f} us a byte"
            log.info("%-45s %s, %.0f ms at once", name, about, 1e3 * figures["longest_s"])
            if took_s <= allowed_s:
                return
        self.over[name] = about


async def heard(caller: Caller, wait_s: float, sending: asyncio.Future[None]) -> None:
    """Read what comes until the other side closes, or all is sent and nothing comes."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    if not await caller.reader.read(1 << 16):
                        return
            except TimeoutError:
                if sending.done():
                    return
            except ConnectionError:
                return


async def poured(caller: Caller, data: bytes) -> None:
    """Send as much as the other side reads, and read what it answers."""
    sending = asyncio.ensure_future(caller.send(data))
    try:
        await heard(caller, 0.3, sending)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def alone(port: int, data: bytes) -> None:
    """Pour it over a connection of its own."""
    caller = await Caller.connect(port)
    try:
        await poured(caller, data)
    finally:
        caller.close()


async def is_serving(port: int) -> bool:
    channel: Any
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        status: bytes = await channel.unary_unary(HEALTH)(b"", timeout=PATIENCE_S)
        return status == b"\x08\x01"


async def called(port: int, path: str, body: bytes) -> None:
    """Call a method with a message, as a client library does: with its flow control."""
    channel: Any  # its stubs want serializers everywhere
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(path)(timeout=PATIENCE_S)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(body)
            await call.done_writing()
            async for _ in call:
                pass


@pytest.mark.parametrize("listener", list(GRPC))
async def test_frames_cost_what_they_may(fuzzed: Fuzzed, listener: str) -> None:
    path, bodies = GRPC[listener]
    port = fuzzed.ports[listener]
    cost = Cost(fuzzed)
    opening = frames.begun(path, frames.STREAMS)
    await alone(port, opening)  # what the process allocates once
    for body in bodies.values():
        await called(port, path.decode(), body)
    before = await fuzzed.figures()
    for name, data in frames.floods(path).items():

        async def prepared(data: bytes = data) -> Callable[[], Awaitable[None]]:
            caller = await Caller.connect(port)
            await poured(caller, opening)

            async def flood() -> None:
                await poured(caller, data)
                caller.close()

            return flood

        num = frames.RESETS if name == "resets" else 1  # each is a call
        await cost.behind(prepared, f"{listener}: {name}", num, len(data))
        assert await is_serving(port), name
    alien = {
        "HTTP/1.1": b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * 1_000_000,
        "noise": random.Random(SEED).randbytes(1_000_000),
        # with grpcio from 1.84 on it ends the server
        "a path that is not UTF-8": frames.begun() + frames.opened(1, b"/\xff") * 100,
    }
    for name, data in alien.items():
        await cost.of(f"{listener}: {name}", partial(alone, port, data), 2, len(data))
        assert await is_serving(port), name
    for name, body in bodies.items():
        work = partial(called, port, path.decode(), body)
        await cost.of(f"{listener}: a message: {name}", work, 2, len(body))
        assert await is_serving(port), name
    connections = frames.broken(SEED, bodies["valid"], path, MESSAGES)

    async def all_broken() -> None:
        for at in range(0, MESSAGES, 16):
            await asyncio.gather(*(alone(port, one) for one in connections[at : at + 16]))

    size = sum(map(len, connections))
    await cost.of(f"{listener}: broken calls", all_broken, 4 * MESSAGES, size)
    assert await is_serving(port)
    after = await fuzzed.figures()
    assert after["resident_bytes"] - before["resident_bytes"] < GROWTH_BYTES
    assert not cost.over


class OthersMaker(Maker):
    """Messages to other routes than those of the kinds."""

    def __init__(self, seed: int, bodies: dict[bytes, list[dict[str, Any]]]) -> None:
        super().__init__(seed)
        self._bodies = bodies

    def message(self) -> Message:
        self._number += 1
        draw = self.random
        path = draw.choice(list(self._bodies))
        body = dict(draw.choice(self._bodies[path]))
        about = path.decode()
        for _ in range(draw.choice((0, 1, 1, 2, 5))):
            body, did = self._break(body)
            about += f", {did}"
        media = draw.choice((b"application/json", b"application/msgpack"))
        packed = self._pack(body, media)
        if draw.random() < 0.4:
            packed = self._break_bytes(packed)
            about += ", bytes"
        headers = {b"Content-Type": media, b"X-Request-Id": b"%d" % self._number}
        if draw.random() < 0.1:
            return self._framed_wrong(path, headers, packed, about)
        return Message(sent=self._framed(path, headers, packed), is_framed=True, about=about)


def infers() -> dict[bytes, list[dict[str, Any]]]:
    history = {"items": [1000, 1001], "actions": ["1", "1"], "timestamps": [1, 2]}
    of_kind: dict[str, dict[str, Any]] = {
        "rank": {"user_id": "u", "candidates": [1000, 1001], "history": history},
        "generate": {"user_id": "u", "num_items": 5, "history": history},
        "match": {"user_id": "u", "num_items": 5},
        "recommend": {"user_id": "u", "num_items": 5, "history": history},
    }
    return {
        b"/v2/models/%s/infer" % name.encode(): [json.loads(json_body(inputs_of(body)))]
        for name, body in of_kind.items()
    }


ITEM = {"item_id": "new", "title": "t", "sid": [1, 2, 3], "attributes": {"kind": "a"}}
OPERATORS: dict[bytes, list[dict[str, Any]]] = {
    b"/v1/catalog/items": [{"add": [ITEM]}, {"withdraw": [1000]}, {"restore": [1000, "x"]}],
    b"/debug/user": [{"user_id": "u"}, {"user_id": "u", "tenant": "t"}],
    b"/debug/record": [{"sample_ratio": 0.5, "duration_s": 1.0}, {}],
    b"/v1/match/rollback": [{}],
    b"/metrics": [{}],
    b"/debug/status": [{}],
}


@pytest.mark.parametrize(("listener", "bodies"), [("public", infers()), ("admin", OPERATORS)])
async def test_requests_of_operators_and_infers_cost_what_they_may(
    fuzzed: Fuzzed, listener: str, bodies: dict[bytes, list[dict[str, Any]]]
) -> None:
    fuzzed.port = fuzzed.ports[listener]
    fuzzed.statuses.clear()
    cost = Cost(fuzzed)
    maker = OthersMaker(SEED, bodies)
    messages = [maker.message() for _ in range(MESSAGES)]

    async def all_messages() -> None:
        caller = await Caller.connect(fuzzed.port)
        for message in messages:
            if message.is_framed:
                caller = await framed(fuzzed, caller, [message])
            else:
                await unframed(fuzzed, message, 0.05)
        caller.close()

    num_bytes = sum(len(message.sent) for message in messages)
    await cost.of(f"{listener}: broken messages", all_messages, 2 * MESSAGES, num_bytes)
    for name, data in _bombs(listener):
        message = Message(sent=data, is_framed=False, about=name)
        await cost.of(
            f"{listener}: {name}",
            partial(unframed, fuzzed, message, PATIENCE_S / 2),
            4 + data.count(b" HTTP/1."),
            len(data),
        )
    assert not cost.over
    assert fuzzed.statuses[200]
    assert fuzzed.statuses[422] + fuzzed.statuses[400]


def _bombs(listener: str) -> Iterable[tuple[str, bytes]]:
    """Those of messages.py that are about this listener's routes, and infers of 4 MB."""
    for name, data in bombs().items():
        is_operators = data.startswith((b"POST /v1/catalog", b"POST /debug"))
        if is_operators == (listener == "admin"):
            yield name, data
    if listener == "public":
        tensor = b'{"name":"candidates","datatype":"INT64","shape":[1],"data":[%s]},'
        for name, body in {
            "tensors": b'{"inputs":[' + tensor % b"1" * 60_000 + b"{}]}",
            "a tensor": b'{"inputs":[' + tensor % (b"1," * 2_000_000 + b"1") + b"{}]}",
            "tensors of nothing": b'{"inputs":[' + b"{}," * 1_300_000 + b"{}]}",
            "parameters": b'{"inputs":[],"parameters":{' + b'"a":1,' * 600_000 + b'"a":1}}',
        }.items():
            head = b"POST /v2/models/rank/infer HTTP/1.1\r\nHost: localhost\r\n"
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            yield f"infer: {name}", head + body


async def test_the_agent_check_costs_what_it_may(fuzzed: Fuzzed) -> None:
    """It answers before it has read anything, and reads nothing."""
    draw = random.Random(SEED)
    sent = [draw.randbytes(draw.choice((0, 1, 1000, 100_000))) for _ in range(MESSAGES)]
    port = fuzzed.ports["agent"]
    cost = Cost(fuzzed)

    async def ask(data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(data)
            assert (await asyncio.wait_for(reader.readline(), PATIENCE_S)).startswith(b"up ")
        except ConnectionError:
            pass  # closed while it still sent
        finally:
            writer.transport.abort()

    async def all_asked() -> None:
        with reproducible([]):
            for data in sent:
                await ask(data)

    await cost.of("agent-check", all_asked, MESSAGES, sum(map(len, sent)))
    assert not cost.over
    assert (await fuzzed.figures())["longest_s"] < LONGEST_S
