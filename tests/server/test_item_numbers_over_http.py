"""A number is the same item as its text by every way in, and is never answered rounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.names import item_id, item_ids
from npu_gr.model.weights import Checkpoint, save
from npu_gr.server.schemas.media import MSGPACK
from tests.models import tiny_model
from tests.serving import serving

# JSON parsers that read numbers as float64 round the second and all that follow
NUMBERS = [42, 2**53 + 1, 1234567890123456789, 7301234567890123457, 2**63 + 7]
NAMES = [*map(str, NUMBERS), *(f"other {row}" for row in range(295))]
ACTION = "view"

Client = TestClient[Any, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    actions = (ACTION, "like", "skip")
    made = Checkpoint(
        model=tiny_model(), item_ids=item_ids(NAMES), name="tiny", action_names=actions
    )
    save(made, tmp_path / "checkpoint")
    ItemNames.make(NAMES).save(tmp_path / "checkpoint")
    return tmp_path


async def post(client: Client, path: str, body: Any, media: str = "application/json") -> str:
    data = msgspec.msgpack.encode(body) if media == MSGPACK else json.dumps(body).encode()
    async with client.post(path, data=data, headers={"Content-Type": media}) as response:
        text = await response.text()
        assert response.status == 200, text
        return text


def asked(items: list[Any], **more: Any) -> dict[str, Any]:
    history = {"items": items, "actions": [ACTION] * len(items), "timestamps": [1] * len(items)}
    return {"user_id": "u", "history": history, "candidates": items, "timestamp": 9, **more}


async def test_a_number_and_its_text_score_alike_and_are_answered_exactly(folder: Path) -> None:
    texts = [str(number) for number in NUMBERS]
    async with serving(folder, relay={"enabled": False}) as (client, _):
        want = json.loads(await post(client, "/v1/rank", asked(texts)))["scores"]
        assert None not in want["click"]
        for media in ("application/json", MSGPACK):
            answer = await post(client, "/v1/rank", asked(NUMBERS, top_k=9), media)
            assert json.loads(answer)["scores"] == want
            top = json.loads(answer, parse_int=float)["top"]  # as JavaScript reads it
            assert sorted(map(str, top)) == sorted(["42.0", *texts[1:]])

        await post(client, "/v1/events", {"user_id": "s", "events": asked(NUMBERS)["history"]})
        stored = {"user_id": "s", "candidates": NUMBERS, "timestamp": 9}
        assert json.loads(await post(client, "/v1/rank", stored))["scores"] == want

        def tensor(name: str, values: list[Any], datatype: str = "BYTES") -> dict[str, Any]:
            return {"name": name, "datatype": datatype, "shape": [len(values)], "data": values}

        inputs = [
            tensor("user_id", ["u"]),
            tensor("candidates", texts),
            tensor("history.items", item_ids(NUMBERS).tolist(), "INT64"),
            tensor("history.actions", [ACTION] * len(texts)),
            tensor("history.timestamps", [1] * len(texts), "INT64"),
            tensor("timestamp", [9], "INT64"),
            tensor("top_k", [9], "INT64"),
        ]
        oip = json.loads(await post(client, "/v2/models/rank/infer", {"inputs": inputs}))
        outputs = {one["name"]: one["data"] for one in oip["outputs"]}
        np.testing.assert_allclose(outputs["scores.click"], want["click"], rtol=1e-6)
        assert sorted(outputs["top.names"]) == sorted(texts)

        async with client.get(f"/v1/items?names={','.join(texts)}") as response:
            found = await response.json()
        assert [one["name"] for one in found] == texts
        async with client.get(f"/v1/items?ids={item_id(NUMBERS[2])}") as response:
            assert (await response.json())[0]["name"] == texts[2]


async def test_a_negative_number_is_no_item(folder: Path) -> None:
    async with serving(folder) as (client, _):
        async with client.post("/v1/rank", json=asked([-1])) as response:
            detail = (await response.json(content_type=None))["detail"]
        assert (response.status, detail) == (422, "history.items[0]: Expected `int` >= 0")


async def test_a_candidate_given_twice_stands_once_in_top(folder: Path) -> None:
    async with serving(folder, relay={"enabled": False}) as (client, _):
        body = asked(["42", "other 1", "other 2"])
        once = json.loads(await post(client, "/v1/rank", {**body, "top_k": 3}))
        body["candidates"] = [42, "other 1", "42", "other 2", 42, "nobody's"]
        for top_k in (1, 2, 3, 9):
            twice = json.loads(await post(client, "/v1/rank", {**body, "top_k": top_k}))
            assert twice["top"] == once["top"][:top_k]
            assert len(twice["scores"]["click"]) == 6
