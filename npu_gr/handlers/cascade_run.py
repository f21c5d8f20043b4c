"""Run one recommend through the stages of the cascade.

One deadline covers all stages: the rank has the time of the cost model, the hook its budget, and
the sources the rest. A failed stage degrades the answer as configured, which the answer and metrics
report. Client errors are returned as errors.

Invariants:
  C1  items are distinct, and none is denied, withdrawn or (if configured) seen; at most M are
      ranked; only the hook may add items
  C2  now <= end of retrieval <= end of the hook <= end of the rank <= deadline
  C3  without failures and hook, the result equals separate calls of the sources and of rank
  C4  items unknown to the ranker are counted, and last or (`unknown_items: drop`) dropped
  C5  with a shared encoder, user vector, items, logits and order are of one version, and
      independent of cached prefixes
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import (
    ColdUser,
    DeadlineExceeded,
    NpuGrError,
    Overloaded,
    RequestError,
    Unavailable,
    Unprocessable,
)
from npu_gr.core.history import HistoryRef
from npu_gr.core.kinds import RANK
from npu_gr.core.lifetime import deadline
from npu_gr.core.request import (
    LimitedBy,
    RankAnswer,
    RankRequest,
    Reason,
    RecommendAnswer,
    RecommendRequest,
    StageReport,
    StageResult,
    Verdict,
)
from npu_gr.core.text_format import quoted
from npu_gr.handlers.base import Call
from npu_gr.handlers.cascade_plan import (
    SHARED_ENCODER,
    Denied,
    Hook,
    HookContext,
    RecommendConfig,
    as_items,
    best_first,
    fused_order,
    interleave,
    is_in,
    split,
    why_short,
)
from npu_gr.handlers.histories import UserHistory
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.sources import (
    POPULAR,
    SharedEncoderUse,
    SizedSource,
    SourceRequest,
    from_shared_encoder,
)
from npu_gr.metrics.registry import Metrics
from npu_gr.model.history_tokenizer import UNKNOWN, Tokens

log = logging.getLogger(__name__)

HOOK = "hook"  # the source of an item that the hook added


class Origins(dict[int, str]):
    """The first source of each item, with a default for other items."""

    def __init__(self, other: str, items: Iterable[tuple[int, str]] = ()) -> None:
        super().__init__(items)
        self._other = other

    def __missing__(self, item: int) -> str:
        return self._other


@dataclass(frozen=True, slots=True)
class CascadeParts:
    """The parts that all cascades of an instance share."""

    config: RecommendConfig
    sources: Mapping[str, SizedSource]  # merged in this order
    metrics: Metrics
    hook: Hook | None
    hook_threads: ThreadPoolExecutor | None
    popular: I64


class CascadeRun:
    """One request. Event loop only."""

    def __init__(
        self,
        parts: CascadeParts,
        request: RecommendRequest,
        ranking: Ranking,
        history: UserHistory,
        tokens: Tokens,
        deadline_at: float,
    ) -> None:
        """Begin.

        Args:
            parts: Parts of the instance's cascades.
            request: The request.
            ranking: Version of the ranker that serves the request.
            history: History of the user.
            tokens: The history as tokens of that ranker.
            deadline_at: Deadline, as time.monotonic().

        Raises:
            Unprocessable: the request names a source that is not configured, or the order "blended"
                without a score blend.
        """
        self._parts = parts
        self._request = request
        self._ranking = ranking
        self._history = history
        self._tokens = tokens
        self.began_at = time.monotonic()
        config = parts.config
        self._order = request.order or config.order_of(has_blend=ranking.order is not None)
        if self._order == "blended" and ranking.order is None:
            raise Unprocessable(
                "order: 'blended' needs a ranker with a score blend, which this one lacks"
            )
        self._vocabulary = ranking.vocabulary
        self._sources = _chosen(parts.sources, request.sources)
        self.uses_shared_encoder = SHARED_ENCODER in self._sources or self._order == "blended"
        if self.uses_shared_encoder and SHARED_ENCODER not in self._sources:  # only for u
            self._sources[SHARED_ENCODER] = SizedSource(from_shared_encoder, 0)
        self.max_candidates = min(
            request.num_candidates or config.max_candidates, config.max_candidates
        )
        engine = ranking.engine
        num_tokens = len(tokens)
        # the history is encoded by the shared encoder's first pass
        cached = num_tokens if self.uses_shared_encoder else 0
        rank_s = (
            engine.cost.pass_s(num_tokens - cached, cached, self.max_candidates) + engine.residual_s
        )
        self._deadlines = split(self.began_at, deadline_at, rank_s, config)
        self._shown_at = int(time.time()) if request.timestamp is None else request.timestamp
        of_request = ranking.late.of_request(request.request_features, self._shown_at)
        self._shared_encoder = SharedEncoderUse(
            ranking, request.user, tokens, self._shown_at, self.max_candidates, of_request
        )
        self._exclude_seen = (
            config.exclude_seen if request.exclude_seen is None else request.exclude_seen
        )
        self._drops_unknown = (request.unknown_items or config.unknown_items) == "drop"
        self._denied = Denied(request.deny_items, history.all_items if self._exclude_seen else None)
        self._unknown: dict[str, int] = {}  # source -> number of items unknown to the ranker
        self._reports: list[StageReport] = []

    async def answer(self, verdict: Verdict | None, history_s: float) -> RecommendAnswer:
        """Run all stages."""
        async with self._shared_encoder:
            items, origins = await self._retrieve()
            retrieved_at = time.monotonic()
            known, rows, unknown = self._split_known(await self._apply_hook(items), origins)
            known, unknown = (
                known[: self.max_candidates],
                unknown[: max(0, self.max_candidates - len(known))],
            )
            prepared_at = time.monotonic()
            is_ranked = self._order != "retrieval" and (len(known) or self._unknown)
            ranked = await self._rank(known, rows[: len(known)]) if is_ranked else None
        scores = (
            self._scores(known, rows[: len(known)], ranked)
            if ranked
            else np.full(len(known), np.nan, np.float32)
        )
        order = fused_order(scores) if ranked and self._order == "fused" else best_first(scores)
        order = order[: self._request.num_items]
        items, scores = known[order], scores[order]
        if len(unknown):
            items = np.concatenate([items, unknown])[: self._request.num_items]
            scores = np.concatenate([scores, np.full(len(items) - len(scores), np.nan, np.float32)])
        limited_by = LimitedBy.NONE
        if len(items) < self._request.num_items:
            excluded = len(self._denied.ids) + len(self._ranking.items.withdrawn)
            limited_by = why_short(
                is_full=len(items) >= self.max_candidates,
                asked={name: source.num_items for name, source in self._sources.items()},
                reports=self._reports,
                excludes=bool(excluded or self._parts.hook)
                or (self._drops_unknown and bool(self._unknown)),
            )
        return RecommendAnswer(
            model_version=self._ranking.version,
            verdict=verdict,
            outcome=ranked.outcome if ranked else None,
            reason=ranked.reason if ranked else Reason.NONE,
            order=self._order if ranked else "retrieval",
            limited_by=limited_by,
            item_ids=items,
            scores=scores,
            origins=tuple([origins[item] for item in items.tolist()]),
            num_candidates=len(known),
            unknown=self._unknown,
            stages=tuple(self._reports),
            history=ranked.history if ranked else self._shared_encoder.read.report,
            prefix_tokens=ranked.prefix_tokens if ranked else 0,
            missing_features=ranked.missing_features if ranked else (),
            stages_s={
                "history": history_s,
                "retrieve": retrieved_at - self.began_at,
                "preprocess": prepared_at - retrieved_at,
                "rank": time.monotonic() - prepared_at,
            },
        )

    # ---- retrieval

    async def _retrieve(self) -> tuple[I64, Origins]:
        """Retrieve candidates, best first, with their sources, filled up with popular items."""
        names = list(self._sources)
        allowed = [
            self._allowed(name, one)
            for name, one in zip(names, await self._query_all(), strict=True)
        ]
        enough = min(self._request.num_items, self.max_candidates)
        if (
            len(allowed) == 1
            and len(allowed[0]) >= enough
            and not self._drops_unknown
            and self._parts.hook is None
        ):
            return allowed[0], Origins(names[0])  # no other items will be added
        items, row = interleave(allowed)
        origins = Origins(
            HOOK, zip(items.tolist(), [names[index] for index in row.tolist()], strict=True)
        )
        if self._drops_unknown:  # before popular items fill up
            items, _, _ = self._split_known(items, origins)
            origins = Origins(HOOK, [(item, origins[item]) for item in items.tolist()])
        if len(origins) < enough:
            self._fill_up(origins)
        return np.fromiter(origins, np.int64), origins

    async def _query_all(self) -> list[I64]:
        """Query all sources concurrently, and return the items of each, in their order."""
        if self._is_one_job():
            return await self._query_in_one_job()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._query(*source)) for source in self._sources.items()]
        found = []
        for task in tasks:
            if isinstance(one := task.result(), RequestError):
                raise one
            found.append(one)
        return found

    def _is_one_job(self) -> bool:
        """Whether retrieval and rank can be one job, since no other source or hook waits."""
        others = [source for name, source in self._sources.items() if name != SHARED_ENCODER]
        waits = any(source.waits for source in others) or self._parts.hook is not None
        return self.uses_shared_encoder and self._order != "retrieval" and not waits

    async def _query_in_one_job(self) -> list[I64]:
        """Query the shared encoder last, and let it score the merged candidates in the same job."""
        found: dict[str, I64] = {}

        def merged(items: I64) -> I64:
            ours = {**found, SHARED_ENCODER: items}
            return interleave([self._allowed(name, ours[name]) for name in self._sources])[0]

        # with fewer candidates, popular items will be added
        least = min(self._request.num_items, self.max_candidates) if len(self._parts.popular) else 0
        self._shared_encoder.rank_ahead(merged if len(self._sources) > 1 else None, least)
        for name in sorted(self._sources, key=lambda name: name == SHARED_ENCODER):
            one = await self._query(name, self._sources[name])
            if isinstance(one, RequestError):
                raise one
            found[name] = one
        return [found[name] for name in self._sources]

    def _fill_up(self, origins: Origins) -> None:
        """Add popular items after the retrieved candidates."""
        began_at = time.monotonic()
        popular = self._parts.popular
        if not len(popular):
            if not origins and (failed := self._failed()):
                raise Unavailable(
                    f"retrieval failed ({failed}), and no list of popular items is configured"
                )
            return
        # if unknown items are dropped, the full list may be needed, since its best items may be new
        most = len(popular) if self._drops_unknown else self.max_candidates + len(self._denied.ids)
        items = self._allowed(POPULAR, popular[:most])
        if self._drops_unknown:
            items, _, _ = self._split_known(items, Origins(POPULAR))
        for item in items.tolist():
            origins.setdefault(item, POPULAR)
        self._report(
            POPULAR, StageResult.OK if len(items) else StageResult.EMPTY, began_at, len(items)
        )

    def _failed(self) -> str:
        """Name the failed sources; an empty result is no failure."""
        return ", ".join(
            f"{r.stage} {r.result.value}" for r in self._reports if r.result.is_degraded
        )

    async def _query(self, name: str, source: SizedSource) -> I64 | RequestError:
        """Query one source; no items if it fails or is late. A client error is returned."""
        began_at = time.monotonic()
        asked = SourceRequest(
            user=self._request.user,
            history=self._history,
            num_items=source.num_items,
            denied=self._denied,
            exclude_seen=self._exclude_seen,
            call=Call(began_at, self._deadlines.retrieve_at, tenant=self._request.user.tenant),
            ranking=self._ranking,
            rows=self._tokens.rows,
            shared_encoder=self._shared_encoder,
        )
        result = StageResult.OK
        items = np.empty(0, np.int64)
        try:
            async with deadline(self._deadlines.retrieve_at - began_at):
                items = await source.ask(asked)
            result = StageResult.OK if len(items) or not source.num_items else StageResult.EMPTY
        except ColdUser:
            result = StageResult.COLD
        except RequestError as error:
            return error
        except NpuGrError as error:
            late = self._shared_encoder.found_late() if name == SHARED_ENCODER else None
            if late is None:
                result = _result_of(name, error)
            else:
                items = late
        self._report(name, result, began_at, len(items))
        return items

    def _allowed(self, source: str, items: I64) -> I64:
        """Remove denied and withdrawn items.

        The shared encoder excludes denied items itself, unless its vocabulary changed meanwhile.
        """
        if source != SHARED_ENCODER or self._ranking.vocabulary is not self._vocabulary:
            items = items[~is_in(items, self._denied.ids)]
        withdrawn = self._ranking.items.withdrawn
        return items[~is_in(items, withdrawn)] if len(withdrawn) else items

    # ---- items unknown to the ranker

    def _split_known(self, items: I64, origins: Origins) -> tuple[I64, I64, I64]:
        """Separate items unknown to the ranker, and count them by source.

        Returns:
            Known items, their rows, and unknown items (none if they are dropped), in order.
        """
        rows = self._shared_encoder.rows_of(items)
        if rows is not None:
            return items, rows, items[:0]
        rows = self._ranking.vocabulary.rows(items)
        is_known = rows != UNKNOWN
        if is_known.all():
            return items, rows, items[:0]
        unknown = items[~is_known]
        for item in unknown.tolist():
            source = origins[item]
            self._unknown[source] = self._unknown.get(source, 0) + 1
        return items[is_known], rows[is_known], unknown[:0] if self._drops_unknown else unknown

    # ---- pre-processing

    async def _apply_hook(self, items: I64) -> I64:
        """Apply the hook, and remove duplicates; if it fails, return the items unchanged."""
        hook = self._parts.hook
        config = self._parts.config
        if hook is None:
            return items
        began_at = time.monotonic()
        context = HookContext(
            self._request.user, self._history.events, self._request.context, self._shown_at
        )
        try:
            async with deadline(min(self._deadlines.hook_at - began_at, config.hook_budget_s)):
                if inspect.iscoroutinefunction(hook):
                    returned = await hook(items.copy(), context)
                else:
                    threads = self._parts.hook_threads
                    returned = await asyncio.get_running_loop().run_in_executor(
                        threads, hook, items.copy(), context
                    )
            items = interleave([as_items(returned)])[0]
        except Exception as error:  # code of the operator may raise any exception
            if config.on_hook_failure == "fail":
                raise Unavailable(f"hook: {type(error).__name__}") from error
            self._report("hook", _result_of("hook", error), began_at, len(items))
        else:
            self._report("hook", StageResult.OK, began_at, len(items))
        return items

    # ---- rank

    async def _rank(self, items: I64, rows: I64) -> RankAnswer | None:
        """Score known candidates: [n] external ids and their rows.

        Returns:
            None without candidates, or if the rank failed and the answer may lack it.
        """
        began_at = time.monotonic()
        is_partial = bool(self._unknown) and len(items) < min(
            self._request.num_items, self.max_candidates
        )
        if not len(items):
            self._report("rank", StageResult.PARTIAL, began_at, 0)
            return None
        request = RankRequest(
            user=self._request.user,
            candidates=items,
            history=HistoryRef(),
            timestamp=self._shown_at,
            request_features=self._request.request_features,
        )
        try:
            ranked = self._shared_encoder.ranked_ahead(request, rows)
            if ranked is None:
                async with deadline(self._deadlines.rank_at - began_at) as deadline_at:
                    # the objective of the rank counts from its own stage: from the arrival of the
                    # cascade it would have passed already, and cascades would overtake ranks
                    ranked = await self._shared_encoder.rank(
                        request, Call(began_at, deadline_at, tenant=request.user.tenant)
                    )
        except NpuGrError as error:
            if self._parts.config.on_rank_failure == "fail":
                raise
            self._report("rank", _result_of("rank", error), began_at, 0)
            return None
        self._parts.metrics.rank.answered(ranked)
        self._parts.metrics.requests.answered(RANK, ranked, time.monotonic() - began_at)
        self._report(
            "rank", StageResult.PARTIAL if is_partial else StageResult.OK, began_at, len(items)
        )
        return ranked

    def _scores(self, items: I64, rows: I64, ranked: RankAnswer) -> F32:
        """Compute the scores by which items ([n] external ids and rows) are ordered."""
        fitted = self._ranking.blend_sum
        if self._order != "blended" or fitted is None:
            return next(iter(ranked.scores.values()))
        own = None
        if self._parts.hook or not self._exclude_seen:  # else no item was seen
            own = fitted.order.own(self._history.all_items, items)
        return fitted(
            self._tokens.rows, rows, ranked.retrieval, ranked.scores[fitted.order.task], own
        )

    def _report(self, stage: str, result: StageResult, began_at: float, num_items: int) -> None:
        took_s = time.monotonic() - began_at
        self._reports.append(
            StageReport(
                stage=stage,
                result=result,
                began_s=began_at - self.began_at,
                took_s=took_s,
                num_items=num_items,
            )
        )


def _result_of(stage: str, error: Exception) -> StageResult:
    if isinstance(error, Overloaded):
        return StageResult.OVERLOADED
    if isinstance(error, DeadlineExceeded):
        return StageResult.OUT_OF_TIME
    log.warning("recommend: stage %s failed: %s: %s", stage, type(error).__name__, error)
    return StageResult.FAILED


def _chosen(
    sources: Mapping[str, SizedSource], names: tuple[str, ...] | None
) -> dict[str, SizedSource]:
    """Return the sources that a request names, in the configured order; None for all."""
    if names is None:
        return dict(sources)
    if missing := [name for name in names if name not in sources]:
        raise Unprocessable(
            f"sources: {quoted(missing[0])} is not configured; there are {', '.join(sources)}"
        )
    if not names:
        raise Unprocessable("sources: needs at least one")
    return {name: source for name, source in sources.items() if name in names}
