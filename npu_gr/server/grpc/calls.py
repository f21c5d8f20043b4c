"""One gRPC call from its metadata to its status: the counterpart of `server/middleware.py`.

    metadata -> key -> message -> rate limit of the key -> work -> status

A client without a key is rejected before its message is read. When a client cancels or its deadline
passes, gRPC cancels the coroutine, which releases what the call holds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from multidict import CIMultiDict

from npu_gr.core.errors import (
    BadRequest,
    BodyTooSlow,
    DeadlineExceeded,
    NotTaken,
    NpuGrError,
    Overloaded,
    Rejection,
)
from npu_gr.core.kinds import Scope
from npu_gr.metrics.slo import ABANDONED
from npu_gr.server import http
from npu_gr.server.access_log import ServerCall
from npu_gr.server.auth.rules import reject_foreign_pages
from npu_gr.server.middleware import RequestLifecycle

log = logging.getLogger(__name__)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line of grpcio's log is about more than bytes that a client sent, or left unread.

    It logs a traceback for each header or path that is not UTF-8, which needs no key.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ not in ("UnicodeDecodeError", "ExecuteBatchError")


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_ours)

STATUS = "npu-gr-status"  # trailing metadata of an error: the more precise HTTP status
# Clients wait so long before a retry, where their service config allows retries.
PUSHBACK_MS = "grpc-retry-pushback-ms"
CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,  # a retry fails too: send the whole history
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
MAX_CALLS = 4096  # concurrent calls of the process
_calls: set[int] = set()  # ids of their `ServerCall`s
# Calls that wait for a message of their client, or watch the health: a quarter of those that the
# server takes at once, so that calls that say nothing never shut others out.
MAX_WAITING = 1024
_waiting: dict[asyncio.Timeout, None] = {}  # oldest first
Metadata = tuple[tuple[str, str], ...]
Work = Callable[[ServerCall, bytes], Awaitable[bytes]]


@asynccontextmanager
async def waiting(left_s: float | None) -> AsyncIterator[None]:
    """Wait for a client; where more than `MAX_WAITING` calls do, the one that waits longest ends.

    Raises:
        TimeoutError: `left_s` passed, or the call has waited longest.
    """
    async with asyncio.timeout(left_s) as timer:
        _waiting[timer] = None
        if len(_waiting) > MAX_WAITING:
            oldest = next(iter(_waiting))
            del _waiting[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        try:
            yield
        finally:
            _waiting.pop(timer, None)


async def unary(
    lifecycle: RequestLifecycle, path: str, scope: Scope | None, work: Work, _: Any, context: Any
) -> bytes:
    """Serve a call with one message.

    Args:
        lifecycle: Steps shared with HTTP.
        path: "/package.Service/Method".
        scope: Scope that the key must have; None = no key is needed.
        work: Maps the message's bytes to those of the answer.
        context: gRPC's context; the message is read from it.
    """
    call = begin(lifecycle, path, context)
    try:
        with place(lifecycle, call):
            answer = await counted(lifecycle, call, scope, work, context)
    except Exception as error:
        await context.abort(*status_of(error, call))
        raise AssertionError("gRPC's abort raises") from error
    context.set_trailing_metadata(_about(call))
    return answer


async def stream(
    lifecycle: RequestLifecycle,
    path: str,
    scope: Scope | None,
    answer: Callable[[Any], Awaitable[None]],
    _: Any,
    context: Any,
) -> None:
    """Serve a call with a stream of messages.

    A client without a key is rejected before the stream is read; `answer` checks each message.
    """
    call = begin(lifecycle, path, context)
    try:
        with place(lifecycle, call):
            await _check(lifecycle, call, scope)
            await answer(context)
    except NpuGrError as error:
        await context.abort(*status_of(error, call))


async def _check(lifecycle: RequestLifecycle, call: ServerCall, scope: Scope | None) -> None:
    """Check that no page of a browser sends the call, and its key.

    Raises:
        Forbidden, Unauthorized: A page sends it, or the client has no such key.
    """
    reject_foreign_pages(call.headers, is_loopback=False)
    if scope is not None:
        await lifecycle.find_key(call, scope)


def begin(lifecycle: RequestLifecycle, path: str, context: Any) -> ServerCall:
    """Begin a call, or one message of a stream; `counted` ends it."""
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            headers.add(name, value)
    if len(headers.getall("authorization", ())) > 1:
        headers["authorization"] = ""  # two keys are ambiguous: accept neither
    return lifecycle.begin("POST", path, headers)


@contextmanager
def place(lifecycle: RequestLifecycle, call: ServerCall) -> Iterator[None]:
    """Hold one of `MAX_CALLS` places.

    Raises:
        Overloaded: All are held. The rejection is counted and logged, as over HTTP.
    """
    if len(_calls) >= MAX_CALLS:
        error = Overloaded(f"{MAX_CALLS} calls run at once", reason=Rejection.QUEUE)
        lifecycle.end(call, error.status, error, _attributes(call))
        raise error
    _calls.add(id(call))
    try:
        yield
    finally:
        _calls.discard(id(call))


async def counted(
    lifecycle: RequestLifecycle,
    call: ServerCall,
    scope: Scope | None,
    work: Work,
    context: Any,
    body: bytes | None = None,
) -> bytes:
    """Run a call; count, trace and log it however it ends.

    Args:
        lifecycle: Steps shared with HTTP.
        call: Result of `begin`.
        scope, work, context: See `unary`.
        body: One message of a stream; None = read the call's only message.

    Raises:
        NpuGrError: The key, the time limit or the message is invalid. Also what `work` raises.
    """
    status = ABANDONED
    failure: Exception | None = None
    lifecycle.metrics.requests.in_flight.inc()
    try:
        await _check(lifecycle, call, scope)
        lifecycle.limit(call, context.time_remaining())
        sent = await _read(lifecycle, call, context) if body is None else body
        lifecycle.keys.spend(call.key)
        answer = await work(call, sent)
        status = 200
        return answer
    except asyncio.CancelledError:
        if time.monotonic() >= call.until_at:  # gRPC cancels calls at their deadline
            status = DeadlineExceeded.status
        raise
    except Exception as error:
        failure = error
        status = error.status if isinstance(error, NpuGrError) else 500
        if not isinstance(error, NpuGrError):
            log.error("request %s failed", call.request_id, exc_info=error)
        raise
    finally:
        lifecycle.metrics.requests.in_flight.dec()
        lifecycle.end(call, status, failure, _attributes(call))
        failure = None  # its traceback holds this frame: a cycle would wait for the collector


async def _read(lifecycle: RequestLifecycle, call: ServerCall, context: Any) -> bytes:
    left_s = min(call.until_at - time.monotonic(), lifecycle.config.body_timeout_s)
    try:
        async with waiting(left_s):
            body = await context.read()
    except TimeoutError:
        late = "the message did not arrive within the time limit or server.body_timeout_s"
        raise BodyTooSlow(late) from None  # the client's fault, as over HTTP: no objective has it
    if not isinstance(body, bytes):
        raise BadRequest("the call has no message")
    call.body_at = time.monotonic()
    return body


def _attributes(call: ServerCall) -> dict[str, str | int]:
    return {"rpc.system": "grpc", "rpc.method": call.route}


def _about(call: ServerCall) -> Metadata:
    """Return the trailing metadata of every answer."""
    return (http.REQUEST_ID.lower(), call.request_id), ("traceparent", call.trace.header)


def status_of(error: Exception, call: ServerCall) -> tuple[grpc.StatusCode, str, Metadata]:
    """Translate an error to gRPC: code, text, trailing metadata."""
    if not isinstance(error, NpuGrError):
        return grpc.StatusCode.INTERNAL, http.UNEXPECTED, (*_about(call), (STATUS, "500"))
    is_callers = error.status < 500
    other = grpc.StatusCode.INVALID_ARGUMENT if is_callers else grpc.StatusCode.INTERNAL
    about = (*_about(call), (STATUS, str(error.status)))
    if isinstance(error, Overloaded) and error.reason is not Rejection.RATE:
        about = (*about, (PUSHBACK_MS, str(random.choice(http.RETRY_MS))))  # noqa: S311  (spread)
    elif isinstance(error, NotTaken):
        about = (*about, (http.NOT_TAKEN.lower(), "1"))
    return CODES.get(error.status, other), str(error), about
