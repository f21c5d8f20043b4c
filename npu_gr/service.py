"""One request from start to end. READ THIS FILE FIRST.

    signal   history -> decide, reserve, start the pre-infers -> answer at once
    rank     limiter -> deadline -> history -> `ranking.py`: lease its prefix KV -> one pass over the candidates
    generate limiter -> deadline -> history -> `generation.py`: lease its prompt KV -> beam search
    match    limiter -> deadline -> `match.py`: the user's vector -> one pass over the items for all that wait

An instance ranks, generates, or both. Everything that is acquired on the way (slot, deadline, lease) is released by
indentation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Protocol

import msgspec

from npu_gr.admission.brownout import BrownoutControl
from npu_gr.admission.deadline import deadline
from npu_gr.admission.gradient import GradientLimit
from npu_gr.admission.limiter import Limiter, Priority
from npu_gr.engine.scheduler import Scheduler
from npu_gr.errors import BadRequest, DataError, NotFound, Overloaded, UnknownPrefix, Unprocessable
from npu_gr.features.known import KnownPrefixes
from npu_gr.features.store import HistoryStore
from npu_gr.generation import Generation
from npu_gr.match import Matching
from npu_gr.metrics.catalogue import Metrics
from npu_gr.ranking import Ranking, RankingConfig
from npu_gr.request import (
    Brownout,
    CatalogueChange,
    CatalogueInfo,
    Events,
    GenerateAnswer,
    GenerateRequest,
    HistoryRef,
    HistoryReport,
    MatchAnswer,
    MatchRequest,
    ModelInfo,
    RankAnswer,
    RankRequest,
    SignalAnswer,
    SignalRequest,
    UserKey,
    VectorsInfo,
    Verdict,
)


class ServiceConfig(RankingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is accepted, and how strictly."""

    max_inflight: Annotated[int, msgspec.Meta(ge=1)] = 512  # requests being served at once; the next gets 429
    min_inflight: Annotated[int, msgspec.Meta(ge=1)] = 8  # as low as the adaptive limit may go
    adaptive: bool = True  # the limit follows the latency, towards `share` of the objective
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7
    known_prefix_bytes: Annotated[int, msgspec.Meta(ge=0)] = 268_435_456  # histories remembered for deltas


class Objectives(Protocol):
    """How long a request should take."""

    @property
    def rank_s(self) -> float:
        """A rank."""
        ...

    @property
    def generate_s(self) -> float:
        """A generate."""
        ...

    @property
    def match_s(self) -> float:
        """A match."""
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
    ) -> None:
        assert ranking or generation
        self._objectives, self._brownout = objectives, brownout
        self._config, self._scheduler, self._store, self._metrics = config, scheduler, store, metrics
        self._maybe_ranking, self._maybe_generation, self._maybe_matching = ranking, generation, matching
        least, most = min(config.min_inflight, config.max_inflight), config.max_inflight
        adaptive = GradientLimit(least, most, share=config.share) if config.adaptive else None
        self._limiter = Limiter(most, adaptive)
        self._known = KnownPrefixes(config.known_prefix_bytes)
        self._effective_config = effective_config
        self._not_ready = "starting"

    @property
    def ranking(self) -> Ranking:
        """Of this instance.

        Raises:
            NotFound: it has none.
        """
        if self._maybe_ranking is None:
            raise NotFound("this instance does not rank: its configuration has no checkpoint")
        return self._maybe_ranking

    @property
    def generation(self) -> Generation:
        """Of this instance.

        Raises:
            NotFound: it has none.
        """
        if self._maybe_generation is None:
            raise NotFound("this instance does not generate: its configuration has no section generate")
        return self._maybe_generation

    @property
    def matching(self) -> Matching:
        """Of this instance.

        Raises:
            NotFound: it has none.
        """
        if self._maybe_matching is None:
            raise NotFound("this instance does not match: its configuration has no section match")
        return self._maybe_matching

    # ---- the requests

    async def signal(self, request: SignalRequest, budget_s: float) -> SignalAnswer:
        """Decide on the pre-infers and start them; see `Door.signal`."""
        began_s = time.monotonic()
        ranking, generation = self._maybe_ranking, self._maybe_generation
        _check_version(request.model_version, ranking or self.generation)
        verdict = generate_verdict = None
        with self._admitted(Priority.SIGNAL):
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
        self._metrics.signal_decided(first, time.monotonic() - began_s)
        return SignalAnswer(
            verdict=first,
            model_version=(ranking or self.generation).version,
            history=report,
            resident_for_s=(ranking or self.generation).relay.t_life_s if first in _KEPT else 0.0,
            generate_verdict=generate_verdict,
        )

    async def rank(self, request: RankRequest, budget_s: float) -> RankAnswer:
        """Score the candidates; see `Door.rank`."""
        began_s = time.monotonic()
        ranking = self.ranking
        _check_version(request.model_version, ranking)
        if not len(request.candidates):
            raise Unprocessable("candidates: needs at least one")
        with self._admitted(Priority.RANK, budget_s):
            async with deadline(budget_s) as due_s:
                events, first_index = await self._events(request.user, request.history)
                tokens = ranking.tokenize(events, first_index)
                self._remember(request.user, request.history, tokens.report.fingerprint, tokens.events)
                answer = await ranking.rank(request, tokens, due_s, time.monotonic() - began_s)
            self._limiter.served((time.monotonic() - began_s) / self._objectives.rank_s)
        self._metrics.rank_done(answer, time.monotonic() - began_s)
        return answer

    async def generate(self, request: GenerateRequest, budget_s: float) -> GenerateAnswer:
        """The best items after a history; see `Door.generate`."""
        began_s = time.monotonic()
        generation = self.generation
        _check_version(request.model_version, generation)
        with self._admitted(Priority.GENERATE, budget_s):
            async with deadline(budget_s) as due_s:
                events, _ = await self._events(request.user, request.history)
                fingerprint = events.fingerprint()
                self._remember(request.user, request.history, fingerprint, events)
                history_s = time.monotonic() - began_s
                answer = await generation.generate(request, events.items, fingerprint, due_s, history_s)
            self._limiter.served((time.monotonic() - began_s) / self._objectives.generate_s)
        self._metrics.generate_done(answer, time.monotonic() - began_s)
        return answer

    async def match(self, request: MatchRequest, budget_s: float) -> MatchAnswer:
        """The best items for a user by vectors; see `Door.match`."""
        began_s = time.monotonic()
        matching = self.matching
        with self._admitted(Priority.GENERATE, budget_s):
            async with deadline(budget_s) as due_s:
                answer = await matching.match(request, due_s)
            self._limiter.served((time.monotonic() - began_s) / self._objectives.match_s)
        self._metrics.match_done(answer, time.monotonic() - began_s)
        return answer

    # ---- overload

    def check_room(self, priority: Priority) -> None:
        """See `Door.check_room`."""
        self._limiter.check(priority)
        if self._brownout.step is Brownout.REJECT and priority is not Priority.RANK:
            raise Overloaded(f"overloaded: {priority.name.lower()}s are refused, ranks come first")

    @contextmanager
    def _admitted(self, priority: Priority, budget_s: float = float("inf")) -> Iterator[None]:
        self.check_room(priority)
        if (queue_s := self._scheduler.queue_s) > budget_s:
            raise Overloaded(
                f"{queue_s * 1e3:.0f} ms of work wait for the device, the request has {budget_s * 1e3:.0f}"
            )
        with self._limiter.admit(priority):
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
            step = self._brownout.observe(self._scheduler.queue_s / self._objectives.rank_s, time.monotonic())
            for job in self._jobs():
                job.relay.brownout = step

    # ---- the catalogue

    def catalogue(self) -> CatalogueInfo:
        """See `Door.catalogue`."""
        return self.generation.catalogue()

    async def reload_catalogue(self) -> CatalogueInfo:
        """See `Door.reload_catalogue`."""
        try:
            return await self.generation.reload()
        except DataError as error:
            raise Unprocessable(f"catalogue: {error}") from error

    async def update_catalogue(self, change: CatalogueChange) -> CatalogueInfo:
        """See `Door.update_catalogue`."""
        try:
            return await self.generation.update(change)
        except DataError as error:
            raise Unprocessable(f"catalogue: {error}") from error

    def rollback_catalogue(self) -> CatalogueInfo:
        """See `Door.rollback_catalogue`."""
        try:
            return self.generation.rollback()
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
        if self._maybe_ranking is not None and len(events):
            last = len(self._maybe_ranking.model.actions) - 1
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
        for job in self._jobs():
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
        longest = max(job.max_events for job in self._jobs())
        stored = await self._store.read(user, longest + self._config.cut_step_tokens)
        return stored.events, stored.first_index

    def _remember(self, user: UserKey, ref: HistoryRef, fingerprint: str, events: Events) -> None:
        """So that a later request may send a delta."""
        if ref.events is not None:
            self._known.remember(user, fingerprint, events)

    # ---- what the instance says about itself

    def _jobs(self) -> list[Ranking | Generation]:
        return [job for job in (self._maybe_ranking, self._maybe_generation) if job is not None]

    def models(self) -> list[ModelInfo]:
        """What is being served."""
        return [job.model for job in self._jobs()]

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
        for job in self._jobs():
            await job.stop()
        if self._maybe_matching is not None:
            await self._maybe_matching.stop()


def _check_version(version: str | None, job: Ranking | Generation) -> None:
    if version is not None and version != job.version:
        raise NotFound(f"model_version: {version!r} is not served; {job.version!r} is")


_KEPT = (Verdict.PREINFER, Verdict.EXTEND, Verdict.RELOAD, Verdict.ALREADY_RESIDENT, Verdict.ALREADY_RUNNING)
_MAX_FAILURES = 3
_WATCH_S = 0.05
