"""Through the router and each printed balancer an instance on loopback sees whose page asks, and no admin route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from npu_gr.core.settings import from_table
from npu_gr.fleet.balancers import BALANCERS
from npu_gr.router.config import RouterConfig
from npu_gr.router.run import listening
from tests.fleet.test_balancers import started
from tests.router.chaos import free_port
from tests.server.examples import EXAMPLES
from tests.server.test_addresses import site

SHOP = {"Host": "recommend.shop.example"}
EVIL = {"Origin": "https://evil.example"}


@asynccontextmanager
async def through(name: str, folder: Path, **settings: Any) -> AsyncIterator[Any]:
    """Yields what asks a real instance through a balancer: (method, path, headers) -> status."""
    async with AsyncExitStack() as stack:
        at = await stack.enter_async_context(site(**settings))
        instance = {"name": "i0", "host": "127.0.0.1", "port": int(at.public.rpartition(":")[2])}
        port = free_port()
        table = {"port": port, "admin_port": free_port(), "discovery": {"instances": [instance]}}
        config = from_table({**table, "connect_timeout_s": 5.0, "limits": {"max_connections": 500}}, RouterConfig)
        if name == "router":
            await stack.enter_async_context(listening(config))
        else:
            stack.enter_context(started(name, folder, config))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))

        async def ask(method: str, path: str, **headers: str) -> int:
            body = EXAMPLES["rank"].body if method == "POST" else None
            async with http.request(method, path, json=body, headers={"x-user-id": "u", **headers}) as answer:
                return answer.status

        async with asyncio.timeout(30):
            while True:
                try:
                    if await ask("POST", "/v1/rank") == 200:
                        break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
        yield ask


@pytest.mark.parametrize("name", [*sorted(BALANCERS), "router"])
async def test_a_trusted_balancer_passes_callers_on_and_pages_of_other_sites_are_refused(
    name: str, tmp_path: Path
) -> None:
    async with through(name, tmp_path, trusted_proxies=["127.0.0.1"]) as ask:
        assert await ask("POST", "/v1/rank", **SHOP) == 200
        assert await ask("POST", "/v1/rank", **SHOP, Origin="http://recommend.shop.example") == 200
        assert await ask("POST", "/v1/rank", **SHOP, **EVIL) == 403
        assert await ask("POST", "/v1/rank", **SHOP, **{"Sec-Fetch-Site": "cross-site"}) == 403
        for method, path in (("GET", "/metrics"), ("GET", "/debug/config"), ("POST", "/v1/models/reload")):
            assert await ask(method, path, **SHOP) == 404


@pytest.mark.parametrize("name", [*sorted(BALANCERS), "router"])
async def test_without_keys_and_trust_only_names_of_this_machine_are_served(name: str, tmp_path: Path) -> None:
    async with through(name, tmp_path) as ask:
        assert await ask("POST", "/v1/rank", Host="localhost:8090") == 200
        assert await ask("POST", "/v1/rank", **SHOP) == 403
