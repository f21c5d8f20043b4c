"""The routes of all kinds of requests. One handler serves them; the tables of kinds and codecs say what differs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import msgspec
from aiohttp import web

from npu_gr.core.errors import BadRequest, DeadlineExceeded
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import KINDS, A, Kind, Q
from npu_gr.core.request import Answer, Outcome
from npu_gr.server.auth.keys import Key, KeyRing
from npu_gr.server.codec import CODECS
from npu_gr.server.codec.fields import B, Codec, Shown, UrlParts
from npu_gr.server.config import ServerConfig
from npu_gr.server.http import accepted_media, budget_s, struct_response
from npu_gr.server.middleware import ANSWER, ARRIVED_AT, ID, KEY, PARSED_AT, PERMIT, UNTIL_AT, USER
from npu_gr.server.reading import Reader
from npu_gr.server.service_protocol import ServiceProtocol, require_ready

_X_CACHE = {
    Outcome.HBM_HIT: "hit-hbm",
    Outcome.DRAM_HIT: "hit-dram",
    Outcome.JOINED: "joined",
    Outcome.MISS_FULL: "miss",
    Outcome.DEGRADED: "degraded",
}


def kind_handlers(
    service: ServiceProtocol, config: ServerConfig, reader: Reader, keys: KeyRing
) -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
    """Make the handler of each kind, also of those that this instance is not configured for: the service refuses them.

    Raises:
        KeyError: a kind has no codec.
    """
    return {kind.name: _handler(kind, CODECS[kind.name], service, config, reader, keys) for kind in KINDS.values()}


def kind_routes(handlers: Mapping[str, Callable[[web.Request], Awaitable[web.Response]]]) -> list[web.RouteDef]:
    """Make the routes of all kinds."""
    return [web.route(kind.method, _pattern(kind.path), handlers[kind.name]) for kind in KINDS.values()]


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
        return {name: unquote_to_bytes(sent[len(prefix) :].encode(errors="surrogateescape")).decode()}
    except UnicodeDecodeError:
        raise BadRequest(f"{name}: not UTF-8 after decoding") from None


def _pattern(path: str) -> str:
    """Let a variable match the rest of the path, slashes and line ends too, since a user id may hold any character."""
    return path.replace("}", ":(?s:.+)}")


def _handler(
    kind: Kind[Q, A],
    codec: Codec[B, Q, A],
    service: ServiceProtocol,
    config: ServerConfig,
    reader: Reader,
    keys: KeyRing,
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        if kind.needs_ready:
            require_ready(service)

        def parse(body: Any) -> tuple[Q, Shown]:  # B; mypy cannot know that B is UrlParts where there is no body
            return parse_body(request[KEY], body, codec, service, config, keys, partial(request.__setitem__, USER))

        until_at = until(request, config)
        if codec.body is None:
            parsed, shown = parse(UrlParts(_path_variables(kind, request), request.query))
        else:
            parsed, shown = await reader.read(
                request, codec.body, parse, loose_bytes=codec.loose_bytes, until_at=until_at
            )
        if codec.read_headers is not None:
            parsed = codec.read_headers(parsed, request.headers)
        answer = await ask(request, kind, parsed, shown, service, until_at)
        rendered = codec.render(answer, request[ID], accepted_media(request), shown)
        if rendered is None:
            response = web.Response(status=kind.status)
        else:
            response = struct_response(request, rendered, kind.status if codec.begun is None else 202)
        add_headers(response, answer)
        return response

    return handle


def parse_body(
    key: Key,
    body: Any,
    codec: Codec[Any, Q, Any],
    service: ServiceProtocol,
    config: ServerConfig,
    keys: KeyRing,
    is_about: Callable[[UserKey], None],
) -> tuple[Q, Shown]:
    """Make a request of a decoded body or of a URL, and say what its answer will say of its items.

    Args:
        key: of the caller.
        body: of the codec, or `UrlParts`.
        codec: of the kind.
        service: knows the names.
        config: bounds the columns.
        keys: decide whose data it is about.
        is_about: is told the user, before anything else can be refused.

    Raises:
        Forbidden: it names another tenant than the key's. What `Codec.parse` raises.
    """
    shown = Shown(service.names, tuple(getattr(body, "fields", ())))
    body = of_tenant(body, keys.tenant_of(key, body.user.tenant))
    is_about(body.user)
    return codec.parse(body, config, shown.names), shown


async def ask(
    request: web.Request, kind: Kind[Q, A], parsed: Q, shown: Shown, service: ServiceProtocol, until_at: float
) -> A:
    """Ask the service, and note its answer for the middleware. Raises as `ServiceProtocol.serve` does."""
    answer = await service.serve(kind, parsed, _left_s(request, until_at), request.get(PERMIT), shown)
    request[ANSWER] = cast("Answer", answer)
    return answer


def of_tenant(body: Any, tenant: str) -> Any:
    """Return the same body or URL about a user of this tenant: the key decides it where the request names none."""
    if body.user.tenant == tenant:
        return body
    if isinstance(body, UrlParts):
        return body._replace(query={**body.query, "tenant": tenant})
    return msgspec.structs.replace(body, tenant=tenant)


def until(request: web.Request, config: ServerConfig) -> float:
    """Return the instant at which the caller gives up. Raises BadRequest or DeadlineExceeded as `budget_s` does."""
    if (at := request.get(UNTIL_AT)) is not None:
        return at
    return request[ARRIVED_AT] + budget_s(request.headers, config.default_budget_s, config.max_budget_s)


def _left_s(request: web.Request, until_at: float) -> float:
    """Return what is left of the caller's budget after reading the body, in seconds. Call it right before the service.

    Raises:
        DeadlineExceeded: nothing is left.
    """
    now_at = time.monotonic()
    request[PARSED_AT] = now_at
    if now_at >= until_at:
        granted_ms = (until_at - request[ARRIVED_AT]) * 1e3
        raise DeadlineExceeded(f"reading the request took the whole budget of {granted_ms:.0f} ms")
    return until_at - now_at


def add_headers(response: web.Response, answer: Answer) -> None:
    """Say how the prefix was found, where the answer has an outcome, and how long each stage took."""
    if hasattr(answer, "outcome"):  # a recommend whose rank failed has None
        response.headers["X-Cache"] = _X_CACHE.get(answer.outcome, "none")
    if answer.stages_s:
        stages = (f"{stage};dur={seconds * 1e3:.3f}" for stage, seconds in answer.stages_s.items())
        response.headers["Server-Timing"] = ", ".join(stages)
