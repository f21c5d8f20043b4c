"""The `recommend` job: the cascade in one call.

    signal    the ranker prefills the user's prefix while the stages before the rank run
    retrieve  sources side by side -> merged in turns, each item once -> seen and denied items out
    hook      business rules; then the first M candidates go on, those that the ranker does not know behind the others
    rank      reads that prefix and orders the M; the best are answered

A ranker that also retrieves may be a source itself (`shared encoder.py`): then it leases the prefix
at once, and there is no signal. `cascade_run.py` takes one request through the stages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from npu_gr.catalogue.records import read_popular
from npu_gr.core.arrays import I64
from npu_gr.core.kinds import SIGNAL
from npu_gr.core.request import RecommendAnswer, RecommendRequest, SignalAnswer, Verdict
from npu_gr.handlers.base import Call
from npu_gr.handlers.cascade_plan import RecommendConfig, load_hook
from npu_gr.handlers.cascade_run import CascadeParts, CascadeRun
from npu_gr.handlers.histories import Histories, UserHistory
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.sources import SizedSource
from npu_gr.handlers.versions import Versions
from npu_gr.metrics.registry import Metrics
from npu_gr.model.history_tokenizer import Tokens

HOOK_THREADS = 4


class Cascade:
    """What every cascade of an instance shares: sources, hook, popular items. Event loop only."""

    def __init__(
        self, config: RecommendConfig, sources: Mapping[str, SizedSource], metrics: Metrics
    ) -> None:
        """Load the hook and the popular items.

        Args:
            config: the section `recommend`.
            sources: name -> source; they are merged in this order.
            metrics: where stages are counted.

        Raises:
            ConfigError: the hook or the list of popular items cannot be used.
        """
        hook = load_hook(config.hook) if config.hook else None
        # threads of its own: a hook that hangs holds up no other work
        threads = ThreadPoolExecutor(HOOK_THREADS, "hook") if hook else None
        self.parts = CascadeParts(
            config, dict(sources), metrics, hook, threads, read_popular(config.popular)
        )

    def serve_popular(self, popular: I64) -> None:
        """Fill up later cascades with these items; those in progress keep theirs."""
        self.parts = replace(self.parts, popular=popular)

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
            request: how many items, which must not come.
            ranking: the version of the ranker that serves the request from start to end.
            history: of the user.
            tokens: the same behaviours as that ranker reads them.
            call: when the request arrived, and its deadline.
            history_s: seconds that reading the history took.

        Raises:
            Unavailable: no source answered, and there is no list of popular items.
            Unprocessable: the request names a source that is not configured, or an order that the
                ranker does not have.
            RequestError: a source says that the request makes no sense.
        """
        run = CascadeRun(self.parts, request, ranking, history, tokens, call.deadline_at)
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
        """Drop hooks that have not begun."""
        if self.parts.hook_threads is not None:
            self.parts.hook_threads.shutdown(wait=False, cancel_futures=True)


class RecommendJob:
    """Cascades, each with the version of the ranker that its request names."""

    def __init__(self, cascade: Cascade, versions: Versions, histories: Histories) -> None:
        """Serve recommends.

        Args:
            cascade: sources, hook, popular items.
            versions: of the ranker.
            histories: where behaviours come from.
        """
        self.cascade = cascade
        self._versions = versions
        self._histories = histories

    async def run(self, request: RecommendRequest, call: Call) -> RecommendAnswer:
        """Read the history once, run the cascade, and keep the ranker in use meanwhile."""
        ranking = self._versions.ranker(request.model_version)
        with ranking.use:
            reads = ranking.features.user.features
            history = await self._histories.read(
                request.user, request.history, self._versions.max_events, call.slot.suspended, reads
            )
            tokens = ranking.tokenize(history)
            self._histories.remember(request.user, request.history, history)
            history_s = time.monotonic() - call.arrived_at
            return await self.cascade.recommend(request, ranking, history, tokens, call, history_s)

    async def stop(self) -> None:
        """Drop hooks that have not begun."""
        self.cascade.stop()
