"""What goes the straight way is answered as aiohttp's own loop would answer it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from npu_gr.core.errors import NotTaken, Overloaded, Refusal, Unprocessable
from npu_gr.core.kinds import KINDS, Kind
from tests.server.entrance.test_connection import BODY, RANK, WHOLE, Raw, Site, site
from tests.server.examples import EXAMPLES
from tests.serving import until

STRAIGHT = [kind for kind in KINDS.values() if not kind.must_finish]


def request(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    fields = (
        "Content-Type: application/json",
        "Host: x",
        f"Content-Length: {len(body)}",
        "X-Request-Id: one",
        *headers,
    )
    once = {field.partition(":")[0]: field for field in fields}
    return "\r\n".join((f"POST {path} HTTP/{version}", *once.values())).encode() + b"\r\n\r\n" + body


async def bytes_of(raw: Raw) -> bytes:
    """An answer as it came, without what differs each time."""
    async with asyncio.timeout(10):
        head = await raw.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        body = await raw.reader.readexactly(0 if length is None else int(length[1]))
    return re.sub(rb"(?m)^(Date|traceparent): .*\r\n", b"", head) + body


def in_any_order(answer: bytes) -> tuple[bytes, list[bytes], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    return line, sorted(headers), body


async def both_ways(at: Site, sent: bytes) -> tuple[bytes, bytes, bool, bool]:
    """Answers of the straight way and of aiohttp's loop, and whether each one closed its connection."""
    answers = []
    closed = []
    for is_straight in (True, False):
        if not is_straight:
            at.entrance.straight.clear()
        raw = await at.connect()
        raw.send(sent)
        answers.append(await bytes_of(raw))
        raw.send(request("/v1/rank", BODY))
        try:
            await bytes_of(raw)
            closed.append(False)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            closed.append(True)
    return answers[0], answers[1], closed[0], closed[1]


@pytest.mark.parametrize("kind", STRAIGHT, ids=lambda kind: kind.name)
async def test_every_kind_is_answered_the_same_both_ways(kind: Kind[Any, Any]) -> None:
    example = EXAMPLES[kind.name]
    async with site() as at:
        assert len(at.entrance.straight) == len(STRAIGHT)
        sent = request(kind.path, json.dumps(example.body).encode())
        straight, looped, closes, loop_closes = await both_ways(at, sent)
    assert in_any_order(straight) == in_any_order(looped)
    assert straight.startswith(b"HTTP/1.1 2")
    assert not closes
    assert not loop_closes


@pytest.mark.parametrize(
    ("headers", "version", "closes"),
    [
        ((), "1.1", False),
        (("Connection: close",), "1.1", True),
        (("Connection: keep-alive",), "1.1", False),
        ((), "1.0", True),
        (("Connection: keep-alive",), "1.0", False),
        (("Accept: application/msgpack",), "1.1", False),
        (("Accept-Encoding: gzip",), "1.1", False),
        (("Content-Type: text/plain",), "1.1", True),
        (("Content-Encoding: gzip",), "1.1", True),
        (("X-Request-Timeout-Ms: x",), "1.1", False),
        (("Sec-Fetch-Site: cross-site",), "1.1", False),
        (("Upgrade: h2c", "Connection: Upgrade"), "1.1", False),
    ],
)
async def test_headers_mean_the_same_both_ways(headers: tuple[str, ...], version: str, closes: bool) -> None:
    async with site() as at:
        sent = request("/v1/rank", BODY, *headers, version=version)
        straight, looped, is_closed, loop_closes = await both_ways(at, sent)
    assert in_any_order(straight) == in_any_order(looped)
    assert (is_closed, loop_closes) == (closes, closes)


@pytest.mark.parametrize(
    "error",
    [Unprocessable("no"), Overloaded("busy", reason=Refusal.RATE), NotTaken("drains"), RuntimeError("a bug")],
    ids=lambda error: type(error).__name__,
)
async def test_errors_are_told_the_same_both_ways(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async with site() as at:

        async def fail(*_args: object) -> None:
            raise error

        at.service.serve = fail  # type: ignore[method-assign, assignment]
        straight, looped, *_ = await both_ways(at, request("/v1/rank", BODY))
    assert in_any_order(straight) == in_any_order(looped)
    caplog.clear()


@pytest.mark.parametrize("num_events", [1, 4_000, 8_000, 12_000, 16_000, 20_000, 40_000])
async def test_a_body_of_any_length_arrives_whole(num_events: int) -> None:
    """The parser of aiohttp stops behind half a megabyte; the longest has one and a half."""
    history = {
        "items": [10**18 + number for number in range(num_events)],
        "actions": [1] * num_events,
        "timestamps": [1_600_000_000 + number for number in range(num_events)],
    }
    body = json.dumps({**json.loads(BODY), "history": history}).encode()
    async with site() as at:
        raw = await at.connect()
        for _ in range(3):
            raw.send(request("/v1/rank", body) + WHOLE)
            assert (await raw.answer())[0] == 200
            assert (await raw.answer())[0] == 200
        assert [len(asked.history.events) for _, asked, _ in at.service.served[::2]] == 3 * [num_events]


@pytest.mark.parametrize(
    "broken",
    [
        RANK + b"Content-Length: %d\r\nBad Name: x\r\n\r\n" % len(BODY) + BODY,
        RANK + b"Content-Length: %d\r\nX: \x00\r\n\r\n" % len(BODY) + BODY,
        RANK + b"Content-Length: %d\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n" % len(BODY) + BODY,
    ],
    ids=["name", "nul", "upgrade"],
)
async def test_what_the_parser_refuses_is_a_400_and_nothing_is_served(broken: bytes) -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(broken + WHOLE)
        status, _, body = await raw.answer()
        assert status == 400, body
        assert await raw.is_closed()
        assert at.service.served == []
        assert at.entrance.door.waiting == 0
        with await at.service.fill():  # every place is free
            pass


async def test_who_hangs_up_cancels_the_handler_and_frees_the_place() -> None:
    async with site() as at:
        at.service.waits = asyncio.Event()
        raw = await at.connect()
        raw.send(WHOLE)
        await at.service.waits.wait()
        kept = list(at.entrance._connections)  # else the garbage collector ends what nobody cancels
        raw.writer.transport.abort()
        await until(lambda: at.count("requests_total", route="/v1/rank", code="499") == 1.0)
        assert kept[0].state.value == "idle"
        at.service.waits = None
        with await at.service.fill():
            pass


async def test_a_fault_of_ours_around_a_handler_ends_the_connection_and_frees_the_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(_: object) -> None:
        raise RuntimeError("around the handler")

    async with site() as at:
        at.entrance.straight[b"POST", b"/v1/rank"] = broken  # type: ignore[assignment]
        raw = await at.connect()
        raw.send(WHOLE)
        assert await raw.is_closed()
        with await at.service.fill():
            pass
    caplog.clear()
