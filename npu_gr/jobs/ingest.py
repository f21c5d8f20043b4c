"""The `ingest` job: write behaviours of many users; whoever cannot be written fails alone."""

from __future__ import annotations

import time

from npu_gr.core.errors import NpuGrError, RequestError, Unprocessable
from npu_gr.core.history import Mode, UserKey, Write, Written
from npu_gr.core.request import IngestAnswer, IngestRequest
from npu_gr.jobs.base import Call
from npu_gr.jobs.events import check_actions
from npu_gr.jobs.histories import Histories
from npu_gr.jobs.versions import Versions


class IngestJob:
    """Hands all that can be written to the store at once, which commits it in groups."""

    def __init__(self, versions: Versions, histories: Histories) -> None:
        self._versions = versions
        self._histories = histories

    async def run(self, request: IngestRequest, call: Call) -> IngestAnswer:
        """Write, and answer once the store has acknowledged.

        Raises:
            Unprocessable: there is no store. StoreFailed: it has written nobody.
        """
        results: list[Written | NpuGrError | None] = [None] * len(request.writes)
        good: dict[int, Write] = {}
        replaced: set[UserKey] = set()
        for place, one in enumerate(request.writes):
            try:
                good[place] = self._checked(one, replaced)
            except RequestError as error:
                results[place] = error
        with call.slot.outside():
            written = await self._histories.write_many(list(good.values()))
        for place, result in zip(good, written, strict=True):
            results[place] = result
        return IngestAnswer(
            results=tuple(one for one in results if one is not None),
            stages_s={"store": time.monotonic() - call.arrived_at},
        )

    def _checked(self, one: Write | RequestError, replaced: set[UserKey]) -> Write:
        """Return what can be written; `replaced` gains its user."""
        if isinstance(one, RequestError):
            raise one
        if one.mode is Mode.REPLACE:
            if one.user in replaced:
                raise Unprocessable("user_id: named before in this call, and a replace has all events of its user")
            replaced.add(one.user)
        if one.mode is not Mode.APPEND and one.key is not None:
            raise Unprocessable(f"idempotency_key: only for the mode append; {one.mode} needs none")
        check_actions(self._versions, one.events)
        return one

    async def stop(self) -> None:
        """Do nothing: the store is not the job's."""
