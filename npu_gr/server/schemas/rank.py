"""The codec of ranking: POST /v1/rank."""

from __future__ import annotations

from typing import Annotated

import msgspec

from npu_gr.core.errors import Unprocessable
from npu_gr.core.names import Names
from npu_gr.core.renamed import current
from npu_gr.core.request import AnyUnknownItems, RankAnswer, RankRequest
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.fields import (
    Candidates,
    Codec,
    HistoryBody,
    HistoryOut,
    Int,
    ItemFields,
    RankFeatures,
    ResponseFields,
    Titles,
    check_item_fields,
    parse_columns,
    parse_history,
    parse_items,
    parse_row,
    render_history,
    render_scores,
    shown_at,
)
from npu_gr.server.schemas.media import MSGPACK


class RankBody(HistoryBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score candidates for a user."""

    candidates: Candidates
    timestamp: Int | None = None  # unix seconds at which the candidates are shown; absent = now
    top_k: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    # ignore: score null for candidates that the catalogue lacks; reject: 422
    unknown_items: AnyUnknownItems | None = None
    features: RankFeatures | msgspec.UnsetType = msgspec.UNSET
    fields: ItemFields = msgspec.field(default_factory=list)  # title: adds `titles` of `top`


class RankOut(msgspec.Struct, frozen=True, kw_only=True):
    """Logits per task in the order of the candidates; null: the catalogue lacks the item."""

    request_id: str
    model_version: str
    outcome: str
    reason: str
    scores: dict[str, list[float | None] | bytes]
    top: list[str | int] | None
    titles: Titles = msgspec.UNSET
    prefix_tokens: int
    unknown_candidates: int
    missing_features: list[str] = []  # model features absent from the request, as "group.name"
    history: HistoryOut
    stages_s: dict[str, float]


def parse(body: RankBody, config: ServerConfig, names: Names) -> RankRequest:
    """Make a request from a body.

    Raises TooLarge, Unprocessable or NotFound, as `parse_events` does.
    """
    check_item_fields(body.fields)
    candidates = parse_items(body.candidates, "candidates", config.max_candidates, names)
    if not len(candidates):
        raise Unprocessable("candidates: is empty; send at least one item")
    known = names.features(body.model_version)
    given = body.features or RankFeatures()
    return RankRequest(
        user=body.user,
        candidates=candidates,
        history=parse_history(body, config, names, body.model_version, given.user),
        request_features=parse_row(given.request, known.request.features, "features.request"),
        cross_features=parse_columns(
            given.cross, known.cross.features, len(candidates), "features.cross"
        ),
        timestamp=shown_at(body.timestamp),
        top_k=body.top_k,
        unknown_items=body.unknown_items and current(body.unknown_items),
        model_version=body.model_version,
    )


def render(
    answer: RankAnswer, request_id: str, media: str, response_fields: ResponseFields
) -> RankOut:
    """Convert the answer for the wire.

    In msgpack the scores are raw little-endian float32, NaN where the catalogue lacks the item.
    """
    is_raw = media == MSGPACK
    return RankOut(
        request_id=request_id,
        model_version=answer.model_version,
        outcome=answer.outcome.value,
        reason=answer.reason.value,
        scores={task: render_scores(values, is_raw) for task, values in answer.scores.items()},
        top=_top(answer, response_fields.names, is_raw),
        titles=response_fields.titles(answer.top),
        prefix_tokens=answer.prefix_tokens,
        unknown_candidates=answer.unknown_candidates,
        missing_features=list(answer.missing_features),
        history=render_history(answer.history),
        stages_s=answer.stages_s,
    )


def _top(answer: RankAnswer, names: Names, is_raw: bool) -> list[str | int] | None:
    if answer.top is None:
        return None
    return answer.top.tolist() if is_raw else names.items(answer.top)


CODEC = Codec(body=RankBody, answer=RankOut, parse=parse, render=render)
