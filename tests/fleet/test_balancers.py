"""The generated configurations run in the real servers: pairs meet, other users stay, signals go once."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import KINDS, Routing
from npu_gr.core.settings import from_table
from npu_gr.fleet.balancers import BALANCERS, envoy
from npu_gr.router.config import InstanceConfig, RouterConfig
from npu_gr.server.auth.rules import rules
from tests.router.chaos import free_port
from tests.router.fake import Fake, table

USERS = [f"user-{i}" for i in range(90)]


def command(name: str, folder: Path, text: str) -> list[str]:
    """What starts the server, or a skip that says what is missing."""
    found = shutil.which(name) or shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    path = folder / (f"{name}.json" if name == "envoy" else f"{name}.cfg")
    path.write_text(text)
    return {
        "envoy": [found, "-c", str(path), "--concurrency", "1", "-l", "error", "--use-dynamic-base-id"],
        "haproxy": [found, "-f", str(path)],
        "nginx": [found, "-e", "stderr", "-p", f"{folder}/", "-c", str(path)],
    }[name]


class Balanced:
    def __init__(self, fakes: list[Fake], url: str, http: aiohttp.ClientSession) -> None:
        self.fakes, self._url, self._http = fakes, url, http

    async def post(self, path: str, user: str | None, **headers: str) -> tuple[int, str]:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if user:
            given["x-user-id"] = user
        async with self._http.post(f"{self._url}/v1/{path}", data=b"{}", headers=given) as answer:
            body: dict[str, Any] = await answer.json() if answer.status in (200, 202) else {}
            return answer.status, body.get("instance", "")

    async def raw(self, method: str, path: str, host: str = "Host: localhost") -> int:
        """Send a path byte for byte; returns the status."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self._url.rpartition(":")[2]))
        lines = f"{method} {path} HTTP/1.1\r\n{host}\r\nx-user-id: u\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        try:
            writer.write(lines.encode())
            async with asyncio.timeout(10):
                return int((await reader.readline()).split(b" ", 2)[1])  # envoy keeps some open for another second
        finally:
            writer.close()

    def num_seen(self) -> int:
        return sum(len(fake.seen) for fake in self.fakes)

    async def homes(self, path: str = "rank") -> dict[str, str]:
        return {user: (await self.post(path, user))[1] for user in USERS}


@asynccontextmanager
async def balanced(name: str, folder: Path, num: int = 3) -> AsyncIterator[Balanced]:
    fakes = [Fake(f"i{i}") for i in range(num)]
    for fake in fakes:
        await fake.start()
    port = free_port()
    settings = table(fakes, port=port, admin_port=free_port(), health={"interval_s": 0.2, "timeout_s": 5.0})
    settings |= {"breaker": {"failures": 1000}, "limits": {"max_connections": 500}, "connect_timeout_s": 5.0}
    try:
        with started(name, folder, from_table(settings, RouterConfig)) as process:
            async with aiohttp.ClientSession() as http:
                b = Balanced(fakes, f"http://127.0.0.1:{port}", http)
                async with asyncio.timeout(60):
                    while not (await answers(b) and (name == "nginx" or is_checked(b))):
                        assert process.poll() is None, (folder / "stderr").read_text()[-2000:]
                        await asyncio.sleep(0.1)
                yield b
    finally:
        for fake in fakes:
            await fake.stop()


@contextmanager
def started(
    name: str, folder: Path, config: RouterConfig, change: Callable[[str], str] = str
) -> Iterator[subprocess.Popen[bytes]]:
    """The real balancer with the configuration that we make, after a change."""
    arguments = command(name, folder, change(BALANCERS[name](config, config.discovery.instances)))
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=stderr, cwd=folder)
    try:
        yield process
    finally:
        process.terminate()  # nginx ends its workers
        process.wait(10)


def is_checked(b: Balanced) -> bool:
    """Every instance's first check is over, since there was a second one."""
    return all(fake.num_checks > 1 for fake in b.fakes)


async def answers(b: Balanced) -> bool:
    try:
        return {(await b.post("rank", user))[1] for user in USERS[:30]} == {fake.name for fake in b.fakes}
    except aiohttp.ClientError:
        return False


@pytest.mark.parametrize("name", sorted(BALANCERS))
async def test_signal_and_rank_meet_and_the_others_stay_when_one_leaves(name: str, tmp_path: Path) -> None:
    async with balanced(name, tmp_path) as b:
        before = await b.homes("signal")
        assert set(before.values()) == {"i0", "i1", "i2"}
        for kind in KINDS.values():
            if kind.routing is Routing.FOLLOW:
                assert await b.homes(kind.path.removeprefix("/v1/")) == before, kind.name
        if name == "nginx":  # has no active checks
            await b.fakes[1].stop()
        else:
            b.fakes[1].ready_status = 503
        async with asyncio.timeout(10):
            while "i1" in (after := await b.homes()).values():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        moved = [user for user in USERS if before[user] != "i1" and after[user] != before[user]]
        assert len(moved) <= len(USERS) * 0.03, "MAGLEV moves a few in a thousand, the others none"
        assert name == "envoy" or not moved


@pytest.mark.parametrize("name", sorted(BALANCERS))
async def test_a_rank_is_tried_again_a_signal_is_not_and_nobody_is_refused(name: str, tmp_path: Path) -> None:
    async with balanced(name, tmp_path) as b:
        for kind in KINDS.values():
            if kind.routing is not Routing.EVERYWHERE:
                status = 200 if kind.routing is Routing.BY_LOAD else 400
                assert (await b.post(kind.path.removeprefix("/v1/"), None))[0] == status, kind.name
        assert (await b.post("users/u", "u"))[0] == 501, "one instance would forget, the others not"
        assert (await b.post("rank", None, x_npugr_service="normal"))[0] in ((200,) if name != "nginx" else (400,))
        homes = await b.homes()
        bad = b.fakes[0]
        bad.status = 503
        bad.seen.clear()
        theirs = [user for user in USERS if homes[user] == bad.name][:5]
        for user in theirs:
            status, instance = await b.post("rank", user)
            assert status == 200
            assert instance != bad.name
        assert sum(request.path == "/v1/rank" for request in bad.seen) >= 1
        seen = sum(len(fake.seen) for fake in b.fakes)
        assert (await b.post("signal", theirs[0]))[0] == 503
        assert sum(len(fake.seen) for fake in b.fakes) == seen + 1


NOT_FORWARDED = [
    *((method, path) for (method, path), rule in rules().items() if not rule.is_public),
    ("GET", "/%6detrics"),
    ("GET", "//metrics"),
    ("GET", "/v1/rank/../../metrics"),
    ("GET", "/v2/models/../../metrics"),
    ("GET", "/v2/models/..%2f..%2fmetrics"),
    ("GET", "/v2/models/x%0a"),
    ("GET", "/v2/models/x%0d%0aX-Evil:%201"),
    ("GET", "/v2/models/x/versions/../../../debug/config"),
    ("POST", "/v1/rank/../models/reload"),
    ("POST", "/v1/models%2freload"),
    ("POST", "/v1/rank/"),
    ("POST", "/v1/models"),
    ("GET", "/v1/rank"),
    ("PUT", "/healthz"),
    ("GET", "/anything"),
    *(
        ("DELETE", path)
        for path in ("/v1/users/half", "/v1/%75sers/half", "/v1/users%2fhalf", "//v1//users/half", "/v1/./users/half")
    ),
    ("DELETE", "/v1/models/../users/half"),
]


@pytest.mark.parametrize("name", sorted(BALANCERS))
async def test_only_the_public_routes_are_forwarded_and_only_as_they_are_spelt_here(name: str, tmp_path: Path) -> None:
    async with balanced(name, tmp_path) as b:
        for method, path in NOT_FORWARDED:
            before = b.num_seen()
            status = await b.raw(method, path)
            assert b.num_seen() == before, (method, path, status)
            assert status in ((501, 404, 400) if "sers" in path else (404, 400)), (method, path, status)
        assert await b.raw("DELETE", "/v1/users/half") == 501, "one instance would forget, the others not"
        for (method, pattern), rule in rules().items():
            path = pattern.replace("{model}", "a.b_c-1").replace("{version}", "v1")
            if rule.is_public and "{user_id}" not in path:
                before = b.num_seen()
                assert await b.raw(method, f"{path}?a=b") in (200, 202), (method, path)
                checked = path == "/readyz"  # the fakes do not note it
                assert checked or b.num_seen() == before + 1
                assert checked or {fake.seen[-1].raw_path for fake in b.fakes if fake.seen} >= {f"{path}?a=b"}
        # what is forwarded is what was compared, however it was spelt
        for path in ("//v1//rank", "/v1/%72ank", "/v1/x/../rank"):
            before = b.num_seen()
            if await b.raw("POST", path) == 200:
                assert b.num_seen() == before + 1
                assert any(fake.seen and fake.seen[-1].raw_path == "/v1/rank" for fake in b.fakes)
            else:
                assert b.num_seen() == before


@pytest.mark.parametrize("name", sorted(BALANCERS))
async def test_instances_see_the_name_that_a_browser_was_sent_to(name: str, tmp_path: Path) -> None:
    """So they can tell a page of their own from another site's."""
    async with balanced(name, tmp_path) as b:
        await b.raw("GET", "/v1/models", "Host: recommend.shop.example:8443")
        (seen,) = [one for fake in b.fakes for one in fake.seen if one.path == "/v1/models"]
        assert seen.headers["Host"] == "recommend.shop.example:8443"


async def test_envoy_finds_the_other_instance_for_every_rank(tmp_path: Path) -> None:
    async with balanced("envoy", tmp_path, num=2) as b:
        b.fakes[0].status = 503
        b.fakes[0].seen.clear()
        answers = [await b.post("rank", f"user-{i}") for i in range(600)]
        assert set(answers) == {(200, "i1")}
        assert len(b.fakes[0].seen) > 100


async def test_envoy_sends_a_signal_elsewhere_that_nobody_has_taken(tmp_path: Path) -> None:
    async with balanced("envoy", tmp_path) as b:
        homes = await b.homes()
        draining = b.fakes[0]
        draining.status, draining.is_draining = 503, True
        user = next(user for user in USERS if homes[user] == draining.name)
        status, instance = await b.post("signal", user)
        assert status == 202
        assert instance != draining.name


def test_a_fleet_that_takes_no_signals_is_an_error() -> None:
    found = [InstanceConfig(name="a", host="h", port=1, special=False)]
    with pytest.raises(ConfigError, match="no instance is special"):
        envoy(from_table({"discovery": {"file": "x"}}, RouterConfig), found)
