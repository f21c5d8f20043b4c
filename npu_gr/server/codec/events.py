"""POST /v1/events."""

from __future__ import annotations

import msgspec

from npu_gr.core.request import EventsAnswer, EventsRequest
from npu_gr.server.codec.base import Codec
from npu_gr.server.codec.fields import History, UserBody, parse_events
from npu_gr.server.config import ServerConfig


class EventsBody(UserBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New behaviours of a user."""

    events: History


class EventsOut(msgspec.Struct, frozen=True, kw_only=True):
    """How many events the store now keeps for the user."""

    request_id: str
    num_events: int


def parse(body: EventsBody, config: ServerConfig) -> EventsRequest:
    """Read behaviours to append."""
    return EventsRequest(user=body.user, events=parse_events(body.events, "events", config.max_history_events))


def render(answer: EventsAnswer, request_id: str, _media: str) -> EventsOut:
    """Write how many events the store keeps."""
    return EventsOut(request_id=request_id, num_events=answer.num_events)


CODEC = Codec(body=EventsBody, answer=EventsOut, parse=parse, render=render)
