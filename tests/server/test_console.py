"""The API console: what it sends and says to type is what the routes take, at both addresses."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from npu_gr.server.auth.rules import rules
from tests.keys import bearer, secret, write_keys
from tests.ports import free_port
from tests.server.test_addresses import site


async def test_every_link_of_the_status_page_is_served_where_the_page_is() -> None:
    async with site() as at, aiohttp.ClientSession() as http:
        async with http.get(f"{at.admin}/debug/status") as answer:
            links = (await answer.json())["links"]
        assert {"metrics", "configuration", "API", "runbooks"} <= links.keys()
        for path in links.values():
            assert await at.status(at.admin + path) == 200, path


async def test_the_page_needs_no_key_and_the_document_does(tmp_path: Path) -> None:
    port = free_port()
    async with (
        site(port=port, api_keys_file=write_keys(tmp_path / "keys")) as at,
        aiohttp.ClientSession() as http,
    ):
        async with http.get(f"{at.admin}/debug/console") as answer:
            text = await answer.text()
            assert f'"http://" + location.hostname + ":{port}"' in text, (
                "the address of callers, before its reader says so"
            )
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "{{" not in text
        assert "src=" not in text
        assert await at.status(f"{at.admin}/debug/openapi") == 401
        assert await at.status(f"{at.admin}/debug/openapi", headers=bearer()) == 200
        assert await at.status(f"{at.public}/debug/console") == 404


async def test_a_user_is_filled_in_where_nobody_needs_a_key(tmp_path: Path) -> None:
    async def document(at: Any) -> Any:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{at.admin}/debug/openapi", headers=bearer()) as answer,
        ):
            return await answer.json()

    async with site() as at:
        assert (await document(at))["x-user"] == {"user_id": "u7", "tenant": "shop"}
    async with site(api_keys_file=write_keys(tmp_path / "keys")) as at:
        assert "x-user" not in await document(at)


@pytest.mark.browser
async def test_the_console_in_a_browser(tmp_path: Path, browser: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    def shown(selector: str) -> str:
        found = "return document.querySelector(arguments[0])?.textContent ?? ''"
        return str(browser.execute_script(found, selector))

    def until(condition: Any) -> None:
        WebDriverWait(browser, 20, poll_frequency=0.1).until(lambda _: condition())

    def pressed(route: str, button: str) -> None:
        script = (
            "[...document.querySelectorAll(arguments[0])].find(one => one.textContent === "
            "arguments[1]).click()"
        )
        browser.execute_script(script, f"[data-route='{route}'] button", button)

    def answer(route: str) -> str:
        until(lambda: shown(f"[data-route='{route}'] pre"))
        return shown(f"[data-route='{route}'] pre")

    def look(at: Any) -> str:
        browser.get(f"{at.admin}/debug/console")
        until(lambda: shown("#state") == "needs an API key")
        browser.find_element(By.ID, "key").send_keys(secret("all"))
        assert browser.execute_script("return document.getElementById('public').value") == at.public
        browser.find_element(By.CSS_SELECTOR, "#settings button").click()
        until(lambda: "routes" in shown("#state"))
        routes = browser.execute_script(
            "return [...document.querySelectorAll('details')].map(d => d.dataset.route)"
        )
        assert routes[0] == "POST /v1/recommend", "what callers want, first"
        is_open = "return [...document.querySelectorAll('details[open]')].map(d => d.dataset.route)"
        assert browser.execute_script(is_open) == routes[:1]
        assert set(routes) == {f"{method} {path}" for method, path in rules()}
        pressed("GET /debug/config", "Send")
        assert answer("GET /debug/config").startswith("200 in ")
        buttons = "return [...document.querySelectorAll(arguments[0])].map(one => one.textContent)"
        assert browser.execute_script(buttons, "[data-route='POST /v1/rank'] button") == ["curl"]
        unnamed = (
            "return document.querySelectorAll('textarea:not([aria-label]), "
            "pre:not([aria-label])').length"
        )
        assert browser.execute_script(unnamed) == 0
        pressed("POST /v1/rank", "curl")
        return answer("POST /v1/rank")

    async with site(port=free_port(), api_keys_file=write_keys(tmp_path / "keys")) as at:
        typed = await asyncio.to_thread(look, at)
        assert secret("all") not in typed
        if shutil.which("curl") is not None:
            words = shlex.split(typed.replace("$KEY", secret("all")))
            done = await asyncio.to_thread(
                subprocess.run,
                [*words, "-s", "-w", "%{http_code}"],
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert done.stdout.endswith("200"), (typed, done.stdout, done.stderr)
