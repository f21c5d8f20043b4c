"""DELETE /v1/users/{user_id}: the request is in the URL, and the answer has no content."""

from __future__ import annotations

from npu_gr.core.errors import Unprocessable
from npu_gr.core.request import EraseAnswer, EraseRequest
from npu_gr.server.codec.base import Codec, UrlParts
from npu_gr.server.codec.fields import MAX_NAME
from npu_gr.server.config import ServerConfig


def parse(parts: UrlParts, _config: ServerConfig) -> EraseRequest:
    """Read whom to forget. Raises Unprocessable where a name is too long."""
    tenant, user = parts.user
    for name, text in (("user_id", user), ("tenant", tenant)):
        if len(text) > MAX_NAME:
            raise Unprocessable(f"{name}: {len(text)} characters, the limit is {MAX_NAME}")
    return EraseRequest(user=parts.user)


def render(_answer: EraseAnswer, _request_id: str, _media: str) -> None:
    """Write nothing: the status says it."""


CODEC = Codec(
    body=None,
    answer=None,
    parse=parse,
    render=render,
    operation="eraseUser",
    parameters=(
        {"name": "tenant", "in": "query", "schema": {"type": "string", "maxLength": MAX_NAME}, "required": False},
    ),
    done="Forgotten.",
)
