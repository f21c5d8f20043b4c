"""Requests and answers of every kind, and the words in them: verdicts, outcomes, reasons."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import field

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import NpuGrError, RequestError
from npu_gr.core.feature_schema.columns import NO_COLUMNS, Columns, OneRow
from npu_gr.core.history import Events, HistoryRef, HistoryReport, UserKey, Write, Written


class Request(Protocol):
    """The part that every request has."""

    @property
    def user(self) -> UserKey:
        """The user that the request is about."""
        ...


class Answer(Protocol):
    """The parts that every answer has: metrics and the access log read them, whatever the kind."""

    @property
    def stages_s(self) -> Mapping[str, float]:
        """Seconds of each stage that `Kind.stages` names."""
        ...

    @property
    def label_value(self) -> str:
        """The value of the kind's own label, one of `Kind.labels`; "" if the kind has none."""
        ...

    def log_fields(self) -> dict[str, Any]:
        """Return the fields that the access log writes about this answer.

        A field of value None is left out.
        """
        ...


class LeasedAnswer(Answer, Protocol):
    """The answer of a kind whose job leases prefix KV (`Kind.leases_prefix`)."""

    @property
    def reason(self) -> Reason:
        """Why the prefix was not simply in HBM."""
        ...


# of a cascade
SourceName = Literal["shared_encoder", "transitions", "neighbours", "generate", "match"]
OrderName = Literal["blended", "rank", "fused", "retrieval"]  # of a cascade's items
# with the names of earlier versions, in requests and logs: see `core/renamed.py`
AnySourceName = Literal[SourceName, "trunk"]
AnyOrderName = Literal[OrderName, "fitted"]
AnyUnknownItems = Literal["ignore", "reject", "refuse"]
# see `SearchOptions` of `npu_gr/engine/beam_search.py`
Normalise = Literal["vocabulary", "codebook", "valid"]


class Verdict(StrEnum):
    """The trigger's decision about a signal; the value of the `verdict` metric label."""

    PREINFER = "preinfer"
    RELOAD = "reload"  # the DRAM tier has the prefix, and copying it back pays
    ALREADY_RESIDENT = "already_resident"
    ALREADY_RUNNING = "already_running"
    EXTEND = "extend"  # a beginning is resident; only the later behaviours are encoded
    SKIP_NOT_AT_RISK = "skip_not_at_risk"  # the rank would meet its budget without a prefill
    SKIP_FOOTPRINT = "skip_footprint"  # no bytes left to reserve
    SKIP_LOAD = "skip_load"  # too many pre-infers in flight
    SKIP_RATE = "skip_rate"  # more pre-infers a second than the instance sustains
    # its tenant has its share of bytes, pre-infers or their rate, and others want the rest
    SKIP_SHARE = "skip_share"
    SKIP_DISABLED = "skip_disabled"


class Brownout(IntEnum):
    """Levels of brown-out; each level gives up its own work and that of the levels before it."""

    NONE = 0
    NO_DRAM = 1  # no reloads, no spills
    NO_RELAY = 2  # no pre-infers; what is resident is still used
    TRUNCATE = 3  # ranks without a prefix read only the newest part of their history


class Outcome(StrEnum):
    """Where a rank or generate found its prefix KV; the value of the `outcome` metric label."""

    HBM_HIT = "hbm_hit"
    JOINED = "joined"
    DRAM_HIT = "dram_hit"
    MISS_FULL = "miss_full"
    DEGRADED = "degraded"


class Reason(StrEnum):
    """The reason why a rank or generate was not an HBM hit; `NONE` for a hit."""

    NONE = ""
    COMPUTE = "compute"  # joined a prefill, or adopted it and computed the rest
    RELOAD = "reload"  # joined a reload
    NOT_BEGUN = "not_begun"  # its prefill still waited for the device
    NO_SIGNAL = "no_signal"
    NOT_AT_RISK = "not_at_risk"
    REJECTED_FOOTPRINT = "rejected_footprint"
    REJECTED_LOAD = "rejected_load"
    REJECTED_RATE = "rejected_rate"
    REJECTED_SHARE = "rejected_share"
    JOIN_TIMEOUT = "join_timeout"
    RELOAD_SLOWER = "reload_slower"
    RELOAD_FAILED = "reload_failed"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    EXPIRED = "expired"
    PRODUCER_FAILED = "producer_failed"
    # the device failed while it read the prefix; the rank was repeated without
    READ_FAILED = "read_failed"
    DISABLED = "disabled"
    BROWNOUT = "brownout"  # given up under overload


class SignalRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Prefill this user's prefix while retrieval still runs."""

    user: UserKey
    history: HistoryRef
    num_candidates: int | None = None  # the rank will bring this many; None = as configured
    model_version: str | None = None  # None = the current one


class RankRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Score these candidates for this user."""

    user: UserKey
    candidates: I64  # [c] external item ids
    history: HistoryRef
    timestamp: int | None = None  # unix seconds the candidates are shown at; None = now
    top_k: int | None = None  # also answer the best k, by the first task
    # candidates that the ranker does not know: no score, or no answer; None = as the configuration
    # says
    unknown_items: Literal["ignore", "reject"] | None = None
    request_features: OneRow = field(default_factory=dict)  # of this request alone
    cross_features: Columns = NO_COLUMNS  # of each candidate
    model_version: str | None = None


class SignalAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The decision about a prefill; the prefill itself may still be running."""

    verdict: Verdict
    model_version: str
    history: HistoryReport
    resident_for_s: float  # how long the prefix KV is kept for a rank; 0 where none is produced
    # of the generator's prompt; None = this instance has none
    generate_verdict: Verdict | None = None
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def label_value(self) -> str:
        return self.verdict

    def log_fields(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value,
            "generate_verdict": None
            if self.generate_verdict is None
            else self.generate_verdict.value,
            "model_version": self.model_version,
            **self.history.log_fields(),
        }


class RankAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Scores in candidate order, and how they came to be."""

    model_version: str
    outcome: Outcome
    reason: Reason
    scores: dict[str, F32]  # task -> [c] logits; NaN = the catalogue lacks the item
    # [<= top_k] external ids, best first by the first task; ties: the earlier candidate
    top: I64 | None
    history: HistoryReport
    prefix_tokens: int  # of num_tokens, how many were read from cached KV
    unknown_candidates: int = 0
    # of.name: features of the model that nothing was said of
    missing_features: tuple[str, ...] = ()
    # [c] retrieval scores, for a cascade over one shared encoder; NaN as in `scores`
    retrieval: F32 | None = None
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def label_value(self) -> str:
        return self.outcome

    def log_fields(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome.value,
            "reason": self.reason.value or None,
            "model_version": self.model_version,
            **self.history.log_fields(),
            "prefix_tokens": self.prefix_tokens,
            "num_items": max(map(len, self.scores.values()), default=0),
        }


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """The best items after this user's history."""

    user: UserKey
    history: HistoryRef
    num_items: int
    beam_width: int | None = None  # None = the config's, or num_items if that is more
    normalise: Normalise | None = None  # None = the config's
    temperature: float = 1.0
    exclude_seen: bool | None = None  # leave out the items of the history; None = the config's
    allow_items: I64 | None = None  # [n] external ids; None = all
    deny_items: I64 | None = None
    # name -> allowed values
    attributes: dict[str, tuple[bool | int | float | str, ...]] = field(default_factory=dict)
    catalogue_version: str | None = None
    model_version: str | None = None


class GenerateAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Items, best first, and how they came to be. n = items, L = codes of a semantic ID."""

    model_version: str
    catalogue_version: str
    outcome: Outcome
    reason: Reason
    status: str  # complete | exhausted: fewer than asked
    item_ids: I64  # [n]
    sids: npt.NDArray[np.int32]  # [n, L]
    scores: F32  # [n] log-probabilities
    history: HistoryReport  # in tokens of the generator: L an item
    prefix_tokens: int  # read from cached KV
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def label_value(self) -> str:
        return self.outcome

    def log_fields(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome.value,
            "reason": self.reason.value or None,
            "model_version": self.model_version,
            "catalogue_version": self.catalogue_version,
            **self.history.log_fields(),
            "prefix_tokens": self.prefix_tokens,
            "num_items": len(self.item_ids),
        }


class StageResult(StrEnum):
    """The end of a stage of a cascade; the value of the `result` metric label."""

    OK = "ok"
    EMPTY = "empty"  # it ran and found nothing
    COLD = "cold"  # the source knows nothing of the user
    # the rank: the answer has items without a score, or lacks some, because it does not know them
    PARTIAL = "partial"
    OVERLOADED = "overloaded"
    OUT_OF_TIME = "out_of_time"
    FAILED = "failed"


class StageReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A stage of a cascade. Stages of retrieval run side by side, the others after them."""

    # shared encoder | transitions | neighbours | generate | match | popular | hook | rank
    stage: str
    result: StageResult
    began_s: float  # seconds after the cascade began
    took_s: float
    num_items: int  # that the stage answered


class RecommendRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Retrieve and rank items for this user, in one call."""

    user: UserKey
    history: HistoryRef
    num_items: int
    num_candidates: int | None = None  # ranked at most; None = the config's
    exclude_seen: bool | None = None  # leave out the items of the history; None = the config's
    # that the ranker does not know; None = the config's
    unknown_items: Literal["last", "drop"] | None = None
    deny_items: I64 | None = None  # [n] external ids
    timestamp: int | None = None  # unix seconds the items are shown at; None = now
    # for the hook: page, country, ...
    context: dict[str, bool | int | float | str] = field(default_factory=dict)
    request_features: OneRow = field(default_factory=dict)  # for the ranker
    sources: tuple[str, ...] | None = None  # only these of the configured ones; None = all
    order: OrderName | None = None  # None = the config's
    model_version: str | None = None  # of the ranker


class RecommendAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Items, best first, and how they came to be. n = items."""

    model_version: str  # of the ranker
    # of the signal that went out before the retrieval; None = the shared encoder leased the prefix
    verdict: Verdict | None
    # of the prefix; None = nothing was ranked, and the retrieval's order stands
    outcome: Outcome | None
    reason: Reason
    order: OrderName  # that the items are in
    item_ids: I64  # [n]
    # [n] the fitted sums, or logits of the ranker's first task; NaN = not ranked, or unknown to the
    # ranker
    scores: F32
    # [n] the first source that had the item; `hook` where the hook added it
    origins: tuple[str, ...]
    num_candidates: int  # that were ranked, or would have been
    stages: tuple[StageReport, ...]
    history: HistoryReport
    # source -> its items that the ranker does not know
    unknown: Mapping[str, int] = field(default_factory=dict)
    prefix_tokens: int = 0  # read from cached KV by the rank
    missing_features: tuple[str, ...] = ()  # as of the rank
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_unknown(self) -> int:
        """Items that were found and that the ranker does not know: the last ones, or dropped."""
        return sum(self.unknown.values())

    @property
    def degraded(self) -> tuple[str, ...]:
        """The stages that did not do their part."""
        return tuple(report.stage for report in self.stages if report.result is not StageResult.OK)

    @property
    def label_value(self) -> str:
        """Return "true" if a stage did not do its part."""
        return str(bool(self.degraded)).lower()

    def log_fields(self) -> dict[str, Any]:
        degraded = [
            f"{r.stage} {r.result.value}" for r in self.stages if r.result is not StageResult.OK
        ]
        return {
            "verdict": self.verdict.value if self.verdict else None,
            "outcome": self.outcome.value if self.outcome else None,
            "reason": self.reason.value or None,
            "model_version": self.model_version,
            **self.history.log_fields(),
            "prefix_tokens": self.prefix_tokens,
            "num_items": len(self.item_ids),
            "num_candidates": self.num_candidates,
            "num_unknown": self.num_unknown or None,
            "degraded": degraded or None,
        }


class Basis(StrEnum):
    """The vector that a match searched with; the value of the `basis` metric label."""

    TARGET = "target"  # the user's target vector
    FOLDED = "folded"  # a vector folded in from target history that is newer than the training
    SOURCE = "source"  # no target history: the source vector
    POPULARITY = "popularity"  # no vector: the most popular items


class MatchRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """The best items for this user by vectors trained across domains."""

    user: UserKey
    history: HistoryRef = field(default_factory=HistoryRef)  # of the target domain; without a base
    num_items: int
    # leave out the items of the history and of the training data, and near-duplicates of the
    # source's
    exclude_seen: bool = True
    allow_items: I64 | None = None  # [n] external ids; None = all
    deny_items: I64 | None = None
    vectors_version: str | None = None


class MatchAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Items, best first, and the basis of their scores. n = items."""

    vectors_version: str
    basis: Basis
    status: str  # complete | exhausted: fewer than asked
    item_ids: I64  # [n]
    scores: F32  # [n] comparable within a basis only
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def label_value(self) -> str:
        return self.basis.value

    def log_fields(self) -> dict[str, Any]:
        return {
            "vectors_version": self.vectors_version,
            "basis": self.basis.value,
            "num_items": len(self.item_ids),
        }


class EventsRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Append these behaviours of the user, durably."""

    user: UserKey
    events: Events
    idempotency_key: str | None = None  # the same key of the same user is applied once


class EventsAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The number of behaviours in the history store."""

    num_events: int  # of the user
    sorted_events: int = 0  # of the request: how many stood later than newer ones
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def label_value(self) -> str:
        return ""

    def log_fields(self) -> dict[str, Any]:
        return {"num_events": self.num_events, "sorted_events": self.sorted_events or None}


class IngestRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Write behaviours of many users of one tenant, durably."""

    tenant: str
    # as they came; an error in the place of what cannot be read
    writes: tuple[Write | RequestError, ...]

    @property
    def user(self) -> UserKey:
        """Nobody: the request is about many."""
        return UserKey(self.tenant, "")


class IngestAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """What became of each user."""

    results: tuple[Written | NpuGrError, ...]  # in the order of the request
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_added(self) -> int:
        """Behaviours that the store gained."""
        return sum(one.num_added for one in self.results if isinstance(one, Written))

    @property
    def num_failed(self) -> int:
        """Users of whom nothing was written."""
        return sum(isinstance(one, NpuGrError) for one in self.results)

    @property
    def label_value(self) -> str:
        return ""

    def log_fields(self) -> dict[str, Any]:
        return {
            "num_users": len(self.results),
            "num_failed": self.num_failed or None,
            "num_added": self.num_added,
        }


class EraseRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Forget this user: stored behaviours, known prefixes, KV in every tier, running prefills too."""

    user: UserKey


# Places that may hold something of an erased user for a while.
STORE = "store"
RECORDINGS = "recordings"
# until they are made without the user: a file of the operator's, which still answers matches
VECTORS = "vectors"


class EraseAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The confirmation that nothing finds the user any more."""

    pending: tuple[str, ...] = ()  # places that still hold something of the user
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def label_value(self) -> str:
        return ""

    def log_fields(self) -> dict[str, Any]:
        return {"pending": list(self.pending)} if self.pending else {}
