"""The public address serves callers, and the administration's serves operators.

No other site's page is served.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request

from npu_gr.core.errors import ConfigError
from npu_gr.server.auth.rules import PAGES, rules
from npu_gr.server.config import ServerConfig
from npu_gr.server.routes import build_web_app
from npu_gr.server.run import PIPELINE, make_addresses, serve
from tests.ports import free_port
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, metrics_of_all_kinds
from tests.serving import until

RANK: dict[str, Any] = {"json": EXAMPLES["rank"].body}
EVIL = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}


@dataclass
class Site:
    """A fake service that listens."""

    public: str
    admin: str
    service: FakeService
    http: aiohttp.ClientSession
    app: Any

    async def status(self, url: str, method: str = "GET", **more: Any) -> int:
        async with self.http.request(method, url, **more) as answer:
            return answer.status


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    service = FakeService({name: example.answer for name, example in EXAMPLES.items()})
    config = ServerConfig(**{"port": 0, "admin_port": 0, "drain_grace_s": 0.0, **settings})
    app = build_web_app(service, config, metrics_of_all_kinds())
    ports = asyncio.get_running_loop().create_future()

    async def on_drain() -> None:
        pass

    serving = asyncio.create_task(
        serve(app, config, on_drain=on_drain, on_listening=lambda *both: ports.set_result(both))
    )
    await asyncio.wait((serving, ports), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving
    port, admin_port = ports.result()
    try:
        async with aiohttp.ClientSession() as http:
            yield Site(
                f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", service, http, app
            )
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await serving


def path_of(pattern: str) -> str:
    """A path of the route."""
    path = (
        pattern.replace("{model}", "fake")
        .replace("{version}", "1")
        .replace("{user_id}", "u")
        .replace("{item_id}", "7")
    )
    return f"{path}?seconds=0" if path == "/debug/profile" else path  # rejected, so quick


def is_served(status: int, body: bytes) -> bool:
    """Whether a handler of the route answered, be it with 404 about what the instance has."""
    return status != 404 or b"this address does not serve" not in body


async def test_every_route_is_served_by_the_address_of_its_rule_alone() -> None:
    async with site() as at:
        for (method, pattern), rule in rules().items():
            path = path_of(pattern)
            for url, expected in ((at.public, rule.is_public), (at.admin, rule.is_admin)):
                async with at.http.request(method, url + path) as answer:
                    assert is_served(answer.status, await answer.read()) == expected, (
                        method,
                        path,
                        url,
                    )
            if not rule.is_public:  # nor does another method show that it is there
                assert await at.status(at.public + path, "PUT") == 404


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/%6detrics", "/debug/config", "/debug%2Fconfig", "//metrics", "/./metrics"],
)
async def test_no_spelling_of_a_path_gets_around_the_address(path: str) -> None:
    from yarl import URL

    async with site() as at:
        assert await at.status(URL(at.public + path, encoded=True)) == 404  # type: ignore[arg-type]
        assert await at.status(URL(at.public + "/v1/models/reload", encoded=True), "POST") == 404  # type: ignore[arg-type]
        assert at.service.served == []


async def test_a_connection_that_is_gone_reaches_no_route_of_operators() -> None:
    async with site() as at:
        pipeline = at.app[PIPELINE]
        gone = make_mocked_request("POST", "/v1/models/reload")
        gone._protocol.transport = None
        assert gone.transport is None
        assert not pipeline._address(gone).serves("/v1/models/reload")
        assert pipeline._address(gone).serves("/v1/rank")


async def test_the_same_address_named_twice_serves_everything() -> None:
    port = free_port()
    async with site(port=port, admin_port=port) as at:
        assert at.public == at.admin
        assert await at.status(f"{at.public}/metrics") == 200
        assert await at.status(f"{at.public}/v1/rank", "POST", **RANK) == 200
        assert await at.status(f"{at.public}/v1/models") == 200


async def test_bodies_of_callers_take_no_room_from_operators() -> None:
    async with site(max_receiving_bytes=1000, max_body_bytes=1000) as at:
        _, writer = await asyncio.open_connection("127.0.0.1", int(at.public.rpartition(":")[2]))
        writer.write(
            b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        writer.write(b"Content-Length: 950\r\n\r\n" + b" " * 900)
        await writer.drain()
        await until(lambda: at.app[PIPELINE]._admission.receiving_bytes == 900)
        json = {"Content-Type": "application/json"}
        assert await at.status(f"{at.public}/v1/rank", "POST", data=b" " * 200, headers=json) == 429
        assert (
            await at.status(f"{at.admin}/v1/catalog/items", "POST", data=b" " * 200, headers=json)
            == 400
        )
        writer.close()


async def test_a_taken_admin_port_is_an_error_that_names_it() -> None:
    async with site() as at:
        port = int(at.admin.rpartition(":")[2])
        with pytest.raises(
            ConfigError,
            match=r"server\.admin_host, server\.admin_port: .* "
            rf"127\.0\.0\.1:{port}",
        ):
            async with site(admin_port=port):
                pass


def test_an_admin_address_beyond_loopback_needs_keys(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "10.0.0.1", "::"):
        with pytest.raises(
            ValueError,
            match=rf"admin_host: {host} is not a loopback address: set "
            r"api_keys_file",
        ):
            ServerConfig(admin_host=host)
        ServerConfig(admin_host=host, allow_unauthenticated=True)
        ServerConfig(admin_host=host, api_keys_file=str(tmp_path / "keys"))


# ---- browsers


@pytest.mark.parametrize(
    "headers", [EVIL, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}, {"Host": "evil.example"}]
)
async def test_a_page_of_another_site_changes_and_reads_nothing(headers: dict[str, str]) -> None:
    async with site() as at:
        for (method, pattern), rule in rules().items():
            path = path_of(pattern)
            expected = 200 if rule.scope is None and path not in PAGES else 403
            for url, serves in ((at.public, rule.is_public), (at.admin, rule.is_admin)):
                if serves:
                    assert await at.status(url + path, method, headers=headers) == expected, (
                        method,
                        path,
                    )
        assert at.service.served == []


async def test_the_own_page_and_what_is_no_browser_are_served() -> None:
    async with site() as at:
        own = {"Origin": at.admin, "Sec-Fetch-Site": "same-origin"}
        assert await at.status(f"{at.admin}/debug/status", headers=own) == 200
        assert await at.status(f"{at.admin}/", headers={"Sec-Fetch-Site": "none"}) == 200
        assert await at.status(f"{at.admin}/v1/models/reload", "POST", headers=own) == 200
        port = at.admin.rpartition(":")[2]
        for name in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
            assert await at.status(f"{at.admin}/debug/status", headers={"Host": name}) == 200


async def test_a_trusted_proxy_passes_the_names_of_its_callers_on() -> None:
    """A browser on the same machine has the proxy's address, but its pages cannot set Via."""
    theirs = {"Host": "recommend.shop.example"}
    passed_on = theirs | {"Via": "1.1 npu_gr"}
    async with site(trusted_proxies=["127.0.0.1"]) as at:
        rank = f"{at.public}/v1/rank"
        assert await at.status(rank, "POST", headers=passed_on, **RANK) == 200
        assert await at.status(rank, "POST", headers=passed_on | EVIL, **RANK) == 403
        for headers in (theirs, theirs | {"X-Forwarded-For": "1.2.3.4"}):
            assert await at.status(rank, "POST", headers=headers, **RANK) == 403
    async with site() as at:
        assert await at.status(f"{at.public}/v1/rank", "POST", headers=passed_on, **RANK) == 403


def test_names_are_checked_where_a_page_could_do_without_a_key() -> None:
    def checked(**settings: Any) -> list[bool]:
        return [one.rejects_foreign_hosts for one in make_addresses(ServerConfig(**settings))]

    assert checked() == [True, True]
    assert checked(api_keys_file="keys") == [False, True]
    assert checked(host="10.0.0.1", api_keys_file="keys") == [False, True]
    assert checked(host="0.0.0.0", admin_host="0.0.0.0", allow_unauthenticated=True) == [
        False,
        False,
    ]
    assert checked(port=8080, admin_port=8080) == [True]


@pytest.mark.browser
async def test_a_real_browser_reads_the_own_page_and_another_sites_page_reaches_nothing(
    browser: Any,
) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    page = """<script>
        async function attack(url) {
          for (const path of ["/v1/models/reload", "/v1/catalog/reload", "/debug/record"])
            await fetch(url + path, {method: "POST", mode: "no-cors"}).catch(() => null);
          document.title = "done";
        }</script><form id=f method=post></form>"""

    async def show(_: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html")

    reloads: list[str] = []
    evil = web.Application()
    evil.router.add_get("/", show)
    async with site() as at, TestServer(evil, host="127.0.0.1") as server:

        async def reload_models() -> list[Any]:
            reloads.append("reload")
            return at.service.models()

        at.service.reload_models = reload_models  # type: ignore[method-assign]

        def own_page() -> str:
            browser.get(f"{at.admin}/")
            script = "return document.getElementById('state')?.innerText"
            WebDriverWait(browser, 20).until(lambda _: browser.execute_script(script) == "ready")
            script = (
                "fetch('/v1/models/reload', {method: 'POST'}).then(answer => "
                "arguments[0](answer.status))"
            )
            return str(browser.execute_async_script(script))

        def attack(origin: str) -> None:
            browser.get(origin)
            browser.execute_script("attack(arguments[0])", at.admin)
            WebDriverWait(browser, 20).until(lambda _: browser.title == "done")
            browser.execute_script(
                "f.action = arguments[0] + '/v1/models/reload'; f.submit()", at.admin
            )
            WebDriverWait(browser, 20).until(
                lambda _: "page of another site" in browser.page_source
            )

        assert await asyncio.to_thread(own_page) == "200"
        assert reloads == ["reload"]
        for name in ("localhost", "127.0.0.1"):  # another site, and the same site at another port
            await asyncio.to_thread(attack, f"http://{name}:{server.port}/")
        # a name of the author's that has come to mean this machine
        await asyncio.to_thread(
            browser.get, f"http://rebound.localhost:{at.admin.rpartition(':')[2]}/debug/config"
        )
        assert "is not a loopback name" in await asyncio.to_thread(lambda: browser.page_source)
        assert reloads == ["reload"]


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
async def test_a_body_of_another_type_is_rejected_everywhere(media: str) -> None:
    async with site() as at:
        for (method, path), rule in rules().items():
            # clients of the Open Inference Protocol name no type
            if method == "POST" and (media or not path.startswith("/v2/")):
                url = at.public if rule.is_public else at.admin
                status = await at.status(
                    url + path, method, data=b"{}", headers={"Content-Type": media}
                )
                assert status == 415, (path, status)
