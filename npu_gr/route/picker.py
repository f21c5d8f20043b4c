"""The endpoint picker of a Kubernetes gateway: a gRPC server for Envoy's external processing.

Each request of the gateway is a gRPC stream. The user is in its headers, or in its body if the
gateway sends the body first. The picker answers with the chosen instance, and a second one for
retries if the kind allows them. The stream ends with the request, so the open streams are the load
of the instances. Requests are queued by the gateway.

Source: the Gateway API inference extension's endpoint picker protocol (proposal 004): the chosen
endpoint is sent in a header and in dynamic metadata, with the same value.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import grpc
import msgspec
from google.protobuf.message import DecodeError

from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import Routing
from npu_gr.core.lifetime import running
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.route import external_processor_pb2 as pb
from npu_gr.route.config import InstanceConfig, PickerConfig, RouterConfig, joined
from npu_gr.route.fan_out import InstanceCalls
from npu_gr.route.placement import BY_USER, Member, Ring, Signals, bound, order, routing_of, user_in
from npu_gr.server.grpc.calls import waiting

log = logging.getLogger(__name__)

# "ip:port", or several in the order of tries
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
DESTINATION_SPACE = "envoy.lb"  # metadata namespace of DESTINATION and SERVED
SUBSET_SPACE = "envoy.lb.subset_hint"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
CHUNK_BYTES = 62_000  # chunk of a forwarded body, within the limit of gateways
MOST_MESSAGE_BYTES = 1 << 20  # largest message of a gateway; bodies come in several
MOST_BODY_BYTES = 4 << 20  # largest body that is searched for the user
FIRST_S = 5.0  # time for the first message of a request
MOST_STREAMS = 1_000  # concurrent requests per connection
MOST_REQUESTS = 10_000  # concurrent requests of all connections
# body modes in which the picker may read the whole body before it chooses
_HOLDS_BODY = (pb.BUFFERED, pb.FULL_DUPLEX_STREAMED)


class UserInBody(msgspec.Struct, frozen=True):
    """The user in a body; the instance validates the other fields."""

    user_id: str | int


class PickerRejection(Exception):
    """A request that the picker answers itself."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


class EndpointTable:
    """The instances: ring, readiness, addresses and requests in flight."""

    def __init__(self, config: RouterConfig) -> None:
        self.user_header = config.user_header
        self.signals = Signals(config.relay.t_life_s, config.relay.max_remembered)
        self.in_flight = Counter[str]()
        self._factor = config.relay.load_factor
        self._timeout_s = config.health.timeout_s
        self._instances: dict[str, InstanceConfig] = {}
        self._ring = Ring(())
        self.endpoints: dict[str, str] = {}  # name -> ip:port
        self.ready: set[str] = set()
        self._weight = 0.0  # of all that are ready
        self._failures = Counter[str]()
        self._fall = config.health.fall

    async def look(
        self, calls: InstanceCalls, listed: list[InstanceConfig], addresses: Mapping[str, str]
    ) -> None:
        """Update the list of instances, their addresses and their readiness."""
        ports = {one.name: one.port for one in listed}
        self.endpoints = {
            name: joined(at, ports[name]) for name, at in addresses.items() if name in ports
        }
        if listed != list(self._instances.values()):
            self._instances = {one.name: one for one in listed}
            self._ring = Ring(Member(one.name, one.weight) for one in listed if one.special)
        ready = await calls.ready(listed, self._timeout_s)
        for name in ports:
            self._failures[name] = 0 if name in ready else self._failures[name] + 1
        self.ready = {
            one.name
            for one in listed
            if self._failures[one.name] < self._fall and one.name in self.endpoints
        }
        self._weight = sum(one.weight for one in listed if one.name in self.ready)

    def choose(self, routing: Routing | None, user: bytes, subset: set[str] | None) -> list[str]:
        """Choose the instance for a request, and a second one if the kind allows retries.

        Args:
            routing: Routing of the kind; None = any instance can answer.
            user: User of the request; empty = it has none.
            subset: Endpoints to choose from, given by the gateway; None = all.

        Returns:
            Names of the instances; empty = there is none.
        """
        # If none of them is ready, trust the gateway's list rather than our own checks.
        able: Collection[str] = self.ready or self.endpoints
        if subset is not None:
            allowed = {name for name, at in self.endpoints.items() if at in subset}
            able = (allowed & self.ready) or allowed
        now_at = time.monotonic()
        signalled = self.signals.find(user, now_at)
        has_room = self._has_room if self._factor else None
        in_flight = self.in_flight.__getitem__
        chosen = order(self._ring, routing, user, able, in_flight, signalled, has_room, most=2)
        if routing is Routing.SIGNAL and user and chosen:
            self.signals.remember(user, chosen[0], now_at)
        return chosen[: 1 + (routing is Routing.FOLLOW)]

    def _has_room(self, name: str) -> bool:
        weight = self._instances[name].weight if name in self.ready else 0.0
        total = sum(map(self.in_flight.__getitem__, self.ready))
        return self.in_flight[name] < bound(total, weight, self._weight or 1.0, self._factor)


class PickRequest:
    """A request of a gateway."""

    def __init__(self, fleet: EndpointTable) -> None:
        self._fleet = fleet
        self._routing: Routing | None = None
        self._mode: pb.BodySendMode = pb.NONE  # how the gateway sends the request's body
        self._answer_mode: pb.BodySendMode = pb.NONE
        self._subset: set[str] | None = None
        self._user = b""
        self._body: list[bytes] | None = None  # chunks, while the choice waits for the body
        self._chosen: list[str] = []  # names; the request counts as in flight at the first

    def end(self) -> None:
        """Count the request as finished."""
        if self._chosen:
            self._fleet.in_flight[self._chosen[0]] -= 1

    def answer(self, request: pb.ProcessingRequest) -> Iterable[pb.ProcessingResponse]:
        """Answer a message of the gateway.

        Raises:
            PickerRejection: The picker itself answers the request with an error.
        """
        kind = request.WhichOneof("request")
        if kind == "request_headers":
            return self._on_headers(request)
        if kind == "request_body":
            return self._on_body(request.request_body)
        if kind == "request_trailers":
            return [
                *self._on_end(()),
                pb.ProcessingResponse(request_trailers=pb.TrailersResponse()),
            ]
        if kind == "response_headers":
            return [self._on_answer(request)]
        if kind == "response_body":
            if self._answer_mode == pb.FULL_DUPLEX_STREAMED:
                return _streamed(
                    request.response_body.body, request.response_body.end_of_stream, is_answer=True
                )
            return [pb.ProcessingResponse(response_body=pb.BodyResponse())]
        if kind == "response_trailers":
            return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        return []

    def _on_headers(self, request: pb.ProcessingRequest) -> Iterable[pb.ProcessingResponse]:
        config = pb.ProtocolConfiguration.FromString(request.protocol_config)
        self._mode, self._answer_mode = config.request_body_mode, config.response_body_mode
        self._subset = _subset(request.metadata_context)
        given = _headers_of(request.request_headers.headers)
        path = given.get(":path", b"").decode("latin-1").partition("?")[0]
        method = given.get(":method", b"").decode("latin-1")
        self._routing = routing_of(method, path)
        if self._routing is Routing.EVERYWHERE:
            raise PickerRejection(
                501, "not supported by the gateway; send it to the router's own address"
            )
        named = unquote_to_bytes(given.get(self._fleet.user_header, b""))
        self._user = named or user_in(path)
        wants_body = (
            self._routing in BY_USER
            and not self._user
            and given.get("x-npugr-service") != b"normal"
        )
        if wants_body and self._mode in _HOLDS_BODY and not request.request_headers.end_of_stream:
            self._body = []
            return (
                [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]
                if self._mode == pb.BUFFERED
                else []
            )
        return [self._pick(is_in_body=False)]

    def _on_body(self, body: pb.HttpBody) -> Iterable[pb.ProcessingResponse]:
        if self._body is None:
            if self._mode == pb.FULL_DUPLEX_STREAMED:
                return _streamed(body.body, body.end_of_stream, is_answer=False)
            return [pb.ProcessingResponse(request_body=pb.BodyResponse())]
        self._body.append(body.body)
        if sum(map(len, self._body)) > MOST_BODY_BYTES:
            raise PickerRejection(
                413,
                f"the body is over {MOST_BODY_BYTES} bytes; send the user in the header "
                f"{self._fleet.user_header}",
            )
        if self._mode == pb.BUFFERED:
            self._read_user()
            return [self._pick(is_in_body=True)]
        if not body.end_of_stream:
            return []
        pieces = list(self._body)
        return self._on_end(_streamed(b"".join(pieces), is_last=True, is_answer=False))

    def _on_end(
        self, passed_on: Iterable[pb.ProcessingResponse]
    ) -> Iterable[pb.ProcessingResponse]:
        """Choose now that the whole body has arrived, if the choice was waiting for it."""
        if self._body is None:
            return passed_on
        rest = passed_on or _streamed(b"".join(self._body), is_last=False, is_answer=False)
        self._read_user()
        return [self._pick(is_in_body=False), *rest]

    def _read_user(self) -> None:
        """Read the user from the whole body."""
        assert self._body is not None
        try:
            named = msgspec.json.decode(b"".join(self._body), type=UserInBody)
        except msgspec.MsgspecError as error:
            raise PickerRejection(
                400, f"{self._fleet.user_header}: missing, and the body has no user_id: {error}"
            ) from error
        self._body = None
        self._user = str(named.user_id).encode()

    def _pick(self, *, is_in_body: bool) -> pb.ProcessingResponse:
        """Choose the instances, and make the answer to the gateway."""
        self._chosen = self._fleet.choose(self._routing, self._user, self._subset)
        if not self._chosen:
            raise PickerRejection(503, "no instance is ready")
        self._fleet.in_flight[self._chosen[0]] += 1
        value = ",".join(self._fleet.endpoints[name] for name in self._chosen)
        common = pb.CommonResponse(
            header_mutation=_set({DESTINATION: value}), clear_route_cache=True
        )
        response = pb.ProcessingResponse()
        if is_in_body:
            response.request_body.response.CopyFrom(common)
        else:
            response.request_headers.response.CopyFrom(common)
        response.dynamic_metadata.update({DESTINATION_SPACE: {DESTINATION: value}})
        if self._mode == pb.BUFFERED and not is_in_body:
            response.mode_override.SetInParent()  # mode 0 = NONE: do not send the body
        return response

    def _on_answer(self, request: pb.ProcessingRequest) -> pb.ProcessingResponse:
        """Add the name of the instance that answered.

        If the second choice answered a signal, its ranks follow it there.
        """
        response = pb.ProcessingResponse()
        if not self._chosen:  # the gateway itself answered
            response.response_headers.SetInParent()
            return response
        endpoint = _entry(request.metadata_context, DESTINATION_SPACE, SERVED)
        at = endpoint.string_value if endpoint is not None else ""
        name = next(
            (one for one, other in self._fleet.endpoints.items() if other == at), self._chosen[0]
        )
        if self._routing is Routing.SIGNAL and self._user and name != self._chosen[0]:
            self._fleet.signals.remember(self._user, name, time.monotonic())
        response.response_headers.response.header_mutation.CopyFrom(
            _set({"X-NpuGr-Instance": name})
        )
        return response


def _headers_of(headers: pb.HeaderMap) -> dict[str, bytes]:
    """Return the headers; the first one counts if a name is repeated."""
    found: dict[str, bytes] = {}
    for one in map(pb.HeaderValue.FromString, headers.headers):
        found.setdefault(one.key, one.raw_value or one.value.encode())
    return found


def _set(given: Mapping[str, str]) -> pb.HeaderMutation:
    """Make a mutation that sets headers, replacing those of the same name."""
    action = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=name, raw_value=value.encode()), append_action=action
            )
            for name, value in given.items()
        ]
    )


def _streamed(chunk: bytes, is_last: bool, *, is_answer: bool) -> list[pb.ProcessingResponse]:
    """Forward a part of a body in full-duplex mode, in messages of at most CHUNK_BYTES."""
    made = []
    for start in range(0, max(1, len(chunk)), CHUNK_BYTES):
        is_end = is_last and start + CHUNK_BYTES >= len(chunk)
        piece = pb.StreamedBodyResponse(
            body=chunk[start : start + CHUNK_BYTES], end_of_stream=is_end
        )
        body = pb.BodyResponse(
            response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece))
        )
        made.append(
            pb.ProcessingResponse(response_body=body)
            if is_answer
            else pb.ProcessingResponse(request_body=body)
        )
    return made


def _subset(metadata: bytes) -> set[str] | None:
    value = _entry(metadata, SUBSET_SPACE, SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "list_value":
        return {one.string_value for one in value.list_value.values}
    return {part.strip() for part in value.string_value.split(",")} - {""}


def _entry(metadata: bytes, space: str, name: str) -> Any:
    spaces = pb.Metadata.FromString(metadata).filter_metadata
    return spaces[space].fields.get(name) if space in spaces else None  # a lookup would insert it


class Services:
    """The two gRPC services of the picker: external processing, and gRPC's health checks."""

    def __init__(self, fleet: EndpointTable) -> None:
        self._fleet = fleet

    async def process(self, requests: AsyncIterator[pb.ProcessingRequest], context: Any) -> None:
        """Answer the messages of one request."""
        await _reject_pages(context)
        pick = PickRequest(self._fleet)
        coming = aiter(requests)
        try:
            async with waiting(FIRST_S):
                request = await anext(coming, None)
            while request is not None:
                for response in pick.answer(request):
                    await context.write(response)
                request = await anext(coming, None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no message has arrived")
        except (DecodeError, UnicodeDecodeError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a message cannot be parsed")
        except PickerRejection as rejection:
            body = msgspec.json.encode(
                {"type": "about:blank", "title": rejection.why, "status": rejection.status}
            )
            answer = pb.ImmediateResponse(
                status=pb.HttpStatus(code=rejection.status),
                headers=_set({"Content-Type": "application/problem+json"}),
                body=body,
                details="picker",
            )
            await context.write(pb.ProcessingResponse(immediate_response=answer))
        finally:
            pick.end()

    async def check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """Answer a health check: liveness of the picker, else readiness of an instance."""
        await _reject_pages(context)
        serves = request.service in ("", "liveness") or bool(self._fleet.ready)
        status = pb.HealthCheckResponse.SERVING if serves else pb.HealthCheckResponse.NOT_SERVING
        return pb.HealthCheckResponse(status=status)

    def handlers(self) -> list[Any]:
        """Return the handlers for a server of grpcio."""
        process = grpc.stream_stream_rpc_method_handler(
            self.process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(
            self.check, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
        )
        return [
            grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
        ]


async def _reject_pages(context: Any) -> None:
    """Reject a call that a browser sends for a page: no gateway names an origin."""
    if {"origin", "sec-fetch-site"} & {name for name, _ in context.invocation_metadata() or ()}:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "a page sent this call")


@asynccontextmanager
async def picking(config: RouterConfig, look: Any) -> AsyncIterator[int]:
    """Serve gateways while the block runs.

    Args:
        config: Configuration of the router, with a section `picker`.
        look: Returns the current arguments of `EndpointTable.look`.

    Yields:
        The port.

    Raises:
        ConfigError: The address is in use, or its certificate cannot be used.
    """
    assert config.picker is not None
    fleet = EndpointTable(config)
    await fleet.look(*look())
    options = [
        ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.http2.max_ping_strikes", 2),
    ]
    server = grpc.aio.server(
        handlers=Services(fleet).handlers(), options=options, maximum_concurrent_rpcs=MOST_REQUESTS
    )
    port = _listen(server, config.picker, config.picker.tls or config.tls)
    await server.start()

    async def keep_looking() -> None:
        while True:
            await asyncio.sleep(config.health.interval_s)
            await fleet.look(*look())

    try:
        async with running(keep_looking()):
            yield port
    finally:
        await server.stop(config.shutdown_timeout_s)


def _listen(server: Any, config: PickerConfig, tls: ServerTlsConfig | None) -> int:
    address = joined(config.host, config.port)
    try:
        if tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, _credentials(tls)))
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"picker: {address}: {error}") from error


def _credentials(tls: ServerTlsConfig) -> Any:
    """Make credentials that read their files again for each connection."""

    def read() -> Any:
        ca = Path(tls.client_ca).read_bytes() if tls.client_ca else None
        return grpc.ssl_server_certificate_configuration(
            [(Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes())], ca
        )

    def follow() -> Any:
        try:
            return read()
        except OSError as error:
            log.error("picker.tls: %s; the old certificate is still used", error)
            return None

    return grpc.dynamic_ssl_server_credentials(
        read(), follow, require_client_authentication=tls.client_ca is not None
    )
