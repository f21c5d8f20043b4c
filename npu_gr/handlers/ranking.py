"""One version of the ranker: it scores candidates against the user's prefix KV.

    history -> tokens -> lease of the prefix KV -> one pass over the candidates -> scores

`Ranking` is a checkpoint with its items and its relay; `LateFeatureReader` reads the features that
come with a rank, behind the cached prefix: what the request says, and what is computed here.
`versions.py` picks the version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from npu_gr.catalogue.names import EMPTY, ItemNames, names_of
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import DeviceError, NpuGrError, Unprocessable
from npu_gr.core.feature_schema.columns import Columns, ModelFeatures, OneRow
from npu_gr.core.feature_schema.computed import CrossFeatures, time_column
from npu_gr.core.feature_schema.encode import Encoded
from npu_gr.core.history import UserKey
from npu_gr.core.lifetime import InUse
from npu_gr.core.names import ActionNames
from npu_gr.core.request import Outcome, RankAnswer, RankRequest, Reason, Verdict
from npu_gr.core.served import ModelInfo
from npu_gr.engine.rank_engine import (
    NONE_LATE,
    FindPass,
    LateFeatures,
    NextItems,
    PrefetchedScores,
    RankEngine,
    RankPass,
    RankScores,
)
from npu_gr.handlers.base import Call
from npu_gr.handlers.config import RankingConfig
from npu_gr.handlers.histories import UserHistory
from npu_gr.handlers.scored_items import ScoredItems
from npu_gr.metrics.registry import Metrics
from npu_gr.model.blend import BlendSum, ScoreBlend
from npu_gr.model.history_tokenizer import UNKNOWN, ItemVocabulary, Tokens, tokenize
from npu_gr.model.hstu_input import cross_features
from npu_gr.relay.relay import Lease, Relay


class LateFeatureReader:
    """Reads requests as one version of the ranker wants them."""

    def __init__(self, features: ModelFeatures, computed: CrossFeatures) -> None:
        """Read nothing yet.

        Args:
            features: of the model.
            computed: its cross features that no request brings.
        """
        self._features = features
        self._computed = computed
        self._of_time = [one for one in features.features if one.of == "request" and one.computed]

    def of_request(self, values: OneRow, shown_at: int) -> Encoded | None:
        """Encode the features of a request; None where the model has none.

        Args:
            values: that the request brought.
            shown_at: unix seconds, of which the others are computed.

        Raises:
            Unprocessable: a value does not fit the model.
        """
        for feature in self._of_time:
            computed = int(time_column(feature.computed, np.array([shown_at]))[0])
            values = {**values, feature.name: computed}
        try:
            return self._features.row(self._features.request, values)
        except ValueError as error:
            raise Unprocessable(f"features.request.{error}") from None

    def of_rank(
        self,
        request: RankRequest,
        tokens: Tokens,
        rows: I64,
        known: np.ndarray[Any, np.dtype[np.bool_]],
        shown_at: int,
    ) -> LateFeatures:
        """Encode the features of a request and its candidates.

        Args:
            request: with them.
            tokens: of its history.
            rows: [n] of the known candidates.
            known: [c] whether a candidate is known.
            shown_at: unix seconds.

        Raises:
            Unprocessable: a value does not fit the model.
        """
        if not self._features.features:
            return NONE_LATE
        cross = request.cross_features if known.all() else request.cross_features.take(known)
        return LateFeatures(
            self.of_request(request.request_features, shown_at),
            self.of_candidates(cross, tokens, rows, shown_at),
        )

    def of_candidates(
        self, given: Columns, tokens: Tokens, rows: I64, shown_at: int
    ) -> Encoded | None:
        """Encode the features of candidates; None where the model has none. Any thread may call.

        Args:
            given: [n] that the request brought.
            tokens: of its history.
            rows: [n] of the candidates.
            shown_at: unix seconds.
        """
        if self._computed.rules:
            events = tokens.events
            actions = events.actions.astype(np.int64)
            columns = self._computed.columns(
                tokens.rows, actions, events.timestamps, rows, shown_at
            )
            own = {name: column.astype(np.float32) for name, column in columns.items()}
            given = Columns({**given.numbers, **own}, given.names)
        return self._features.rows(self._features.cross, given, len(rows))

    def missing(self, request: RankRequest, tokens: Tokens) -> tuple[str, ...]:
        """Name the features, as `of.name`, that neither history nor request say anything of."""
        if not self._features.features:
            return tokens.report.missing_features
        late = self._features.missing(
            request=request.request_features, cross=request.cross_features.given
        )
        return tokens.report.missing_features + late


log = logging.getLogger(__name__)

T = TypeVar("T")
Known = np.ndarray[Any, np.dtype[np.bool_]] | None  # [c] which candidates have a row; None = all
NOTHING: I64 = np.empty(0, np.int64)


class Ranking:
    """One version of the ranker. Event loop only."""

    def __init__(
        self,
        config: RankingConfig,
        model: ModelInfo,
        items: ScoredItems,
        engine: RankEngine,
        relay: Relay[Tokens],
        metrics: Metrics,
        names: ItemNames = EMPTY,
        order: ScoreBlend | None = None,
    ) -> None:
        """Serve one checkpoint.

        Args:
            config: which histories and candidates it accepts.
            model: what it says of itself.
            items: that it has rows for.
            engine: runs its passes.
            relay: keeps its prefixes.
            metrics: where it counts.
            names: of its items.
            order: fitted for this version; None = it has none.
        """
        self.model = model
        self.version = model.version  # of the checkpoint
        self.actions = ActionNames(model.actions)
        self.features = ModelFeatures(model.features, engine.model.config.num_user_tokens)
        self.late = LateFeatureReader(self.features, cross_features(engine.model))
        self.names = names  # replaced where a reload finds others beside the same weights
        self.items = items
        self.order = order
        self.blend_sum = None if order is None else BlendSum(order, engine.backend)
        self.engine = engine
        self._tokens_per_event = engine.model.config.tokens_per_event
        self.reconfigure(config)
        self.relay = relay
        self._metrics = metrics
        self._selfcheck = SelfCheck(engine, metrics)
        self.use = InUse()

    def reconfigure(self, config: RankingConfig) -> None:
        """Apply other settings from now on."""
        self._config = config
        most = config.max_history_tokens or self.model.max_history_tokens
        # newest behaviours that the window has room for
        self.max_events = max(1, (most - self.features.num_user_tokens) // self._tokens_per_event)

    @property
    def vocabulary(self) -> ItemVocabulary:
        """External item ids <-> rows, of this moment."""
        return self.items.vocabulary

    def tokenize(self, history: UserHistory) -> Tokens:
        """Turn behaviours into the tokens that the ranker reads.

        Args:
            history: of the user.

        Raises:
            Unprocessable: an action that the model does not know, or an unknown item where those
                are rejected.
        """
        tokens = tokenize(
            history.events,
            self.vocabulary,
            len(self.model.actions),
            max_tokens=self.max_events * self._tokens_per_event,
            cut_step_tokens=self._config.cut_step_tokens,
            reject_unknown=self._config.unknown_items == "reject",
            first_index=history.first_index,
            name=history.fingerprint,
            plain=history.plain_fingerprint,
            tokens_per_event=self._tokens_per_event,
            features=self.features,
            user_features=history.user_features,
        )
        if history.features_origin is not None:
            tokens = replace(
                tokens, report=replace(tokens.report, user_features=history.features_origin)
            )
        self._metrics.rank.history_read(tokens.report)
        return tokens

    def signal(self, user: UserKey, tokens: Tokens, num_candidates: int | None) -> Verdict:
        """Start a prefill of the prefix, if the trigger wants one."""
        return self.relay.signal(user, tokens, num_candidates)

    @property
    def retrieves(self) -> bool:
        """Whether the model finds items beside ranking them."""
        return self.engine.model.config.retrieval

    async def rank(
        self,
        request: RankRequest,
        tokens: Tokens,
        call: Call,
        history_s: float = 0.0,
        *,
        lease: Lease | None = None,
        vector: F32 | None = None,
    ) -> RankAnswer:
        """Score the candidates.

        Args:
            request: the candidates, and when they are shown.
            tokens: of its history.
            call: when the request arrived, and its deadline.
            history_s: seconds that reading the history took.
            lease: of the prefix, that the caller holds; None = one is taken here.
            vector: [d] u, to answer retrieval scores too; None = they are not wanted.
        """
        began_at = time.monotonic()
        rejects = (request.unknown_items or self._config.unknown_items) == "reject"
        rows, known = self._candidates(request.candidates, rejects)
        shown_at = int(time.time()) if request.timestamp is None else request.timestamp
        late = self.late.of_rank(request, tokens, rows, known, shown_at)
        work = RankPass(tokens, 0, rows, shown_at, vector=vector, features=late)
        taken: AbstractAsyncContextManager[Lease] = (
            self.relay.lease(request.user, tokens, len(rows), call.deadline_at, call.slot.outside)
            if lease is None
            else nullcontext(lease)
        )
        async with taken as lease:
            lease_s = time.monotonic() - began_at
            lease, scored = await self._tried(
                lambda leased: self.engine.rank(
                    leased, call.deadline_at, call.arrived_at, call.tenant
                ),
                work,
                lease,
            )
        return self._answer(
            request, work, lease, scored, known, {"history": history_s, "lease": lease_s}
        )

    def ranked_ahead(
        self, request: RankRequest, rows: I64, tokens: Tokens, lease: Lease, found: NextItems
    ) -> RankAnswer | None:
        """Answer a rank from what `find` scored ahead.

        Args:
            request: its candidates.
            rows: of the candidates, all of which are known.
            tokens: of its history.
            lease: that `find` used.
            found: by it.

        Returns:
            None = other candidates were scored, or none.
        """
        if found.candidates is None or found.scores is None:
            return None
        if rows.tobytes() != found.candidates.tobytes():
            return None
        assert request.timestamp is not None
        work = RankPass(tokens, 0, found.candidates, request.timestamp, features=found.features)
        return self._answer(request, work, lease, found.scores, None, {})

    def _answer(
        self,
        request: RankRequest,
        work: RankPass,
        lease: Lease,
        scored: RankScores,
        known: Known,
        stages_s: dict[str, float],
    ) -> RankAnswer:
        """Say what a pass computed, and check some of it."""
        if lease.cached:
            self._selfcheck.maybe(work, scored.logits, request.user.tenant, self._config)
        return RankAnswer(
            model_version=self.version,
            outcome=lease.outcome,
            reason=lease.reason,
            scores=dict(zip(self.model.tasks, _placed(scored.logits, known).T, strict=True)),
            top=_top(request, scored.logits, known),
            history=work.tokens.report,
            prefix_tokens=lease.cached.num_tokens if lease.cached else 0,
            unknown_candidates=0 if known is None else len(known) - len(scored.logits),
            missing_features=self.late.missing(request, work.tokens),
            retrieval=None if scored.retrieval is None else _placed(scored.retrieval, known),
            stages_s=stages_s | {"queue": scored.queue_s, "device": scored.device_s},
        )

    async def find(
        self,
        tokens: Tokens,
        shown_at: int,
        k: int,
        hidden: I64,
        lease: Lease,
        call: Call,
        features: Encoded | None = None,
        ahead: PrefetchedScores | None = None,
    ) -> tuple[Lease, NextItems]:
        """Find the best of the model's own items. Only where it retrieves.

        Args:
            tokens: of the history.
            shown_at: unix seconds of NEXT.
            k: most items; 0 = only u is wanted.
            hidden: [n] item rows that must not be found, each once.
            lease: of the prefix; pages that it keeps are written.
            call: when the stage began, and when it must be done.
            features: of the request; None = missing.
            ahead: what of it to score in the same job; None = nothing.

        Returns:
            The lease that was used (another one, if the device failed while it read the prefix),
            and what was found.
        """
        return await self._tried(
            lambda work: self.engine.find(
                FindPass(work, k, hidden, ahead), call.deadline_at, call.arrived_at, call.tenant
            ),
            RankPass(tokens, 0, NOTHING, shown_at, features=LateFeatures(features)),
            lease,
        )

    async def _tried(
        self, run: Callable[[RankPass], Awaitable[T]], work: RankPass, lease: Lease
    ) -> tuple[Lease, T]:
        """Run one pass; if the device fails while it reads a prefix, run one more without the prefix."""
        leased = work.leasing(lease.cached, lease.keep)
        if lease.first_token:  # degraded
            leased = replace(
                leased, tokens=work.tokens.newest(len(work.tokens) - lease.first_token)
            )
        try:
            return lease, await run(leased)
        except DeviceError:
            if not lease.cached and not lease.keep:
                raise
            self._metrics.relay.failed("read")
            lease.discard()  # the failed pass may have written half of the prefix
        return Lease(outcome=Outcome.MISS_FULL, reason=Reason.READ_FAILED), await run(work)

    # ---- candidates and scores

    def _candidates(
        self, ids: I64, rejects: bool
    ) -> tuple[I64, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Find the rows of the known candidates, and a mask of the given ones that are known.

        Raises:
            Unprocessable: some are unknown, and the request `rejects` such; the message names the
                first of them.
        """
        rows = self.vocabulary.rows(ids)
        known = rows != UNKNOWN
        missing = len(ids) - int(np.count_nonzero(known))
        if missing:
            if rejects:
                first = names_of([self.names], ids[~known][:_NAMED])
                more = ", ..." if missing > _NAMED else ""
                raise Unprocessable(
                    f"candidates: {missing} unknown: {', '.join(map(str, first))}{more}"
                )
            rows = rows[known]
        return rows, known

    async def stop(self) -> None:
        """End self-checks, then the relay's work."""
        await self._selfcheck.stop()
        await self.relay.stop()


class SelfCheck:
    """Scores some served requests again without their prefix KV, behind the requests that wait.

    Exports the drift.
    """

    def __init__(self, engine: RankEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._random = np.random.default_rng(0)
        self._background: set[asyncio.Task[None]] = set()

    def maybe(self, work: RankPass, cached: F32, tenant: str, config: RankingConfig) -> None:
        """Check a share of the passes.

        Args:
            work: that was served from cached KV.
            cached: its logits.
            tenant: whose request it was.
            config: the share, and the drift that is allowed.
        """
        if self._random.random() < config.selfcheck_ratio:
            task = asyncio.get_running_loop().create_task(
                self._check(work, cached, tenant, config.selfcheck_max_drift)
            )
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _check(self, work: RankPass, cached: F32, tenant: str, max_drift: float) -> None:
        try:
            cold = await self._engine.rank(
                replace(work, vector=None), time.monotonic() + _SELFCHECK_S, tenant=tenant
            )
        except NpuGrError:
            return  # the device has no time for it now
        drift = float(np.abs(cold.logits - cached).max() / max(float(cold.logits.std()), 1e-6))
        self._metrics.rank.drifted(drift, drift > max_drift)
        if drift > max_drift:
            log.error("self-check: cached scores drift by %.2e of their standard deviation", drift)

    async def stop(self) -> None:
        """End what runs."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)


def _top(request: RankRequest, logits: F32, known: Known) -> I64 | None:
    """Pick the best candidates by the first task; of equal ones the earlier."""
    if request.top_k is None:
        return None
    best = np.argsort(-logits[:, 0], kind="stable")[: request.top_k]
    top: I64 = (request.candidates if known is None else request.candidates[known])[best]
    return top


def _placed(scores: F32, known: Known) -> F32:
    """Put the scores of the known candidates, [k] or [k, n], into the order of the request; NaN at the others."""
    if known is None or len(scores) == len(known):
        return scores
    placed = np.full((len(known), *scores.shape[1:]), np.nan, np.float32)
    placed[known] = scores
    return placed


_NAMED = 10  # unknown candidates that a message names
_SELFCHECK_S = 60.0  # a self-check that has not run by then is dropped
