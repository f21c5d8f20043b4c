"""A delta is served after kill -9 in the middle of it, or the one before is: never both."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp
import torch

from npu_gr.model.weights import load, save
from tests.chaos.open_loop import LOST
from tests.chaos.rig import Instance, Scale, each_scale, running
from tests.server.test_deltas_over_http import delta_file
from tests.serving import FIRST_ID, write_checkpoint

DELTAS = 3  # between two kills, the last of which is not answered
KILLS = {"short": 1, "long": 200}
BODY = {
    "user_id": "u",
    "history": {
        "items": [FIRST_ID + row for row in range(40)],
        "actions": [1 + row % 3 for row in range(40)],
        "timestamps": [1_700_000_000 + 60 * row for row in range(40)],
    },
    "candidates": [FIRST_ID + row for row in range(100, 120)],
    "timestamp": 1_700_010_000,
}


def chain(folder: Path, number: int) -> list[Path]:
    """Write checkpoints that differ everywhere, and the deltas from one to the next."""
    write_checkpoint(folder / "v0")
    files = []
    for each in range(1, number + 1):
        old, new = folder / f"v{each - 1}", folder / f"v{each}"
        made = load(old)
        with torch.no_grad():
            for tensor in made.model.parameters():
                tensor.mul_(1.1 if each % 2 else 0.9)  # 600 of them stay finite
        save(made, new)
        files.append(delta_file(folder, old, new, each))
    return files


async def add(http: aiohttp.ClientSession, instance: Instance, body: bytes) -> int:
    """Return the status of a delta; `LOST` without an answer."""
    try:
        headers = {"Content-Type": "application/octet-stream"}
        url = f"{instance.admin_url}/v1/models/delta"
        async with http.post(url, data=body, headers=headers) as response:
            return response.status
    except aiohttp.ClientError:
        return LOST


async def served(http: aiohttp.ClientSession, instance: Instance) -> tuple[int, Any]:
    """Return the number of the served delta, and scores."""
    async with http.get(f"{instance.url}/v1/models") as response:
        number: int = (await response.json())["models"][0]["delta"]["sequence"]
    async with http.post(f"{instance.url}/v1/rank", json=BODY) as response:
        assert response.status == 200, await response.text()
        return number, (await response.json())["scores"]


@each_scale
async def test_a_kill_serves_the_old_delta_or_the_new_one(scale: Scale, tmp_path: Path) -> None:
    random_ = random.Random(0)
    bodies = [path.read_bytes() for path in chain(tmp_path, DELTAS * KILLS[scale.name])]
    instance = Instance(tmp_path, tmp_path / "v0")
    want: dict[int, Any] = {}
    number = 0
    async with running(instance), aiohttp.ClientSession() as http:
        want[0] = (await served(http, instance))[1]
        for _ in range(KILLS[scale.name]):
            for _ in range(DELTAS - 1):
                assert await add(http, instance, bodies[number]) == 200
                number += 1
                found, want[number] = await served(http, instance)
                assert found == number
            task = asyncio.create_task(add(http, instance, bodies[number]))
            await asyncio.sleep(random_.uniform(0, 0.03))
            instance.signal(signal.SIGKILL)
            status = await task
            await instance.ended()
            assert status in (LOST, 200)
            instance.launch()
            await instance.ready()
            found, scores = await served(http, instance)
            assert found in ({number + 1} if status == 200 else {number, number + 1})
            if found == number:
                assert scores == want[number]
                assert await add(http, instance, bodies[number]) == 200
                scores = (await served(http, instance))[1]
            number += 1
            want[number] = scores
            assert want[number] != want[number - 1]
