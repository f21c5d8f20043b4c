"""The routes of all kinds of requests.

One handler serves all kinds; `KINDS` and `CODECS` hold the differences. Bodies are decoded within a
bound on their cost (`Reader`) and a share of the event loop's time (`CooperativeSlices`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast
from urllib.parse import unquote_to_bytes

import msgspec
from aiohttp import web

from npu_gr.core.errors import BadRequest, DeadlineExceeded
from npu_gr.core.kinds import KINDS, A, Kind, Q
from npu_gr.core.request import Answer, Outcome
from npu_gr.server.access_log import ServerCall
from npu_gr.server.admission.middleware import BODY
from npu_gr.server.config import ServerConfig
from npu_gr.server.http import accepted_media, struct_response
from npu_gr.server.middleware import CALL, RequestLifecycle
from npu_gr.server.schemas import CODECS, bulk
from npu_gr.server.schemas.fields import (
    B,
    Codec,
    ResponseFields,
    UrlParts,
    as_objects,
    check_user,
)
from npu_gr.server.schemas.media import decode, skim
from npu_gr.server.service_protocol import ServiceProtocol, require_ready

D = TypeVar("D")  # a decoded body
T = TypeVar("T")

SHARE = 0.5  # fraction of the event loop's time for decoding bodies
BURST_S = 0.01  # decoding time that may exceed the share at once
_X_CACHE = {
    Outcome.HBM_HIT: "hit-hbm",
    Outcome.DRAM_HIT: "hit-dram",
    Outcome.JOINED: "joined",
    Outcome.MISS_FULL: "miss",
    Outcome.DEGRADED: "degraded",
}


def kind_handlers(
    service: ServiceProtocol, lifecycle: RequestLifecycle, reader: Reader
) -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
    """Make the handler of each kind; the service rejects kinds that it is not configured for.

    Raises:
        KeyError: A kind has no codec.
    """
    return {
        kind.name: _handler(kind, CODECS[kind.name], service, lifecycle, reader)
        for kind in KINDS.values()
    }


def kind_routes(
    handlers: Mapping[str, Callable[[web.Request], Awaitable[web.Response]]],
) -> list[web.RouteDef]:
    """Make the routes of all kinds."""
    return [
        web.route(kind.method, _pattern(kind.path), handlers[kind.name]) for kind in KINDS.values()
    ]


def _path_variables(kind: Kind[Any, Any], request: web.Request) -> dict[str, str]:
    """Decode the variable of the path from the raw path.

    aiohttp's own decoding leaves some characters encoded.

    Raises:
        BadRequest: The variable is not UTF-8.
    """
    prefix, _, name = kind.path.partition("{")
    if not name:
        return {}
    sent = request.raw_path.partition("?")[0]
    name = name.rstrip("}")
    try:
        return {
            name: unquote_to_bytes(sent[len(prefix) :].encode(errors="surrogateescape")).decode()
        }
    except UnicodeDecodeError:
        raise BadRequest(f"{name}: is not UTF-8 after percent-decoding") from None


def _pattern(path: str) -> str:
    """Let the variable match the rest of the path: a user id may hold slashes and line ends."""
    return path.replace("}", ":(?s:.+)}")


def _handler(
    kind: Kind[Q, A],
    codec: Codec[B, Q, A],
    service: ServiceProtocol,
    lifecycle: RequestLifecycle,
    reader: Reader,
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        if kind.needs_ready:
            require_ready(service)
        call = request[CALL]

        # body: B; mypy cannot know that B is UrlParts where there is no body
        def parse(body: Any) -> tuple[Q, ResponseFields]:
            return parse_body(call, body, codec, service, lifecycle)

        if codec.body is None:
            parsed, response_fields = parse(UrlParts(_path_variables(kind, request), request.query))
        else:
            parsed, response_fields = await reader.read(
                request, codec.body, parse, loose_bytes=codec.loose_bytes, until_at=call.until_at
            )
        if codec.read_headers is not None:
            parsed = codec.read_headers(parsed, request.headers)
        answer = await ask(call, kind, parsed, service)
        media = accepted_media(request)
        are_objects = response_fields.are_objects(media)
        rendered: msgspec.Struct | None = None
        if response_fields.explains or not are_objects:
            rendered = codec.render(answer, call.request_id, media, response_fields)
        if are_objects:
            rendered = as_objects(answer, call.request_id, response_fields, rendered)
        if rendered is None:
            response = web.Response(status=kind.status)
        else:
            response = struct_response(
                request, rendered, kind.status if codec.begun is None else 202
            )
        add_headers(response, answer)
        return response

    return handle


def parse_body(
    call: ServerCall,
    body: Any,
    codec: Codec[Any, Q, Any],
    service: ServiceProtocol,
    lifecycle: RequestLifecycle,
) -> tuple[Q, ResponseFields]:
    """Make a request from a decoded body or a URL.

    Args:
        call: The key in it decides the tenant. Its `user` is set before the codec can raise, so
            that the access log has it.
        body: Instance of `codec.body`, or `UrlParts`.
        codec: Codec of the kind.
        service: Resolves names of items and actions.
        lifecycle: Steps of the call; `config` bounds the columns.

    Returns:
        The request, and which item fields its response includes.

    Raises:
        Forbidden: The request names another tenant than the key's.
        TooLarge, Unprocessable: As `Codec.parse` does.
    """
    response_fields = ResponseFields.of(body, service.names)
    body = of_tenant(body, lifecycle.keys.tenant_of(call.key, body.user.tenant))
    call.user = body.user
    if codec.body is not None:
        check_user(body.user)
    return codec.parse(body, lifecycle.config, response_fields.names), response_fields


async def ask(call: ServerCall, kind: Kind[Q, A], parsed: Q, service: ServiceProtocol) -> A:
    """Call the service within the client's time limit, and note its answer in `call`.

    Raises as `ServerCall.left_s` and `ServiceProtocol.serve` do.
    """
    answer = await service.serve(kind, parsed, call.left_s(), call.permit)
    call.answer = cast("Answer", answer)
    return answer


def of_tenant(body: Any, tenant: str) -> Any:
    """Return the body or URL with this tenant, which the key decides where the request has none."""
    if body.user.tenant == tenant:
        return body
    if isinstance(body, UrlParts):
        return body._replace(query={**body.query, "tenant": tenant})
    return msgspec.structs.replace(body, tenant=tenant)


def add_headers(response: web.Response, answer: Answer) -> None:
    """Add X-Cache (the outcome of the prefix cache) and Server-Timing (the time of each stage)."""
    if hasattr(answer, "outcome"):  # a recommend whose rank failed has None
        response.headers["X-Cache"] = _X_CACHE.get(answer.outcome, "none")
    if answer.stages_s:
        stages = (f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in answer.stages_s.items())
        response.headers["Server-Timing"] = ", ".join(stages)


# ---- bodies


class CooperativeSlices:
    """Limits decoding to a share of the event loop's time, one body after the other.

    Use: `await slices.turn(...)`, then at once `with slices:` around the synchronous work.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_time: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Start without debt.

        Args:
            clock: Monotonic clock in seconds.
            cpu_time: CPU time of this thread in seconds, so that waiting for a core is not charged.
            sleep: Sleeps by that clock.
        """
        self._clock = clock
        self._cpu_time = cpu_time
        self._sleep = sleep
        self._lock = asyncio.Lock()  # asyncio's locks are first come, first served
        self._thread = asyncio.Lock()
        self._paid_at = float("-inf")  # instant at which past work is within the share again
        self._began_s = 0.0

    async def turn(self, until_at: float = float("inf")) -> None:
        """Wait until more work is within the share, or raise DeadlineExceeded at `until_at`."""
        if not self._lock.locked() and self._wait_s() <= 0:
            return
        async with self._until(until_at), self._lock:
            while (wait_s := self._wait_s()) > 0:
                await self._sleep(wait_s)

    @asynccontextmanager
    async def _until(self, until_at: float) -> AsyncIterator[None]:
        left_s = until_at - self._clock()
        try:
            async with asyncio.timeout(left_s if left_s < float("inf") else None):
                yield
        except TimeoutError:
            raise DeadlineExceeded(
                "the time limit passed while the request waited for its body to be decoded"
            ) from None

    def _wait_s(self) -> float:
        return self._paid_at - BURST_S - self._clock()

    def __enter__(self) -> None:
        self._began_s = self._cpu_time()

    def __exit__(self, *_: object) -> None:
        self._pay(self._cpu_time() - self._began_s)

    def _pay(self, took_s: float) -> None:
        self._paid_at = max(self._paid_at, self._clock() - took_s) + took_s / SHARE

    async def in_thread(self, work: Callable[[], T], until_at: float = float("inf")) -> T:
        """Run `work`, which may take longer than the loop may stand still, one after the other.

        Its thread takes the interpreter from the loop for 5 ms at a time, so its time counts as the
        loop's.

        Raises:
            DeadlineExceeded: `until_at` passed while other bodies were decoded.
        """
        took_s = 0.0

        def timed() -> T:
            nonlocal took_s
            began_s = self._cpu_time()
            try:
                return work()
            finally:
                took_s = self._cpu_time() - began_s

        def end(_: asyncio.Future[T]) -> None:
            self._pay(took_s)
            self._thread.release()

        async with self._until(until_at):
            await self._thread.acquire()
        try:
            await self.turn(until_at)
        except BaseException:
            self._thread.release()
            raise
        running = asyncio.ensure_future(asyncio.to_thread(timed))
        running.add_done_callback(end)
        return await asyncio.shield(running)  # a client that leaves does not end the thread


class Reader:
    """Decodes the bodies of one instance. Event loop only."""

    def __init__(self, config: ServerConfig) -> None:
        """Start without work; `config` bounds the columns."""
        self._config = config
        self.slices = CooperativeSlices()

    async def in_turn(self, parse: Callable[[], T], until_at: float = float("inf")) -> T:
        """Run `parse` within the share of the event loop's time.

        `parse` must bound its own cost before it makes objects.

        Raises:
            DeadlineExceeded: `until_at` passed while other bodies were decoded.
        """
        await self.slices.turn(until_at)
        with self.slices:
            return parse()

    async def read(
        self,
        request: web.Request,
        cls: type[D],
        parse: Callable[[D], T],
        *,
        loose_bytes: int = bulk.LOOSE_BYTES,
        until_at: float = float("inf"),
    ) -> T:
        """Decode and parse a body.

        Args:
            request: Request with its body in `request[BODY]`.
            cls: Struct to decode.
            parse: Converts the Struct. That of a long body runs in a thread: the hashes of 65,536
                names take 140 ms.
            loose_bytes: Largest number of bytes outside of the columns.
            until_at: Instant of `time.monotonic` at which the client stops waiting.

        Raises:
            UnsupportedMedia, BadRequest, Unprocessable, TooLarge: As `decode`, `bulk.check` and
                `parse` do.
            DeadlineExceeded: `until_at` passed while other bodies were decoded.
        """
        body = request[BODY]
        media = request.content_type
        if len(body) <= loose_bytes:
            await self.slices.turn(until_at)
            with self.slices:
                return parse(decode(body, media, cls))
        await self.in_turn(
            lambda: bulk.check(skim(body, media, cls), len(body), cls, self._config, loose_bytes),
            until_at,
        )
        decoded = await self.in_turn(lambda: decode(body, media, cls), until_at)
        return await self.slices.in_thread(lambda: parse(decoded), until_at)
