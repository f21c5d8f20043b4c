"""A gRPC call has the course of a request over HTTP: key, tenant, time limit, door, counts, log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from npu_gr.core.errors import ConfigError, NotTaken, Overloaded, UnknownPrefix
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import KINDS, Kind, Scope
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.server.config import ServerConfig
from npu_gr.server.routes import build_web_app
from npu_gr.server.rpc.messages import HEALTH, INFERENCE, OURS, message
from npu_gr.server.rpc.opening import RPC
from npu_gr.server.rpc.stream import MOST
from npu_gr.server.run import serve
from tests.certificates import Authority
from tests.keys import entry, secret, write_keys
from tests.server.examples import EXAMPLES, USER
from tests.server.examples import HISTORY as EXAMPLE_HISTORY
from tests.server.fake import FakeService, metrics_of_all_kinds
from tests.server.oip.inputs import Input, infer_message
from tests.server.rpc.rig import Rig, call, serving_rpc
from tests.serving import until

HISTORY: dict[str, Any] = EXAMPLE_HISTORY
EVENTS = {
    "items": {"ids": HISTORY["items"]},
    "actions": {"names": [str(one) for one in HISTORY["actions"]]},
    "timestamps": {"seconds": HISTORY["timestamps"]},
}
FIELDS: dict[str, dict[str, Any]] = {  # the examples of /v1 as messages
    "signal": {"history": EVENTS},
    "rank": {"history": EVENTS, "candidates": {"ids": [1, 2, 3]}},
    "generate": {"history": EVENTS, "num_items": 2},
    "match": {"num_items": 2},
    "recommend": {"history": EVENTS},
    "events": {"events": EVENTS},
    "ingest": {"users": [{"user_id": USER.user, "events": EVENTS}] * 2},
    "erase": {},
}
RANK = [Input("user_id", "BYTES", ["u"]), Input("candidates", "INT64", [1, 2, 3])]
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving_rpc() as made:
        yield made


def fields(kind: Kind[Any, Any], tenant: str = USER.tenant) -> dict[str, Any]:
    named = {} if kind.name == "ingest" else {"user_id": USER.user}
    return {**named, "tenant": tenant, **FIELDS[kind.name]}


async def refused(rig: Rig, method: str, key: str | None = None, **asked: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.ours(method, key, **asked)
    return caught.value.code(), caught.value.details() or ""


# ---- every kind


@each_kind
async def test_every_kind_is_a_call(kind: Kind[Any, Any], rig: Rig) -> None:
    """The service gets what it gets over HTTP, and metrics and log count the kind."""
    example = EXAMPLES[kind.name]
    answer = await rig.ours(kind.name.title(), **fields(kind))
    assert re.fullmatch("[0-9a-f]{32}", answer.request_id)
    async with rig.http.request(kind.method, example.path, json=example.body) as response:
        assert response.status in (kind.status, 202)
    (_, ours, _), (_, theirs, _) = rig.service.served
    assert ours.user == theirs.user == example.user
    for name in ("candidates", "num_items", "tenant"):
        one: Any = getattr(ours, name, None)
        other: Any = getattr(theirs, name, None)
        assert np.array_equal(one, other)
    if kind.name in ("rank", "signal"):
        assert ours.history.events.fingerprint() == theirs.history.events.fingerprint()
    path = f"/{OURS}/{kind.name.title()}"
    assert rig.count("requests_total", route=path, code="200") == 1
    assert rig.count("admissions_total", kind=kind.name, verdict="admitted") == 2


async def test_answers_hold_what_json_holds(rig: Rig) -> None:
    ranked = await rig.ours("Rank", **fields(KINDS["rank"]))
    np.testing.assert_array_equal(list(ranked.scores["click"].values), [1, np.nan, 2])
    assert (ranked.outcome, ranked.history.num_tokens, ranked.stages_s["device"]) == ("miss_full", 2, 0.002)
    generated = await rig.ours("Generate", **fields(KINDS["generate"]), fields=["title"])
    assert (list(generated.items.ids), list(generated.items.names)) == ([5, 6], ["5", "6"])
    assert list(generated.titles) == ["title of 5", "title of 6"]
    assert (list(generated.sids), generated.num_levels) == ([0, 1, 1, 0], 2)
    recommended = await rig.ours("Recommend", **fields(KINDS["recommend"]))
    assert (recommended.stages[0].result, recommended.HasField("outcome")) == ("out_of_time", False)
    written = await rig.ours("Ingest", **fields(KINDS["ingest"]))
    assert (written.users[0].num_added, written.users[1].error.status) == (2, 422)


async def test_columns_have_three_forms(rig: Rig) -> None:
    """Numbers, names and raw bytes are the same request; two forms at once are none."""
    raw = {
        "items": {"raw": np.array(HISTORY["items"]).tobytes()},
        "actions": {"raw": np.array([0, 1], "<i2").tobytes()},
        "timestamps": {"raw": np.array(HISTORY["timestamps"]).tobytes()},
    }
    named = {**EVENTS, "items": {"names": [str(one) for one in HISTORY["items"]]}, "actions": {"indices": [0, 1]}}
    for history in (EVENTS, raw, named):
        await rig.ours("Rank", user_id="u", history=history, candidates={"ids": [1]})
    prints = {request.history.events.fingerprint() for _, request, _ in rig.service.served}
    assert len(prints) == 1
    both = {"ids": [1], "names": ["a"]}
    assert await refused(rig, "Rank", user_id="u", candidates=both) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "candidates: holds ids, names or raw ones in two fields; set one",
    )


@pytest.mark.parametrize(
    ("method", "asked", "says"),
    [
        ("Rank", {"user_id": "u"}, "missing required field `candidates`"),
        ("Rank", {"candidates": {"ids": [1]}}, "user_id: Expected `str` of length >= 1"),
        ("Rank", {"user_id": "u", "candidates": {"ids": [-1]}}, "candidates: -1 at index 0 is negative"),
        (
            "Rank",
            {"user_id": "u", "candidates": {"ids": [1] * 10_001}},
            "candidates: 10001 entries, the limit is 10000",
        ),
        ("Rank", {"user_id": "u", "candidates": {"raw": b"1234567"}}, "candidates: 7 bytes are not whole"),
        ("Rank", {"user_id": "u", "candidates": {"ids": [1]}, "top_k": 0}, "top_k: Expected `int` >= 1"),
        ("Rank", {"user_id": "u", "candidates": {"ids": [1]}, "history": {}}, "history: Object missing required field"),
        (
            "Rank",
            {"user_id": "u", "candidates": {"ids": [1]}, "history": {**EVENTS, "actions": {"indices": [0, 40_000]}}},
            "history.actions: an index is out of range: 0 to 32767",
        ),
        ("Generate", {"user_id": "u", "normalise": "x"}, "normalise: Invalid enum value 'x'"),
        ("Generate", {"user_id": "u", "temperature": float("nan")}, "temperature"),
        ("Generate", {"user_id": "u", "fields": ["x"] * 200}, "fields: 200 entries, the limit is 16"),
        (
            "Generate",
            {"user_id": "u", "attributes": {str(i): {"values": [{"int_value": 1}]} for i in range(101)}},
            "attributes: 101 entries, the limit is 100",
        ),
        ("Ingest", {"users": [{"user_id": "u", "events": EVENTS}] * 1001}, "users: 1001 entries, the limit is 1000"),
        ("Erase", {"user_id": "u" * 200}, "user_id: 200 characters, the limit is 128"),
    ],
)
async def test_faults_are_told_in_words(method: str, asked: dict[str, Any], says: str, rig: Rig) -> None:
    code, detail = await refused(rig, method, **asked)
    assert (code, says in detail) == (grpc.StatusCode.INVALID_ARGUMENT, True), detail
    assert not rig.service.served


# ---- keys and tenants


async def test_a_key_opens_what_its_scopes_say(tmp_path: Path) -> None:
    keys = write_keys(
        tmp_path / "keys",
        entry("infers", scopes=[Scope.INFER]),
        entry("observes", scopes=[Scope.OBSERVE]),
        entry("shop", tenant="shop", scopes=[Scope.INFER]),
        entry("slow", rate_per_s=0.001),
    )
    async with serving_rpc(api_keys_file=keys) as rig:
        asked: dict[str, Any] = {"user_id": "u", "candidates": {"ids": [1]}}

        def bearer(name: str) -> str:
            return f"Bearer {secret(name)}"

        for key in (None, "Bearer x", "Basic x", bearer("nobody")):
            assert (await refused(rig, "Rank", key, **asked))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await refused(rig, "Rank", bearer("observes"), **asked))[0] is grpc.StatusCode.PERMISSION_DENIED
        assert (await refused(rig, "Erase", bearer("infers"), user_id="u"))[0] is grpc.StatusCode.PERMISSION_DENIED
        code, detail = await refused(rig, "Rank", bearer("shop"), **asked, tenant="other")
        assert (code, "is for the tenant 'shop' alone" in detail) == (grpc.StatusCode.PERMISSION_DENIED, True)
        assert not rig.service.served
        await rig.ours("Rank", bearer("shop"), **asked)
        answer = await rig.inference("ModelInfer", infer_message("rank", RANK), bearer("shop"))
        assert answer.model_version == "m"
        assert {request.user.tenant for _, request, _ in rig.service.served} == {"shop"}
        for name, scope in (("ServerMetadata", "infers"), ("ModelStatistics", "observes")):
            await rig.inference(name, key=bearer(scope))
            with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                await rig.inference(name, key=bearer("observes" if scope == "infers" else "infers"))
        assert (await rig.inference("ServerReady")).ready  # as over HTTP: health needs no key
        assert (await rig.inference("ServerLive")).live
        spent = [await refused_or_not(rig, bearer("slow"), asked) for _ in range(3)]
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in spent
        stream = rig.channel.stream_stream(f"/{OURS}/Signals")
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await stream(iter([b""]), timeout=10).read()


async def refused_or_not(rig: Rig, key: str, asked: dict[str, Any]) -> grpc.StatusCode | None:
    try:
        await rig.ours("Rank", key, **asked)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


# ---- time


async def test_the_deadline_is_the_budget(rig: Rig) -> None:
    await rig.ours("Rank", timeout=3.0, **fields(KINDS["rank"]))
    await rig.ours("Rank", timeout=None, **fields(KINDS["rank"]))
    await rig.ours("Rank", timeout=3000.0, **fields(KINDS["rank"]))
    infer = infer_message("rank", RANK, parameters={"timeout": {"int64_param": 500_000}})
    await rig.inference("ModelInfer", infer)
    budgets = [budget_s for _, _, budget_s in rig.service.served]
    config = ServerConfig()
    granted_s = 3.0 * 1.01  # gRPC sends three digits of a deadline, rounded up
    for budget_s, most_s in zip(budgets, (granted_s, config.default_budget_s, config.max_budget_s, 0.5), strict=True):
        assert 0 < budget_s <= most_s
        assert budget_s > most_s - 0.4


@pytest.mark.parametrize("ends", ["cancelled", "deadline"])
async def test_who_gives_up_frees_everything(ends: str, rig: Rig) -> None:
    rig.service.waits = asyncio.Event()
    task = asyncio.create_task(rig.ours("Rank", timeout=0.3 if ends == "deadline" else 10.0, **fields(KINDS["rank"])))
    await rig.service.waits.wait()
    assert rig.service.door.counts("rank")["inside"] == 1
    if ends == "cancelled":
        task.cancel()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await task
    await until(lambda: rig.service.door.counts("rank")["inside"] == 0)
    verdict = {"cancelled": "abandoned", "deadline": "out_of_time"}[ends]
    await until(lambda: rig.count("admissions_total", kind="rank", verdict=verdict) == 1)
    assert rig.count("requests_in_flight") == 0


# ---- errors


@pytest.mark.parametrize(
    ("error", "code", "trailing"),
    [
        (Overloaded("busy"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"npu-gr-status": "429"}),
        (UnknownPrefix("base: unknown"), grpc.StatusCode.FAILED_PRECONDITION, {"npu-gr-status": "409"}),
        (NotTaken("draining"), grpc.StatusCode.UNAVAILABLE, {"npu-gr-status": "503", "x-npugr-not-taken": "1"}),
    ],
)
async def test_errors_keep_their_meaning(
    error: Exception, code: grpc.StatusCode, trailing: dict[str, str], rig: Rig
) -> None:
    rig.service.answers["rank"] = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.ours("Rank", **fields(KINDS["rank"]))
    assert (caught.value.code(), caught.value.details()) == (code, str(error))
    trailers: Any = caught.value.trailing_metadata()
    told = dict(trailers)
    assert trailing.items() <= told.items()
    assert ("grpc-retry-pushback-ms" in told) == isinstance(error, Overloaded)


async def test_what_is_none_of_ours_is_told_to_nobody(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.service.answers["rank"] = "no answer at all"
    assert await refused(rig, "Rank", **fields(KINDS["rank"])) == (
        grpc.StatusCode.INTERNAL,
        "an unexpected error; the log has it under this request id",
    )
    assert "AssertionError" in caplog.text


async def test_messages_that_are_none(rig: Rig) -> None:
    for path in (f"/{OURS}/Rank", f"/{INFERENCE}/ModelInfer"):
        with pytest.raises(grpc.aio.AioRpcError, match="the message cannot be parsed"):
            await call(rig.channel, path, b"\xff\xff\xff", "npu_gr.v1.RankAnswer")
    with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
        await call(rig.channel, f"/{OURS}/Nope", b"", "npu_gr.v1.RankAnswer")
    with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
        await call(rig.channel, f"/{OURS}/Rank", b"x" * 5_000_000, "npu_gr.v1.RankAnswer")
    beside, most = "bytes beside its columns", "over 468752 elements"
    bombs = ((b"\x2a\x00", beside), (b"\x3a\x00", most), (b"\x22\x03\n\x01a", beside))  # inputs, raw ones, parameters
    for bomb, says in bombs:
        with pytest.raises(grpc.aio.AioRpcError, match=says):
            await call(rig.channel, f"/{INFERENCE}/ModelInfer", bomb * 500_000, "inference.ModelInferResponse")
    stub = rig.channel.stream_unary(f"/{OURS}/Rank")
    with pytest.raises(grpc.aio.AioRpcError, match="the call has no message"):
        await stub(iter([]), timeout=10)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_name": "nope"}, "model: 'nope' is not served"),
        ({"model_version": "7"}, "version: '7' of rank is not served"),
        ({"raw_input_contents": [b""]}, "raw_input_contents: 1, and there are 2 inputs"),
        ({"parameters": {"x": {}}}, "parameters: 'x' has no value"),
        ({"parameters": {str(i): {"bool_param": True} for i in range(101)}}, "parameters: 101 entries"),
        ({"outputs": [{"name": "scores"}]}, "outputs: unknown output scores"),
        ({"outputs": [{"name": "top", "parameters": {"classification": {"int64_param": 3}}}]}, "an output has none"),
        ({"inputs": [{"name": "user_id", "datatype": "BYTES", "shape": [1] * 9}]}, "takes 1"),
    ],
)
async def test_faults_of_an_infer(changes: dict[str, Any], says: str, rig: Rig) -> None:
    asked = {"model_name": "rank", "inputs": infer_message("rank", RANK).inputs} | changes
    raws = [one.raw for one in RANK[: len(asked["inputs"])]]
    infer = message("inference.ModelInferRequest")(**{"raw_input_contents": raws, **asked})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.inference("ModelInfer", infer)
    assert says in (caught.value.details() or "")
    assert not rig.service.served


async def test_contents_are_the_raw_ones(rig: Rig) -> None:
    body = [*RANK, Input("top_k", "INT64", [3])]
    for is_raw in (True, False):
        await rig.inference("ModelInfer", infer_message("rank", body, is_raw=is_raw))
    (_, one, _), (_, other, _) = rig.service.served
    assert (one.user, one.candidates.tolist(), one.top_k) == (other.user, other.candidates.tolist(), other.top_k)
    mixed = infer_message("rank", RANK, is_raw=False)
    mixed.raw_input_contents.extend(one.raw for one in RANK)
    with pytest.raises(grpc.aio.AioRpcError, match="has contents, and raw_input_contents too"):
        await rig.inference("ModelInfer", mixed)


# ---- streams


async def signals(rig: Rig, asked: list[Any]) -> list[Any]:
    stub = rig.channel.stream_stream(
        f"/{OURS}/Signals",
        request_serializer=lambda one: one.SerializeToString(),
        response_deserializer=message("npu_gr.v1.SignalVerdict").FromString,
    )
    return [one async for one in stub(iter(asked), timeout=20)]


async def test_a_stream_of_signals(rig: Rig) -> None:
    """Verdicts come in the order of the signals; one that is refused ends nothing."""
    signal = message("npu_gr.v1.SignalRequest")
    asked = [signal(user_id=f"u{index}" if index % 3 else "", base="f") for index in range(2 * MOST)]
    verdicts = await signals(rig, asked)
    assert [one.WhichOneof("verdict") for one in verdicts] == [
        "answer" if index % 3 else "problem" for index in range(2 * MOST)
    ]
    assert {one.problem.status for one in verdicts if one.HasField("problem")} == {422}
    users = [request.user for _, request, _ in rig.service.served]
    assert users == [UserKey("", f"u{index}") for index in range(2 * MOST) if index % 3]
    rig.service.why_not_ready = "draining"
    (late,) = await signals(rig, [signal(user_id="u")])
    assert (late.problem.status, late.problem.detail) == (503, "draining")


async def test_a_stream_that_breaks_off_leaves_nothing(rig: Rig) -> None:
    rig.service.waits = asyncio.Event()
    task = asyncio.create_task(signals(rig, [message("npu_gr.v1.SignalRequest")(user_id="u")] * 3))
    await rig.service.waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: rig.service.door.counts("signal")["inside"] == 0)
    await until(lambda: rig.count("requests_in_flight") == 0)


# ---- health, log, TLS, stop


async def test_health_follows_the_instance(rig: Rig) -> None:
    asked = message("grpc.health.v1.HealthCheckRequest")
    answer = "grpc.health.v1.HealthCheckResponse"
    for service in ("", INFERENCE, OURS):
        assert (await call(rig.channel, f"/{HEALTH}/Check", asked(service=service), answer)).status == 1
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await call(rig.channel, f"/{HEALTH}/Check", asked(service="x"), answer)
    watch = rig.channel.unary_stream(f"/{HEALTH}/Watch", response_deserializer=message(answer).FromString)
    seen = []
    watching = watch(asked().SerializeToString(), timeout=20)
    async for status in watching:
        seen.append(status.status)
        rig.service.why_not_ready = "draining"
        if len(seen) == 2:
            break
    watching.cancel()
    assert seen == [1, 2]
    assert (await call(rig.channel, f"/{HEALTH}/Check", asked(), answer)).status == 2
    assert not (await rig.inference("ServerReady")).ready
    assert not (await rig.inference("ModelReady", message("inference.ModelReadyRequest")(name="rank"))).ready


async def test_the_log_has_the_line_of_http(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "npu_gr.request")
    asked = message("npu_gr.v1.RankRequest")(**fields(KINDS["rank"]))
    stub = rig.channel.unary_unary(f"/{OURS}/Rank")
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    await stub(asked.SerializeToString(), timeout=10, metadata=(("x-request-id", "mine"), ("traceparent", trace)))
    line = json.loads(caplog.records[-1].getMessage())
    assert (line["request_id"], line["trace_id"]) == ("mine", "a" * 32)
    assert (line["method"], line["route"], line["status"]) == ("POST", f"/{OURS}/Rank", 200)
    assert EXAMPLES["rank"].log.items() <= line.items()


async def test_over_tls_it_follows_the_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    client = authority.issue("caller")
    tls = ServerTlsConfig(certificate=str(pair.certificate), key=str(pair.key), client_ca=str(authority.ca))

    def credentials(*own: bytes) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(authority.ca.read_bytes(), *own)

    own = (client.key.read_bytes(), client.certificate.read_bytes())
    async with serving_rpc(credentials=credentials(*own), tls=tls) as rig:
        await rig.ours("Rank", **fields(KINDS["rank"]))
        async with grpc.aio.secure_channel(rig.address, credentials()) as nobody:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await call(nobody, f"/{OURS}/Rank", b"", "npu_gr.v1.RankAnswer")
        other = Authority(tmp_path, "another")
        pair.replace_by(other.issue("127.0.0.1"))
        trusting = grpc.ssl_channel_credentials(other.ca.read_bytes(), *own)
        async with grpc.aio.secure_channel(rig.address, trusting) as fresh:
            asked = message("npu_gr.v1.RankRequest")(**fields(KINDS["rank"]))
            await call(fresh, f"/{OURS}/Rank", asked, "npu_gr.v1.RankAnswer")


class Held(FakeService):
    """A service that answers when a test lets it."""

    def __init__(self) -> None:
        super().__init__({name: one.answer for name, one in EXAMPLES.items()})
        self.has_one = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def serve(self, *asked: Any) -> Any:
        self.has_one.set()
        await self.may_answer.wait()
        return await super().serve(*asked)


async def test_a_stop_lets_calls_end() -> None:
    service = Held()
    async with serving_rpc(service) as rig:
        held = asyncio.create_task(rig.ours("Rank", **fields(KINDS["rank"])))
        await service.has_one.wait()
        stopping = asyncio.create_task(rig.rpc.stop())
        with pytest.raises(grpc.aio.AioRpcError, match=r"UNAVAILABLE|CANCELLED"):
            async with grpc.aio.insecure_channel(rig.address) as late:
                await call(late, f"/{OURS}/Rank", b"", "npu_gr.v1.RankAnswer", timeout=2.0)
        assert not stopping.done()
        service.may_answer.set()
        assert (await held).outcome == "miss_full"
        await stopping


async def test_sigterm_drains_both() -> None:
    """Unready at once and served for the grace; then what is under way ends, over gRPC as over HTTP."""
    service = Held()
    config = ServerConfig(port=0, admin_port=0, grpc_port=0, drain_grace_s=0.2, shutdown_timeout_s=5.0)
    app = build_web_app(service, config, metrics_of_all_kinds())
    ready = asyncio.Event()

    async def on_drain() -> None:
        service.why_not_ready = "draining"

    serving = asyncio.create_task(serve(app, config, on_drain=on_drain, ready=ready))
    await ready.wait()
    asked = message("npu_gr.v1.RankRequest")(**fields(KINDS["rank"]))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app[RPC].port}") as channel:
        held = asyncio.create_task(call(channel, f"/{OURS}/Rank", asked, "npu_gr.v1.RankAnswer"))
        await service.has_one.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: service.why_not_ready == "draining")
        health = await call(channel, f"/{HEALTH}/Check", b"", "grpc.health.v1.HealthCheckResponse")
        assert health.status == 2
        await asyncio.sleep(0.3)  # over the grace
        assert not serving.done()
        service.may_answer.set()
        assert (await held).outcome == "miss_full"
    await serving


async def test_a_port_that_is_taken_is_told() -> None:
    async with serving_rpc() as rig:
        app = build_web_app(rig.service, ServerConfig(grpc_port=rig.rpc.port), metrics_of_all_kinds())
        with pytest.raises(ConfigError, match=rf"server.grpc_port: cannot listen on 127.0.0.1:{rig.rpc.port}"):
            await app[RPC].listen()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"grpc_port": 0, "workers": 2}, "grpc_port: 0, any free one, and workers: 2, which share one: name a port"),
        ({"grpc_port": 8080}, "grpc_port: 8080 is the port of HTTP too"),
        ({"grpc_port": 8081}, "grpc_port: 8081 is the port of HTTP too"),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        ServerConfig(**settings)
