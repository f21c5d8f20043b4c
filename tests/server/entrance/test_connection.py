"""A connection hands over whole requests, refuses without parsing, and holds nobody's bytes longer than it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from npu_gr.core.tls import ServerTlsConfig
from npu_gr.metrics.registry import Metrics
from npu_gr.server.entrance.connection import REFUSED_AT_ONCE, Connection
from npu_gr.server.entrance.entrance import ENTRANCE, Entrance
from npu_gr.server.entrance.framing import MAX_HEAD_BYTES
from npu_gr.server.entrance.sites import TLS
from tests.certificates import Authority
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, serving_fake
from tests.serving import until

BODY = json.dumps(EXAMPLES["rank"].body).encode()
RANK = b"POST /v1/rank HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = RANK + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


class Raw:
    """A connection of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def is_closed(self) -> bool:
        async with asyncio.timeout(10):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True


class Site:
    """A fake service behind a real listener."""

    def __init__(self, client: Any, service: FakeService, metrics: Metrics) -> None:
        self.client = client
        self.service = service
        self.metrics = metrics
        self.entrance: Entrance = client.server.app[ENTRANCE]
        self.raws: list[Raw] = []
        self.port: int = client.port
        self.tls: ssl.SSLContext | None = None

    async def listen(self, authority: Authority | None = None) -> None:
        """Listen at a public address as an instance does, which serves everything; over TLS where there is one."""
        public = self.entrance.listeners[0]
        public.host, public.port, public._elsewhere = "127.0.0.1", 0, frozenset()
        public.refuses_foreign_hosts = False
        context = None if authority is None else self.client.server.app[TLS].public
        self.port = await self.client.server.runner.listen(public, self.entrance.config, context)
        self.tls = None if authority is None else authority.client()

    async def connect(self) -> Raw:
        self.raws.append(Raw(*await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls)))
        return self.raws[-1]

    def count(self, name: str, **labels: str) -> float | None:
        self.metrics.refresh()
        return self.metrics.registry.get_sample_value(f"npu_gr_{name}", labels)


OVER_TLS: list[Authority] = []  # while a test runs over TLS, its authority


@pytest.fixture(params=["clear", "tls"], autouse=True)
def over(request: pytest.FixtureRequest, authority: Authority) -> Iterator[None]:
    """Every test runs in clear and over TLS."""
    if request.param == "tls":
        OVER_TLS.append(authority)
    yield
    OVER_TLS.clear()


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    if OVER_TLS:
        pair = OVER_TLS[0].issue("127.0.0.1")
        settings["tls"] = ServerTlsConfig(certificate=str(pair.certificate), key=str(pair.key))
    service = FakeService({name: example.answer for name, example in EXAMPLES.items()})
    async with serving_fake(service, **settings) as (client, metrics):
        at = Site(client, service, metrics)
        await at.listen(OVER_TLS[0] if OVER_TLS else None)
        try:
            yield at
        finally:
            for raw in at.raws:
                raw.writer.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await raw.writer.wait_closed()


async def test_twenty_pipelined_requests_have_twenty_answers() -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(WHOLE * 20)
        for _ in range(20):
            assert (await raw.answer())[0] == 200
        assert len(at.service.served) == 20


@pytest.mark.parametrize("cut", [1, 10, 100, len(WHOLE) - len(BODY) - 2, len(WHOLE) - 1])
async def test_a_request_in_two_pieces(cut: int) -> None:
    async with site() as at:
        raw = await at.connect()
        for _ in range(2):
            raw.send(WHOLE[:cut])
            await asyncio.sleep(0.02)
            assert at.entrance.door.admitted == 0  # what is not whole holds no place
            raw.send(WHOLE[cut:])
            assert (await raw.answer())[0] == 200


async def test_a_chunked_body_and_one_that_waits_for_continue() -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(RANK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + BODY[:5] + b"\r\n")
        await asyncio.sleep(0.02)
        raw.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY) - 5, BODY[5:]))
        assert (await raw.answer())[0] == 200
        raw.send(RANK + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert (await raw.answer())[0] == 100
        raw.send(BODY)
        assert (await raw.answer())[0] == 200  # and no second 100


async def test_a_refusal_is_not_parsed_keeps_the_connection_and_is_counted() -> None:
    async with site() as at:
        raw = await at.connect()
        with await at.service.fill():
            raw.send(RANK + b"Content-Length: 3\r\n\r\n{{{")
            status, headers, body = await raw.answer()
        assert status == 429
        assert headers["retry-after"] == "1"
        assert 20 <= int(headers["retry-after-ms"]) <= 95
        assert json.loads(body)["title"] == "overloaded"
        raw.send(WHOLE)
        assert (await raw.answer())[0] == 200
        assert at.count("admissions_total", kind="rank", verdict="overloaded") == 1
        assert at.count("requests_total", route="/v1/rank", code="429") == 1
        assert at.count("slo_requests_total", kind="rank", result="failed") == 1
        assert at.count("request_duration_seconds_count", kind="rank") == 1  # a refusal is no fast answer


async def test_a_refusal_of_a_caller_that_closes_closes() -> None:
    async with site() as at:
        raw = await at.connect()
        with await at.service.fill():
            raw.send(WHOLE.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            assert (await raw.answer())[0] == 429
            assert await raw.is_closed()


async def test_clients_that_retry_at_once_are_paused_and_read_when_there_is_room() -> None:
    async with site() as at:
        raws = [await at.connect() for _ in range(8)]
        at.service.door._lanes["rank"].pace.seconds = 1.0  # so nobody who comes while it is full can be in time
        with await at.service.fill():
            while not at.entrance.num_paused:  # on a busy machine an answer may come too late to be one of a retry
                for raw in raws:
                    raw.send(WHOLE)
                await asyncio.gather(*(raw.answer() for raw in raws))
            for raw in raws:
                raw.send(WHOLE)
        for raw in raws:
            assert (await raw.answer())[0] in (200, 429)
        await until(lambda: at.entrance.num_paused == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads TCP_INFO of Linux")
async def test_callers_that_hang_up_while_they_are_paused_are_paused_later() -> None:
    async with site() as at:
        run_s = at.entrance.pacer.run_s
        for number in range(20):
            raw = await at.connect()
            raw.send(WHOLE)
            await raw.answer()
            (connection,) = at.entrance._connections
            connection.pause()
            raw.send(WHOLE)
            raw.writer.transport.abort()
            await until(lambda: is_closed_there(connection))  # noqa: B023
            connection.resume()
            await until(lambda: not at.entrance._connections)
            assert at.count("admissions_total", kind="rank", verdict="abandoned") == number + 1
        assert at.entrance.pacer.run_s > 2 * run_s
        assert len(at.service.served) == 20  # nobody works on what nobody reads


@pytest.mark.skipif(sys.platform != "linux", reason="reads TCP_INFO of Linux")
async def test_a_signal_whose_caller_does_not_wait_counts() -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(WHOLE)
        await raw.answer()
        (connection,) = at.entrance._connections
        connection.pause()
        signal = json.dumps(EXAMPLES["signal"].body).encode()
        raw.send(RANK.replace(b"/v1/rank", b"/v1/signal") + b"Content-Length: %d\r\n\r\n%s" % (len(signal), signal))
        raw.writer.transport.abort()
        await until(lambda: is_closed_there(connection))
        connection.resume()
        await until(lambda: len(at.service.served) == 2)


def is_closed_there(connection: Any) -> bool:
    connection._kernel.received_ago_s()
    return bool(connection._kernel.has_hung_up)


async def test_refusals_are_written_before_what_ends_their_connection() -> None:
    async with site(trusted_proxies=["127.0.0.0/8"]) as at:
        raw = await at.connect()
        at.service.door._lanes["rank"].pace.seconds = 1.0
        with await at.service.fill():
            raw.send(WHOLE * 3 + b"no request\r\n\r\n")
            assert [(await raw.answer())[0] for _ in range(4)] == [429, 429, 429, 400]
            assert await raw.is_closed()


async def test_what_a_paused_connection_sends_stays_with_its_sender() -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(WHOLE)
        await raw.answer()
        (connection,) = at.entrance._connections
        connection.pause()
        raw.send(b" " * 8_000_000)
        kept = [-1, -1, -1, -2]
        while len(set(kept[-4:])) > 1:  # until nothing moves
            await asyncio.sleep(0.05)
            kept.append(raw.writer.transport.get_write_buffer_size())
        wire = connection._wire  # type: ignore[attr-defined]
        assert at.tls is None or wire.get_read_buffer_size() < 200_000


async def test_requests_that_were_pipelined_wait_with_their_paused_connection() -> None:
    async with site() as at:
        raw = await at.connect()
        at.service.door._lanes["rank"].pace.seconds = 1.0
        with await at.service.fill():
            while not at.entrance.num_paused:
                raw.send(WHOLE * 50)
                await asyncio.sleep(0.005)
            before = at.count("admissions_total", kind="rank", verdict="overloaded")
            raw.send(WHOLE * 200)
            began_at = time.monotonic()
            await asyncio.sleep(0.1)
            refused = at.count("admissions_total", kind="rank", verdict="overloaded")
            assert before is not None
            assert refused is not None
            took_s = time.monotonic() - began_at
            # 100 in a tenth of a second: 1,400 a second at most, and not all that were read at once
            assert refused - before <= 1000 * took_s
            raw.writer.transport.abort()


@pytest.mark.skipif(sys.platform != "linux", reason="reads TCP_INFO of Linux")
@pytest.mark.parametrize(("paused_s", "status"), [(0.0, 200), (0.2, 429)])  # a rank has 50 ms
async def test_a_request_begins_when_it_reaches_the_kernel(paused_s: float, status: int) -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(WHOLE)
        await raw.answer()
        (connection,) = at.entrance.listeners[0].connections
        connection.pause()
        raw.send(WHOLE)
        await asyncio.sleep(paused_s)
        connection.resume()
        assert (await raw.answer())[0] == status


async def test_others_are_read_between_refusals_that_were_pipelined() -> None:
    async with site(trusted_proxies=["127.0.0.0/8"]) as at:
        raw = await at.connect()
        raw.send(WHOLE)
        await raw.answer()
        (connection,) = at.entrance._connections
        assert isinstance(connection, Connection)
        at.service.door._lanes["rank"].pace.seconds = 1.0  # so nobody who comes while it is full can be in time
        with await at.service.fill():
            connection.data_received(WHOLE * 1000)  # as much as comes in one piece
            assert at.count("admissions_total", kind="rank", verdict="overloaded") == REFUSED_AT_ONCE
            for _ in range(1000):
                assert (await raw.answer())[0] == 429


async def test_a_request_begins_for_the_objective_when_it_is_whole() -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(WHOLE[:-1])
        await asyncio.sleep(0.5)
        raw.send(WHOLE[-1:])
        assert (await raw.answer())[0] == 200
        (connection,) = at.entrance._connections
        assert isinstance(connection, Connection)
        assert connection.has_s <= 0.55  # of the second that a caller grants who says nothing
        took_s = at.metrics.registry.get_sample_value("npu_gr_request_duration_seconds_sum", {"kind": "rank"})
        assert took_s is not None
        assert took_s < 0.5


async def test_a_proxy_is_refused_and_never_paused() -> None:
    async with site(trusted_proxies=["127.0.0.0/8"]) as at:
        raw = await at.connect()
        with await at.service.fill():
            for _ in range(4):
                raw.send(WHOLE)
                assert (await raw.answer())[0] == 429
                assert at.entrance.num_paused == 0


async def test_whoever_hangs_up_while_waiting_is_forgotten_and_counted() -> None:
    async with site() as at:
        with await at.service.fill():
            raw = await at.connect()
            raw.send(WHOLE)
            await until(lambda: at.entrance.door.waiting == 1)
            raw.writer.close()
            await until(lambda: at.entrance.door.waiting == 0)
        assert at.entrance.door.admitted == 0
        assert at.count("admissions_total", kind="rank", verdict="abandoned") == 1
        assert not at.service.served


@pytest.mark.parametrize(
    ("sent", "settings", "status", "detail"),
    [
        (b"POST /v1/rank HT", {"header_timeout_s": 0.1}, 408, "headers"),
        (WHOLE[:-1], {"body_timeout_s": 0.1}, 408, "body"),
        (WHOLE[:-1], {"default_budget_s": 0.1}, 408, "body"),
        (WHOLE[:-1].replace(b"Host: x", b"X-Request-Timeout-Ms: 100"), {}, 408, "body"),
        (RANK + b"Content-Length: 1001\r\n\r\n", {"max_body_bytes": 1000}, 413, "max_body_bytes"),
        (
            RANK + b"Transfer-Encoding: chunked\r\n\r\n" + b"200\r\n" + b" " * 512 + b"\r\n" + b"200\r\n" + b" " * 512,
            {"max_body_bytes": 1000},
            413,
            "max_body_bytes",
        ),
        (RANK + b"Content-Length: 1001\r\n\r\n", {"max_receiving_bytes": 1000}, 503, "max_receiving_bytes"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES, {}, 431, "65,536"),
        (b"nonsense\r\n\r\n", {}, 400, "request line"),
        (RANK + b"Content-Length: x\r\n\r\n", {}, 400, "Content-Length"),
        (RANK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", {}, 400, "chunk"),
        (RANK + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", {}, 400, "exclude"),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", {}, 400, ""),
        (RANK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 8193, {}, 400, "8,192 chunks"),
        (RANK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 8193, {}, 400, "8,192 chunks"),
        (WHOLE[:-1].replace(b"Host: x", b"X-Request-Timeout-Ms: 0.1"), {}, 408, "body"),
    ],
)
async def test_what_does_not_become_a_request_ends_in_words(
    sent: bytes, settings: dict[str, Any], status: int, detail: str
) -> None:
    async with site(**settings) as at:
        raw = await at.connect()
        raw.send(sent)
        got, headers, body = await raw.answer()
        assert got == status
        assert detail in body.decode()
        assert headers["connection"] == "close"
        assert at.entrance.receiving_bytes == 0
        assert await raw.is_closed()
        assert not at.service.served
        assert at.count("requests_total", route="none", code=str(status)) == 1


@pytest.mark.parametrize("sent", [b"", WHOLE])
async def test_idle_connections_end(sent: bytes) -> None:
    async with site(header_timeout_s=0.1, idle_timeout_s=0.1) as at:
        raw = await at.connect()
        raw.send(sent)
        if sent:
            await raw.answer()
        assert await raw.is_closed()
        assert at.count("connections_ended_total", reason="idle") == 1


async def test_a_body_that_is_no_kinds_has_the_time_of_bodies_not_a_requests_budget() -> None:
    """An upload of a catalogue may take longer than a rank would wait."""
    async with site(default_budget_s=0.05) as at:
        body = b'{"withdraw": [1]}'
        raw = await at.connect()
        raw.send(b"POST /v1/catalog/items HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        raw.send(b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
        await asyncio.sleep(0.2)
        raw.send(body[-1:])
        assert (await raw.answer())[0] == 404  # it was read: the pretended instance has no catalogue


async def test_a_slow_body_costs_the_caller_its_own_connection_only() -> None:
    async with site(default_budget_s=0.2, max_receiving_bytes=100_000) as at:
        slow = [await at.connect() for _ in range(50)]
        for raw in slow:
            raw.send(RANK + b"Content-Length: 1000\r\n\r\n{")
        await until(lambda: at.entrance.receiving_bytes == 50_000)
        good = await at.connect()
        good.send(WHOLE)
        assert (await good.answer())[0] == 200
        for raw in slow:
            assert (await raw.answer())[0] == 408
        await until(lambda: at.entrance.receiving_bytes == 0)


async def test_at_the_limit_the_longest_idle_makes_room() -> None:
    async with site() as at:
        at.entrance.listeners[0].max_connections = 3
        used = await at.connect()
        used.send(WHOLE)
        await used.answer()
        silent = [await at.connect() for _ in range(2)]
        await asyncio.sleep(0.02)
        new = await at.connect()
        new.send(WHOLE)
        assert (await new.answer())[0] == 200
        assert await silent[0].is_closed()
        used.send(WHOLE)
        assert (await used.answer())[0] == 200
        assert at.count("connections_ended_total", reason="evicted") == 1


async def test_at_the_limit_with_all_in_use_the_newcomer_is_told() -> None:
    async with site() as at:
        at.entrance.listeners[0].max_connections = 1
        at.service.waits = asyncio.Event()
        busy = await at.connect()
        busy.send(WHOLE)
        await at.service.waits.wait()
        new = await at.connect()
        status, headers, body = await new.answer()
        assert status == 503
        assert "max_connections" in body.decode()
        assert headers["retry-after"] == "1"
        assert at.count("connections_ended_total", reason="refused") == 1


async def test_health_is_answered_while_the_door_is_full() -> None:
    async with site() as at:
        with await at.service.fill():
            began_at = time.monotonic()
            raw = await at.connect()
            raw.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await raw.answer())[0] == 200
            assert time.monotonic() - began_at < 5.0


async def test_an_answer_that_nobody_reads_is_given_up() -> None:
    async with site(write_timeout_s=0.2) as at:
        large = {"click": np.zeros(2_000_000, np.float32)}
        at.service.answers["rank"] = msgspec.structs.replace(EXAMPLES["rank"].answer, scores=large)
        raw = await at.connect()
        raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
        raw.send(WHOLE)
        await until(lambda: at.count("connections_ended_total", reason="unread") == 1)
        await until(lambda: at.entrance.door.admitted == 0)


async def test_closing_waits_for_the_requests_that_are_here() -> None:
    async with site(default_budget_s=5.0) as at:
        raw = await at.connect()
        raw.send(WHOLE[:-1])
        await until(lambda: at.entrance.receiving_bytes > 0)
        closing = asyncio.ensure_future(at.client.server.close())
        await asyncio.sleep(0.1)
        assert not closing.done()
        raw.send(WHOLE[-1:])
        assert (await raw.answer())[0] == 200
        assert await raw.is_closed()
        await closing


async def test_a_path_in_disguise_is_served_without_a_slot() -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(WHOLE.replace(b"/v1/rank", b"/v1/%72ank"))
        assert (await raw.answer())[0] == 200
        assert at.entrance.door.admitted == 0
