"""Features over HTTP: every form gives the same bits.

What does not fit is rejected by name, what is missing is told.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from npu_gr.client import AsyncClient, Behaviours, Features
from npu_gr.core.errors import RequestError
from npu_gr.core.feature_schema.encode import hash_names
from npu_gr.handlers.service import Service
from tests.features_of import every_feature
from tests.models import events
from tests.serving import FIRST_ID, columns, serving, write_checkpoint

SHOWN_AT = 1_700_000_000
NUM = 12
HISTORY = columns(events(NUM))
CANDIDATES = [FIRST_ID + 3, FIRST_ID + 5, FIRST_ID + 7]
USER: dict[str, Any] = {"country": "fr", "tags": ["a", "b"], "age": 1.5, "spent": 3}
REQUEST: dict[str, Any] = {"country": "de", "spent": -1.25}
CROSS: dict[str, list[Any]] = {
    "country": ["fr", None, "xx"],
    "tags": [["a"], [], ["b", "c"]],
    "spent": [1.5, None, 0.25],
}
SURFACE: dict[str, list[Any]] = {"country": ["fr", "de", None] * 4, "spent": [0.5] * NUM}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("features")
    write_checkpoint(made / "checkpoint", features=every_feature(), retrieval=True)
    return made


@pytest.fixture
async def http(folder: Path) -> AsyncIterator[tuple[Any, Service]]:
    async with serving(folder, recommend={"sources": {"shared_encoder": 20}}) as (client, service):
        yield client, service


def body(**features: Any) -> dict[str, Any]:
    given = {"user": USER, "request": REQUEST, "cross": CROSS} | features
    return {
        "user_id": "u",
        "candidates": CANDIDATES,
        "history": {**HISTORY, "features": SURFACE},
        "timestamp": SHOWN_AT,
        "features": given,
    }


def raw(column: list[Any], kind: str, width: int = 1) -> bytes:
    if kind == "number":
        return np.array([np.nan if one is None else one for one in column], "<f4").tobytes()
    rows = [[] if one is None else one if isinstance(one, list) else [one] for one in column]
    return hash_names(rows, width).astype("<u8").tobytes()


def in_raw(table: dict[str, list[Any]]) -> dict[str, bytes]:
    kinds = {"country": ("name", 1), "tags": ("name", 3), "spent": ("number", 1)}
    return {name: raw(column, *kinds[name]) for name, column in table.items()}


async def test_every_form_gives_the_same_bits(http: tuple[Any, Service]) -> None:
    client, _ = http
    want = await (await client.post("/v1/rank", json=body())).json()
    lacking = ["event.tags", "event.age", "request.tags", "request.age", "cross.age"]
    assert want["missing_features"] == lacking
    in_bytes = body(cross=in_raw(CROSS))
    in_bytes["history"]["features"] = in_raw(SURFACE)
    sent = await client.post(
        "/v1/rank", data=msgspec.json.encode(in_bytes), headers={"Content-Type": "application/json"}
    )
    assert (await sent.json())["scores"] == want["scores"]
    for given in (body(), in_bytes):
        data = msgspec.msgpack.encode(given)
        sent = await client.post(
            "/v1/rank", data=data, headers={"Content-Type": "application/msgpack"}
        )
        assert (await sent.json())["scores"] == want["scores"]
    bare = body()
    del bare["features"]["cross"]
    assert (await (await client.post("/v1/rank", json=bare)).json())["scores"] != want["scores"]


async def test_the_client_sends_them(http: tuple[Any, Service]) -> None:
    client, service = http
    want = await (await client.post("/v1/rank", json=body())).json()
    history = Behaviours(HISTORY["items"], HISTORY["actions"], HISTORY["timestamps"], SURFACE)
    cross: dict[str, Any] = {**CROSS, "spent": np.array([1.5, np.nan, 0.25])}
    late = Features(request={**REQUEST, "spent": float(np.float32(-1.25))}, cross=cross)
    async with AsyncClient(str(client.make_url("/")), timeout_s=30.0) as caller:
        both = Features(user=USER, request=late.request, cross=late.cross)
        ranked = await caller.rank(
            "u", CANDIDATES, history=history, timestamp=SHOWN_AT, features=both
        )
        assert ranked.scores["click"].tolist() == want["scores"]["click"]
        async with caller.relay("v", history=history, features=Features(user=USER)) as relay:
            again = await relay.rank(CANDIDATES, timestamp=SHOWN_AT, features=late)
            assert again.scores["click"].tolist() == want["scores"]["click"]
            while relay.signalled is None:
                await relay.rank(CANDIDATES)
            await service.versions.ranker().relay.settled()
            again = await relay.rank(CANDIDATES, timestamp=SHOWN_AT, features=late)
            assert again.outcome == "hbm_hit"
            assert again.scores["click"].tolist() == want["scores"]["click"]
        found = await caller.recommend(
            "u", history=history, timestamp=SHOWN_AT, features=Features(user=USER)
        )
        assert len(found) == 10
        with pytest.raises(
            RequestError,
            match=r"features\.cross: this call takes only user, request",
        ):
            await caller.recommend("u", history=history, features=both)
        (model,) = await caller.models()
        assert model.features == every_feature(), "what the model wants is told"


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (
            {"user": {"colour": 1}},
            "features.user.colour: unknown feature; the model has country, tags, age, spent",
        ),
        ({"user": {"age": "old"}}, "features.user.age: row 0 is a text, expected a number"),
        ({"user": {"tags": [*"abcd"]}}, "features.user.tags: row 0 has 4 values, the limit is 3"),
        ({"user": {"age": 1e300}}, "features.user.age: row 0 is out of the range of float32"),
        ({"user": {"age": [1]}}, "features.user.age: row 0 is a list"),
        ({"user": {"age": {"a": 1}}}, "features.user[...]: Expected"),
        (
            {"request": {"country": ["fr", "de"]}},
            "features.request.country: row 0 has 2 values, the limit is 1",
        ),
        ({"cross": {"spent": [1.0]}}, "features.cross.spent: 1 entries, expected 3"),
        (
            {"cross": {"spent": base64.b64encode(b"123").decode()}},
            "features.cross.spent: 3 bytes are not whole rows",
        ),
        (
            {"cross": {"tags": base64.b64encode(bytes(48)).decode()}},
            "features.cross.tags: 2 entries, expected 3",
        ),
        ({"cross": {"spent": [1.0, "x", 2.0]}}, "features.cross.spent: row 1 is a text"),
        ({"cross": {"who": [1, 2, 3]}}, "features.cross.who: unknown feature"),
        ({"events": {}}, "unknown field features.events"),
        (
            {"user": {f"f{i}": 1 for i in range(300)}},
            "features.user: Expected `object` of length <= 256",
        ),
    ],
)
async def test_what_does_not_fit_is_named(
    http: tuple[Any, Service], features: Any, said: str
) -> None:
    client, _ = http
    answer = await client.post("/v1/rank", json=body(**features))
    told = await answer.json()
    assert answer.status == 422, told
    assert said in told["detail"]


async def test_not_a_number_is_missing_and_infinity_is_rejected(
    http: tuple[Any, Service],
) -> None:
    client, _ = http
    headers = {"Content-Type": "application/msgpack"}
    answers = []
    for lost in (None, float("nan"), "NaN", " "):
        given = body(cross={"spent": [1.0, lost, 2.0]})
        answer = await client.post("/v1/rank", data=msgspec.msgpack.encode(given), headers=headers)
        assert answer.status == 200
        answers.append((await answer.json())["scores"])
    assert answers == answers[:1] * 4
    for lost in (np.inf, -np.inf):
        given = body(cross={"spent": np.array([1.0, lost, 2.0], "<f4").tobytes()})
        answer = await client.post("/v1/rank", data=msgspec.msgpack.encode(given), headers=headers)
        assert "features.cross.spent: row 1 is out of the range" in (await answer.json())["detail"]


async def test_the_open_inference_protocol_takes_them_as_json(http: tuple[Any, Service]) -> None:
    client, _ = http
    want = await (await client.post("/v1/rank", json=body())).json()
    parts = {
        "features.cross": CROSS,
        "history.features": SURFACE,
        "features.user": USER,
        "features.request": REQUEST,
    }
    inputs = [
        {"name": "candidates", "datatype": "INT64", "shape": [len(CANDIDATES)], "data": CANDIDATES}
    ]
    for name, kind in (("items", "INT64"), ("timestamps", "INT64")):
        inputs.append(
            {"name": f"history.{name}", "datatype": kind, "shape": [NUM], "data": HISTORY[name]}
        )
    names = [str(one) for one in HISTORY["actions"]]
    inputs.append({"name": "history.actions", "datatype": "BYTES", "shape": [NUM], "data": names})
    parameters = {name: msgspec.json.encode(part).decode() for name, part in parts.items()}
    sent = {"inputs": inputs, "parameters": {"user_id": "u", "timestamp": SHOWN_AT, **parameters}}
    answer = await client.post("/v2/models/rank/infer", json=sent)
    told = await answer.json()
    assert answer.status == 200, told
    scores = next(one["data"] for one in told["outputs"] if one["name"] == "scores.click")
    assert scores == want["scores"]["click"]
