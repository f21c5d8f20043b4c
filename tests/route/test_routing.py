"""The real HAProxy routes requests to fake instances by the file that the router writes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
import yaml
from yarl import URL

from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import Scope
from npu_gr.route import haproxy
from npu_gr.route.process import TEACHES_S
from npu_gr.server.auth.keys import hash_of
from npu_gr.server.auth.rules import rules
from tests.route.fake import Fake, Site, row, site, until
from tests.server.test_paths import SPELLINGS, V1

KEY, OTHER_KEY = "k" * 32, "o" * 32


async def test_a_user_stays_with_an_instance_and_all_get_users() -> None:
    async with site(3) as s:
        homes = {f"u{i}": (await s.home(f"u{i}")).name for i in range(40)}
        assert set(homes.values()) == {"i0", "i1", "i2"}
        for user, home in homes.items():
            status, body, headers = await s.post("rank", user)
            assert (status, body["instance"], body["hit"]) == (200, home, True)
            assert headers["X-NpuGr-Instance"] == home
            assert "X-NpuGr-Placement" not in headers


async def test_a_body_or_a_path_names_the_user_where_no_header_does() -> None:
    async with site(3) as s:
        for user in ("u1", "u2", "a b/c", "a+b%"):
            home = await s.home(quote(user))
            looked_up = URL(f"{s.url}/v1/users/{quote(user, '')}", encoded=True)
            async with s.http.get(looked_up) as found:
                assert found.headers["X-NpuGr-Instance"] == home.name
            async with s.http.post(
                f"{s.url}/v1/rank", json={"x": [{"user_id": "no"}], "user_id": user}
            ) as answer:
                assert (await answer.json())["instance"] == home.name
        async with s.http.post(f"{s.url}/v1/rank", data=b"{}") as answer:
            assert answer.status == 400
        async with s.http.post(
            f"{s.url}/v1/rank", data=b"{}", headers={"X-NpuGr-Service": "normal"}
        ) as answer:
            assert answer.status == 200  # without a prefix, by load


async def test_a_quoted_name_in_the_header_is_the_name_in_the_body() -> None:
    async with site(3) as s:
        home = await s.home("a%20b")
        async with s.http.post(f"{s.url}/v1/rank", json={"user_id": "a b"}) as answer:
            assert (await answer.json())["instance"] == home.name


async def test_a_rank_follows_its_signal_when_an_instance_joins() -> None:
    """L1. Without the stick table, or its hand-over at a reload, the rank goes to the new owner."""
    async with site(2, relay={"t_life_s": 60.0}) as s:
        await asyncio.sleep(TEACHES_S)
        before = {f"u{i}": (await s.home(f"u{i}")).name for i in range(40)}
        new = Fake("i9")
        await new.start()
        try:
            s.fakes.append(new)
            s.table["discovery"]["instances"] = s.rows()
            await s.route.look()
            await s.until_up(new)
            for user, home in before.items():
                status, body, _ = await s.post("rank", user)
                assert (status, body["instance"], body["hit"]) == (200, home, True)
            after = {user: (await s.home(user)).name for user in before}
            assert {after[user] for user in before if after[user] != before[user]} == {"i9"}
            for user, home in after.items():  # and the newest signal counts
                assert (await s.post("rank", user))[1]["instance"] == home
        finally:
            await new.stop()


async def test_a_signal_that_an_instance_has_begun_is_never_sent_twice() -> None:
    """L2. It breaks off, is silent or says 503: each time one instance saw the signal, once."""
    async with site(3, health={"failures": 1000}) as s:
        for path in ("signal", "events"):
            for name, value in (("cuts", True), ("status", 503), ("status", 500)):
                for fake in s.fakes:
                    fake.seen.clear()
                    setattr(fake, name, value)
                # what HAProxy makes of a connection it has kept
                with suppress(aiohttp.ServerDisconnectedError):
                    assert (await s.post(path))[0] >= 500
                assert sum(fake.asked(f"/v1/{path}") for fake in s.fakes) == 1
                for fake in s.fakes:
                    fake.cuts, fake.status = False, 200


async def test_a_rank_that_an_instance_fails_is_answered_by_another() -> None:
    """L3. For what breaks off, for 503, for silence and where nobody listens.

    A rejection for load is passed on.
    """
    async with site(3, objective_s=0.05, health={"failures": 1000}) as s:
        home = await s.home("u")
        for name, value in (("cuts", True), ("status", 503), ("delay_s", 3.0)):
            setattr(home, name, value)
            status, body, _ = await s.post("rank")
            assert (status, body["instance"] != home.name) == (200, True)
            home.cuts, home.status, home.delay_s = False, 200, 0.0
        home.status = 429
        assert (await s.post("rank"))[0] == 429
        home.status = 200
        await home.stop()
        assert (await s.post("rank"))[0] == 200
        assert (await s.post("signal"))[0] == 202  # there was no connection, so nobody had begun it


async def test_a_rank_that_waits_for_a_frozen_instance_is_answered_by_another() -> None:
    """One holds the only place there, until its answer is late.

    The others wait out the queue, and none is rejected.
    """
    inflight = {"instance_inflight": 1}
    async with site(3, objective_s=0.2, health={"failures": 1000}, limits=inflight) as s:
        users = [user for user in (f"u{i}" for i in range(60)) if (await s.home(user)).name == "i0"]
        frozen = s.fakes[0]
        frozen.delay_s = 60.0
        answers = await asyncio.gather(*(s.post("rank", user) for user in users[:8]))
        assert [status for status, _, _ in answers] == [200] * 8
        assert "i0" not in {headers["X-NpuGr-Instance"] for _, _, headers in answers}
        waits = asyncio.create_task(s.post("rank", users[0]))
        await until_inside(frozen)
        # one that has waited is not sent elsewhere
        assert (await s.post("signal", users[1]))[0] == 429
        assert (await waits)[0] == 200


async def test_a_rank_that_waits_for_an_instance_just_come_back_is_not_rejected() -> None:
    """In slow start it takes fewer than it says, and its queue is left for any with room."""
    inflight = {"instance_inflight": 2}
    health, relay = {"slow_start_s": 60.0, "failures": 1000}, {"t_life_s": 60.0}
    async with site(3, objective_s=0.2, health=health, limits=inflight, relay=relay) as s:
        users = [user for user in (f"u{i}" for i in range(60)) if (await s.home(user)).name == "i0"]
        back = s.fakes[0]
        for status, state in ((503, "DOWN"), (200, "UP")):
            back.ready_status = status

            async def is_seen(state: str = state) -> bool:
                return (await s.statuses())["i0"].startswith(state)

            await until(is_seen)
        back.delay_s = 0.5
        assert 0 < int((await s.statuses(column="throttle"))["i0"]) < 50  # room for one
        answers = await asyncio.gather(*(s.post("rank", user) for user in users[:8]))
        assert [status for status, _, _ in answers] == [200] * 8


async def until_inside(fake: Fake) -> None:
    async def is_inside() -> bool:
        return fake.num_inside > 0

    await until(is_inside)


async def test_the_queue_is_short_and_its_end_is_429_with_a_time_to_retry() -> None:
    """L4. Never 503, and an instance never has more inside than it said."""
    async with site(1, has_agent=True, objective_s=0.1) as s:
        (only,) = s.fakes
        only.agent, only.delay_s = "up maxconn:2", 0.3
        await asyncio.sleep(0.5)  # until the agent has been asked
        only.most_inside = 0
        answers = await asyncio.gather(*(s.post("rank", f"u{i}") for i in range(20)))
        statuses = [status for status, _, _ in answers]
        assert set(statuses) == {200, 429}
        assert only.most_inside == 2
        rejected = next(headers for status, _, headers in answers if status == 429)
        assert rejected["Retry-After"] == "1"
        assert 20 <= int(rejected["Retry-After-Ms"]) < 100
        assert rejected["Content-Type"] == "application/problem+json"


async def test_without_an_instance_the_answer_is_503_and_the_router_is_not_ready() -> None:
    async with site(1) as s:
        s.fakes[0].ready_status = 503

        async def is_down() -> bool:
            async with s.http.get(f"{s.url}/readyz") as answer:
                return answer.status == 503

        await until(is_down)
        status, _, headers = await s.post("rank")
        assert (status, headers["Retry-After"]) == (503, "1")
        async with s.http.head(f"{s.url}/healthz") as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        async with s.http.get(f"{s.url}/healthz") as answer:
            assert answer.status == 200


async def test_what_is_more_important_leaves_the_queue_first() -> None:
    async with site(1, has_agent=True, objective_s=10.0) as s:
        (only,) = s.fakes
        only.agent, only.delay_s = "up maxconn:1", 0.05
        await asyncio.sleep(0.5)
        order: list[str] = []

        async def ask(path: str) -> None:
            await s.post(path, f"u{len(order)}")
            order.append(path)

        first = asyncio.create_task(ask("rank"))
        await asyncio.sleep(0.01)
        rest = [asyncio.create_task(ask("signal")) for _ in range(5)]
        await asyncio.sleep(0.01)
        rest += [asyncio.create_task(ask("rank")) for _ in range(5)]
        await asyncio.gather(first, *rest)
        assert order.index("signal") >= 4
        assert order[-1] == "signal"


async def test_an_instance_that_drains_gets_no_new_users_and_keeps_the_ranks_of_its_signals() -> (
    None
):
    async with site(2, has_agent=True) as s:
        user = await s.user_of(s.fakes[0])
        s.fakes[0].agent = "drain"

        async def drains() -> bool:
            return "DRAIN" in (await s.statuses())["i0"]

        await until(drains)
        status, body, _ = await s.post("rank", user)
        assert (status, body["instance"]) == (200, "i0")
        assert (await s.home(user)).name == "i1"
        assert (await s.post("rank", user))[1]["instance"] == "i1"


async def test_an_erasure_reaches_every_instance_or_says_which_it_did_not() -> None:
    async with site(3) as s:
        async with s.http.delete(
            f"{s.url}/v1/users/a%2Fb", headers={"Authorization": "Bearer x"}
        ) as answer:
            assert answer.status == 204
        for fake in s.fakes:
            (seen,) = fake.seen
            assert (seen.method, seen.raw_path) == ("DELETE", "/v1/users/a%2Fb")
            assert seen.headers["Authorization"] == "Bearer x"
        s.fakes[1].status = 500
        async with s.http.delete(f"{s.url}/v1/users/u") as answer:
            assert answer.status == 503
            assert "i1 (500)" in (await answer.json())["detail"]
        s.fakes[1].status = 200
        await s.fakes[2].stop()
        async with s.http.delete(f"{s.url}/v1/users/u") as answer:
            assert (answer.status, (await answer.json())["unreachable"]) == (200, ["i2"])


async def test_a_change_of_the_catalogue_reaches_every_instance_by_the_admin_address() -> None:
    async with site(3) as s:
        async with s.http.post(f"{s.admin}/v1/catalog/items", data=b"items") as answer:
            assert answer.status == 200
            assert sorted(await answer.json()) == ["i0", "i1", "i2"]
        assert all(fake.bodies == [b"items"] for fake in s.fakes)
        async with s.http.post(f"{s.url}/v1/catalog/items", data=b"items") as answer:
            assert answer.status == 404  # not on the public address
        # what each serves, its delta included
        async with s.http.get(f"{s.admin}/v1/models") as answer:
            assert {name: one["instance"] for name, one in (await answer.json()).items()} == {
                name: name for name in ("i0", "i1", "i2")
            }


async def test_a_reload_and_a_rollback_may_take_longer_than_a_request() -> None:
    async with site(2, max_budget_s=0.6) as s:
        s.fakes[1].delay_s = 1.5
        for what in ("reload", "rollback"):
            async with s.http.post(f"{s.admin}/v1/models/{what}") as answer:
                assert (answer.status, sorted(await answer.json())) == (200, ["i0", "i1"])
        assert [one.asked("/v1/models/rollback") for one in s.fakes] == [1, 1]
        async with s.http.post(f"{s.admin}/v1/catalog/items", data=b"items") as answer:
            assert answer.status in (503, 504)


async def test_nothing_but_the_public_routes_in_their_one_spelling_reaches_an_instance() -> None:
    async with site(1) as s, aiohttp.ClientSession(skip_auto_headers=("Accept",)) as http:
        wrong = [
            ("POST", "/v1/%72ank"),
            ("GET", "/metrics"),
            ("GET", "/debug/config"),
            ("PUT", "/v1/rank"),
        ]
        wrong += [
            ("POST", "/v1/models/reload"),
            ("GET", "/v2/models/%2e%2e"),
            ("DELETE", "/v1/users/a/b"),
        ]
        for method, path in wrong:
            async with http.request(method, URL(s.url + path, encoded=True)) as answer:
                assert answer.status == 404, path
        assert not s.fakes[0].seen
        async with http.get(f"{s.url}/v2/models/rank/versions/1.0") as answer:
            assert answer.status == 200


@pytest.mark.parametrize("name", SPELLINGS)
async def test_another_spelling_of_a_kind_reaches_no_instance(name: str) -> None:
    async with site(1) as s:
        for path in V1:
            target = SPELLINGS[name](path)
            assert await asked_raw(s, target) in (400, 404), target
        for path in ("/v1/catalog/items", "/metrics", "/v1/models/reload"):
            for port in ("port", "admin_port"):
                target = f"http://localhost{path}"
                assert await asked_raw(s, target, port=port) in (400, 404), target
        assert not s.fakes[0].seen
        assert await asked_raw(s, "/v1/rank?a=b") == 200


async def asked_raw(s: Site, target: str, port: str = "port", more: bytes = b"") -> int:
    """The status of a POST to a target that no client library sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", s.table[port])
    head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nX-User-Id: u\r\n".encode()
    writer.write(head + more + b"Content-Length: 2\r\n\r\n{}")
    first = await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    return int(first.split()[1])


async def test_a_caller_cannot_say_what_only_the_router_may() -> None:
    async with site(1) as s:
        forged = {"X-Forwarded-For": "1.2.3.4", "Forwarded": "for=1.2.3.4", "X-NpuGr-Instance": "x"}
        forged |= {"x-npugr-anything": "x", "X-NpuGr-Not-Taken": "1", "Via": "1.1 evil"}
        await s.post("rank", "u", **forged, X_Forwarded_Host="evil")
        (seen,) = s.fakes[0].seen
        assert seen.headers.getall("X-Forwarded-For") == ["127.0.0.1"]
        assert seen.headers.getall("Via") == ["1.1 npu_gr"]
        assert not {"Forwarded", "X-Forwarded-Host"} & set(seen.headers)
        assert not [name for name in seen.headers if name.lower().startswith("x-npugr-")]


@pytest.mark.parametrize(
    "head",
    [b"X: " + b"a" * 2_000_000, b"\r\n".join(b"X%d: a" % n for n in range(200)), b"\0: a"],
    ids=["long", "many", "no name"],
)
async def test_an_answer_with_a_head_over_the_limits_is_502(head: bytes) -> None:
    """And the client gets none of it."""
    async with site(1, health={"failures": 1000}) as s:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.readuntil(b"\r\n\r\n")
            is_probe = asked.startswith(b"GET /readyz")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n")
            writer.write(b"\r\n" if is_probe else head + b"\r\n\r\n")
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()

        fake = s.fakes[0]
        await fake.stop()
        async with (
            await asyncio.start_server(answer, "127.0.0.1", fake.port),
            s.http.post(f"{s.url}/v1/signal", data=b"{}", headers={"X-User-Id": "u"}) as got,
        ):
            assert got.status == 502
            assert (await got.json(content_type=None))["title"] == "bad gateway"
            assert not [name for name in got.headers if name.startswith("X")]


async def test_no_page_of_another_site_reaches_an_instance() -> None:
    async with site(1) as s:
        evil = f"evil.example:{s.table['port']}"
        for headers in (
            {"Host": evil},
            # of a browser, after the name has come to mean this machine
            {"Host": evil, "Origin": f"http://{evil}", "Sec-Fetch-Site": "same-origin"},
            {"Host": "127.0.0.1.evil.example"},
            {"Host": "localhost.evil.example"},
            {"Host": "[::1].evil"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://localhost:1"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ):
            for (method, pattern), rule in rules().items():
                path = pattern.replace("{model}", "m").replace("{version}", "1")
                path = path.replace("{user_id}", "u")
                for url, serves in ((s.url, rule.is_public), (s.admin, rule.is_admin)):
                    if rule.scope is None or not serves:
                        continue
                    async with s.http.request(
                        method, url + path, headers={"X-User-Id": "u", **headers}
                    ) as answer:
                        assert answer.status == 403, (method, path, headers)
        own = {"Origin": s.url, "Sec-Fetch-Site": "same-origin"}
        async with s.http.post(
            f"{s.url}/v1/rank", data=b"{}", headers={"X-User-Id": "u", **own}
        ) as answer:
            assert answer.status == 200
        assert len(s.fakes[0].seen) == 1


def _keys(path: Path, *keys: tuple[str, list[Scope]]) -> None:
    rows = [
        {
            "name": f"key{i}",
            "sha256": hash_of(key.encode()),
            "tenant": "*",
            "scopes": [scope.value for scope in scopes],
        }
        for i, (key, scopes) in enumerate(keys)
    ]
    path.write_text(yaml.safe_dump({"keys": rows}))


async def test_a_request_without_a_key_of_the_file_gets_no_further(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    _keys(path, (KEY, [Scope.INFER]))
    async with site(1, api_keys_file=str(path)) as s:
        assert (await s.post("rank"))[0] == 401
        assert (await s.post("rank", Authorization=f"Bearer {OTHER_KEY}"))[0] == 401
        assert not s.fakes[0].seen
        assert (await s.post("rank", Authorization=f"Bearer {KEY}"))[0] == 200
        assert s.fakes[0].seen[0].headers["Authorization"] == f"Bearer {KEY}"
        asked = [("GET", "/metrics"), ("GET", "/v1/models"), ("POST", "/v1/catalog/reload")]
        for method, path_ in asked:
            async with s.http.request(
                method, s.admin + path_, headers={"Authorization": f"Bearer {KEY}"}
            ) as answer:
                assert answer.status == 401  # it has another scope
        _keys(path, (OTHER_KEY, [Scope.OBSERVE, Scope.ADMIN]))
        await s.route.look()
        assert (await s.post("rank", Authorization=f"Bearer {KEY}"))[0] == 401
        async with s.http.get(
            f"{s.admin}/metrics", headers={"Authorization": f"Bearer {OTHER_KEY}"}
        ) as answer:
            assert 'haproxy_server_status{proxy="users",server="i0"' in await answer.text()


async def test_a_body_over_the_limit_is_rejected_by_what_its_head_says() -> None:
    async with site(1, limits={"max_body_bytes": 100_000}) as s:
        async with s.http.post(
            f"{s.url}/v1/rank", data=b"x" * 100_001, headers={"X-User-Id": "u"}
        ) as answer:
            assert answer.status == 413
        async with s.http.post(
            f"{s.url}/v1/rank", data=b"x" * 100_000, headers={"X-User-Id": "u"}
        ) as answer:
            assert (await answer.json())["size"] == 100_000


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_bodies_that_are_announced_and_not_sent_hold_no_place(method: str) -> None:
    """More of them than an instance has places, or the requests for every instance."""
    limits = {"instance_inflight": 8, "instance_queue": 8}
    paths = {"POST": "/v1/rank", "GET": "/v1/models", "DELETE": "/v1/users/u"}
    async with site(1, limits=limits) as s:
        silent = []
        for _ in range(132):
            _, writer = await asyncio.open_connection("127.0.0.1", s.table["port"])
            head = f"{method} {paths[method]} HTTP/1.1\r\nHost: localhost\r\nX-User-Id: u\r\n"
            writer.write(head.encode() + b"Content-Length: 4194304\r\n\r\n")
            silent.append(writer)
        await asyncio.sleep(0.1)
        for _ in range(10):
            assert (await s.post("signal"))[0] == 202
            assert (await s.post("rank"))[0] == 200
            async with s.http.get(f"{s.url}/v1/models") as answer:
                assert answer.status == 200
            async with s.http.delete(f"{s.url}/v1/users/u") as answer:
                assert answer.status == 204
        for writer in silent:
            writer.close()


async def test_connections_of_one_address_leave_room_for_others() -> None:
    """A client that opens as many as there may be is rejected, and no other address is."""
    limits = {"max_connections": 40}
    async with site(1, limits=limits) as s:
        flood = []
        for _ in range(60):
            with suppress(ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", s.table["port"])
                flood.append(writer)
        await asyncio.sleep(0.1)
        for _ in range(5):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", s.table["port"], local_addr=("127.0.0.2", 0)
            )
            writer.write(
                b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nX-User-Id: u\r\n"
                b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"
            )
            assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")
            writer.close()
        async with s.http.get(f"{s.admin}/metrics") as answer:  # its connections are others
            assert answer.status == 200
        for writer in flood:
            writer.close()


async def test_a_slow_sender_holds_no_instance() -> None:
    async with site(1, header_timeout_s=0.5) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.table["port"])
        writer.write(
            b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nX-User-Id: "
            b"u\r\nContent-Length: 50\r\n\r\n{"
        )
        assert b"408" in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        assert not s.fakes[0].seen


async def test_what_haproxy_rejects_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(1) as s:
        monkeypatch.setattr(haproxy, "QUEUE_SHARE", 1e9)  # a time that HAProxy does not take
        with pytest.raises(ConfigError, match="haproxy rejects"):
            await s.route.look()
        assert (await s.post("rank"))[0] == 200
        monkeypatch.undo()
        await s.route.look()
        assert (await s.post("rank"))[0] == 200


async def test_an_instance_joins_once_it_has_been_ready() -> None:
    async with site(1) as s:
        new = Fake("i9")
        new.ready_status = 503
        await new.start()
        try:
            s.table["discovery"]["instances"] = [*s.rows(), row(new)]
            await s.route.look()
            assert set(await s.statuses()) == {"i0"}
            new.ready_status = 200
            await s.route.look()
            assert set(await s.statuses()) == {"i0", "i9"}
        finally:
            await new.stop()


async def sample(s: Site, name: str) -> float:
    """A sample of the router's metrics, named with its labels."""
    async with s.http.get(f"{s.admin}/metrics") as answer:
        lines = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line)
    return float(lines[name])


async def test_its_own_answers_are_in_its_metrics() -> None:
    """What no instance has answered no instance can count: errors, and rejections."""
    names = [
        'haproxy_frontend_http_responses_total{proxy="npu_gr",code="5xx"}',
        'haproxy_backend_http_responses_total{proxy="users",code="5xx"}',
    ]
    untaken = 'haproxy_backend_connection_errors_total{proxy="users"}'
    inflight = {"instance_inflight": 1}
    async with site(1, objective_s=0.2, health={"failures": 1000}, limits=inflight) as s:
        (only,) = s.fakes
        only.delay_s = 60.0
        before = await sample(s, untaken)
        waits = asyncio.create_task(s.post("rank"))
        await until_inside(only)
        assert (await s.post("signal", "v"))[0] == 429
        assert await sample(s, untaken) == before + 1
        waits.cancel()
    async with site(1) as s:
        s.fakes[0].ready_status = 503

        async def is_down() -> bool:
            return (await s.statuses())["i0"].startswith("DOWN")

        await until(is_down)
        earlier = [await sample(s, name) for name in names]
        for path in ("rank", "signal", "events"):
            assert (await s.post(path))[0] == 503
        assert [await sample(s, name) for name in names] == [num + 3 for num in earlier]
