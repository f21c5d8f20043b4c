"""Bodies have a budget of bytes that is counted before they are read, and they are dropped once an answer has begun."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import from_table
from npu_gr.router.answers import Refused
from npu_gr.router.config import LimitsConfig
from npu_gr.router.kept import KeptBytes
from npu_gr.router.request import RequestBody
from npu_gr.server.auth.throttle import BURST
from tests.keys import write_keys
from tests.router.fake import site
from tests.router.test_proxy import post, raw

LIMITS = {"max_body_bytes": 1_000_000, "max_kept_bytes": 2_000_000}
_HEAD = b"POST /v1/rank HTTP/1.1\r\nHost: a\r\nX-User-Id: u\r\n"


def test_the_budget_holds_at_least_one_body() -> None:
    with pytest.raises(ConfigError, match="max_kept_bytes: 9 is less than max_body_bytes: 10"):
        from_table({"max_body_bytes": 10, "max_kept_bytes": 9}, LimitsConfig)


async def test_what_is_announced_counts_before_it_comes_and_over_the_budget_is_503_in_words() -> None:
    async with site(1, limits=LIMITS) as s:
        held = [await asyncio.open_connection("127.0.0.1", s.port) for _ in range(2)]
        for _, writer in held:
            writer.write(_HEAD + b"Content-Length: 1000000\r\n\r\n")
        await s.until(lambda: s.router.kept.num_bytes == 2_000_000)
        answer = await raw(s.port, _HEAD + b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"limits.max_kept_bytes" in answer
        assert b"Retry-After: 1" in answer
        answer = await raw(s.port, _HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        async with s.http.get(f"{s.url}/v1/models") as got:
            assert got.status == 200, "what has no body needs no room"
        async with s.http.get(f"{s.admin}/metrics") as got:
            assert "npu_gr_router_kept_bytes 2e+06" in await got.text()
        assert s.router.metrics.refused.value(kind="rank") == 1
        held.pop()[1].close()
        await s.until(lambda: s.router.kept.num_bytes == 1_000_000)
        assert (await s.post("rank"))[0] == 200
        assert len(s.fakes[0].bodies) == 2
        for _, writer in held:
            writer.close()
        await s.until(lambda: s.router.kept.num_bytes == 0)


async def test_every_end_of_a_request_gives_its_bytes_back() -> None:
    async with site(2, limits=LIMITS) as s:
        body = b"x" * 400_000
        length = b"Content-Length: %d" % len(body)
        s.fakes[0].delay_s = s.fakes[1].delay_s = 0.05
        assert (await raw(s.port, post(length, body=body))).startswith(b"HTTP/1.1 200 ")
        assert (await raw(s.port, post(length, b"X-Request-Timeout-Ms: 10", body=body))).startswith(b"HTTP/1.1 504 ")
        assert (await raw(s.port, post(length, b"X-Request-Timeout-Ms: 10", body=b"x"))).startswith(b"HTTP/1.1 408 ")
        chunks = b"%x\r\n%s\r\n" % (len(body), body)
        chunked = post(b"Transfer-Encoding: chunked", body=3 * chunks)
        assert (await raw(s.port, chunked)).startswith(b"HTTP/1.1 413 ")
        assert (await raw(s.port, post(b"Transfer-Encoding: chunked", body=chunks + b"zz"))).startswith(
            b"HTTP/1.1 400 "
        )
        _, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(3 * (_HEAD + length + b"\r\n\r\n" + body))
        await s.until(lambda: s.router.kept.num_bytes >= 800_000)
        writer.close()
        await s.until(lambda: s.router.kept.num_bytes == 0)
        s.fakes[0].status = s.fakes[1].status = 503
        assert (await raw(s.port, post(length, body=body))).startswith(b"HTTP/1.1 503 ")
        assert s.router.kept.num_bytes == 0


async def test_once_an_answer_has_begun_nothing_is_kept() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (line := await reader.read(65536)) and b"POST" not in line:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
        while await reader.read(65536):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    row = {"name": "one", "host": "127.0.0.1", "port": server.sockets[0].getsockname()[1]}
    async with server, site(0, discovery={"instances": [row]}) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n" % (300_000, b"x" * 300_000))
        await reader.readuntil(b"\r\n\r\no")
        assert s.router.kept.num_bytes == 0
        for _ in range(10):
            writer.write(b"%x\r\n%s\r\n" % (300_000, b"x" * 300_000))
            await writer.drain()
        exchange = next(iter(s.router.connections._open))._exchanges[0]  # type: ignore[attr-defined]
        await s.until(lambda: exchange.body.num_bytes == 3_300_000)
        assert exchange.body.pieces == []
        assert s.router.kept.num_bytes == 0
        writer.close()


async def test_the_body_behind_a_refusal_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_gr.server.auth.throttle.HOLD_S", 30.0)
    async with site(1, api_keys_file=write_keys(tmp_path / "keys.yaml")) as s:
        for _ in range(int(BURST)):
            s.router.access.throttle.hold_s()
        body = b"%x\r\n%s\r\n" % (300_000, b"x" * 300_000)
        _, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        await s.until(lambda: s.router.metrics.keys_refused.value())
        (connection,) = s.router.connections._open
        exchange = connection._exchanges[0]  # type: ignore[attr-defined]
        await s.until(lambda: exchange.body.num_bytes == 300_000)
        assert (exchange.body.pieces, s.router.kept.num_bytes) == ([], 0)
        writer.close()


async def test_a_connection_to_an_instance_that_has_not_read_the_body_is_not_kept() -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        assert head.startswith(b"POST")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1024)
    row = {"name": "one", "host": "127.0.0.1", "port": server.sockets[0].getsockname()[1]}
    async with server, site(0, discovery={"instances": [row]}) as s:
        size = 8_000_000
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(_HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
        await reader.readuntil(b"ok")
        assert s.router.members.instances["one"].pool.take() is None
        writer.close()
        ended.set()


@pytest.mark.parametrize("path", [b"/healthz", b"/nowhere", b"/v1/users/u"])
async def test_a_body_that_nobody_wants_is_not_kept(path: bytes) -> None:
    async with site(1) as s:
        s.fakes[0].delay_s = 0.5
        method = b"DELETE" if b"users" in path else b"GET"
        _, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(b"%s %s HTTP/1.1\r\nHost: a\r\nContent-Length: 8000000\r\n\r\n" % (method, path) + b"x" * 200_000)
        await writer.drain()
        assert s.router.kept.num_bytes == 0
        writer.close()


def test_small_pieces_are_joined_and_none_that_was_sent() -> None:
    body = RequestBody(KeptBytes(10_000))
    for _ in range(1000):
        body.add(b"ab", 10_000)
    assert len(body.pieces) < 10
    body.rewind()
    assert body.next_chunk(is_kept=True) == b"7d0\r\n" + b"ab" * 1000 + b"\r\n"
    body.add(b"c", 10_000)
    assert body.next_chunk(is_kept=True) == b"1\r\nc\r\n"
    assert b"".join(body.pieces) == b"ab" * 1000 + b"c"


def test_bytes_are_given_back_once() -> None:
    kept = KeptBytes(10)
    body = RequestBody(kept)
    body.expect(6)
    body.add(b"abc", 100)
    body.add(b"defgh", 100)
    assert kept.num_bytes == 8
    with pytest.raises(Refused):
        RequestBody(kept).expect(3)
    assert kept.num_bytes == 8
    body.close()
    body.close()
    body.add(b"more", 100)
    assert (kept.num_bytes, body.pieces) == (0, [])
