"""A rejection costs no parsing, keeps its connection and is counted.

No limit is held by what a client only says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.kinds import RANK as RANK_KIND
from npu_gr.server.admission.middleware import named_tenant
from npu_gr.server.config import ServerConfig
from npu_gr.server.run import PIPELINE, agent
from tests.keys import secret, write_keys
from tests.server.examples import EXAMPLES
from tests.server.raw import BODY, RANK, WHOLE, site
from tests.serving import until


async def test_twenty_pipelined_requests_have_twenty_answers_in_order() -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(
            b"".join(
                WHOLE.replace(b"Host: x", b"Host: x\r\nX-Request-Id: n%d" % n) for n in range(20)
            )
        )
        assert [(await raw.answer())[1]["x-request-id"] for _ in range(20)] == [
            f"n{n}" for n in range(20)
        ]
        assert len(at.service.served) == 20


@pytest.mark.parametrize("cut", [1, 10, 100, len(WHOLE) - len(BODY) - 2, len(WHOLE) - 1])
async def test_a_request_in_two_pieces_holds_no_permit_until_it_is_whole(cut: int) -> None:
    async with site() as at:
        raw = await at.connect()
        for _ in range(2):
            raw.send(WHOLE[:cut])
            await asyncio.sleep(0.02)
            assert at.service.admission.work.admitted == 0
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
        assert (await raw.answer())[0] == 200


async def test_a_rejection_is_not_parsed_keeps_the_connection_and_is_counted() -> None:
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
        # a rejection is no fast answer
        assert at.count("request_duration_seconds_count", kind="rank") == 1
        assert at.admission.receiving_bytes == 0


async def test_a_body_on_its_way_is_rejected_at_once_where_it_would_be_anyway() -> None:
    async with site() as at:
        raw = await at.connect()
        at.service.admission.work.kinds["rank"].service_time.seconds = 1.0
        with await at.service.fill():
            raw.send(RANK + b"Content-Length: 100000\r\n\r\n{")
            assert (await raw.answer())[0] == 429
        assert at.admission.receiving_bytes == 0


@pytest.mark.parametrize(
    ("proxies", "asks_agent", "is_paused"),
    [(["127.0.0.1/32"], False, False), ([], True, False), ([], False, True)],
    ids=["trusted", "asks the agent", "a client"],
)
async def test_rejections_to_clients_wait_for_their_turn_and_those_to_a_proxy_do_not(
    proxies: list[str], asks_agent: bool, is_paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_gr.server.admission.middleware.MAX_PAUSE_S", 60.0)
    monkeypatch.setattr("npu_gr.server.admission.middleware.REJECTIONS_PER_S", 0.01)
    async with site(trusted_proxies=proxies) as at:
        raw = await at.connect()
        if asks_agent:
            async with agent(at.client.server.app[PIPELINE], ServerConfig(agent_port=0)) as port:
                await agent_line(port)
                await until(lambda: at.admission._asked_at)
        at.service.admission.work.kinds["rank"].service_time.seconds = 1.0
        with await at.service.fill():
            raw.send(WHOLE)
            if is_paused:
                await until(lambda: at.count("rejections_paused") == 1)
                assert at.admission.receiving_bytes == 0  # it waits without its body
            else:
                assert (await raw.answer())[0] == 429


async def test_a_client_that_disconnects_while_it_is_queued_is_forgotten_and_counted() -> None:
    async with site() as at:
        with await at.service.fill():
            raw = await at.connect()
            raw.send(WHOLE)
            await until(lambda: at.service.admission.waiting == 1)
            raw.writer.transport.abort()
            await until(lambda: at.service.admission.waiting == 0)
        await until(lambda: at.count("admissions_total", kind="rank", verdict="abandoned") == 1)
        assert at.service.served == []
        assert at.admission.receiving_bytes == 0


@pytest.mark.parametrize(
    "head",
    [RANK, RANK.replace(b"POST /v1/rank", b"GET /healthz"), RANK.replace(b"v1/rank", b"nothing")],
    ids=["a rank", "health", "no route"],
)
@pytest.mark.parametrize("has_keys", [False, True])
async def test_heads_that_announce_large_bodies_hold_nothing(
    head: bytes, has_keys: bool, tmp_path: Any
) -> None:
    """66 bodies of 4 MiB are more than `max_receiving_bytes`; none is sent, and no key."""
    keys = {"api_keys_file": write_keys(tmp_path / "keys")} if has_keys else {}
    whole = WHOLE.replace(
        b"Host: x", b"Host: x\r\nAuthorization: Bearer %s" % secret("all").encode()
    )
    async with site(**keys) as at:
        for _ in range(66):
            raw = await at.connect()
            raw.send(head + b"Content-Length: %d\r\n\r\n" % at.admission._config.max_body_bytes)
        await asyncio.sleep(0.05)
        assert at.admission.receiving_bytes == 0
        asked = await at.connect()
        for _ in range(20):
            asked.send(whole)
            assert (await asked.answer())[0] == 200
        assert at.count("admissions_total", kind="rank", verdict="overloaded") in (None, 0)


async def test_health_takes_no_body() -> None:
    """Without a key nobody has a body read: it would count against those of others."""
    async with site(max_receiving_bytes=1000) as at:
        raw = await at.connect()
        raw.send(RANK.replace(b"POST /v1/rank", b"GET /healthz") + b"Content-Length: 999\r\n\r\n")
        raw.send(b" " * 900)
        status, _, body = await raw.answer()
        assert (status, json.loads(body)["detail"]) == (413, "/healthz takes no body")
        assert await raw.is_closed()
        assert at.admission.receiving_bytes == 0


@pytest.mark.parametrize(
    ("proxy", "status", "failed"), [("", 429, 0), ("trusted", 503, 1), ("asks", 503, 1)]
)
async def test_bytes_count_as_they_arrive_and_are_given_back_when_their_sender_leaves(
    proxy: str, status: int, failed: int
) -> None:
    """Behind a proxy the other body may be anybody's, so it is the instance that fails."""
    trusted = ("127.0.0.1",) if proxy == "trusted" else ()
    async with site(max_receiving_bytes=2000, trusted_proxies=trusted) as at:
        if proxy == "asks":
            at.admission.agent_asked("127.0.0.1")
        slow = await at.connect()
        slow.send(RANK + b"Content-Length: 4000\r\n\r\n" + b" " * 1900)
        await until(lambda: at.count("receiving_bytes") == 1900)
        asked = await at.connect()
        asked.send(WHOLE)
        assert (await asked.answer())[0] == status
        assert at.count("slo_requests_total", kind="rank", result="failed") == failed
        slow.writer.transport.abort()
        await until(lambda: at.count("receiving_bytes") == 0)
        asked = await at.connect()
        asked.send(WHOLE)
        assert (await asked.answer())[0] == 200


async def test_a_client_that_fills_the_room_for_bodies_rejects_no_other() -> None:
    """One address sends nearly all of many bodies; the ranks of another are all answered."""
    size, num, fit = 4000, 12, 5
    sent = size - 100
    async with site(max_receiving_bytes=fit * sent, max_body_bytes=size) as at:
        greedy = [await at.connect() for _ in range(num)]
        for raw in greedy:
            raw.send(RANK + b"Content-Length: %d\r\n\r\n" % size + b" " * sent)
        answers = [asyncio.create_task(raw.answer()) for raw in greedy]
        # of one client the newest are rejected, as there is no other that holds more
        await until(lambda: sum(one.done() for one in answers) == num - fit)
        assert at.count("receiving_bytes") == fit * sent
        other = await at.connect(from_host="127.0.0.2")
        for _ in range(20):
            other.send(WHOLE)
            assert (await other.answer())[0] == 200
        await until(lambda: sum(one.done() for one in answers) == num - fit + 1)
        # it is over its own share, so the objectives count none of them
        assert {one.result()[0] for one in answers if one.done()} == {429}
        assert at.count("admissions_total", kind="rank", verdict="over_rate") == num - fit + 1
        assert at.count("slo_requests_total", kind="rank", result="failed") == 0
        assert at.count("receiving_bytes") == (fit - 1) * sent
        for one in answers:
            one.cancel()
    assert not at.admission._arriving
    assert at.admission.receiving_bytes == 0


@pytest.mark.parametrize(
    ("sent", "settings", "status", "words"),
    [
        (RANK + b"Content-Length: 99999999\r\n\r\n", {}, 413, "server.max_body_bytes"),
        (
            RANK + b"Transfer-Encoding: chunked\r\n\r\n800\r\n" + b" " * 2048 + b"\r\n",
            {"max_body_bytes": 1000},
            413,
            "max_body",
        ),
        (
            RANK + b"Content-Length: 500\r\n\r\n{",
            {"body_timeout_s": 0.1},
            408,
            "server.body_timeout_s",
        ),
        (
            RANK + b"X-Request-Timeout-Ms: 50\r\nContent-Length: 500\r\n\r\n{",
            {},
            408,
            "the request's time budget",
        ),
        (
            RANK + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\n{",
            {},
            415,
            "Content-Encoding",
        ),
    ],
)
async def test_a_body_that_does_not_come_ends_in_words_and_closes(
    sent: bytes, settings: dict[str, Any], status: int, words: str
) -> None:
    async with site(**settings) as at:
        raw = await at.connect()
        raw.send(sent)
        got, _, body = await raw.answer()
        assert got == status
        assert words in json.loads(body)["detail"]
        assert await raw.is_closed()
        assert at.admission.receiving_bytes == 0
        assert at.service.served == []


async def test_a_key_is_checked_before_the_body_comes(tmp_path: Any) -> None:
    async with site(api_keys_file=write_keys(tmp_path / "keys")) as at:
        raw = await at.connect()
        raw.send(RANK + b"Authorization: Bearer wrong\r\nContent-Length: 100000\r\n\r\n")
        assert (await raw.answer())[0] == 401
        raw = await at.connect()
        key = secret("all").encode()
        raw.send(WHOLE.replace(b"Host: x", b"Host: x\r\nAuthorization: Bearer " + key))
        assert (await raw.answer())[0] == 200


async def test_health_is_answered_while_every_permit_is_held() -> None:
    async with site() as at:
        raw = await at.connect()
        with await at.service.fill():
            raw.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await raw.answer())[0] == 200


async def agent_line(port: int | None) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        return await reader.read()


async def test_the_proxies_that_asked_the_agent_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who asked in the last seconds is remembered; no client is taken for an older one."""
    async with site() as at:
        monkeypatch.setattr("npu_gr.server.admission.middleware.AGENT_MEMORY_S", 0.0)
        for i in range(5):
            at.admission.agent_asked(f"10.0.0.{i}")
        assert list(at.admission._asked_at) == ["10.0.0.4"]


async def test_a_browser_at_the_agent_is_no_proxy() -> None:
    config = ServerConfig(agent_port=0)
    async with site() as at, agent(at.client.server.app[PIPELINE], config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert (await reader.read()).startswith(b"up ready maxconn:")
        writer.close()
        await asyncio.sleep(0.05)
        assert not at.admission._asked_at
        await agent_line(port)
        await until(lambda: at.admission._asked_at)


async def test_the_agent_tells_the_limit_and_that_the_instance_drains() -> None:
    async with site() as at:
        pipeline = at.client.server.app[PIPELINE]
        async with agent(pipeline, ServerConfig(agent_port=0)) as port:
            at.service.admission.work._mix.objective_s = RANK_KIND.objective_s
            at.service.admission.work._mix.service_time.seconds = RANK_KIND.objective_s * 0.12 / 7.5
            assert await agent_line(port) == b"up ready maxconn:7\n"
            at.service.why_not_ready = "draining"
            assert await agent_line(port) == b"drain\n"
        async with agent(pipeline, ServerConfig()) as port:
            assert port is None


@given(
    tenant=st.text(
        st.characters(min_codepoint=32, max_codepoint=126, exclude_characters='"\\'),
        min_size=1,
        max_size=31,
    ),
    encode=st.sampled_from([lambda body: json.dumps(body).encode(), msgspec.msgpack.encode]),
)
def test_a_body_names_its_tenant_at_either_end(tenant: str, encode: Callable[[Any], bytes]) -> None:
    rank = {
        name: value for name, value in (EXAMPLES["rank"].body or {}).items() if name != "tenant"
    }
    filler = {"candidates": list(range(2000))}
    assert named_tenant(encode({"tenant": tenant, **rank})) == tenant
    assert named_tenant(encode({"tenant": tenant, **filler})) == tenant
    assert named_tenant(encode({**filler, "tenant": tenant})) == tenant


@given(st.binary(max_size=5000))
def test_no_body_is_too_strange_to_look_for_a_tenant(body: bytes) -> None:
    assert isinstance(named_tenant(body), str)
    assert named_tenant(b"{" + body) == named_tenant(b"{" + body)
