"""A router with a picker, and what a gateway says to it through a gRPC library that is not ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from npu_gr.router.picker import external_processor_pb2 as pb
from tests.router.chaos import free_port
from tests.router.fake import Site, site

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEALTH = "/grpc.health.v1.Health/Check"


class Asked:
    """A gateway's channel to the picker of a site."""

    def __init__(self, s: Site, port: int, channel: Any) -> None:
        self.site, self.port = s, port
        self._process = channel.stream_stream(
            PROCESS, pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString
        )
        self._check = channel.unary_unary(
            HEALTH, pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
        )

    async def process(self, requests: Iterable[pb.ProcessingRequest]) -> list[pb.ProcessingResponse]:
        """Say everything, or as much as the picker wants to hear; then hear everything."""
        call = self._process()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for request in requests:
                await call.write(request)
            await call.done_writing()
        return [one async for one in call]

    def open(self) -> Any:
        """Open a stream for a conversation."""
        return self._process()

    async def health(self, service: str) -> int:
        answered: pb.HealthCheckResponse = await self._check(pb.HealthCheckRequest(service=service))
        return answered.status


@asynccontextmanager
async def asked(credentials: grpc.ChannelCredentials | None = None, **sections: Any) -> AsyncIterator[Asked]:
    port = free_port()
    address = f"127.0.0.1:{port}"
    sections["picker"] = {"port": port, **sections.get("picker", {})}
    async with site(**sections) as s:
        made = (
            grpc.aio.insecure_channel(address) if credentials is None else grpc.aio.secure_channel(address, credentials)
        )
        async with made as channel:
            yield Asked(s, port, channel)


def headers(
    given: dict[str, str] | list[tuple[str, str]],
    path: str = "/v1/rank",
    mode: pb.BodySendMode = pb.NONE,
    subset: list[str] | None = None,
    ends: bool = False,
) -> pb.ProcessingRequest:
    """The first message of a request, as Envoy writes it."""
    pairs = [(":method", "POST"), (":path", path), (":authority", "a")]
    pairs += given.items() if isinstance(given, dict) else given
    modes = pb.ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode)
    request = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=header_map(pairs), end_of_stream=ends),
        protocol_config=modes.SerializeToString(),
    )
    if subset is not None:
        request.metadata_context = metadata("envoy.lb.subset_hint", {"x-gateway-destination-endpoint-subset": subset})
    return request


def metadata(space: str, given: dict[str, Any]) -> bytes:
    made = pb.Metadata()
    made.filter_metadata[space].update(given)
    return made.SerializeToString()


def header_map(pairs: list[tuple[str, str]]) -> pb.HeaderMap:
    values = (pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs)
    return pb.HeaderMap(headers=[one.SerializeToString() for one in values])


def chunk(data: bytes, ends: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=ends))


def answer(status: int, served: str = "") -> pb.ProcessingRequest:
    """The head of an instance's answer."""
    request = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=header_map([(":status", str(status))])))
    if served:
        request.metadata_context = metadata("envoy.lb", {"x-gateway-destination-endpoint-served": served})
    return request


def choice(response: pb.ProcessingResponse) -> str:
    """The endpoints that a response chooses; the header and the metadata agree."""
    body = response.WhichOneof("response") == "request_body"
    common = response.request_body.response if body else response.request_headers.response
    (option,) = common.header_mutation.set_headers
    value = response.dynamic_metadata.fields["envoy.lb"].struct_value["x-gateway-destination-endpoint"]
    assert (option.header.key, option.header.raw_value.decode()) == ("x-gateway-destination-endpoint", value)
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return str(value)


def refusal(response: pb.ProcessingResponse) -> int:
    assert response.WhichOneof("response") == "immediate_response", response
    return response.immediate_response.status.code


def added_headers(response: pb.ProcessingResponse) -> dict[str, str]:
    """What is added to an instance's answer."""
    options = response.response_headers.response.header_mutation.set_headers
    return {one.header.key: one.header.raw_value.decode() for one in options}
