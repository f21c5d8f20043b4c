"""Through a router every method arrives: requests name their user where routers look for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from npu_gr.client import AsyncClient, Behaviours
from npu_gr.core.settings import from_table
from npu_gr.route.config import RouterConfig
from npu_gr.route.process import routing
from tests.client.shop import NAMES, shop
from tests.ports import free_port

SEEN = Behaviours([NAMES[1], NAMES[2]], ["view", "cart"], [1_700_000_000, 1_700_000_060])


@pytest.mark.parametrize("user", ["u", "é" * 128, "a b/c?d=%41\nz"])
async def test_every_method_arrives(tmp_path: Path, user: str) -> None:
    async with shop(tmp_path) as (url, _):
        host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
        instances = [{"name": "a", "host": host, "port": int(port)}]
        at = free_port()
        table = {
            "port": at,
            "admin_port": free_port(),
            "discovery": {"instances": instances},
            "objective_s": 5.0,
        }
        async with (
            routing(lambda: from_table(table, RouterConfig)),
            AsyncClient(f"http://127.0.0.1:{at}", timeout_s=30.0) as client,
        ):
            async with asyncio.timeout(20):
                while not await client.is_ready():  # noqa: ASYNC110  (what is awaited has no event)
                    await asyncio.sleep(0.01)
            assert (await client.events(user, SEEN)).num_events == 2
            assert (await client.ingest({user: SEEN}))[user].num_events == 4
            assert (await client.signal(user)).history.num_tokens == 4
            assert len((await client.rank(user, NAMES[:5])).names) == 5
            assert len(await client.match(user, num_items=3)) == 3
            assert len(await client.recommend(user, num_items=3, tenant="")) == 3
            assert (await client.items(NAMES[:2]))[1].name == NAMES[1]
            assert (await client.models())[0].name == "tiny"
            async with client.relay(user, history=SEEN) as relay:
                assert len((await relay.rank(NAMES[:5])).names) == 5
            known = await client.user(user, num_events=1)
            assert (known.user_id, known.num_events, len(known.events)) == (user, 4, 1)
            assert (await client.trending(window_s=60.0)).basis == "popular"
            similar = await client.similar(NAMES[1], num_items=2)
            assert (similar.basis, len(similar.items)) == ("vectors", 2)
            assert await client.erase(user) == ()
