"""The `rank` job of a service: one version of the ranker, its items, its relay. `service.py` brings the request here.

history -> tokens -> lease its prefix KV -> one pass over the candidates -> scores
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Annotated, Any

import msgspec
import numpy as np

from npu_gr.catalogue.items import UNKNOWN, ItemVocabulary
from npu_gr.catalogue.tokens import Tokens, tokenize
from npu_gr.core.errors import DeviceError, NpuGrError, Unprocessable
from npu_gr.core.request import F32, I64, Events, ModelInfo, Outcome, RankAnswer, RankRequest, Reason, UserKey, Verdict
from npu_gr.engine.rank_engine import RankEngine, RankPass, RankScores
from npu_gr.jobs.in_use import Use
from npu_gr.metrics.registry import Metrics
from npu_gr.relay.relay import Lease, Relay

log = logging.getLogger(__name__)


class RankingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a ranker accepts, and how strictly."""

    max_history_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None  # None = the model's own limit
    cut_step_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256  # the window's start moves in steps of this
    unknown_items: str = "ignore"  # ignore (and count) | refuse
    selfcheck_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.001  # of cached ranks computed again, cold
    selfcheck_max_drift: Annotated[float, msgspec.Meta(gt=0)] = 1e-3  # of the logits' standard deviation

    def __post_init__(self) -> None:
        if self.unknown_items not in ("ignore", "refuse"):
            raise ValueError(f"unknown_items: {self.unknown_items!r} is neither 'ignore' nor 'refuse'")


class Ranking:
    """One version of a ranker behind a service. Event loop only."""

    def __init__(
        self,
        config: RankingConfig,
        model: ModelInfo,
        vocabulary: ItemVocabulary,
        engine: RankEngine,
        relay: Relay[Tokens],
        metrics: Metrics,
    ) -> None:
        self._config, self.model, self.vocabulary = config, model, vocabulary
        self.engine, self.relay, self._metrics = engine, relay, metrics
        self.max_events = config.max_history_tokens or model.max_history_tokens
        self._random = np.random.default_rng(0)
        self._background: set[asyncio.Task[None]] = set()
        self.use = Use()

    def become(self, config: RankingConfig) -> None:
        """Other settings from now on."""
        self._config, self.max_events = config, config.max_history_tokens or self.model.max_history_tokens

    @property
    def version(self) -> str:
        """Of the checkpoint."""
        return self.model.version

    @property
    def item_ids(self) -> I64:
        """[num_items] external ids, by row."""
        return self.vocabulary.ids

    def tokenize(self, events: Events, first_index: int) -> Tokens:
        """The behaviours as the ranker reads them.

        Args:
            events: of the user.
            first_index: index of the first one in the user's whole history.

        Raises:
            Unprocessable: an action that the model does not know, or an unknown item where those are refused.
        """
        tokens = tokenize(
            events,
            self.vocabulary,
            len(self.model.actions),
            max_tokens=self.max_events,
            cut_step_tokens=self._config.cut_step_tokens,
            refuse_unknown=self._config.unknown_items == "refuse",
            first_index=first_index,
        )
        self._metrics.history_read(tokens.report)
        return tokens

    def signal(self, user: UserKey, tokens: Tokens, num_candidates: int | None) -> Verdict:
        """Pre-infer the prefix, if the trigger wants it."""
        return self.relay.signal(user, tokens, num_candidates)

    async def rank(self, request: RankRequest, tokens: Tokens, deadline_at: float, history_s: float) -> RankAnswer:
        """Score the candidates.

        Args:
            request: what is asked.
            tokens: of its history.
            deadline_at: instant (time.monotonic()) by which the answer must be there.
            history_s: what reading the history took.
        """
        began_at = time.monotonic()
        rows, known = self._candidates(request.candidates)
        shown_at = int(time.time()) if request.timestamp is None else request.timestamp
        async with self.relay.lease(request.user, tokens, len(rows), deadline_at) as lease:
            lease_s = time.monotonic() - began_at
            lease, scored = await self._score(tokens, rows, shown_at, lease, deadline_at, began_at)
        if lease.cached and self._random.random() < self._config.selfcheck_ratio:
            self._own(self._selfcheck(tokens, rows, shown_at, scored.logits))
        return RankAnswer(
            model_version=self.version,
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

    async def _score(
        self, tokens: Tokens, rows: I64, shown_at: int, lease: Lease, deadline_at: float, arrived_at: float
    ) -> tuple[Lease, RankScores]:
        """One pass; if the device fails with a prefix in hand, one more without it."""
        work = RankPass(tokens, lease.first_token, rows, shown_at, cached=lease.cached, keep=lease.keep)
        try:
            return lease, await self.engine.rank(work, deadline_at, arrived_at)
        except DeviceError:
            if not lease.cached and not lease.keep:
                raise
            self._metrics.relay_error("read")
            lease.discard()  # the failed pass may have written half of it
        alone = Lease(outcome=Outcome.MISS_FULL, reason=Reason.READ_FAILED)
        return alone, await self.engine.rank(RankPass(tokens, 0, rows, shown_at), deadline_at, arrived_at)

    # ---- candidates and scores

    def _candidates(self, ids: I64) -> tuple[I64, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Rows of the known candidates, and which of the given ones they are."""
        rows = self.vocabulary.rows(ids)
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
        for index, task in enumerate(self.model.tasks):
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
            cold = await self.engine.rank(RankPass(tokens, 0, rows, shown_at), time.monotonic() + _SELFCHECK_S)
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

    async def stop(self) -> None:
        """End background work; then the relay's."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.relay.stop()


_SELFCHECK_S = 60.0
