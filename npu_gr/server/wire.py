"""Bodies and answers. One Struct reads JSON and msgpack.

A column of integers may be a list, or raw little-endian bytes: base64 in JSON, `bin` in msgpack. Raw columns are
read without making a Python object an element. items, timestamps, candidates: int64; actions: int16.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from npu_gr.errors import BadRequest, TooLarge, Unprocessable, UnsupportedMedia
from npu_gr.request import (
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
    UserKey,
    VectorsInfo,
)
from npu_gr.server.config import ServerConfig

Int = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Column = Annotated[
    list[Int] | bytes, msgspec.Meta(description="Integers, or raw little-endian int64 (base64 in JSON).")
]
Actions = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**15 - 1)]] | bytes,
    msgspec.Meta(description="Action ids, or raw little-endian int16 (base64 in JSON)."),
]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Tenant = Annotated[str, msgspec.Meta(max_length=128)]


class History(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Behaviours, oldest first, as columns of the same length."""

    items: Column
    actions: Actions
    timestamps: Column  # unix seconds


class _User(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    user_id: Name
    tenant: Tenant = ""

    @property
    def user(self) -> UserKey:
        return UserKey(self.tenant, self.user_id)


class _WithHistory(_User, frozen=True, kw_only=True, forbid_unknown_fields=True):
    history: History | None = None  # absent: from the history store
    base: Name | None = None  # fingerprint of a known prefix that `history` continues
    model_version: Name | None = None


class SignalBody(_WithHistory, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pre-infer a user's prefix while retrieval still runs."""

    num_candidates: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None


class RankBody(_WithHistory, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score candidates for a user."""

    candidates: Column
    timestamp: Int | None = None  # unix seconds the candidates are shown at; absent = now
    top_k: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None


Value = bool | int | float | str
Values = Annotated[list[Value], msgspec.Meta(min_length=1, max_length=1000)]


class GenerateBody(_WithHistory, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best items after a user's history, by semantic-ID beam search."""

    num_items: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 50
    beam_width: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None  # absent: the service's
    normalise: Literal["vocabulary", "codebook", "valid"] = "vocabulary"
    temperature: Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)] = 1.0
    allow_items: Column | None = None  # absent: all
    deny_items: Column | None = None
    attributes: dict[Name, Values] = {}  # attribute of the catalogue -> values, of which an item has one
    catalogue_version: Name | None = None


class RecommendBody(_WithHistory, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to show a user: signal, retrieval, pre-processing and rank in one."""

    num_items: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10
    num_candidates: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None  # ranked at most, up to the config's
    exclude_seen: bool | None = None  # leave out the items of the history; absent: as configured
    deny_items: Column | None = None
    timestamp: Int | None = None  # unix seconds the items are shown at; absent = now
    context: Annotated[dict[Name, Value], msgspec.Meta(max_length=100)] = {}  # for the service's hook


class NewItemBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """An item for the catalogue, as in its file: order score and attributes if the others have them."""

    item_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    sid: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(min_length=1, max_length=16)]
    order: float | None = None
    attributes: dict[Name, Value] = {}


class CatalogueItemsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Items to add, to withdraw and to restore, in this order; all of it or nothing."""

    add: Annotated[list[NewItemBody], msgspec.Meta(max_length=100_000)] = []
    withdraw: Column | None = None
    restore: Column | None = None


class MatchBody(_User, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best items for a user by vectors trained across domains."""

    history: History | None = None  # in the target domain; absent: from the history store, if there is one
    num_items: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 50
    exclude_seen: bool = True  # without the history, and what the user had when the vectors were trained
    allow_items: Column | None = None  # absent: all
    deny_items: Column | None = None
    vectors_version: Name | None = None


class EventsBody(_User, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New behaviours of a user."""

    events: History


class HistoryOut(msgspec.Struct, frozen=True, kw_only=True):
    """What was made of the behaviours."""

    fingerprint: str
    num_tokens: int
    cut_tokens: int
    unknown_items: int


class SignalOut(msgspec.Struct, frozen=True, kw_only=True):
    """The trigger's verdict."""

    request_id: str
    model_version: str
    verdict: str
    resident_for_s: float
    history: HistoryOut
    generate_verdict: str | None


class RankOut(msgspec.Struct, frozen=True, kw_only=True):
    """Logits per task in candidate order (null: the catalogue lacks the item), and how they came to be."""

    request_id: str
    model_version: str
    outcome: str
    reason: str
    scores: dict[str, list[float | None] | bytes]
    top: list[int] | None
    prefix_tokens: int
    unknown_candidates: int
    history: HistoryOut
    stages_s: dict[str, float]


class GenerateOut(msgspec.Struct, frozen=True, kw_only=True):
    """Items, best first, as flat columns: `sids` holds num_levels codes an item."""

    request_id: str
    model_version: str
    catalogue_version: str
    outcome: str
    reason: str
    status: str
    items: list[int] | bytes
    sids: list[int] | bytes
    num_levels: int
    scores: list[float] | bytes
    prefix_tokens: int
    history: HistoryOut
    stages_s: dict[str, float]


class StageOut(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: how it ended, from when on (after the cascade began), for how long, and how many items it had."""

    stage: str
    result: str
    began_s: float
    took_s: float
    num_items: int


class RecommendOut(msgspec.Struct, frozen=True, kw_only=True):
    """Items, best first, as flat columns, and how they came to be. Scores: the ranker's; null = not ranked."""

    request_id: str
    model_version: str
    verdict: str
    outcome: str | None  # of the rank; null: it failed, the items are in the order of the retrieval
    reason: str
    items: list[int] | bytes
    scores: list[float | None] | bytes
    origins: list[str]  # the source of each item
    num_candidates: int
    degraded: list[str]  # stages that did not do their part
    stages: list[StageOut]
    prefix_tokens: int
    history: HistoryOut
    stages_s: dict[str, float]


class CatalogueOut(msgspec.Struct, frozen=True, kw_only=True):
    """The version of the catalogue that is served, and the one that a rollback would serve."""

    version: str
    num_items: int
    num_bytes: int
    age_s: float
    previous: str | None


class MatchOut(msgspec.Struct, frozen=True, kw_only=True):
    """Items, best first. In msgpack `items` and `scores` are raw little-endian."""

    request_id: str
    vectors_version: str
    basis: str  # target | folded | source | popularity; scores are comparable within one
    status: str  # complete | exhausted: fewer than asked
    items: list[int] | bytes
    scores: list[float] | bytes
    stages_s: dict[str, float]


class VectorsOut(msgspec.Struct, frozen=True, kw_only=True):
    """The version of the vectors that is served, and the one that a rollback would serve."""

    version: str
    num_users: int
    num_items: int
    num_bytes: int
    age_s: float
    previous: str | None


class EventsOut(msgspec.Struct, frozen=True, kw_only=True):
    """How many events the store now keeps for the user."""

    request_id: str
    num_events: int


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str


B = TypeVar("B", SignalBody, RankBody, GenerateBody, MatchBody, RecommendBody, CatalogueItemsBody, EventsBody)

JSON, MSGPACK = "application/json", "application/msgpack"
_DECODERS: dict[tuple[type[Any], str], Any] = {
    (cls, media): codec.Decoder(cls)
    for cls in (SignalBody, RankBody, GenerateBody, MatchBody, RecommendBody, CatalogueItemsBody, EventsBody)
    for media, codec in ((JSON, msgspec.json), (MSGPACK, msgspec.msgpack))
}
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    JSON: msgspec.json.Encoder().encode,
    MSGPACK: msgspec.msgpack.Encoder().encode,
}


def decode(body: bytes, content_type: str, cls: type[B]) -> B:
    """Parse and validate a body.

    Raises:
        UnsupportedMedia: neither JSON nor msgpack. BadRequest: it cannot be parsed. Unprocessable: a field is
            unknown, missing, of the wrong type or out of range; the message has its path.
    """
    decoder = _DECODERS.get((cls, content_type))
    if decoder is None:
        raise UnsupportedMedia(f"Content-Type: {content_type!r} is neither {JSON} nor {MSGPACK}")
    try:
        decoded: B = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise Unprocessable(_explain(str(error), cls)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body: {error}") from error
    return decoded


def encode(answer: msgspec.Struct, media: str) -> bytes:
    """As JSON or msgpack."""
    return _ENCODERS[media](answer)


def _explain(message: str, cls: type[msgspec.Struct]) -> str:
    text, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if unknown := re.match(r"Object contains unknown field `(.+)`", text):
        names = [f.encode_name for f in msgspec.structs.fields(History if path else cls)]
        near = difflib.get_close_matches(unknown[1], names, n=1)
        full = f"{path}.{unknown[1]}" if path else unknown[1]
        return f"unknown field {full}" + (f"; did you mean {near[0]}?" if near else "")
    return f"{path}: {text}" if path else text


# ---- bodies -> nouns


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
