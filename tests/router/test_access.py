"""With a key file nobody gets past the head of a request without a key that allows it; tenants' users are apart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import KINDS, Scope
from npu_gr.core.settings import from_table
from npu_gr.router.access import placed_by
from npu_gr.router.config import RouterConfig
from npu_gr.server.auth.throttle import BURST
from tests.keys import bearer, entry, secret, write_keys
from tests.router.fake import Site, site
from tests.router.test_proxy import raw
from tests.router.test_routes import target

INSTANCES = {"discovery": {"instances": [{"name": "a", "host": "127.0.0.1", "port": 1}]}}


async def asked(s: Site, method: str, path: str, headers: dict[str, str]) -> int:
    async with s.http.request(method, s.url + path, headers={"X-User-Id": "u", **headers}) as answer:
        return answer.status


def head(*lines: bytes, path: bytes = b"/v1/rank") -> bytes:
    return b"\r\n".join((b"POST %s HTTP/1.1" % path, b"Host: a", b"X-User-Id: u", *lines)) + b"\r\n\r\n"


def line(name: str) -> bytes:
    return b"Authorization: Bearer " + secret(name).encode()


# ---- the configuration


@pytest.mark.parametrize("field", ["host", "admin_host"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "router.internal"])
def test_a_public_address_needs_keys_or_the_word(field: str, host: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field}: .*not loopback: set api_keys_file, or allow_unauthenticated"):
        from_table({**INSTANCES, field: host}, RouterConfig)
    from_table({**INSTANCES, field: host, "allow_unauthenticated": True}, RouterConfig)
    from_table({**INSTANCES, field: host, "api_keys_file": "keys.yaml"}, RouterConfig)


async def test_a_key_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ConfigError, match="holds no key"):
        async with site(1, api_keys_file=str(tmp_path / "empty.yaml")):
            pass
    with pytest.raises(ConfigError, match="No such file"):
        async with site(1, api_keys_file=str(tmp_path / "none.yaml")):
            pass


# ---- who may ask


async def test_every_kind_needs_a_key_with_its_scope(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", *(entry(scope.value, scopes=[scope]) for scope in Scope))
    async with site(2, api_keys_file=keys) as s:
        for kind in KINDS.values():
            assert await asked(s, kind.method, target(kind), {}) == 401
            for scope in Scope:
                status = await asked(s, kind.method, target(kind), bearer(scope.value))
                assert (status < 300) if scope is kind.scope else (status == 403)
        for path in ("/v1/models", "/v1/catalog", "/v2", "/v2/models/rank/ready", "/openapi.json"):
            assert await asked(s, "GET", path, {}) == 401
            assert await asked(s, "GET", path, bearer("erase")) == 403
            assert await asked(s, "GET", path, bearer("infer")) == 200
        assert await asked(s, "GET", "/debug/config", {}) == 401
        assert await asked(s, "GET", "/debug/config", bearer("admin")) == 404
        num_seen = sum(len(fake.seen) for fake in s.fakes)
        for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"):
            assert await asked(s, "GET", path, {}) == 200
        s.router.is_draining = True
        assert [await asked(s, "GET", path, {}) for path in ("/readyz", "/v2/health/ready", "/healthz")] == [
            503,
            503,
            200,
        ]
        assert sum(len(fake.seen) for fake in s.fakes) == num_seen, "no instance is asked without a key"
        refusals = s.router.metrics.keys_refused
        assert refusals.value(reason="missing") == len(KINDS) + 6
        assert refusals.value(reason="scope") == len(KINDS) * (len(Scope) - 1) + 5


async def test_the_key_is_passed_on_as_it_came(tmp_path: Path) -> None:
    async with site(2, api_keys_file=write_keys(tmp_path / "keys.yaml", entry("a"))) as s:
        sent = {"Authorization": f"bEARER   {secret('a')}"}
        assert await asked(s, "POST", "/v1/rank", sent) == 200
        assert await asked(s, "DELETE", "/v1/users/u?tenant=t", sent) == 204
        for fake in s.fakes:
            assert {request.headers["Authorization"] for request in fake.seen} == {sent["Authorization"]}
        assert s.fakes[0].seen[-1].raw_path == "/v1/users/u?tenant=t"


async def test_without_a_key_nothing_is_read_or_asked_and_the_connection_is_closed(tmp_path: Path) -> None:
    async with site(1, api_keys_file=write_keys(tmp_path / "keys.yaml", entry("a"))) as s:
        for lines in ((b"Content-Length: 8000000",), (b"Transfer-Encoding: chunked",)):
            answer = await raw(s.port, head(b"X-Request-Id: r", b"Expect: 100-continue", *lines))
            assert answer.startswith(b"HTTP/1.1 401 "), answer[:100]
            assert b"Connection: close\r\n" in answer
            assert b"WWW-Authenticate: Bearer\r\n" in answer
            assert b"X-Request-Id: r\r\n" in answer
        answer = await raw(s.port, head(b"Content-Length: 1") + b"a" + head(line("a"), b"Content-Length: 1") + b"a")
        assert answer.count(b"HTTP/1.1 ") == 1, "what is behind it is not read"
        assert not s.fakes[0].seen
        assert s.router.kept.num_bytes == 0


async def test_who_still_sends_after_the_refusal_can_read_it(tmp_path: Path) -> None:
    async with site(1, api_keys_file=write_keys(tmp_path / "keys.yaml", entry("a"))) as s:
        for lines, status in (((), 401), ((line("a"), b"X-Request-Timeout-Ms: soon"), 400)):
            reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
            writer.write(head(*lines, b"Content-Length: 3000000"))
            for _ in range(30):
                writer.write(b"x" * 100_000)
                await writer.drain()
            assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
            writer.close()


async def test_what_is_refused_keeps_its_turn_and_its_connection(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", entry("a"), entry("reader", scopes=[Scope.OBSERVE]))
    async with site(1, api_keys_file=keys) as s:
        s.fakes[0].delay_s = 0.1
        requests = [
            head(line("a"), b"Content-Length: 1") + b"a",
            head(line("reader"), b"Content-Length: 2") + b"aa",
            head(line("a"), b"Content-Length: 3", b"Connection: close") + b"aaa",
        ]
        answer = await raw(s.port, b"".join(requests))
        assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"403", b"200"]
        assert [len(body) for body in s.fakes[0].bodies] == [1, 3]


async def test_two_keys_in_one_request_are_none(tmp_path: Path) -> None:
    async with site(1, api_keys_file=write_keys(tmp_path / "keys.yaml", entry("a"))) as s:
        answer = await raw(s.port, head(b"Authorization: Bearer no", line("a"), b"Content-Length: 0"))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"authorization: given twice" in answer


@pytest.mark.parametrize(
    "sent", [b"Bearer \xff\xfe\x80" + b"x" * 30, b"Basic " + b"x" * 30, b"Bearer", b"Bearer x", b""]
)
async def test_what_is_no_key_is_401(tmp_path: Path, sent: bytes) -> None:
    async with site(1, api_keys_file=write_keys(tmp_path / "keys.yaml", entry("a"))) as s:
        assert (await raw(s.port, head(b"Authorization: " + sent))).startswith(b"HTTP/1.1 401 ")


async def test_a_key_over_its_rate_gets_429_and_alerts_nobody(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", entry("slow", rate_per_s=1.0), entry("a"))
    async with site(1, api_keys_file=keys) as s:
        assert [await asked(s, "POST", "/v1/signal", bearer("slow")) for _ in range(3)] == [202, 429, 429]
        assert await asked(s, "POST", "/v1/signal", bearer("a")) == 202
        assert await asked(s, "GET", "/healthz", {}) == 200
        assert s.router.metrics.keys_refused.value(reason="rate") == 2
        assert s.router.metrics.refused.value() == 0
        assert len(s.fakes[0].seen) == 2


# ---- wrong keys


async def test_wrong_keys_wait_and_right_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_gr.server.auth.throttle.HOLD_S", 30.0)
    async with site(1, api_keys_file=write_keys(tmp_path / "keys.yaml", entry("a"))) as s:
        for _ in range(int(BURST)):
            assert (await raw(s.port, head(line("wrong"), b"Content-Length: 0"))).startswith(b"HTTP/1.1 401 ")
        held = [await asyncio.open_connection("127.0.0.1", s.port) for _ in range(3)]
        for _, writer in held:  # its time budget is not what ends it
            writer.write(head(line("wrong"), b"X-Request-Timeout-Ms: 10", b"Content-Length: 9") + b"abc")
        await s.until(lambda: s.router.metrics.keys_refused.value(reason="unknown") == BURST + 3)
        assert await asked(s, "POST", "/v1/rank", bearer("a")) == 200
        await asyncio.sleep(0.05)
        assert not [reader for reader, _ in held if reader._buffer]  # type: ignore[attr-defined]
        for _, writer in held:
            writer.close()
        await s.until(lambda: len(s.router.connections) <= 1)


async def test_a_wrong_key_is_told_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_gr.server.auth.throttle.HOLD_S", 0.05)
    async with site(1, api_keys_file=write_keys(tmp_path / "keys.yaml", entry("a"))) as s:
        for _ in range(int(BURST) + 3):
            request = head(line("wrong"), b"X-Request-Timeout-Ms: 10", b"Content-Length: 9") + b"abc"
            assert (await raw(s.port, request)).startswith(b"HTTP/1.1 401 ")


# ---- the file


async def test_a_revoked_key_is_refused_on_an_open_connection_and_a_broken_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    keys = write_keys(tmp_path / "keys.yaml", entry("old"), entry("new"))
    async with site(1, api_keys_file=keys) as s:
        assert await asked(s, "POST", "/v1/rank", bearer("old")) == 200
        write_keys(tmp_path / "keys.yaml", entry("new"))
        await s.until(lambda: len(s.router.access.ring) == 1)
        assert await asked(s, "POST", "/v1/rank", bearer("old")) == 401
        path.write_text("keys: [")
        await s.until(lambda: s.router.access.ring.is_stale)
        async with s.http.get(f"{s.admin}/metrics", headers=bearer("new")) as answer:
            assert "npu_gr_router_api_keys_file_stale 1.0" in await answer.text()
        path.write_text("")
        await s.until(lambda: not len(s.router.access.ring))
        assert await asked(s, "POST", "/v1/rank", bearer("new")) == 401


# ---- whose user it is


async def placed(s: Site, user: str, who: str, **headers: str) -> str:
    """The instance of a rank."""
    status, answer, _ = await s.post("rank", user, **bearer(who), **headers)
    assert status == 200
    return str(answer["instance"])


async def test_tenants_have_their_own_users(tmp_path: Path) -> None:
    keys = write_keys(
        tmp_path / "keys.yaml",
        entry("shop", tenant="shop"),
        entry("shop-2", tenant="shop"),
        entry("bank", tenant="bank"),
        entry("any"),
    )
    async with site(3, api_keys_file=keys) as s:
        users = [f"u{i}" for i in range(30)]
        shop = [await placed(s, user, "shop") for user in users]
        assert shop == [await placed(s, user, "shop-2") for user in users]
        assert shop == [await placed(s, user, "shop", X_Tenant_Id="shop") for user in users], "it may name its own"
        assert shop == [await placed(s, user, "any", X_Tenant_Id="shop") for user in users]
        assert shop != [await placed(s, user, "bank") for user in users]
        assert [await placed(s, user, "any") for user in users] == [s.owner(user).name for user in users]
        status, answer, _ = await s.post("rank", "u", X_Tenant_Id="shop", **bearer("bank"))
        assert (status, answer["title"]) == (403, "forbidden")
        assert s.router.metrics.keys_refused.value(reason="tenant") == 1
        async with s.http.get(f"{s.admin}/owner?user=u7&tenant=shop", headers=bearer("any")) as told:
            assert (await told.json())["order"][0] == shop[7]


async def test_a_signal_of_one_tenant_moves_no_rank_of_another(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", entry("shop", tenant="shop"), entry("bank", tenant="bank"))
    async with site(3, api_keys_file=keys) as s:
        ring = s.router.members.ring
        of_shop = {f"u{i}": list(ring.walk(placed_by(b"shop", b"u%d" % i))) for i in range(100)}
        of_bank = {f"u{i}": ring.owner(placed_by(b"bank", b"u%d" % i)) for i in range(100)}
        user = next(user for user, order in of_shop.items() if of_bank[user] == order[2])
        home, successor, bank = of_shop[user]
        async with s.http.post(f"{s.admin}/instances/{home}/drain", headers=bearer("shop")):
            pass
        status, answer, _ = await s.post("signal", user, **bearer("shop"))
        assert (status, answer["instance"]) == (202, successor)
        s.router.members.instances[home].is_drained = False
        assert await placed(s, user, "shop") == successor, "the rank follows its signal"
        assert await placed(s, user, "bank") == bank


async def test_an_erasure_forgets_the_tenants_user_and_asks_for_no_other_tenant(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.yaml", entry("shop", tenant="shop"), entry("any"))
    async with site(2, api_keys_file=keys) as s:
        known = s.router.members._signalled
        for path, who in (
            ("a%2Fb", "shop"),
            ("a%2fb?tenant=shop", "shop"),
            ("a/b?x=1&%74enant=sh%6Fp&tenant=no", "any"),
        ):
            await s.post("signal", "a/b", **bearer("shop"))
            await s.post("signal", "a/b", **bearer("any"))
            assert set(known) == {b"shop\0a/b", b"a/b"}
            assert await asked(s, "DELETE", f"/v1/users/{path}", bearer(who)) == 204
            assert set(known) == {b"a/b"}
        num_seen = sum(len(fake.seen) for fake in s.fakes)
        assert await asked(s, "DELETE", "/v1/users/a?tenant=bank", bearer("shop")) == 403
        assert sum(len(fake.seen) for fake in s.fakes) == num_seen


async def test_names_are_bounded() -> None:
    async with site(1) as s:
        for headers in ({"X-User-Id": "u" * 513}, {"X-User-Id": "u", "X-Tenant-Id": "t" * 513}):
            assert await asked(s, "POST", "/v1/signal", headers) == 400
        assert await asked(s, "POST", "/v1/signal", {"X-User-Id": "u" * 512}) == 202
