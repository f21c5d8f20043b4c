"""What every request passes: id, trace, address, key, body, admission, handler, errors, counts, the access log.

head --> address, page, key, media --> body --> admission --> handler --> id and trace of the answer
|                           |          |             |
'---- 401 403 404 415 ------+-- 408 ---+-- 429 ------+-- every error becomes an answer here
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from npu_gr.core.errors import DeadlineExceeded, NotFound, Overloaded, UnsupportedMedia
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import KINDS, Kind
from npu_gr.core.logs import CURRENT, Trace
from npu_gr.core.request import Answer
from npu_gr.jobs.base import HeldPermit
from npu_gr.metrics.registry import Metrics
from npu_gr.server import http
from npu_gr.server.access_log import AccessLog, EndedRequest, Tracing
from npu_gr.server.admission.middleware import REJECTED, Admission
from npu_gr.server.auth.keys import Key, KeyRing
from npu_gr.server.auth.rules import PAGES, Address, Rule, refuse_foreign_pages, rules
from npu_gr.server.codec.media import check_type
from npu_gr.server.config import ServerConfig
from npu_gr.server.service_protocol import ServiceProtocol

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ID = web.RequestKey("request_id", str)
ARRIVED_AT = web.RequestKey("arrived_at", float)  # its head: the client's time budget counts from here
WHOLE_AT = web.RequestKey("whole_at", float)  # the end of its body; before that its head
UNTIL_AT = web.RequestKey("until_at", float)  # the instant at which the client gives up
LEFT_S = web.RequestKey("left_s", float)  # what was left until then when its body had come
PERMIT = web.RequestKey("permit", HeldPermit)  # absent until it is admitted
KEY = web.RequestKey("key", Key)  # absent where the route needs none
# set by the handler of the kinds, as far as it comes
PARSED_AT = web.RequestKey("parsed_at", float)
USER = web.RequestKey("user", UserKey)
ANSWER: web.RequestKey[Answer] = web.RequestKey("answer", object)  # type: ignore[arg-type]

NO_ROUTE = "none"  # in the place of a pattern
OCTETS = "application/octet-stream"  # what aiohttp says of a body whose type is not named, too
EVERYTHING = Address()  # of a listener that is not ours
PUBLIC_ONLY = Address(is_admin=False, refuses_foreign_hosts=True)
_NO_LIMIT_S = float("inf")
_CLOSING = (401, 408, 413, 415)  # after these an answer closes its connection: the caller must begin anew
ABANDONED = 499  # the status of a request whose caller hung up, as nginx counts them


class Pipeline:
    """What every request passes before and after its handler: the middleware of the application."""

    def __init__(
        self,
        service: ServiceProtocol,
        metrics: Metrics,
        keys: KeyRing,
        admission: Admission,
        access_log: AccessLog,
        tracing: Tracing,
        config: ServerConfig,
    ) -> None:
        """Pass nothing yet.

        Args:
            service: asked whether it is ready: while it is not, answers close their connections.
            metrics: counts every request, with its kind where the route belongs to one.
            keys: in force; the rules say which route needs one, and its scope.
            admission: what requests of a kind pass before they are parsed.
            access_log: gets every request at its end, but those that admission rejected.
            tracing: makes the ids, and the spans of sampled requests.
            config: time budgets.
        """
        self._service = service
        self._metrics = metrics
        self._keys = keys
        self._admission = admission
        self._access_log = access_log
        self._tracing = tracing
        self._config = config
        self._kinds = {(kind.method, path): kind for kind in KINDS.values() for path in kind.paths}
        self._rules = rules()
        self._health = {path for (_, path), rule in self._rules.items() if rule.scope is None and path not in PAGES}
        # by port, or path of a Unix socket; None = whoever embeds the application has listeners of its own
        self.addresses: dict[int | str, Address] | None = None

    def middleware(self) -> Any:
        """Make aiohttp's middleware."""

        @web.middleware
        async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._handle(request, handler)

        return handle

    def serve_at(self, name: int | str, address: Address) -> None:
        """Serve an address, by its port or its Unix socket; every other one serves the public routes alone."""
        self.addresses = {**(self.addresses or {}), name: address}

    def malformed(self) -> None:
        """Count a message that is no HTTP; aiohttp has answered it with 400."""
        self._metrics.requests.broken(400)

    def agent_line(self) -> bytes:
        """Return what HAProxy's agent-check is told; see `Admission.agent_line`."""
        return self._admission.agent_line(is_ready=self._service.is_ready()[0])

    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        arrived_at = time.monotonic()
        route = _route(request)
        kind = self._kinds.get((request.method, route))
        request_id = http.request_id(request.headers)
        request[ARRIVED_AT] = request[WHOLE_AT] = arrived_at
        request[ID] = request_id
        trace, span = self._tracing.begin(f"{request.method} {route}", request.headers.get("traceparent"))
        CURRENT.set(trace)
        self._metrics.requests.in_flight.inc()
        status = ABANDONED
        error: Exception | None = None
        try:
            response = await self._answer(request, handler, route, kind)
            status = response.status
        except asyncio.CancelledError:
            raise
        except Exception as failed:  # noqa: BLE001  (the one translation of errors)
            error = failed
            response = http.from_error(error, request_id, is_inference=request.path.startswith("/v2"))
            status = response.status
        finally:
            self._metrics.requests.in_flight.dec()
            self._admission.release(request)
            self._ended(request, route, kind, trace, span, status, error)
            error = None  # its traceback holds this frame: a cycle would wait for the collector
        response.headers[http.REQUEST_ID] = request_id
        response.headers["traceparent"] = trace.header
        if status in _CLOSING or not self._service.is_ready()[0]:
            response.force_close()  # draining: let the balancer's connections go
        return response

    async def _answer(
        self, request: web.Request, handler: Handler, route: str, kind: Kind[Any, Any] | None
    ) -> web.StreamResponse:
        address = self._address(request)
        path = request.path if route == NO_ROUTE else route
        if not address.serves(path):
            raise NotFound(f"{path}: not at this address; the public and the admin address serve different routes")
        if route not in self._health:
            is_loopback = address.refuses_foreign_hosts and not self._admission.is_proxy(request)
            refuse_foreign_pages(request.headers, is_loopback=is_loopback)
        rule = self._rules.get((_method(request), route))
        if rule is None or rule.scope is not None:
            await self._check_key(request, rule)
        _check_media(request)
        if kind is None or kind.must_finish:
            await self._admission.receive(request, None, "", _NO_LIMIT_S, is_counted=address.is_public)
            return await handler(request)
        budget_s = http.budget_s(request.headers, self._config.default_budget_s, self._config.max_budget_s)
        until_at = request[UNTIL_AT] = request[ARRIVED_AT] + budget_s
        tenant = request[KEY].tenant or ""
        await self._admission.receive(request, kind, tenant, budget_s)
        whole_at = request[WHOLE_AT] = time.monotonic()
        left_s = request[LEFT_S] = until_at - whole_at
        with await self._admission.enter(request, kind, tenant, whole_at, left_s) as permit:
            request[PERMIT] = permit
            return await handler(request)

    def _address(self, request: web.Request) -> Address:
        name = None if request.transport is None else request.transport.get_extra_info("sockname")
        if self.addresses is None:
            return EVERYTHING
        # a connection that is gone has no name: it must not reach what its address does not serve
        return self.addresses.get(name[1] if isinstance(name, tuple) else name or "", PUBLIC_ONLY)

    async def _check_key(self, request: web.Request, rule: Rule | None) -> None:
        """Check that the client's key allows the request, and spend its rate.

        Args:
            request: gets `KEY`.
            rule: of the route; None = there is no such route, which only clients with a key are told.

        Raises:
            Unauthorized: there is no valid key. Forbidden: it does not allow this. Overloaded: it is over its rate.
        """
        key = request[KEY] = await self._keys.of_caller(request.headers.get("Authorization"))
        if rule is not None and rule.scope is not None:
            self._keys.require(key, rule.scope)
        try:
            self._keys.spend(key)
        except Overloaded:
            await self._admission.pause(request)
            raise

    def _ended(
        self,
        request: web.Request,
        route: str,
        kind: Kind[Any, Any] | None,
        trace: Trace,
        span: Span | None,
        status: int,
        error: Exception | None,
    ) -> None:
        """Count and log a request; a rejection of admission is counted there, and logged once a second."""
        refusal = error.reason if isinstance(error, Overloaded) else None
        if REJECTED in request:
            return
        ended = EndedRequest(
            kind=kind.name if kind else None,
            trace=trace,
            request_id=request[ID],
            method=request.method,
            route=route,
            status=status,
            duration_s=time.monotonic() - request[WHOLE_AT],
            failure=None if error is None else self._access_log.failed(error),
            key=request[KEY].name if self._keys.has_keys and KEY in request else None,
            user=request.get(USER),
            answer=request.get(ANSWER),
        )
        stages_s = ended.answer.stages_s if ended.answer else {}
        self._metrics.requests.done(
            ended.kind,
            route,
            status,
            ended.duration_s,
            stages_s,
            refusal=refusal,
            has_s=request.get(LEFT_S, 0.0 if isinstance(error, DeadlineExceeded) else _NO_LIMIT_S),
        )
        self._access_log.write(ended)
        if span is not None:
            parsed_at = request.get(PARSED_AT)
            self._tracing.end(span, stages_s, request[ARRIVED_AT], parsed_at, _span_attributes(ended))


def _method(request: web.Request) -> str:
    """The method of the request's rule: what GET may, HEAD may."""
    return "GET" if request.method == "HEAD" else request.method


def _check_media(request: web.Request) -> None:
    """Check the type of a body. What a page may send anywhere unasked, a form or plain text, is none of ours.

    Raises:
        UnsupportedMedia: it is compressed, which nothing here inflates, or neither JSON nor msgpack.
    """
    encoding = request.headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise UnsupportedMedia(f"Content-Encoding: {encoding[:32]!r}: bodies must be sent as they are")
    if request.body_exists:
        media = request.content_type
        if media != OCTETS or not _is_infer(request):
            check_type(media)


def _is_infer(request: web.Request) -> bool:
    """Whether it is an infer of the Open Inference Protocol, whose clients call the body octets, or nothing at all."""
    return request.method == "POST" and request.path.startswith("/v2/")


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
