"""The records of query logs, format 1. `npu_gr/replay/files.py` reads and writes files of them.

A record has the arrival time of a request (`ts`), its user, `kind`, fields (named as in the HTTP
bodies) and deadline, and the answer. A column of integers is a list, or raw little-endian bytes in
base64 as in HTTP bodies: items, timestamps and candidates are int64, actions int16.

The kinds are those of `npu_gr/core/kinds.py` that are recorded. Fields that only one kind has are
in a Struct of `OPTIONS`, in the record's field of the kind's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.columns import NO_COLUMNS, Columns
from npu_gr.core.history import Events
from npu_gr.core.item_rules import OrderRules
from npu_gr.core.kinds import EVENTS, GENERATE, KINDS, MATCH, RANK, RECOMMEND, Kind, Scored
from npu_gr.core.request import AnyOrderName, AnySourceName, AnyUnknownItems, Normalise

RECORDED: dict[str, Kind[Any, Any]] = {
    name: kind for name, kind in KINDS.items() if kind.is_recorded
}
SCORED = tuple(name for name, kind in RECORDED.items() if kind.scored is not Scored.NOTHING)
MAX_MS = 3.6e6  # largest deadline or delay of a record: one hour

Column = list[int] | bytes
LoggedValue = bool | int | float | str | list[bool | int | float | str] | None
Label = Annotated[int, msgspec.Meta(ge=0, le=1)] | None


def column(values: Column, dtype: str = "<i8") -> Any:
    """Convert a column to an array of `dtype`."""
    return np.frombuffer(values, dtype) if isinstance(values, bytes) else np.array(values, dtype)


def count(values: Column, width_bytes: int = 8) -> int:
    """Return the number of entries of a column.

    Raises:
        ValueError: the length of the raw bytes is not a multiple of `width_bytes`.
    """
    if not isinstance(values, bytes):
        return len(values)
    if len(values) % width_bytes:
        raise ValueError(
            f"{len(values)} bytes are not a multiple of {width_bytes}, the size of an integer"
        )
    return len(values) // width_bytes


class LoggedColumns(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Features of events or candidates by name, raw as in HTTP bodies."""

    numbers: dict[str, bytes] = {}  # float32 per row, NaN = missing
    names: dict[str, bytes] = {}  # uint64 hashes, one per row and value of the feature

    def columns(self, num_rows: int) -> Columns:
        """Convert the features of n rows to arrays."""
        numbers = {name: np.frombuffer(raw, "<f4") for name, raw in self.numbers.items()}
        names = {
            name: np.frombuffer(raw, "<u8").reshape(num_rows, -1)
            for name, raw in self.names.items()
        }
        return Columns(numbers, names)

    @classmethod
    def of(cls, columns: Columns) -> LoggedColumns | None:
        """Make raw columns; None if there are no features."""
        if not columns:
            return None
        return cls(
            numbers={
                name: column.astype("<f4").tobytes() for name, column in columns.numbers.items()
            },
            names={name: column.astype("<u8").tobytes() for name, column in columns.names.items()},
        )

    def on_the_wire(self) -> dict[str, bytes]:
        """Return the features as in HTTP bodies."""
        return {**self.numbers, **self.names}


class LoggedFeatures(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Features of the user, the request and the candidates. Those of events are in the history."""

    user: dict[str, LoggedValue] | None = None
    request: dict[str, LoggedValue] = {}
    cross: LoggedColumns | None = None

    def on_the_wire(self) -> dict[str, Any]:
        """Return the features as in HTTP bodies."""
        parts = {
            "user": self.user,
            "request": self.request,
            "cross": self.cross and self.cross.on_the_wire(),
        }
        return {name: part for name, part in parts.items() if part}


class LoggedHistory(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Events as columns of equal length, oldest first."""

    items: Column
    actions: Column
    timestamps: Column  # unix seconds
    features: LoggedColumns | None = None

    def __post_init__(self) -> None:
        lengths = count(self.items), count(self.actions, 2), count(self.timestamps)
        if len(set(lengths)) > 1:
            raise ValueError(
                "items, actions and timestamps have {}, {} and {} entries".format(*lengths)
            )

    def __len__(self) -> int:
        return count(self.items)

    def events(self) -> Events:
        """Convert the events to arrays."""
        features = NO_COLUMNS if self.features is None else self.features.columns(len(self))
        return Events(
            column(self.items),
            column(self.actions, "<i2"),
            column(self.timestamps),
            features=features,
        )

    @classmethod
    def of(cls, events: Events) -> LoggedHistory:
        """Make raw columns of events."""
        return cls(
            items=events.items.astype("<i8").tobytes(),
            actions=events.actions.astype("<i2").tobytes(),
            timestamps=events.timestamps.astype("<i8").tobytes(),
            features=LoggedColumns.of(events.features),
        )


class LoggedGenerate(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Options of a generate. An absent field has the service's default."""

    num_items: int = 50
    beam_width: int | None = None
    normalise: Normalise | None = None
    temperature: float = 1.0
    exclude_seen: bool | None = None
    allow_items: Column | None = None
    deny_items: Column | None = None
    attributes: dict[str, list[bool | int | float | str]] = {}


class LoggedMatch(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Options of a match. An absent field has the service's default."""

    num_items: int = 50
    exclude_seen: bool | None = None
    allow_items: Column | None = None
    deny_items: Column | None = None
    attributes: dict[str, list[bool | int | float | str]] = {}


class LoggedRecommend(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Options of a recommend. An absent field has the service's default."""

    num_items: int = 10
    num_candidates: int | None = None
    exclude_seen: bool | None = None
    unknown_items: Literal["last", "drop"] | None = None
    deny_items: Column | None = None
    context: dict[str, bool | int | float | str] = {}
    sources: tuple[AnySourceName, ...] | None = None
    order: AnyOrderName | None = None
    allow_items: Column | None = None
    attributes: dict[str, list[bool | int | float | str]] = {}
    shown_items: Column | None = None
    rules: OrderRules | None = None


# Record fields that several kinds share. A kind has those that its request has and its options have
# not; `base` belongs to kinds whose history may be a delta.
SHARED = ("history", "base", "candidates", "num_candidates", "timestamp", "top_k", "events")
# Fields of requests that are not logged as options: the user and the features are logged in other
# fields, and a replayed append must have a new idempotency key.
NOT_LOGGED = ("user", "idempotency_key", "request_features", "cross_features")


def _derived_options(kind: Kind[Any, Any]) -> type[msgspec.Struct] | None:
    """Make the options Struct of a kind from its request; arrays become columns.

    None if the kind has no fields of its own.
    """
    hints = get_type_hints(kind.request)
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind.request):
        if field.name in (*NOT_LOGGED, *SHARED) or field.name.endswith("_version"):
            continue
        is_array = "ndarray" in str(hints[field.name])
        hint = Column if is_array else hints[field.name]
        if field.name == "unknown_items":
            hint = AnyUnknownItems | None  # logs of earlier versions have the old value
        if field.default is not msgspec.NODEFAULT:
            fields.append(
                (field.name, hint | None if field.default is None else hint, field.default)
            )
        elif field.default_factory is not msgspec.NODEFAULT:
            fields.append((field.name, hint, msgspec.field(default_factory=field.default_factory)))
        else:
            fields.append((field.name, hint))
    name = f"Logged{kind.title}"
    return (
        msgspec.defstruct(name, fields, frozen=True, kw_only=True, omit_defaults=True)
        if fields
        else None
    )


# Options by kind; the fields are named as in the request (`core/request.py`). Format 1 fixes the
# first three; those of other kinds are derived from their requests.
OPTIONS: dict[str, type[msgspec.Struct]] = {
    GENERATE.name: LoggedGenerate,
    MATCH.name: LoggedMatch,
    RECOMMEND.name: LoggedRecommend,
}
IN_FORMAT_1 = tuple(OPTIONS)
OPTIONS |= {
    name: derived
    for name, kind in RECORDED.items()
    if name not in OPTIONS and (derived := _derived_options(kind)) is not None
}


class LoggedAnswer(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The answer when the log was recorded."""

    status: int = 200
    latency_ms: float | None = None  # measured in the service
    outcome: str = ""  # the basis for a match
    model_version: str = ""  # version of the vectors for a match
    fingerprint: str = ""  # of the history; the base of a later delta
    digest: str = ""  # of the scores, or of items and scores; see `digest` below
    # task -> raw float32 per candidate, NaN = unknown item; empty if only the digest was logged
    scores: dict[str, bytes] = {}
    # of a recommend that explores: raw int64 ids, and raw float32 probabilities of each
    items: bytes = b""
    propensities: bytes = b""


class _Format1(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One logged request; a rank may have labels of its candidates."""

    ts: float  # arrival in seconds, unix time or relative
    kind: str  # a name in `RECORDED`
    user_id: str
    tenant: str = ""
    history: LoggedHistory | None = None  # absent if it is in the history store
    base: str | None = None  # fingerprint of the prefix that `history` continues
    candidates: Column = []
    num_candidates: int | None = None  # of a signal: candidates of its rank
    timestamp: int | None = None  # unix seconds when the candidates were shown
    top_k: int | None = None
    deadline_ms: float | None = None
    # of a rank: duration of retrieval and pre-processing; then `ts` is the arrival of the user
    delay_ms: float | None = None
    generate: LoggedGenerate | None = None
    match: LoggedMatch | None = None
    recommend: LoggedRecommend | None = None
    features: LoggedFeatures | None = None
    labels: dict[str, list[Label]] = {}  # task -> 0, 1 or null (unknown) per candidate
    events: LoggedHistory | None = None  # of kind "events"
    answer: LoggedAnswer | None = None

    def __post_init__(self) -> None:
        num = count(self.candidates)
        if self.ts != self.ts or abs(self.ts) == float("inf"):
            raise ValueError(f"ts: {self.ts} must be finite")
        if self.kind not in RECORDED:
            raise ValueError(f"kind: {self.kind!r} must be one of {', '.join(RECORDED)}")
        if self.kind == RANK.name and not num:
            raise ValueError("candidates: a rank needs at least one")
        if self.kind == EVENTS.name and self.events is None:
            raise ValueError("events: missing")
        for name in ("deadline_ms", "delay_ms"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < MAX_MS:
                raise ValueError(f"{name}: {value} must be at least 0 and under 3,600,000")
        for task, labels in self.labels.items():
            if len(labels) != num:
                raise ValueError(f"labels.{task}: {len(labels)} labels for {num} candidates")

    def candidate_ids(self) -> I64:
        """Return the external item ids: int64 [c]."""
        ids: I64 = column(self.candidates)
        return ids


if TYPE_CHECKING:
    QueryRecord = _Format1
else:  # with a field for the options of each kind that is newer than format 1
    QueryRecord = msgspec.defstruct(
        "QueryRecord",
        [
            (name, options | None, None)
            for name, options in OPTIONS.items()
            if name not in _Format1.__struct_fields__
        ],
        bases=(_Format1,),
        module=__name__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
        omit_defaults=True,
    )


# ---- the fields of each kind

# logged for a null outcome, that of a recommend whose rank failed
UNRANKED = "unranked"

_OUTCOME = "outcome"
_VERSION = "model_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFields:
    """Names of fields in a kind's answer, as in `npu_gr/core/request.py` and HTTP bodies."""

    outcome: str | None  # the field with the outcome, if there is one
    has_null_outcome: bool  # a null outcome is logged as `UNRANKED`
    version: str | None  # the field with the version of the model or vectors
    names: frozenset[str]  # all fields


def _request_fields(name: str, kind: Kind[Any, Any]) -> tuple[str, ...]:
    options = OPTIONS[name].__struct_fields__ if name in OPTIONS else ()
    own = set(kind.request.__struct_fields__) - set(options)
    if kind.takes_delta:
        own.add("base")
    return tuple(field for field in SHARED if field in own)


def _answer_fields(kind: Kind[Any, Any]) -> AnswerFields:
    hints = get_type_hints(kind.answer)
    names = kind.answer.__struct_fields__
    outcome = _OUTCOME if _OUTCOME in names else kind.label
    versions = [name for name in names if name.endswith("_version")]
    return AnswerFields(
        outcome=outcome,
        has_null_outcome=outcome is not None and NoneType in get_args(hints.get(outcome)),
        version=_VERSION if _VERSION in names else next(iter(versions), None),
        names=frozenset(names),
    )


# kind -> fields of its records and request bodies, without user, tenant and options
REQUEST_FIELDS = {name: _request_fields(name, kind) for name, kind in RECORDED.items()}
ANSWER_FIELDS = {name: _answer_fields(kind) for name, kind in RECORDED.items()}


# ---- digests, which are equal if and only if the answers are

TaskScores = Mapping[str, Sequence[float | None] | npt.NDArray[np.float32]]


def digest(scores: TaskScores, items: Sequence[int] | npt.NDArray[np.int64] = ()) -> str:
    """Hash an answer.

    Args:
        scores: Task -> float32 scores; null equals NaN, and the order of tasks is ignored.
        items: Items that the answer returned, in order; empty for candidates of the request.

    Returns:
        16 hex digits (xxh3-64).
    """
    state = xxhash.xxh3_64(np.asarray(items, "<i8").tobytes())
    for task in sorted(scores):
        state.update(f"{task}\0{len(scores[task])}\0".encode())
        state.update(raw(scores[task]))
    return state.hexdigest()


def raw(values: Sequence[float | None] | npt.NDArray[np.float32]) -> bytes:
    """Convert scores to little-endian float32; all NaN and nulls become the same bytes."""
    row = np.array(values, "<f4")
    row[np.isnan(row)] = np.nan
    return row.tobytes()
