"""The door that records what passes it, and the routes that switch the recorder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from npu_gr.core.errors import NpuGrError, Unprocessable
from npu_gr.core.request import (
    Events,
    EventsRequest,
    GenerateAnswer,
    GenerateRequest,
    MatchAnswer,
    MatchRequest,
    RankAnswer,
    RankRequest,
    RecommendAnswer,
    RecommendRequest,
    Request,
    SignalAnswer,
    SignalRequest,
    UserKey,
)
from npu_gr.replay.recorder import RecordedRequest, Recorder, RecordOrder, RecordStatus, the
from npu_gr.server.service_protocol import Door
from npu_gr.server.wire import JSON

A = TypeVar("A")

_KINDS: dict[type[Request], str] = {
    RankRequest: "rank",
    SignalRequest: "signal",
    GenerateRequest: "generate",
    MatchRequest: "match",
    RecommendRequest: "recommend",
    EventsRequest: "events",
}


class RecordingDoor:
    """A `Door` in front of another. A request whose caller leaves is not recorded."""

    def __init__(self, door: Door, recorder: Recorder) -> None:
        self._door, self._recorder = door, recorder
        self.models, self.is_ready, self.effective_config = door.models, door.is_ready, door.effective_config
        self.reload_models = door.reload_models
        self.catalogue, self.reload_catalogue = door.catalogue, door.reload_catalogue
        self.rollback_catalogue, self.update_catalogue = door.rollback_catalogue, door.update_catalogue
        self.vectors = door.vectors
        self.reload_vectors, self.rollback_vectors = door.reload_vectors, door.rollback_vectors
        self.check_room, self.erase_user = door.check_room, door.erase_user

    async def signal(self, request: SignalRequest, budget_s: float) -> SignalAnswer:
        """See `Door.signal`."""
        return await self._seen(self._door.signal(request, budget_s), request.user, budget_s, request)

    async def rank(self, request: RankRequest, budget_s: float) -> RankAnswer:
        """See `Door.rank`."""
        return await self._seen(self._door.rank(request, budget_s), request.user, budget_s, request)

    async def generate(self, request: GenerateRequest, budget_s: float) -> GenerateAnswer:
        """See `Door.generate`."""
        return await self._seen(self._door.generate(request, budget_s), request.user, budget_s, request)

    async def match(self, request: MatchRequest, budget_s: float) -> MatchAnswer:
        """See `Door.match`."""
        return await self._seen(self._door.match(request, budget_s), request.user, budget_s, request)

    async def recommend(self, request: RecommendRequest, budget_s: float) -> RecommendAnswer:
        """See `Door.recommend`."""
        return await self._seen(self._door.recommend(request, budget_s), request.user, budget_s, request)

    async def append_events(self, user: UserKey, events: Events, budget_s: float) -> int:
        """See `Door.append_events`."""
        return await self._seen(
            self._door.append_events(user, events, budget_s), user, budget_s, EventsRequest(user=user, events=events)
        )

    async def _seen(
        self,
        work: Awaitable[A],
        user: UserKey,
        budget_s: float,
        request: Request,
    ) -> A:
        if not self._recorder.wants(user):
            return await work
        arrived_at, began_at = time.time(), time.monotonic()

        def offer(status: int, answer: Any) -> None:
            seen = RecordedRequest(
                kind=_KINDS[type(request)],
                arrived_at=arrived_at,
                took_s=time.monotonic() - began_at,
                budget_s=budget_s,
                user=user,
                status=status,
                request=request,
                answer=None if isinstance(answer, int) else answer,
            )
            self._recorder.offer(seen)

        try:
            answer = await work
        except NpuGrError as error:
            offer(error.status, None)
            raise
        offer(200, answer)
        return answer


def add_record_routes(app: web.Application, recorder: Recorder | None) -> None:
    """GET, POST and DELETE /debug/record: how it stands, switch it on, switch it off; all answer `RecordStatus`."""

    async def answer() -> web.Response:
        status: RecordStatus = await asyncio.to_thread(the(recorder).status)
        return web.Response(body=msgspec.json.encode(status), content_type=JSON)

    async def show(_: web.Request) -> web.Response:
        return await answer()

    async def switch_on(request: web.Request) -> web.Response:
        found = the(recorder)
        try:
            order = msgspec.json.decode(await request.read() or b"{}", type=RecordOrder)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Unprocessable(str(error)) from error
        found.switch_on(order.sample_ratio, order.duration_s)
        return await answer()

    async def switch_off(_: web.Request) -> web.Response:
        the(recorder).switch_off()
        return await answer()

    path: Any = "/debug/record"
    app.add_routes([web.get(path, show), web.post(path, switch_on), web.delete(path, switch_off)])
