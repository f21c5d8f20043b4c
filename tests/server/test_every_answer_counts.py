"""Every answer is counted once, and each 5xx burns the budget of its kind, whoever wrote it.

The writers: the handlers, the steps of the middleware before them, aiohttp itself, and gRPC.
HAProxy's own answers are in its metrics (`tests/route/test_routing.py`).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from aiohttp import web

from npu_gr.core.errors import NpuGrError
from npu_gr.core.kinds import KINDS, Kind
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.slo import Result
from npu_gr.server.access_log import AccessLog
from npu_gr.server.middleware import RequestLifecycle
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, serving_fake
from tests.server.grpc.rig import INFER, serving_rpc
from tests.server.oip.inputs import inputs_of, json_body
from tests.serving import until
from tests.sources import ROOT

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: str(kind.name))


def leaves(cls: type[NpuGrError] = NpuGrError) -> Iterator[type[NpuGrError]]:
    yield cls
    for one in cls.__subclasses__():
        if one.__module__ == NpuGrError.__module__:  # whatever other tests have imported
            yield from leaves(one)


# by the package, by Python, by aiohttp
FAILURES = [
    *(cls("no") for cls in leaves()),
    *(TimeoutError(), RuntimeError("no"), OSError("no"), AssertionError()),
    *(web.HTTPServiceUnavailable(), web.HTTPGatewayTimeout(), web.HTTPBadGateway()),
]


def fake() -> FakeService:
    return FakeService({name: example.answer for name, example in EXAMPLES.items()})


class Counts:
    """What one request added to the counters."""

    def __init__(self, metrics: Metrics, kind: Kind[Any, Any]) -> None:
        self._metrics = metrics
        self._kind = kind
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        counted: dict[str, float] = {}
        for family in self._metrics.registry.collect():
            for one in family.samples:
                if one.name == "npu_gr_requests_total":
                    counted[one.labels["code"]] = counted.get(one.labels["code"], 0) + one.value
                elif (
                    one.name == "npu_gr_slo_requests_total"
                    and one.labels["kind"] == self._kind.name
                ):
                    # a busy machine is slow
                    is_failed = one.labels["result"] == Result.FAILED.value
                    result = Result.FAILED.value if is_failed else Result.GOOD.value
                    counted[result] = counted.get(result, 0) + one.value
        return counted

    def added(self) -> dict[str, float]:
        now = self._now()
        added = {name: now[name] - self._before.get(name, 0) for name in now}
        self._before = now
        return {name: num for name, num in added.items() if num}


def expected(status: int) -> dict[str, float]:
    if status >= 500 or status == 429:
        return {str(status): 1, Result.FAILED.value: 1}
    good: dict[str, float] = {Result.GOOD.value: 1} if status < 400 else {}
    return {str(status): 1, **good}


def asked(kind: Kind[Any, Any], path: str) -> dict[str, Any]:
    """The body of a request on one of the kind's paths."""
    body = EXAMPLES[kind.name].body
    headers = {"Content-Type": "application/json", "X-Request-Timeout-Ms": "20000"}
    if body is None:
        return {}
    if path.startswith("/v2/"):
        return {"data": json_body(inputs_of(body)), "headers": headers}
    return {"data": json.dumps(body), "headers": headers}


@each_kind
async def test_whatever_a_handler_raises(kind: Kind[Any, Any]) -> None:
    service = fake()
    paths = [EXAMPLES[kind.name].path]
    paths += [path.replace("{version}", "1") for path in kind.paths[1:]]
    async with serving_fake(service) as (client, metrics):
        counts = Counts(metrics, kind)
        for failure in FAILURES:
            service.answers[kind.name] = failure
            for path in paths:
                async with client.request(kind.method, path, **asked(kind, path)) as answer:
                    assert answer.status >= 400
                    if isinstance(failure, NpuGrError):
                        assert answer.status == failure.status
                assert counts.added() == expected(answer.status), (path, repr(failure))


@each_kind
async def test_whatever_the_steps_before_it_raise(kind: Kind[Any, Any]) -> None:
    """The key, admission, the bytes that arrive, and an instance that drains."""
    path = EXAMPLES[kind.name].path
    # the bodies of a proxy are those of many clients
    full = {"max_receiving_bytes": 1, "trusted_proxies": ("127.0.0.1",)}
    async with serving_fake(fake(), **full) as (client, metrics):
        counts = Counts(metrics, kind)
        async with client.request(kind.method, path, **asked(kind, path)) as answer:
            assert answer.status == (kind.status if EXAMPLES[kind.name].body is None else 503)
        assert counts.added() == expected(answer.status)
    service = fake()
    async with serving_fake(service) as (client, metrics):
        counts = Counts(metrics, kind)
        service.why_not_ready = "draining"
        async with client.request(kind.method, path, **asked(kind, path)) as answer:
            assert answer.status == (503 if kind.needs_ready else kind.status)
        assert counts.added() == expected(answer.status)
        service.why_not_ready = ""
        for step in ("find_key", "limit"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RequestLifecycle, step, broken)
                async with client.request(kind.method, path, **asked(kind, path)) as answer:
                    assert answer.status == 500
            assert counts.added() == expected(500), step


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("broken")


@each_kind
async def test_what_aiohttp_answers_itself(kind: Kind[Any, Any]) -> None:
    """The middleware fails before or after its work, or never sees the request."""
    path = EXAMPLES[kind.name].path
    async with serving_fake(fake()) as (client, metrics):
        counts = Counts(metrics, kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RequestLifecycle, "begin", broken)
            async with client.request(kind.method, path, **asked(kind, path)) as answer:
                assert answer.status == 500
        assert counts.added() == expected(500)
        request = asked(kind, path)
        request["headers"] = {**request.get("headers", {}), "Expect": "a miracle"}
        async with client.request(kind.method, path, **request) as answer:
            assert answer.status == 417
        assert counts.added() == expected(417)


async def test_a_log_that_fails_changes_no_answer() -> None:
    kind = KINDS["rank"]
    async with serving_fake(fake()) as (client, metrics):
        counts = Counts(metrics, kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AccessLog, "write", broken)
            async with client.post("/v1/rank", **asked(kind, "/v1/rank")) as answer:
                assert answer.status == 200
        assert counts.added() == expected(200)


async def test_an_erasure_has_no_time_limit_that_could_excuse_it() -> None:
    kind = KINDS["erase"]
    service = fake()
    async with serving_fake(service) as (client, metrics):
        counts = Counts(metrics, kind)
        headers = {"X-Request-Timeout-Ms": "0.000001"}
        async with client.delete(EXAMPLES["erase"].path, headers=headers) as answer:
            assert answer.status == kind.status
        assert counts.added() == expected(kind.status)


@pytest.mark.parametrize("is_late", [True, False])
async def test_a_client_that_gives_up_after_the_objective_was_failed(is_late: bool) -> None:
    """Else an instance that answers nothing would look perfect: all its clients give up."""
    kind = KINDS["signal" if is_late else "ingest"]  # the least patient, and one of a second
    service = fake()
    service.waits = asyncio.Event()
    async with serving_fake(service) as (client, metrics):
        counts = Counts(metrics, kind)
        path = EXAMPLES[kind.name].path
        request = client.request(kind.method, path, **asked(kind, path))
        waiting = asyncio.ensure_future(request._coro)
        await service.waits.wait()
        await asyncio.sleep(2 * KINDS["signal"].objective_s)
        waiting.cancel()
        await until(lambda: metrics.requests.in_flight._value.get() == 0)
        failed: dict[str, float] = {Result.FAILED.value: 1} if is_late else {}
        assert counts.added() == {"499": 1, **failed}


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
async def test_whatever_a_call_of_grpc_raises(failure: Exception) -> None:
    kind = KINDS["rank"]
    async with serving_rpc() as rig:
        rig.service.answers[kind.name] = failure
        counts = Counts(rig.metrics, kind)
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.infer(kind.name, EXAMPLES[kind.name].body or {})
        status = failure.status if isinstance(failure, NpuGrError) else 500
        assert counts.added() == expected(status)


async def test_a_message_of_grpc_that_does_not_come_is_the_fault_of_its_client() -> None:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with serving_rpc(body_timeout_s=0.1) as rig:
        counts = Counts(rig.metrics, KINDS["rank"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.channel.stream_unary(INFER)(nothing(), timeout=10.0)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert counts.added() == expected(408)


def test_no_other_code_writes_a_status_of_the_server() -> None:
    """So the tests above have seen every writer: an error is raised, and translated once."""
    written = re.compile(r"status=5\d\d|problem\(\s*5\d\d|HTTP(Internal|Service|Bad|Gateway)\w+\(")
    found = {
        (path.name, one[0])
        for path in (ROOT / "npu_gr" / "server").rglob("*.py")
        for one in written.finditer(path.read_text())
    }
    assert found == {("http.py", "problem(500")}
