"""One gRPC call from its metadata to its status: key, time limit, message, counts, the access log's line.

The same course as HTTP's (`entrance/connection.py`, `middleware.py`), with the same door, errors, metrics and log:

    metadata -> key -> message -> rate -> [door -> parse -> service -> answer] -> status

A caller without a key is refused before its message is read. Who cancels, or whose deadline is over, gives up
everything that the call holds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import grpc

from npu_gr.core.errors import (
    BadRequest,
    DeadlineExceeded,
    NotTaken,
    NpuGrError,
    Overloaded,
    Refusal,
    Unauthorized,
    Unavailable,
)
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import Kind, Scope
from npu_gr.core.request import Answer
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.trace import CURRENT, Trace
from npu_gr.server import headers
from npu_gr.server.access_log import AccessLog, EndedRequest, Failure
from npu_gr.server.auth.key_ring import KeyRing
from npu_gr.server.auth.keys import ANYBODY, Key
from npu_gr.server.auth.throttle import Throttle
from npu_gr.server.codec.base import Shown
from npu_gr.server.codec.bulk import LOOSE_BYTES
from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.listener import Listener
from npu_gr.server.middleware import ABANDONED
from npu_gr.server.pieces import Pieces
from npu_gr.server.responses import require_ready
from npu_gr.server.rpc.skim import most_elements, skim
from npu_gr.server.service_protocol import ServiceProtocol
from npu_gr.server.tracing import Tracing

log = logging.getLogger(__name__)

STATUS = "npu-gr-status"  # in the trailing metadata of an error: its status over HTTP, which says more
PUSHBACK_MS = "grpc-retry-pushback-ms"  # gRPC's own clients heed it, where their service config lets them try again
CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,  # the same message fails again: send the history whole
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
UNEXPECTED = "an unexpected error; the log has it under this request id"
Metadata = tuple[tuple[str, str], ...]


class RpcShared(NamedTuple):
    """What all calls of one server share."""

    service: ServiceProtocol
    config: ServerConfig
    metrics: Metrics
    keys: KeyRing
    access_log: AccessLog
    tracing: Tracing
    wrong_keys: Throttle
    listener: Listener  # counts the bytes of messages with those of HTTP's bodies
    pieces: Pieces


class RpcCall:
    """A call, or one message of a stream."""

    def __init__(self, path: str, metadata: dict[str, str], remaining_s: float | None, shared: RpcShared) -> None:
        """It begins now.

        Args:
            path: "/package.Service/Method".
            metadata: that came with it.
            remaining_s: until gRPC's own deadline; None = there is none.
            shared: by all calls.
        """
        self.path = path
        self.arrived_at = time.monotonic()
        self.whole_at = self.arrived_at  # when its message was here
        self.metadata = metadata
        self.remaining_s = remaining_s
        self.request_id = headers.request_id({headers.REQUEST_ID: metadata.get(headers.REQUEST_ID.lower(), "")})
        self.until_at = self.arrived_at + shared.config.default_budget_s
        self.names_limit = False  # the caller does
        self.kind: Kind[Any, Any] | None = None
        self.key: Key | None = None
        self.user: UserKey | None = None
        self.answer: Answer | None = None
        self.parsed_at: float | None = None
        self.trace, self.span = shared.tracing.begin(f"POST {path}", metadata.get("traceparent"))

    def limit(self, config: ServerConfig) -> None:
        """Find when the caller gives up. Raises BadRequest or DeadlineExceeded, as `headers.budget_s` does."""
        given = {name: value for name in headers.BUDGET_HEADERS if (value := self.metadata.get(name.lower()))}
        budget_s = headers.budget_s(given, config.default_budget_s, config.max_budget_s)
        if self.remaining_s is not None:
            own_s = min(self.remaining_s, config.max_budget_s)
            budget_s = min(budget_s, own_s) if given else own_s
        self.names_limit = bool(given) or self.remaining_s is not None
        self.until_at = self.arrived_at + budget_s

    @property
    def has_s(self) -> float:
        """What the caller granted, from the last byte on."""
        return self.until_at - self.whole_at

    def is_about(self, user: UserKey) -> None:
        """Note the user, for the log."""
        self.user = user


class Calls:
    """Runs calls. Event loop only."""

    def __init__(self, shared: RpcShared) -> None:
        """Nothing runs yet."""
        self.shared = shared

    # ---- from gRPC and back

    async def unary(
        self, path: str, scope: Scope | None, work: Callable[[RpcCall, bytes], Awaitable[bytes]], context: Any
    ) -> bytes:
        """Serve a call with one message.

        Args:
            path: of the method.
            scope: that its key needs; None = it needs no key.
            work: makes the answer of the message.
            context: gRPC's.
        """
        call = RpcCall(path, metadata_of(context), context.time_remaining(), self.shared)

        async def run() -> bytes:
            await self.find_key(call, scope)
            call.limit(self.shared.config)
            body = await self._read(context, call)
            with self._received(call, body):
                return await work(call, body)

        try:
            answer = await self.counted(call, run)
        except Exception as error:
            code, detail, trailing = status_of(error, call)
            await context.abort(code, detail, trailing)
            raise AssertionError("gRPC's abort raises") from error
        context.set_trailing_metadata(_about(call))
        return answer

    async def message(
        self, path: str, scope: Scope, work: Callable[[RpcCall, bytes], Awaitable[bytes]], context: Any, body: bytes
    ) -> bytes:
        """Serve one message of a stream. Raises what `work` raises, and what a key may."""
        call = RpcCall(path, metadata_of(context), context.time_remaining(), self.shared)

        async def run() -> bytes:
            await self.find_key(call, scope)
            call.limit(self.shared.config)
            with self._received(call, body):
                return await work(call, body)

        return await self.counted(call, run)

    async def counted(self, call: RpcCall, run: Callable[[], Awaitable[bytes]]) -> bytes:
        """Run a call, and count, trace and log it however it ends."""
        shared = self.shared
        CURRENT.set(call.trace)
        shared.metrics.requests.in_flight.inc()
        status = ABANDONED
        failure: Failure | None = None
        refusal: Refusal | None = None
        try:
            answer = await run()
            status = 200
            return answer
        except asyncio.CancelledError:
            if time.monotonic() >= call.until_at:  # gRPC cancels what is over its deadline
                status = DeadlineExceeded.status
            raise
        except Exception as error:
            status = error.status if isinstance(error, NpuGrError) else 500
            failure = shared.access_log.failed(error)
            refusal = error.reason if isinstance(error, Overloaded) else None
            if not isinstance(error, NpuGrError):
                log.error("request %s failed", call.request_id, exc_info=error)
            raise
        finally:
            shared.metrics.requests.in_flight.dec()
            self._end(call, status, failure, refusal)

    def _end(self, call: RpcCall, status: int, failure: Failure | None, refusal: Refusal | None) -> None:
        shared = self.shared
        ended = EndedRequest(
            kind=None if call.kind is None else call.kind.name,
            trace=call.trace,
            request_id=call.request_id,
            method="POST",
            route=call.path,
            status=status,
            duration_s=time.monotonic() - call.whole_at,
            failure=failure,
            key=call.key.name if shared.keys.has_keys and call.key is not None else None,
            user=call.user,
            answer=call.answer,
        )
        stages_s = {} if call.answer is None else call.answer.stages_s
        shared.metrics.requests.done(
            ended.kind, call.path, status, ended.duration_s, stages_s, refusal=refusal, has_s=call.has_s
        )
        shared.access_log.write(ended)
        if call.span is not None:
            attributes: dict[str, str | int] = {
                "rpc.system": "grpc",
                "rpc.method": call.path,
                "http.response.status_code": status,
                "npu_gr.request_id": call.request_id,
            }
            shared.tracing.end(call.span, stages_s, call.arrived_at, call.parsed_at, attributes)

    # ---- the parts of a call

    async def find_key(self, call: RpcCall, scope: Scope | None) -> None:
        """Find the caller's key. Raises Unauthorized, held back where keys are tried, or Forbidden."""
        if scope is None:
            call.key = ANYBODY
            return
        keys = self.shared.keys
        sent = call.metadata.get("authorization")
        try:
            call.key = keys.find(None if sent is None else sent.encode(errors="surrogateescape"))
        except Unauthorized:
            await asyncio.sleep(self.shared.wrong_keys.hold_s())
            raise
        keys.require(call.key, scope)

    async def _read(self, context: Any, call: RpcCall) -> bytes:
        """Read the message of a call.

        Raises:
            BadRequest: there is none. DeadlineExceeded: it did not come in time.
        """
        left_s = min(call.until_at - time.monotonic(), self.shared.config.body_timeout_s)
        try:
            async with asyncio.timeout(left_s):
                body = await context.read()
        except TimeoutError:
            raise DeadlineExceeded("the message did not arrive within its time or server.body_timeout_s") from None
        if not isinstance(body, bytes):
            raise BadRequest("the call has no message")
        call.whole_at = time.monotonic()
        return body

    def _received(self, call: RpcCall, body: bytes) -> _Received:
        if call.key is not None:
            self.shared.keys.spend(call.key)
        return _Received(self.shared.listener, len(body))

    async def decoded(self, call: RpcCall, cls: Any, body: bytes, most_bytes: int = LOOSE_BYTES) -> Any:
        """Make a message of protobuf of its bytes.

        Args:
            call: that brought it.
            cls: its class.
            body: as it came.
            most_bytes: beside its columns.

        Raises:
            BadRequest: they are none. TooLarge: there is too much in them. DeadlineExceeded: others' took the time.
        """
        from google.protobuf.message import DecodeError

        pieces = self.shared.pieces
        if len(body) > most_bytes:
            walk = skim(body, cls.DESCRIPTOR, most_elements(self.shared.config), most_bytes)
            is_over = False
            while not is_over:
                await pieces.turn(call.until_at)
                with pieces:
                    is_over = next(walk, True) is True
        await pieces.turn(call.until_at)
        with pieces:
            try:
                return cls.FromString(body)
            except DecodeError:
                raise BadRequest("the message cannot be parsed") from None

    async def ask(
        self,
        call: RpcCall,
        kind: Kind[Any, Any],
        tenant: str,
        parse: Callable[[], tuple[Any, Shown]],
        write: Callable[[Any, Shown], bytes],
    ) -> bytes:
        """Ask the service for what a message says.

        Args:
            call: gets the kind and the answer.
            kind: of the request.
            tenant: that the message names; whose turn it takes at the door if the key has none.
            parse: makes the request; only of one that is let in.
            write: makes the answer's bytes.

        Raises:
            NpuGrError: as `parse`, the door and the service do.
        """
        service = self.shared.service
        call.kind = kind
        if kind.needs_ready:
            require_ready(service)
        slot = None
        if not kind.must_finish:
            own = None if call.key is None else call.key.tenant
            whose = tenant if own is None else own
            slot = await service.door.enter(kind.name, whose, call.whole_at, call.has_s)
        with nullcontext() if slot is None else slot:
            await self.shared.pieces.turn(call.until_at)
            with self.shared.pieces:
                parsed, shown = parse()
            call.parsed_at = now_at = time.monotonic()
            if now_at >= call.until_at:
                raise DeadlineExceeded(f"reading the request took the whole budget of {call.has_s * 1e3:.0f} ms")
            answer = await service.serve(kind, parsed, call.until_at - now_at, slot, shown)
            call.answer = answer
            return write(answer, shown)


class _Received:
    """Counts a message's bytes while the block holds them."""

    def __init__(self, listener: Listener, num_bytes: int) -> None:
        self._listener = listener
        self._num_bytes = num_bytes

    def __enter__(self) -> None:
        if not self._listener.reserve(self._num_bytes):
            raise Unavailable("the bodies that arrive now are over server.max_receiving_bytes")

    def __exit__(self, *_: object) -> None:
        self._listener.reserve(-self._num_bytes)


def metadata_of(context: Any) -> dict[str, str]:
    """Return the metadata of a call that are texts; of one that is given twice, the first, and of a key neither."""
    given: dict[str, str] = {}
    items: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    for name, value in items:
        if isinstance(value, str):
            given[name] = given.get(name, value) if name != "authorization" or name not in given else ""
    return given


def status_of(error: Exception, call: RpcCall) -> tuple[grpc.StatusCode, str, Metadata]:
    """Translate an error: code, text, trailing metadata."""
    about = _about(call)
    if not isinstance(error, NpuGrError):
        return grpc.StatusCode.INTERNAL, UNEXPECTED, (*about, (STATUS, "500"))
    code = CODES.get(error.status)
    if code is None:
        code = grpc.StatusCode.INVALID_ARGUMENT if error.status < 500 else grpc.StatusCode.INTERNAL
    about = (*about, (STATUS, str(error.status)))
    if isinstance(error, Overloaded) and error.reason is not Refusal.RATE:
        about = (*about, (PUSHBACK_MS, str(random.choice(headers.RETRY_MS))))  # noqa: S311  (spread)
    elif isinstance(error, NotTaken):
        about = (*about, (headers.NOT_TAKEN.lower(), "1"))
    return code, str(error), about


def told(error: Exception) -> str:
    """Return what the caller is told of an error."""
    return str(error) if isinstance(error, NpuGrError) else UNEXPECTED


def title_of(error: Exception) -> str:
    """Return the title of an error, as problem details have it."""
    return error.title if isinstance(error, NpuGrError) else NpuGrError.title


def _about(call: RpcCall) -> Metadata:
    trace: Trace = call.trace
    return (headers.REQUEST_ID.lower(), call.request_id), ("traceparent", trace.header)
