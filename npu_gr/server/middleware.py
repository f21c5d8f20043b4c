"""What is around every handler: id, trace, the key's scope, errors, counts and the access log's line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from npu_gr.admission.door import Slot
from npu_gr.core.errors import NotFound, Overloaded, UnsupportedMedia
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import KINDS
from npu_gr.core.request import Answer
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.trace import CURRENT
from npu_gr.server import headers
from npu_gr.server.access_log import AccessLog, EndedRequest
from npu_gr.server.auth.browsers import refuse_foreign_pages
from npu_gr.server.auth.key_ring import KeyRing
from npu_gr.server.auth.keys import Key
from npu_gr.server.auth.rules import PAGES, Rule, rules
from npu_gr.server.codec.media import check_type
from npu_gr.server.entrance.connection import Connection
from npu_gr.server.problem import from_error
from npu_gr.server.service_protocol import ServiceProtocol
from npu_gr.server.tracing import Tracing

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Around = Callable[[Handler, str, web.Request], Awaitable[web.StreamResponse]]  # of a handler, and its route's pattern

ID = web.RequestKey("request_id", str)
ARRIVED_AT = web.RequestKey("arrived_at", float)  # its first byte: what the caller grants counts from here
KEY = web.RequestKey("key", Key)  # absent where the route needs none
# set by the handler of the kinds, as far as it comes
PARSED_AT = web.RequestKey("parsed_at", float)
USER = web.RequestKey("user", UserKey)
ANSWER: web.RequestKey[Answer] = web.RequestKey("answer", object)  # type: ignore[arg-type]

NO_ROUTE = "none"  # in the place of a pattern
OCTETS = "application/octet-stream"  # what aiohttp says of a body whose type is not named, too
_CLOSING = (401, 413, 415)  # after these an answer closes its connection: the caller must begin anew
ABANDONED = 499  # the status of a request whose caller hung up, as nginx counts them


def around(
    service: ServiceProtocol,
    metrics: Metrics,
    keys: KeyRing,
    access_log: AccessLog,
    tracing: Tracing,
) -> Around:
    """Make the one function that every request goes through.

    Args:
        service: asked whether it is ready: while it is not, answers close their connections.
        metrics: counts every request, with its kind where the route belongs to one.
        keys: in force; the rules say which route needs one, and its scope.
        access_log: gets every request at its end.
        tracing: makes the ids, and the spans of sampled requests.
    """
    kinds = {(kind.method, path): kind.name for kind in KINDS.values() for path in kind.paths}
    rule_of = rules()
    health_paths = {path for (_, path), rule in rule_of.items() if rule.scope is None and path not in PAGES}

    async def handle(handler: Handler, route: str, request: web.Request) -> web.StreamResponse:
        connection = request.protocol if isinstance(request.protocol, Connection) else None
        arrived_at, whole_at, has_s = _came(connection)
        request_id = headers.request_id(request.headers)
        request[ARRIVED_AT] = arrived_at
        request[ID] = request_id
        trace, span = tracing.begin(f"{request.method} {route}", request.headers.get("traceparent"))
        CURRENT.set(trace)
        metrics.requests.in_flight.inc()
        status = ABANDONED
        failure = None
        refusal = None
        try:
            _check_address(request, connection, route)
            if route not in health_paths:
                _check_sender(request, connection)
            _check_key(request, connection, keys, rule_of.get((_method(request), route)))
            _check_media(request)
            response = await handler(request)
            status = response.status
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  (the one translation of errors)
            response = from_error(error, request_id, is_inference=request.path.startswith("/v2"))
            status = response.status
            failure = access_log.failed(error)
            refusal = error.reason if isinstance(error, Overloaded) else None
        finally:
            metrics.requests.in_flight.dec()
            ended = EndedRequest(
                kind=kinds.get((request.method, route)),
                trace=trace,
                request_id=request_id,
                method=request.method,
                route=route,
                status=status,
                duration_s=time.monotonic() - whole_at,
                failure=failure,
                key=request[KEY].name if keys.has_keys and KEY in request else None,
                user=request.get(USER),
                answer=request.get(ANSWER),
            )
            stages_s = ended.answer.stages_s if ended.answer else {}
            metrics.requests.done(ended.kind, route, status, ended.duration_s, stages_s, refusal=refusal, has_s=has_s)
            access_log.write(ended)
            if span is not None:
                tracing.end(span, stages_s, arrived_at, request.get(PARSED_AT), _span_attributes(ended))
        response.headers[headers.REQUEST_ID] = request_id
        response.headers["traceparent"] = trace.header
        if status in _CLOSING or not service.is_ready()[0]:
            response.force_close()  # draining: let the balancer's connections go
        return response

    return handle


def middleware(around_all: Around) -> Any:
    """Make aiohttp's middleware, for what goes through its router."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await around_all(handler, _route(request), request)

    return handle


def _check_key(request: web.Request, connection: Connection | None, keys: KeyRing, rule: Rule | None) -> None:
    """Check that the caller's key allows the request; what comes through a connection was found, and counted, there.

    Args:
        request: gets `KEY`.
        connection: that it came through.
        keys: in force.
        rule: of the route; None = there is no such route, which only callers with a key are told.

    Raises:
        Unauthorized: there is no valid key. Forbidden: it does not allow this. Overloaded: it is over its rate.
    """
    if rule is not None and rule.scope is None:
        return
    key = None if connection is None else connection.key
    is_new = key is None
    if key is None:
        sent = request.headers.get("Authorization")
        key = keys.find(None if sent is None else sent.encode(errors="surrogateescape"))
    request[KEY] = key
    if rule is not None and rule.scope is not None:
        keys.require(key, rule.scope)
    if is_new:
        keys.spend(key)


def _method(request: web.Request) -> str:
    """The method of the request's rule: what GET may, HEAD may."""
    return "GET" if request.method == "HEAD" else request.method


def _check_address(request: web.Request, connection: Connection | None, route: str) -> None:
    """Check that the address that the request came to serves its route.

    Raises:
        NotFound: another one does.
    """
    path = request.path if route == NO_ROUTE else route
    if connection is not None and not connection.listener.serves(path):
        raise NotFound(f"{path}: not at this address; the public and the admin address serve different routes")


def _check_sender(request: web.Request, connection: Connection | None) -> None:
    """Check that no page of another site is behind the request.

    Raises:
        Forbidden: one is.
    """
    is_loopback = connection is not None and connection.listener.refuses_foreign_hosts and not connection.is_trusted
    refuse_foreign_pages(request.headers, is_loopback=is_loopback)


def _check_media(request: web.Request) -> None:
    """Check the type of a body. What a page may send anywhere unasked, a form or plain text, is none of ours.

    Raises:
        UnsupportedMedia: it is compressed, which nothing here inflates, or neither JSON nor msgpack.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise UnsupportedMedia(f"Content-Encoding: {encoding[:32]!r}: bodies must be sent as they are")
    if request.body_exists and not (_is_infer(request) and request.content_type == OCTETS):
        check_type(request.content_type)


def _is_infer(request: web.Request) -> bool:
    """Whether it is an infer of the Open Inference Protocol, whose clients call the body octets, or nothing at all."""
    return request.method == "POST" and request.path.startswith("/v2/")


def slot_of(request: web.Request) -> Slot | None:
    """The slot that the door gave to the request; None where it did not come through the door."""
    return request.protocol.slot if isinstance(request.protocol, Connection) else None


def _came(connection: Connection | None) -> tuple[float, float, float]:
    """When the first byte of the request came, and its last; and what its caller granted from then on, in seconds."""
    if connection is not None:
        return connection.began_at, connection.whole_at, connection.has_s
    now_at = time.monotonic()
    return now_at, now_at, float("inf")


def _route(request: web.Request) -> str:
    """The pattern of the matched route: there are few of them, and none holds what a caller put into its path."""
    resource = request.match_info.route.resource
    return resource.canonical if resource else NO_ROUTE


def _span_attributes(ended: EndedRequest) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "http.request.method": ended.method,
        "http.route": ended.route,
        "http.response.status_code": ended.status,
        "npu_gr.request_id": ended.request_id,
    }
    fields = ended.answer.log_fields() if ended.answer else {}
    if "outcome" in fields:
        attributes["npu_gr.outcome"] = fields["outcome"] or "none"
    if "prefix_tokens" in fields:
        attributes["npu_gr.prefix_tokens"] = fields["prefix_tokens"]
    return attributes
