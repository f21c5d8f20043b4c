"""Records requests and answers in front of a service; routes that switch the recorder."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

import msgspec
from aiohttp import web

from npu_gr.core.errors import NpuGrError
from npu_gr.core.kinds import ERASE, A, Kind, Q
from npu_gr.core.names import Names
from npu_gr.core.request import RECORDINGS
from npu_gr.core.served import VectorsInfo
from npu_gr.handlers.base import AdmissionControl, HeldPermit
from npu_gr.replay.recorder import RecordedRequest, Recorder, RecordOrder, RecordStatus, the
from npu_gr.server.admission.middleware import BODY
from npu_gr.server.http import json_response
from npu_gr.server.schemas.media import decode
from npu_gr.server.service_protocol import (
    CatalogueAdmin,
    LookupService,
    PublishedAdmin,
    ServiceProtocol,
)


class RecordingService:
    """A `ServiceProtocol` that forwards to another one and records what passes.

    A request whose client disconnects is not recorded.
    """

    def __init__(self, service: ServiceProtocol, recorder: Recorder) -> None:
        self._service = service
        self._recorder = recorder
        self.models = service.models
        self.kind_versions = service.kind_versions
        self.is_ready = service.is_ready
        self.why_dead = service.why_dead
        self.effective_config = service.effective_config
        self.knows = service.knows
        self.reload_models = service.reload_models
        self.rollback_models = service.rollback_models
        self.add_delta = service.add_delta
        self.shadow = service.shadow

    @property
    def catalogue(self) -> CatalogueAdmin:
        return self._service.catalogue

    @property
    def vectors(self) -> PublishedAdmin[VectorsInfo]:
        return self._service.vectors

    @property
    def lookups(self) -> LookupService:
        return self._service.lookups

    @property
    def names(self) -> Names:
        return self._service.names

    @property
    def admission(self) -> AdmissionControl:
        return self._service.admission

    async def serve(
        self, kind: Kind[Q, A], request: Q, budget_s: float, permit: HeldPermit | None = None
    ) -> A:
        """Answer the request, and record it if its kind is recorded and its user is sampled.

        An erasure reaches the recordings last, so requests recorded while it runs are erased too.
        """
        if kind.name == ERASE.name:
            erased: A = await self._erase(kind, request, budget_s, permit)
            return erased
        if not kind.is_recorded or not self._recorder.wants(request.user):
            return await self._service.serve(kind, request, budget_s, permit)
        arrived_at = time.time()
        began_at = time.monotonic()

        def offer(status: int, answer: Any) -> None:
            self._recorder.offer(
                RecordedRequest(
                    kind=kind.name,
                    arrived_at=arrived_at,
                    took_s=time.monotonic() - began_at,
                    budget_s=budget_s,
                    user=request.user,
                    status=status,
                    request=request,
                    answer=answer,
                )
            )

        try:
            answer = await self._service.serve(kind, request, budget_s, permit)
        except NpuGrError as error:
            offer(error.status, None)
            raise
        offer(200, answer)  # recordings have 200 for every success, whatever HTTP answers
        return answer

    async def _erase(
        self, kind: Kind[Q, A], request: Q, budget_s: float, permit: HeldPermit | None
    ) -> Any:
        try:
            answer: Any = await self._service.serve(kind, request, budget_s, permit)
        finally:
            is_pending = await self._recorder.erase(request.user)
        return (
            msgspec.structs.replace(answer, pending=(*answer.pending, RECORDINGS))
            if is_pending
            else answer
        )


class RecorderAdmin(Protocol):
    """Switches the recorder; every method raises NotFound where no recorder is configured."""

    async def status(self) -> RecordStatus:
        """Return whether it records, and its counts."""
        ...

    async def switch_on(self, order: RecordOrder) -> None:
        """Start to record."""
        ...

    async def switch_off(self) -> None:
        """Stop recording."""
        ...


class OwnRecorder:
    """The recorder of this process."""

    def __init__(self, recorder: Recorder | None) -> None:
        """Wrap a recorder; None = none is configured."""
        self._recorder = recorder

    async def status(self) -> RecordStatus:
        return await asyncio.to_thread(the(self._recorder).status)

    async def switch_on(self, order: RecordOrder) -> None:
        the(self._recorder).switch_on(order.sample_ratio, order.duration_s)

    async def switch_off(self) -> None:
        the(self._recorder).switch_off()


def add_record_routes(app: web.Application, recorder: RecorderAdmin) -> None:
    """Add GET, POST and DELETE /debug/record: show, switch on, switch off.

    Each of them answers with a `RecordStatus`.
    """

    async def show(_: web.Request) -> web.Response:
        return json_response(await recorder.status())

    async def switch_on(request: web.Request) -> web.Response:
        await recorder.status()  # raises NotFound before the body is read
        body = request[BODY]
        order = decode(body, request.content_type, RecordOrder) if body else RecordOrder()
        await recorder.switch_on(order)
        return json_response(await recorder.status())

    async def switch_off(_: web.Request) -> web.Response:
        await recorder.switch_off()
        return json_response(await recorder.status())

    path = "/debug/record"
    app.add_routes([web.get(path, show), web.post(path, switch_on), web.delete(path, switch_off)])
