"""The one table of what an instance serves.

Everything that lists the kinds of requests derives from it.

Routes, OpenAPI, codecs, metrics, SLO rules, alerts, dashboards, the status page, the access log,
the recorder, replay, the router and the simulator read `KINDS`; none of them keeps a list of its
own. A new kind costs one entry here, one job (`npu_gr.handlers`), one codec
(`npu_gr.server.schemas`), and its two runbook pages.
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
    """The importance of a kind: at the door, a request waits for every request of a smaller value."""

    RANK = 0  # the cascade waits for it
    GENERATE = 1  # retrieval has other sources
    SIGNAL = 2  # an optimisation


class Scope(StrEnum):
    """What an API key may be allowed to do."""

    INFER = "infer"  # signals, ranks, generates, matches, recommends
    INGEST = "ingest"  # events, of one user and in bulk
    ERASE = "erase"  # forget users
    OBSERVE = "observe"  # metrics, status, models
    ADMIN = "admin"  # reload, roll back, change the catalogue, record, profile


class Routing(StrEnum):
    """The router's treatment of a kind: how it places a request, and whether it may send the request again."""

    SIGNAL = "signal"  # by user; chooses the instance; sent again only if no instance has begun it
    # by user, to the instance that the signal chose; sent again if the first instance fails
    FOLLOW = "follow"
    ONCE = "once"  # by user; it changes something, so it is sent once
    BY_LOAD = "by_load"  # about many users: to an instance with little load, and sent once
    EVERYWHERE = "everywhere"  # to every instance


class Scored(StrEnum):
    """The objects that the scores in an answer belong to."""

    CANDIDATES = "candidates"  # one score a task for each candidate of the request
    ITEMS = "items"  # one score for each item that the answer chose
    NOTHING = "nothing"  # the answer has no scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[Q, A]):
    """One kind of request: what it is called, what it promises, and how every part of the service treats it."""

    name: str  # metric label, log field, configuration prefix: `slo.<name>_s`
    plural: str  # in messages: "matches are rejected"
    summary: str  # one line, for OpenAPI and the dashboards
    method: str = "POST"
    path: str  # of the route; `{user_id}` is the rest of the path
    status: int = 200  # of a good answer
    request: type[Q]
    answer: type[A]
    # of the configuration, without which an instance does not serve it; None = always
    section: str | None = None
    objective_s: float  # default of `slo.<name>_s`: an answer within it is in time
    # a fast burn of its error budget pages; otherwise it opens a ticket
    wakes_somebody: bool = True
    priority: Priority
    scope: Scope = Scope.INFER  # that a key must have
    routing: Routing
    uses_device: bool  # it waits for the device, so admission forecasts its wait
    must_finish: bool = False  # never rejected for load and never cut short by a deadline
    needs_ready: bool = False  # an instance that starts or drains rejects it at once
    scored: Scored = Scored.NOTHING
    takes_delta: bool = False  # its history may be a delta on a known prefix
    is_recorded: bool = True  # the recorder writes it, and replay can send it again
    # of its answer's `stages_s`, in order; "http" (reading, parsing, writing) is added by HTTP
    stages: tuple[str, ...]
    label: str | None = None  # of `npu_gr_<name>_duration_seconds`: what its answers differ by
    # the values of `label`; each answer names its own in `label_value`
    labels: tuple[str, ...] = ()

    @property
    def leases_prefix(self) -> bool:
        """Whether its job leases prefix KV; then its answers differ by how they got it."""
        return self.label == "outcome"

    @property
    def is_model(self) -> bool:
        """Whether the Open Inference Protocol has it as a model: what it answers are scores."""
        return self.scored is not Scored.NOTHING

    @property
    def paths(self) -> tuple[str, ...]:
        """The routes that serve it, with one method: its own, then those of the Open Inference Protocol."""
        if not self.is_model:
            return (self.path,)
        model = f"/v2/models/{self.name}"
        return (self.path, f"{model}/infer", f"{model}/versions/{{version}}/infer")

    @property
    def title(self) -> str:
        """The name as it begins a sentence or an alert."""
        return self.name.title()


SIGNAL: Kind[SignalRequest, SignalAnswer] = Kind(
    name="signal",
    plural="signals",
    summary="Pre-infer a user's prefix.",
    path="/v1/signal",
    status=202,
    request=SignalRequest,
    answer=SignalAnswer,
    objective_s=0.02,
    wakes_somebody=False,  # a rank does without its prefix
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
    wakes_somebody=False,  # who sends in bulk sends again
    priority=Priority.SIGNAL,
    scope=Scope.INGEST,
    routing=Routing.BY_LOAD,
    uses_device=False,
    # a record is about one user, so that it can be hidden when that user is erased
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
    must_finish=True,  # half an erasure is none
    # a log must not gain a line about a user because the user asked to be forgotten
    is_recorded=False,
    stages=("store", "tiers"),
)

KINDS: dict[str, Kind[Any, Any]] = {
    kind.name: kind for kind in (SIGNAL, RANK, GENERATE, MATCH, RECOMMEND, EVENTS, INGEST, ERASE)
}


def register(kind: Kind[Any, Any]) -> None:
    """Add a kind to the table. Call it before the modules that derive from the table are imported.

    Raises:
        ValueError: the name, or the method and path, are taken.
    """
    for other in KINDS.values():
        if other.name == kind.name or (other.method, other.path) == (kind.method, kind.path):
            raise ValueError(
                f"kind {kind.name!r}: {other.name!r} has that name, or that method and path"
            )
    KINDS[kind.name] = kind
