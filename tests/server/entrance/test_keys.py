"""A key is checked as soon as the head of a request is here, once, and before anything else costs anything."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import msgspec
import pytest

from npu_gr.core.kinds import Scope
from npu_gr.server.auth import throttle
from npu_gr.server.auth.keys import hash_of
from npu_gr.server.auth.throttle import BURST
from tests.keys import entry, secret, write_keys
from tests.server.entrance.test_connection import RANK, Raw, Site, site
from tests.server.examples import EXAMPLES
from tests.serving import until

KEY = secret("all").encode()
RIGHT = b"Authorization: Bearer " + KEY + b"\r\n"
BODY = json.dumps({name: value for name, value in (EXAMPLES["rank"].body or {}).items() if name != "tenant"}).encode()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)


def rank(header: bytes = RIGHT) -> bytes:
    return RANK + header + LENGTH + BODY


async def status_of(at: Site, sent: bytes) -> int:
    raw = await at.connect()
    raw.send(sent)
    return (await raw.answer())[0]


async def closed(raw: Raw, status: int) -> bytes:
    got, headers, body = await raw.answer()
    assert got == status, body
    assert headers["connection"] == "close"
    assert await raw.is_closed()
    return body


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (RIGHT, 200),
        (b"authorization: bearer " + KEY + b"\r\n", 200),
        (b"AUTHORIZATION:\tBEARER " + KEY + b"\r\n", 200),
        (b"Authorization: Bearer   " + KEY + b"  \r\n", 200),
        (b"", 401),
        (b"Authorization:\r\n", 401),
        (b"Authorization: Bearer\r\n", 401),
        (b"Authorization: Bearer \r\n", 401),
        (b"Authorization: " + KEY + b"\r\n", 401),
        (b"Authorization: Basic " + KEY + b"\r\n", 401),
        (b"Authorization: Bearer\t" + KEY + b"\r\n", 401),
        (b"Authorization: Bearer " + KEY[:-1] + b"\r\n", 401),
        (b"Authorization: Bearer " + KEY + b"x\r\n", 401),
        (b"Authorization: Bearer " + KEY.upper() + b"\r\n", 401),
        (b"Authorization: Bearer " + KEY + b"," + KEY + b"\r\n", 401),
        (b"Authorization: Bearer wrong, Bearer " + KEY + b"\r\n", 401),
        (b"Authorization: Bearer # ours\r\n", 401),
        (b"Authorization: Bearer " + b"k" * 7000 + b"\r\n", 401),
        (b"Authorization: Bearer " + KEY + b"\0\r\n", 401),
        (b"Authorization: Bearer \xff\xfe" + KEY + b"\r\n", 401),
        (b"Authorization : Bearer " + KEY + b"\r\n", 401),
        (b"Authorization:\r\n Bearer " + KEY + b"\r\n", 401),
        (b"X: y\nAuthorization: Bearer " + KEY + b"\r\n", 401),
        (b"X-Authorization: Bearer " + KEY + b"\r\n", 401),
        (RIGHT + RIGHT, 400),
        (RIGHT + b"Authorization: Bearer wrong\r\n", 400),
        (b"Authorization: Bearer wrong\r\nauthorization: Bearer " + KEY + b"\r\n", 400),
    ],
)
async def test_a_header_is_a_key_or_none(tmp_path: Path, header: bytes, status: int) -> None:
    async with site(api_keys_file=write_keys(tmp_path / "keys")) as at:
        assert await status_of(at, rank(header)) == status
        assert len(at.service.served) == (status == 200)


async def test_a_key_of_one_character_is_none_though_the_file_has_it(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", entry(), msgspec.structs.replace(entry("one"), sha256=hash_of(b"k")))
    async with site(api_keys_file=path) as at:
        assert await status_of(at, rank(b"Authorization: Bearer k\r\n")) == 401
        assert at.count("api_keys_refused_total", reason="short") == 1


@pytest.mark.parametrize("wants_continue", [b"", b"Expect: 100-continue\r\n"])
async def test_whoever_has_no_key_is_not_asked_for_a_body(tmp_path: Path, wants_continue: bytes) -> None:
    async with site(api_keys_file=write_keys(tmp_path / "keys")) as at:
        raw = await at.connect()
        raw.send(RANK + wants_continue + b"Content-Length: 8000000\r\n\r\n")
        body = json.loads(await closed(raw, 401))
        assert body["detail"] == "Authorization: needs `Bearer` and a valid API key"
        assert at.entrance.receiving_bytes == 0
        good = await at.connect()
        good.send(RANK + RIGHT + wants_continue + LENGTH)
        if wants_continue:
            assert (await good.answer())[0] == 100
        good.send(BODY)
        assert (await good.answer())[0] == 200
        assert at.count("requests_total", route="/v1/rank", code="401") == 1
        assert at.count("admissions_total", kind="rank", verdict="invalid") == 1
        assert at.count("slo_requests_total", kind="rank", result="failed") == 0
        assert at.count("api_keys_refused_total", reason="missing") == 1


async def test_a_401_says_how_to_do_it(tmp_path: Path) -> None:
    async with site(api_keys_file=write_keys(tmp_path / "keys")) as at:
        raw = await at.connect()
        raw.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        _, headers, body = await raw.answer()
        assert headers["www-authenticate"] == "Bearer"
        assert headers["content-type"] == "application/problem+json"
        assert json.loads(body)["title"] == "unauthorized"
        assert at.count("requests_total", route="none", code="401") == 1


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /healthz", 200),
        (b"HEAD /healthz", 200),
        (b"GET /readyz?x=1", 200),
        (b"GET /v2/health/live", 200),
        (b"GET /v2/health/ready", 200),
        (b"GET /", 200),
        (b"POST /healthz", 401),
        (b"GET //healthz", 401),
        (b"GET /%68ealthz", 401),
        (b"GET /healthz/", 401),
        (b"GET /healthz/../metrics", 401),
        (b"GET /healthz%2f..%2fmetrics", 401),
        (b"GET http://x/healthz", 401),
        (b"GET /metrics", 401),
        (b"GET /nowhere", 401),
        (b"GET /v1/models", 401),
        (b"GET /v2", 401),
        (b"GET /openapi.json", 401),
        (b"get /healthz", 401),
        (b"DELETE /v1/users/u", 401),
        (b"POST /v1/models/reload", 401),
    ],
)
async def test_only_health_and_the_empty_page_are_open(tmp_path: Path, line: bytes, status: int) -> None:
    async with site(api_keys_file=write_keys(tmp_path / "keys")) as at:
        raw = await at.connect()
        raw.send(line + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await raw.reader.readline()).split()[1] == str(status).encode()


async def test_a_key_without_the_scope_is_told_so_before_it_sends_a_body(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", entry("feed", scopes=[Scope.INGEST]))
    header = b"Authorization: Bearer " + secret("feed").encode() + b"\r\n"
    async with site(api_keys_file=path) as at:
        raw = await at.connect()
        raw.send(RANK + header + b"Expect: 100-continue\r\n" + LENGTH)
        body = json.loads(await closed(raw, 403))
        assert body["detail"] == "the key 'feed' has the scopes ingest; this needs infer"
        assert at.count("api_keys_refused_total", reason="scope") == 1
        assert not at.service.served


async def test_a_rate_keeps_the_connection_and_burns_no_budget(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", entry(rate_per_s=2.0), entry("other"))
    async with site(api_keys_file=path) as at:
        ring = at.entrance.keys
        now_at = time.monotonic()
        ring._clock = lambda: now_at
        raw = await at.connect()
        answers = []
        for _ in range(4):
            raw.send(rank())
            answers.append(await raw.answer())
        assert [answer[0] for answer in answers] == [200, 200, 429, 429]
        _, headers, body = answers[-1]
        assert headers["retry-after"] == "1"
        assert "retry-after-ms" not in headers
        assert json.loads(body)["detail"] == "the key 'all' may send 2 requests a second"
        assert await status_of(at, rank(b"Authorization: Bearer " + secret("other").encode() + b"\r\n")) == 200
        now_at += 0.5
        raw.send(rank())
        assert (await raw.answer())[0] == 200
        raw.send(b"DELETE /v1/users/u HTTP/1.1\r\nHost: x\r\n" + RIGHT + b"\r\n")
        assert (await raw.answer())[0] == 429  # the rate is of all requests
        assert at.count("slo_requests_total", kind="rank", result="failed") == 0
        assert at.count("admissions_total", kind="rank", verdict="overloaded") == 0
        assert at.count("refusals_total", kind="rank", reason="rate") == 2
        assert at.count("api_keys_refused_total", reason="rate") == 3


async def test_a_rate_is_spent_once_by_a_request(tmp_path: Path) -> None:
    """As many requests as the rate allows pass, of every way through the server."""
    path = write_keys(tmp_path / "keys", entry(rate_per_s=3.0))
    async with site(api_keys_file=path) as at:
        at.entrance.keys._clock = lambda: 1000.0
        raw = await at.connect()
        for sent in (
            rank(),
            rank().replace(b"/v1/rank", b"/v1/%72ank"),
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + RIGHT + b"\r\n",
        ):
            raw.send(sent)
            assert (await raw.answer())[0] == 200
            raw.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")  # who needs no key spends nobody's rate
            assert (await raw.answer())[0] == 200
        raw.send(rank())
        assert (await raw.answer())[0] == 429


async def test_callers_over_their_rate_who_retry_at_once_are_not_read_for_a_moment(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", entry(rate_per_s=1.0))
    async with site(api_keys_file=path) as at:
        at.entrance.keys._clock = lambda: 1000.0
        raw = await at.connect()
        while not len(at.entrance.rate_pacer):
            raw.send(rank() * 50)
            await asyncio.sleep(0.005)
        at.entrance.pacer.release(100)  # there is room at the door, which does not help them
        assert len(at.entrance.rate_pacer) == 1
        assert at.count("connections_paused") == 1
        raw.writer.transport.abort()
        await until(lambda: len(at.entrance.rate_pacer) == 0)


async def test_each_request_of_a_connection_has_its_own_key(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", entry("a", tenant="a"), entry("b", tenant="b"))
    async with site(api_keys_file=path) as at:
        raw = await at.connect()
        raw.send(b"".join(rank(b"Authorization: Bearer " + secret(name).encode() + b"\r\n") for name in "abab"))
        for _ in range(4):
            assert (await raw.answer())[0] == 200
        assert [request.user.tenant for _, request, _ in at.service.served] == list("abab")
        raw.send(rank(b""))  # the key of the request before is not this one's
        await closed(raw, 401)


async def test_a_revoked_key_stops_working_on_a_connection_that_is_open(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", entry(), entry("other"))
    async with site(api_keys_file=path) as at:
        raw = await at.connect()
        raw.send(rank())
        assert (await raw.answer())[0] == 200
        write_keys(tmp_path / "keys", entry("other"))
        await until(lambda: len(at.entrance.keys) == 1)  # it is followed
        raw.send(rank())
        await closed(raw, 401)
        (tmp_path / "keys").write_text("")
        await until(lambda: len(at.entrance.keys) == 0)
        assert await status_of(at, rank(b"Authorization: Bearer " + secret("other").encode() + b"\r\n")) == 401
        assert at.count("api_keys") == 0
        (tmp_path / "keys").write_text("keys: [")
        await until(lambda: at.count("api_keys_file_stale") == 1)


async def wrong(at: Site, num: int) -> list[Raw]:
    raws = [await at.connect() for _ in range(num)]
    for raw in raws:
        raw.send(rank(b"Authorization: Bearer " + b"w" * 40 + b"\r\n"))
    await until(lambda: at.count("api_keys_refused_total", reason="unknown") == num)
    return raws


async def test_many_wrong_keys_wait_for_their_401_and_right_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "RATE_PER_S", 1e-9)
    monkeypatch.setattr(throttle, "HOLD_S", 3600.0)
    num = int(BURST) + 10
    async with site(api_keys_file=write_keys(tmp_path / "keys")) as at:
        raws = await wrong(at, num)
        for raw in raws[:-10]:
            await closed(raw, 401)
        assert at.count("connections", state="held") == 10
        at.entrance._sweep(time.monotonic() + 1000.0)  # no other limit of time ends them
        assert at.count("connections", state="held") == 10
        raws[-1].send(b"x" * 100_000)  # what still comes is not kept
        assert await status_of(at, rank()) == 200
        assert not any(connection._incoming.data for connection in at.entrance._connections)  # type: ignore[attr-defined]


async def test_a_401_that_is_held_back_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "BURST", 1.0)
    monkeypatch.setattr(throttle, "RATE_PER_S", 1e-9)
    monkeypatch.setattr(throttle, "HOLD_S", 0.05)
    async with site(api_keys_file=write_keys(tmp_path / "keys")) as at:
        for raw in await wrong(at, 4):
            await closed(raw, 401)
        await until(lambda: at.count("connections", state="held") == 0)


async def test_whoever_waits_for_a_401_keeps_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "BURST", 1.0)
    monkeypatch.setattr(throttle, "RATE_PER_S", 1e-9)
    monkeypatch.setattr(throttle, "HOLD_S", 3600.0)
    async with site(api_keys_file=write_keys(tmp_path / "keys")) as at:
        at.entrance.listeners[0].max_connections = 6
        silent, idle = await at.connect(), await at.connect()
        idle.send(rank())
        assert (await idle.answer())[0] == 200
        raws = await wrong(at, 4)
        assert at.count("connections", state="held") == 3
        for _ in range(3):
            assert await status_of(at, rank()) == 200
        for raw in (idle, silent):  # held ones made room, though these are older, and one was never served
            raw.send(rank())
            assert (await raw.answer())[0] == 200
        assert await raws[1].is_closed()


async def test_shutdown_waits_for_nobody_with_a_wrong_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "BURST", 1.0)
    monkeypatch.setattr(throttle, "RATE_PER_S", 1e-9)
    monkeypatch.setattr(throttle, "HOLD_S", 3600.0)
    async with site(api_keys_file=write_keys(tmp_path / "keys")) as at:
        raws = await wrong(at, 3)
        async with asyncio.timeout(4):  # shutdown_timeout of the server under test is 5 s
            await at.client.server.close()
        for raw in raws:
            await closed(raw, 401)
