"""The status page: its JSON agrees with the requests sent, and a real browser shows it, live."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.kinds import Scope
from npu_gr.metrics.slo import Result
from npu_gr.metrics.status import page
from tests.keys import bearer, entry, secret, write_keys
from tests.models import events
from tests.serving import FIRST_ID, columns, serving

RANK: dict[str, Any] = {"user_id": "u", "candidates": [FIRST_ID], "history": columns(events(40))}


async def test_the_json_says_what_happened(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        await client.post("/v1/rank", json=RANK, headers={"X-Request-Id": "first"})
        await client.post("/v1/rank", json=RANK)
        await client.post("/v1/rank", json=RANK, headers={"X-Request-Timeout-Ms": "0"})
        status = await (await client.get("/debug/status")).json()
    assert status["ready"]
    rank = next(g for g in status["goodput"] if g["kind"] == "rank")
    # nothing was promised for no time
    assert (rank["good"] + rank["slow"], rank["failed"]) == (2, 0)
    assert status["outcomes"]["rank"] == {"miss_full": 1, "hbm_hit": 1}
    tier = next(t for t in status["tiers"] if t["name"] == "hbm")
    assert sum(tier["states"].values()) == tier["budget"]
    assert tier["entries"] == 1
    assert {line["status"] for line in status["slow"]} == {200, 504}
    assert max(status["slow"], key=lambda line: line["duration_s"]) == status["slow"][0]
    assert "first" in {line["request_id"] for line in status["slow"]}
    assert set(status["slow"][0]["stages_s"]) == {"history", "lease", "queue", "device"}
    assert status["links"]["metrics"] == "/metrics"
    (model,) = status["models"]
    assert (model["name"], model["version"], model["is_draining"]) == (
        "tiny",
        status["versions"]["tiny"],
        False,
    )
    assert model["served"]["num"] == 2
    assert list(status["tenants"]) == [""]


async def test_tenants_stand_apart(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        for tenant in ("shop", "shop", "café"):
            await client.post("/v1/rank", json=RANK | {"tenant": tenant})
        # a version that is gone
        service.parts.metrics.requests.recent.add("shop", "of before", 9.0, is_good=False)
        status = await (await client.get("/debug/status")).json()
    shop, other = status["tenants"].values()
    assert list(status["tenants"]) == ["shop", "café"]
    assert (shop["num"], shop["p99_s"], other["num"]) == (3, 9.0, 1)
    assert shop["within_slo_ratio"] < other["within_slo_ratio"] or other["within_slo_ratio"] == 0
    assert [model["served"]["num"] for model in status["models"]] == [3]


async def test_the_page_loads_nothing_and_needs_no_key_but_its_data_do(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys")
    async with serving(tmp_path, watched=False, server={"api_keys_file": keys}) as (client, _):
        async with client.get("/") as response:
            page = await response.text()
            assert response.content_type == "text/html"
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert (await client.get("/debug/status")).status == 401
    assert "src=" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "{{" not in page


def test_no_two_parts_of_a_request_have_one_colour() -> None:
    text = page("/debug/status")
    assert "[...Array(9).keys()]" in text, "more than a recommend has stages"
    for palette in text.split("@media"):
        colours = re.findall(r"--s\d: (#\w+)", palette)
        assert len(colours) == len(set(colours)) == 9


@pytest.mark.browser
async def test_the_page_in_a_browser(tmp_path: Path, browser: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    # in one step: the page puts new elements in their places every second
    def shown(part: str) -> str:
        return str(
            browser.execute_script(
                "return document.getElementById(arguments[0])?.innerText ?? ''", part
            )
        )

    def of_all(selector: str, what: str) -> list[Any]:
        """Look at every such part, in one step."""
        found = browser.execute_script(
            f"return [...document.querySelectorAll(arguments[0])].map(part => {what})", selector
        )
        return list(found)

    def until(condition: Any) -> None:
        WebDriverWait(browser, 20, poll_frequency=0.1).until(lambda _: condition())

    def read_through(path: str, begins: str) -> None:
        """Follow a link, with the key that the page has."""
        here = browser.current_window_handle
        browser.execute_script("document.querySelector(`a[href$='${arguments[0]}']`).click()", path)
        until(lambda: len(browser.window_handles) == 2)
        browser.switch_to.window(browser.window_handles[1])
        until(lambda: begins in browser.execute_script("return document.body?.innerText ?? ''"))
        browser.close()
        browser.switch_to.window(here)

    keys = write_keys(tmp_path / "keys", entry(), entry("feed", scopes=[Scope.INGEST]))
    headers = bearer()
    async with serving(tmp_path, watched=False, server={"api_keys_file": keys}) as (
        client,
        service,
    ):
        rolling = service.parts.metrics.requests.rolling["rank"]
        for number in range(30):  # of which a third is in time, so that the page names the runbooks
            rolling.add(time.monotonic(), Result.SLOW if number % 3 else Result.GOOD)
        for tenant in ("", "shop"):
            await client.post("/v1/rank", json=RANK | {"tenant": tenant}, headers=headers)

        def first_look() -> None:
            browser.get(str(client.make_url("/")))
            until(lambda: shown("state") == "needs an API key")
            for name, said in (
                ("feed", "needs an API key with the scope observe"),
                ("all", "ready"),
            ):
                browser.find_element(By.ID, "key").send_keys(secret(name))
                browser.find_element(By.CSS_SELECTOR, "#login button").click()
                until(lambda said=said: shown("state") == said)
            until(
                lambda: (
                    shown("state") == "ready"
                    and not browser.find_element(By.ID, "login").is_displayed()
                )
            )
            assert "miss full 2" in shown("outcomes")
            assert "hbm: 2 prefixes, budget" in shown("tiers")
            assert of_all("#models tbody td", "part.innerText")[:4:2] == ["tiny", "serves"]
            assert of_all("#tenants tbody td:first-child", "part.innerText") == [
                "(none named)",
                "shop",
            ]
            unnamed = (
                "[...part.querySelectorAll('[role=img]:not([aria-label]), "
                "table:not([aria-label])')].length"
            )
            assert of_all("main", unnamed) == [0]
            free = of_all("#tiers .bar .free", "getComputedStyle(part).backgroundColor")
            used = of_all("#tiers .bar i:not(.free)", "getComputedStyle(part).backgroundColor")
            assert set(free) == {"rgba(0, 0, 0, 0)"}, "what is free is drawn as no use"
            assert used
            assert "rgba(0, 0, 0, 0)" not in used
            assert "jobs waiting" in shown("queue")
            links = dict(of_all("a", "[part.innerText, part.href]"))
            assert set(links) == {
                "metrics",
                "configuration",
                "API",
                "runbooks",
                "latency",
                "availability",
            }
            assert links["latency"].endswith("/debug/runbooks?name=rank-latency")
            read_through("?name=rank-latency", "Rank latency")
            read_through("/metrics", "npu_gr_")
            assert "miss full" in shown("slow")
            assert (
                browser.execute_script("return performance.getEntriesByType('resource').length")
                >= 1
            )
            urls = browser.execute_script(
                "return performance.getEntriesByType('resource').map(e => e.name)"
            )
            assert all(url.startswith(str(client.make_url("/"))) for url in urls)
            if screenshot := os.environ.get("NPU_GR_SCREENSHOT"):
                browser.save_screenshot(screenshot)

        await asyncio.to_thread(first_look)
        await client.post("/v1/rank", json=RANK, headers=headers)
        await asyncio.to_thread(until, lambda: "hbm hit 1" in shown("outcomes"))  # by itself

        def pause_and_themes() -> None:
            browser.find_element(By.ID, "pause").click()
            assert browser.find_element(By.ID, "pause").get_attribute("aria-pressed") == "true"
            grounds = []
            for theme in ("light", "dark"):
                feature = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
                grounds.append(
                    browser.execute_script("return getComputedStyle(document.body).backgroundColor")
                )
            assert grounds[0] != grounds[1]
            errors = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]
            rejected = [text for text in errors if "401" not in text and "403" not in text]
            assert not [e for e in rejected if "favicon" not in e["message"]]

        await asyncio.to_thread(pause_and_themes)
