"""A real Prometheus scrapes a loaded service, and every dashboard expression has data.

Also promtool's `check metrics` on the endpoint, the exemplars, and the recordings against the
service's own figures.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from npu_gr.core.history import UserKey
from npu_gr.core.kinds import KINDS
from npu_gr.tools.monitor import prometheus
from tests.certificates import Authority
from tests.features_of import every_feature
from tests.metrics.test_dashboards import IDS, PANELS, ROUTER, expressions, plain
from tests.metrics.test_rules import RULES, promtool
from tests.models import events
from tests.server.test_generate_over_http import HISTORY, section
from tests.server.test_match_over_http import section as match_section
from tests.serving import FIRST_ID, columns, serving, write_checkpoint
from tests.vector_search.vectors import KNOWN

pytestmark = pytest.mark.prometheus
LOAD_S = 9.0
WINDOW = "8s"  # of rates


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def load(url: str) -> None:
    """Send every kind of request: known and new users, some without a signal or a budget.

    Of every kind some requests cannot be read, so that the panels of rejections have figures too.
    """
    patient = {"X-Request-Timeout-Ms": "20000"}  # a busy machine
    async with aiohttp.ClientSession(headers=patient) as http:
        ends_at, turn = time.monotonic() + LOAD_S, 0
        while time.monotonic() < ends_at:
            turn += 1
            seed = turn if turn % 3 else turn % 40
            body: dict[str, Any] = {
                "user_id": f"u{seed}",
                "history": columns(events(40, seed=seed)),
            }
            if turn % 4:
                async with http.post(f"{url}/v1/signal", json=body) as answer:
                    assert answer.status == 202
            await asyncio.sleep(0.005)
            rank: dict[str, Any] = {**body, "candidates": [FIRST_ID, 7]}
            async with http.post(f"{url}/v1/rank", json=rank) as answer:
                assert answer.status == 200
            stored = {"user_id": f"u{seed}", "events": columns(events(2, seed=seed))}
            async with http.post(f"{url}/v1/events", json=stored) as answer:
                assert answer.status == 200
            many = {"users": [{"user_id": f"v{seed}", "events": columns(events(2, seed=seed))}]}
            async with http.post(f"{url}/v1/events/bulk", json=many) as answer:
                assert answer.status == 200
            async with http.post(
                f"{url}/v1/match", json={"user_id": KNOWN, "num_items": 3}
            ) as answer:
                assert answer.status == 200
            if turn % 5 == 0:
                for kind in KINDS.values():
                    # longer than a user's id may be
                    path = kind.path.replace("{user_id}", "x" * 1000)
                    async with http.request(kind.method, url + path, data=b"{") as answer:
                        assert 400 <= answer.status < 500, (kind.name, answer.status)
                async with http.delete(f"{url}/v1/users/u{seed}") as answer:
                    assert answer.status == 204
                late = {"X-Request-Timeout-Ms": "0"}
                async with http.post(f"{url}/v1/rank", json=rank, headers=late) as answer:
                    assert answer.status == 504
                body = {"user_id": f"u{seed}", "history": HISTORY, "num_items": 5}
                async with http.post(f"{url}/v1/generate", json=body) as answer:
                    assert answer.status == 200
                unknown = {
                    "user_id": "n",
                    "history": {"items": [], "actions": [], "timestamps": []},
                }
                for each in (body, unknown):  # whom no source knows anything for
                    async with http.post(f"{url}/v1/recommend", json=each) as answer:
                        assert answer.status == 200


def of_user(user: UserKey, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
    return dict.fromkeys(names)


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


async def test_every_expression_returns_figures(tmp_path: Path, authority: Authority) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus (Debian: prometheus)")
    sections: dict[str, Any] = {
        "generate": section(tmp_path),
        "service": {"selfcheck_ratio": 0.2},
        "kv_cache": {"hbm_bytes": 300_000},
    }
    # the ranker knows none of them
    sections["recommend"] = {"sources": {"generate": 20}, "min_coverage": 0}
    sections["match"] = match_section(tmp_path)
    write_checkpoint(tmp_path / "checkpoint", features=every_feature(("user",)))
    sections["feature_store"] = {"entry": f"{__name__}:of_user"}
    pair = authority.issue("127.0.0.1")
    sections["server"] = {"tls": {"certificate": str(pair.certificate), "key": str(pair.key)}}
    async with serving(tmp_path, watched=False, **sections) as (client, _):
        target = str(client.make_url("")).removeprefix("http://").rstrip("/")
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(RULES))
        async with (
            prometheus(tmp_path, target, free_port(), scrape_s=1.0, evaluate_s=0.5) as url,
            aiohttp.ClientSession() as http,
        ):
            empty: set[str] = set()
            # a scrape that was late on a busy machine leaves too few points behind
            for _ in range(5):
                await load(f"http://{target}")
                await asyncio.sleep(1.1)  # the last scrape
                instant = time.time()
                found = {
                    (name, expr): await figures(http, url, expr, instant)
                    for name, (_, panel) in zip(IDS, PANELS, strict=True)
                    for expr in expressions(panel)
                    if ROUTER not in expr
                }
                empty = {
                    name
                    for (name, _), values in found.items()
                    if not any(map(math.isfinite, values))
                }
                if not empty:
                    break
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
    assert not empty
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
