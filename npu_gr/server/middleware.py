"""The middleware around every HTTP request.

    head --> address, Origin, key, media type --> body --> admission --> handler --> response
      |                |                            |          |            |
      '-- trace id     '-- 401 403 404 415          '-- 408    '-- 429      '-- other errors

Every exception becomes an error response here. At its end a request is counted, and written to the
access log. What aiohttp answers by itself, outside of the middleware, is counted by `count_others`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
from aiohttp import HttpVersion10, web

from npu_gr.core.errors import (
    BadRequest,
    DeadlineExceeded,
    NotFound,
    Overloaded,
    TooLarge,
    UnsupportedMedia,
)
from npu_gr.core.kinds import KINDS, Kind, Scope
from npu_gr.core.logs import CURRENT
from npu_gr.core.text_format import near
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.slo import ABANDONED
from npu_gr.server import http
from npu_gr.server.access_log import AccessLog, ServerCall, Tracing
from npu_gr.server.admission.middleware import COUNTED, Admission
from npu_gr.server.auth.keys import KeyRing
from npu_gr.server.auth.rules import (
    PAGES,
    Address,
    Rule,
    is_exact,
    reject_foreign_pages,
    rules,
)
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas import CODECS
from npu_gr.server.schemas.media import check_type
from npu_gr.server.service_protocol import ServiceProtocol

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CALL = web.RequestKey("call", ServerCall)

NO_ROUTE = "none"  # label of a path that matches no route
OCTETS = "application/octet-stream"  # also aiohttp's value where there is no Content-Type
EVERYTHING = Address()  # for listeners that `npu_gr.server.run` did not open
PUBLIC_ONLY = Address(is_admin=False, rejects_foreign_hosts=True)
_NO_LIMIT_S = float("inf")
# Statuses after which the connection is closed: the rest of the body may not have been read.
_CLOSING = (401, 408, 413, 415)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLifecycle:
    """The steps that every request passes over HTTP and gRPC.

    `begin` opens its trace, `find_key` and `limit` read its API key and time limit, `end` counts it
    and writes its line to the access log. Requests that admission rejects do not reach `end`.
    """

    metrics: Metrics
    keys: KeyRing
    access_log: AccessLog
    tracing: Tracing
    config: ServerConfig

    def begin(
        self,
        method: str,
        route: str,
        headers: Mapping[str, str],
        kind: Kind[Any, Any] | None = None,
    ) -> ServerCall:
        """Begin a request of which the head has been read."""
        now_at = time.monotonic()
        trace, span = self.tracing.begin(f"{method} {route}", headers.get("traceparent"))
        CURRENT.set(trace)
        return ServerCall(
            method=method,
            route=route,
            headers=headers,
            request_id=http.request_id(headers),
            trace=trace,
            span=span,
            arrived_at=now_at,
            body_at=now_at,
            kind=kind,
        )

    async def find_key(self, call: ServerCall, scope: Scope | None) -> None:
        """Find the client's API key, and check that it has a scope; None = any scope.

        Raises:
            Unauthorized: The request has no valid key; delayed while many wrong keys arrive.
            Forbidden: The key lacks the scope.
        """
        call.key = await self.keys.of_client(call.headers.get("Authorization"))
        if scope is not None:
            self.keys.require(call.key, scope)

    def limit(self, call: ServerCall, deadline_s: float | None = None) -> None:
        """Set `call.until_at` from the client's time limit.

        Args:
            call: The request; `headers` are read.
            deadline_s: Seconds left of gRPC's own deadline; None = there is none.

        Raises:
            BadRequest, DeadlineExceeded: As `http.budget_s` does.
        """
        config = self.config
        budget_s = http.budget_s(
            call.headers, config.default_budget_s, config.max_budget_s, deadline_s
        )
        call.until_at = call.arrived_at + budget_s
        call.has_deadline = deadline_s is not None

    def end(
        self,
        call: ServerCall,
        status: int,
        error: Exception | None,
        attributes: Mapping[str, str | int] = MappingProxyType({}),
    ) -> None:
        """Count and log a request, and end its span; `attributes` are added to the span.

        A log or a span that fails is an error in the log: the answer stays as it is.
        """
        duration_s = time.monotonic() - call.body_at
        stages_s = call.answer.stages_s if call.answer else {}
        has_s = _NO_LIMIT_S
        if call.until_at == _NO_LIMIT_S:  # the client's limit was 0, or is not known yet
            has_s = 0.0 if isinstance(error, DeadlineExceeded) else has_s
        elif call.kind is not None and not call.kind.must_finish:
            has_s = call.until_at - call.body_at
        self.metrics.requests.done(
            call.kind.name if call.kind else None,
            call.route,
            status,
            duration_s,
            stages_s,
            rejection=error.reason if isinstance(error, Overloaded) else None,
            has_s=has_s,
        )
        try:
            self.access_log.write(
                call, status, duration_s, None if error is None else self.access_log.failed(error)
            )
            if call.span is not None:
                found = _span_attributes(call, status)
                self.tracing.end(
                    call.span, stages_s, call.arrived_at, call.parsed_at, {**found, **attributes}
                )
        except Exception:
            log.exception("request %s cannot be logged", call.request_id)


class Pipeline:
    """aiohttp's middleware: the work before and after every HTTP handler."""

    def __init__(
        self, service: ServiceProtocol, lifecycle: RequestLifecycle, admission: Admission
    ) -> None:
        """Build the pipeline.

        Args:
            service: While it is not ready, responses close their connections.
            lifecycle: Steps shared with gRPC.
            admission: Admission of requests that belong to a kind.
        """
        self._service = service
        self._lifecycle = lifecycle
        self._admission = admission
        self._kinds = {(kind.method, path): kind for kind in KINDS.values() for path in kind.paths}
        self._rules = rules()
        self._health = {
            path
            for (_, path), rule in self._rules.items()
            if rule.scope is None and path not in PAGES
        }
        # by port, or path of a Unix socket; None = the embedding program has its own listeners
        self.addresses: dict[int | str, Address] | None = None

    def middleware(self) -> Any:
        """Return the function that aiohttp calls for every request."""

        @web.middleware
        async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._handle(request, handler)

        return handle

    def serve_at(self, name: int | str, address: Address) -> None:
        """Register an address by its port or the path of its Unix socket.

        Addresses that are not registered serve the public routes only.
        """
        self.addresses = {**(self.addresses or {}), name: address}

    def malformed(self) -> None:
        """Count a malformed HTTP message; aiohttp has answered it with 400."""
        self._lifecycle.metrics.requests.broken(400)

    async def count_others(self, request: web.Request, response: web.StreamResponse) -> None:
        """Count an answer that `_handle` has not: aiohttp's own, as when `_handle` itself fails."""
        if COUNTED not in request:
            route = _route(request)
            kind = self._kinds.get((request.method, route))
            name = None if kind is None else kind.name
            self._lifecycle.metrics.requests.done(name, route, response.status, 0.0)

    def agent_line(self) -> bytes:
        """Return the answer to HAProxy's agent-check; see `Admission.agent_line`."""
        return self._admission.agent_line(is_ready=self._service.is_ready()[0])

    def agent_asked(self, asker: str) -> None:
        """Note that an address asks the agent-check as a proxy does."""
        self._admission.agent_asked(asker)

    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        route = _route(request)
        kind = self._kinds.get((request.method, route))
        call = request[CALL] = self._lifecycle.begin(request.method, route, request.headers, kind)
        status = ABANDONED
        error: Exception | None = None
        self._lifecycle.metrics.requests.in_flight.inc()
        try:
            response = await self._answer(request, call, handler)
            status = response.status
        except asyncio.CancelledError:
            raise
        except Exception as failed:  # noqa: BLE001  (the one translation of errors)
            error = failed
            response = http.from_error(
                error,
                call.request_id,
                is_inference=request.path.startswith("/v2"),
                remark=self._remark(request, error),
            )
            status = response.status
        finally:
            self._lifecycle.metrics.requests.in_flight.dec()
            self._admission.release(request)
            # admission counts its rejections itself, and logs a summary once a second
            if COUNTED not in request:
                self._lifecycle.end(call, status, error)
                request[COUNTED] = True
            error = None  # its traceback holds this frame: a cycle would wait for the collector
        response.headers[http.REQUEST_ID] = call.request_id
        response.headers["traceparent"] = call.trace.header
        if status in _CLOSING or not self._service.is_ready()[0]:
            response.force_close()  # while draining, so that the balancer stops using it
        return response

    async def _answer(
        self, request: web.Request, call: ServerCall, handler: Handler
    ) -> web.StreamResponse:
        if request.version < HttpVersion10:
            raise BadRequest("the first line of the request names no version of HTTP")
        address = self._address(request)
        path = request.path if call.route == NO_ROUTE else call.route
        if not address.serves(path):
            raise NotFound(
                f"{path}: this address does not serve the route; the public and the admin "
                "address serve different routes"
            )
        if call.route not in self._health:
            # only a trusted proxy may name another host; a browser's page cannot set Via
            is_proxy = "Via" in request.headers and self._admission.is_proxy(request)
            is_loopback = address.rejects_foreign_hosts and not is_proxy
            reject_foreign_pages(request.headers, is_loopback=is_loopback)
        rule = self._rules.get((_method(request), call.route))
        if rule is None or rule.scope is not None:
            await self._check_key(request, call, rule)
        elif request.body_exists:
            raise TooLarge(f"{call.route} takes no body")  # without a key none is read
        if call.route == NO_ROUTE and request.match_info.http_exception is None:
            raise NotFound(f"{path}: write the path as the documentation does, without the host")
        octets = 0 if rule is None else rule.octets
        _check_media(request, may_be_octets=octets > 0)
        kind = call.kind
        if kind is not None:
            self._lifecycle.limit(call)
        if kind is None or kind.must_finish:
            await self._admission.receive(
                request, None, "", _NO_LIMIT_S, is_counted=address.is_public, most_bytes=octets
            )
            return await handler(request)
        tenant = call.key.tenant or ""
        await self._admission.receive(request, kind, tenant, call.until_at - call.arrived_at)
        call.body_at = time.monotonic()
        left_s = call.until_at - call.body_at
        with await self._admission.enter(
            request, kind, tenant, call.body_at, left_s
        ) as call.permit:
            return await handler(request)

    def _remark(self, request: web.Request, error: Exception) -> str:
        """Say which method and body a path takes, or which path is near; "" = nothing to say."""
        if isinstance(error, web.HTTPNotFound):
            address = self._address(request)
            paths = {path for _, path in self._rules if address.serves(path)}
            # a known path may have no handler, such as that of a recorder that is off
            return "" if request.path in paths else near(request.path, paths)
        if not isinstance(error, web.HTTPMethodNotAllowed):
            return ""
        kind = self._kinds.get(("POST", request.path))
        cls = None if kind is None else CODECS[kind.name].body
        if cls is None:
            return f"; this path takes {', '.join(sorted(error.allowed_methods))}"
        needed = [one.name for one in msgspec.structs.fields(cls) if one.required]
        return f"; this path takes POST with a JSON body, at least {', '.join(needed)}"

    def _address(self, request: web.Request) -> Address:
        name = None if request.transport is None else request.transport.get_extra_info("sockname")
        if self.addresses is None:
            return EVERYTHING
        # a closed connection has no socket name; it gets the public routes only
        return self.addresses.get(name[1] if isinstance(name, tuple) else name or "", PUBLIC_ONLY)

    async def _check_key(self, request: web.Request, call: ServerCall, rule: Rule | None) -> None:
        """Check that the client's key allows the request, and count it against the key's rate.

        Args:
            request: Delayed where its key is over its rate.
            call: The request; `key` is set.
            rule: Rule of the route; None = no route matches. The 404 of such a path still needs a
                key, so that the routes cannot be probed without one.

        Raises:
            Unauthorized: The request has no valid key.
            Forbidden: The key lacks the scope of the route.
            Overloaded: The key is over its rate.
        """
        await self._lifecycle.find_key(call, None if rule is None else rule.scope)
        try:
            self._lifecycle.keys.spend(call.key)
        except Overloaded:
            await self._admission.pause(request)
            raise


def _method(request: web.Request) -> str:
    """Return the method to look up in the rules; HEAD has the rules of GET."""
    return "GET" if request.method == "HEAD" else request.method


def _check_media(request: web.Request, *, may_be_octets: bool) -> None:
    """Check the media type of a body.

    Forms and plain text, which a browser sends across sites without a preflight, are rejected.

    Raises:
        UnsupportedMedia: The body is compressed, or neither JSON nor msgpack.
    """
    encoding = request.headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise UnsupportedMedia(
            f"Content-Encoding: {encoding[:32]!r} is not supported; send the body uncompressed"
        )
    if request.body_exists:
        media = request.content_type  # octets if none is named, as browsers can do across sites
        names_octets = may_be_octets and bool(request.headers.get("Content-Type", "").strip())
        if media != OCTETS or not (names_octets or _is_infer(request)):
            check_type(media)


def _is_infer(request: web.Request) -> bool:
    """Whether it is an infer of the Open Inference Protocol.

    Its clients send the body as octets, or without a Content-Type.
    """
    return request.method == "POST" and request.path.startswith("/v2/")


def _route(request: web.Request) -> str:
    """Return the pattern of the matched route, for labels: bounded in number, free of user data.

    A path in another spelling has no route.
    """
    resource = request.match_info.route.resource
    route = resource.canonical if resource else NO_ROUTE
    return route if is_exact(route, request.raw_path) else NO_ROUTE


def _span_attributes(call: ServerCall, status: int) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "http.request.method": call.method,
        "http.route": call.route,
        "http.response.status_code": status,
        "npu_gr.request_id": call.request_id,
    }
    fields = call.answer.log_fields() if call.answer else {}
    if "outcome" in fields:
        attributes["npu_gr.outcome"] = fields["outcome"] or "none"
    if "prefix_tokens" in fields:
        attributes["npu_gr.prefix_tokens"] = fields["prefix_tokens"]
    return attributes
