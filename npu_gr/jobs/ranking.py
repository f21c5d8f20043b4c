"""One version of the ranker: it scores candidates against the user's prefix KV.

    history -> tokens -> lease of the prefix KV -> one pass over the candidates -> scores

`Ranking` is a checkpoint with its items and its relay. `rank.py` picks the version that a request names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from npu_gr.catalogue.names import EMPTY, ItemNames, names_of
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import DeviceError, NpuGrError, Unprocessable
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.feature_schema.encode import Encoded
from npu_gr.core.history import UserKey
from npu_gr.core.names import ActionNames
from npu_gr.core.request import Outcome, RankAnswer, RankRequest, Reason, Verdict
from npu_gr.core.served import ModelInfo
from npu_gr.engine.rank_engine import (
    Ahead,
    FindPass,
    LateFeatures,
    NextItems,
    RankEngine,
    RankPass,
    RankScores,
)
from npu_gr.jobs.base import Call
from npu_gr.jobs.config import RankingConfig
from npu_gr.jobs.histories import UserHistory
from npu_gr.jobs.in_use import InUse
from npu_gr.jobs.late_features import LateFeatureReader
from npu_gr.jobs.scored_items import ScoredItems
from npu_gr.metrics.registry import Metrics
from npu_gr.model.computed_features import cross_features
from npu_gr.model.history_tokens import UNKNOWN, ItemVocabulary, Tokens, tokenize
from npu_gr.model.order import Order
from npu_gr.model.order_sum import OrderSum
from npu_gr.relay.relay import Lease, Relay

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
        order: Order | None = None,
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
        self.actions = ActionNames(model.actions)
        self.features = ModelFeatures(model.features, engine.model.config.num_user_tokens)
        self.late = LateFeatureReader(self.features, cross_features(engine.model))
        self.names = names  # replaced where a reload finds others beside the same weights
        self.items = items
        self.order = order
        self.order_sum = None if order is None else OrderSum(order, engine.backend)
        self.engine = engine
        self._tokens_per_event = engine.model.config.tokens_per_event
        self.reconfigure(config)
        self.relay = relay
        self._metrics = metrics
        self._random = np.random.default_rng(0)
        self._background: set[asyncio.Task[None]] = set()
        self.use = InUse()

    def reconfigure(self, config: RankingConfig) -> None:
        """Apply other settings from now on."""
        self._config = config
        most = config.max_history_tokens or self.model.max_history_tokens
        # newest behaviours that the window has room for
        self.max_events = max(1, (most - self.features.num_user_tokens) // self._tokens_per_event)

    @property
    def version(self) -> str:
        """The checkpoint's version."""
        return self.model.version

    @property
    def vocabulary(self) -> ItemVocabulary:
        """External item ids <-> rows, of this moment."""
        return self.items.vocabulary

    def tokenize(self, history: UserHistory) -> Tokens:
        """Turn behaviours into the tokens that the ranker reads.

        Args:
            history: of the user.

        Raises:
            Unprocessable: an action that the model does not know, or an unknown item where those are refused.
        """
        tokens = tokenize(
            history.events,
            self.vocabulary,
            len(self.model.actions),
            max_tokens=self.max_events * self._tokens_per_event,
            cut_step_tokens=self._config.cut_step_tokens,
            refuse_unknown=self._config.unknown_items == "refuse",
            first_index=history.first_index,
            name=history.fingerprint,
            plain=history.plain_fingerprint,
            tokens_per_event=self._tokens_per_event,
            features=self.features,
            user_features=history.user_features,
        )
        if history.features_origin is not None:
            tokens = replace(tokens, report=replace(tokens.report, user_features=history.features_origin))
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
        refuses = (request.unknown_items or self._config.unknown_items) == "refuse"
        rows, known = self._candidates(request.candidates, refuses)
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
                lambda leased: self.engine.rank(leased, call.deadline_at, call.arrived_at, call.tenant), work, lease
            )
        return self._answer(request, work, lease, scored, known, {"history": history_s, "lease": lease_s})

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
        if lease.cached and self._random.random() < self._config.selfcheck_ratio:
            self._own(self._selfcheck(work, scored.logits, request.user.tenant))
        return RankAnswer(
            model_version=self.version,
            outcome=lease.outcome,
            reason=lease.reason,
            scores=self._scores(scored.logits, known),
            top=self._top(request, scored.logits, known),
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
        ahead: Ahead | None = None,
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
            The lease that was used (another one, if the device failed while it read the prefix), and what was found.
        """
        return await self._tried(
            lambda work: self.engine.find(
                FindPass(work, k, hidden, ahead), call.deadline_at, call.arrived_at, call.tenant
            ),
            RankPass(tokens, 0, NOTHING, shown_at, features=LateFeatures(features)),
            lease,
        )

    async def _tried(self, run: Callable[[RankPass], Awaitable[T]], work: RankPass, lease: Lease) -> tuple[Lease, T]:
        """Run one pass; if the device fails while it reads a prefix, run one more without the prefix."""
        leased = work.leasing(lease.cached, lease.keep)
        if lease.first_token:  # degraded
            leased = replace(leased, tokens=work.tokens.newest(len(work.tokens) - lease.first_token))
        try:
            return lease, await run(leased)
        except DeviceError:
            if not lease.cached and not lease.keep:
                raise
            self._metrics.relay.failed("read")
            lease.discard()  # the failed pass may have written half of the prefix
        return Lease(outcome=Outcome.MISS_FULL, reason=Reason.READ_FAILED), await run(work)

    # ---- candidates and scores

    def _candidates(self, ids: I64, refuses: bool) -> tuple[I64, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Find the rows of the known candidates, and a mask of the given ones that are known.

        Raises:
            Unprocessable: some are unknown, and the request `refuses` such; the message names the first of them.
        """
        rows = self.vocabulary.rows(ids)
        known = rows != UNKNOWN
        missing = len(ids) - int(np.count_nonzero(known))
        if missing:
            if refuses:
                first = names_of([self.names], ids[~known][:_NAMED])
                more = ", ..." if missing > _NAMED else ""
                raise Unprocessable(f"candidates: {missing} unknown: {', '.join(map(str, first))}{more}")
            rows = rows[known]
        return rows, known

    def _scores(self, logits: F32, known: Known) -> dict[str, F32]:
        """Put logits into the order of the request, task by task; NaN where the catalogue lacks the item."""
        columns = _placed(logits, known)
        return {task: columns[:, index] for index, task in enumerate(self.model.tasks)}

    def _top(self, request: RankRequest, logits: F32, known: Known) -> I64 | None:
        """Pick the best candidates by the first task; of equal ones the earlier."""
        if request.top_k is None:
            return None
        best = np.argsort(-logits[:, 0], kind="stable")[: request.top_k]
        top: I64 = (request.candidates if known is None else request.candidates[known])[best]
        return top

    # ---- the self-check

    async def _selfcheck(self, work: RankPass, cached: F32, tenant: str) -> None:
        """Score a served request again without its prefix KV, behind the requests that wait; export the drift."""
        try:
            cold = await self.engine.rank(replace(work, vector=None), time.monotonic() + _SELFCHECK_S, tenant=tenant)
        except NpuGrError:
            return  # the device has no time for it now
        drift = float(np.abs(cold.logits - cached).max() / max(float(cold.logits.std()), 1e-6))
        self._metrics.rank.drifted(drift, drift > self._config.selfcheck_max_drift)
        if drift > self._config.selfcheck_max_drift:
            log.error("self-check: cached scores drift by %.2e of their standard deviation", drift)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def stop(self) -> None:
        """End self-checks, then the relay's work."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.relay.stop()


def _placed(scores: F32, known: Known) -> F32:
    """Put the scores of the known candidates, [k] or [k, n], into the order of the request; NaN at the others."""
    if known is None or len(scores) == len(known):
        return scores
    placed = np.full((len(known), *scores.shape[1:]), np.nan, np.float32)
    placed[known] = scores
    return placed


_NAMED = 10  # unknown candidates that a message names
_SELFCHECK_S = 60.0  # a self-check that has not run by then is dropped
