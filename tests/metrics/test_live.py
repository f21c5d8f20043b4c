"""A real Prometheus scrapes a loaded service, and every dashboard expression has data.

Under the demo's traffic alone some have none: their panels say so. Also promtool's `check metrics`
on the endpoint, the exemplars, and the recordings against the service's own figures.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from npu_gr.core.kinds import KINDS
from npu_gr.tools.monitor import prometheus
from tests.certificates import Authority
from tests.metrics.live import all_sections, demo_sections, load, routed
from tests.metrics.test_dashboards import IDS, PANELS, expressions, plain
from tests.metrics.test_rules import RULES, promtool
from tests.ports import free_port
from tests.server.test_deltas_over_http import Stream, changed, post, rows_of
from tests.serving import serving

pytestmark = pytest.mark.prometheus
LOAD_S = 9.0
WINDOW = "8s"  # of rates
TRIES = 5  # a scrape that was late on a busy machine leaves too few points behind
SAYS_SO = " Empty unless "


def needs(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (Debian: {program})")


async def ask(http: aiohttp.ClientSession, url: str, path: str, **params: str) -> Any:
    async with http.get(f"{url}/api/v1/{path}", params=params) as answer:
        body = await answer.json()
        assert body["status"] == "success", body
        return body["data"]


async def figures(http: aiohttp.ClientSession, url: str, expr: str, instant: float) -> list[float]:
    """Return the figures of one instant: all queries take longer than a rate's window."""
    result = (await ask(http, url, "query", query=plain(expr, WINDOW), time=f"{instant:.3f}"))[
        "result"
    ]
    return [float(sample["value"][1]) for sample in result]


async def empty_panels(
    http: aiohttp.ClientSession,
    url: str,
    send: Callable[[], Awaitable[None]],
    expected: frozenset[str],
) -> set[str]:
    """Send a load, and name the panels with an expression without figures.

    Args:
        http: Session to use.
        url: Base URL of Prometheus.
        send: Sends the load once.
        expected: Panels for which the load is not sent again.
    """
    empty: set[str] = set()
    for _ in range(TRIES):
        await send()
        await asyncio.sleep(1.1)  # the last scrape
        instant = time.time()
        empty = {
            name
            for name, (_, panel) in zip(IDS, PANELS, strict=True)
            for expr in expressions(panel)
            if not any(map(math.isfinite, await figures(http, url, expr, instant)))
        }
        if empty <= expected:
            break
    return empty


def write_rules(folder: Path) -> None:
    (folder / "rules.yml").write_text(yaml.safe_dump(RULES))


async def test_what_the_demo_leaves_empty_says_so(tmp_path: Path) -> None:
    needs("prometheus")
    write_rules(tmp_path)
    said = frozenset(
        name
        for name, (_, panel) in zip(IDS, PANELS, strict=True)
        if SAYS_SO in panel["description"]
    )
    async with serving(tmp_path, watched=False, **demo_sections(tmp_path)) as (client, _):
        targets = {"npu_gr": f"127.0.0.1:{client.port}"}
        async with (
            prometheus(tmp_path, targets, free_port(), scrape_s=1.0, evaluate_s=0.5) as url,
            aiohttp.ClientSession() as http,
        ):
            empty = await empty_panels(
                http, url, lambda: load(f"http://127.0.0.1:{client.port}", LOAD_S), said
            )
    assert empty <= said, sorted(empty - said)


async def test_every_expression_returns_figures(tmp_path: Path, authority: Authority) -> None:
    needs("prometheus", "haproxy")
    write_rules(tmp_path)
    others = frozenset(
        name
        for name, (_, panel) in zip(IDS, PANELS, strict=True)
        if all("npu_chip_info" in expr for expr in expressions(panel))  # Huawei's npu-exporter
    )
    async with serving(tmp_path, watched=False, **all_sections(tmp_path, authority)) as (client, _):
        port = client.port
        assert port is not None
        async with routed(port) as (router_url, router_admin_url):
            targets = {
                "npu_gr": f"127.0.0.1:{port}",
                "npu_gr_router": router_admin_url.removeprefix("http://"),
            }
            deltas = Stream(tmp_path)
            shadow = tmp_path / "shadow"
            change = rows_of("item.weight", 5)
            await asyncio.to_thread(changed, tmp_path / "checkpoint", shadow, change)
            body = {"path": str(shadow), "share": 1.0}
            async with client.post("/v1/models/shadow", json=body) as response:
                assert response.status == 200, await response.text()

            async def send() -> None:
                await load(f"http://127.0.0.1:{port}", LOAD_S, router_url)
                await post(client, await deltas.next(rows_of("item.weight", 3)))

            async with (
                prometheus(tmp_path, targets, free_port(), scrape_s=1.0, evaluate_s=0.5) as url,
                aiohttp.ClientSession() as http,
            ):
                empty = await empty_panels(http, url, send, others)
                text = await (await client.get("/metrics")).read()
                exemplars = await ask(
                    http,
                    url,
                    "query_exemplars",
                    query="npu_gr_request_duration_seconds_bucket",
                    start=str(time.time() - 60),
                    end=str(time.time()),
                )
                rules = await ask(http, url, "rules")
                late = await figures(
                    http, url, 'slo:sli_error:ratio_rate5m{sloth_slo="rank-latency"}', time.time()
                )
                own = json.loads(await (await client.get("/debug/status")).read())
    assert empty <= others, sorted(empty - others)
    worked = dict(
        re.findall(
            r'npu_gr_device_busy_seconds_total\{work="(\w+)"\} '
            r"(\S+)",
            text.decode(),
        )
    )
    assert all(float(worked[work]) > 0 for work in ("rank", "prefill", "generate", "copy")), worked
    assert exemplars
    assert all(
        len(e["labels"]["trace_id"]) == 32 for series in exemplars for e in series["exemplars"]
    )
    broken = [
        rule["name"]
        for group in rules["groups"]
        for rule in group["rules"]
        if rule["health"] == "err"
    ]
    assert not broken
    rank = next(g for g in own["goodput"] if g["kind"] == "rank")
    mine = rank["slow"] / max(rank["good"] + rank["slow"], 1)
    assert late[0] == pytest.approx(mine, abs=0.1)
    done = promtool("check", "metrics", stdin=text)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert not done.stderr, done.stderr.decode()
    assert KINDS.keys() <= {line["kind"] for line in own["goodput"]}
