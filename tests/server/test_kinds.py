"""Every kind of request has its route, document, counts, log line and status row.

Every error has its status.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient
from yarl import URL

from npu_gr.core.errors import NotFound, Overloaded
from npu_gr.core.kinds import KINDS, RECOMMEND, Kind
from npu_gr.core.request import Outcome
from npu_gr.metrics.registry import Metrics
from npu_gr.server.openapi import document
from npu_gr.server.schemas import CODECS
from tests.keys import write_keys
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeNames, FakeService, serving_fake
from tests.server.test_generate_over_http import section
from tests.serving import serving

ROOT = Path(__file__).parents[2]
FIXED = ["time_s", "request_id", "trace_id", "span_id", "method", "route", "status", "duration_s"]
DTYPES = {"scores": "<f4", "sids": "<i4"}  # of raw columns; the others are int64
BODIED = [name for name in KINDS if EXAMPLES[name].body is not None]
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_kind_with_body = pytest.mark.parametrize("kind", [KINDS[name] for name in BODIED], ids=BODIED)
each_outcome = pytest.mark.parametrize("outcome", Outcome)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "npu_gr.request"
    ]


def count(metrics: Metrics, name: str, **labels: str) -> float:
    metrics.refresh()
    return metrics.registry.get_sample_value(f"npu_gr_{name}", labels) or 0.0


def fake() -> FakeService:
    return FakeService({name: example.answer for name, example in EXAMPLES.items()})


def send(client: TestClient[Any, Any], kind: Kind[Any, Any], **headers: str) -> Any:
    example = EXAMPLES[kind.name]
    return client.request(kind.method, example.path, json=example.body, headers=headers)


def raw(body: Any, name: str = "") -> Any:
    """The body with every list as raw little-endian bytes; actions, which are names, as indices."""
    if isinstance(body, dict):
        return {key: raw(value, key) for key, value in body.items()}
    if isinstance(body, list) and body and isinstance(body[0], dict):
        return [raw(value) for value in body]
    if name == "actions":
        return FakeNames().actions(None).indices(body).tobytes()
    return np.array(body, DTYPES.get(name, "<i8")).tobytes() if isinstance(body, list) else body


def read_raw(answer: Any, name: str = "") -> Any:
    """The answer with every raw column as a list, NaN as None, as JSON has it."""
    if isinstance(answer, dict):
        return {
            key: read_raw(value, name if name == "scores" else key) for key, value in answer.items()
        }
    if isinstance(answer, bytes):
        values = np.frombuffer(answer, DTYPES.get(name, "<i8")).tolist()
        return [None if value != value else value for value in values]
    return answer


def columns_of(request: Any) -> list[list[int]]:
    """Every array of a request, in the order of its fields."""
    if isinstance(request, np.ndarray):
        return [request.tolist()]
    if isinstance(request, tuple):
        return [column for part in request for column in columns_of(part)]
    if not isinstance(request, msgspec.Struct):
        return []
    return [
        column
        for name in request.__struct_fields__
        for column in columns_of(getattr(request, name))
    ]


def test_every_kind_has_a_codec_and_an_example() -> None:
    assert list(CODECS) == list(EXAMPLES) == list(KINDS)


@each_kind
async def test_a_good_request(
    kind: Kind[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    example = EXAMPLES[kind.name]
    (tmp_path / "key").write_text("0123456789abcdef")
    service = fake()
    with caplog.at_level(logging.INFO, "npu_gr.request"):
        async with serving_fake(service, log_user_key_file=str(tmp_path / "key")) as (
            client,
            metrics,
        ):
            async with send(client, kind) as response:
                assert response.status == kind.status
                assert (await response.read() == b"") == (kind.status == 204)
                assert response.headers.get("X-Cache") == example.x_cache
                timed = [
                    part.split(";")[0] for part in response.headers["Server-Timing"].split(", ")
                ]
                assert timed == list(example.log["stages_s"])
            status = await (await client.get("/debug/status")).json()
    ((name, request, budget_s),) = service.served
    assert (name, request.user, type(request)) == (kind.name, example.user, kind.request)
    assert 0.5 < budget_s <= 1.0

    line = lines(caplog)[0]
    assert list(line) == [*FIXED, "user", *example.log]
    assert (line["method"], line["route"], line["status"]) == (kind.method, kind.path, kind.status)
    assert {name: line[name] for name in example.log} == example.log
    assert len(line["user"]) == 16

    assert count(metrics, "admissions_total", kind=kind.name, verdict="admitted") == 1
    assert count(metrics, "request_duration_seconds_count", kind=kind.name) == 1
    assert count(metrics, "stage_duration_seconds_count", kind=kind.name, stage="http") == 1
    assert (
        sum(
            count(metrics, "slo_requests_total", kind=kind.name, result=result)
            for result in ("good", "slow")
        )
        == 1
    )

    assert kind.name in [row["kind"] for row in status["goodput"]]
    (slow,) = status["slow"]
    named = next(
        (example.log[key] for key in ("outcome", "verdict", "basis") if key in example.log), None
    )
    assert (slow["kind"], slow["outcome"], slow["stages_s"]) == (
        kind.name,
        named,
        example.log["stages_s"],
    )


@each_kind
async def test_the_document_has_its_path(kind: Kind[Any, Any]) -> None:
    operation = document()["paths"][kind.path][kind.method.lower()]
    assert operation["summary"] == kind.summary
    assert ("content" in operation["responses"][str(kind.status)]) == (kind.status != 204)
    assert ("requestBody" in operation) == (EXAMPLES[kind.name].body is not None)


@each_kind
async def test_a_full_instance_rejects_it_before_its_body_is_read(kind: Kind[Any, Any]) -> None:
    service = fake()
    if kind.must_finish:  # the door lets it in: the service itself rejects it, or does not
        service.answers[kind.name] = Overloaded(f"overloaded: {kind.plural} are rejected")
    async with serving_fake(service) as (client, metrics):
        with await service.fill():
            json = {"Content-Type": "application/json"}
            path = EXAMPLES[kind.name].path
            async with client.request(
                kind.method, path, data=b"not a body", headers=json
            ) as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
                assert 20 <= int(response.headers["Retry-After-Ms"]) <= 95
        assert count(metrics, "admissions_total", kind=kind.name, verdict="overloaded") == 1
        assert count(metrics, "slo_requests_total", kind=kind.name, result="failed") == 1


@each_kind
async def test_a_caller_that_hangs_up_is_counted_as_abandoned(
    kind: Kind[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    service = fake()
    service.waits = asyncio.Event()
    with caplog.at_level(logging.INFO, "npu_gr.request"):
        async with serving_fake(service) as (client, metrics):
            asked = asyncio.create_task(send(client, kind)._coro)
            await service.waits.wait()
            asked.cancel()
            async with asyncio.timeout(10):
                while not lines(caplog):  # noqa: ASYNC110  (a log line has no event)
                    await asyncio.sleep(0.01)
            assert count(metrics, "admissions_total", kind=kind.name, verdict="abandoned") == 1
            assert count(metrics, "requests_in_flight") == 0
    (line,) = lines(caplog)
    assert (line["status"], line["route"]) == (499, kind.path)


@each_kind_with_body
async def test_reading_the_body_counts_against_the_budget(kind: Kind[Any, Any]) -> None:
    example = EXAMPLES[kind.name]
    service = fake()

    async def slow_body() -> AsyncIterator[bytes]:
        body = json.dumps(example.body).encode()
        yield body[:1]  # with which the headers leave
        await asyncio.sleep(0.1)
        yield body[1:]

    async with serving_fake(service, default_budget_s=10.0) as (client, _):
        headers = {"Content-Type": "application/json"}
        async with client.post(example.path, data=slow_body(), headers=headers) as response:
            assert response.status == kind.status
        headers["X-Request-Timeout-Ms"] = "50"
        async with client.post(example.path, data=slow_body(), headers=headers) as response:
            assert response.status == 408
            detail = (await response.json(content_type=None))["detail"]
    assert detail == (
        "the body did not arrive within the request's time budget or server.body_timeout_s"
    )
    ((_, _, budget_s),) = service.served
    # the clocks of the client's sleep and of the server differ a little
    assert budget_s <= 9.9 + 0.01


@each_kind
async def test_a_spent_budget_is_a_504_and_is_not_begun(kind: Kind[Any, Any]) -> None:
    service = fake()
    async with serving_fake(service) as (client, metrics):
        async with send(client, kind, **{"X-Request-Timeout-Ms": "0"}) as response:
            assert response.status == 504
        assert count(metrics, "admissions_total", kind=kind.name, verdict="impossible") == 1
    assert not service.served


@each_kind
async def test_while_draining_only_what_needs_it_is_rejected_and_connections_close(
    kind: Kind[Any, Any],
) -> None:
    service = fake()
    service.why_not_ready = "draining"
    async with serving_fake(service) as (client, _), send(client, kind) as response:
        assert response.status == (503 if kind.needs_ready else kind.status)
        assert response.headers["Connection"] == "close"
        assert ("X-NpuGr-Not-Taken" in response.headers) == kind.needs_ready


@each_outcome
async def test_every_outcome_has_a_value_of_x_cache(outcome: Outcome) -> None:
    service = fake()
    service.answers["rank"] = msgspec.structs.replace(EXAMPLES["rank"].answer, outcome=outcome)
    async with serving_fake(service) as (client, _), send(client, KINDS["rank"]) as response:
        assert response.headers["X-Cache"] not in ("none", "")


@each_kind_with_body
async def test_msgpack_says_what_json_says(kind: Kind[Any, Any]) -> None:
    example = EXAMPLES[kind.name]
    headers = {
        "Content-Type": "application/msgpack",
        "Accept": "application/msgpack",
        "X-Request-Id": "same",
    }
    body = (example.body or {}) | ({"format": "columns"} if kind is RECOMMEND else {})
    service = fake()
    async with serving_fake(service) as (client, _):
        async with client.post(
            example.path, json=body, headers={"X-Request-Id": "same"}
        ) as response:
            plain = await response.json()
        async with client.post(
            example.path, data=msgspec.msgpack.encode(raw(body)), headers=headers
        ) as response:
            assert (response.status, response.content_type) == (kind.status, "application/msgpack")
            packed = msgspec.msgpack.decode(await response.read())
    (_, first, _), (_, second, _) = service.served
    assert columns_of(first) == columns_of(second)
    assert read_raw(packed) == plain


@each_kind_with_body
async def test_a_body_at_and_over_the_limit(kind: Kind[Any, Any]) -> None:
    example = EXAMPLES[kind.name]
    body = json.dumps(example.body).encode()
    headers = {"Content-Type": "application/json"}
    async with serving_fake(fake(), max_body_bytes=len(body)) as (client, _):
        async with client.post(example.path, data=body, headers=headers) as response:
            assert response.status == kind.status
        async with client.post(example.path, data=body + b" ", headers=headers) as response:
            assert response.status == 413


@each_kind
async def test_a_kind_that_is_not_configured_is_a_404(kind: Kind[Any, Any]) -> None:
    service = fake()
    service.answers[kind.name] = NotFound(f"this instance does not {kind.name}")
    async with serving_fake(service) as (client, _), send(client, kind) as response:
        assert response.status == 404
        assert (await response.json(content_type=None))["detail"] == (
            f"this instance does not {kind.name}"
        )


@pytest.mark.parametrize("present", ["checkpoint", "generate"])
async def test_a_real_instance_says_404_where_it_has_no_section(
    present: str, tmp_path: Path
) -> None:
    absent = [kind for kind in KINDS.values() if kind.section not in (None, present)]
    assert len(absent) == 3
    sections: dict[str, Any] = (
        {} if present == "checkpoint" else {"checkpoint": None, "generate": section(tmp_path)}
    )
    async with serving(tmp_path, **sections) as (client, _):
        for kind in absent:
            async with send(client, kind) as response:
                assert response.status == 404, kind.name
        metrics = await (await client.get("/metrics")).text()
    for kind in absent:
        assert f'npu_gr_admissions_total{{kind="{kind.name}",verdict="invalid"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("path", "user"),
    [
        ("a%2541", "a%41"),  # decoded once
        ("a%2Fb", "a/b"),
        ("a/b%0Ac", "a/b\nc"),
        ("%25ff", "%ff"),
        ("%C3%BC", "ü"),
    ],
)
async def test_any_text_may_name_a_user_in_a_path(
    path: str, user: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("0123456789abcdef")
    with caplog.at_level(logging.INFO, "npu_gr.request"):
        service = fake()
        async with serving_fake(service, log_user_key_file=str(tmp_path / "key")) as (client, _):
            url = URL(f"{client.make_url('/v1/users/')}{path}", encoded=True)
            async with aiohttp.ClientSession() as http, http.delete(url) as response:
                assert response.status == 204
        ((_, request, _),) = service.served
        assert request.user.user == user
    (line,) = lines(caplog)
    assert (line["route"], line["status"], len(line["user"])) == ("/v1/users/{user_id}", 204, 16)


@pytest.mark.parametrize(("path", "status"), [("/v1/users/%ff%fe", 400), ("/v1/%75sers/a", 404)])
async def test_a_user_whose_name_can_be_read_in_two_ways_is_rejected(
    path: str, status: int
) -> None:
    service = fake()
    async with serving_fake(service) as (client, _), aiohttp.ClientSession() as http:
        url = URL(str(client.make_url("")).rstrip("/") + path, encoded=True)
        async with http.delete(url) as response:
            assert response.status == status
    assert not service.served


@each_kind_with_body
async def test_a_compressed_body_is_rejected_and_never_inflated(kind: Kind[Any, Any]) -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    service = fake()
    async with serving_fake(service) as (client, metrics):
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with client.post(EXAMPLES[kind.name].path, data=bomb, headers=headers) as response:
            assert response.status == 415
            assert response.headers["Connection"] == "close"
            assert "Content-Encoding" in (await response.json(content_type=None))["detail"]
        async with client.post(
            EXAMPLES[kind.name].path,
            json=EXAMPLES[kind.name].body,
            headers={"Content-Encoding": "identity"},
        ) as response:
            assert response.status == kind.status
        assert count(metrics, "admissions_total", kind=kind.name, verdict="invalid") == 1


async def test_a_key_that_is_no_text_is_a_wrong_key(tmp_path: Path) -> None:
    async with serving_fake(fake(), api_keys_file=write_keys(tmp_path / "keys")) as (client, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"Connection: close" in head
        writer.close()
        await writer.wait_closed()


def test_a_kind_that_is_registered_is_served_counted_and_documented() -> None:
    """Run in a process of its own.

    A kind has to be in the table before the modules that derive from it are imported.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.pretended"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["served"] == {
        "status": 201,
        "body": {"request_id": "mine", "echo": "HELLO", "stages_s": {"shout": 0.25}},
    }
    assert said["rejected"] == {"status": 422, "detail": "unknown field wordz; did you mean word?"}
    assert said["documented"]["operationId"] == "shout"
    assert "#/components/schemas/ShoutBody" in json.dumps(said["documented"]["requestBody"])
    assert {name: said["line"][name] for name in ("route", "status", "loudness", "stages_s")} == {
        "route": "/v1/shout",
        "status": 201,
        "loudness": 5,
        "stages_s": {"shout": 0.25},
    }
    assert said["counts"] == {"admitted": 1.0, "invalid": 1.0, "request_duration": 1.0, "http": 1.0}
    assert said["status_rows"] == ["rank", "shout"]
