"""The `recommend` job of a service: the cascade in one call. `service.py` brings the request here.

    signal  -> the ranker encodes the user's prefix while everything down to the rank runs
    sources -> side by side -> in turns, each item once -> seen and denied ones out -> hook -> the first M
    rank    -> reads that prefix, orders the M -> the best are answered

One deadline for all of it: the rank keeps what the cost model says it takes, the hook its budget, the sources have the
rest. A stage that fails degrades as configured, the answer says so, and it is counted. What one caller got wrong is
still that caller's error.

Invariants:
  C1  no item twice, none that was denied or (if so configured) seen, at most M are ranked; only the hook may add items
  C2  now <= end of retrieval <= end of the hook <= end of the rank <= deadline
  C3  with nothing failing and no hook, the items are those of generate (and match) and rank called by hand
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from npu_gr.admission.deadline import deadline
from npu_gr.catalogue.tokens import Tokens
from npu_gr.core.errors import (
    ColdUser,
    ConfigError,
    DeadlineExceeded,
    NpuGrError,
    Overloaded,
    RequestError,
    Unavailable,
)
from npu_gr.core.request import (
    F32,
    I64,
    Events,
    GenerateRequest,
    HistoryRef,
    MatchRequest,
    RankAnswer,
    RankRequest,
    Reason,
    RecommendAnswer,
    RecommendRequest,
    StageReport,
    StageResult,
    UserKey,
    Verdict,
)
from npu_gr.jobs.generate import Generation
from npu_gr.jobs.match import Matching
from npu_gr.jobs.rank import Ranking
from npu_gr.metrics.registry import Metrics

log = logging.getLogger(__name__)

HOOK_THREADS = 4
FUSION = 60

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class RecommendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where candidates come from, what is made of them, and what happens when a stage fails."""

    # items asked of each source; they are taken in turns, in this order
    sources: dict[Literal["generate", "match"], Count] = msgspec.field(default_factory=lambda: {"generate": 100})
    max_candidates: Count = 200  # M: ranked at most
    exclude_seen: bool = True  # leave out the items of the history
    hook: str | None = None  # "package.module:function", see `Hook`; None = none
    popular: str | None = None  # file of item ids, one a line, best first: what fills up a short retrieval
    order: Literal["rank", "fused"] = "rank"  # fused: by the places in retrieval and rank together, see `by_both`
    rank_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.5  # of the time, that the rank may keep at most
    rank_least_s: Seconds = 0.02  # that it keeps if the share allows, however little the cost model says
    hook_budget_s: Seconds = 0.02
    answer_s: Seconds = 0.005  # kept back for what follows the rank
    on_rank_failure: Literal["retrieval_order", "fail"] = "retrieval_order"
    on_hook_failure: Literal["skip", "fail"] = "skip"

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources: needs at least one")


class Shown(NamedTuple):
    """What a hook is told beside the items."""

    user: UserKey
    history: Events
    context: Mapping[str, bool | int | float | str]  # of the request
    timestamp: int  # unix seconds the items are shown at


Hook = Callable[[I64, Shown], Any]
"""Business rules: `hook(items, shown)` gets the candidates, int64 [n], best first, and answers those to rank: fewer,
in another order, or others. `async def` runs on the event loop, `def` in a thread. Exceptions degrade the answer."""


# ---- the pure part


def split(now_at: float, deadline_at: float, rank_s: float, config: RecommendConfig) -> tuple[float, float, float]:
    """Instants at which retrieval, hook and rank must be done.

    Args:
        now_at, deadline_at: instants (time.monotonic).
        rank_s: what the rank takes if it has to encode the whole history.
        config: shares and budgets.
    """
    rank_deadline_at = max(deadline_at - config.answer_s, now_at)
    left_s = rank_deadline_at - now_at
    hook_deadline_at = rank_deadline_at - min(max(rank_s, config.rank_least_s), left_s * config.rank_share)
    hook_s = config.hook_budget_s if config.hook else 0.0
    return hook_deadline_at - min(hook_s, (hook_deadline_at - now_at) / 2), hook_deadline_at, rank_deadline_at


def in_turns(rows: Sequence[I64]) -> tuple[I64, I64]:
    """The best of each row, then the second of each, ...; of an item that comes again the first stays.

    Returns:
        items [n], and the row that each came from [n].
    """
    items = np.concatenate([*rows, np.empty(0, np.int64)])
    row = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    place = np.concatenate([np.arange(len(r)) for r in rows] or [items])
    order = np.lexsort((row, place))
    items, row = items[order], row[order]
    first = np.sort(np.unique(items, return_index=True)[1])
    return items[first], row[first]


def best_first(scores: F32) -> I64:
    """Places of the scores from high to low; of equal ones the earlier first, NaN last."""
    order: I64 = np.argsort(-scores, kind="stable")  # numpy sorts NaN to the end
    return order


def by_both(scores: F32) -> I64:
    """Places of candidates that stand in the order of the retrieval, by their places there and under the scores.

    Source: reciprocal rank fusion with its constant of 60 (Cormack, Clarke and Buettcher, SIGIR 2009).
    """
    retrieved = np.arange(len(scores))
    ranked = np.empty_like(retrieved)
    ranked[best_first(scores)] = retrieved
    order: I64 = np.argsort(-1.0 / (FUSION + retrieved) - 1.0 / (FUSION + ranked), kind="stable")
    return order


# ---- what it is made of


class Asked(NamedTuple):
    """What a source is asked."""

    user: UserKey
    events: Events
    num_items: int
    denied: I64  # [n] external ids
    exclude_seen: bool
    deadline_at: float  # instant (time.monotonic)


Source = Callable[[Asked], Awaitable[I64]]
"""Items, best first. Raises ColdUser where it knows nothing of the user, NpuGrError where it failed."""


class Sized(NamedTuple):
    """A source, and how many items it is asked for."""

    ask: Source
    num_items: int


def from_generation(current: Callable[[], Generation], metrics: Metrics) -> Source:
    """Candidates by semantic-ID beam search, of the generator that serves now."""

    async def retrieve(asked: Asked) -> I64:
        began_at = time.monotonic()
        request = GenerateRequest(
            user=asked.user, history=HistoryRef(), num_items=asked.num_items, deny_items=asked.denied
        )
        generation, fingerprint = current(), asked.events.fingerprint()
        with generation.use:
            answer = await generation.generate(request, asked.events.items, fingerprint, asked.deadline_at, 0.0)
        metrics.generate_done(answer, time.monotonic() - began_at)
        return answer.item_ids

    return retrieve


def from_matching(matching: Matching, metrics: Metrics) -> Source:
    """Candidates by the user's vector."""

    async def retrieve(asked: Asked) -> I64:
        began_at = time.monotonic()
        request = MatchRequest(
            user=asked.user,
            num_items=asked.num_items,
            exclude_seen=asked.exclude_seen,
            deny_items=asked.denied,
        )
        answer = await matching.match(request, asked.events.items, asked.deadline_at)
        metrics.match_done(answer, time.monotonic() - began_at)
        return answer.item_ids

    return retrieve


def load_hook(name: str) -> Hook:
    """The function that `package.module:function` names.

    Raises:
        ConfigError: there is none, or it does not take two arguments.
    """
    module, _, function = name.partition(":")
    try:
        hook = getattr(importlib.import_module(module), function)
        inspect.signature(hook).bind("items", "shown")
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"recommend.hook: {name!r}: {error}") from error
    found: Hook = hook
    return found


def read_popular(path: str | None) -> I64:
    """Item ids of a file, one a line.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    if path is None:
        return np.empty(0, np.int64)
    try:
        items = np.array([int(line) for line in Path(path).read_text().split()], np.int64)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"recommend.popular: {path}: {error}") from error
    if not len(items):
        raise ConfigError(f"recommend.popular: {path} holds no item")
    return in_turns([items])[0]


# ---- the cascade


class Cascade:
    """Sources, a hook and a ranker behind one call. Event loop only.

    Raises:
        ConfigError: the hook or the popular list cannot be used.
    """

    def __init__(self, config: RecommendConfig, sources: Mapping[str, Sized], metrics: Metrics) -> None:
        self.config, self.sources, self.metrics = config, dict(sources), metrics
        self.hook = load_hook(config.hook) if config.hook else None
        self.popular = read_popular(config.popular)
        # its own: a hook that hangs holds up no other work
        self.hook_threads = ThreadPoolExecutor(HOOK_THREADS, "hook") if self.hook else None

    async def recommend(
        self,
        request: RecommendRequest,
        ranking: Ranking,
        events: Events,
        tokens: Tokens,
        deadline_at: float,
        history_s: float,
    ) -> RecommendAnswer:
        """The best items for a user.

        Args:
            request: what is asked.
            ranking: the version that it is served by, from start to end.
            events: of the user.
            tokens: the same, as that ranker reads them.
            deadline_at: instant (time.monotonic) by which the answer must be there.
            history_s: what reading the history took.

        Raises:
            Unavailable: no source answered, and there is no popular list.
            RequestError: a source says that the request makes no sense.
        """
        run = _Run(self, request, ranking, events, tokens, deadline_at)
        verdict = ranking.signal(request.user, tokens, run.max_candidates)
        self.metrics.signal_decided(verdict, time.monotonic() - run.began_at)
        return await run.answer(verdict, history_s)

    def stop(self) -> None:
        """Hooks that have not begun never will."""
        if self.hook_threads is not None:
            self.hook_threads.shutdown(wait=False, cancel_futures=True)


class _Run:
    """One request on its way through the stages."""

    def __init__(
        self,
        cascade: Cascade,
        request: RecommendRequest,
        ranking: Ranking,
        events: Events,
        tokens: Tokens,
        deadline_at: float,
    ) -> None:
        self._cascade, self._request, self._ranking = cascade, request, ranking
        self._events, self._tokens = events, tokens
        self.began_at = time.monotonic()
        config = cascade.config
        self.max_candidates = min(request.num_candidates or config.max_candidates, config.max_candidates)
        engine = ranking.engine
        rank_s = engine.cost.full_s(len(tokens), self.max_candidates) + engine.residual_s
        self._retrieve_deadline_at, self._hook_deadline_at, self._rank_deadline_at = split(
            self.began_at, deadline_at, rank_s, config
        )
        self._shown_at = int(time.time()) if request.timestamp is None else request.timestamp
        self._exclude_seen = config.exclude_seen if request.exclude_seen is None else request.exclude_seen
        denied = [np.empty(0, np.int64) if request.deny_items is None else request.deny_items]
        self._denied: I64 = np.unique(np.concatenate([*denied, *([events.items] if self._exclude_seen else [])]))
        self._reports: list[StageReport] = []

    async def answer(self, verdict: Verdict, history_s: float) -> RecommendAnswer:
        """The stages, one after the other."""
        origins = await self._retrieve()
        retrieved_s = time.monotonic()
        items = (await self._hooked(np.fromiter(origins, np.int64)))[: self.max_candidates]
        prepared_at = time.monotonic()
        ranked = await self._rank(items) if len(items) else None
        scores = next(iter(ranked.scores.values())) if ranked else np.full(len(items), np.nan, np.float32)
        ordered = by_both if ranked and self._cascade.config.order == "fused" else best_first
        best = ordered(scores)[: self._request.num_items]
        return RecommendAnswer(
            model_version=self._ranking.version,
            verdict=verdict,
            outcome=ranked.outcome if ranked else None,
            reason=ranked.reason if ranked else Reason.NONE,
            item_ids=items[best],
            scores=scores[best],
            origins=tuple(origins.get(item, "hook") for item in items[best].tolist()),
            num_candidates=len(items),
            stages=tuple(self._reports),
            history=self._tokens.report,
            prefix_tokens=ranked.prefix_tokens if ranked else 0,
            stages_s={
                "history": history_s,
                "retrieve": retrieved_s - self.began_at,
                "preprocess": prepared_at - retrieved_s,
                "rank": time.monotonic() - prepared_at,
            },
        )

    # ---- retrieval

    async def _retrieve(self) -> dict[int, str]:
        """Candidates, best first, each with the source that had it; popular ones after them where they are too few."""
        names = list(self._cascade.sources)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(*source)) for source in self._cascade.sources.items()]
        found = [task.result() for task in tasks]
        for error in found:
            if isinstance(error, RequestError):
                raise error
        items, row = in_turns([self._allowed(one) for one in found if not isinstance(one, RequestError)])
        origins = {item: names[index] for item, index in zip(items.tolist(), row.tolist(), strict=True)}
        if len(origins) < min(self._request.num_items, self.max_candidates):
            self._fill_up(origins)
        return origins

    def _fill_up(self, origins: dict[int, str]) -> None:
        """Popular items after those that were found."""
        began_at, popular = time.monotonic(), self._cascade.popular
        if not len(popular):
            if not origins and (broken := self._broken()):
                raise Unavailable(f"retrieval: {broken}, and no list of popular items is configured")
            return
        most = self.max_candidates + len(self._denied)
        items = self._allowed(popular[:most])
        for item in items.tolist():
            origins.setdefault(item, "popular")
        self._report("popular", StageResult.OK if len(items) else StageResult.EMPTY, began_at, len(items))

    def _broken(self) -> str:
        """Sources that could not do their part, in words; having nothing to say is no failure."""
        harmless = (StageResult.OK, StageResult.EMPTY, StageResult.COLD)
        return ", ".join(f"{r.stage} {r.result.value}" for r in self._reports if r.result not in harmless)

    async def _ask(self, name: str, source: Sized) -> I64 | RequestError:
        """What a source has in time: nothing, if it fails. What the caller got wrong comes back as it is."""
        began_at, deadline_at = time.monotonic(), self._retrieve_deadline_at
        asked = Asked(self._request.user, self._events, source.num_items, self._denied, self._exclude_seen, deadline_at)
        result, items = StageResult.OK, np.empty(0, np.int64)
        try:
            async with deadline(deadline_at - began_at):
                items = await source.ask(asked)
            result = StageResult.OK if len(items) else StageResult.EMPTY
        except ColdUser:
            result = StageResult.COLD
        except RequestError as error:
            return error
        except NpuGrError as error:
            result = _result_of(name, error)
        self._report(name, result, began_at, len(items))
        return items

    def _allowed(self, items: I64) -> I64:
        allowed: I64 = items[~np.isin(items, self._denied)]
        return allowed

    # ---- pre-processing

    async def _hooked(self, items: I64) -> I64:
        """The hook's items, each once; the same ones where it fails."""
        hook, config = self._cascade.hook, self._cascade.config
        if hook is None:
            return items
        began_at = time.monotonic()
        shown = Shown(self._request.user, self._events, self._request.context, self._shown_at)
        try:
            async with deadline(min(self._hook_deadline_at - began_at, config.hook_budget_s)):
                if inspect.iscoroutinefunction(hook):
                    answer = await hook(items.copy(), shown)
                else:
                    threads = self._cascade.hook_threads
                    answer = await asyncio.get_running_loop().run_in_executor(threads, hook, items.copy(), shown)
            items = in_turns([_as_items(answer)])[0]
        except Exception as error:  # the operator's code may raise anything
            if config.on_hook_failure == "fail":
                raise Unavailable(f"hook: {type(error).__name__}") from error
            self._report("hook", _result_of("hook", error), began_at, len(items))
        else:
            self._report("hook", StageResult.OK, began_at, len(items))
        return items

    # ---- rank

    async def _rank(self, items: I64) -> RankAnswer | None:
        """Scores, or None where it failed and that is not the end."""
        began_at = time.monotonic()
        request = RankRequest(user=self._request.user, candidates=items, history=HistoryRef(), timestamp=self._shown_at)
        try:
            async with deadline(self._rank_deadline_at - began_at) as deadline_at:
                ranked = await self._ranking.rank(request, self._tokens, deadline_at, 0.0)
        except NpuGrError as error:
            if self._cascade.config.on_rank_failure == "fail":
                raise
            self._report("rank", _result_of("rank", error), began_at, 0)
            return None
        self._cascade.metrics.rank_done(ranked, time.monotonic() - began_at)
        self._report("rank", StageResult.OK, began_at, len(items))
        return ranked

    def _report(self, stage: str, result: StageResult, began_at: float, num_items: int) -> None:
        took_s = time.monotonic() - began_at
        self._reports.append(
            StageReport(
                stage=stage, result=result, began_s=began_at - self.began_at, took_s=took_s, num_items=num_items
            )
        )


def _as_items(answer: object) -> I64:
    items = np.asarray(answer)
    if items.ndim != 1 or (len(items) and items.dtype.kind not in "iu"):
        raise TypeError(f"needs a row of item ids, got {type(answer).__name__}")
    return items.astype(np.int64)


def _result_of(stage: str, error: Exception) -> StageResult:
    if isinstance(error, Overloaded):
        return StageResult.OVERLOADED
    if isinstance(error, DeadlineExceeded):
        return StageResult.OUT_OF_TIME
    log.warning("recommend: %s failed: %s: %s", stage, type(error).__name__, error)
    return StageResult.FAILED
