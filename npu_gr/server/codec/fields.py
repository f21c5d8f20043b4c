"""Bodies and answers. One Struct reads JSON and msgpack.

A column of integers may be a list, or raw little-endian bytes: base64 in JSON, `bin` in msgpack. Raw columns are
read without making a Python object an element. items, timestamps, candidates: int64; actions: int16.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from npu_gr.core.errors import BadRequest, Unprocessable, UnsupportedMedia
from npu_gr.core.request import UserKey

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
