"""What the picker answers, asked through a gRPC library that is not ours: it chooses as the router does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any
from urllib.parse import quote

import grpc
import msgspec
import pytest
from yarl import URL

from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import from_table
from npu_gr.router.config import RouterConfig
from npu_gr.router.picker import external_processor_pb2 as pb
from tests.router.fake import table
from tests.router.picker.asked import PROCESS, added_headers, answer, asked, choice, chunk, header_map, headers, refusal


async def test_signals_and_ranks_go_where_the_router_itself_sends_them() -> None:
    async with asked() as a:
        s = a.site
        for i in range(30):
            user = f"u{i}"
            endpoint = f"127.0.0.1:{s.owner(user).port}"
            signal, added = await a.process([headers({"x-user-id": user}, "/v1/signal"), answer(202)])
            assert choice(signal) == endpoint
            told = added_headers(added)
            assert told["X-NpuGr-Placement"] == f"{s.owner(user).name}@{s.router.members.ring.epoch}"
            (rank,) = await a.process([headers({"x-user-id": user})])
            first, second = choice(rank).split(",")
            assert first == endpoint != second
            assert (await s.post("rank", user))[1]["instance"] == s.owner(user).name
        assert s.router.metrics.placed.value(how="signal") >= 30
        assert s.router.metrics.requests.value(kind="signal", status="202") == 30
        assert s.router.in_flight == sum(one.in_flight for one in s.router.members.instances.values()) == 0


async def test_a_request_is_in_flight_until_its_stream_ends() -> None:
    async with asked() as a:
        call = a.open()
        await call.write(headers({"x-user-id": "u"}))
        await call.read()
        owner = a.site.router.members.instances[a.site.owner("u").name]
        assert (a.site.router.in_flight, owner.in_flight) == (1, 1)
        call.cancel()
        await a.site.until(lambda: not a.site.router.in_flight and not owner.in_flight)


@pytest.mark.parametrize("mode", [pb.BUFFERED, pb.FULL_DUPLEX_STREAMED])
@pytest.mark.parametrize("packed", [False, True])
async def test_the_user_is_read_from_the_body(mode: pb.BodySendMode, packed: bool) -> None:
    async with asked() as a:
        table = {"user_id": 17, "history": {"items": list(range(40_000))}}
        body = msgspec.msgpack.encode(table) if packed else json.dumps(table).encode()
        media = "application/msgpack" if packed else "application/json; charset=utf-8"
        pieces = [body] if mode == pb.BUFFERED else [body[i : i + 50_000] for i in range(0, len(body), 50_000)]
        said = [headers({"content-type": media}, mode=mode)]
        said += [chunk(piece, piece is pieces[-1]) for piece in pieces]
        heard = await a.process(said)
        picked = heard[1] if mode == pb.BUFFERED else heard[0]
        assert choice(picked).startswith(f"127.0.0.1:{a.site.owner('17').port},")
        if mode == pb.FULL_DUPLEX_STREAMED:
            streamed = [one.request_body.response.body_mutation.streamed_response for one in heard[1:]]
            assert b"".join(one.body for one in streamed) == body
            assert [one.end_of_stream for one in streamed] == [False] * (len(streamed) - 1) + [True]
            assert max(len(one.body) for one in streamed) < 65_536
        assert a.site.router.kept.num_bytes == 0


@pytest.mark.parametrize(
    "user", ["ann@x.org", "50%", "a b", "\u0438\u043c\u044f", "u\0v", "\u540d" * 128, "%41"], ids=range(7)
)
async def test_a_user_is_one_by_header_and_by_body_and_is_forgotten_by_path(user: str) -> None:
    async with asked() as a:
        quoted = quote(user, safe="")[:512]  # as our client sends it
        body = json.dumps({"user_id": user}).encode()
        said = [headers({"content-type": "application/json"}, mode=pb.BUFFERED), chunk(body, ends=True)]
        (by_header,) = await a.process([headers({"x-user-id": quoted})])
        _, by_body = await a.process(said)
        assert choice(by_header) == choice(by_body)
        if user.isascii() and user.isprintable() and "%" not in user:
            (as_it_is,) = await a.process([headers({"x-user-id": user})])
            assert choice(as_it_is) == choice(by_header)
        if "\0" in user or len(user) > 64:
            return
        await a.process([headers({"x-user-id": quoted}, "/v1/signal")])
        assert a.site.router.members.knows(user.encode())
        async with a.site.http.delete(URL(f"{a.site.url}/v1/users/{quoted}", encoded=True)) as answer:
            assert answer.status == 204
        assert not a.site.router.members.knows(user.encode())


async def test_with_the_user_in_the_headers_no_body_is_waited_for() -> None:
    async with asked() as a:
        (one,) = await a.process([headers({"x-user-id": "u"}, mode=pb.BUFFERED)])
        assert one.HasField("mode_override"), "the gateway may keep the body"
        call = a.open()
        await call.write(headers({"x-user-id": "u"}, mode=pb.FULL_DUPLEX_STREAMED))
        choice(await call.read())
        await call.write(chunk(b"abc"))
        assert (await call.read()).request_body.response.body_mutation.streamed_response.body == b"abc"
        await call.write(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
        assert (await call.read()).HasField("request_trailers")
        await call.write(answer(200))
        assert (await call.read()).HasField("response_headers")
        await call.write(pb.ProcessingRequest(response_body=pb.HttpBody(body=b"de", end_of_stream=True)))
        echoed = (await call.read()).response_body.response.body_mutation.streamed_response
        assert (echoed.body, echoed.end_of_stream) == (b"de", True)
        await call.done_writing()
        assert not await call.read(), "its end"


async def test_only_the_gateways_subset_is_chosen_from() -> None:
    async with asked() as a:
        endpoints = {fake.name: f"127.0.0.1:{fake.port}" for fake in a.site.fakes}
        for allowed in ([endpoints["i1"]], [endpoints["i0"], endpoints["i2"]]):
            for i in range(12):
                (one,) = await a.process([headers({"x-user-id": f"u{i}"}, subset=allowed)])
                assert set(choice(one).split(",")) <= set(allowed)
        for nobody in ([], ["10.0.0.1:80"]):
            (one,) = await a.process([headers({"x-user-id": "u"}, "/v1/signal", subset=nobody)])
            assert refusal(one) == 503


BROKEN = [
    (headers({}), 400),
    (headers({}, mode=pb.BUFFERED, ends=True), 400),
    (headers([("x-user-id", "a"), ("x-user-id", "b")]), 400),
    (headers({"x-user-id": "u" * 600}), 400),
    (headers({"x-user-id": "u", "x-request-timeout-ms": "soon"}), 400),
    (headers({"x-user-id": "u", "x-request-timeout-ms": "0"}), 504),
    (headers({"x-user-id": "u", "a": "b" * 20_000}), 431),
    (headers({"x-user-id": "u", "content-length": "99999999"}), 413),
    (headers({"x-user-id": "u", "content-length": "9" * 5000}), 400),
    (headers({"x-user-id": "u", "content-length": "-1"}), 400),
    (headers({}, "/debug/config"), 404),
    (headers({}, "/readyz"), 404),  # a POST
]


@pytest.mark.parametrize(("said", "status"), BROKEN, ids=range(len(BROKEN)))
async def test_a_bad_request_is_refused_with_the_reason(said: pb.ProcessingRequest, status: int) -> None:
    async with asked() as a:
        (one,) = await a.process([said])
        assert refusal(one) == status
        problem = json.loads(one.immediate_response.body)
        assert problem["status"] == status
        assert problem["detail"]
        (good,) = await a.process([headers({"x-user-id": "u"})])
        choice(good)
        assert a.site.router.in_flight == 0


async def test_a_body_over_the_limits_is_refused_and_forgotten() -> None:
    async with asked(limits={"max_body_bytes": 100_000, "max_kept_bytes": 150_000}) as a:

        async def post(body: bytes) -> pb.ProcessingResponse:
            pieces = [body[i : i + 40_000] for i in range(0, len(body), 40_000)]
            said = [chunk(piece, i == len(pieces) - 1) for i, piece in enumerate(pieces)]
            return (await a.process([headers({}, mode=pb.FULL_DUPLEX_STREAMED), *said]))[0]

        assert refusal(await post(b"x" * 110_000)) == 413
        assert refusal(await post(b"{1")) == 400
        assert refusal(await post(b"{}")) == 422
        held = a.open()
        await held.write(headers({}, mode=pb.FULL_DUPLEX_STREAMED))
        for _ in range(2):
            await held.write(chunk(b"x" * 40_000))
        await a.site.until(lambda: a.site.router.kept.num_bytes == 80_000)
        over = a.open()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await over.write(headers({}, mode=pb.FULL_DUPLEX_STREAMED))
            await over.write(chunk(b"x" * 80_000))
        assert await over.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, "there is no room for the message"
        held.cancel()
        await a.site.until(lambda: a.site.router.kept.num_bytes == 0)


async def test_a_body_that_does_not_come_is_waited_for_within_the_budget() -> None:
    async with asked() as a:
        call = a.open()
        await call.write(headers({"x-request-timeout-ms": "50"}, mode=pb.FULL_DUPLEX_STREAMED))
        assert refusal(await call.read()) == 504


async def test_the_breaker_learns_from_answers_and_a_signal_follows_to_where_it_was_served() -> None:
    async with asked(breaker={"failures": 3, "open_s": 30.0, "max_open_ratio": 0.5}) as a:
        s = a.site
        owner = s.owner("u")
        for _ in range(3):
            await a.process([headers({"x-user-id": "u"}), answer(503)])
        (one,) = await a.process([headers({"x-user-id": "u"})])
        assert not choice(one).startswith(f"127.0.0.1:{owner.port},"), "its breaker is open"
        user = s.user_of(s.fakes[0] if owner is not s.fakes[0] else s.fakes[1])
        other = next(fake for fake in s.fakes if fake not in (owner, s.owner(user)))
        served = f"127.0.0.1:{other.port}"
        _, added = await a.process([headers({"x-user-id": user}, "/v1/signal"), answer(202, served)])
        told = added_headers(added)
        assert told["X-NpuGr-Instance"] == other.name
        (rank,) = await a.process([headers({"x-user-id": user})])
        assert choice(rank).startswith(served)


async def test_health_says_whether_an_instance_is_up() -> None:
    async with asked(health={"interval_s": 0.02, "fall": 1}) as a:
        serving = pb.HealthCheckResponse.SERVING
        for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            assert await a.health(service) == serving
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await a.health("nobody")
        for fake in a.site.fakes:
            fake.ready_status = 503
        a.site.router.is_draining = True
        assert await a.health("liveness") == serving
        assert await a.health("readiness") == pb.HealthCheckResponse.NOT_SERVING
        a.site.router.is_draining = False
        get = header_map([(":method", "GET"), (":path", "/readyz"), (":authority", "a")])
        (one,) = await a.process(
            [pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=get, end_of_stream=True))]
        )
        assert refusal(one) in (200, 503)


async def test_a_message_that_is_none_ends_its_call_and_no_other() -> None:
    async with asked(limits={"max_body_bytes": 1000}) as a, grpc.aio.insecure_channel(f"127.0.0.1:{a.port}") as channel:
        anybody: Any = channel
        raw = anybody.stream_stream(PROCESS)
        for message, code in ((b"\xff\xff\xff", "INTERNAL"), (b"x" * 200_000, "RESOURCE_EXHAUSTED")):
            call = raw()
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # it may be over before
                await call.write(message)
                await call.done_writing()
            assert (await call.code()).name == code
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await anybody.unary_unary("/a.B/C")(b"")
        choice((await a.process([headers({"x-user-id": "u"})]))[0])


def test_a_picker_for_everybody_needs_keys() -> None:
    with pytest.raises(ConfigError, match=r"picker\.host: 0\.0\.0\.0 is not loopback"):
        from_table(
            table([], discovery={"instances": [{"name": "a", "host": "a", "port": 1}]}, picker={"host": "0.0.0.0"}),
            RouterConfig,
        )
