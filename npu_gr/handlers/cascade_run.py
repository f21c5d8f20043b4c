"""Run one recommend through the stages of the cascade.

One deadline covers all stages: the rank has the time of the cost model, the hook its budget, and
the sources the rest. A failed stage degrades the answer as configured, which the answer and metrics
report. Client errors are returned as errors.

Invariants:
  C1  items are distinct, and none is denied, withdrawn or (if configured) seen; at most M are
      ranked; only hooks and pins may add items, and only pins seen ones
  C2  now <= end of retrieval <= end of the hook <= end of the rank <= deadline
  C3  without failures, hooks and rules, the result equals separate calls of the sources and of rank
  C4  items unknown to the ranker are counted, and last or (`unknown_items: drop`) dropped
  C5  with a shared encoder, user vector, items, logits and order are of one version, and
      independent of cached prefixes
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import (
    ColdUser,
    NpuGrError,
    RequestError,
    Unavailable,
    Unprocessable,
)
from npu_gr.core.history import HistoryRef
from npu_gr.core.item_rules import OrderRules
from npu_gr.core.kinds import RANK
from npu_gr.core.lifetime import deadline
from npu_gr.core.names import Names
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
from npu_gr.handlers.base import Call
from npu_gr.handlers.cascade_plan import (
    HOOK,
    HOOK_AFTER,
    PIN,
    POPULAR,
    RULES,
    SHARED_ENCODER,
    Denied,
    Origins,
    RecommendConfig,
    Shown,
    best_first,
    failed_sources,
    fused_order,
    interleave,
    is_in,
    result_of,
    split,
    why_short,
)
from npu_gr.handlers.hooks import (
    Hook,
    HookAfter,
    HookContext,
    RankedItems,
    call_hook,
    reordered,
)
from npu_gr.handlers.item_filters import ItemFilters
from npu_gr.handlers.prefix_histories import UserHistory
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.rules import Asked, apply
from npu_gr.handlers.sources import (
    SharedEncoderUse,
    SizedSource,
    SourceRequest,
    chosen_sources,
    from_shared_encoder,
)
from npu_gr.metrics.registry import Metrics
from npu_gr.model.blend import OWN_OR_NEXT, own_or_next
from npu_gr.model.history_tokenizer import UNKNOWN, Tokens
from npu_gr.model.own_items import OwnItems


@dataclass(frozen=True, slots=True)
class CascadeParts:
    """The parts that all cascades of an instance share."""

    config: RecommendConfig
    sources: Mapping[str, SizedSource]  # merged in this order
    metrics: Metrics
    hook: Hook | None
    hook_after: HookAfter | None
    hook_threads: ThreadPoolExecutor
    popular: I64
    filters: ItemFilters
    names: Names
    random: np.random.Generator

    def chosen_by(self, other: CascadeParts) -> CascadeParts:
        """Return these parts with what a training chooses taken from others."""
        config = self.config.chosen_by(other.config)
        return replace(self, config=config, sources=other.sources, popular=other.popular)


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
        self._sources = chosen_sources(parts.sources, request.sources)
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
        seen = history.all_items if self._exclude_seen else None
        self._denied = Denied(request.deny_items, seen, request.allow_items)
        self._unknown: dict[str, int] = {}  # source -> number of items unknown to the ranker
        self._reports: list[StageReport] = []

    async def answer(self, verdict: Verdict | None, history_s: float) -> RecommendAnswer:
        """Run all stages."""
        async with self._shared_encoder:
            items, origins = await self._retrieve()
            retrieved_at = time.monotonic()
            if (hook := self._parts.hook) is not None:
                hook_at = self._deadlines.hook_at
                items = await self._hooked(HOOK, hook, items.copy(), items, hook_at)
            known, rows, unknown = self._split_known(items, origins)
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
        items = np.concatenate([known[order], unknown])
        scores = np.concatenate([scores[order], np.full(len(unknown), np.nan, np.float32)])
        num_found = len(items)
        items, scores, propensities = await self._after_rank(
            Shown(items, scores), origins, by_place=ranked is None or self._order == "fused"
        )
        limited_by = LimitedBy.NONE
        if len(items) < self._request.num_items <= num_found:
            limited_by = LimitedBy.FILTER  # by the rules or the hook after the rank
        elif len(items) < self._request.num_items:
            excludes = len(self._denied.ids) + len(self._ranking.items.withdrawn)
            hooks = self._parts.hook or self._parts.hook_after
            limited_by = why_short(
                is_full=num_found >= self.max_candidates,
                asked={name: source.num_items for name, source in self._sources.items()},
                reports=self._reports,
                excludes=bool(excludes or hooks or self._denied.allowed is not None)
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
            propensities=propensities,
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
            if not origins and (failed := failed_sources(self._reports)):
                raise Unavailable(
                    f"retrieval failed ({failed}), and no list of popular items is configured"
                )
            return
        # if unknown items are dropped, the full list may be needed, since its best items may be new
        is_all = self._drops_unknown or self._denied.allowed is not None
        most = len(popular) if is_all else self.max_candidates + len(self._denied.ids)
        items = self._allowed(POPULAR, popular[:most])
        if self._drops_unknown:
            items, _, _ = self._split_known(items, Origins(POPULAR))
        for item in items.tolist():
            origins.setdefault(item, POPULAR)
        self._report(
            POPULAR, StageResult.OK if len(items) else StageResult.EMPTY, began_at, len(items)
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
                result = result_of(name, error)
            else:
                items = late
        self._report(name, result, began_at, len(items))
        return items

    def _allowed(self, source: str, items: I64) -> I64:
        """Remove denied and withdrawn items.

        The shared encoder excludes denied items itself, unless its vocabulary changed meanwhile.
        """
        if source != SHARED_ENCODER or self._ranking.vocabulary is not self._vocabulary:
            items = self._denied.left(items)
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

    async def _hooked(
        self, stage: str, hook: Hook | HookAfter, given: object, items: I64, until_at: float
    ) -> I64:
        """Apply a hook; if it fails, return the items unchanged."""
        began_at = time.monotonic()
        config = self._parts.config
        context = HookContext(
            self._request.user, self._history.events, self._request.context, self._shown_at
        )
        try:
            budget_s = min(until_at - began_at, config.hook_budget_s)
            items = await call_hook(hook, given, context, budget_s, self._parts.hook_threads)
        except Exception as error:  # code of the operator may raise any exception
            if config.on_hook_failure == "fail":
                raise Unavailable(f"{stage}: {type(error).__name__}") from error
            self._report(stage, result_of(stage, error), began_at, len(items))
        else:
            self._report(stage, StageResult.OK, began_at, len(items))
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
            self._report("rank", result_of("rank", error), began_at, 0)
            return None
        self._parts.metrics.rank.answered(ranked)
        self._ranking.on_ranked(request, self._history, ranked)
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
        if weight := fitted.order.weights[OWN_OR_NEXT]:
            had = OwnItems.of(self._history.all_items)
            more = own_or_next(fitted.order, had, items, self._tokens.rows, rows)
            own = np.float32(weight) * more + (0 if own is None else own)
        return fitted(
            self._tokens.rows, rows, ranked.retrieval, ranked.scores[fitted.order.task], own
        )

    # ---- after the rank

    async def _after_rank(self, shown: Shown, origins: Origins, *, by_place: bool) -> Shown:
        """Apply the second hook and the rules, and cut the list to the requested number."""
        parts, request = self._parts, self._request

        def banned(items: I64) -> npt.NDArray[np.bool_]:
            return self._denied.bans(items) | is_in(items, self._ranking.items.withdrawn)

        if parts.hook_after is not None:
            before = shown
            given = RankedItems(shown, parts.names.items, parts.names.titles, parts.filters)
            ids = await self._hooked(
                HOOK_AFTER, parts.hook_after, given, shown.items, self._deadlines.answer_at
            )
            if ids is not before.items:
                shown = reordered(before, ids[~banned(ids)])
                added = np.setdiff1d(shown.items, before.items).tolist()
                origins.update(dict.fromkeys(added, HOOK_AFTER))
        configured = parts.config.rules
        if configured is None and request.rules is None and request.shown_items is None:
            return shown.first(request.num_items)
        rules = (configured or OrderRules()).then(request.rules)
        if request.shown_items is not None and rules.cap is None:
            raise Unprocessable("shown_items: needs a cap (recommend.rules.cap, or rules.cap)")
        if not rules.is_empty:
            began_at = time.monotonic()
            asked = Asked(
                num_items=request.num_items,
                shown_items=request.shown_items,
                events=self._history.events,
                actions=self._ranking.model.actions,
                now_s=self._shown_at,
                banned=banned,
                by_place=by_place,
            )
            before = shown
            try:
                shown = apply(rules, shown, asked, parts.filters, parts.random)
                if rules.pin:
                    added = set(shown.items.tolist()).difference(before.items.tolist())
                    origins.update(dict.fromkeys(added, PIN))
                self._report(RULES, StageResult.OK, began_at, len(shown.items))
            except Unprocessable as error:  # an attribute that the catalogue lacks
                if request.rules is not None:
                    raise
                self._report(RULES, result_of(RULES, error), began_at, len(shown.items))
        return shown.first(request.num_items)

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
