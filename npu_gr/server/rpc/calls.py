"""One gRPC call from its metadata to its status: key, time limit, message, counts, the log's line.

The same course as HTTP's (`server/middleware.py`), with the same errors, metrics and log:

    metadata -> key -> message -> rate of the key -> work -> status

A caller without a key is refused before its message is read. Who cancels, or whose deadline is
over, gives up everything that the call holds: gRPC cancels the coroutine.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from npu_gr.core.errors import (
    BadRequest,
    DeadlineExceeded,
    NotTaken,
    NpuGrError,
    Overloaded,
    Refusal,
)
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import Kind, Scope
from npu_gr.core.logs import CURRENT
from npu_gr.core.request import Answer
from npu_gr.metrics.registry import Metrics
from npu_gr.server import http
from npu_gr.server.access_log import AccessLog, EndedRequest, Failure, Tracing
from npu_gr.server.auth.keys import ANYBODY, KeyRing
from npu_gr.server.config import ServerConfig
from npu_gr.server.middleware import ABANDONED
from npu_gr.server.service_protocol import ServiceProtocol

log = logging.getLogger(__name__)

STATUS = "npu-gr-status"  # trailing metadata of an error: its status over HTTP, which says more
PUSHBACK_MS = "grpc-retry-pushback-ms"  # clients heed it, where their service config lets them retry
CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,  # it fails again as it is: send the history whole
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
UNEXPECTED = "an unexpected error; the log has it under this request id"
Metadata = tuple[tuple[str, str], ...]


class RpcCall:
    """A call, or one message of a stream."""

    def __init__(self, path: str, context: Any, config: ServerConfig, tracing: Tracing) -> None:
        """Begin now.

        Args:
            path: "/package.Service/Method".
            context: gRPC's.
            config: of the server; it has the time that a caller gets who names none.
            tracing: makes the trace, and a span if it is sampled.
        """
        self.path = path
        self.metadata = metadata_of(context)
        self.remaining_s: float | None = context.time_remaining()
        self.arrived_at = time.monotonic()
        self.whole_at = self.arrived_at  # when its message was here
        self.until_at = self.arrived_at + config.default_budget_s
        self.names_limit = False  # the caller said how long it waits
        sent_id = self.metadata.get(http.REQUEST_ID.lower(), "")
        self.request_id = http.request_id({http.REQUEST_ID: sent_id})
        self.kind: Kind[Any, Any] | None = None
        self.key = ANYBODY
        self.user: UserKey | None = None
        self.answer: Answer | None = None
        self.parsed_at: float | None = None
        self.trace, self.span = tracing.begin(f"POST {path}", self.metadata.get("traceparent"))

    def limit(self, config: ServerConfig) -> None:
        """Find when the caller gives up. Raises BadRequest or DeadlineExceeded, as `budget_s` does."""
        names = http.BUDGET_HEADERS
        given = {name: value for name in names if (value := self.metadata.get(name.lower()))}
        budget_s = http.budget_s(given, config.default_budget_s, config.max_budget_s)
        if self.remaining_s is not None:
            own_s = min(self.remaining_s, config.max_budget_s)
            budget_s = min(budget_s, own_s) if given else own_s
        self.names_limit = bool(given) or self.remaining_s is not None
        self.until_at = self.arrived_at + budget_s

    @property
    def has_s(self) -> float:
        """What the caller granted, from the last byte on."""
        return self.until_at - self.whole_at

    def left_s(self) -> float:
        """What is left of that now that the message is parsed. Raises DeadlineExceeded: nothing."""
        self.parsed_at = now_at = time.monotonic()
        if now_at >= self.until_at:
            granted_ms = self.has_s * 1e3
            raise DeadlineExceeded(f"reading the request took the whole budget of {granted_ms:.0f} ms")
        return self.until_at - now_at

    def is_about(self, user: UserKey) -> None:
        """Note the user, for the log."""
        self.user = user

    @property
    def about(self) -> Metadata:
        """Trailing metadata of every answer."""
        return (http.REQUEST_ID.lower(), self.request_id), ("traceparent", self.trace.header)


Work = Callable[[RpcCall, bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Runs calls. Event loop only."""

    service: ServiceProtocol
    config: ServerConfig
    metrics: Metrics
    keys: KeyRing
    access_log: AccessLog
    tracing: Tracing

    async def unary(self, path: str, scope: Scope | None, work: Work, context: Any) -> bytes:
        """Serve a call with one message.

        Args:
            path: of the method.
            scope: that its key needs; None = it needs no key.
            work: makes the answer of the message.
            context: gRPC's.
        """
        call = RpcCall(path, context, self.config, self.tracing)
        try:
            answer = await self._counted(call, scope, work, context, None)
        except Exception as error:
            await context.abort(*status_of(error, call))
            raise AssertionError("gRPC's abort raises") from error
        context.set_trailing_metadata(call.about)
        return answer

    async def message(self, path: str, scope: Scope, work: Work, context: Any, body: bytes) -> bytes:
        """Serve one message of a stream. Raises what `work` raises, and what a key may."""
        call = RpcCall(path, context, self.config, self.tracing)
        return await self._counted(call, scope, work, context, body)

    async def find_key(self, call: RpcCall, scope: Scope | None) -> None:
        """Find the caller's key. Raises Unauthorized, late where keys are guessed, or Forbidden."""
        if scope is None:
            return
        call.key = await self.keys.of_caller(call.metadata.get("authorization"))
        self.keys.require(call.key, scope)

    async def _counted(self, call: RpcCall, scope: Scope | None, work: Work, context: Any, body: bytes | None) -> bytes:
        """Run a call, and count, trace and log it however it ends."""
        CURRENT.set(call.trace)
        self.metrics.requests.in_flight.inc()
        status = ABANDONED
        failure: Failure | None = None
        refusal: Refusal | None = None
        try:
            await self.find_key(call, scope)
            call.limit(self.config)
            sent = await self._read(call, context) if body is None else body
            self.keys.spend(call.key)
            answer = await work(call, sent)
            status = 200
            return answer
        except asyncio.CancelledError:
            if time.monotonic() >= call.until_at:  # gRPC cancels what is over its deadline
                status = DeadlineExceeded.status
            raise
        except Exception as error:
            status = error.status if isinstance(error, NpuGrError) else 500
            failure = self.access_log.failed(error)
            refusal = error.reason if isinstance(error, Overloaded) else None
            if not isinstance(error, NpuGrError):
                log.error("request %s failed", call.request_id, exc_info=error)
            raise
        finally:
            self.metrics.requests.in_flight.dec()
            self._end(call, status, failure, refusal)

    async def _read(self, call: RpcCall, context: Any) -> bytes:
        left_s = min(call.until_at - time.monotonic(), self.config.body_timeout_s)
        try:
            async with asyncio.timeout(left_s):
                body = await context.read()
        except TimeoutError:
            late = "the message did not arrive within its time or server.body_timeout_s"
            raise DeadlineExceeded(late) from None
        if not isinstance(body, bytes):
            raise BadRequest("the call has no message")
        call.whole_at = time.monotonic()
        return body

    def _end(self, call: RpcCall, status: int, failure: Failure | None, refusal: Refusal | None) -> None:
        has_key = self.keys.has_keys and call.key is not ANYBODY
        ended = EndedRequest(
            kind=None if call.kind is None else call.kind.name,
            trace=call.trace,
            request_id=call.request_id,
            method="POST",
            route=call.path,
            status=status,
            duration_s=time.monotonic() - call.whole_at,
            failure=failure,
            key=call.key.name if has_key else None,
            user=call.user,
            answer=call.answer,
        )
        stages_s = {} if call.answer is None else call.answer.stages_s
        self.metrics.requests.done(
            ended.kind, call.path, status, ended.duration_s, stages_s, refusal=refusal, has_s=call.has_s
        )
        self.access_log.write(ended)
        if call.span is not None:
            attributes: dict[str, str | int] = {
                "rpc.system": "grpc",
                "rpc.method": call.path,
                "http.response.status_code": status,
                "npu_gr.request_id": call.request_id,
            }
            self.tracing.end(call.span, stages_s, call.arrived_at, call.parsed_at, attributes)


def metadata_of(context: Any) -> dict[str, str]:
    """Return the metadata that are texts: of a name given twice the first, of two keys neither."""
    given: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            is_second_key = name == "authorization" and name in given
            given[name] = "" if is_second_key else given.get(name, value)
    return given


def status_of(error: Exception, call: RpcCall) -> tuple[grpc.StatusCode, str, Metadata]:
    """Translate an error: code, text, trailing metadata."""
    if not isinstance(error, NpuGrError):
        return grpc.StatusCode.INTERNAL, UNEXPECTED, (*call.about, (STATUS, "500"))
    is_callers = error.status < 500
    other = grpc.StatusCode.INVALID_ARGUMENT if is_callers else grpc.StatusCode.INTERNAL
    about = (*call.about, (STATUS, str(error.status)))
    if isinstance(error, Overloaded) and error.reason is not Refusal.RATE:
        about = (*about, (PUSHBACK_MS, str(random.choice(http.RETRY_MS))))  # noqa: S311  (spread)
    elif isinstance(error, NotTaken):
        about = (*about, (http.NOT_TAKEN.lower(), "1"))
    return CODES.get(error.status, other), str(error), about
