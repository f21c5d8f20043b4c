"""Bodies -> requests, answers -> bodies: what `wire.py` has parsed, checked against the limits and made arrays of."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from npu_gr.core.errors import TooLarge, Unprocessable
from npu_gr.core.request import (
    F32,
    CatalogueChange,
    CatalogueInfo,
    Events,
    GenerateAnswer,
    GenerateRequest,
    HistoryRef,
    HistoryReport,
    MatchAnswer,
    MatchRequest,
    NewItem,
    RankAnswer,
    RankRequest,
    RecommendAnswer,
    RecommendRequest,
    SignalAnswer,
    SignalRequest,
    VectorsInfo,
)
from npu_gr.server.config import ServerConfig
from npu_gr.server.wire import (
    MSGPACK,
    CatalogueItemsBody,
    CatalogueOut,
    GenerateBody,
    GenerateOut,
    History,
    HistoryOut,
    MatchBody,
    MatchOut,
    RankBody,
    RankOut,
    RecommendBody,
    RecommendOut,
    SignalBody,
    SignalOut,
    StageOut,
    VectorsOut,
    _WithHistory,
)


def column(values: list[int] | bytes, field: str, dtype: str, limit: int) -> npt.NDArray[Any]:
    """A list or raw bytes as an array of at most `limit` elements, none negative."""
    dt = np.dtype(dtype)
    if isinstance(values, bytes):
        if len(values) % dt.itemsize:
            raise Unprocessable(f"{field}: {len(values)} bytes are not whole little-endian {dt.name} values")
        count = len(values) // dt.itemsize
    else:
        count = len(values)
    if count > limit:
        raise TooLarge(f"{field}: {count} entries, the limit is {limit}")
    if not isinstance(values, bytes):
        return np.array(values, dt)
    array = np.frombuffer(values, dt)
    if count and int(array.min()) < 0:
        raise Unprocessable(f"{field}: {int(array.min())} at index {int(array.argmin())} is negative")
    return array


def events(history: History, field: str, limit: int) -> Events:
    """The nouns of a history."""
    items = column(history.items, f"{field}.items", "<i8", limit)
    actions = column(history.actions, f"{field}.actions", "<i2", limit)
    timestamps = column(history.timestamps, f"{field}.timestamps", "<i8", limit)
    if not len(items) == len(actions) == len(timestamps):
        raise Unprocessable(
            f"{field}: items, actions and timestamps have {len(items)}, {len(actions)} and {len(timestamps)} entries"
        )
    return Events(items, actions, timestamps)


def _history(body: _WithHistory, config: ServerConfig) -> HistoryRef:
    if body.history is None:
        return HistoryRef(base=body.base)
    return HistoryRef(events=events(body.history, "history", config.max_history_events), base=body.base)


def signal_request(body: SignalBody, config: ServerConfig) -> SignalRequest:
    """The noun of a signal."""
    return SignalRequest(
        user=body.user,
        history=_history(body, config),
        num_candidates=body.num_candidates,
        model_version=body.model_version,
    )


def rank_request(body: RankBody, config: ServerConfig) -> RankRequest:
    """The noun of a rank."""
    candidates = column(body.candidates, "candidates", "<i8", config.max_candidates)
    if not len(candidates):
        raise Unprocessable("candidates: needs at least one")
    return RankRequest(
        user=body.user,
        candidates=candidates,
        history=_history(body, config),
        timestamp=body.timestamp,
        top_k=body.top_k,
        model_version=body.model_version,
    )


def generate_request(body: GenerateBody, config: ServerConfig) -> GenerateRequest:
    """The noun of a generate."""

    def ids(values: list[int] | bytes | None, field: str) -> npt.NDArray[Any] | None:
        return None if values is None else column(values, field, "<i8", config.max_candidates)

    return GenerateRequest(
        user=body.user,
        history=_history(body, config),
        num_items=body.num_items,
        beam_width=body.beam_width,
        normalise=body.normalise,
        temperature=body.temperature,
        allow_items=ids(body.allow_items, "allow_items"),
        deny_items=ids(body.deny_items, "deny_items"),
        attributes={name: tuple(values) for name, values in body.attributes.items()},
        catalogue_version=body.catalogue_version,
        model_version=body.model_version,
    )


def recommend_request(body: RecommendBody, config: ServerConfig) -> RecommendRequest:
    """The noun of a recommend."""
    denied = None if body.deny_items is None else column(body.deny_items, "deny_items", "<i8", config.max_candidates)
    return RecommendRequest(
        user=body.user,
        history=_history(body, config),
        num_items=body.num_items,
        num_candidates=body.num_candidates,
        exclude_seen=body.exclude_seen,
        deny_items=denied,
        timestamp=body.timestamp,
        context=body.context,
        model_version=body.model_version,
    )


def catalogue_change(body: CatalogueItemsBody, config: ServerConfig) -> CatalogueChange:
    """The change of a catalogue.

    Raises:
        TooLarge, Unprocessable: names the field and the limit.
    """

    def ids(values: list[int] | bytes | None, field: str) -> npt.NDArray[Any] | None:
        return None if values is None else column(values, field, "<i8", config.max_history_events)

    return CatalogueChange(
        add=tuple(
            NewItem(item_id=new.item_id, sid=tuple(new.sid), order=new.order, attributes=new.attributes)
            for new in body.add
        ),
        withdraw=ids(body.withdraw, "withdraw"),
        restore=ids(body.restore, "restore"),
    )


def match_request(body: MatchBody, config: ServerConfig) -> MatchRequest:
    """The noun of a match."""

    def ids(values: list[int] | bytes | None, field: str) -> npt.NDArray[Any] | None:
        return None if values is None else column(values, field, "<i8", config.max_candidates)

    history = None if body.history is None else events(body.history, "history", config.max_history_events)
    return MatchRequest(
        user=body.user,
        history=HistoryRef(events=history),
        num_items=body.num_items,
        exclude_seen=body.exclude_seen,
        allow_items=ids(body.allow_items, "allow_items"),
        deny_items=ids(body.deny_items, "deny_items"),
        vectors_version=body.vectors_version,
    )


# ---- nouns -> answers


def _history_out(report: HistoryReport) -> HistoryOut:
    return HistoryOut(
        fingerprint=report.fingerprint,
        num_tokens=report.num_tokens,
        cut_tokens=report.cut_tokens,
        unknown_items=report.unknown_items,
    )


def signal_out(answer: SignalAnswer, request_id: str) -> SignalOut:
    """The answer of a signal."""
    return SignalOut(
        request_id=request_id,
        model_version=answer.model_version,
        verdict=answer.verdict.value,
        resident_for_s=answer.resident_for_s,
        history=_history_out(answer.history),
        generate_verdict=None if answer.generate_verdict is None else answer.generate_verdict.value,
    )


def rank_out(answer: RankAnswer, request_id: str, media: str) -> RankOut:
    """The answer of a rank; in msgpack the scores are raw little-endian float32, NaN where unknown."""
    return RankOut(
        request_id=request_id,
        model_version=answer.model_version,
        outcome=answer.outcome.value,
        reason=answer.reason.value,
        scores={task: _scores(values, media) for task, values in answer.scores.items()},
        top=None if answer.top is None else answer.top.tolist(),
        prefix_tokens=answer.prefix_tokens,
        unknown_candidates=answer.unknown_candidates,
        history=_history_out(answer.history),
        stages_s=answer.stages_s,
    )


def generate_out(answer: GenerateAnswer, request_id: str, media: str) -> GenerateOut:
    """The answer of a generate; in msgpack items are raw int64, sids int32, scores float32, little-endian."""

    def flat(values: npt.NDArray[Any], dtype: str) -> Any:
        return values.astype(dtype, copy=False).tobytes() if media == MSGPACK else values.ravel().tolist()

    return GenerateOut(
        request_id=request_id,
        model_version=answer.model_version,
        catalogue_version=answer.catalogue_version,
        outcome=answer.outcome.value,
        reason=answer.reason.value,
        status=answer.status,
        items=flat(answer.item_ids, "<i8"),
        sids=flat(answer.sids, "<i4"),
        num_levels=answer.sids.shape[1],
        scores=flat(answer.scores, "<f4"),
        prefix_tokens=answer.prefix_tokens,
        history=_history_out(answer.history),
        stages_s=answer.stages_s,
    )


def recommend_out(answer: RecommendAnswer, request_id: str, media: str) -> RecommendOut:
    """The answer of a recommend; in msgpack items are raw int64 and scores float32 (NaN = not ranked)."""
    return RecommendOut(
        request_id=request_id,
        model_version=answer.model_version,
        verdict=answer.verdict.value,
        outcome=answer.outcome.value if answer.outcome else None,
        reason=answer.reason.value,
        items=answer.item_ids.astype("<i8", copy=False).tobytes() if media == MSGPACK else answer.item_ids.tolist(),
        scores=_scores(answer.scores, media),
        origins=list(answer.origins),
        num_candidates=answer.num_candidates,
        degraded=list(answer.degraded),
        stages=[StageOut(**asdict(report)) for report in answer.stages],
        prefix_tokens=answer.prefix_tokens,
        history=_history_out(answer.history),
        stages_s=answer.stages_s,
    )


def match_out(answer: MatchAnswer, request_id: str, media: str) -> MatchOut:
    """The answer of a match; in msgpack items are raw int64, scores float32, little-endian."""
    is_raw = media == MSGPACK
    return MatchOut(
        request_id=request_id,
        vectors_version=answer.vectors_version,
        basis=answer.basis.value,
        status=answer.status,
        items=answer.item_ids.astype("<i8").tobytes() if is_raw else answer.item_ids.tolist(),
        scores=answer.scores.astype("<f4").tobytes() if is_raw else answer.scores.tolist(),
        stages_s=answer.stages_s,
    )


def vectors_out(info: VectorsInfo) -> VectorsOut:
    """The state of the vectors."""
    return VectorsOut(**asdict(info))


def catalogue_out(info: CatalogueInfo) -> CatalogueOut:
    """The state of the catalogue."""
    return CatalogueOut(**asdict(info))


def _scores(values: F32, media: str) -> list[float | None] | bytes:
    if media == MSGPACK:
        return values.astype("<f4", copy=False).tobytes()
    scores: list[float | None] = values.tolist()  # msgspec writes NaN as null
    return scores
