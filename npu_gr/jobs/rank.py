"""The `rank` job: read the history, score the candidates with the version of the ranker that the request names."""

from __future__ import annotations

import time

from npu_gr.core.errors import Unprocessable
from npu_gr.core.request import RankAnswer, RankRequest
from npu_gr.jobs.base import Call
from npu_gr.jobs.histories import Histories
from npu_gr.jobs.versions import Versions
from npu_gr.metrics.registry import Metrics


class RankJob:
    """Ranks, each by the version of the ranker that its request names."""

    def __init__(self, versions: Versions, histories: Histories, metrics: Metrics) -> None:
        """Serve ranks.

        Args:
            versions: of the ranker.
            histories: where behaviours come from.
            metrics: where answers are counted.
        """
        self._versions = versions
        self._histories = histories
        self._metrics = metrics

    async def run(self, request: RankRequest, call: Call) -> RankAnswer:
        """Read the history, score, and keep the version in use meanwhile."""
        ranking = self._versions.ranker(request.model_version)
        if not len(request.candidates):
            raise Unprocessable("candidates: needs at least one")
        with ranking.use:
            history = await self._histories.read(
                request.user, request.history, self._versions.max_events, call.slot.outside
            )
            tokens = ranking.tokenize(history)
            self._histories.remember(request.user, request.history, history)
            answer = await ranking.rank(request, tokens, call, time.monotonic() - call.arrived_at)
        self._metrics.rank.answered(answer)
        return answer

    async def stop(self) -> None:
        """Do nothing: the versions stop their own work."""
