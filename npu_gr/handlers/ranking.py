"""One version of the ranker, which scores candidates with the user's prefix KV.

    history -> tokens -> lease of the prefix KV -> one pass over the candidates -> scores

`Ranking` is a checkpoint with its items and its relay. `LateFeatureReader` encodes the features of
a rank that are not in the cached prefix: those of the request, and computed ones. `versions.py`
selects the version.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from npu_gr.catalogue.names import EMPTY, ItemNames, names_of
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import DeviceError, NpuGrError, StaleEntry, Unprocessable
from npu_gr.core.feature_schema.columns import Columns, ModelFeatures, OneRow
from npu_gr.core.feature_schema.computed import CrossFeatures, time_column
from npu_gr.core.feature_schema.encode import Encoded
from npu_gr.core.history import UserKey
from npu_gr.core.lifetime import InUse, cancel_all
from npu_gr.core.names import ActionNames
from npu_gr.core.request import Outcome, RankAnswer, RankRequest, Reason, Verdict
from npu_gr.core.served import ModelInfo
from npu_gr.core.text_format import counted
from npu_gr.engine.kv_cache.prefix_store import PoolFailed
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
from npu_gr.engine.scheduler import alone, is_idle
from npu_gr.handlers.base import Call
from npu_gr.handlers.config import RankingConfig
from npu_gr.handlers.match_recall import RecallChecks
from npu_gr.handlers.prefix_histories import UserHistory
from npu_gr.handlers.scored_items import ScoredItems
from npu_gr.metrics.registry import Metrics
from npu_gr.model.blend import BlendSum, ScoreBlend
from npu_gr.model.history_tokenizer import UNKNOWN, ItemVocabulary, Tokens, tokenize
from npu_gr.model.hstu_input import cross_features
from npu_gr.model.served_weights import Patch, ServedWeights
from npu_gr.relay.relay import Lease, Relay
from npu_gr.vector_search.index import ExactSteps


class LateFeatureReader:
    """Encodes the features of requests for one version of the ranker."""

    def __init__(self, features: ModelFeatures, computed: CrossFeatures) -> None:
        """Store the features.

        Args:
            features: Features of the model.
            computed: Computed cross features of the model.
        """
        self._features = features
        self._computed = computed
        self._of_time = [one for one in features.features if one.of == "request" and one.computed]

    def of_request(self, values: OneRow, shown_at: int) -> Encoded | None:
        """Encode the features of a request; None if the model has none.

        Args:
            values: Features in the request.
            shown_at: Unix seconds, for computed features.

        Raises:
            Unprocessable: a value is invalid.
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
            request: The request.
            tokens: Tokens of the history.
            rows: [n] rows of the known candidates.
            known: [c] whether each candidate is known.
            shown_at: Unix seconds of the request.

        Raises:
            Unprocessable: a value is invalid.
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
        """Encode the features of candidates; None if the model has none. Thread-safe.

        Args:
            given: [n] features in the request.
            tokens: Tokens of the history.
            rows: [n] rows of the candidates.
            shown_at: Unix seconds of the request.
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
        """Return the features (`of.name`) that neither history nor request has."""
        if not self._features.features:
            return tokens.report.missing_features
        late = self._features.missing(
            request=request.request_features, cross=request.cross_features.given
        )
        return tokens.report.missing_features + late


log = logging.getLogger(__name__)

T = TypeVar("T")
Known = np.ndarray[Any, np.dtype[np.bool_]] | None  # [c] whether candidates are known; None = all
NOTHING: I64 = np.empty(0, np.int64)
OnRanked = Callable[[RankRequest, UserHistory, RankAnswer], None]


def unobserved(_request: RankRequest, _history: UserHistory, _answer: RankAnswer) -> None:
    """Do nothing with an answered rank."""


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
        weights: ServedWeights,
        names: ItemNames = EMPTY,
        order: ScoreBlend | None = None,
    ) -> None:
        """Serve one checkpoint.

        Args:
            config: Limits of histories and candidates.
            model: Description of the model.
            items: Items with a row.
            engine: Engine of the passes.
            relay: Caches prefixes.
            metrics: Metrics of the instance.
            weights: Its weights, which deltas change.
            names: Item names.
            order: Score blend of this version, if there is one.
        """
        self.weights = weights
        self.model = model
        # of the weights with which it was opened: a part of prefix keys, and what requests name
        self.version = model.version
        self.actions = ActionNames(model.actions)
        self.features = ModelFeatures(model.features, engine.model.config.num_user_tokens)
        self.late = LateFeatureReader(self.features, cross_features(engine.model))
        self.names = names  # a reload may replace them
        self.items = items
        self.order = order
        self.blend_sum = None if order is None else BlendSum(order, engine.backend)
        self.engine = engine
        self._tokens_per_event = engine.model.config.tokens_per_event
        self.reconfigure(config)
        self.relay = relay
        self._metrics = metrics
        self._recall_checks = RecallChecks(
            partial(is_idle, engine.scheduler), partial(metrics.match.checked, "recommend")
        )
        self._selfcheck = SelfCheck(engine, relay, metrics)
        self.selfchecks = self._selfcheck.counts
        # called with each answered rank, e.g. to score it with a shadow too
        self.on_ranked: OnRanked = unobserved
        self.use = InUse()

    def reconfigure(self, config: RankingConfig) -> None:
        """Apply new settings."""
        self._config = config
        most = config.max_history_tokens or self.model.max_history_tokens
        # number of newest events in the window
        self.max_events = max(1, (most - self.features.num_user_tokens) // self._tokens_per_event)

    async def move(self, patch: Patch, keep_stale_s: float) -> None:
        """Write what a delta changes, between two passes, and serve it.

        Args:
            patch: What to write.
            keep_stale_s: Seconds for which prefixes of the weights before may still be served.

        Raises:
            DeviceError, Unavailable: the device failed, or stops; the weights may be mixed.
        """
        stamps = self.weights.stamped(patch, keep_stale_s)
        with self._selfcheck.paused():
            await alone(
                self.engine.scheduler,
                lambda: self.engine.weights.write(patch, stamps),
                self.engine.backend.synchronize,
            )
            self.weights.moved(patch, stamps)
            self.items.spare.stamp(stamps)
            self.late = LateFeatureReader(self.features, cross_features(self.engine.model))
            self.model = dataclasses.replace(self.model, delta=self.weights.info())

    @property
    def vocabulary(self) -> ItemVocabulary:
        """The current mapping of external item ids and rows."""
        return self.items.spare.vocabulary

    def tokenize(self, history: UserHistory, *, is_request: bool = True) -> Tokens:
        """Convert a history to tokens.

        Args:
            history: The history.
            is_request: Whether it is that of a request, which is counted.

        Raises:
            Unprocessable: an action is unknown, or an item is unknown and the policy rejects it.
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
        if is_request:
            self._metrics.rank.history_read(tokens.report)
        return tokens

    def signal(self, user: UserKey, tokens: Tokens, num_candidates: int | None) -> Verdict:
        """Start a prefill of the prefix, if the trigger decides so; read its item rows ahead."""
        self.engine.weights.expect(tokens.rows)
        return self.relay.signal(user, tokens, num_candidates)

    @property
    def retrieves(self) -> bool:
        """Whether the model also retrieves items."""
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
            request: The request.
            tokens: Tokens of the history.
            call: Arrival, deadline and permit.
            history_s: Seconds of reading the history.
            lease: Lease of the prefix that the caller holds; None to take one here.
            vector: User vector [d] for retrieval scores; None to omit them.
        """
        began_at = time.monotonic()
        rejects = (request.unknown_items or self._config.unknown_items) == "reject"
        rows, known = self._candidates(request.candidates, rejects)
        self.engine.weights.expect(rows)  # while the request waits for its lease and its pass
        shown_at = int(time.time()) if request.timestamp is None else request.timestamp
        late = self.late.of_rank(request, tokens, rows, known, shown_at)
        taken: AbstractAsyncContextManager[Lease] = (
            self.relay.lease(request.user, tokens, len(rows), call.deadline_at, call.slot.suspended)
            if lease is None
            else nullcontext(lease)
        )
        async with taken as lease:
            lease_s = time.monotonic() - began_at
            if (read := self.read_by(tokens, lease)) is not tokens:
                tokens = read
                late = self.late.of_rank(request, tokens, rows, known, shown_at)
            work = RankPass(tokens, 0, rows, shown_at, vector=vector, features=late)
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

    def read_by(self, tokens: Tokens, lease: Lease) -> Tokens:
        """Return what a pass with this lease reads: all tokens, or the newest if it is degraded.

        A degraded pass reads whole events, one at least, and its report says how many.
        """
        if not lease.first_token:
            return tokens
        left = len(tokens) - lease.first_token - tokens.num_user
        num_events = max(left // self._tokens_per_event, min(tokens.report.read_events, 1))
        num_tokens = tokens.num_user + num_events * self._tokens_per_event
        report = replace(tokens.report, num_tokens=num_tokens, read_events=num_events)
        return replace(tokens.newest(num_tokens), report=report)

    def ranked_ahead(
        self, request: RankRequest, rows: I64, tokens: Tokens, lease: Lease, found: NextItems
    ) -> RankAnswer | None:
        """Answer a rank with the scores that `find` prefetched.

        Args:
            request: The request.
            rows: Rows of the candidates, all known.
            tokens: Tokens of the history.
            lease: Lease that `find` used.
            found: Result of `find`.

        Returns:
            None if other candidates were scored, or none.
        """
        if found.candidates is None or found.scores is None:
            return None
        if rows.tobytes() != found.candidates.tobytes():
            return None
        assert request.timestamp is not None
        tokens = self.read_by(tokens, lease)
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
        """Make the answer of a pass, and start a self-check of some."""
        is_exact = lease.reason is not Reason.STALE
        if lease.cached and is_exact and len(scored.logits):  # else every candidate is unknown
            self._selfcheck.maybe(work, scored.logits, request.user, self._config)
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
        """Retrieve the best items of a model that retrieves.

        Args:
            tokens: Tokens of the history.
            shown_at: Unix seconds of NEXT.
            k: Maximum number of items; 0 to compute only u.
            hidden: [n] distinct item rows to exclude.
            lease: Lease of the prefix; its kept pages are written.
            call: Start and deadline of the stage.
            features: Features of the request; None if missing.
            ahead: Candidates to score in the same job, if any.

        Returns:
            The used lease (another one if the device failed to read the prefix), and the items.
        """
        used, found = await self._tried(
            lambda work: self.engine.find(
                FindPass(work, k, hidden, ahead), call.deadline_at, call.arrived_at, call.tenant
            ),
            RankPass(
                self.read_by(tokens, lease), 0, NOTHING, shown_at, features=LateFeatures(features)
            ),
            lease,
        )
        if self.engine.search is not None:
            items = self.engine.weights.table()[: self.engine.num_rows].numpy()
            stamps = self.weights.stamps
            self._recall_checks.offer(
                found.rows,
                lambda num: ExactSteps(items, found.vector, num, hidden),
                lambda: self.weights.stamps is stamps,
            )
        return used, found

    async def _tried(
        self, run: Callable[[RankPass], Awaitable[T]], work: RankPass, lease: Lease
    ) -> tuple[Lease, T]:
        """Run a pass; repeat it without the prefix if the device fails with it, or a delta came."""
        # keys and values that no prefix can be compared with are not rounded for pages
        is_unrounded = self.relay.settings.is_switched_off and not (lease.cached or lease.keep)
        try:
            return lease, await run(work.leasing(lease.cached, lease.keep, is_unrounded))
        except StaleEntry:
            reason = Reason.STALE
        except DeviceError:
            if not lease.cached and not lease.keep:
                raise
            self._metrics.relay.failed("read")
            reason = Reason.READ_FAILED
        lease.discard()  # the failed pass may have written a part of the prefix
        return Lease(outcome=Outcome.MISS_FULL, reason=reason), await run(work)

    # ---- candidates and scores

    def _candidates(
        self, ids: I64, rejects: bool
    ) -> tuple[I64, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Find the rows of known candidates, and the mask of known ones.

        Raises:
            Unprocessable: some are unknown and `rejects` is true; the message names the first ones.
        """
        rows = self.vocabulary.rows(ids)
        known = rows != UNKNOWN
        missing = len(ids) - int(np.count_nonzero(known))
        if missing:
            if rejects:
                first = names_of([self.names], ids[~known][:_NAMED])
                more = ", ..." if missing > _NAMED else ""
                raise Unprocessable(
                    f"candidates: {counted(missing, 'unknown item')}: "
                    f"{', '.join(map(str, first))}{more}"
                )
            rows = rows[known]
        return rows, known

    async def stop(self) -> None:
        """Stop self-checks, hand the prefixes over to other instances, then stop the relay."""
        await self._selfcheck.stop()
        await self._recall_checks.stop()
        await self.relay.spills.hand_over(self.model.version, HAND_OVER_S)
        await self.relay.stop()


class SelfCheck:
    """Scores a share of requests again without prefix KV, and acts on wrong scores.

    a check fails               the user's prefixes are dropped; all cached ranks are checked
    `MOST_FAILED` in a row      the prefix cache is switched off, since cold scores are right
    two cold passes differ too  the instance is unready until it is restarted

    A cache that is off stays off until the configuration is read again: what spoils KV, e.g. the
    device's memory, does not mend itself, and trying would serve wrong scores.
    """

    def __init__(self, engine: RankEngine, relay: Relay[Tokens], metrics: Metrics) -> None:
        self._engine = engine
        self._relay = relay
        self._metrics = metrics
        self._random = np.random.default_rng(0)
        self._background: set[asyncio.Task[None]] = set()
        self._checked: set[UserKey] = set()  # users of running checks
        self.num_checked = 0  # since the start of this version
        self.num_failed = 0
        self._num_failed = 0  # in a row
        self._all_until_at = 0.0  # instant until which all cached ranks are checked
        self._moved_at = -math.inf  # instant of the last change of the weights; inf = it runs now

    def counts(self) -> tuple[int, int]:
        """Return the checks of this version that ended, and how many of them failed."""
        return self.num_checked, self.num_failed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compare no scores of before the block, which changes the weights, with those after it."""
        self._moved_at = math.inf
        try:
            yield
        finally:
            self._moved_at = time.monotonic()

    def maybe(self, work: RankPass, cached: F32, user: UserKey, config: RankingConfig) -> None:
        """Check a share of the passes.

        Args:
            work: Pass with cached KV.
            cached: Logits of the pass.
            user: User of the request.
            config: The share, and the allowed drift.
        """
        if time.monotonic() < self._moved_at + _SETTLE_S:
            return  # the scores may be those of before
        if not self._is_chosen(user, config.selfcheck_ratio):
            return
        task = asyncio.get_running_loop().create_task(self._check(work, cached, user, config))
        self._checked.add(user)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda _: self._checked.discard(user))

    def _is_chosen(self, user: UserKey, ratio: float) -> bool:
        if self._random.random() < ratio:
            return True
        is_alarmed = self._num_failed > 0 or time.monotonic() < self._all_until_at
        return is_alarmed and len(self._background) < _MOST_CHECKS and user not in self._checked

    async def _check(
        self, work: RankPass, cached: F32, user: UserKey, config: RankingConfig
    ) -> None:
        moved_at = self._moved_at
        try:
            cold = await self._cold(work, user)
            exact = cold
            if self._engine.arena.layout.dtype == "int8":
                exact = await self._cold(replace(work, is_unrounded=True), user)
            if self._moved_at != moved_at:
                return
            drift, rounding = drift_of(cached, cold), drift_of(cold, exact)
            failed = not drift <= config.selfcheck_max_drift
            is_coarse = not rounding <= config.selfcheck_max_int8_drift
            self._metrics.rank.drifted(drift, failed or is_coarse)
            self.num_checked += 1
            self.num_failed += failed or is_coarse
            if failed:
                await self._failed(work, cold, user, drift, config.selfcheck_max_drift)
            elif is_coarse:
                log.error(
                    "self-check: scores from keys and values in int8 differ by %.2e standard "
                    "deviations from those without rounding, over selfcheck_max_int8_drift",
                    rounding,
                )
                await self._count_failure(user)
            else:
                self._num_failed = 0
        except NpuGrError:
            return  # the device is too busy

    async def _failed(
        self, work: RankPass, cold: F32, user: UserKey, drift: float, max_drift: float
    ) -> None:
        log.error(
            "self-check: cached scores differ by %.2e standard deviations, over "
            "selfcheck_max_drift; the user's prefixes are dropped",
            drift,
        )
        await self._count_failure(user)
        again = drift_of(await self._cold(work, user), cold)
        if not again <= max_drift:
            fault = (
                f"two cold passes of one rank differ by {again:.2e} standard deviations: the "
                "device computes wrongly"
            )
            self._metrics.health.fault = fault
            log.critical("self-check: %s", fault)

    async def _count_failure(self, user: UserKey) -> None:
        """Drop a user's prefixes, and after several failures in a row all prefixes."""
        self._num_failed += 1
        self._all_until_at = time.monotonic() + _ALL_S
        if self._num_failed >= MOST_FAILED and not self._relay.settings.is_switched_off:
            self._relay.settings.is_switched_off = True
            self._relay.tiers.erase_all()
            log.error(
                "self-check: %d checks failed in a row: the prefix cache is off until the "
                "configuration is read again (SIGHUP or POST /v1/models/reload)",
                self._num_failed,
            )
        else:
            with suppress(PoolFailed):  # a wrong prefix that comes back from there is found again
                await self._relay.erase(user)

    async def _cold(self, work: RankPass, user: UserKey) -> F32:
        deadline_at = time.monotonic() + _SELFCHECK_S
        work = replace(work, vector=None)
        return (await self._engine.rank(work, deadline_at, tenant=user.tenant)).logits

    async def stop(self) -> None:
        """Cancel running checks."""
        await cancel_all(self._background)


def drift_of(got: F32, want: F32) -> float:
    """Return the largest difference of scores, in standard deviations of `want`."""
    drift = float(np.abs(want - got).max() / max(float(want.std()), 1e-6))
    return drift if np.isfinite(drift) else _NOT_FINITE


def _top(request: RankRequest, logits: F32, known: Known) -> I64 | None:
    """Return the best candidates by the first task, each once; ties in the order of the request."""
    if request.top_k is None:
        return None
    ids = request.candidates if known is None else request.candidates[known]
    best = ids[np.argsort(-logits[:, 0], kind="stable")]
    top: I64 = best[np.sort(np.unique(best, return_index=True)[1])[: request.top_k]]
    return top


def _placed(scores: F32, known: Known) -> F32:
    """Scatter scores of known candidates, [k] or [k, n], to the request's order; else NaN."""
    if known is None or len(scores) == len(known):
        return scores
    placed = np.full((len(known), *scores.shape[1:]), np.nan, np.float32)
    placed[known] = scores
    return placed


_NAMED = 10  # unknown candidates named in a message
# most seconds for which an instance that stops puts prefixes into the pool
HAND_OVER_S = 2.0
_SELFCHECK_S = 60.0  # deadline of a self-check
_SETTLE_S = 1.0  # after a change of the weights: longer than a request has scores unanswered
MOST_FAILED = 3  # failed self-checks in a row that switch the prefix cache off
_ALL_S = 300.0  # after a failed self-check all cached ranks are checked for so long
_MOST_CHECKS = 4  # checks at a time of those, which cost as much as the ranks
_NOT_FINITE = 1e6  # drift of scores of which some are not finite
