"""A gRPC call passes the steps of a request over HTTP: key, tenant, time limit, counts, log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from npu_gr.core.errors import ConfigError, NotTaken, Overloaded, UnknownPrefix
from npu_gr.core.kinds import Scope
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.server.config import ServerConfig
from npu_gr.server.grpc import calls
from npu_gr.server.grpc.inference import HEALTH, INFERENCE, MOST_UNDER_WAY, message
from npu_gr.server.grpc.server import RPC
from npu_gr.server.oip.models import MODELS
from npu_gr.server.routes import build_web_app
from npu_gr.server.run import serve
from tests.certificates import Authority
from tests.keys import entry, secret, write_keys
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, metrics_of_all_kinds
from tests.server.grpc.rig import INFER, Rig, call, serving_rpc
from tests.server.oip.inputs import Input, infer_message, inputs_of, json_body
from tests.serving import until
from tests.sources import ROOT

RANK: dict[str, Any] = EXAMPLES["rank"].body or {}
SMALL = {"user_id": "u", "candidates": [1, 2, 3]}
INPUTS = inputs_of(SMALL)
RESPONSE = "inference.ModelInferResponse"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving_rpc() as made:
        yield made


async def rejected(
    rig: Rig, body: dict[str, Any], key: str | None = None
) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer("rank", body, key)
    return caught.value.code(), caught.value.details() or ""


def test_the_compiled_form_is_that_of_the_files(tmp_path: Path) -> None:
    """Else run `make proto`, and commit it."""
    folder = ROOT / "npu_gr" / "server" / "grpc" / "protos"
    made = tmp_path / "made"
    files = ("health.proto", "inference.proto")
    assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={made}", *files]) == 0
    one, other = (
        descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes())
        for path in (made, folder / "compiled.binpb")
    )
    assert one == other


# ---- every model


@pytest.mark.parametrize("model", MODELS)
async def test_every_model_is_asked_as_over_http(model: str, rig: Rig) -> None:
    """The service gets what it gets over HTTP, and metrics and log count the kind."""
    example = EXAMPLES[model]
    answer = await rig.infer(model, example.body or {})
    assert re.fullmatch("[0-9a-f]{32}", answer.parameters["request_id"].string_param)
    async with rig.http.post(example.path, json=example.body) as response:
        assert response.status == 200
    (_, ours, _), (_, theirs, _) = rig.service.served
    assert ours.user == theirs.user == example.user
    for name in ("candidates", "num_items"):
        one: Any = getattr(ours, name, None)
        other: Any = getattr(theirs, name, None)
        assert np.array_equal(one, other)
    assert rig.count("requests_total", route=INFER, code="200") == 1
    assert rig.count("admissions_total", kind=model, verdict="admitted") == 2


async def test_calls_that_are_not_here_are_unimplemented(rig: Rig) -> None:
    """Those of our own service, which went, too."""
    for path in (
        f"/{INFERENCE}/ModelConfig",
        "/npu_gr.v1.Recommender/Rank",
        "/npu_gr.v1.Recommender/Signals",
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(rig.channel, path, b"", RESPONSE)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


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

        def bearer(name: str) -> str:
            return f"Bearer {secret(name)}"

        for key in (None, "Bearer x", "Basic x", bearer("nobody")):
            assert (await rejected(rig, SMALL, key))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await rejected(rig, SMALL, bearer("observes")))[
            0
        ] is grpc.StatusCode.PERMISSION_DENIED
        code, detail = await rejected(rig, {**SMALL, "tenant": "other"}, bearer("shop"))
        assert (code, "is for the tenant 'shop' only" in detail) == (
            grpc.StatusCode.PERMISSION_DENIED,
            True,
        )
        assert not rig.service.served
        answer = await rig.infer("rank", SMALL, bearer("shop"))
        assert answer.model_version == "m"
        assert {request.user.tenant for _, request, _ in rig.service.served} == {"shop"}
        for name, scope in (("ServerMetadata", "infers"), ("ModelStatistics", "observes")):
            await rig.inference(name, key=bearer(scope))
            with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
                await rig.inference(name, key=bearer("observes" if scope == "infers" else "infers"))
        assert (await rig.inference("ServerReady")).ready  # as over HTTP: health needs no key
        assert (await rig.inference("ServerLive")).live
        spent = [await rejected_or_not(rig, bearer("slow")) for _ in range(3)]
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in spent
        stream = rig.channel.stream_stream(f"/{INFERENCE}/ModelStreamInfer")
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await stream(iter([b""]), timeout=10).read()


async def rejected_or_not(rig: Rig, key: str) -> grpc.StatusCode | None:
    try:
        await rig.infer("rank", SMALL, key)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


# ---- time


async def test_the_deadline_is_the_budget(rig: Rig) -> None:
    await rig.infer("rank", RANK, timeout=3.0)
    await rig.infer("rank", RANK, timeout=None)
    await rig.infer("rank", RANK, timeout=3000.0)
    await rig.infer("rank", SMALL, parameters={"timeout": {"int64_param": 500_000}})
    budgets = [budget_s for _, _, budget_s in rig.service.served]
    config = ServerConfig()
    granted_s = 3.0 * 1.01  # gRPC sends three digits of a deadline, rounded up
    for budget_s, most_s in zip(
        budgets, (granted_s, config.default_budget_s, config.max_budget_s, 0.5), strict=True
    ):
        assert 0 < budget_s <= most_s
        assert budget_s > most_s - 0.4


async def test_metadata_are_the_headers_of_http(tmp_path: Path) -> None:
    async with serving_rpc(api_keys_file=write_keys(tmp_path / "keys", entry("all"))) as rig:
        stub = rig.channel.unary_unary(INFER)
        asked = infer_message("rank", INPUTS).SerializeToString()
        key = ("authorization", f"Bearer {secret('all')}")
        await stub(asked, timeout=10, metadata=(key, ("x-request-timeout-ms", "300")))
        ((_, _, budget_s),) = rig.service.served
        assert 0 < budget_s <= 0.3
        for metadata, code in (
            ((key, key), grpc.StatusCode.UNAUTHENTICATED),
            ((key, ("x-request-timeout-ms", "")), grpc.StatusCode.INVALID_ARGUMENT),
            ((key, ("x-request-timeout-ms", "0")), grpc.StatusCode.DEADLINE_EXCEEDED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub(asked, timeout=10, metadata=metadata)
            assert caught.value.code() is code
        assert len(rig.service.served) == 1


async def test_the_objective_goes_by_the_parameter_timeout(rig: Rig) -> None:
    """What no instance could answer in time is not held against this one, whichever way it came."""
    body = json_body(INPUTS, parameters={"timeout": 1})
    async with rig.http.post("/v2/models/rank/infer", data=body) as response:
        assert response.status == 504
    with pytest.raises(grpc.aio.AioRpcError, match="took the whole time limit"):
        await rig.infer("rank", SMALL, parameters={"timeout": {"int64_param": 1}})
    assert rig.count("admissions_total", kind="rank", verdict="impossible") == 2


@pytest.mark.parametrize("ends", ["cancelled", "deadline"])
async def test_who_gives_up_frees_everything(ends: str, rig: Rig) -> None:
    rig.service.waits = asyncio.Event()
    task = asyncio.create_task(rig.infer("rank", RANK, timeout=0.3 if ends == "deadline" else 10.0))
    await rig.service.waits.wait()
    if ends == "cancelled":
        task.cancel()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await task
    verdict = {"cancelled": "abandoned", "deadline": "out_of_time"}[ends]
    await until(lambda: rig.count("admissions_total", kind="rank", verdict=verdict) == 1)
    assert rig.count("requests_in_flight") == 0


# ---- errors


@pytest.mark.parametrize(
    ("error", "code", "trailing"),
    [
        (Overloaded("busy"), grpc.StatusCode.RESOURCE_EXHAUSTED, {"npu-gr-status": "429"}),
        (
            UnknownPrefix("base: not cached"),
            grpc.StatusCode.FAILED_PRECONDITION,
            {"npu-gr-status": "409"},
        ),
        (
            NotTaken("draining"),
            grpc.StatusCode.UNAVAILABLE,
            {"npu-gr-status": "503", "x-npugr-not-taken": "1"},
        ),
    ],
)
async def test_errors_keep_their_meaning(
    error: Exception, code: grpc.StatusCode, trailing: dict[str, str], rig: Rig
) -> None:
    rig.service.answers["rank"] = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.infer("rank", RANK)
    assert (caught.value.code(), caught.value.details()) == (code, str(error))
    trailers: Any = caught.value.trailing_metadata()
    told = dict(trailers)
    assert trailing.items() <= told.items()
    assert ("grpc-retry-pushback-ms" in told) == isinstance(error, Overloaded)


async def test_what_is_none_of_ours_is_told_to_nobody(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.service.answers["rank"] = "no answer at all"
    assert await rejected(rig, RANK) == (
        grpc.StatusCode.INTERNAL,
        "an unexpected error; the server's log has the traceback under this request id",
    )
    assert "AssertionError" in caplog.text


async def test_messages_that_are_none(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="the message cannot be parsed"):
        await call(rig.channel, INFER, b"\xff\xff\xff", RESPONSE)
    with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
        await call(rig.channel, INFER, b"x" * 5_000_000, RESPONSE)
    stub = rig.channel.stream_unary(INFER)
    with pytest.raises(grpc.aio.AioRpcError, match="the call has no message"):
        await stub(iter([]), timeout=10)


async def test_no_message_is_more_than_a_fault_of_the_caller(rig: Rig) -> None:
    """Random damage to good messages gives an answer or a rejection with the right status."""
    draw = random.Random(0)
    codes = set()
    for index in range(300):
        model = draw.choice(list(MODELS))
        good = infer_message(
            model, inputs_of(EXAMPLES[model].body or {}), is_raw=bool(index % 2)
        ).SerializeToString()
        broken = bytearray(good)
        for _ in range(draw.choice((0, 1, 2, 8))):
            at = draw.randrange(len(broken))
            match draw.randrange(3):
                case 0:
                    broken[at] = draw.randrange(256)
                case 1:
                    del broken[at : at + draw.choice((1, 4, 40))]
                case _:
                    broken[at:at] = draw.choice(
                        (b"\x2a\x00", b"\x3a\x00", b"\xff", draw.randbytes(8))
                    )
            broken = broken or bytearray(b" ")
        try:
            await call(rig.channel, INFER, bytes(broken), RESPONSE)
            codes.add(grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            codes.add(error.code())
    assert codes - {grpc.StatusCode.NOT_FOUND} == {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_name": "nope"}, "model: 'nope' is not served"),
        ({"model_version": "7"}, "version: '7' of rank is not served"),
        ({"raw_input_contents": [b""]}, "raw_input_contents: 1, and there are 2 inputs"),
        ({"parameters": {"x": {}}}, "parameters: 'x' has no value"),
        (
            {"parameters": {str(i): {"bool_param": True} for i in range(101)}},
            "parameters: 101 entries",
        ),
        ({"outputs": [{"name": "scores"}]}, "outputs: unknown output scores"),
        (
            {"outputs": [{"name": "top", "parameters": {"classification": {"int64_param": 3}}}]},
            "parameters are not supported",
        ),
        ({"inputs": [{"name": "user_id", "datatype": "BYTES", "shape": [1] * 9}]}, "takes 1"),
    ],
)
async def test_faults_of_an_infer(changes: dict[str, Any], says: str, rig: Rig) -> None:
    asked = {"model_name": "rank", "inputs": infer_message("rank", INPUTS).inputs} | changes
    raws = [one.raw for one in INPUTS[: len(asked["inputs"])]]
    infer = message("inference.ModelInferRequest")(**{"raw_input_contents": raws, **asked})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.inference("ModelInfer", infer)
    assert says in (caught.value.details() or "")
    assert not rig.service.served


async def test_contents_are_the_raw_ones(rig: Rig) -> None:
    body = [*INPUTS, Input("top_k", "INT64", [3])]
    for is_raw in (True, False):
        await rig.inference("ModelInfer", infer_message("rank", body, is_raw=is_raw))
    (_, one, _), (_, other, _) = rig.service.served
    assert (one.user, one.candidates.tolist(), one.top_k) == (
        other.user,
        other.candidates.tolist(),
        other.top_k,
    )
    mixed = infer_message("rank", INPUTS, is_raw=False)
    mixed.raw_input_contents.extend(one.raw for one in INPUTS)
    with pytest.raises(grpc.aio.AioRpcError, match="has both contents and raw_input_contents"):
        await rig.inference("ModelInfer", mixed)


# ---- streams


async def streamed(rig: Rig, asked: list[Any]) -> list[Any]:
    stub = rig.channel.stream_stream(
        f"/{INFERENCE}/ModelStreamInfer",
        request_serializer=lambda one: one.SerializeToString(),
        response_deserializer=message("inference.ModelStreamInferResponse").FromString,
    )
    return [one async for one in stub(iter(asked), timeout=20)]


async def test_a_stream_is_answered_in_its_order(rig: Rig) -> None:
    """One that is rejected ends nothing."""
    num = 2 * MOST_UNDER_WAY
    users = [f"u{index}" if index % 3 else "" for index in range(num)]
    asked = [
        infer_message("match", [Input("user_id", "BYTES", [user])], id=str(i))
        for i, user in enumerate(users)
    ]
    answers = await streamed(rig, asked)
    assert [one.infer_response.id for one in answers] == [
        str(i) if user else "" for i, user in enumerate(users)
    ]
    assert all(
        "user_id" in one.error_message for one, user in zip(answers, users, strict=True) if not user
    )
    assert [request.user.user for _, request, _ in rig.service.served] == [
        user for user in users if user
    ]


async def test_a_stream_that_breaks_off_leaves_nothing(rig: Rig) -> None:
    rig.service.waits = asyncio.Event()
    task = asyncio.create_task(streamed(rig, [infer_message("rank", INPUTS)] * 3))
    await rig.service.waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: rig.count("requests_in_flight") == 0)


# ---- health, log, TLS, stop


async def test_health_follows_the_instance(rig: Rig) -> None:
    asked = message("grpc.health.v1.HealthCheckRequest")
    answer = "grpc.health.v1.HealthCheckResponse"
    for service in ("", INFERENCE, HEALTH):
        assert (
            await call(rig.channel, f"/{HEALTH}/Check", asked(service=service), answer)
        ).status == 1
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await call(rig.channel, f"/{HEALTH}/Check", asked(service="x"), answer)
    watch = rig.channel.unary_stream(
        f"/{HEALTH}/Watch", response_deserializer=message(answer).FromString
    )
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
    assert not (
        await rig.inference("ModelReady", message("inference.ModelReadyRequest")(name="rank"))
    ).ready


async def test_the_log_has_the_line_of_http(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "npu_gr.request")
    asked = infer_message("rank", inputs_of(RANK))
    stub = rig.channel.unary_unary(INFER)
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    await stub(
        asked.SerializeToString(),
        timeout=10,
        metadata=(("x-request-id", "mine"), ("traceparent", trace)),
    )
    line = json.loads(caplog.records[-1].getMessage())
    assert (line["request_id"], line["trace_id"]) == ("mine", "a" * 32)
    assert (line["method"], line["route"], line["status"]) == ("POST", INFER, 200)
    assert EXAMPLES["rank"].log.items() <= line.items()


async def test_over_tls_it_follows_the_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    client = authority.issue("caller")
    tls = ServerTlsConfig(
        certificate=str(pair.certificate), key=str(pair.key), client_ca=str(authority.ca)
    )

    def credentials(*own: bytes) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(authority.ca.read_bytes(), *own)

    own = (client.key.read_bytes(), client.certificate.read_bytes())
    async with serving_rpc(credentials=credentials(*own), tls=tls) as rig:
        await rig.infer("rank", RANK)
        async with grpc.aio.secure_channel(rig.address, credentials()) as nobody:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await call(nobody, INFER, b"", RESPONSE)
        other = Authority(tmp_path, "another")
        pair.replace_by(other.issue("127.0.0.1"))
        trusting = grpc.ssl_channel_credentials(other.ca.read_bytes(), *own)
        async with grpc.aio.secure_channel(rig.address, trusting) as fresh:
            asked = infer_message("rank", inputs_of(RANK))
            await call(fresh, INFER, asked, RESPONSE)


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
        held = asyncio.create_task(rig.infer("rank", RANK))
        await service.has_one.wait()
        stopping = asyncio.create_task(rig.rpc.stop())
        with pytest.raises(grpc.aio.AioRpcError, match=r"UNAVAILABLE|CANCELLED"):
            async with grpc.aio.insecure_channel(rig.address) as late:
                await call(late, INFER, b"", RESPONSE, timeout=2.0)
        assert not stopping.done()
        service.may_answer.set()
        assert (await held).parameters["outcome"].string_param == "miss_full"
        await stopping


async def test_sigterm_drains_both() -> None:
    """Unready at once and served for the grace.

    Then what is under way ends, over gRPC as over HTTP.
    """
    service = Held()
    config = ServerConfig(
        port=0, admin_port=0, grpc_port=0, drain_grace_s=0.2, shutdown_timeout_s=5.0
    )
    app = build_web_app(service, config, metrics_of_all_kinds())
    ready = asyncio.Event()

    async def on_drain() -> None:
        service.why_not_ready = "draining"

    serving = asyncio.create_task(serve(app, config, on_drain=on_drain, ready=ready))
    await ready.wait()
    asked = infer_message("rank", inputs_of(RANK))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app[RPC].port}") as channel:
        held = asyncio.create_task(call(channel, INFER, asked, RESPONSE))
        await service.has_one.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: service.why_not_ready == "draining")
        health = await call(channel, f"/{HEALTH}/Check", b"", "grpc.health.v1.HealthCheckResponse")
        assert health.status == 2
        await asyncio.sleep(0.3)  # over the grace
        assert not serving.done()
        service.may_answer.set()
        assert (await held).parameters["outcome"].string_param == "miss_full"
    await serving


async def test_a_port_that_is_taken_is_told() -> None:
    async with serving_rpc() as rig:
        app = build_web_app(
            rig.service, ServerConfig(grpc_port=rig.rpc.port), metrics_of_all_kinds()
        )
        with pytest.raises(
            ConfigError,
            match=r"server.grpc_port: cannot listen on "
            rf"127.0.0.1:{rig.rpc.port}",
        ):
            await app[RPC].listen()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"grpc_port": 8080}, "grpc_port: 8080 is also the port of HTTP"),
        ({"grpc_port": 8081}, "grpc_port: 8081 is also the port of HTTP"),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        ServerConfig(**settings)


# ---- calls that say nothing


@pytest.mark.parametrize("path", [f"/{HEALTH}/Watch", f"/{INFERENCE}/ModelStreamInfer", INFER])
async def test_calls_that_say_nothing_shut_no_other_out(
    path: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of them ends, so that the places of the server are never all held by them."""
    monkeypatch.setattr(calls, "MAX_WAITING", 8)
    silent = [rig.channel.stream_stream(path)(timeout=60) for _ in range(40)]
    await until(lambda: sum(one.done() for one in silent) >= 32)
    assert len(calls._waiting) == 8
    assert (await rig.infer("rank", SMALL)).model_name == "rank"
    for one in silent:
        one.cancel()
    await until(lambda: not calls._waiting)


async def test_calls_over_the_bound_are_rejected_and_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_CALLS", 1)
    watch = rig.channel.unary_stream(f"/{HEALTH}/Watch")(b"", timeout=60)
    assert await watch.read() == b"\x08\x01"
    for path, number in ((INFER, 1), (f"/{INFERENCE}/ModelStreamInfer", 2)):
        for _ in range(number):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in rig.channel.unary_stream(path)(b"", timeout=10):
                    pass
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert rig.count("requests_total", route=path, code="429") == number
    watch.cancel()
    await until(lambda: not calls._calls)
    assert (await rig.infer("rank", SMALL)).model_name == "rank"


async def test_no_page_of_a_browser_calls(rig: Rig) -> None:
    for name in ("origin", "sec-fetch-site"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.channel.unary_unary(f"/{HEALTH}/Check")(
                b"", metadata=((name, "http://evil.example"),)
            )
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rig.channel.unary_stream(f"/{HEALTH}/Watch")(
                b"", metadata=((name, "http://evil.example"),)
            ):
                pass
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
