"""The `generate` job: read the history, search with the version of the generator that the request names."""

from __future__ import annotations

import time

from msgspec.structs import replace

from npu_gr.core.errors import StoreFailed
from npu_gr.core.request import GenerateAnswer, GenerateRequest
from npu_gr.jobs.base import Call
from npu_gr.jobs.histories import Histories
from npu_gr.jobs.versions import Versions
from npu_gr.metrics.registry import Metrics


class GenerateJob:
    """Generates, each by the version of the generator that its request names."""

    def __init__(self, versions: Versions, histories: Histories, metrics: Metrics) -> None:
        """Serve generates.

        Args:
            versions: of the generator.
            histories: where behaviours come from.
            metrics: where answers are counted.
        """
        self._versions = versions
        self._histories = histories
        self._metrics = metrics

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

    async def stop(self) -> None:
        """Do nothing: the versions stop their own work."""
