"""The `erase` job: forget a user in the store, in the known prefixes, and in every memory tier."""

from __future__ import annotations

import time

from npu_gr.core.history import UserKey
from npu_gr.core.request import STORE, VECTORS, EraseAnswer, EraseRequest
from npu_gr.jobs.base import Call
from npu_gr.jobs.histories import Histories
from npu_gr.jobs.match import ServedVectors
from npu_gr.jobs.versions import Versions


class EraseJob:
    """Answers once nothing finds the user, and free pages that held the user's KV have been overwritten.

    The answer names the places that still hold bytes of the user.
    """

    def __init__(self, versions: Versions, histories: Histories, vectors: ServedVectors | None) -> None:
        self._versions = versions
        self._histories = histories
        self._vectors = vectors

    async def run(self, request: EraseRequest, call: Call) -> EraseAnswer:
        """Erase the history first: a rank that comes meanwhile finds nothing to encode again.

        Raises:
            StoreFailed: the store has not forgotten the user; the memory of this instance has.
        """
        try:
            is_overwritten = await self._histories.erase(request.user)
        finally:
            stored_at = time.monotonic()
            for version in self._versions.all():
                await version.relay.erase(request.user)
        return EraseAnswer(
            pending=self._pending(request.user, is_overwritten),
            stages_s={"store": stored_at - call.arrived_at, "tiers": time.monotonic() - stored_at},
        )

    def _pending(self, user: UserKey, is_overwritten: bool) -> tuple[str, ...]:
        knows = self._vectors is not None and self._vectors.knows(user)
        return (() if is_overwritten else (STORE,)) + ((VECTORS,) if knows else ())

    async def stop(self) -> None:
        """Do nothing: tiers and store are not the job's."""
