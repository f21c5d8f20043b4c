"""Features of events give the same bits whichever way they came.

They come in a request, by a base, or kept by the store.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from npu_gr.client import AsyncClient, Behaviours
from npu_gr.core.feature_schema.columns import as_columns
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.replay.files import read
from npu_gr.replay.requests import encode
from npu_gr.server.schemas.media import MSGPACK
from tests.features_of import random_features, values
from tests.models import events
from tests.ports import free_port
from tests.server.grpc.rig import INFER, call
from tests.server.oip.inputs import Input, infer_message, inputs_of
from tests.serving import FIRST_ID, columns, serving, write_checkpoint

SHOWN_AT = 1_700_000_000
CANDIDATES = [FIRST_ID + 3, FIRST_ID + 5, FIRST_ID + 7]
Cells = dict[str, list[Any]]
Send = Callable[[str, dict[str, Any]], Awaitable[Any]]


class Sent:
    """Behaviours of a random schema, as lists and as raw columns."""

    def __init__(self, features: tuple[Feature, ...], num: int, seed: int) -> None:
        self.plain: dict[str, Any] = columns(events(num, seed))
        self.cells = values(features, "event", num, np.random.default_rng(seed))
        known = {one.name: one for one in features if one.of == "event"}
        self.columns = as_columns(known, self.cells, num)
        self.num = num

    def lists(self, begin: int = 0, end: int | None = None) -> dict[str, Any]:
        part = slice(begin, end)
        of_events = {name: cells[part] for name, cells in self.cells.items()}
        return {
            **{name: column[part] for name, column in self.plain.items()},
            "features": of_events,
        }

    def raw(self, begin: int = 0, end: int | None = None) -> dict[str, Any]:
        of_events = self.columns.take(slice(begin, end)).given
        lists = self.lists(begin, end)
        return {**lists, "features": {name: column.tobytes() for name, column in of_events.items()}}


@pytest.fixture(scope="module")
def features() -> tuple[Feature, ...]:
    """Several of events, and none of another kind, so that every way may say all."""
    random = np.random.default_rng(5)
    found: list[Feature] = []
    while len(found) < 4:
        found += [one for one in random_features(random) if one.of == "event"]
    return tuple(msgspec.structs.replace(one, name=f"e{place}") for place, one in enumerate(found))


@pytest.fixture
async def http(tmp_path: Path, features: tuple[Feature, ...]) -> AsyncIterator[tuple[Any, Any]]:
    write_checkpoint(tmp_path / "checkpoint", features=features)
    port = free_port()
    async with (
        serving(tmp_path, server={"grpc_port": port}) as (client, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield client, channel


def rank(user: str, **more: Any) -> dict[str, Any]:
    return {"user_id": user, "candidates": CANDIDATES, "timestamp": SHOWN_AT, **more}


async def test_every_way_gives_the_same_bits(
    http: tuple[Any, Any], features: tuple[Feature, ...]
) -> None:
    client, channel = http
    sent = Sent(features, 31, 1)
    cut = 9

    async def json_call(route: str, body: dict[str, Any]) -> Any:
        async with client.post(route, json=body) as answer:
            told = await answer.json()
            assert answer.status in (200, 202), told
            return told

    async def packed_call(route: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": MSGPACK}
        async with client.post(route, data=msgspec.msgpack.encode(body), headers=headers) as answer:
            told = await answer.json()
            assert answer.status in (200, 202), told
            return told

    want = await json_call("/v1/rank", rank("whole", history=sent.lists()))
    bare = {name: column for name, column in sent.lists().items() if name != "features"}
    assert (await json_call("/v1/rank", rank("bare", history=bare)))["scores"] != want["scores"]

    def same(told: Any) -> None:
        assert told["scores"] == want["scores"]
        assert told["history"]["fingerprint"] == want["history"]["fingerprint"]

    ways: list[tuple[Send, Callable[..., dict[str, Any]]]] = [
        (json_call, sent.lists),
        (packed_call, sent.raw),
    ]
    for place, (send, part) in enumerate(ways):
        same(await send("/v1/rank", rank(f"raw{place}", history=part())))
        first = await send("/v1/signal", {"user_id": f"base{place}", "history": part(0, cut)})
        base = first["history"]["fingerprint"]
        same(await send("/v1/rank", rank(f"base{place}", base=base, history=part(cut))))
        for begin, end in ((0, cut), (cut, None)):
            await send("/v1/events", {"user_id": f"stored{place}", "events": part(begin, end)})
        await send("/v1/signal", {"user_id": f"stored{place}"})
        same(await send("/v1/rank", rank(f"stored{place}")))
        users = [
            {"user_id": f"merged{place}", "events": part(*ends)}
            for ends in ((cut, None), (0, cut + 3))
        ]
        told = await send("/v1/events/bulk", {"mode": "merge", "users": users})
        assert (told["num_added"], told["num_failed"]) == (sent.num, 0)
        same(await send("/v1/rank", rank(f"merged{place}")))

    inputs = [
        *inputs_of(rank("oip", history=bare)),
        Input("history.features", "BYTES", [json.dumps(sent.cells)]),
    ]
    told = await call(channel, INFER, infer_message("rank", inputs), "inference.ModelInferResponse")
    raws = dict(zip((one.name for one in told.outputs), told.raw_output_contents, strict=True))
    for task, scores in want["scores"].items():
        assert np.frombuffer(raws[f"scores.{task}"], "<f4").tolist() == scores
    async with AsyncClient(str(client.make_url("/")), timeout_s=30.0) as caller:
        behaviours = Behaviours(bare["items"], bare["actions"], bare["timestamps"], sent.cells)
        await caller.events("client", behaviours)
        ranked = await caller.rank("client", CANDIDATES, timestamp=SHOWN_AT)
        assert {task: scores.tolist() for task, scores in ranked.scores.items()} == want["scores"]


async def test_recorded_events_fill_another_store_the_same(
    tmp_path: Path, features: tuple[Feature, ...]
) -> None:
    write_checkpoint(tmp_path / "checkpoint", features=features)
    record = {
        "folder": str(tmp_path / "traffic"),
        "enabled": True,
        "suffix": ".jsonl",
        "users": "clear",
    }
    async with serving(tmp_path, record=record) as (client, _):
        given: Any = {"user_id": "a", "events": Sent(features, 15, 8).lists()}
        assert (await client.post("/v1/events", json=given)).status == 200
        want = await (await client.post("/v1/rank", json=rank("a"))).json()
    (log,) = (tmp_path / "traffic").glob("traffic-*")
    async with serving(
        tmp_path, watched=False, history_store={"path": str(tmp_path / "other.db")}
    ) as (
        client,
        _,
    ):
        headers = {"Content-Type": "application/json"}
        kept, ranked = [
            await (await client.post(f"/v1/{one.kind}", data=encode(one), headers=headers)).json()
            for one in read(log)
        ]
        assert kept["num_events"] == 15
        assert ranked["scores"] == want["scores"]


HOSTILE: tuple[tuple[int, Cells, str], ...] = (
    (422, {"colour": [1] * 4}, "events.features.colour: unknown feature; the model has e0"),
    (422, {"e0": [1] * 3}, "events.features.e0: 3 entries, expected 4"),
    (422, {"e0": [{}] * 4}, "events.features[...]"),
    (422, {"e0": ["x" * 2000] * 4}, "events.features[...][0]: Expected `str` of length <= 1024"),
    (422, {"e0": ["x"] * 4}, "events.features.e0: row 0 is a text"),
    (
        422,
        {f"e{place}": [1] * 4 for place in range(300)},
        "events.features: Expected `object` of length <= 256",
    ),
    (413, {f"e{place}": [1] * 99_999 for place in range(3)}, "the limit is 262144"),
)


async def test_what_the_store_cannot_keep_is_named(http: tuple[Any, Any]) -> None:
    client, _ = http
    for status, given, said in HOSTILE:
        body = {"user_id": "bad", "events": {**columns(events(4)), "features": given}}
        async with client.post("/v1/events", json=body) as answer:
            told = await answer.json()
            assert answer.status == status, told
            assert said in told["detail"], told
    wide: dict[str, Any] = {**columns(events(4)), "features": {"e0": [1.0, float("inf"), 2.0, 3.0]}}
    packed = msgspec.msgpack.encode({"user_id": "bad", "events": wide})
    async with client.post("/v1/events", data=packed, headers={"Content-Type": MSGPACK}) as answer:
        assert "out of the range of float32" in (await answer.json())["detail"]
    async with client.post(
        "/v1/events", json={"user_id": "bad", "events": columns(events(1))}
    ) as answer:
        assert (await answer.json())["num_events"] == 1, "nothing of all that was kept"
