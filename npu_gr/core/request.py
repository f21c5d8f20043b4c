"""Requests and answers of all kinds, with their enums: verdicts, outcomes, reasons."""

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
from npu_gr.core.item_rules import OrderRules


class Request(Protocol):
    """The fields of every request."""

    @property
    def user(self) -> UserKey:
        """The user of the request."""
        ...


class Answer(Protocol):
    """The fields of every answer, for metrics and the access log."""

    @property
    def stages_s(self) -> Mapping[str, float]:
        """Seconds of each stage that `Kind.stages` names."""
        ...

    @property
    def label_value(self) -> str:
        """The value of the kind's own label, one of `Kind.labels`; "" if the kind has none."""
        ...

    def log_fields(self) -> dict[str, Any]:
        """Return the access log's fields; None values are omitted."""
        ...


class LeasedAnswer(Answer, Protocol):
    """The answer of a kind that leases prefix KV (`Kind.leases_prefix`)."""

    @property
    def reason(self) -> Reason:
        """Why it was not an HBM hit."""
        ...

    @property
    def history(self) -> HistoryReport:
        """How the history was read."""
        ...


# sources of a cascade
SourceName = Literal["shared_encoder", "transitions", "neighbours", "history", "generate", "match"]
OrderName = Literal["blended", "rank", "fused", "retrieval"]  # order of a cascade's items
# with the names of earlier versions, in requests and logs: see `core/renamed.py`
AnySourceName = Literal[SourceName, "trunk"]
AnyOrderName = Literal[OrderName, "fitted"]
AnyUnknownItems = Literal["ignore", "reject", "refuse"]
# see `SearchOptions` of `npu_gr/engine/beam_search.py`
Normalise = Literal["vocabulary", "codebook", "valid"]


class Verdict(StrEnum):
    """The trigger's decision on a signal; the value of the metric label `verdict`."""

    PREINFER = "preinfer"
    # copy the prefix back from the DRAM tier, or from the pool if that has it
    RELOAD = "reload"
    ALREADY_RESIDENT = "already_resident"
    ALREADY_RUNNING = "already_running"
    EXTEND = "extend"  # a part is resident; encode only the later events
    SKIP_NOT_AT_RISK = "skip_not_at_risk"  # the rank would meet its budget without a prefill
    SKIP_FOOTPRINT = "skip_footprint"  # no free bytes
    SKIP_LOAD = "skip_load"  # too many prefills in flight
    SKIP_RATE = "skip_rate"  # over the prefills per second that the instance sustains
    # the tenant has used its share, and other tenants need the rest
    SKIP_SHARE = "skip_share"
    SKIP_DISABLED = "skip_disabled"


class Brownout(IntEnum):
    """Levels of brownout; each level includes the lower ones."""

    NONE = 0
    NO_DRAM = 1  # no reloads, no spills
    NO_RELAY = 2  # no prefills; resident prefixes are still used
    TRUNCATE = 3  # ranks without a prefix use only the newest part of the history


class Outcome(StrEnum):
    """Where a rank or generate found its prefix KV; the value of the metric label `outcome`."""

    HBM_HIT = "hbm_hit"
    JOINED = "joined"
    DRAM_HIT = "dram_hit"
    MISS_FULL = "miss_full"
    DEGRADED = "degraded"


class Reason(StrEnum):
    """Why a rank or generate was not an HBM hit; `NONE` for an exact hit."""

    NONE = ""
    # a hit: the prefix is of weights that a delta has changed within `relay.max_stale_s`;
    # a miss: a delta changed them while the rank waited for its pass
    STALE = "stale"
    COMPUTE = "compute"  # waited for a prefill, or took it over and computed the rest
    RELOAD = "reload"  # waited for a reload
    NOT_BEGUN = "not_begun"  # its prefill was still queued
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
    # the device failed while reading the prefix; the rank was repeated without it
    READ_FAILED = "read_failed"
    DISABLED = "disabled"
    BROWNOUT = "brownout"  # disabled by overload


class Fetched(StrEnum):
    """What a fetch from the pool led to; the value of the metric label `outcome`."""

    HIT = "pool_hit"
    ABSENT = "absent"  # no prefix of this user, model version and page layout
    SLOWER = "slower"  # not tried: computing it takes less time
    TIMEOUT = "timeout"  # no answer within the time that computing it takes
    BUSY = "busy"  # not tried: other calls to the pool have not ended
    TORN = "torn"  # the checksum, the header or the length is wrong
    FORGED = "forged"  # put without `kv_cache.pool_key`, or with another one
    FOREIGN = "foreign"  # of another tenant, user, model version or page layout
    EXPIRED = "expired"
    MISMATCH = "fingerprint_mismatch"  # not the beginning of the history
    NO_ROOM = "no_room"  # the DRAM tier has none
    FAILED = "failed"  # the pool failed; it is left alone for some seconds


class SignalRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Prefill a user's prefix while retrieval runs."""

    user: UserKey
    history: HistoryRef
    num_candidates: int | None = None  # candidates of the coming rank; None = as configured
    model_version: str | None = None  # None = the current one


class RankRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Score candidates for a user."""

    user: UserKey
    candidates: I64  # [c] external item ids
    history: HistoryRef
    timestamp: int | None = None  # unix seconds when candidates are shown; None = now
    top_k: int | None = None  # also return the best k, by the first task
    # policy for candidates unknown to the ranker: no score, or an error; None = as configured
    unknown_items: Literal["ignore", "reject"] | None = None
    request_features: OneRow = field(default_factory=dict)  # of the request
    cross_features: Columns = NO_COLUMNS  # of each candidate
    model_version: str | None = None


class SignalAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The decision about a prefill; the prefill itself may still be running."""

    verdict: Verdict
    model_version: str
    history: HistoryReport
    resident_for_s: float  # time that the prefix KV is retained for a rank; 0 if there is none
    # of the generator's prompt; None without a generator
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
    """Scores in the order of the candidates, and how they were computed."""

    model_version: str
    outcome: Outcome
    reason: Reason
    scores: dict[str, F32]  # task -> [c] logits; NaN = unknown item
    # [<= top_k] external ids, best first by the first task; ties in candidate order
    top: I64 | None
    history: HistoryReport
    prefix_tokens: int  # tokens of the history that were read from cached KV
    unknown_candidates: int = 0
    # of.name: features of the model without a value
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
    """Generate the best next items of a user."""

    user: UserKey
    history: HistoryRef
    num_items: int
    beam_width: int | None = None  # None = as configured, or num_items if that is larger
    normalise: Normalise | None = None  # None = as configured
    temperature: float = 1.0
    exclude_seen: bool | None = None  # exclude items of the history; None = as configured
    allow_items: I64 | None = None  # [n] external ids; None = all
    deny_items: I64 | None = None
    # name -> allowed values
    attributes: dict[str, tuple[bool | int | float | str, ...]] = field(default_factory=dict)
    catalogue_version: str | None = None
    model_version: str | None = None


class LimitedBy(StrEnum):
    """What ended a list of items before the requested number; "" for a complete list."""

    NONE = ""
    CATALOGUE = "catalogue"  # it has no more items
    # the others are denied, seen, withdrawn, without the attributes, or unknown and dropped
    FILTER = "filter"
    BEAM = "beam"  # the beam search ended at no more of them; a wider beam finds more
    INDEX = "index"  # the approximate index found no more
    SOURCES = "sources"  # the sources of a recommend found no more
    LIMIT = "limit"  # a configured or requested number of candidates, or of items of a source

    @property
    def status(self) -> str:
        """The field `status` of an answer."""
        return "exhausted" if self else "complete"


class GenerateAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Items, best first, and how they were found. n = items, L = codes of a semantic ID."""

    model_version: str
    catalogue_version: str
    outcome: Outcome
    reason: Reason
    limited_by: LimitedBy  # why there are fewer items than requested
    item_ids: I64  # [n]
    sids: npt.NDArray[np.int32]  # [n, L]
    scores: F32  # [n] log-probabilities
    history: HistoryReport  # in tokens of the generator, L per item
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
            "limited_by": self.limited_by.value or None,
        }


class StageResult(StrEnum):
    """The result of a stage of a cascade; the value of the metric label `result`."""

    OK = "ok"
    EMPTY = "empty"  # it ran and found nothing
    COLD = "cold"  # the source has no data of the user
    # the rank: items unknown to the ranker have no score, or were dropped
    PARTIAL = "partial"
    OVERLOADED = "overloaded"
    OUT_OF_TIME = "out_of_time"
    FAILED = "failed"

    @property
    def is_degraded(self) -> bool:
        """Whether the stage failed, or did a part of its work only."""
        return self not in (StageResult.OK, StageResult.EMPTY, StageResult.COLD)


class StageReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A stage of a cascade. Retrieval stages run concurrently, the others after them."""

    # a source, or popular | hook | rank | hook_after | rules
    stage: str
    result: StageResult
    began_s: float  # seconds after the cascade began
    took_s: float
    num_items: int  # returned by the stage


class RecommendRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Retrieve and rank items for a user."""

    user: UserKey
    history: HistoryRef
    num_items: int
    num_candidates: int | None = None  # maximum to rank; None = as configured
    exclude_seen: bool | None = None  # exclude items of the history; None = as configured
    # policy for items unknown to the ranker; None = as configured
    unknown_items: Literal["last", "drop"] | None = None
    deny_items: I64 | None = None  # [n] external ids
    timestamp: int | None = None  # unix seconds when items are shown; None = now
    # for the hook: page, country, ...
    context: dict[str, bool | int | float | str] = field(default_factory=dict)
    request_features: OneRow = field(default_factory=dict)  # for the ranker
    sources: tuple[str, ...] | None = None  # subset of the configured ones; None = all
    order: OrderName | None = None  # None = as configured
    model_version: str | None = None  # of the ranker
    allow_items: I64 | None = None  # [n] external ids; None = all
    # name -> allowed values
    attributes: dict[str, tuple[bool | int | float | str, ...]] = field(default_factory=dict)
    shown_items: I64 | None = None  # [n] showings that count for the cap, with repeats
    rules: OrderRules | None = None  # in addition to the configured ones


class RecommendAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Items, best first, and how they were found. n = items."""

    model_version: str  # of the ranker
    # of the signal before retrieval; None if the shared encoder leased the prefix
    verdict: Verdict | None
    # of the rank's prefix; None if the rank failed, and items are in the order of retrieval
    outcome: Outcome | None
    reason: Reason
    order: OrderName  # order of the items
    item_ids: I64  # [n]
    # [n] blended scores, or logits of the ranker's first task; NaN = not ranked, or unknown to the
    # ranker
    scores: F32
    # [n] the first source with the item; `hook`, `hook_after` or `pin` if one of these added it
    origins: tuple[str, ...]
    num_candidates: int  # candidates of the rank
    limited_by: LimitedBy  # why there are fewer items than requested
    stages: tuple[StageReport, ...]
    history: HistoryReport
    # source -> number of items unknown to the ranker
    unknown: Mapping[str, int] = field(default_factory=dict)
    prefix_tokens: int = 0  # read from cached KV by the rank
    missing_features: tuple[str, ...] = ()  # of the rank
    # [n] probability of each item at its place, given those before; None = nothing was drawn
    propensities: F32 | None = None
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_unknown(self) -> int:
        """Number of retrieved items unknown to the ranker; they are last, or dropped."""
        return sum(self.unknown.values())

    @property
    def degraded(self) -> tuple[str, ...]:
        """The stages that failed, or did a part of their work; finding nothing is no failure."""
        return tuple(report.stage for report in self.stages if report.result.is_degraded)

    @property
    def label_value(self) -> str:
        """Return "true" if a stage is degraded."""
        return str(bool(self.degraded)).lower()

    def log_fields(self) -> dict[str, Any]:
        degraded = [f"{r.stage} {r.result.value}" for r in self.stages if r.result.is_degraded]
        return {
            "verdict": self.verdict.value if self.verdict else None,
            "outcome": self.outcome.value if self.outcome else None,
            "reason": self.reason.value or None,
            "model_version": self.model_version,
            **self.history.log_fields(),
            "prefix_tokens": self.prefix_tokens,
            "num_items": len(self.item_ids),
            "limited_by": self.limited_by.value or None,
            "num_candidates": self.num_candidates,
            "num_unknown": self.num_unknown or None,
            "degraded": degraded or None,
        }


class Basis(StrEnum):
    """The query vector of a match; the value of the metric label `basis`."""

    TARGET = "target"  # the user's target vector
    FOLDED = "folded"  # folded in from target history newer than the training
    SOURCE = "source"  # no target history: the source vector
    POPULARITY = "popularity"  # no vector: the most popular items


class MatchRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Find the best items for a user by cross-domain vectors."""

    user: UserKey
    history: HistoryRef = field(default_factory=HistoryRef)  # of the target domain; without a base
    num_items: int
    # exclude items of the history and of the training data, and near-duplicates of source items;
    # None = as configured
    exclude_seen: bool | None = None
    allow_items: I64 | None = None  # [n] external ids; None = all
    deny_items: I64 | None = None
    vectors_version: str | None = None
    # name -> allowed values, of the generator's catalogue
    attributes: dict[str, tuple[bool | int | float | str, ...]] = field(default_factory=dict)


class MatchAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Items, best first, and the basis of their scores. n = items."""

    vectors_version: str
    basis: Basis
    limited_by: LimitedBy  # why there are fewer items than requested
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
            "limited_by": self.limited_by.value or None,
        }


class EventsRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Append events of a user, durably."""

    user: UserKey
    events: Events
    idempotency_key: str | None = None  # a key of a user is applied once


class EventsAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The result of appending events."""

    num_events: int  # stored events of the user
    sorted_events: int = 0  # events of the request that came after newer ones of the user
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def label_value(self) -> str:
        return ""

    def log_fields(self) -> dict[str, Any]:
        return {"num_events": self.num_events, "sorted_events": self.sorted_events or None}


class IngestRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """Write events of many users of one tenant, durably."""

    tenant: str
    # in the order of the request; an error instead of an invalid entry
    writes: tuple[Write | RequestError, ...]

    @property
    def user(self) -> UserKey:
        """An empty user id, since the request has many users."""
        return UserKey(self.tenant, "")


class IngestAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, eq=False):
    """The result of each user's write."""

    results: tuple[Written | NpuGrError, ...]  # in the order of the request
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def num_added(self) -> int:
        """Number of new events."""
        return sum(one.num_added for one in self.results if isinstance(one, Written))

    @property
    def num_failed(self) -> int:
        """Number of users whose write failed."""
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
    """Erase a user: stored events, cached prefixes, KV in all tiers, running prefills."""

    user: UserKey


# Places that may have data of an erased user for some time.
STORE = "store"
RECORDINGS = "recordings"
# a file of the operator, until it is made again without the user
VECTORS = "vectors"


class EraseAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Confirms that no request finds data of the user any more."""

    pending: tuple[str, ...] = ()  # places that still have data of the user
    stages_s: dict[str, float] = field(default_factory=dict)

    @property
    def label_value(self) -> str:
        return ""

    def log_fields(self) -> dict[str, Any]:
        return {"pending": list(self.pending)} if self.pending else {}
