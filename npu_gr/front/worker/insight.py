"""What operators see through a front worker: the engine's numbers, and what is this worker's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from npu_gr.core.errors import Unavailable
from npu_gr.front.questions import Scrape
from npu_gr.front.worker.remote_service import RemoteService
from npu_gr.metrics.exposition import expose
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.status import StatusReport
from npu_gr.replay.recorder import RecordOrder, RecordStatus
from npu_gr.server.debug.stacks import own_stacks
from npu_gr.server.newest import NewestRequests

_PART = "==== {}\n{}\n"


class RemoteInsight:
    """An `Insight` into an instance of several processes."""

    def __init__(
        self, number: int, service: RemoteService, metrics: Metrics, newest: NewestRequests, flush: Callable[[], None]
    ) -> None:
        """Ask nothing yet.

        Args:
            number: of the worker.
            service: in the engine.
            metrics: of this worker: all that there is while there is no engine.
            newest: requests of this worker.
            flush: tells the engine what was counted here until now.
        """
        self._title = f"front worker {number}"
        self._service = service
        self._metrics = metrics
        self._newest = newest
        self._flush = flush

    async def exposition(self, accept: str, names: Sequence[str] = ()) -> tuple[bytes, str]:
        self._flush()
        try:
            body, content_type = await self._service.ask("metrics", Scrape(accept, tuple(names)))
        except Unavailable:
            return await expose(self._metrics, accept, names)
        return body, content_type

    async def status(self) -> StatusReport:
        self._flush()
        return cast("StatusReport", await self._service.ask("status"))

    async def stacks(self) -> str:
        own = _PART.format(self._title, await own_stacks())
        try:
            return own + _PART.format("engine", await self._service.ask("stacks"))
        except Unavailable as error:
            return own + _PART.format("engine", error)

    async def profile(self, seconds: float) -> str:
        return cast("str", await self._service.ask("profile", seconds))

    async def bundle_texts(self) -> dict[str, str]:
        self._flush()
        own = {"requests-of-worker.jsonl": "".join(f"{line}\n" for line in self._newest.lines())}
        try:
            return {**await self._service.ask("bundle"), **own}
        except Unavailable as error:
            body, _ = await expose(self._metrics, "")
            return {**own, "metrics.txt": body.decode(), "engine.txt": f"{error}\n"}


class RemoteRecorder:
    """The engine's recorder."""

    def __init__(self, service: RemoteService) -> None:
        self._service = service

    async def status(self) -> RecordStatus:
        return cast("RecordStatus", await self._service.ask("record"))

    async def switch_on(self, order: RecordOrder) -> None:
        await self._service.ask("record on", order)

    async def switch_off(self) -> None:
        await self._service.ask("record off")
