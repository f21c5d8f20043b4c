"""The codec of events: POST /v1/events."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec.structs import replace

from npu_gr.core.errors import BadRequest, Unprocessable
from npu_gr.core.names import Names
from npu_gr.core.request import EventsAnswer, EventsRequest
from npu_gr.core.text_format import full_match
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.fields import (
    Action,
    Codec,
    History,
    Int,
    Item,
    ResponseFields,
    UserBody,
    stored_events,
)

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY = 128  # characters
PRINTABLE = rf"[ -~]{{1,{MAX_KEY}}}"
Key = Annotated[str, msgspec.Meta(pattern=full_match(PRINTABLE), max_length=MAX_KEY)]
_KEY_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_KEY, "pattern": "^[ -~]+$"}
_PARAMETER = {
    "name": IDEMPOTENCY_KEY,
    "in": "header",
    "required": False,
    "description": "A repeated request of a user with the same key appends its events once.",
    "schema": _KEY_SCHEMA,
}


class EventsBody(UserBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New behaviours of a user: columns, or one event."""

    events: History | None = None
    item_id: Item | None = None  # of one event, with `event`
    event: Action | None = None  # its action
    timestamp: Int | None = None  # unix seconds; absent: now
    # instead of the header: a repeated request of a user with the same key appends once
    idempotency_key: Key | None = None


class EventsOut(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an append."""

    request_id: str
    num_events: int  # events that the store now has of the user
    # events that came after newer ones of the user, in this request or an earlier one, and were
    # sorted
    sorted_events: int


def parse(body: EventsBody, config: ServerConfig, names: Names) -> EventsRequest:
    """Make a request from a body. Raises TooLarge or Unprocessable, as `parse_events` does."""
    return EventsRequest(
        user=body.user,
        events=stored_events(_columns(body), config, names),
        idempotency_key=body.idempotency_key,
    )


def _columns(body: EventsBody) -> History:
    """Return the columns, also of one event."""
    one = (body.item_id, body.event, body.timestamp)
    if body.events is not None:
        if one != (None, None, None):
            raise Unprocessable("events: send either columns, or item_id, event and timestamp")
        return body.events
    if body.item_id is None or body.event is None:
        raise Unprocessable("events: missing; send columns, or item_id, event and timestamp")
    timestamp = int(time.time()) if body.timestamp is None else body.timestamp
    return History(items=[body.item_id], actions=[body.event], timestamps=[timestamp])


def read_headers(request: EventsRequest, headers: Mapping[str, str]) -> EventsRequest:
    """Add the key of the header.

    Raises BadRequest where the key is malformed, or the body has another one.
    """
    key = headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return request
    if not re.fullmatch(PRINTABLE, key):
        raise BadRequest(
            f"{IDEMPOTENCY_KEY}: {len(key)} characters; send 1 to {MAX_KEY} "
            "printable ASCII characters"
        )
    if request.idempotency_key not in (None, key):
        raise BadRequest(f"{IDEMPOTENCY_KEY}: differs from idempotency_key in the body")
    return replace(request, idempotency_key=key)


def render(
    answer: EventsAnswer, request_id: str, _media: str, _response_fields: ResponseFields
) -> EventsOut:
    """Convert the answer for the wire."""
    return EventsOut(
        request_id=request_id, num_events=answer.num_events, sorted_events=answer.sorted_events
    )


CODEC = Codec(
    body=EventsBody,
    answer=EventsOut,
    parse=parse,
    render=render,
    read_headers=read_headers,
    parameters=(_PARAMETER,),
)
