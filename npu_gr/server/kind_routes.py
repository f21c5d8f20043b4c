"""The routes of all kinds of requests.

One handler serves them; the tables of kinds and codecs say what differs.

A handler reads its body with a bound on what that may cost (`Reader`), and in turn with others
(`CooperativeSlices`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
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
from npu_gr.server.middleware import CALL, Course
from npu_gr.server.schemas import CODECS, bulk
from npu_gr.server.schemas.fields import B, Codec, ResponseFields, UrlParts
from npu_gr.server.schemas.media import decode, skim
from npu_gr.server.service_protocol import ServiceProtocol, require_ready

D = TypeVar("D")  # a decoded body
T = TypeVar("T")

SHARE = 0.5  # of the loop's time, for reading bodies
BURST_S = 0.01
_X_CACHE = {
    Outcome.HBM_HIT: "hit-hbm",
    Outcome.DRAM_HIT: "hit-dram",
    Outcome.JOINED: "joined",
    Outcome.MISS_FULL: "miss",
    Outcome.DEGRADED: "degraded",
}


def kind_handlers(
    service: ServiceProtocol, course: Course, reader: Reader
) -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
    """Make the handler of each kind, also of those that this instance is not configured for: the service rejects them.

    Raises:
        KeyError: a kind has no codec.
    """
    return {
        kind.name: _handler(kind, CODECS[kind.name], service, course, reader)
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
    """Decode the variable of the path once, from what was sent: aiohttp's own decoding keeps some characters encoded.

    Raises:
        BadRequest: the fixed part of the path is encoded, or the variable is not UTF-8.
    """
    prefix, _, name = kind.path.partition("{")
    if not name:
        return {}
    sent = request.raw_path.partition("?")[0]
    if not sent.startswith(prefix):
        raise BadRequest(f"path: must begin with {prefix} as it is, without encoding")
    name = name.rstrip("}")
    try:
        return {
            name: unquote_to_bytes(sent[len(prefix) :].encode(errors="surrogateescape")).decode()
        }
    except UnicodeDecodeError:
        raise BadRequest(f"{name}: not UTF-8 after decoding") from None


def _pattern(path: str) -> str:
    """Let a variable match the rest of the path, slashes and line ends too, since a user id may hold any character."""
    return path.replace("}", ":(?s:.+)}")


def _handler(
    kind: Kind[Q, A],
    codec: Codec[B, Q, A],
    service: ServiceProtocol,
    course: Course,
    reader: Reader,
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        if kind.needs_ready:
            require_ready(service)
        call = request[CALL]

        # B; mypy cannot know that B is UrlParts where there is no body
        def parse(body: Any) -> tuple[Q, ResponseFields]:
            return parse_body(call, body, codec, service, course)

        if codec.body is None:
            parsed, shown = parse(UrlParts(_path_variables(kind, request), request.query))
        else:
            parsed, shown = await reader.read(
                request, codec.body, parse, loose_bytes=codec.loose_bytes, until_at=call.until_at
            )
        if codec.read_headers is not None:
            parsed = codec.read_headers(parsed, request.headers)
        answer = await ask(call, kind, parsed, service)
        rendered = codec.render(answer, call.request_id, accepted_media(request), shown)
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
    call: ServerCall, body: Any, codec: Codec[Any, Q, Any], service: ServiceProtocol, course: Course
) -> tuple[Q, ResponseFields]:
    """Make a request of a decoded body or of a URL, and say what its answer will say of its items.

    Args:
        call: has the key, which decides whose data it is about; it notes the user before anything
            else is rejected.
        body: of the codec, or `UrlParts`.
        codec: of the kind.
        service: knows the names.
        course: of the call; its configuration bounds the columns.

    Raises:
        Forbidden: it names another tenant than the key's. What `Codec.parse` raises.
    """
    shown = ResponseFields(service.names, tuple(getattr(body, "fields", ())))
    body = of_tenant(body, course.keys.tenant_of(call.key, body.user.tenant))
    call.user = body.user
    return codec.parse(body, course.config, shown.names), shown


async def ask(call: ServerCall, kind: Kind[Q, A], parsed: Q, service: ServiceProtocol) -> A:
    """Ask the service, and note its answer.

    Raises as `ServerCall.left_s` and `ServiceProtocol.serve` do.
    """
    answer = await service.serve(kind, parsed, call.left_s(), call.permit)
    call.answer = cast("Answer", answer)
    return answer


def of_tenant(body: Any, tenant: str) -> Any:
    """Return the same body or URL about a user of this tenant: the key decides it where the request names none."""
    if body.user.tenant == tenant:
        return body
    if isinstance(body, UrlParts):
        return body._replace(query={**body.query, "tenant": tenant})
    return msgspec.structs.replace(body, tenant=tenant)


def add_headers(response: web.Response, answer: Answer) -> None:
    """Say how the prefix was found, where the answer has an outcome, and how long each stage took."""
    if hasattr(answer, "outcome"):  # a recommend whose rank failed has None
        response.headers["X-Cache"] = _X_CACHE.get(answer.outcome, "none")
    if answer.stages_s:
        stages = (f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in answer.stages_s.items())
        response.headers["Server-Timing"] = ", ".join(stages)


# ---- bodies


class CooperativeSlices:
    """`await pieces.turn(...)`, then `with pieces:` around the piece, without waiting for anything in between."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Nothing was done yet.

        Args:
            clock: seconds that never go back.
            worked: seconds that this thread has worked; a core that others use is not the caller's
                doing.
            sleep: by that clock.
        """
        self._clock = clock
        self._worked = worked
        self._sleep = sleep
        self._lock = asyncio.Lock()  # first come, first served
        self._paid_at = float("-inf")  # when what the pieces took is made up for
        self._began_s = 0.0

    async def turn(self, until_at: float = float("inf")) -> None:
        """Wait for the turn; cancelled waiters leave nothing behind.

        Args:
            until_at: instant of the clock.

        Raises:
            DeadlineExceeded: the turn did not come until then.
        """
        if not self._lock.locked() and self._wait_s() <= 0:
            return
        left_s = until_at - self._clock()
        try:
            async with asyncio.timeout(left_s if left_s < float("inf") else None), self._lock:
                while (wait_s := self._wait_s()) > 0:
                    await self._sleep(wait_s)
        except TimeoutError:
            raise DeadlineExceeded(
                "the time budget ran out while longer bodies were read"
            ) from None

    def _wait_s(self) -> float:
        return self._paid_at - BURST_S - self._clock()

    def __enter__(self) -> None:
        self._began_s = self._worked()

    def __exit__(self, *_: object) -> None:
        took_s = self._worked() - self._began_s
        self._paid_at = max(self._paid_at, self._clock() - took_s) + took_s / SHARE


class Reader:
    """Reads the bodies of one instance. Event loop only."""

    def __init__(self, config: ServerConfig) -> None:
        """Nothing is read yet.

        Args:
            config: bounds the columns.
        """
        self._config = config
        self.pieces = CooperativeSlices()

    async def in_turn(self, parse: Callable[[], T], until_at: float = float("inf")) -> T:
        """Read what `parse` decodes by itself, in one piece, and bounds before it makes an object of anything.

        Args:
            parse: what to do.
            until_at: as for `read`.

        Raises:
            DeadlineExceeded: others' bodies took the time. What `parse` raises.
        """
        await self.pieces.turn(until_at)
        with self.pieces:
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
            request: whose body has come.
            cls: the Struct to read.
            parse: what to make of it; as cheap as decoding. Of a long body it is a piece of its
                own.
            loose_bytes: of the body beside its columns.
            until_at: instant of `time.monotonic` at which the caller gives up.

        Raises:
            UnsupportedMedia, BadRequest, Unprocessable, TooLarge: as `decode`, `bulk.check` and
                `parse` do.
            DeadlineExceeded: others' bodies took the time.
        """
        body = request[BODY]
        media = request.content_type
        if len(body) <= loose_bytes:
            await self.pieces.turn(until_at)
            with self.pieces:
                return parse(decode(body, media, cls))
        await self.in_turn(
            lambda: bulk.check(skim(body, media, cls), len(body), cls, self._config, loose_bytes),
            until_at,
        )
        decoded = await self.in_turn(lambda: decode(body, media, cls), until_at)
        return await self.in_turn(lambda: parse(decoded), until_at)
