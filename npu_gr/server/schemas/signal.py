"""The codec of signals: POST /v1/signal."""

from __future__ import annotations

from typing import Annotated

import msgspec

from npu_gr.core.names import Names
from npu_gr.core.request import SignalAnswer, SignalRequest
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.fields import (
    Codec,
    HistoryBody,
    HistoryOut,
    ResponseFields,
    SignalFeatures,
    parse_history,
    render_history,
)


class SignalBody(HistoryBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Announce a rank: the prefix of the user's history is computed while retrieval still runs."""

    num_candidates: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    features: SignalFeatures | msgspec.UnsetType = msgspec.UNSET


class SignalOut(msgspec.Struct, frozen=True, kw_only=True):
    """The trigger's verdict: whether the prefix is computed."""

    request_id: str
    model_version: str
    verdict: str
    resident_for_s: float
    history: HistoryOut
    generate_verdict: str | None


def parse(body: SignalBody, config: ServerConfig, names: Names) -> SignalRequest:
    """Make a request from a body.

    Raises TooLarge, Unprocessable or NotFound, as `parse_events` does.
    """
    given = body.features or SignalFeatures()
    return SignalRequest(
        user=body.user,
        history=parse_history(body, config, names, body.model_version, given.user),
        num_candidates=body.num_candidates,
        model_version=body.model_version,
    )


def render(
    answer: SignalAnswer, request_id: str, _media: str, _response_fields: ResponseFields
) -> SignalOut:
    """Convert the answer for the wire."""
    return SignalOut(
        request_id=request_id,
        model_version=answer.model_version,
        verdict=answer.verdict.value,
        resident_for_s=answer.resident_for_s,
        history=render_history(answer.history),
        generate_verdict=None if answer.generate_verdict is None else answer.generate_verdict.value,
    )


CODEC = Codec(body=SignalBody, answer=SignalOut, parse=parse, render=render)
