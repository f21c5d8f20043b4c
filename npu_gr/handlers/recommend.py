"""The handler of `recommend`: the cascade in one call.

    signal    the ranker prefills the user's prefix while the stages before the rank run
    retrieve  query sources concurrently -> interleave, without duplicates, seen and denied items
    hook      business rules; then the first M candidates are ranked, with unknown items last
    rank      score the M candidates with that prefix
    rules     a second hook, then boosts, pins, diversity and exploration; return the best

A ranker that also retrieves may be a source (`SharedEncoderUse` in `sources.py`); then it leases
the prefix at once, without a signal. `cascade_run.py` runs the stages of one request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import structs

from npu_gr.catalogue.records import read_popular
from npu_gr.core.arrays import I64
from npu_gr.core.kinds import SIGNAL
from npu_gr.core.names import Names
from npu_gr.core.request import RecommendAnswer, RecommendRequest, SignalAnswer, Verdict
from npu_gr.handlers.base import Call
from npu_gr.handlers.cascade_plan import RecommendConfig
from npu_gr.handlers.cascade_run import CascadeParts, CascadeRun
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.hooks import load_hook
from npu_gr.handlers.item_filters import ItemFilters
from npu_gr.handlers.prefix_histories import UserHistory
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.sources import SizedSource
from npu_gr.handlers.versions import Versions
from npu_gr.metrics.registry import Metrics
from npu_gr.model.history_tokenizer import Tokens

HOOK_THREADS = 4


class Cascade:
    """Sources, hook and popular items of all cascades of an instance. Event loop only."""

    def __init__(
        self,
        config: RecommendConfig,
        sources: Callable[[RecommendConfig], Mapping[str, SizedSource]],
        metrics: Metrics,
        filters: ItemFilters,
        names: Names,
    ) -> None:
        """Load the hooks and the popular items.

        Args:
            config: Section `recommend` of the configuration.
            sources: Returns name -> source of a section, merged in this order.
            metrics: Metrics of the instance.
            filters: Attributes of items.
            names: Ids, names and titles of items.

        Raises:
            ConfigError: a hook, a rule or the list of popular items cannot be used.
        """
        if config.rules is not None:
            filters.check(config.rules)
        self._sources = sources
        self._metrics = metrics
        self._filters = filters
        self._names = names
        # separate threads, so that a hanging hook does not block other work
        self._hook_threads = ThreadPoolExecutor(HOOK_THREADS, "hook")
        self.parts = self.made(config, names.item_ids)
        self._before = "", self.parts  # with a ranker that may still drain

    def made(
        self, config: RecommendConfig, ids_of: Callable[[Sequence[str | int]], I64]
    ) -> CascadeParts:
        """Load the hooks and the popular items of a section. Thread-safe.

        Raises:
            ConfigError: a hook or the list of popular items cannot be used.
        """
        return CascadeParts(
            config,
            self._sources(config),
            self._metrics,
            load_hook("hook", config.hook),
            load_hook("hook_after", config.hook_after),
            self._hook_threads,
            read_popular(config.popular, ids_of),
            self._filters,
            self._names,
            np.random.default_rng(),
        )

    def serve(self, parts: CascadeParts, drains: str) -> None:
        """Serve other parts from the next request on.

        Args:
            parts: The parts.
            drains: Version of a ranker that they do not belong to; "" = all are as before.
        """
        if drains:
            self._before = drains, self.parts
        self.parts = parts

    def _parts_of(self, version: str) -> CascadeParts:
        """Return the parts for a version of the ranker: one that drains keeps its own choices."""
        drains, before = self._before
        return self.parts.chosen_by(before) if version == drains else self.parts

    async def recommend(
        self,
        request: RecommendRequest,
        ranking: Ranking,
        history: UserHistory,
        tokens: Tokens,
        call: Call,
        history_s: float = 0.0,
    ) -> RecommendAnswer:
        """Find the best items for a user.

        Args:
            request: The request.
            ranking: Version of the ranker that serves the request.
            history: History of the user.
            tokens: The history as tokens of that ranker.
            call: Arrival, deadline and permit.
            history_s: Seconds of reading the history.

        Raises:
            Unavailable: all sources failed, and there is no list of popular items.
            Unprocessable: the request names a source that is not configured, or the order "blended"
                without a score blend.
            RequestError: a source rejects the request.
        """
        parts = self._parts_of(ranking.version)
        run = CascadeRun(parts, request, ranking, history, tokens, call.deadline_at)
        verdict = None
        if not run.uses_shared_encoder:
            verdict = ranking.signal(request.user, tokens, run.max_candidates)
            self._count_signal(verdict, ranking, tokens, time.monotonic() - run.began_at)
        answer = await run.answer(verdict, history_s)
        self.parts.metrics.recommend.answered(answer)
        return answer

    def _count_signal(
        self, verdict: Verdict, ranking: Ranking, tokens: Tokens, took_s: float
    ) -> None:
        answer = SignalAnswer(
            verdict=verdict,
            model_version=ranking.version,
            history=tokens.report,
            resident_for_s=ranking.relay.t_life_s,
        )
        self.parts.metrics.signal.decided(verdict)
        self.parts.metrics.requests.answered(SIGNAL, answer, took_s)

    def stop(self) -> None:
        """Cancel hooks that have not begun."""
        self._hook_threads.shutdown(wait=False, cancel_futures=True)


class RecommendJob:
    """Handles recommends, each with the requested version of the ranker."""

    def __init__(self, cascade: Cascade, versions: Versions, histories: Histories) -> None:
        """Store the parts.

        Args:
            cascade: Sources, hook and popular items.
            versions: Versions of the ranker.
            histories: Histories of users.
        """
        self.cascade = cascade
        self._versions = versions
        self._histories = histories

    async def run(self, request: RecommendRequest, call: Call) -> RecommendAnswer:
        """Read the history once, and run the cascade with one version of the ranker."""
        ranking = self._versions.ranker(request.model_version)
        parts = self.cascade.parts
        rules = parts.config.rules
        if rules is not None or request.attributes or request.allow_items is not None:
            passing = await parts.filters.passing(
                request.allow_items, request.deny_items, request.attributes, rules
            )
            request = structs.replace(request, allow_items=passing.allow, deny_items=passing.deny)
        with ranking.use:
            reads = ranking.features.user.features
            history = await self._histories.read(
                request.user,
                request.history,
                self._versions.max_events,
                call.slot.suspended,
                reads,
                call.deadline_at,
                all_items=True,  # which were seen is a filter, and a term of a score blend
            )
            tokens = ranking.tokenize(history)
            self._histories.remember(request.user, request.history, history)
            history_s = time.monotonic() - call.arrived_at
            return await self.cascade.recommend(request, ranking, history, tokens, call, history_s)

    async def stop(self) -> None:
        """Cancel hooks that have not begun."""
        self.cascade.stop()
