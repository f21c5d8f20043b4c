"""One request from start to end. READ THIS FILE FIRST.

    signal   history -> relay.signal: decide, reserve, start the pre-infer -> answer at once
    rank     limiter -> deadline -> history -> lease its prefix KV -> one pass over the candidates -> answer
    generate limiter -> deadline -> history -> `generation.py`: lease its prompt KV -> beam search -> answer

Everything that is acquired on the way (slot, deadline, lease) is released by indentation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Annotated, Any

import msgspec
import numpy as np

from npu_gr.admission.deadline import deadline
from npu_gr.admission.limiter import Limiter
from npu_gr.catalog.items import UNKNOWN, ItemVocabulary
from npu_gr.catalog.tokens import Tokens, tokenize
from npu_gr.engine.engine import Engine, Pass, Scored
from npu_gr.errors import BadRequest, DataError, DeviceError, NotFound, NpuGrError, UnknownPrefix, Unprocessable
from npu_gr.features.known import KnownPrefixes
from npu_gr.features.store import HistoryStore
from npu_gr.generation import Generation
from npu_gr.metrics.catalogue import Metrics
from npu_gr.relay.relay import Lease, Relay
from npu_gr.request import (
    F32,
    I64,
    CatalogueInfo,
    Events,
    GenerateAnswer,
    GenerateRequest,
    HistoryRef,
    ModelInfo,
    Outcome,
    RankAnswer,
    RankRequest,
    Reason,
    SignalAnswer,
    SignalRequest,
    UserKey,
    Verdict,
)

log = logging.getLogger(__name__)


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is accepted, and how strictly."""

    max_inflight: Annotated[int, msgspec.Meta(ge=1)] = 512  # requests being served at once; the next gets 429
    max_history_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None  # None = the model's own limit
    cut_step_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256  # the window's start moves in steps of this
    unknown_items: str = "ignore"  # ignore (and count) | refuse
    known_prefix_bytes: Annotated[int, msgspec.Meta(ge=0)] = 268_435_456  # histories remembered for deltas
    selfcheck_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.001  # of cached ranks computed again, cold
    selfcheck_max_drift: Annotated[float, msgspec.Meta(gt=0)] = 1e-3  # of the logits' standard deviation

    def __post_init__(self) -> None:
        if self.unknown_items not in ("ignore", "refuse"):
            raise ValueError(f"unknown_items: {self.unknown_items!r} is neither 'ignore' nor 'refuse'")


class Service:
    """The door's other side: everything a request needs, built once by `app.py`."""

    def __init__(
        self,
        config: ServiceConfig,
        model: ModelInfo,
        vocabulary: ItemVocabulary,
        engine: Engine,
        relay: Relay[Tokens],
        store: HistoryStore | None,
        metrics: Metrics,
        effective_config: dict[str, Any],
        generation: Generation | None = None,
    ) -> None:
        self._config, self._model, self._vocabulary = config, model, vocabulary
        self._engine, self._relay, self._store, self._metrics = engine, relay, store, metrics
        self._maybe_generation = generation
        self._limiter = Limiter(config.max_inflight)
        self._known = KnownPrefixes(config.known_prefix_bytes)
        self._max_tokens = config.max_history_tokens or model.max_history_tokens
        self._effective_config = effective_config
        self._random = np.random.default_rng(0)
        self._background: set[asyncio.Task[None]] = set()
        self._not_ready = "starting"

    # ---- the two requests

    async def signal(self, request: SignalRequest, budget_s: float) -> SignalAnswer:
        """Decide on a pre-infer and start it; see `Door.signal`."""
        began_s = time.monotonic()
        self._check_version(request.model_version)
        with self._limiter.admit():
            async with deadline(budget_s):
                events, first_index = await self._events(request.user, request.history)
            tokens = self._tokenize(request.user, request.history, events, first_index)
            verdict = self._relay.signal(request.user, tokens)
            generation, generate_verdict = self._maybe_generation, None
            if generation is not None:
                generate_verdict = await generation.signal(request.user, events.items)
        self._metrics.signal_decided(verdict, time.monotonic() - began_s)
        produced = verdict in _KEPT
        return SignalAnswer(
            verdict=verdict,
            model_version=self._model.version,
            history=tokens.report,
            resident_for_s=self._relay.t_life_s if produced else 0.0,
            generate_verdict=generate_verdict,
        )

    async def rank(self, request: RankRequest, budget_s: float) -> RankAnswer:
        """Score the candidates; see `Door.rank`."""
        began_s = time.monotonic()
        self._check_version(request.model_version)
        if not len(request.candidates):
            raise Unprocessable("candidates: needs at least one")
        with self._limiter.admit():
            async with deadline(budget_s) as due_s:
                events, first_index = await self._events(request.user, request.history)
                tokens = self._tokenize(request.user, request.history, events, first_index)
                rows, known = self._candidates(request.candidates)
                shown_at = int(time.time()) if request.timestamp is None else request.timestamp
                history_s = time.monotonic() - began_s
                async with self._relay.lease(request.user, tokens, len(rows), due_s) as lease:
                    lease_s = time.monotonic() - began_s - history_s
                    lease, scored = await self._score(tokens, rows, shown_at, lease, due_s)
        if lease.cached and self._random.random() < self._config.selfcheck_ratio:
            self._own(self._selfcheck(tokens, rows, shown_at, scored.logits))
        answer = RankAnswer(
            model_version=self._model.version,
            outcome=lease.outcome,
            reason=lease.reason,
            scores=self._scores(scored.logits, known),
            top=self._top(request, scored.logits, known),
            history=tokens.report,
            prefix_tokens=lease.cached.num_tokens if lease.cached else 0,
            unknown_candidates=len(known) - len(rows),
            stages_s={
                "history": history_s,
                "lease": lease_s,
                "queue": scored.queue_s,
                "device": scored.device_s,
            },
        )
        self._metrics.rank_done(answer, time.monotonic() - began_s)
        return answer

    async def _score(
        self, tokens: Tokens, rows: I64, shown_at: int, lease: Lease, due_s: float
    ) -> tuple[Lease, Scored]:
        """One pass; if the device fails with a prefix in hand, one more without it."""
        work = Pass(tokens, lease.first_token, rows, shown_at, cached=lease.cached, keep=lease.keep)
        try:
            return lease, await self._engine.rank(work, due_s)
        except DeviceError:
            if not lease.cached and not lease.keep:
                raise
            self._metrics.relay_error("read")
        alone = Lease(outcome=Outcome.MISS_FULL, reason=Reason.READ_FAILED)
        return alone, await self._engine.rank(Pass(tokens, 0, rows, shown_at), due_s)

    # ---- generate

    async def generate(self, request: GenerateRequest, budget_s: float) -> GenerateAnswer:
        """The best items after a history; see `Door.generate`."""
        began_s = time.monotonic()
        generation = self._generation
        if request.model_version not in (None, generation.version):
            raise NotFound(f"model_version: {request.model_version!r} is not served; {generation.version!r} is")
        with self._limiter.admit():
            async with deadline(budget_s) as due_s:
                events, _ = await self._events(request.user, request.history)
                fingerprint = events.fingerprint()
                if request.history.events is not None:
                    self._known.remember(request.user, fingerprint, events)
                history_s = time.monotonic() - began_s
                answer = await generation.generate(request, events.items, fingerprint, due_s, history_s)
        self._metrics.generate_done(answer, time.monotonic() - began_s)
        return answer

    @property
    def _generation(self) -> Generation:
        if self._maybe_generation is None:
            raise NotFound("this instance does not generate: its configuration has no section generate")
        return self._maybe_generation

    def catalogue(self) -> CatalogueInfo:
        """See `Door.catalogue`."""
        return self._generation.catalogue()

    async def reload_catalogue(self) -> CatalogueInfo:
        """See `Door.reload_catalogue`."""
        try:
            return await self._generation.reload()
        except DataError as error:
            raise Unprocessable(f"catalogue: {error}") from error

    def rollback_catalogue(self) -> CatalogueInfo:
        """See `Door.rollback_catalogue`."""
        try:
            return self._generation.rollback()
        except DataError as error:
            raise Unprocessable(f"catalogue: {error}") from error

    # ---- behaviours

    async def append_events(self, user: UserKey, events: Events, budget_s: float) -> int:
        """Append behaviours durably; see `Door.append_events`."""
        if self._store is None:
            raise Unprocessable("events: this instance has no history store (features.kind is none)")
        if len(events) and not 0 <= int(events.actions.min()) <= int(events.actions.max()) < self._num_actions:
            raise Unprocessable(f"events.actions: must be 0..{self._num_actions - 1}")
        with self._limiter.admit():
            async with deadline(budget_s):
                return await self._store.append(user, events)

    async def erase_user(self, user: UserKey) -> None:
        """Forget the user; see `Door.erase_user`."""
        self._known.forget(user)
        if self._store is not None:
            await self._store.erase(user)
        await self._relay.erase(user)
        if self._maybe_generation is not None:
            await self._maybe_generation.relay.erase(user)

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
        stored = await self._store.read(user, self._max_tokens + self._config.cut_step_tokens)
        return stored.events, stored.first_index

    def _tokenize(self, user: UserKey, ref: HistoryRef, events: Events, first_index: int) -> Tokens:
        """The behaviours as the ranker reads them; remembered, so that a later request may send a delta."""
        tokens = tokenize(
            events,
            self._vocabulary,
            self._num_actions,
            max_tokens=self._max_tokens,
            cut_step_tokens=self._config.cut_step_tokens,
            refuse_unknown=self._config.unknown_items == "refuse",
            first_index=first_index,
        )
        if ref.events is not None:
            self._known.remember(user, tokens.report.fingerprint, tokens.events)
        self._metrics.history_read(tokens.report)
        return tokens

    # ---- candidates and scores

    def _candidates(self, ids: I64) -> tuple[I64, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Rows of the known candidates, and which of the given ones they are."""
        rows = self._vocabulary.rows(ids)
        known = rows != UNKNOWN
        missing = len(ids) - int(np.count_nonzero(known))
        if missing:
            if self._config.unknown_items == "refuse":
                raise Unprocessable(f"candidates: {missing} unknown, the first is {int(ids[~known][0])}")
            rows = rows[known]
        return rows, known

    def _scores(self, logits: F32, known: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[str, F32]:
        """Logits per task in the order of the request; NaN where the catalogue lacks the item."""
        scores = {}
        for index, task in enumerate(self._model.tasks):
            column = np.full(len(known), np.nan, np.float32)
            column[known] = logits[:, index]
            scores[task] = column
        return scores

    def _top(self, request: RankRequest, logits: F32, known: np.ndarray[Any, np.dtype[np.bool_]]) -> I64 | None:
        """The best candidates by the first task; of equals, the earlier one."""
        if request.top_k is None:
            return None
        best = np.argsort(-logits[:, 0], kind="stable")[: request.top_k]
        top: I64 = request.candidates[known][best]
        return top

    # ---- the self-check

    async def _selfcheck(self, tokens: Tokens, rows: I64, shown_at: int, cached: F32) -> None:
        """Score a served request again without its prefix KV, when the device is idle; export the drift."""
        try:
            cold = await self._engine.rank(Pass(tokens, 0, rows, shown_at), time.monotonic() + _SELFCHECK_S)
        except NpuGrError:
            return  # no time for it now
        drift = float(np.abs(cold.logits - cached).max() / max(float(cold.logits.std()), 1e-6))
        self._metrics.drift(drift, drift > self._config.selfcheck_max_drift)
        if drift > self._config.selfcheck_max_drift:
            log.error("self-check: cached scores drift by %.2e of their standard deviation", drift)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ---- what the instance says about itself

    @property
    def _num_actions(self) -> int:
        return len(self._model.actions)

    def models(self) -> list[ModelInfo]:
        """What is being served."""
        return [self._model]

    def effective_config(self) -> dict[str, Any]:
        """The configuration in force."""
        return self._effective_config

    def is_ready(self) -> tuple[bool, str]:
        """Whether new work is welcome, and if not, why."""
        if self._not_ready:
            return False, self._not_ready
        failures = self._engine.scheduler.failures_in_a_row
        if failures >= _MAX_FAILURES:
            return False, f"the device failed {failures} times in a row"
        return True, ""

    def set_ready(self, why_not: str = "") -> None:
        """Become ready, or with a reason, unready."""
        self._not_ready = why_not

    def _check_version(self, version: str | None) -> None:
        if version is not None and version != self._model.version:
            raise NotFound(f"model_version: {version!r} is not served; {self._model.version!r} is")

    async def stop(self) -> None:
        """End background work; then the relay's."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._relay.stop()
        if self._maybe_generation is not None:
            await self._maybe_generation.relay.stop()


_KEPT = (Verdict.PREINFER, Verdict.RELOAD, Verdict.ALREADY_RESIDENT, Verdict.ALREADY_RUNNING)
_SELFCHECK_S = 60.0
_MAX_FAILURES = 3
