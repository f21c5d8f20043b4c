"""The `signal` job: decide whether to prefill the user's prefix, start the prefill, answer before it is done."""

from __future__ import annotations

import time
from contextlib import ExitStack

from npu_gr.core.history import HistoryReport
from npu_gr.core.request import SignalAnswer, SignalRequest, Verdict
from npu_gr.jobs.base import Call
from npu_gr.jobs.histories import Histories
from npu_gr.jobs.versions import Versions
from npu_gr.metrics.registry import Metrics

# After these verdicts the prefix is in HBM, or on its way, and waits for its rank.
_PRODUCED = (Verdict.PREINFER, Verdict.EXTEND, Verdict.RELOAD, Verdict.ALREADY_RESIDENT, Verdict.ALREADY_RUNNING)


class SignalJob:
    """Signals for the ranker's prefix, the generator's prompt, or both."""

    def __init__(self, versions: Versions, histories: Histories, metrics: Metrics) -> None:
        """Serve signals.

        Args:
            versions: the models whose prefixes are prefilled.
            histories: where behaviours come from.
            metrics: where verdicts are counted.
        """
        self._versions = versions
        self._histories = histories
        self._metrics = metrics

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
            history = await self._histories.read(request.user, request.history, versions.max_events, call.slot.outside)
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

    async def stop(self) -> None:
        """Do nothing: prefills belong to the models' relays."""
