"""The codec of erasures: DELETE /v1/users/{user_id}, without a body.

204: no data of the user is left. 202: the answer names the stores that still hold data.
"""

from __future__ import annotations

import msgspec

from npu_gr.core.errors import Unprocessable
from npu_gr.core.names import Names
from npu_gr.core.request import RECORDINGS, STORE, VECTORS, EraseAnswer, EraseRequest
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.fields import MAX_NAME, Codec, ResponseFields, UrlParts


def parse(parts: UrlParts, _config: ServerConfig, _names: Names) -> EraseRequest:
    """Make a request from the URL. Raises Unprocessable where a name is too long."""
    tenant, user = parts.user
    for name, text in (("user_id", user), ("tenant", tenant)):
        if len(text) > MAX_NAME:
            raise Unprocessable(f"{name}: {len(text)} characters, the limit is {MAX_NAME}")
    return EraseRequest(user=parts.user)


class EraseBody(msgspec.Struct, frozen=True, kw_only=True):
    """An erasure that is not complete: `pending` names the places that still hold data.

    The history store and the caches no longer find the user.
    """

    request_id: str
    # store, recordings: the instance is still removing the bytes; vectors: until they are rebuilt
    pending: list[str]
    where: dict[str, str] = {}  # place -> what is left, until when, and where that can be seen


_SECONDS = "npu_gr_erasure_pending_seconds of GET /metrics is 0 then"
_WHERE = {
    STORE: f"bytes in the history store's file, until no other process reads it; {_SECONDS}",
    RECORDINGS: "bytes in recordings, until npu-gr record --purge FOLDER or some hours; "
    f"{_SECONDS}",
    VECTORS: "the vector of match, until vectors that were trained without the user are loaded "
    "(POST /v1/match/reload); GET of this path says in_vectors, and is 404 then",
}


def render(
    answer: EraseAnswer, request_id: str, _media: str, _response_fields: ResponseFields
) -> EraseBody | None:
    """Return None, for 204 without content, where no data is left."""
    if not answer.pending:
        return None
    where = {place: _WHERE[place] for place in answer.pending}
    return EraseBody(request_id=request_id, pending=list(answer.pending), where=where)


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
    done="Erased; no data of the user is left.",
)
