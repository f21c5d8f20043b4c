"""The table of the request kinds of an instance, from which all other lists of kinds derive.

Routes, OpenAPI, codecs, metrics, SLO rules, alerts, dashboards, the status page, the access log,
the recorder, replay, the router and the simulator read `KINDS`. A new kind needs one entry here,
one handler (`npu_gr.handlers`), one schema (`npu_gr.server.schemas`), and two runbook pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Generic, TypeVar

from npu_gr.core.request import (
    Answer,
    Basis,
    EraseAnswer,
    EraseRequest,
    EventsAnswer,
    EventsRequest,
    GenerateAnswer,
    GenerateRequest,
    IngestAnswer,
    IngestRequest,
    MatchAnswer,
    MatchRequest,
    Outcome,
    RankAnswer,
    RankRequest,
    RecommendAnswer,
    RecommendRequest,
    Request,
    SignalAnswer,
    SignalRequest,
)

Q = TypeVar("Q", bound=Request)
A = TypeVar("A", bound=Answer)


class Priority(IntEnum):
    """The priority of a kind in admission: smaller values go first."""

    RANK = 0  # the cascade waits for it
    GENERATE = 1  # retrieval has other sources
    SIGNAL = 2  # an optimisation


class Scope(StrEnum):
    """A permission of an API key."""

    INFER = "infer"  # signals, ranks, generates, matches, recommends
    INGEST = "ingest"  # events, of one user and in bulk
    ERASE = "erase"  # erase users
    OBSERVE = "observe"  # metrics, status, models
    ADMIN = "admin"  # reload, roll back, change the catalogue, record, profile


class Routing(StrEnum):
    """How the router places requests of a kind, and whether it may retry them."""

    SIGNAL = "signal"  # by user; chooses the instance; retried only if no instance has begun it
    # by user, to the instance of the signal; retried if that fails
    FOLLOW = "follow"
    ONCE = "once"  # by user; a write, so never retried
    BY_LOAD = "by_load"  # of many users: to an instance with low load, never retried
    EVERYWHERE = "everywhere"  # to every instance


class Scored(StrEnum):
    """The objects with scores in an answer."""

    CANDIDATES = "candidates"  # one score per task and candidate of the request
    ITEMS = "items"  # one score per returned item
    NOTHING = "nothing"  # the answer has no scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[Q, A]):
    """One kind of request: its names, objective, and treatment by each part of the service."""

    name: str  # metric label, log field, configuration prefix: `slo.<name>_s`
    plural: str  # in messages: "matches are rejected"
    summary: str  # one line, for OpenAPI and the dashboards
    method: str = "POST"
    path: str  # route; `{user_id}` is the rest of the path
    status: int = 200  # of a successful answer
    request: type[Q]
    answer: type[A]
    # section of the configuration that enables it; None = always enabled
    section: str | None = None
    objective_s: float  # default of `slo.<name>_s`, the latency objective
    # whether a fast burn of its error budget pages; else it opens a ticket
    pages_on_fast_burn: bool = True
    priority: Priority
    scope: Scope = Scope.INFER  # required of the API key
    routing: Routing
    uses_device: bool  # it waits for the device, so admission predicts its wait
    must_finish: bool = False  # never rejected by admission, and has no deadline
    needs_ready: bool = False  # rejected while the instance starts or drains
    scored: Scored = Scored.NOTHING
    takes_delta: bool = False  # its history may be a delta on a cached prefix
    is_recorded: bool = True  # the recorder writes it, and replay can send it again
    # keys of the answer's `stages_s`, in order; HTTP adds "http" (reading, parsing, writing)
    stages: tuple[str, ...]
    label: str | None = None  # extra label of `npu_gr_<name>_duration_seconds`
    # values of `label`; that of an answer is `label_value`
    labels: tuple[str, ...] = ()

    @property
    def leases_prefix(self) -> bool:
        """Whether its handler leases prefix KV."""
        return self.label == "outcome"

    @property
    def is_model(self) -> bool:
        """Whether the Open Inference Protocol has it as a model, since its answers have scores."""
        return self.scored is not Scored.NOTHING

    @property
    def paths(self) -> tuple[str, ...]:
        """All routes: its own, then those of the Open Inference Protocol."""
        if not self.is_model:
            return (self.path,)
        model = f"/v2/models/{self.name}"
        return (self.path, f"{model}/infer", f"{model}/versions/{{version}}/infer")

    @property
    def title(self) -> str:
        """The capitalised name."""
        return self.name.title()


SIGNAL: Kind[SignalRequest, SignalAnswer] = Kind(
    name="signal",
    plural="signals",
    summary="Prefill a user's prefix.",
    path="/v1/signal",
    status=202,
    request=SignalRequest,
    answer=SignalAnswer,
    objective_s=0.02,
    pages_on_fast_burn=False,  # a rank works without its prefix
    priority=Priority.SIGNAL,
    routing=Routing.SIGNAL,
    uses_device=False,
    needs_ready=True,
    takes_delta=True,
    stages=("history", "decide"),
)
RANK: Kind[RankRequest, RankAnswer] = Kind(
    name="rank",
    plural="ranks",
    summary="Score candidates for a user.",
    path="/v1/rank",
    request=RankRequest,
    answer=RankAnswer,
    section="checkpoint",
    objective_s=0.05,
    priority=Priority.RANK,
    routing=Routing.FOLLOW,
    uses_device=True,
    scored=Scored.CANDIDATES,
    takes_delta=True,
    stages=("history", "lease", "queue", "device"),
    label="outcome",
    labels=tuple(outcome.value for outcome in Outcome),
)
GENERATE: Kind[GenerateRequest, GenerateAnswer] = Kind(
    name="generate",
    plural="generates",
    summary="The best items after a history.",
    path="/v1/generate",
    request=GenerateRequest,
    answer=GenerateAnswer,
    section="generate",
    objective_s=0.2,
    priority=Priority.GENERATE,
    routing=Routing.FOLLOW,
    uses_device=True,
    scored=Scored.ITEMS,
    takes_delta=True,
    stages=("history", "lease", "queue", "device"),
    label="outcome",
    labels=tuple(outcome.value for outcome in Outcome),
)
MATCH: Kind[MatchRequest, MatchAnswer] = Kind(
    name="match",
    plural="matches",
    summary="The best items for a user, by vectors.",
    path="/v1/match",
    request=MatchRequest,
    answer=MatchAnswer,
    section="match",
    objective_s=0.05,
    priority=Priority.GENERATE,
    routing=Routing.FOLLOW,
    uses_device=True,
    scored=Scored.ITEMS,
    stages=("history", "queue", "device"),
    label="basis",
    labels=tuple(basis.value for basis in Basis),
)
RECOMMEND: Kind[RecommendRequest, RecommendAnswer] = Kind(
    name="recommend",
    plural="recommends",
    summary="What to show: the cascade.",
    path="/v1/recommend",
    request=RecommendRequest,
    answer=RecommendAnswer,
    section="recommend",
    objective_s=0.3,
    priority=Priority.GENERATE,
    routing=Routing.FOLLOW,
    uses_device=True,
    scored=Scored.ITEMS,
    takes_delta=True,
    stages=("history", "retrieve", "preprocess", "rank"),
    label="degraded",
    labels=("false", "true"),
)
EVENTS: Kind[EventsRequest, EventsAnswer] = Kind(
    name="events",
    plural="events",
    summary="Append behaviours of a user.",
    path="/v1/events",
    request=EventsRequest,
    answer=EventsAnswer,
    objective_s=0.1,
    priority=Priority.RANK,
    scope=Scope.INGEST,
    routing=Routing.ONCE,
    uses_device=False,
    stages=("store",),
)
INGEST: Kind[IngestRequest, IngestAnswer] = Kind(
    name="ingest",
    plural="ingests",
    summary="Append behaviours of many users.",
    path="/v1/events/bulk",
    request=IngestRequest,
    answer=IngestAnswer,
    objective_s=1.0,
    pages_on_fast_burn=False,  # bulk clients retry
    priority=Priority.SIGNAL,
    scope=Scope.INGEST,
    routing=Routing.BY_LOAD,
    uses_device=False,
    # a record has one user, so that it can be hidden after an erasure
    is_recorded=False,
    stages=("store",),
)
ERASE: Kind[EraseRequest, EraseAnswer] = Kind(
    name="erase",
    plural="erasures",
    summary="Forget a user: behaviours, prefixes and their KV.",
    method="DELETE",
    path="/v1/users/{user_id}",
    status=204,
    request=EraseRequest,
    answer=EraseAnswer,
    objective_s=1.0,
    priority=Priority.RANK,
    scope=Scope.ERASE,
    routing=Routing.EVERYWHERE,
    uses_device=False,
    must_finish=True,  # an erasure must be complete
    # a recording must not gain data of a user by an erasure
    is_recorded=False,
    stages=("store", "tiers"),
)

KINDS: dict[str, Kind[Any, Any]] = {
    kind.name: kind for kind in (SIGNAL, RANK, GENERATE, MATCH, RECOMMEND, EVENTS, INGEST, ERASE)
}


def register(kind: Kind[Any, Any]) -> None:
    """Add a kind; call it before importing modules that derive from the table.

    Raises:
        ValueError: another kind has the name, or the method and path.
    """
    for other in KINDS.values():
        if other.name == kind.name or (other.method, other.path) == (kind.method, kind.path):
            raise ValueError(
                f"kind {kind.name!r}: {other.name!r} has that name, or that method and path"
            )
    KINDS[kind.name] = kind
