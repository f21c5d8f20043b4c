"""The operators' address: no page of another site is let in, and with a key file each route needs its scope."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from npu_gr.core.kinds import Scope
from npu_gr.core.settings import from_table
from npu_gr.router.admin import build_admin_app
from npu_gr.router.admin_runner import MAX_CONNECTIONS
from npu_gr.router.config import RouterConfig
from npu_gr.router.metrics import RouterMetrics
from npu_gr.router.router import Router
from npu_gr.server.auth.rules import ROUTER_ADMIN
from npu_gr.server.auth.throttle import BURST
from tests.keys import bearer, entry, write_keys
from tests.router.fake import Site, site
from tests.router.test_access import INSTANCES

BODIES = {"/user": b'{"user_id": "u"}'}  # of routes that need one
FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Host": "evil.example"},
]


async def ask(s: Site, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> int:
    given = {"Content-Type": "", **headers} if body is None else headers
    given = {name: value for name, value in given.items() if value}
    path = path.replace("{name}", "i0") + ("?seconds=1" if path == "/debug/profile" else "")
    path += "?user=u" if path == "/owner" else ""
    async with s.http.request(method, s.admin + path, headers=given, data=body) as answer:
        await answer.read()
        return answer.status


async def test_every_route_has_a_rule_and_every_rule_a_route() -> None:
    router = Router(from_table(INSTANCES, RouterConfig), RouterMetrics(CollectorRegistry()))
    routes = {
        (route.method, route.resource.canonical)
        for route in build_admin_app(router).router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert routes == set(ROUTER_ADMIN)
    for (method, path), scope in ROUTER_ADMIN.items():
        is_secret = path == "/config" or (path.startswith("/debug") and path != "/debug/runbooks")
        assert (scope is Scope.ADMIN) == (method != "GET" or is_secret)
        assert scope is not None or path in ("/", "/healthz")


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
async def test_a_page_of_another_site_reads_and_changes_nothing(headers: dict[str, str]) -> None:
    async with site(1) as s:
        for method, path in ROUTER_ADMIN:
            assert await ask(s, method, path, headers) == (200 if path == "/healthz" else 403), path
        assert not s.router.members.instances["i0"].is_drained
        assert (
            await ask(s, "POST", "/instances/{name}/drain", {"Origin": s.admin, "Sec-Fetch-Site": "same-origin"}) == 200
        )
        assert s.router.members.instances["i0"].is_drained


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_must_be_json(media: str) -> None:
    async with site(1) as s:
        assert await ask(s, "POST", "/instances/{name}/drain", {"Content-Type": media}, b"{}") == 415
        assert not s.router.members.instances["i0"].is_drained
        assert await ask(s, "POST", "/instances/{name}/drain", {"Content-Type": "application/json"}, b"{}") == 200


async def test_each_route_needs_its_scope(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", *(entry(scope.value, scopes=[scope]) for scope in Scope))
    async with site(1, api_keys_file=keys) as s:
        for (method, path), scope in ROUTER_ADMIN.items():
            assert await ask(s, method, path, {}) == (200 if scope is None else 401), path
            if scope is not None:
                for other in set(Scope) - {scope}:
                    assert await ask(s, method, path, bearer(other.value)) == 403, path
                headers = bearer(scope.value)
                if path in BODIES:
                    headers |= {"Content-Type": "application/json"}
                assert await ask(s, method, path, headers, BODIES.get(path)) == 200, path
        assert await ask(s, "GET", "/nowhere", {}) == 401
        assert await ask(s, "GET", "/nowhere", bearer("infer")) == 404
        assert await ask(s, "HEAD", "/config", bearer("observe")) == 403
        assert await ask(s, "POST", "/instances/nobody/drain", bearer("admin")) == 404
        assert s.router.metrics.keys_refused.value(reason="missing") == 13


async def test_wrong_keys_wait_here_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_gr.server.auth.throttle.HOLD_S", 3.0)
    monkeypatch.setattr(
        "npu_gr.server.auth.throttle.RATE_PER_S", 1e-9
    )  # none is earned meanwhile, on a busy machine either
    async with site(1, api_keys_file=write_keys(tmp_path / "keys.yaml", entry("a", scopes=[Scope.OBSERVE]))) as s:
        for _ in range(int(BURST)):
            assert await ask(s, "GET", "/status", bearer("wrong")) == 401
        held = asyncio.create_task(ask(s, "GET", "/status", bearer("wrong")))
        await s.until(lambda: s.router.metrics.keys_refused.value(reason="unknown") == BURST + 1)
        assert await ask(s, "GET", "/status", bearer("a")) == 200
        assert not held.done()
        held.cancel()


async def test_nothing_that_is_sent_is_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(1) as s:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        bomb = packer.compress(b" " * (1 << 24)) + packer.flush()
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        inflated: list[int] = []
        monkeypatch.setattr("aiohttp.http_parser.DeflateBuffer.feed_data", lambda *_: inflated.append(1))
        assert await ask(s, "POST", "/instances/{name}/drain", headers, bomb) == 200
        assert inflated == []


async def connected(s: Site, num: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections with half a head each."""
    found = [await asyncio.open_connection("127.0.0.1", int(s.admin.rpartition(":")[2])) for _ in range(num)]
    for _, writer in found:
        writer.write(b"GET /status HT")
        await writer.drain()
    return found


async def test_operators_are_answered_while_others_hold_connections() -> None:
    async with site(1) as s:
        held = await connected(s, 3 * MAX_CONNECTIONS)
        assert await ask(s, "GET", "/status", {}) == 200
        ended = [reader for reader, _ in held if reader.at_eof()]
        assert ended == [reader for reader, _ in held[: len(ended)]], "the oldest first"
        assert len(ended) > 2 * MAX_CONNECTIONS - 2
        for _, writer in held:
            writer.close()


async def test_who_sends_no_whole_head_is_ended() -> None:
    async with site(1, idle_s=0.1) as s:
        ((reader, writer),) = await connected(s, 1)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
