"""The codec of cross-domain vector retrieval: POST /v1/match."""

from __future__ import annotations

from typing import Annotated

import msgspec

from npu_gr.core.history import HistoryRef
from npu_gr.core.names import Names
from npu_gr.core.request import MatchAnswer, MatchRequest
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.fields import (
    Attributes,
    Candidates,
    Codec,
    Format,
    History,
    ItemFields,
    Name,
    ResponseFields,
    Titles,
    UserBody,
    check_item_fields,
    optional_items,
    parse_events,
    render_column,
    render_items,
)
from npu_gr.server.schemas.media import MSGPACK


class MatchBody(UserBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Retrieve the best items for a user by vectors trained across domains."""

    # in the target domain; absent: from the history store, if there is one
    history: History | None = None
    num_items: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 50
    # leave out the items of the history, and those that the user had in the training data; absent:
    # as configured
    exclude_seen: bool | None = None
    allow_items: Candidates | None = None  # absent: all
    deny_items: Candidates | None = None
    vectors_version: Name | None = None
    # as in generate: attribute of the catalogue -> accepted values
    attributes: Attributes = msgspec.field(default_factory=dict)
    fields: ItemFields = msgspec.field(default_factory=list)  # title: adds `titles`
    format: Format = "columns"  # objects: a list of {item, title, score}
    explain: bool = False  # adds the answer in columns to the objects


class MatchOut(msgspec.Struct, frozen=True, kw_only=True):
    """Items, best first. In msgpack `items` and `scores` are raw little-endian."""

    request_id: str
    vectors_version: str
    basis: str  # target | folded | source | popularity; scores are comparable within one
    status: str  # complete | exhausted: fewer items than requested
    limited_by: str = ""  # catalogue | filter | index: what ended an exhausted list
    items: list[str | int] | bytes
    titles: Titles = msgspec.UNSET
    scores: list[float] | bytes
    stages_s: dict[str, float]


def parse(body: MatchBody, config: ServerConfig, names: Names) -> MatchRequest:
    """Make a request from a body. Raises TooLarge or Unprocessable, as `parse_events` does."""
    check_item_fields(body.fields)
    history = (
        None
        if body.history is None
        else parse_events(body.history, "history", config.max_history_events, names)
    )
    return MatchRequest(
        user=body.user,
        history=HistoryRef(events=history),
        num_items=body.num_items,
        exclude_seen=body.exclude_seen,
        allow_items=optional_items(body.allow_items, "allow_items", config.max_candidates, names),
        deny_items=optional_items(body.deny_items, "deny_items", config.max_candidates, names),
        vectors_version=body.vectors_version,
        attributes={name: tuple(values) for name, values in body.attributes.items()},
    )


def render(
    answer: MatchAnswer, request_id: str, media: str, response_fields: ResponseFields
) -> MatchOut:
    """Convert the answer for the wire.

    In msgpack items are raw int64, scores float32, little-endian.
    """
    is_raw = media == MSGPACK
    return MatchOut(
        request_id=request_id,
        vectors_version=answer.vectors_version,
        basis=answer.basis.value,
        status=answer.limited_by.status,
        limited_by=answer.limited_by.value,
        items=render_items(answer.item_ids, response_fields.names, is_raw),
        titles=response_fields.titles(answer.item_ids),
        scores=render_column(answer.scores, "<f4", is_raw),
        stages_s=answer.stages_s,
    )


CODEC = Codec(body=MatchBody, answer=MatchOut, parse=parse, render=render)
