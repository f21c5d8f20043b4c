"""The codec of erasures: DELETE /v1/users/{user_id}. The request is in the URL.

204 without content says that nothing of the user is left; 202 names the places that still hold
something of the user.
"""

from __future__ import annotations

import msgspec

from npu_gr.core.errors import Unprocessable
from npu_gr.core.names import Names
from npu_gr.core.request import EraseAnswer, EraseRequest
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.fields import MAX_NAME, Codec, ResponseFields, UrlParts


def parse(parts: UrlParts, _config: ServerConfig, _names: Names) -> EraseRequest:
    """Make a request of the URL. Raises Unprocessable where a name is too long."""
    tenant, user = parts.user
    for name, text in (("user_id", user), ("tenant", tenant)):
        if len(text) > MAX_NAME:
            raise Unprocessable(f"{name}: {len(text)} characters, the limit is {MAX_NAME}")
    return EraseRequest(user=parts.user)


class EraseBody(msgspec.Struct, frozen=True, kw_only=True):
    """An erasure that goes on: the store and the tiers have forgotten the user, and these places hold something yet."""

    request_id: str
    # store, recordings: the instance removes the bytes; vectors: made without the user next
    pending: list[str]


def render(
    answer: EraseAnswer, request_id: str, _media: str, _shown: ResponseFields
) -> EraseBody | None:
    """Answer without content where nothing is left: the status says it all."""
    return (
        EraseBody(request_id=request_id, pending=list(answer.pending)) if answer.pending else None
    )


CODEC = Codec(
    body=None,
    answer=None,
    begun=EraseBody,
    parse=parse,
    render=render,
    operation="eraseUser",
    parameters=(
        {
            "name": "tenant",
            "in": "query",
            "schema": {"type": "string", "maxLength": MAX_NAME},
            "required": False,
        },
    ),
    done="Forgotten, and no byte is left.",
)
