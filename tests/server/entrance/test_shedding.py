"""What the shedder refuses, the door would refuse; everything else goes up, whole, in its order, to its connection."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from ctypes import c_int64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import BadRequest
from npu_gr.server.entrance import framing, kernel_socket, pacing, shed_library
from npu_gr.server.entrance.framing import HEAD_END, granted_s, parse_head, tenant_of
from npu_gr.server.entrance.shed_library import UP_BYTES, UP_CLOSED, UP_RETRIES, UP_UNSENT
from npu_gr.server.entrance.shedding import MAX_KEY_BYTES, ROOM_BYTES
from tests.server.entrance.test_connection import BODY, RANK, WHOLE, Site
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, serving_fake
from tests.serving import until

pytestmark = pytest.mark.skipif(shed_library.load() is None, reason="the shedder was not built: Linux, a C++ compiler")

NAMES = b"authorization\nx-request-timeout-ms\ngrpc-timeout\n"
TENANT = json.loads(BODY).get("tenant", "").encode()
ANSWER = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"


class Bare:
    """A shedder without a door."""

    def __init__(self) -> None:
        library = shed_library.load()
        assert library is not None
        self.library = library
        self.at = library.npu_gr_shed_new(NAMES, ANSWER, (c_int64 * 1)(len(ANSWER)), 1)
        self.patterns = (shed_library.Pattern * 1)()
        self.ups = (shed_library.Up * 512)()
        self.buffer = ctypes.create_string_buffer(32 * ROOM_BYTES)
        self.job = shed_library.ShedJob(
            patterns=self.patterns,
            ups=self.ups,
            most_ups=512,
            buffer=ctypes.addressof(self.buffer),
            buffer_bytes=32 * ROOM_BYTES,
            room_bytes=ROOM_BYTES,
            most_at_once=-1,
        )

    def key(self, request: bytes) -> bytes | None:
        key = ctypes.create_string_buffer(MAX_KEY_BYTES)
        num_bytes = self.library.npu_gr_shed_key(self.at, request, len(request), key)
        return None if num_bytes < 0 else key.raw[:num_bytes]

    def refuse(self, request: bytes, quota: int = 0) -> None:
        """Begin to refuse requests like one."""
        key = self.key(request)
        assert key is not None
        self.job.num_ups = 0
        self.patterns[0] = shed_library.Pattern(key=key, key_bytes=len(key), quota=quota)
        self.job.num_patterns = 1
        self.library.npu_gr_shed_post(self.at, self.job)

    def end(self, num_ups: int = 0) -> list[tuple[int, int, bytes]]:
        """End it when so many go up; returns them: descriptor, why, bytes."""
        give_up_at = time.monotonic() + 5
        while self.job.num_ups < num_ups and time.monotonic() < give_up_at:
            time.sleep(1e-3)
        self.library.npu_gr_shed_wait(self.at)
        raw = self.buffer.raw
        return [(up.fd, up.why, raw[up.offset : up.offset + up.num_bytes]) for up in self.ups[: self.job.num_ups]]


@pytest.fixture(scope="module")
def bare() -> Iterator[Bare]:
    made = Bare()
    yield made
    made.library.npu_gr_shed_free(made.at)


@pytest.fixture
def pair(bare: Bare) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A caller and its connection, which is lent."""
    caller, ours = socket.socketpair()
    caller.settimeout(5)
    assert bare.library.npu_gr_shed_lend(bare.at, ours.fileno(), 0)
    yield caller, ours
    bare.library.npu_gr_shed_take_back(bare.at, ours.fileno())
    caller.close()
    ours.close()


# ---- keys

LINES = st.sampled_from(
    [
        b"Host: x",
        b"host:y",
        b"Authorization: Bearer a",
        b"AUTHORIZATION:Bearer b",
        b"X-Request-Timeout-Ms: 20",
        b"x-request-timeout-ms: 30",
        b"grpc-timeout: 20m",
        b"Connection: keep-alive",
        b"Connection: close",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"traceparent: 00-1-2-3",
        b" folded",
        b"no colon",
        b"spaced : name",
        b"bare\nline: feed",
        b"Content-Length: 3",
        b"X-Content-Length: 7",
    ]
)
FIRST = st.sampled_from(
    [
        b"POST /v1/rank HTTP/1.1",
        b"POST /v1/rank?a=b HTTP/1.1",
        b"POST /v1/rank HTTP/1.0",
        b"GET /v1/rank HTTP/1.1",
        b"x",
    ]
)
BODIES = st.sampled_from(
    [
        b"",
        b"{}",
        b'{"tenant": "a"}',
        b'{"x": "tenant", "tenant" :\n"a"}',
        b'{"tenant": "b"}',
        b'{"tenant": "a\\"b"}',
        b'{"tenant": ""}',
        b"\x81\xa6tenant\xa1a",
        b"\x81\xa6tenant\xd9\x01a",
        b"\x81\xa6tenant",
        b'{"tenant": "a"}' + b" " * 5000,
        b"{" + b" " * 5000 + b'"tenant":"a"}',
        b"{" + b" " * 2500 + b'"tenant":"a"' + b" " * 2500 + b"}",
        b'{"tenant": "' + b"t" * 256 + b'"}',
        b'{"tenant": "' + b"t" * 257 + b'"}',
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    body = draw(BODIES)
    lines = [draw(FIRST), *draw(st.lists(LINES, max_size=4))]
    if draw(st.integers(0, 7)):
        lines.insert(
            1 + draw(st.integers(0, len(lines) - 1)),
            b"Content-Length: %d" % (len(body) + draw(st.sampled_from([0, 0, 0, 1]))),
        )
    return b"\r\n".join(lines) + HEAD_END + body + draw(st.sampled_from([b"", b"", b"", b"G"]))


def decided_by(request: bytes) -> tuple[Any, ...]:
    """What the door decides by; fails where it is not one whole request that may be refused at once."""
    end = request.index(HEAD_END) + len(HEAD_END)
    head = parse_head(request, end)
    assert not head.is_chunked
    assert not head.waits_for_continue
    assert not head.closes
    assert head.num_bytes + head.body_bytes == len(request)
    return head.method, head.path, head.authorization, granted_s(head, 1.0, 5.0), tenant_of(request, end)


@given(requests(), requests())
def test_requests_of_one_key_are_one_to_the_door(bare: Bare, one: bytes, other: bytes) -> None:
    key = bare.key(one)
    if key is None:
        return
    try:
        seen = decided_by(one)
    except BadRequest:  # the door answers it with a 400, and learns no such key
        assert one.lower().count(b"authorization:") > 1
        return
    if key == bare.key(other):
        assert decided_by(other) == seen


def test_a_plain_request_has_a_key_without_what_the_door_does_not_read(bare: Bare) -> None:
    other = WHOLE.replace(b"Host: x", b"traceparent: 00-1-2-3\r\nHost: y")
    assert bare.key(WHOLE) == b"POST /v1/rank HTTP/1.1\0" + TENANT
    assert bare.key(other) == bare.key(WHOLE)
    assert bare.key(WHOLE[:-1]) is None
    assert bare.key(WHOLE + b"P") is None
    assert bare.key(WHOLE.replace(b"Host: x", b"Authorization: Bearer " + b"k" * MAX_KEY_BYTES)) is None


@pytest.mark.parametrize(
    ("source", "name", "value"),
    [
        ("shed.cpp", "RETRY_S", pacing.RETRY_S),
        ("shed.cpp", "JIFFY_S", kernel_socket._JIFFY_S),
        ("request_key.h", "MAX_DIGITS", framing.MAX_DIGITS),
        ("request_key.h", "SEARCHED_BYTES", framing._SEARCHED_BYTES),
        ("request_key.h", "MAX_KEY_BYTES", MAX_KEY_BYTES),
        ("shed_call.h", "NPU_GR_SHED_ABI", shed_library.ABI),
    ],
)
def test_numbers_that_stand_on_both_sides_are_the_same(source: str, name: str, value: float) -> None:
    text = (Path(__file__).parents[3] / "ops/door" / source).read_text()
    assert [float(found) for found in re.findall(rf"\b{name}(?: =)? ([0-9.]+)", text)] == [value]


# ---- the shedder alone


def test_it_refuses_what_is_like_the_pattern_and_hands_up_what_is_not(
    bare: Bare, pair: tuple[socket.socket, socket.socket]
) -> None:
    caller, ours = pair
    bare.refuse(WHOLE)
    for _ in range(3):
        caller.sendall(WHOLE)
        assert caller.recv(4096) == ANSWER
    caller.sendall(WHOLE.replace(b"/v1/rank", b"/v1/other"))
    while bare.job.num_ups == 0:
        time.sleep(1e-3)
    caller.sendall(WHOLE)  # nobody reads it until the one before is answered
    time.sleep(0.02)
    assert bare.end() == [(ours.fileno(), UP_BYTES, WHOLE.replace(b"/v1/rank", b"/v1/other"))]
    assert bare.patterns[0].refused == 3
    bare.library.npu_gr_shed_resume(bare.at, ours.fileno())
    bare.refuse(WHOLE, quota=1)
    assert bare.end(1) == [(ours.fileno(), UP_BYTES, WHOLE)]
    assert bare.patterns[0].quota == 0
    bare.library.npu_gr_shed_resume(bare.at, ours.fileno())


def test_a_caller_that_hangs_up_is_handed_back(bare: Bare) -> None:
    for sent in (b"", WHOLE):
        caller, ours = socket.socketpair()
        assert bare.library.npu_gr_shed_lend(bare.at, ours.fileno(), 0)
        caller.sendall(sent)
        caller.close()
        bare.refuse(WHOLE)
        assert bare.end(1) == [(ours.fileno(), UP_CLOSED, b"")]
        assert bare.patterns[0].refused == 0
        ours.close()


def test_what_finds_no_room_in_the_socket_goes_up(bare: Bare) -> None:
    caller, ours = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    ours.setblocking(False)
    filled = 0
    while True:
        try:
            filled += ours.send(b"x" * 100)
        except BlockingIOError:
            break
    assert bare.library.npu_gr_shed_lend(bare.at, ours.fileno(), 0)
    caller.sendall(WHOLE)
    bare.refuse(WHOLE)
    assert bare.end(1) == [(ours.fileno(), UP_UNSENT, ANSWER)]
    assert len(caller.recv(1 << 20)) <= filled
    caller.close()
    ours.close()


@pytest.mark.parametrize("num_at_once", [0, -1])
@pytest.mark.parametrize("most_at_once", [4, -1])
def test_a_caller_that_retries_at_once_goes_back_but_a_proxy_does_not(
    bare: Bare, num_at_once: int, most_at_once: int
) -> None:
    caller, ours = socket.socketpair()
    caller.settimeout(5)
    assert bare.library.npu_gr_shed_lend(bare.at, ours.fileno(), num_at_once)
    bare.job.most_at_once = most_at_once
    bare.refuse(WHOLE)
    for _ in range(4):
        caller.sendall(WHOLE)
        assert caller.recv(4096) == ANSWER
    time.sleep(0.05)
    caller.sendall(WHOLE)  # not at once
    assert caller.recv(4096) == ANSWER
    assert bare.end() == []
    bare.refuse(WHOLE)
    goes_back = num_at_once == 0 and most_at_once == 4
    for _ in range(5 if goes_back else 20):
        caller.sendall(WHOLE)
        assert caller.recv(4096) == ANSWER
    bare.job.most_at_once = -1
    assert bare.end(int(goes_back)) == ([(ours.fileno(), UP_RETRIES, b"")] if goes_back else [])
    caller.close()
    ours.close()


def test_a_descriptor_that_was_closed_and_used_again_is_another_connections(bare: Bare) -> None:
    caller, ours = socket.socketpair()
    number = ours.fileno()
    assert bare.library.npu_gr_shed_lend(bare.at, number, 0)
    caller.close()
    ours.close()
    caller, ours = socket.socketpair()
    assert number in (caller.fileno(), ours.fileno())
    caller.sendall(WHOLE)
    ours.sendall(WHOLE)
    bare.refuse(WHOLE)
    time.sleep(0.02)
    assert bare.end() == []
    caller.close()
    ours.close()


# ---- with a door


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    service = FakeService({name: example.answer for name, example in EXAMPLES.items()})
    async with serving_fake(service, **settings) as (client, metrics):
        at = Site(client, service, metrics)
        service.door._lanes["rank"].pace.seconds = 1.0  # so nobody who comes while it is full can be in time
        try:
            yield at
        finally:
            for raw in at.raws:
                raw.writer.transport.abort()


async def lent(at: Site, request: bytes = WHOLE) -> Any:
    """Connect, and be refused by the shedder."""
    raw = await at.connect()
    for _ in range(2):
        raw.send(request)
        assert (await raw.answer())[0] == 429
        await until(lambda: all(one.is_lent for one in at.entrance._connections))  # type: ignore[attr-defined]
    return raw


def becomes_fast(at: Site) -> None:
    """Requests may wait from now on."""
    at.service.door._lanes["rank"].pace.seconds = 1e-3
    at.service.door._changed()
    assert at.entrance.shedder is not None
    at.entrance.shedder._look()


async def waits(at: Site, raw: Any) -> None:
    """Let a request of a lent connection wait at the door."""
    becomes_fast(at)
    raw.send(WHOLE)
    await until(lambda: at.service.door.waiting == 1)


async def test_refusals_are_counted_and_whoever_comes_when_there_is_room_is_served() -> None:
    async with site(trusted_proxies=["127.0.0.0/8"]) as at:  # whose connection never goes back
        with await at.service.fill():
            raw = await lent(at)
            shedder = at.entrance.shedder
            assert shedder is not None
            learnt = []
            shedder.learn = lambda *args: learnt.append(args)  # type: ignore[method-assign]
            for _ in range(50):
                raw.send(WHOLE)
                assert (await raw.answer())[0] == 429
            assert not learnt  # Python saw none of them
        await asyncio.sleep(0.01)  # the event loop tells it of the room in its next turn
        raw.send(WHOLE)
        assert (await raw.answer())[0] == 200
        await asyncio.sleep(0.01)
        await until(lambda: at.count("admissions_total", kind="rank", verdict="overloaded") == 52)
        assert len(at.service.served) == 1


async def test_another_tenant_goes_up_to_the_door() -> None:
    body = json.dumps({**json.loads(BODY), "tenant": "small"}).encode()
    small = RANK + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with site() as at:
        with await at.service.fill():
            raw = await lent(at)
            asked = []
            arrive = at.service.door.arrive

            def ask(kind: str, tenant: str, *rest: Any) -> Any:
                asked.append(tenant)
                return arrive(kind, tenant, *rest)

            at.service.door.arrive = ask  # type: ignore[method-assign, assignment]
            raw.send(WHOLE)
            assert (await raw.answer())[0] == 429
            assert asked == []
            raw.send(small)
            assert (await raw.answer())[0] == 429
            assert asked == ["small"]


async def test_pieces_and_pipelined_requests_are_answered_in_their_order() -> None:
    async with site() as at:
        with await at.service.fill():
            raw = await lent(at)
            raw.send(WHOLE[:40])
            await asyncio.sleep(0.02)
            raw.send(WHOLE[40:])
            assert (await raw.answer())[0] == 429
            raw.send(WHOLE + b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n" + WHOLE)
            assert [(await raw.answer())[0] for _ in range(3)] == [429, 404, 429]
            raw.send(b"nonsense\r\n\r\n")
            assert (await raw.answer())[0] == 400
            assert await raw.is_closed()


async def test_a_lent_connection_that_its_caller_closes_is_forgotten() -> None:
    async with site() as at:
        with await at.service.fill():
            for abort in (False, True):
                raw = await lent(at)
                assert at.entrance.shedder is not None
                assert len(at.entrance.shedder) == 1
                if abort:
                    raw.writer.transport.abort()
                else:
                    raw.writer.close()
                await until(lambda: not at.entrance._connections)
                assert len(at.entrance.shedder) == 0


async def test_a_lent_connection_is_idle_since_its_last_answer_and_is_closed_then() -> None:
    async with site(header_timeout_s=0.6, idle_timeout_s=0.6) as at:
        with await at.service.fill():
            raw = await lent(at)
            for _ in range(4):
                await asyncio.sleep(0.3)
                raw.send(WHOLE)
                assert (await raw.answer())[0] == 429
            assert await raw.is_closed()


async def test_a_request_whose_connection_is_lent_again_is_served_while_its_caller_waits() -> None:
    """What goes up holds its connection: nothing that comes behind it overtakes it."""
    async with site() as at:
        with await at.service.fill():
            raw = await lent(at)
            await waits(at, raw)
            raw.send(WHOLE)
            await asyncio.sleep(0.02)
            at.service.door._lanes["rank"].pace.seconds = 1.0
        assert [(await raw.answer())[0] for _ in range(2)] == [200, 200]


async def test_whoever_hangs_up_while_a_request_of_a_lent_connection_waits_is_counted() -> None:
    async with site() as at:
        with await at.service.fill():
            raw = await lent(at)
            await waits(at, raw)
            raw.writer.transport.abort()
            await until(lambda: at.service.door.waiting == 0)
        assert at.count("admissions_total", kind="rank", verdict="abandoned") == 1


async def test_it_is_lent_no_more_when_nobody_is_refused() -> None:
    async with site() as at:
        with await at.service.fill():
            raw = await lent(at)
        at.service.door._lanes["rank"].pace.seconds = 1e-3
        await asyncio.sleep(1.2)
        for _ in range(2):
            raw.send(WHOLE)
            assert (await raw.answer())[0] == 200
            await asyncio.sleep(0.02)
        (connection,) = at.entrance._connections
        assert not connection.is_lent  # type: ignore[attr-defined]


async def test_a_stop_closes_lent_connections() -> None:
    async with site() as at:
        with await at.service.fill():
            raw = await lent(at)
        began_at = time.monotonic()
        await at.client.close()
        assert await raw.is_closed()
        assert time.monotonic() - began_at < 5


async def test_without_a_descriptor_every_refusal_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as at:
        assert at.entrance.can_shed
        monkeypatch.setattr(at.entrance._shed_library, "npu_gr_shed_new", lambda *_: None)
        with await at.service.fill():
            raw = await at.connect()
            for _ in range(3):
                raw.send(WHOLE)
                assert (await raw.answer())[0] == 429
        assert not at.entrance.can_shed
        assert at.entrance.shedder is None
