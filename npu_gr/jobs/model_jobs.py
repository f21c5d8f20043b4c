"""The `signal`, `rank` and `generate` jobs: each reads the history and asks the version that its request names.

A signal is answered before the prefix is filled; a rank and a generate are answered when they are done.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from msgspec.structs import replace

from npu_gr.core.errors import StoreFailed, Unprocessable
from npu_gr.core.history import HistoryReport
from npu_gr.core.request import (
    GenerateAnswer,
    GenerateRequest,
    RankAnswer,
    RankRequest,
    SignalAnswer,
    SignalRequest,
    Verdict,
)
from npu_gr.jobs.base import Call
from npu_gr.jobs.histories import Histories
from npu_gr.jobs.versions import Versions
from npu_gr.metrics.registry import Metrics

# After these verdicts the prefix is in HBM, or on its way, and waits for its rank.
_PRODUCED = (Verdict.PREINFER, Verdict.EXTEND, Verdict.RELOAD, Verdict.ALREADY_RESIDENT, Verdict.ALREADY_RUNNING)


class _ModelJob:
    """What the three have in common."""

    def __init__(self, versions: Versions, histories: Histories, metrics: Metrics) -> None:
        """Serve one kind of request.

        Args:
            versions: of the ranker and the generator.
            histories: where behaviours come from.
            metrics: where answers are counted.
        """
        self._versions = versions
        self._histories = histories
        self._metrics = metrics

    async def stop(self) -> None:
        """Do nothing: the versions stop their own work."""


class SignalJob(_ModelJob):
    """Signals for the ranker's prefix, the generator's prompt, or both."""

    async def run(self, request: SignalRequest, call: Call) -> SignalAnswer:
        """Decide, start, and answer at once."""
        versions, version = self._versions, request.model_version
        ranking = versions.ranker(version) if versions.rankers is not None else None
        generation = None
        if versions.generators is not None:
            generation = versions.generators.current if ranking else versions.generator(version)
        verdict = generate_verdict = None
        with ExitStack() as used:
            for model in (ranking, generation):
                if model is not None:
                    used.enter_context(model.use)
            reads = None if ranking is None else ranking.features.user.features
            history = await self._histories.read(
                request.user, request.history, versions.max_events, call.slot.outside, reads
            )
            read_at = time.monotonic()
            if ranking is not None:
                tokens = ranking.tokenize(history)
                report = tokens.report
                verdict = ranking.signal(request.user, tokens, request.num_candidates)
            else:
                events = history.events
                report = HistoryReport(fingerprint=history.fingerprint, num_tokens=len(events), origin=events.origin)
            self._histories.remember(request.user, request.history, history)
            if generation is not None:
                generate_verdict = await generation.signal(request.user, history)
        first = verdict or generate_verdict
        model = ranking or generation
        assert first is not None
        assert model is not None
        self._metrics.signal.decided(first)
        return SignalAnswer(
            verdict=first,
            model_version=model.version,
            history=report,
            resident_for_s=model.relay.t_life_s if first in _PRODUCED else 0.0,
            generate_verdict=generate_verdict,
            stages_s={"history": read_at - call.arrived_at, "decide": time.monotonic() - read_at},
        )


class RankJob(_ModelJob):
    """Ranks, each by the version of the ranker that its request names."""

    async def run(self, request: RankRequest, call: Call) -> RankAnswer:
        """Read the history, score, and keep the version in use meanwhile."""
        ranking = self._versions.ranker(request.model_version)
        if not len(request.candidates):
            raise Unprocessable("candidates: needs at least one")
        with ranking.use:
            reads = ranking.features.user.features
            history = await self._histories.read(
                request.user, request.history, self._versions.max_events, call.slot.outside, reads
            )
            tokens = ranking.tokenize(history)
            self._histories.remember(request.user, request.history, history)
            answer = await ranking.rank(request, tokens, call, time.monotonic() - call.arrived_at)
        self._metrics.rank.answered(answer)
        return answer


class GenerateJob(_ModelJob):
    """Generates, each by the version of the generator that its request names."""

    async def run(self, request: GenerateRequest, call: Call) -> GenerateAnswer:
        """Read the history, search, and keep the version in use meanwhile."""
        generation = self._versions.generator(request.model_version)
        with generation.use:
            history = await self._histories.read(
                request.user, request.history, self._versions.max_events, call.slot.outside
            )
            events = history.events
            if events.origin.fault and not len(events):  # an empty prompt would blame the caller: 422
                raise StoreFailed("the history store fails, and nothing is known of the user", events.origin.fault)
            self._histories.remember(request.user, request.history, history)
            history_s = time.monotonic() - call.arrived_at
            answer = await generation.generate(request, history, call, history_s)
        answer = replace(answer, history=replace(answer.history, origin=events.origin))
        self._metrics.generate.answered(answer)
        return answer
