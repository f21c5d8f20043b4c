"""The codec of recommendations: POST /v1/recommend."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from npu_gr.core.item_rules import OrderRules
from npu_gr.core.names import Names
from npu_gr.core.renamed import current
from npu_gr.core.request import AnyOrderName, AnySourceName, RecommendAnswer, RecommendRequest
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.fields import (
    MOST_NAMES,
    Attributes,
    Candidates,
    Codec,
    Format,
    HistoryBody,
    HistoryOut,
    Int,
    ItemFields,
    Name,
    RequestFeatures,
    ResponseFields,
    Titles,
    Value,
    check_item_fields,
    optional_items,
    parse_history,
    parse_row,
    render_column,
    render_history,
    render_items,
    render_scores,
    shown_at,
)
from npu_gr.server.schemas.media import MSGPACK


class RecommendBody(HistoryBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recommend items: signal, retrieval, pre-processing and rank in one request."""

    num_items: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10
    # most candidates to rank, up to the configured number
    num_candidates: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    exclude_seen: bool | None = None  # leave out the items of the history; absent: as configured
    # items that the ranker does not know: "last" = after all others, without a score; "drop" = left
    # out; absent: as configured
    unknown_items: Literal["last", "drop"] | None = None
    allow_items: Candidates | None = None  # absent: all
    deny_items: Candidates | None = None
    # as in generate: attribute of the catalogue -> accepted values
    attributes: Attributes = msgspec.field(default_factory=dict)
    # items shown lately, each as often as it was shown, for the rule `cap`
    shown_items: Candidates | None = None
    rules: OrderRules | None = None  # in addition to those of `recommend.rules`
    timestamp: Int | None = None  # unix seconds at which the items are shown; absent = now
    fields: ItemFields = msgspec.field(default_factory=list)  # title: adds `titles`
    # objects: a list of {item, title, score}; absent: objects in JSON, columns in msgpack
    format: Format | None = None
    explain: bool = False  # adds the answer in columns to the objects
    # passed to the service's hook
    context: Annotated[dict[Name, Value], msgspec.Meta(max_length=MOST_NAMES)] = msgspec.field(
        default_factory=dict
    )
    features: RequestFeatures | msgspec.UnsetType = msgspec.UNSET
    # subset of the configured sources; absent: all
    sources: (
        Annotated[list[AnySourceName], msgspec.Meta(max_length=len(get_args(AnySourceName)))] | None
    ) = None
    order: AnyOrderName | None = None  # retrieval = without ranking; absent: as configured


class StageOut(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the cascade."""

    stage: str
    result: str  # how it ended
    began_s: float  # seconds after the cascade began
    took_s: float
    num_items: int


class RecommendOut(msgspec.Struct, frozen=True, kw_only=True):
    """Items, best first, as flat columns. Scores are the ranker's; null = not ranked."""

    request_id: str
    model_version: str
    verdict: str | None  # null: no signal, because the shared encoder loaded the prefix itself
    # outcome of the prefix cache; null: nothing was ranked, items are in the order of retrieval
    outcome: str | None
    reason: str
    order: str  # order of the items: blended, rank, fused or retrieval
    status: str = "complete"  # or exhausted: fewer items than requested
    limited_by: str = ""  # limit | filter | sources: what ended an exhausted list
    items: list[str | int] | bytes
    titles: Titles = msgspec.UNSET
    scores: list[float | None] | bytes
    origins: list[str]  # the source of each item; hook, hook_after or pin if one of these added it
    # probability of each item at its place, given those before; absent: nothing was drawn
    propensities: list[float] | bytes | msgspec.UnsetType = msgspec.UNSET
    num_candidates: int  # ranked candidates
    num_unknown: int  # retrieved items that the ranker does not know: placed last, or dropped
    degraded: list[str]  # stages that failed or were skipped
    stages: list[StageOut]
    prefix_tokens: int
    missing_features: list[str] = []  # ranker features absent from the request, as "group.name"
    history: HistoryOut
    stages_s: dict[str, float]


def parse(body: RecommendBody, config: ServerConfig, names: Names) -> RecommendRequest:
    """Make a request from a body.

    Raises TooLarge, Unprocessable or NotFound, as `parse_events` does.
    """
    check_item_fields(body.fields)
    given = body.features or RequestFeatures()
    known = names.features(body.model_version)
    most = config.max_candidates
    return RecommendRequest(
        user=body.user,
        history=parse_history(body, config, names, body.model_version, given.user),
        num_items=body.num_items,
        num_candidates=body.num_candidates,
        exclude_seen=body.exclude_seen,
        unknown_items=body.unknown_items,
        allow_items=optional_items(body.allow_items, "allow_items", most, names),
        deny_items=optional_items(body.deny_items, "deny_items", most, names),
        attributes={name: tuple(values) for name, values in body.attributes.items()},
        shown_items=optional_items(body.shown_items, "shown_items", most, names),
        rules=body.rules,
        timestamp=shown_at(body.timestamp),
        context=body.context,
        request_features=parse_row(given.request, known.request.features, "features.request"),
        sources=None if body.sources is None else tuple(current(body.sources)),
        order=body.order and current(body.order),
        model_version=body.model_version,
    )


def render(
    answer: RecommendAnswer, request_id: str, media: str, response_fields: ResponseFields
) -> RecommendOut:
    """Convert the answer for the wire.

    In msgpack items are raw int64 and scores float32 (NaN = not ranked).
    """
    is_raw = media == MSGPACK
    return RecommendOut(
        request_id=request_id,
        model_version=answer.model_version,
        verdict=answer.verdict.value if answer.verdict else None,
        outcome=answer.outcome.value if answer.outcome else None,
        reason=answer.reason.value,
        order=answer.order,
        status=answer.limited_by.status,
        limited_by=answer.limited_by.value,
        items=render_items(answer.item_ids, response_fields.names, is_raw),
        titles=response_fields.titles(answer.item_ids),
        scores=render_scores(answer.scores, is_raw),
        origins=list(answer.origins),
        propensities=msgspec.UNSET
        if answer.propensities is None
        else render_column(answer.propensities, "<f4", is_raw),
        num_candidates=answer.num_candidates,
        num_unknown=answer.num_unknown,
        degraded=list(answer.degraded),
        stages=[
            StageOut(
                stage=report.stage,
                result=report.result,
                began_s=report.began_s,
                took_s=report.took_s,
                num_items=report.num_items,
            )
            for report in answer.stages
        ],
        prefix_tokens=answer.prefix_tokens,
        missing_features=list(answer.missing_features),
        history=render_history(answer.history),
        stages_s=answer.stages_s,
    )


CODEC = Codec(body=RecommendBody, answer=RecommendOut, parse=parse, render=render)
