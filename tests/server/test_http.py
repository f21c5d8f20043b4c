"""HTTP: bad requests get clear answers, answers have ids, the document describes what is served."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient
from hypothesis import HealthCheck, Phase, settings
from openapi_spec_validator import validate

from npu_gr.server.debug import stacks as profile
from npu_gr.server.openapi import document
from tests.models import events
from tests.serving import FIRST_ID, columns, serving

Client = TestClient[Any, Any]
JSON = {"Content-Type": "application/json"}
HISTORY = columns(events(5))
GOOD: dict[str, Any] = {"user_id": "u", "candidates": [FIRST_ID], "history": HISTORY}


def _body(body: dict[str, Any]) -> io.BytesIO:
    """A large body as a file, so that the client does not warn."""
    return io.BytesIO(json.dumps(body).encode())


def b64(values: object, dtype: str) -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


def one(**changes: object) -> dict[str, Any]:
    return {"history": {"items": [1], "actions": [1], "timestamps": [1]} | changes}


BACKWARDS = {"items": [1, 2, 3], "actions": [1, 1, 1], "timestamps": [5, 7, 5]}


@pytest.mark.parametrize(
    ("change", "status", "detail"),
    [
        ({"candidates": []}, 422, "candidates: is empty"),
        (
            {"candidates": list(range(100_000))},
            413,
            "candidates: 100000 entries, the limit is 10000",
        ),
        (
            {"candidates": b64(range(100_000), "<i8")},
            413,
            "candidates: 100000 entries, the limit is 10000",
        ),
        ({"candidates": b64([1, -2], "<i8")}, 422, "candidates: -2 at index 1 is negative"),
        (
            {"candidates": "AAAA"},
            422,
            "candidates: 3 bytes are not whole little-endian int64 values",
        ),
        ({"candidates": [1.5]}, 422, "candidates[0]: Expected `int | str`, got `float`"),
        ({"candidates": [True]}, 422, "candidates[0]: Expected `int | str`, got `bool`"),
        ({"candidates": [""]}, 422, "candidates[0]: Expected `str` of length >= 1"),
        (
            {"candidates": ["é" * 257]},
            422,
            "candidates: index 0: a name of 514 bytes is not an item name",
        ),
        ({"candidates": [-1]}, 422, "candidates[0]: Expected `int` >= 0"),
        ({"candidats": [1]}, 422, "unknown field candidats; did you mean candidates?"),
        ({"user_id": ""}, 422, "user_id: Expected `str` of length >= 1"),
        ({"user_id": "x" * 129}, 422, "user_id: Expected `str` of length <= 128"),
        ({"user_id": 7.5}, 422, "user_id: Expected `int | str`, got `float`"),
        ({"user_id": True}, 422, "user_id: Expected `int | str`, got `bool`"),
        ({"top_k": 0}, 422, "top_k: Expected `int` >= 1"),
        ({"timestamp": -1}, 422, "timestamp: Expected `int` >= 0"),
        (
            {"history": {**HISTORY, "items": [1]}},
            422,
            "history: items, actions and timestamps have 1, 5 and 5 entries",
        ),
        (
            {"history": {**HISTORY, "itmes": [1]}},
            422,
            "unknown field history.itmes; did you mean items?",
        ),
        (
            one(actions=["buy"]),
            422,
            'history.actions: "buy" at index 0 is not an action of the model; it has 1, 2, 3',
        ),
        (
            one(actions=[0]),
            422,
            "history.actions: 0 at index 0 is not an action of the model; it has 1, 2, 3",
        ),
        (one(actions=[True]), 422, "history.actions[0]: Expected `int | float | str`, got `bool`"),
        (
            one(actions=b64([3], "<i2")),
            422,
            "history.actions: 3 is no index of an action, they are 0..2",
        ),
        (one(actions=b64([-1], "<i2")), 422, "history.actions: -1 at index 0 is negative"),
        (
            one(timestamps=[10**11 + 1]),
            422,
            f"history.timestamps: {10**11 + 1} at index 0 looks like milliseconds: divide",
        ),
        (
            one(timestamps=b64([10**15], "<i8")),
            422,
            "history.timestamps: 1000000000000000 at index 0 looks like",
        ),
        (
            {"timestamp": 1_700_000_000_000},
            422,
            "timestamp: 1700000000000 looks like milliseconds: divide by 1000",
        ),
        ({"timestamp": 2**63 - 1}, 422, "timestamp: 9223372036854775807 looks like nanoseconds"),
        (
            {"history": BACKWARDS},
            422,
            "history.timestamps: 5 at index 2 is before 7; send the oldest",
        ),
        ({"history": {"items": [1]}}, 422, "history: Object missing required field `actions`"),
        (
            {"history": {k: [1] * 70_000 for k in HISTORY}},
            413,
            "history.items: 70000 entries, the limit is 65536",
        ),
        ({"user_id": " u"}, 422, "user_id: has blanks around it; send it without them"),
        ({"user_id": "u\t"}, 422, "user_id: has blanks around it; send it without them"),
        ({"model_version": "nope"}, 404, "model_version: 'nope' is not served"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_bad_rank_is_explained(
    tmp_path_factory: pytest.TempPathFactory, change: Any, status: int, detail: str
) -> None:
    async with (
        serving(_folder(tmp_path_factory)) as (client, _),
        client.post("/v1/rank", data=_body({**GOOD, **change}), headers=JSON) as response,
    ):
        problem = await response.json(content_type="application/problem+json")
        assert (response.status, problem["status"]) == (status, status)
        assert problem["detail"].startswith(detail), problem
        assert problem["request_id"] == response.headers["X-Request-Id"]


def _folder(factory: pytest.TempPathFactory) -> Path:
    """Make one folder, so one checkpoint, for many tests."""
    shared = factory.getbasetemp() / "http"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.mark.parametrize(
    ("body", "content_type", "status", "detail"),
    [
        (b"{", "application/json", 400, "body: Input data was truncated"),
        (b'{"user_id": NaN}', "application/json", 400, "body: JSON is malformed"),
        (b"\xff\xfe", "application/json", 400, "body: "),
        (
            b'{"history": ' + b"[" * 100_000,
            "application/json",
            422,
            "history: Expected `object | null`",
        ),
        (b"\xc1", "application/msgpack", 400, "body: MessagePack data is malformed"),
        (b"", "application/json", 400, "body: Input data was truncated"),
        (
            b"a=1",
            "application/x-www-form-urlencoded",
            415,
            "Content-Type: 'application/x-www-form-urlencoded'",
        ),
        (b" " * 9_000_000, "application/json", 413, ""),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_a_broken_body_is_explained(
    tmp_path: Path, body: bytes, content_type: str, status: int, detail: str
) -> None:
    headers = {"Content-Type": content_type}
    async with (
        serving(tmp_path) as (client, _),
        client.post("/v1/rank", data=io.BytesIO(body), headers=headers) as response,
    ):
        problem = await response.json(content_type="application/problem+json")
        assert response.status == status, problem
        assert problem["detail"].startswith(detail), problem


async def test_routes_that_are_not(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        for method, path, status, detail in (
            ("GET", "/nope", 404, "Not Found"),
            ("GET", "/v1/recommendx", 404, "Not Found; did you mean /v1/recommend?"),
            ("GET", "/v1/rank", 405, "POST with a JSON body, at least user_id, candidates"),
            ("GET", "/v1/recommend", 405, "POST with a JSON body, at least user_id"),
            ("DELETE", "/v1/trending", 405, "this path takes GET, HEAD"),
            ("GET", "/v2/models/other", 404, ""),
        ):
            async with client.request(method, path) as response:
                assert response.status == status
                problem = await response.json(content_type="application/problem+json")
                assert problem["detail"].endswith(detail)
        async with client.delete("/v1/users/" + "x" * 129) as response:
            assert response.status == 422


async def test_the_open_inference_protocol_and_the_rest(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, service):
        version = service.versions.models()[0].version
        for path in (
            *(
                "/healthz",
                "/readyz",
                "/v2",
                "/v2/health/live",
                "/v2/health/ready",
                "/v2/models/rank",
            ),
            *(
                "/v2/models/rank/ready",
                f"/v2/models/rank/versions/{version}",
                f"/v2/models/rank/versions/{version}/ready",
            ),
            *("/v1/models", "/debug/config", "/openapi.json"),
        ):
            async with client.get(path) as response:
                assert response.status == 200, path
                assert await response.json()
        model = await (await client.get("/v2/models/rank")).json()
        assert (model["name"], model["versions"]) == ("rank", [version])
        shown = await (await client.get("/debug/config")).json()
        assert shown["kv_cache"]["page_tokens"] == 64
        service.set_ready("draining")
        for path in ("/readyz", "/v2/health/ready", "/v2/models/rank/ready"):
            assert (await client.get(path)).status == 503
        async with client.post("/v1/signal", json={"user_id": "u", "history": HISTORY}) as response:
            assert response.status == 503
        async with client.post("/v1/rank", json=GOOD) as response:  # still served while draining
            assert response.status == 200
            assert response.headers["Connection"] == "close"


async def test_ids_and_traces_go_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with caplog.at_level(logging.WARNING, "npu_gr.request"):
        async with serving(tmp_path, server={"slow_request_s": 1e-9}) as (client, _):
            headers = {"X-Request-Id": "my-id", "traceparent": trace}
            async with client.post("/v1/rank", json=GOOD, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "my-id"
                version, trace_id, span_id, flags = response.headers["traceparent"].split("-")
                assert (version, trace_id, flags) == ("00", trace.split("-")[1], "01")
                assert span_id != trace.split("-")[2]
                assert response.headers["X-Cache"] == "miss"
                assert "device;dur=" in response.headers["Server-Timing"]
            for bad in ("", "x" * 129, "a b"):
                async with client.get(
                    "/healthz", headers={"X-Request-Id": bad, "traceparent": "00-0-0-0"}
                ) as response:
                    assert len(response.headers["X-Request-Id"]) == 32
                    assert response.headers["traceparent"].split("-")[1] not in (
                        "0",
                        trace.split("-")[1],
                    )
    line = json.loads(next(r.message for r in caplog.records if "my-id" in r.message))
    assert (line["route"], line["status"], line["trace_id"]) == (
        "/v1/rank",
        200,
        trace.split("-")[1],
    )
    private = re.compile(rf'"u"|\b{FIRST_ID}\b')  # as a word: an id may hold the digits by chance
    assert not any(private.search(r.getMessage()) for r in caplog.records)


def test_the_document_is_openapi() -> None:
    validate(document())
    assert set(document()["paths"]) >= {
        "/v1/rank",
        "/v1/signal",
        "/v1/events",
        "/v1/users/{user_id}",
    }


async def test_every_route_is_documented(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        app = client.app
        assert app is not None
        served = {
            (route.resource.canonical, route.method.lower())
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    documented = {
        (path, m) for path, ops in document()["paths"].items() for m in ops if m != "parameters"
    }
    assert served == documented


async def test_the_live_service_keeps_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schemathesis sends a real loopback server what the document allows, and what not."""
    # not a minute each
    monkeypatch.setattr(profile, "folded_stacks", lambda _seconds, _stop: "main;run 1\n")
    async with serving(tmp_path, watched=False) as (client, _):
        url = str(client.make_url("/openapi.json"))

        assert await asyncio.to_thread(_fuzz, url) > 50


def _fuzz(url: str) -> int:
    import schemathesis
    from hypothesis import given
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_url(url)
    calls = 0
    for operation in schema.get_all_operations():
        assert isinstance(operation, Ok), operation
        api = operation.ok()

        @settings(
            max_examples=12,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=api.as_strategy())
        def one(case: Any) -> None:
            nonlocal calls
            calls += 1
            if case.headers:  # a millisecond is a valid budget, and a 504 its right answer
                case.headers.pop("X-Request-Timeout-Ms", None)
            response = case.call(base_url=url.removesuffix("/openapi.json"))
            # columns of equal lengths and whole raw arrays are beyond a schema: such bodies may be
            # rejected
            case.validate_response(response, excluded_checks=[positive_data_acceptance])

        one()
    return calls


def test_raw_columns_are_read_in_place() -> None:
    """16 k events of raw msgpack are read as views of the body.

    Each has one check, and no element is an object.
    """
    from npu_gr.server.config import ServerConfig
    from npu_gr.server.schemas.media import MSGPACK, decode
    from npu_gr.server.schemas.rank import RankBody, parse
    from tests.server.fake import FakeNames

    n = 16_384
    raw = {"items": bytes(8 * n), "actions": bytes(2 * n), "timestamps": bytes(8 * n)}
    body = msgspec.msgpack.encode({"user_id": "u", "candidates": bytes(800), "history": raw})
    request = parse(decode(body, MSGPACK, RankBody), ServerConfig(), FakeNames())
    assert request.history.events is not None
    for column in (
        request.history.events.items,
        request.history.events.actions,
        request.history.events.timestamps,
    ):
        assert len(column) == n
        assert column.base is not None
