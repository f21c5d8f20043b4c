"""The key of the items' ids: every way in has it, and parts with different keys are refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from npu_gr.catalogue.names import ItemNames
from npu_gr.client import AsyncClient, Behaviours
from npu_gr.core.errors import ConfigError, Unprocessable
from npu_gr.core.history import UserKey
from npu_gr.core.names import item_ids, key_fingerprint
from npu_gr.replay.plan import ReplayOptions
from npu_gr.replay.run import replay
from npu_gr.service.app import instance
from npu_gr.tools.consume_message import Fields, read_event
from npu_gr.tools.ingest import ServiceWriter, Target, open_target
from npu_gr.vector_search.vectors import save as save_vectors
from tests.client.shop import KEY, NAMES, shop
from tests.server.test_names_over_http import write
from tests.serving import make_config
from tests.tools.test_consumer import Message
from tests.vector_search.vectors import make_vectors

AT_S = 1_700_000_000
SEEN = [NAMES[row] for row in (1, 4, 9, 30, 31)] + ["not in the catalogue"]


def messages() -> list[Message]:
    rows = [{"user": "kafka", "item": item, "event": "view", "time": AT_S} for item in SEEN]
    return [
        Message("t", 0, place, AT_S * 1000, None, json.dumps(row).encode())
        for place, row in enumerate(rows)
    ]


async def consume(target: Target) -> None:
    writes = [read_event(one, Fields(), target.model) for one in messages()]
    await target.store.write_many(writes)


async def test_every_way_in_has_the_key(tmp_path: Path) -> None:
    seen = Behaviours(SEEN, ["view"] * len(SEEN), [AT_S] * len(SEEN))
    async with (
        shop(tmp_path) as (url, service),
        AsyncClient(url, timeout_s=30.0) as client,
        aiohttp.ClientSession() as http,
    ):
        await client.events("append", seen)
        await consume(Target(writer := ServiceWriter(http, url, 1.0), await writer.model(), "it"))
        for user in ("append", "kafka"):
            store = service.parts.histories.store
            assert store is not None
            stored = await store.read(UserKey("", user), 10)
            assert stored.events.items.tolist() == item_ids(SEEN, KEY).tolist()
        found = await client.rank("other", SEEN[:5], history=seen, timestamp=AT_S, top_k=5)
        by_store = await client.rank("append", SEEN[:5], timestamp=AT_S, top_k=5)
        assert [one.name for one in found.top] == [one.name for one in by_store.top]
        assert {*SEEN[:5]} == {one.name for one in found.top}
        with pytest.raises(Unprocessable, match=r"history\.items: index 0: a name of 0 bytes"):
            await client.rank("u", ["a"], history=Behaviours([" "], ["view"], [AT_S]))
        async with open_target(None, url, None, 1.0, KEY):
            pass
        with pytest.raises(ConfigError, match="another key than those of the log"):
            async with open_target(None, url, None, 1.0, b"o" * 16):
                pass


async def test_a_replay_reads_the_names_in_answers_by_the_key(tmp_path: Path) -> None:
    record = {"folder": str(tmp_path / "traffic"), "enabled": True, "suffix": ".jsonl"}
    async with shop(tmp_path, record) as (url, _), aiohttp.ClientSession() as http:
        asked = {"user_id": "u", "num_items": 5, "history": {}}
        asked["history"] = {"items": SEEN, "actions": ["view"] * 6, "timestamps": [AT_S] * 6}
        headers = {"X-Request-Timeout-Ms": "20000"}
        async with http.post(f"{url}v1/match", json=asked, headers=headers) as answer:
            assert any(isinstance(name, str) for name in (await answer.json())["items"])
        async with http.delete(f"{url}debug/record") as answer:  # and the file is complete
            assert answer.status == 200
        found = []
        async with asyncio.timeout(10):
            while not (found := list((tmp_path / "traffic").glob("*.jsonl"))):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        same = {}
        for key in (KEY, b""):
            options = ReplayOptions(base_url=url, item_key=key, timeout_s=20.0)
            report = await replay(found[0], options)
            assert "item_key" not in report.settings
            same[key] = report.logged_digests
    assert same == {KEY: {"equal": 1}, b"": {"different": 1}}


async def test_a_store_and_its_loads_have_the_key_of_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint")
    config = make_config(tmp_path)
    async with open_target(config, None, None, 1.0, KEY) as target:
        assert target.model.item_key == KEY
        await consume(target)
    with pytest.raises(ConfigError, match="another key than those of the log"):
        async with open_target(config, None, None, 1.0, b"o" * 16):
            pass
    names = ItemNames.load(tmp_path / "checkpoint")
    assert names is not None
    ItemNames(names.ids, names._names, names._titles, b"o" * 16).save(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=f"items have the key {key_fingerprint(KEY)}"):
        async with instance(config):
            pass


async def test_parts_with_different_keys_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint")
    save_vectors(make_vectors(20), tmp_path / "vectors")
    ItemNames.make([NAMES[1]], [], b"o" * 16).save(tmp_path / "vectors")
    sections: dict[str, Any] = {"match": {"vectors": str(tmp_path / "vectors")}}
    with pytest.raises(ConfigError, match=r"match\.vectors: its items have ids of the key"):
        async with instance(make_config(tmp_path, **sections)):
            pass
