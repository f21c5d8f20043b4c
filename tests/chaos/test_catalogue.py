"""Every answered change of the catalogue is there after kill -9 in the middle of changes."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.chaos.open_loop import LOST, Ask, OpenLoop, send
from tests.chaos.rig import Instance, Scale, each_scale, running
from tests.decoders import VARIANTS, saved
from tests.server.test_new_items_over_http import GENRES, ITEMS, SEEN, SIDS, asked, make_ranker

PER_S = 20.0  # ranks meanwhile
CHANGES = 12  # between two kills, the last of which is not answered
PATIENT_S = 30.0  # a change waits for the disk, which others use too
KILLS = {"short": 2, "long": 12}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranker that scores new items, a generator and its catalogue."""
    folder = tmp_path_factory.mktemp("site")
    make_ranker(folder / "ranker")
    (folder / "generator").mkdir()
    saved(folder / "generator", **VARIANTS["qwen3 g2 tied"])
    lines = [
        json.dumps({"item_id": item, "sid": sid}) + "\n"
        for item, sid in zip(ITEMS, SIDS.tolist(), strict=True)
    ]
    (folder / "items.jsonl").write_text("".join(lines))
    return folder


class Shop:
    """What the answers have promised: the features of each offered item, by its id."""

    def __init__(self) -> None:
        self.offered: dict[int, str] = dict.fromkeys(ITEMS, "trained")
        self.random = random.Random(0)
        self.next_id = 1000

    def change(self) -> tuple[dict[str, Any], dict[int, str | None]]:
        """Return the body of the next change, and the items that it changes: None = withdrawn."""
        new = [item for item in self.offered if item >= 1000]
        if new and self.random.random() < 0.5:
            item = self.random.choice(new)  # taken off sale, or its first half of a new price
            return {"withdraw": [item]}, {item: None}
        gone = [item for item in range(1000, self.next_id) if item not in self.offered]
        if gone and self.random.random() < 0.5:
            item = self.random.choice(gone)
        else:
            item, self.next_id = self.next_id, self.next_id + 1
        genre = self.random.choice(GENRES)
        added = {"item_id": item, "sid": SIDS[item % len(SIDS)].tolist()}
        return {"add": [{**added, "features": {"genre": [genre]}}]}, {item: genre}

    def apply(self, changed: dict[int, str | None]) -> None:
        for item, genre in changed.items():
            self.offered.pop(item, None)
            if genre is not None:
                self.offered[item] = genre


async def ask(http: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> Any:
    answer = await send(http, url, Ask(path=path, body=body, budget_s=PATIENT_S))
    assert answer.status == 200, answer
    return answer.body


@each_scale
async def test_a_kill_loses_no_change_that_was_answered(
    scale: Scale, site: Path, tmp_path: Path
) -> None:
    shop = Shop()
    settings = {
        "checkpoint": site / "generator",
        "catalogue": site / "items.jsonl",
        "change_log": tmp_path / "log",
        "codes": [8, 8, 8],
        "max_prompt_tokens": 48,
    }
    overrides = [f"generate.{name}={value}" for name, value in settings.items()]
    instance = Instance(tmp_path, site / "ranker", *overrides)

    def make(number: int) -> Ask:
        return Ask(body=asked(SEEN[number % 4 :], candidates=ITEMS[20:40]))

    async with (
        running(instance),
        aiohttp.ClientSession() as http,
        OpenLoop(instance.url, make, PER_S).running() as loop,
    ):
        for _ in range(KILLS[scale.name]):
            await change_and_kill(http, instance, shop)
            await check(http, instance, shop)
        instance.signal(signal.SIGTERM)  # an orderly restart keeps the changes too
        assert await instance.ended() == 0
        instance.launch()
        await instance.ready()
        await check(http, instance, shop)
        healed = await loop.over(1.0)
    assert set(healed.statuses) <= {200, 429}, healed.failed[:3]
    assert healed.statuses[200]


async def change_and_kill(http: aiohttp.ClientSession, instance: Instance, shop: Shop) -> None:
    """Change one after the other, kill the process in the middle of the last one, start again."""
    for _ in range(CHANGES - 1):
        body, changed = shop.change()
        await ask(http, instance.admin_url, "/v1/catalog/items", body)
        shop.apply(changed)
    body, changed = shop.change()
    last = Ask(path="/v1/catalog/items", body=body, budget_s=PATIENT_S)
    task = asyncio.create_task(send(http, instance.admin_url, last))
    await asyncio.sleep(shop.random.uniform(0, 0.03))
    instance.signal(signal.SIGKILL)
    answer = await task
    await instance.ended()
    assert answer.status in (LOST, 200), answer
    instance.launch()
    await instance.ready()
    if answer.status == 200 or await is_made(http, instance, changed):
        shop.apply(changed)


async def offered(http: aiohttp.ClientSession, instance: Instance) -> set[int]:
    body = {**asked(SEEN), "num_items": 500, "beam_width": 512, "exclude_seen": False}
    del body["timestamp"]
    answer = await ask(http, instance.url, "/v1/generate", body)
    return set(answer["items"])


async def is_made(
    http: aiohttp.ClientSession, instance: Instance, changed: dict[int, str | None]
) -> bool:
    """Whether the change that was not answered is in the log: it may be."""
    found = await offered(http, instance)
    return all((item in found) == (genre is not None) for item, genre in changed.items())


async def check(http: aiohttp.ClientSession, instance: Instance, shop: Shop) -> None:
    """What was added is offered and scored, what was withdrawn is not, and its features count."""
    assert await offered(http, instance) == set(shop.offered)
    new = {item: genre for item, genre in shop.offered.items() if item >= 1000}
    ranked = await ask(http, instance.url, "/v1/rank", asked(SEEN, candidates=[*new]))
    assert ranked["unknown_candidates"] == 0
    # items of one semantic ID and genre have one vector
    by_content: dict[Any, set[float]] = {}
    for (item, genre), score in zip(new.items(), ranked["scores"]["click"], strict=True):
        by_content.setdefault((item % len(SIDS), genre), set()).add(round(score, 4))
    assert all(len(scores) == 1 for scores in by_content.values())
