"""The endpoint picker, asked as a gateway asks it, through grpcio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from npu_gr.core.kinds import Routing
from npu_gr.core.settings import from_table
from npu_gr.route import external_processor_pb2 as pb
from npu_gr.route import picker
from npu_gr.route.config import RouterConfig
from npu_gr.route.discovery import addresses
from npu_gr.route.fan_out import InstanceCalls
from npu_gr.route.picker import picking
from tests.certificates import Authority
from tests.route.fake import Fake, row, table_of, until

HEALTH = "/grpc.health.v1.Health/Check"
FULL = pb.FULL_DUPLEX_STREAMED


class Asked:
    """A gateway's channel to a picker with three fakes behind it."""

    def __init__(self, fakes: list[Fake], channel: Any) -> None:
        self.fakes = fakes
        self.endpoints = {f"127.0.0.1:{fake.port}": fake for fake in fakes}
        self._process = channel.stream_stream(
            f"/{picker.SERVICE}/Process",
            pb.ProcessingRequest.SerializeToString,
            pb.ProcessingResponse.FromString,
        )
        self._check = channel.unary_unary(
            HEALTH, pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
        )

    async def process(self, *requests: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """Say everything, or as much as the picker wants to hear; then hear everything."""
        call = self._process()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for request in requests:
                await call.write(request)
            await call.done_writing()
        return [one async for one in call]

    async def chosen(self, path: str, user: str, subset: list[str] | None = None) -> list[Fake]:
        (response,) = await self.process(headers({"x-user-id": user}, path, subset=subset))
        return [self.endpoints[one] for one in choice(response).split(",")]

    async def health(self, service: str = "readiness") -> int:
        answered: pb.HealthCheckResponse = await self._check(pb.HealthCheckRequest(service=service))
        return answered.status


@asynccontextmanager
async def asked(
    credentials: grpc.ChannelCredentials | None = None, **sections: Any
) -> AsyncIterator[Asked]:
    fakes = [Fake(f"i{i}") for i in range(3)]
    for fake in fakes:
        await fake.start()
    given = {"port": 0, **sections.pop("picker", {})}
    config = from_table(table_of(fakes, picker=given, **sections), RouterConfig)
    listed = config.discovery.instances
    at = await addresses(listed, {})
    calls = InstanceCalls(config)
    try:
        async with picking(config, lambda: (calls, listed, at)) as port:
            address = f"127.0.0.1:{port}"
            made = (
                grpc.aio.secure_channel(address, credentials)
                if credentials
                else grpc.aio.insecure_channel(address)
            )
            async with made as channel:
                yield Asked(fakes, channel)
    finally:
        for fake in fakes:
            await fake.stop()


def headers(
    given: dict[str, str],
    path: str = "/v1/rank",
    mode: pb.BodySendMode = pb.NONE,
    subset: list[str] | None = None,
) -> pb.ProcessingRequest:
    """The first message of a request, as Envoy writes it."""
    pairs = {
        ":method": "DELETE" if "users" in path else "POST",
        ":path": path,
        ":authority": "a",
        **given,
    }
    modes = pb.ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode)
    request = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=header_map(pairs.items())),
        protocol_config=modes.SerializeToString(),
    )
    if subset is not None:
        request.metadata_context = metadata(
            "envoy.lb.subset_hint", {"x-gateway-destination-endpoint-subset": subset}
        )
    return request


def metadata(space: str, given: dict[str, Any]) -> bytes:
    made = pb.Metadata()
    made.filter_metadata[space].update(given)
    return made.SerializeToString()


def header_map(pairs: Iterable[tuple[str, str]]) -> pb.HeaderMap:
    values = (pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs)
    return pb.HeaderMap(headers=[one.SerializeToString() for one in values])


def chunk(data: bytes, ends: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=ends))


def answer(status: int, served: str = "") -> pb.ProcessingRequest:
    """The head of an instance's answer."""
    head = header_map([(":status", str(status))])
    request = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=head))
    if served:
        request.metadata_context = metadata(
            "envoy.lb", {"x-gateway-destination-endpoint-served": served}
        )
    return request


def choice(response: pb.ProcessingResponse) -> str:
    """The endpoints that a response chooses; the header and the metadata agree."""
    is_body = response.WhichOneof("response") == "request_body"
    common = response.request_body.response if is_body else response.request_headers.response
    (option,) = common.header_mutation.set_headers
    value = response.dynamic_metadata.fields["envoy.lb"].struct_value[
        "x-gateway-destination-endpoint"
    ]
    assert (option.header.key, option.header.raw_value.decode()) == (
        "x-gateway-destination-endpoint",
        value,
    )
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return str(value)


def rejection(response: pb.ProcessingResponse) -> int:
    assert response.WhichOneof("response") == "immediate_response", response
    status: int = response.immediate_response.status.code
    return status


async def test_a_user_stays_with_an_instance_and_a_rank_has_a_second_one() -> None:
    async with asked() as a:
        homes = {}
        for i in range(30):
            (home,) = await a.chosen("/v1/signal", f"u{i}")
            first, second = await a.chosen("/v1/rank", f"u{i}")
            assert first is home
            assert second is not home
            homes[f"u{i}"] = home.name
        assert len(set(homes.values())) == 3


async def test_a_rank_follows_the_instance_that_took_its_signal() -> None:
    async with asked() as a:
        (home,) = await a.chosen("/v1/signal", "u")
        other = next(fake for fake in a.fakes if fake is not home)
        said = (
            headers({"x-user-id": "u"}, "/v1/signal"),
            answer(202, served=f"127.0.0.1:{other.port}"),
        )
        _, told = await a.process(*said)
        (option,) = told.response_headers.response.header_mutation.set_headers
        assert (option.header.key, option.header.raw_value.decode()) == (
            "X-NpuGr-Instance",
            other.name,
        )
        assert (await a.chosen("/v1/rank", "u"))[0] is other


async def test_a_subset_of_the_gateway_is_obeyed_and_a_user_outside_goes_to_the_next() -> None:
    async with asked() as a:
        (home,) = await a.chosen("/v1/signal", "u")
        rest = [f"127.0.0.1:{fake.port}" for fake in a.fakes if fake is not home]
        assert (await a.chosen("/v1/rank", "u", subset=rest))[0] is not home
        (nobody,) = await a.process(headers({"x-user-id": "u"}, subset=["10.0.0.1:1"]))
        assert rejection(nobody) == 503


async def test_an_instance_that_is_not_ready_gets_nothing() -> None:
    async with asked() as a:
        (home,) = await a.chosen("/v1/signal", "u")
        home.ready_status = 503

        async def is_out() -> bool:
            return (await a.chosen("/v1/rank", "u"))[0] is not home

        await until(is_out)
        for fake in a.fakes:
            fake.ready_status = 503

        async def is_unready() -> bool:
            return await a.health() == pb.HealthCheckResponse.NOT_SERVING

        await until(is_unready)
        assert await a.health("liveness") == pb.HealthCheckResponse.SERVING


@pytest.mark.parametrize("mode", [pb.BUFFERED, FULL])
async def test_a_body_names_the_user_and_is_passed_on_byte_for_byte(mode: pb.BodySendMode) -> None:
    async with asked() as a:
        (home,) = await a.chosen("/v1/signal", "7")
        body = b'{"user_id": 7, "x": "' + b"a" * 200_000 + b'"}'
        pieces = (
            [body[i : i + 50_000] for i in range(0, len(body), 50_000)] if mode == FULL else [body]
        )
        sent = [chunk(piece, i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        responses = await a.process(headers({}, mode=mode), *sent)
        if mode == FULL:
            picked, *rest = responses
            got = [one.request_body.response.body_mutation.streamed_response for one in rest]
            assert b"".join(one.body for one in got) == body
            assert [one.end_of_stream for one in got] == [False] * (len(got) - 1) + [True]
        else:
            _, picked = responses
        assert a.endpoints[choice(picked).split(",")[0]] is home


async def test_what_the_picker_answers_itself() -> None:
    async with asked() as a:
        (erased,) = await a.process(headers({}, "/v1/users/u"))
        assert rejection(erased) == 501
        _, no_name = await a.process(headers({}, mode=pb.BUFFERED), chunk(b"{}", ends=True))
        assert rejection(no_name) == 400
        whatever = await a.process(headers({}, "/v1/models"))
        assert choice(whatever[0])


async def test_what_is_too_large_or_no_message_ends_the_stream_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(picker, "MOST_BODY_BYTES", 1000)
    async with asked() as a:
        *_, rejected = await a.process(headers({}, mode=FULL), *[chunk(b"x" * 400)] * 3)
        assert rejection(rejected) == 413
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await a.process(
                headers({"x-user-id": "u"}), chunk(b"x" * (picker.MOST_MESSAGE_BYTES + 1))
            )
        assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        bad = headers({"x-user-id": "u"})
        bad.metadata_context = b"\xff\xff"
        with pytest.raises(grpc.aio.AioRpcError):
            await a.process(bad)
        assert len(await a.chosen("/v1/rank", "u")) == 2


async def test_calls_that_say_nothing_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker, "FIRST_S", 0.05)
    async with asked() as a:
        for silent in [a._process() for _ in range(20)]:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await silent.read()
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(await a.chosen("/v1/rank", "u")) == 2


async def test_no_page_of_a_browser_asks() -> None:
    async with asked() as a:
        given = (("origin", "http://evil.example"),)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await a._process(metadata=given).read()
        assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await a._check(pb.HealthCheckRequest(), metadata=given)
        assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_gateways_come_over_tls_with_a_certificate(authority: Authority) -> None:
    pair, own = authority.issue("127.0.0.1"), authority.issue("gateway")
    tls = {
        "certificate": str(pair.certificate),
        "key": str(pair.key),
        "client_ca": str(authority.ca),
    }
    trusted = authority.ca.read_bytes()
    shown = grpc.ssl_channel_credentials(
        trusted, own.key.read_bytes(), own.certificate.read_bytes()
    )
    async with asked(shown, picker={"tls": tls}) as a:
        assert len(await a.chosen("/v1/rank", "u")) == 2
    async with asked(grpc.ssl_channel_credentials(trusted), picker={"tls": tls}) as a:
        with pytest.raises(grpc.aio.AioRpcError):
            await a.health()


async def test_the_list_of_instances_changes_and_moves_only_its_own_users() -> None:
    fakes = [Fake(f"i{i}") for i in range(4)]
    for fake in fakes:
        await fake.start()
    try:
        config = from_table(table_of(fakes[:3]), RouterConfig)
        fleet, calls = picker.EndpointTable(config), InstanceCalls(config)
        of = [from_table(row(fake), type(config.discovery.instances[0])) for fake in fakes]
        homes = []
        for listed in (of[:3], of):
            await fleet.look(calls, listed, await addresses(listed, {}))
            homes.append(
                [fleet.choose(Routing.SIGNAL, f"u{i}".encode(), None)[0] for i in range(200)]
            )
        moved = {after for before, after in zip(*homes, strict=True) if before != after}
        assert moved == {"i3"}
    finally:
        for fake in fakes:
            await fake.stop()
