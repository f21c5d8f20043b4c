"""The routes of all kinds of requests. One handler serves them; the tables of kinds and codecs say what differs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import msgspec
from aiohttp import web

from npu_gr.core.errors import BadRequest
from npu_gr.core.kinds import KINDS, A, Kind, Q
from npu_gr.core.request import Answer, Outcome
from npu_gr.server.access_log import ServerCall
from npu_gr.server.codec import CODECS
from npu_gr.server.codec.fields import B, Codec, Shown, UrlParts
from npu_gr.server.http import accepted_media, struct_response
from npu_gr.server.middleware import CALL, Course
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
    service: ServiceProtocol, course: Course, reader: Reader
) -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
    """Make the handler of each kind, also of those that this instance is not configured for: the service refuses them.

    Raises:
        KeyError: a kind has no codec.
    """
    return {kind.name: _handler(kind, CODECS[kind.name], service, course, reader) for kind in KINDS.values()}


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
    kind: Kind[Q, A], codec: Codec[B, Q, A], service: ServiceProtocol, course: Course, reader: Reader
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        if kind.needs_ready:
            require_ready(service)
        call = request[CALL]

        def parse(body: Any) -> tuple[Q, Shown]:  # B; mypy cannot know that B is UrlParts where there is no body
            return parse_body(call, body, codec, service, course)

        if codec.body is None:
            parsed, shown = parse(UrlParts(_path_variables(kind, request), request.query))
        else:
            parsed, shown = await reader.read(
                request, codec.body, parse, loose_bytes=codec.loose_bytes, until_at=call.until_at
            )
        if codec.read_headers is not None:
            parsed = codec.read_headers(parsed, request.headers)
        answer = await ask(call, kind, parsed, shown, service)
        rendered = codec.render(answer, call.request_id, accepted_media(request), shown)
        if rendered is None:
            response = web.Response(status=kind.status)
        else:
            response = struct_response(request, rendered, kind.status if codec.begun is None else 202)
        add_headers(response, answer)
        return response

    return handle


def parse_body(
    call: ServerCall, body: Any, codec: Codec[Any, Q, Any], service: ServiceProtocol, course: Course
) -> tuple[Q, Shown]:
    """Make a request of a decoded body or of a URL, and say what its answer will say of its items.

    Args:
        call: has the key, which decides whose data it is about; it notes the user before anything else is refused.
        body: of the codec, or `UrlParts`.
        codec: of the kind.
        service: knows the names.
        course: of the call; its configuration bounds the columns.

    Raises:
        Forbidden: it names another tenant than the key's. What `Codec.parse` raises.
    """
    shown = Shown(service.names, tuple(getattr(body, "fields", ())))
    body = of_tenant(body, course.keys.tenant_of(call.key, body.user.tenant))
    call.user = body.user
    return codec.parse(body, course.config, shown.names), shown


async def ask(call: ServerCall, kind: Kind[Q, A], parsed: Q, shown: Shown, service: ServiceProtocol) -> A:
    """Ask the service, and note its answer. Raises as `ServerCall.left_s` and `ServiceProtocol.serve` do."""
    answer = await service.serve(kind, parsed, call.left_s(), call.permit, shown)
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
