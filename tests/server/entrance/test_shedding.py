"""What the shedder refuses, the door would refuse; everything else goes up, whole, in its order, to its connection."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from npu_gr.server.entrance import shed_library
from npu_gr.server.entrance.framing import HEAD_END
from npu_gr.server.entrance.listener import State
from npu_gr.server.entrance.shed_library import MOST_PATTERNS, UP_RETRIES, UP_UNSENT
from npu_gr.server.entrance.shedding import Newcomer
from tests.server.entrance.test_connection import BODY, RANK, WHOLE, Site
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, serving_fake
from tests.serving import until

pytestmark = pytest.mark.skipif(shed_library.load() is None, reason="the shedder was not built: Linux, a C++ compiler")


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    service = FakeService({name: example.answer for name, example in EXAMPLES.items()})
    async with serving_fake(service, **settings) as (client, metrics):
        at = Site(client, service, metrics)
        service.door._lanes["rank"].pace.seconds = 1.0  # so nobody who comes while it is full can be in time
        await at.listen()
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


async def test_more_keys_than_it_knows_are_refused_by_the_door_and_the_known_ones_still_here() -> None:
    async with site(trusted_proxies=["127.0.0.0/8"]) as at:
        with await at.service.fill():
            raw = await at.connect()
            budgets = [b"X-Request-Timeout-Ms: %d\r\n\r\n" % (1000 + n) for n in range(3 * MOST_PATTERNS)]
            requests = [WHOLE.replace(HEAD_END, b"\r\n" + line, 1) for line in budgets]
            for request in requests:
                raw.send(request)
                assert (await raw.answer())[0] == 429
            shedder = at.entrance.shedder
            assert shedder is not None
            assert len(shedder._patterns) == MOST_PATTERNS
            asked = []
            arrive = at.service.door.arrive

            def ask(*args: Any) -> Any:
                asked.append(args)
                return arrive(*args)

            at.service.door.arrive = ask  # type: ignore[method-assign, assignment]
            for _ in range(5):
                raw.send(requests[0])
                assert (await raw.answer())[0] == 429
                await asyncio.sleep(0.01)
            assert len(asked) <= 1  # the one by which it was lent
            assert at.count("connections_lent") == 1
            asked.clear()
            raw.send(requests[-1])
            assert (await raw.answer())[0] == 429
            assert len(asked) == 1
        await until(lambda: at.count("admissions_total", kind="rank", verdict="overloaded") == 3 * MOST_PATTERNS + 6)


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
                raw = await lent(at)  # the second one is accepted by the shedder, too
                shedder = at.entrance.shedder
                assert shedder is not None
                assert len(shedder) == 1
                if abort:
                    raw.writer.transport.abort()
                else:
                    raw.writer.close()
                await until(lambda: not at.entrance._connections and not len(shedder))  # noqa: B023  (awaited here)


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


@pytest.mark.parametrize(("refused_share", "stays"), [(0.74, True), (0.3, False)])
async def test_where_most_are_refused_whoever_is_let_in_stays_lent(refused_share: float, stays: bool) -> None:
    """At three times the capacity .74 are refused; of 256 paused clients that retry .3."""
    async with site() as at:
        with await at.service.fill():
            raw = await lent(at)
            await waits(at, raw)
            shedder = at.entrance.shedder
            assert shedder is not None
            shedder._refused_share = refused_share
        assert (await raw.answer())[0] == 200
        (connection,) = at.entrance._connections
        await until(lambda: connection not in shedder._offered and connection.state is State.IDLE)  # type: ignore[comparison-overlap]
        assert connection.is_lent == stays  # type: ignore[attr-defined]


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


# ---- connections that it accepts


async def test_a_caller_who_connects_anew_is_refused_without_python_and_served_when_there_is_room() -> None:
    async with site() as at:
        with await at.service.fill():
            await lent(at)
            raws = [await at.connect() for _ in range(20)]
            for raw in raws:
                raw.send(WHOLE)
            for raw in raws:
                status, headers, _ = await raw.answer()
                assert status == 429
                assert "retry-after" in headers
            assert len(at.entrance._connections) == 1
            assert at.count("connections_lent") == 21
            becomes_fast(at)
            raws[0].send(WHOLE)
            await until(lambda: at.service.door.waiting == 1)
            assert len(at.entrance._connections) == 2
        assert (await raws[0].answer())[0] == 200
        raws[0].send(WHOLE)
        assert (await raws[0].answer())[0] == 200
        await until(lambda: at.count("admissions_total", kind="rank", verdict="overloaded") == 22)


async def test_what_a_new_caller_sends_beside_that_is_answered_as_ever() -> None:
    async with site() as at:
        with await at.service.fill():
            await lent(at)
            pieces, nonsense, pipelined, other = [await at.connect() for _ in range(4)]
            pieces.send(WHOLE[:40])
            nonsense.send(b"nonsense\r\n\r\n")
            pipelined.send(WHOLE + b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n" + WHOLE)
            other.send(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await nonsense.answer())[0] == 400
            assert await nonsense.is_closed()
            assert [(await pipelined.answer())[0] for _ in range(3)] == [429, 404, 429]
            assert (await other.answer())[0] == 200
            pieces.send(WHOLE[40:])
            assert (await pieces.answer())[0] == 429


async def test_a_new_caller_who_says_nothing_has_as_long_as_ever() -> None:
    async with site(header_timeout_s=0.5) as at:
        with await at.service.fill():
            await lent(at)
            raw = await at.connect()
            began_at = time.monotonic()
            assert await raw.is_closed()
            assert 1.4 <= time.monotonic() - began_at <= 4


async def test_python_accepts_again_when_nobody_is_refused() -> None:
    async with site() as at:
        with await at.service.fill():
            await lent(at)
        (acceptor,) = at.entrance.acceptors
        assert acceptor._rests  # type: ignore[attr-defined]
        await asyncio.sleep(2.3)  # nobody asks anything meanwhile
        assert not acceptor._rests  # type: ignore[attr-defined]
        raw = await at.connect()
        await until(lambda: len(at.entrance._connections) == 2)
        raw.send(WHOLE)
        assert (await raw.answer())[0] == 200


async def test_at_the_limit_of_connections_idle_ones_make_room_for_new_callers_here_too() -> None:
    async with site(max_connections=16) as at:
        with await at.service.fill():
            first = await lent(at)
            idle = [await at.connect() for _ in range(15)]
            await until(lambda: at.count("connections_lent") == 16)
            raw = await at.connect()
            raw.send(WHOLE)
            assert (await raw.answer())[0] == 429
            assert at.count("connections_ended_total", reason="evicted") == 1
            assert await first.is_closed()
            assert not any(one.reader.at_eof() for one in idle)


@pytest.mark.parametrize("why", [UP_UNSENT, UP_RETRIES])
async def test_a_newcomer_gets_the_rest_of_its_answer_and_is_paused_if_it_retries(why: int) -> None:
    async with site() as at:
        at.service.door._lanes["rank"].pace.seconds = 1e-3
        (acceptor,) = at.entrance.acceptors
        acceptor.rest()
        raw = await at.connect()
        accepted, _ = acceptor.sockets[0].accept()
        accepted.setblocking(False)
        rest = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n" if why == UP_UNSENT else b""
        await acceptor.adopt(accepted, Newcomer(why, rest, 0.0))
        assert at.entrance.num_paused == (why == UP_RETRIES)
        raw.send(WHOLE)
        if why == UP_UNSENT:
            assert (await raw.answer())[0] == 429
        assert (await raw.answer())[0] == 200
        assert at.entrance.num_paused == 0


async def test_a_caller_who_hangs_up_before_it_is_refused_is_counted() -> None:
    async with site() as at:
        with await at.service.fill():
            await lent(at)
            shedder = at.entrance.shedder
            assert shedder is not None
            (acceptor,) = at.entrance.acceptors
            shedder.accept_no_more(acceptor)
            shedder._accepting[acceptor] = []  # so that it is not begun anew
            raws = [await at.connect() for _ in range(5)]
            for raw in raws:
                raw.send(WHOLE)
                await raw.writer.drain()
                raw.writer.close()
            await asyncio.sleep(0.05)
            del shedder._accepting[acceptor]
            shedder._accept(acceptor)
            await until(lambda: at.count("admissions_total", kind="rank", verdict="abandoned") == 5)
            assert len(at.entrance._connections) == 1


async def test_a_stop_closes_connections_that_nobody_else_knows() -> None:
    async with site() as at:
        with await at.service.fill():
            await lent(at)
            raw = await at.connect()
            raw.send(WHOLE)
            assert (await raw.answer())[0] == 429
        assert at.entrance.shedder is not None
        assert at.entrance.shedder.num_newcomers == 1
        began_at = time.monotonic()
        await at.client.close()
        assert await raw.is_closed()
        assert time.monotonic() - began_at < 5
