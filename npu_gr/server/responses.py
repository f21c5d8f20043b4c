"""What the handlers of all routes share: the media type, the answer, the refusal while the instance is not ready."""

from __future__ import annotations

import msgspec
from aiohttp import web

from npu_gr.core.errors import NotTaken
from npu_gr.server.codec.media import JSON, MSGPACK, encode
from npu_gr.server.service_protocol import ServiceProtocol


def accepted_media(request: web.Request) -> str:
    """Choose msgpack where the caller's `Accept` begins with it, JSON everywhere else."""
    return MSGPACK if request.headers.get("Accept", "").startswith(MSGPACK) else JSON


def struct_response(request: web.Request, body: msgspec.Struct, status: int = 200) -> web.Response:
    """Answer a Struct in the media type that the caller accepts."""
    media = accepted_media(request)
    return web.Response(body=encode(body, media), status=status, content_type=media)


def json_response(body: object) -> web.Response:
    """Answer plain values as JSON, whatever the caller accepts."""
    return web.Response(body=msgspec.json.encode(body), content_type=JSON)


def require_ready(service: ServiceProtocol) -> None:
    """Raise NotTaken, with the reason, while the instance starts, drains or has failed."""
    ready, why_not = service.is_ready()
    if not ready:
        raise NotTaken(why_not)
