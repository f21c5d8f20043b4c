"""Instances under load, behind a router, for tests of what operators see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from npu_gr.core.history import UserKey
from npu_gr.core.kinds import KINDS
from npu_gr.core.settings import from_table
from npu_gr.route.config import RouterConfig
from npu_gr.route.process import routing
from npu_gr.server.run import serve
from npu_gr.service.app import instance
from tests.certificates import Authority
from tests.features_of import every_feature
from tests.models import events
from tests.route.fake import Fake, table_of, until
from tests.server.test_generate_over_http import HISTORY, section
from tests.server.test_match_over_http import section as match_section
from tests.serving import FIRST_ID, columns, make_config, write_checkpoint
from tests.vector_search.vectors import KNOWN

PATIENT = {"X-Request-Timeout-Ms": "20000"}  # a busy machine
UNKNOWN = {"user_id": "n", "history": {"items": [], "actions": [], "timestamps": []}}


def of_user(user: UserKey, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
    return dict.fromkeys(names)


def demo_sections(folder: Path) -> dict[str, Any]:
    """The sections that a site of `npu-gr train all` has: all kinds, and nothing around them."""
    return {
        "generate": section(folder),
        "match": match_section(folder),
        # the ranker knows none of the items
        "recommend": {"sources": {"generate": 20}, "min_coverage": 0},
        "service": {"selfcheck_ratio": 0.2},
        "kv_cache": {"hbm_bytes": 300_000},  # for a few users only, as in the demo
    }


def all_sections(folder: Path, authority: Authority) -> dict[str, Any]:
    """Those, a source of features, and TLS."""
    if not (folder / "checkpoint").exists():
        write_checkpoint(folder / "checkpoint", features=every_feature(("user",)))
    pair = authority.issue("127.0.0.1")
    return {
        **demo_sections(folder),
        "record": {"folder": str(folder / "traffic"), "enabled": True},
        "feature_store": {"entry": f"{__name__}:of_user"},
        "server": {"tls": {"certificate": str(pair.certificate), "key": str(pair.key)}},
    }


class Caller:
    """Sends requests that must be answered with 2xx."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http = http
        self.url = url

    async def ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        async with self.http.request(method, f"{self.url}{path}", json=body) as answer:
            assert answer.status < 300, (path, answer.status, await answer.text())

    async def of_the_demo(self, turn: int) -> None:
        """Send what a replay of the demo sends: signals, ranks, events; then recommends."""
        seed = turn if turn % 3 else turn % 40  # known users, and new ones
        history = columns(events(40, seed=seed))
        body: dict[str, Any] = {"user_id": f"u{seed}", "history": history}
        if turn % 4:
            await self.ask("/v1/signal", body)
        await asyncio.sleep(0.005)
        await self.ask("/v1/rank", {**body, "candidates": [FIRST_ID, 7]})
        stored = {"user_id": f"u{seed}", "events": columns(events(2, seed=seed))}
        await self.ask("/v1/events", stored)
        if turn % 5 == 0:
            asked = {"user_id": f"u{seed}", "history": HISTORY, "num_items": 5}
            await self.ask("/v1/recommend", asked)

    async def of_the_others(self, turn: int) -> None:
        """Send the kinds that the demo does not, and some of each that cannot be answered."""
        many = {"users": [{"user_id": f"v{turn}", "events": columns(events(2, seed=turn))}]}
        await self.ask("/v1/events/bulk", many)
        await self.ask("/v1/match", {"user_id": KNOWN, "num_items": 3})
        if turn % 5:
            return
        for kind in KINDS.values():
            path = kind.path.replace("{user_id}", "x" * 1000)  # longer than a user's id may be
            async with self.http.request(kind.method, self.url + path, data=b"{") as answer:
                assert 400 <= answer.status < 500, (kind.name, answer.status)
        await self.ask(f"/v1/users/u{turn}", method="DELETE")
        rank = {"user_id": "u1", "history": HISTORY, "candidates": [FIRST_ID]}
        late = {"X-Request-Timeout-Ms": "0"}
        async with self.http.post(f"{self.url}/v1/rank", json=rank, headers=late) as answer:
            assert answer.status == 504
        asked = {"user_id": f"u{turn}", "history": HISTORY, "num_items": 5}
        await self.ask("/v1/generate", asked)
        await self.ask("/v1/recommend", UNKNOWN)  # no source knows anything for this user


async def load(url: str, for_s: float, router_url: str | None = None) -> None:
    """Send the demo's requests for some seconds.

    Args:
        url: Base URL of an instance.
        for_s: Seconds.
        router_url: Base URL of a router in front of it. With it all kinds of requests are sent.
    """
    async with aiohttp.ClientSession(headers=PATIENT) as http:
        caller = Caller(http, url)
        ends_at = time.monotonic() + for_s
        turn = 0
        while time.monotonic() < ends_at:
            turn += 1
            await caller.of_the_demo(turn)
            if router_url is not None:
                await caller.of_the_others(turn)
                await Caller(http, router_url).of_the_demo(turn)


@asynccontextmanager
async def routed(port: int) -> AsyncIterator[tuple[str, str]]:
    """Run a router in front of an instance; yields its public and its admin URL."""
    behind = Fake("gr-0")
    behind.port = port
    table = table_of([behind])
    async with routing(lambda: from_table(table, RouterConfig)), aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{table['port']}"

        async def is_ready() -> bool:
            with suppress(aiohttp.ClientError):
                async with http.get(f"{url}/readyz") as answer:
                    return answer.status == 200
            return False

        await until(is_ready)
        yield url, f"http://127.0.0.1:{table['admin_port']}"


@asynccontextmanager
async def listening(folder: Path, **sections: Any) -> AsyncIterator[tuple[int, int]]:
    """Run an instance with its two addresses; yields their ports."""
    ports: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

    async def on_drain() -> None:
        return None

    if not (folder / "checkpoint").exists():
        write_checkpoint(folder / "checkpoint")
    config = make_config(folder, **sections)
    async with instance(config) as (app, _):
        serving = asyncio.create_task(
            serve(
                app,
                config.server,
                on_drain=on_drain,
                on_listening=lambda port, admin_port: ports.set_result((port, admin_port)),
            )
        )
        try:
            yield await asyncio.wait_for(ports, 30)
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
