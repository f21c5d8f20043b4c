"""One request from start to end. READ THIS FILE FIRST.

    signal   history -> decide, reserve, start the pre-infers -> answer at once
    rank     limiter -> deadline -> history -> `ranking.py`: lease its prefix KV -> one pass over the candidates
    generate limiter -> deadline -> history -> `generation.py`: lease its prompt KV -> beam search
    match    limiter -> deadline -> history -> `match.py`: the user's vector -> one pass over the items for all
    recommend  limiter -> deadline -> history -> `recommend.py`: signal, sources, hook, rank

An instance ranks, generates, or both. Everything that is acquired on the way (slot, deadline, lease) is released by
indentation.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Annotated, Any, Protocol, cast

import msgspec

from npu_gr.admission.brownout import BrownoutControl
from npu_gr.admission.deadline import deadline
from npu_gr.admission.gate import Gate
from npu_gr.admission.gradient import GradientLimit
from npu_gr.admission.limiter import Expected, Limiter
from npu_gr.core.errors import (
    BadRequest,
    ConfigError,
    DataError,
    NotFound,
    Overloaded,
    Unavailable,
    UnknownPrefix,
    Unprocessable,
)
from npu_gr.core.kinds import A, Kind, Priority, Q
from npu_gr.core.request import (
    I64,
    Brownout,
    CatalogueChange,
    CatalogueInfo,
    EraseAnswer,
    EraseRequest,
    Events,
    EventsAnswer,
    EventsRequest,
    GenerateAnswer,
    GenerateRequest,
    HistoryRef,
    HistoryReport,
    MatchAnswer,
    MatchRequest,
    ModelInfo,
    RankAnswer,
    RankRequest,
    RecommendAnswer,
    RecommendRequest,
    SignalAnswer,
    SignalRequest,
    UserKey,
    VectorsInfo,
    Verdict,
)
from npu_gr.engine.scheduler import Scheduler
from npu_gr.features.prefix_history_cache import KnownPrefixes
from npu_gr.features.store import HistoryStore
from npu_gr.jobs.generate import Generation
from npu_gr.jobs.match import Matching
from npu_gr.jobs.rank import Ranking, RankingConfig
from npu_gr.jobs.recommend import Cascade
from npu_gr.metrics.registry import Metrics
from npu_gr.service.versions import Versions


class ServiceConfig(RankingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is accepted, and how strictly."""

    max_inflight: Annotated[int, msgspec.Meta(ge=1)] = 512  # requests being served at once; the next gets 429
    min_inflight: Annotated[int, msgspec.Meta(ge=1)] = 8  # as low as the adaptive limit may go
    adaptive: bool = True  # the limit follows the latency, towards `share` of the objective, and so does `gate.py`
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7
    known_prefix_bytes: Annotated[int, msgspec.Meta(ge=0)] = 268_435_456  # histories remembered for deltas


class Objectives(Protocol):
    """How long a request should take."""

    def objective_s(self, kind: str) -> float:
        """Seconds, of this kind of request."""
        ...


class Service:
    """The door's other side: everything a request needs, built once by `app.py`."""

    def __init__(
        self,
        config: ServiceConfig,
        scheduler: Scheduler,
        ranking: Ranking | None,
        generation: Generation | None,
        store: HistoryStore | None,
        metrics: Metrics,
        effective_config: dict[str, Any],
        objectives: Objectives,
        brownout: BrownoutControl,
        matching: Matching | None = None,
        cascade: Cascade | None = None,
    ) -> None:
        self._objectives, self._brownout = objectives, brownout
        self._config, self._scheduler, self._store, self._metrics = config, scheduler, store, metrics
        self.versions = Versions(ranking, generation)
        self.versions.on_change = metrics.build_info
        self._maybe_matching, self._maybe_cascade = matching, cascade
        self.on_reload: Callable[[], Awaitable[None]] = _nothing_to_reload
        self._gates: defaultdict[str, Gate] = defaultdict(Gate)  # by kind of request
        self._limiter = Limiter(config.max_inflight, _adaptive(config))
        self._known = KnownPrefixes(config.known_prefix_bytes)
        self._effective_config = effective_config
        self._not_ready = "starting"

    @property
    def ranking(self) -> Ranking:
        """See `Versions`."""
        return self.versions.ranking

    @property
    def generation(self) -> Generation:
        """See `Versions`."""
        return self.versions.generation

    @property
    def matching(self) -> Matching:
        """Of this instance.

        Raises:
            NotFound: it has none.
        """
        if self._maybe_matching is None:
            raise NotFound("this instance does not match: its configuration has no section match")
        return self._maybe_matching

    @property
    def cascade(self) -> Cascade:
        """Of this instance.

        Raises:
            NotFound: it has none.
        """
        if self._maybe_cascade is None:
            raise NotFound("this instance does not recommend: its configuration has no section recommend")
        return self._maybe_cascade

    # ---- the requests

    async def serve(self, kind: Kind[Q, A], request: Q, budget_s: float) -> A:
        """Answer one request of any kind; see `ServiceProtocol.serve`."""
        if isinstance(request, EventsRequest):
            num_events = await self.append_events(request.user, request.events, budget_s)
            return cast("A", EventsAnswer(num_events=num_events))
        if isinstance(request, EraseRequest):
            await self.erase_user(request.user)
            return cast("A", EraseAnswer())
        answer: A = await getattr(self, kind.name)(request, budget_s)
        return answer

    async def signal(self, request: SignalRequest, budget_s: float) -> SignalAnswer:
        """Decide on the pre-infers and start them; see `Door.signal`."""
        began_at = time.monotonic()
        versions, version = self.versions, request.model_version
        ranking = versions.ranker(version) if versions.maybe_ranking else None
        generation = versions.maybe_generation if ranking else versions.generator(version)
        verdict = generate_verdict = None
        with self._admitted(Priority.SIGNAL), _used(ranking), _used(generation):
            async with deadline(budget_s):
                events, first_index = await self._events(request.user, request.history)
            if ranking is not None:
                tokens = ranking.tokenize(events, first_index)
                report = tokens.report
                self._remember(request.user, request.history, report.fingerprint, tokens.events)
                verdict = ranking.signal(request.user, tokens, request.num_candidates)
            else:
                report = HistoryReport(fingerprint=events.fingerprint(), num_tokens=len(events))
                self._remember(request.user, request.history, report.fingerprint, events)
            if generation is not None:
                generate_verdict = await generation.signal(request.user, events.items)
        first = verdict or generate_verdict
        assert first is not None
        self._metrics.signal_decided(first, time.monotonic() - began_at)
        return SignalAnswer(
            verdict=first,
            model_version=(ranking or generation or self.generation).version,
            history=report,
            resident_for_s=(ranking or generation or self.generation).relay.t_life_s if first in _KEPT else 0.0,
            generate_verdict=generate_verdict,
        )

    async def rank(self, request: RankRequest, budget_s: float) -> RankAnswer:
        """Score the candidates; see `Door.rank`."""
        began_at = time.monotonic()
        ranking = self.versions.ranker(request.model_version)
        if not len(request.candidates):
            raise Unprocessable("candidates: needs at least one")
        with self._admitted(Priority.RANK, budget_s, "rank"), ranking.use:
            async with deadline(budget_s) as deadline_at:
                events, first_index = await self._events(request.user, request.history)
                tokens = ranking.tokenize(events, first_index)
                self._remember(request.user, request.history, tokens.report.fingerprint, tokens.events)
                answer = await ranking.rank(request, tokens, deadline_at, time.monotonic() - began_at)
        self._metrics.rank_done(answer, time.monotonic() - began_at)
        return answer

    async def generate(self, request: GenerateRequest, budget_s: float) -> GenerateAnswer:
        """The best items after a history; see `Door.generate`."""
        began_at = time.monotonic()
        generation = self.versions.generator(request.model_version)
        with self._admitted(Priority.GENERATE, budget_s, "generate"), generation.use:
            async with deadline(budget_s) as deadline_at:
                events, _ = await self._events(request.user, request.history)
                fingerprint = events.fingerprint()
                self._remember(request.user, request.history, fingerprint, events)
                history_s = time.monotonic() - began_at
                answer = await generation.generate(request, events.items, fingerprint, deadline_at, history_s)
        self._metrics.generate_done(answer, time.monotonic() - began_at)
        return answer

    async def match(self, request: MatchRequest, budget_s: float) -> MatchAnswer:
        """The best items for a user by vectors; see `Door.match`."""
        began_at = time.monotonic()
        matching = self.matching
        with self._admitted(Priority.GENERATE, budget_s, "match"):
            async with deadline(budget_s) as deadline_at:
                history = await self._items_for_match(request, matching.config.max_history_events)
                answer = await matching.match(request, history, deadline_at)
        self._metrics.match_done(answer, time.monotonic() - began_at)
        return answer

    async def _items_for_match(self, request: MatchRequest, most: int) -> I64:
        """Of the request or the store. Vectors answer without any, so a store that fails fails no match."""
        if request.history.events is not None:
            return request.history.events.items
        if self._store is not None:
            with suppress(Unavailable):
                return (await self._store.read(request.user, most)).events.items
        return Events.empty().items

    async def recommend(self, request: RecommendRequest, budget_s: float) -> RecommendAnswer:
        """Signal, retrieval, pre-processing and rank in one; see `Door.recommend`."""
        began_at = time.monotonic()
        cascade, ranking = self.cascade, self.versions.ranker(request.model_version)
        with self._admitted(Priority.GENERATE, budget_s, "recommend"), ranking.use:
            async with deadline(budget_s) as deadline_at:
                events, first_index = await self._events(request.user, request.history)
                tokens = ranking.tokenize(events, first_index)
                self._remember(request.user, request.history, tokens.report.fingerprint, tokens.events)
                answer = await cascade.recommend(
                    request, ranking, events, tokens, deadline_at, time.monotonic() - began_at
                )
        self._metrics.recommend_done(answer, time.monotonic() - began_at)
        return answer

    # ---- overload

    def check_room(self, priority: Priority) -> None:
        """See `Door.check_room`."""
        self._limiter.check(priority)
        first = Priority.RANK if self.versions.maybe_ranking else Priority.GENERATE  # what this instance is there for
        if self._brownout.step is Brownout.REJECT and priority.value < first.value:
            raise Overloaded(f"overloaded: {priority.name.lower()}s are refused, {first.name.lower()}s come first")

    @contextmanager
    def _admitted(self, priority: Priority, budget_s: float = float("inf"), kind: str | None = None) -> Iterator[None]:
        """`kind`: whose objective it has; None = none, it does not use the device."""
        self.check_room(priority)
        expected = None
        if kind is not None:
            objective_s = self._objectives.objective_s(kind)
            expected = Expected(objective_s, self._scheduler.wait_s(objective_s), self._gates[kind])
            if expected.wait_s > budget_s:
                raise Overloaded(
                    f"it would wait {expected.wait_s * 1e3:.0f} ms for the device, it has {budget_s * 1e3:.0f}"
                )
        with self._limiter.admit(priority, expected):
            yield

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Follow the load while the block runs, and give up what `brownout.py` says."""
        task = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            step = self._brownout.observe(self._scheduler.pressure, time.monotonic())
            for job in self.versions.current():
                job.relay.settings.brownout = step

    # ---- versions

    async def reload_models(self) -> list[ModelInfo]:
        """See `Door.reload_models`."""
        try:
            await self.on_reload()
        except ConfigError as error:
            raise Unprocessable(f"reload: {error}") from error
        return self.versions.models()

    def become(
        self, config: ServiceConfig, objectives: Objectives, brownout: BrownoutControl, effective_config: dict[str, Any]
    ) -> None:
        """Other settings from now on. The step of brown-out begins anew; what is remembered stays."""
        if (config.max_inflight, config.min_inflight, config.adaptive, config.share) != (
            self._config.max_inflight,
            self._config.min_inflight,
            self._config.adaptive,
            self._config.share,
        ):
            self._limiter.become(config.max_inflight, _adaptive(config))
        self._known.resize(config.known_prefix_bytes)
        self._config, self._objectives, self._brownout = config, objectives, brownout
        self._effective_config = effective_config
        if self.versions.maybe_ranking is not None:
            self.versions.maybe_ranking.become(config)

    # ---- the catalogue

    def catalogue(self) -> CatalogueInfo:
        """See `Door.catalogue`."""
        return self.generation.items.info()

    async def reload_catalogue(self) -> CatalogueInfo:
        """See `Door.reload_catalogue`."""
        try:
            return await self.generation.items.reload()
        except DataError as error:
            raise Unprocessable(f"catalogue: {error}") from error

    async def update_catalogue(self, change: CatalogueChange) -> CatalogueInfo:
        """See `Door.update_catalogue`."""
        try:
            return await self.generation.items.update(change)
        except DataError as error:
            raise Unprocessable(f"catalogue: {error}") from error

    def rollback_catalogue(self) -> CatalogueInfo:
        """See `Door.rollback_catalogue`."""
        try:
            return self.generation.items.rollback()
        except DataError as error:
            raise Unprocessable(f"catalogue: {error}") from error

    # ---- the vectors

    def vectors(self) -> VectorsInfo:
        """See `Door.vectors`."""
        return self.matching.vectors()

    async def reload_vectors(self) -> VectorsInfo:
        """See `Door.reload_vectors`."""
        try:
            return await self.matching.reload()
        except DataError as error:
            raise Unprocessable(f"vectors: {error}") from error

    def rollback_vectors(self) -> VectorsInfo:
        """See `Door.rollback_vectors`."""
        try:
            return self.matching.rollback()
        except DataError as error:
            raise Unprocessable(f"vectors: {error}") from error

    # ---- behaviours

    async def append_events(self, user: UserKey, events: Events, budget_s: float) -> int:
        """Append behaviours durably; see `Door.append_events`."""
        if self._store is None:
            raise Unprocessable("events: this instance has no history store (features.kind is none)")
        if self.versions.maybe_ranking is not None and len(events):
            last = len(self.versions.maybe_ranking.model.actions) - 1
            if not 0 <= int(events.actions.min()) <= int(events.actions.max()) <= last:
                raise Unprocessable(f"events.actions: must be 0..{last}")
        with self._admitted(Priority.RANK):
            async with deadline(budget_s):
                return await self._store.append(user, events)

    async def erase_user(self, user: UserKey) -> None:
        """Forget the user; see `Door.erase_user`."""
        self._known.forget(user)
        if self._store is not None:
            await self._store.erase(user)
        for job in self.versions.all():
            await job.relay.erase(user)

    async def _events(self, user: UserKey, ref: HistoryRef) -> tuple[Events, int]:
        """The request's behaviours, and the index of the first one in the user's whole history.

        Raises:
            UnknownPrefix: a delta on a prefix that nobody here remembers.
        """
        if ref.base is not None:
            base = self._known.find(user, ref.base)
            if base is None:
                raise UnknownPrefix("base: unknown here or forgotten; send the whole history")
            return (base if ref.events is None else base + ref.events), 0
        if ref.events is not None:
            return ref.events, 0
        if self._store is None:
            raise BadRequest("history: missing, and this instance has no history store")
        longest = max(job.max_events for job in self.versions.current())
        stored = await self._store.read(user, longest + self._config.cut_step_tokens)
        return stored.events, stored.first_index

    def _remember(self, user: UserKey, ref: HistoryRef, fingerprint: str, events: Events) -> None:
        """So that a later request may send a delta."""
        if ref.events is not None:
            self._known.remember(user, fingerprint, events)

    # ---- what the instance says about itself

    def models(self) -> list[ModelInfo]:
        """What is being served."""
        return self.versions.models()

    def effective_config(self) -> dict[str, Any]:
        """The configuration in force."""
        return self._effective_config

    def is_ready(self) -> tuple[bool, str]:
        """Whether new work is welcome, and if not, why."""
        if self._not_ready:
            return False, self._not_ready
        failures = self._scheduler.failures_in_a_row
        if failures >= _MAX_FAILURES:
            return False, f"the device failed {failures} times in a row"
        return True, ""

    def set_ready(self, why_not: str = "") -> None:
        """Become ready, or with a reason, unready."""
        self._not_ready = why_not

    async def stop(self) -> None:
        """End what runs in the background."""
        if self._maybe_cascade is not None:
            self._maybe_cascade.stop()
        await self.versions.stop()
        if self._maybe_matching is not None:
            await self._maybe_matching.stop()


def _used(job: Ranking | Generation | None) -> AbstractContextManager[None]:
    return nullcontext() if job is None else job.use


def _adaptive(config: ServiceConfig) -> GradientLimit | None:
    least, most = min(config.min_inflight, config.max_inflight), config.max_inflight
    return GradientLimit(least, most, share=config.share) if config.adaptive else None


async def _nothing_to_reload() -> None:
    raise ConfigError("this instance was not started from a configuration file")


_KEPT = (Verdict.PREINFER, Verdict.EXTEND, Verdict.RELOAD, Verdict.ALREADY_RESIDENT, Verdict.ALREADY_RUNNING)
_MAX_FAILURES = 3
_WATCH_S = 0.05
