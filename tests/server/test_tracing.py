"""A sampled request has one span in its caller's trace.

Within it is one span a stage, one after the other.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from npu_gr.metrics.registry import Metrics
from npu_gr.server.access_log import Tracing
from npu_gr.server.routes import build_web_app
from npu_gr.service.app import instance
from tests.models import events
from tests.serving import FIRST_ID, columns, make_config, write_checkpoint

RANK: dict[str, Any] = {"user_id": "u", "candidates": [FIRST_ID], "history": columns(events(40))}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@asynccontextmanager
async def traced(
    folder: Path, sample_ratio: float
) -> AsyncIterator[tuple[TestClient[Any, Any], InMemorySpanExporter]]:
    write_checkpoint(folder / "checkpoint")
    config = make_config(folder)
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"), sample_ratio)
    async with instance(config) as (_, service):
        metrics = Metrics(CollectorRegistry(), config.slo.objectives())
        app = build_web_app(service, config.server, metrics, tracing)
        async with TestClient(TestServer(app)) as client:
            yield client, exporter
    provider.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_the_stages_of_a_sampled_rank(tmp_path: Path) -> None:
    async with traced(tmp_path, 0.0) as (client, exporter):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        async with client.post("/v1/rank", json=RANK, headers=headers) as response:
            returned = response.headers["traceparent"].split("-")
        spans = by_name(exporter)
        assert list(spans) == [
            "read",
            "history",
            "lease",
            "queue",
            "device",
            "write",
            "POST /v1/rank",
        ]
        request = spans.pop("POST /v1/rank")
        assert request.parent is not None
        assert request.context is not None
        assert (f"{request.parent.span_id:016x}", f"{request.context.trace_id:032x}") == (
            PARENT,
            TRACE,
        )
        assert returned == ["00", TRACE, f"{request.context.span_id:016x}", "01"]
        told = dict(request.attributes or {})
        assert (told["http.route"], told["http.response.status_code"]) == ("/v1/rank", 200)
        assert (told["npu_gr.request_id"], told["npu_gr.outcome"]) == ("mine", "miss_full")
        at = request.start_time or 0
        for span in spans.values():
            assert span.parent is not None
            assert span.parent.span_id == request.context.span_id
            assert span.start_time is not None
            assert span.end_time is not None
            # the request's own start is another clock's
            slack = 1_000_000 if span.name == "read" else 0
            assert abs(span.start_time - at) <= slack, span.name
            assert span.start_time <= span.end_time
            at = span.end_time
        assert request.end_time is not None
        assert at <= request.end_time + 1_000_000


def test_stages_that_overlap_end_with_the_request() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"), 1.0)
    _, span = tracing.begin("POST /v1/rank", None)
    assert span is not None
    now_at = time.monotonic()
    tracing.end(
        span,
        {"history": 0.5, "queue": 0.7},
        now_at - 1,
        now_at - 0.9,
        {"http.response.status_code": 200},
    )
    spans = by_name(exporter)
    assert list(spans) == ["read", "history", "queue", "write", "POST /v1/rank"]
    for one in spans.values():
        assert one.start_time is not None
        assert one.end_time is not None
        assert one.start_time <= one.end_time <= (spans["POST /v1/rank"].end_time or 0)
    provider.shutdown()


@pytest.mark.parametrize(
    ("flags", "ratio", "sampled"), [("00", 1.0, 0), ("01", 0.0, 1), (None, 1.0, 1), (None, 0.0, 0)]
)
async def test_the_caller_decides_and_else_the_ratio(
    tmp_path: Path, flags: str | None, ratio: float, sampled: int
) -> None:
    async with traced(tmp_path, ratio) as (client, exporter):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"} if flags else {}
        async with client.post(
            "/v1/rank", json={**RANK, "candidates": [-1]}, headers=headers
        ) as response:
            assert response.status == 422
        spans = exporter.get_finished_spans()
        assert len(spans) == sampled
        assert all((span.parent is None) == (flags is None) for span in spans)


async def test_a_failure_is_an_error_of_the_span(tmp_path: Path) -> None:
    async with traced(tmp_path, 1.0) as (client, exporter):
        async with client.post(
            "/v1/rank", json=RANK, headers={"X-Request-Timeout-Ms": "0"}
        ) as response:
            assert response.status == 504
        assert not by_name(exporter)["POST /v1/rank"].status.is_ok


async def test_a_request_is_followed_from_its_answer_to_its_exemplar(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As docs/using.md shows it: `X-Request-Id`, the log line, the trace, and the histogram."""
    with caplog.at_level(logging.INFO, "npu_gr.request"):
        async with traced(tmp_path, 1.0) as (client, exporter):
            headers = {"X-Request-Id": "order-4711"}
            async with client.post("/v1/rank", json=RANK, headers=headers) as response:
                trace_id = response.headers["traceparent"].split("-")[1]
            openmetrics = {"Accept": "application/openmetrics-text; version=1.0.0"}
            text = await (await client.get("/metrics", headers=openmetrics)).text()
            status = await (await client.get("/debug/status")).json()
            spans = by_name(exporter)
    written = (json.loads(r.getMessage()) for r in caplog.records if r.name == "npu_gr.request")
    (line,) = (one for one in written if one["request_id"] == "order-4711")
    assert line["trace_id"] == trace_id
    context = spans["POST /v1/rank"].context
    assert context is not None
    assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == (trace_id, line["span_id"])
    assert [one["trace_id"] for one in status["slow"]] == [trace_id]
    (bucket,) = (
        one
        for one in text.splitlines()
        if one.startswith('npu_gr_request_duration_seconds_bucket{kind="rank"') and " # {" in one
    )
    assert f'# {{trace_id="{trace_id}"}} ' in bucket
