"""A fleet on one Redis stream of deltas: killed, joined later, and of one number in the end."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.rig import Instance, Scale, each_scale, running
from tests.chaos.test_deltas import BODY, add, chain
from tests.chaos.test_deltas import served as served_by
from tests.history_store.redis_server import redis_path
from tests.server.test_deltas_over_http import Client, post, served
from tests.serving import serving

KILLS = {"short": 1, "long": 20}


async def at(number: int, client: Client, http: aiohttp.ClientSession, other: Instance) -> None:
    """Wait until both serve a delta, and compare their scores."""
    async with asyncio.timeout(30):
        while await served(client) != number:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while (found := await served_by(http, other))[0] != number:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert found[1] == (await scores(client))


async def scores(client: Client) -> Any:
    async with client.post("/v1/rank", json=BODY) as response:
        return (await response.json())["scores"]


@each_scale
async def test_a_fleet_converges_to_one_number(scale: Scale, tmp_path: Path) -> None:
    random_ = random.Random(0)
    files = chain(tmp_path, 1 + 2 * KILLS[scale.name])
    (tmp_path / "redis").mkdir()
    with redis_path(tmp_path / "redis") as path:

        def models(name: str) -> dict[str, str]:
            return {"deltas_stream": f"unix://{path}", "deltas_from": str(tmp_path / name)}

        def instance(name: str) -> Any:
            store = {"path": str(tmp_path / f"{name}.db")}
            checkpoint = str(tmp_path / "v0")
            return serving(
                tmp_path,
                watched=False,
                checkpoint=checkpoint,
                models=models(name),
                history_store=store,
            )

        sets = [f"models.{key}={value}" for key, value in models("killed").items()]
        killed = Instance(tmp_path, tmp_path / "v0", *sets)
        async with (
            running(killed),
            instance("first") as (client, _),
            aiohttp.ClientSession() as http,
        ):
            await post(client, files[0])
            await at(1, client, http, killed)
            number = 1
            for _ in range(KILLS[scale.name]):
                # one that takes a delta is killed, and one that follows
                body = files[number].read_bytes()
                task = asyncio.create_task(add(http, killed, body))
                await asyncio.sleep(random_.uniform(0, 0.03))
                killed.signal(signal.SIGKILL)
                await task
                await killed.ended()
                killed.launch()
                await killed.ready()
                number = await served(client)
                if number % 2:  # it was killed before the stream had it
                    await post(client, files[number])
                number += number % 2
                await at(number, client, http, killed)
                following = asyncio.create_task(post(client, files[number]))
                await asyncio.sleep(random_.uniform(0, 0.5))
                killed.signal(signal.SIGKILL)
                await following
                await killed.ended()
                killed.launch()
                await killed.ready()
                number += 1
                await at(number, client, http, killed)
            # one that joins later serves the same before it is ready
            async with instance("late") as (late, _):
                assert await served(late) == number
                assert await scores(late) == await scores(client)
                answer = await post(late, files[0], 422)
                assert "duplicate" in answer["detail"]
