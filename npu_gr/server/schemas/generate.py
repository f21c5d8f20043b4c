"""The codec of generative retrieval: POST /v1/generate."""

from __future__ import annotations

from typing import Annotated

import msgspec

from npu_gr.core.names import Names
from npu_gr.core.request import GenerateAnswer, GenerateRequest, Normalise
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.fields import (
    Attributes,
    Candidates,
    Codec,
    Format,
    HistoryBody,
    HistoryOut,
    ItemFields,
    Name,
    ResponseFields,
    Titles,
    check_item_fields,
    optional_items,
    parse_history,
    render_column,
    render_history,
    render_items,
)
from npu_gr.server.schemas.media import MSGPACK


class GenerateBody(HistoryBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Generate the best next items for a user by semantic-ID beam search."""

    num_items: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 50
    # at most `generate.max_beams`; absent: as configured
    beam_width: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    normalise: Normalise | None = None  # absent: as configured
    temperature: Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)] = 1.0
    exclude_seen: bool | None = None  # leave out the items of the history; absent: as configured
    allow_items: Candidates | None = None  # absent: all
    deny_items: Candidates | None = None
    # attribute of the catalogue -> accepted values; an item must have one of them
    attributes: Attributes = msgspec.field(default_factory=dict)
    catalogue_version: Name | None = None
    fields: ItemFields = msgspec.field(default_factory=list)  # title: adds `titles`
    format: Format = "columns"  # objects: a list of {item, title, score}
    explain: bool = False  # adds the answer in columns to the objects


class GenerateOut(msgspec.Struct, frozen=True, kw_only=True):
    """Items, best first, as flat columns; `sids` has `num_levels` codes per item."""

    request_id: str
    model_version: str
    catalogue_version: str
    outcome: str
    reason: str
    status: str  # complete | exhausted: fewer items than requested
    limited_by: str = ""  # catalogue | filter | beam: what ended an exhausted list
    items: list[str | int] | bytes
    titles: Titles = msgspec.UNSET
    sids: list[int] | bytes
    num_levels: int
    scores: list[float] | bytes
    prefix_tokens: int
    history: HistoryOut
    stages_s: dict[str, float]


def parse(body: GenerateBody, config: ServerConfig, names: Names) -> GenerateRequest:
    """Make a request from a body. Raises TooLarge or Unprocessable, as `parse_events` does."""
    check_item_fields(body.fields)
    return GenerateRequest(
        user=body.user,
        history=parse_history(body, config, names),
        num_items=body.num_items,
        beam_width=body.beam_width,
        normalise=body.normalise,
        temperature=body.temperature,
        exclude_seen=body.exclude_seen,
        allow_items=optional_items(body.allow_items, "allow_items", config.max_candidates, names),
        deny_items=optional_items(body.deny_items, "deny_items", config.max_candidates, names),
        attributes={name: tuple(values) for name, values in body.attributes.items()},
        catalogue_version=body.catalogue_version,
        model_version=body.model_version,
    )


def render(
    answer: GenerateAnswer, request_id: str, media: str, response_fields: ResponseFields
) -> GenerateOut:
    """Convert the answer for the wire.

    In msgpack items are raw int64, sids int32, scores float32, little-endian.
    """
    is_raw = media == MSGPACK
    return GenerateOut(
        request_id=request_id,
        model_version=answer.model_version,
        catalogue_version=answer.catalogue_version,
        outcome=answer.outcome.value,
        reason=answer.reason.value,
        status=answer.limited_by.status,
        limited_by=answer.limited_by.value,
        items=render_items(answer.item_ids, response_fields.names, is_raw),
        titles=response_fields.titles(answer.item_ids),
        sids=render_column(answer.sids, "<i4", is_raw),
        num_levels=answer.sids.shape[1],
        scores=render_column(answer.scores, "<f4", is_raw),
        prefix_tokens=answer.prefix_tokens,
        history=render_history(answer.history),
        stages_s=answer.stages_s,
    )


CODEC = Codec(body=GenerateBody, answer=GenerateOut, parse=parse, render=render)
