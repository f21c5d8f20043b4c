"""The handlers of writes: `events` and `ingest` write events, `erase` erases a user.

`EraseJob` covers all places with data of a user: the store, cached histories, and all memory tiers.
"""

from __future__ import annotations

import time

from npu_gr.core.arrays import largest, smallest
from npu_gr.core.errors import NpuGrError, RequestError, Unprocessable
from npu_gr.core.history import Events, Mode, UserKey, Write, Written
from npu_gr.core.request import (
    STORE,
    VECTORS,
    EraseAnswer,
    EraseRequest,
    EventsAnswer,
    EventsRequest,
    IngestAnswer,
    IngestRequest,
)
from npu_gr.handlers.base import Call
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.lookups import RecentItems
from npu_gr.handlers.match import ServedVectors
from npu_gr.handlers.versions import Versions


class EventsJob:
    """Appends events to the store; rejects actions unknown to the ranker."""

    def __init__(self, versions: Versions, histories: Histories, recent: RecentItems) -> None:
        self._versions = versions
        self._histories = histories
        self._recent = recent

    async def run(self, request: EventsRequest, call: Call) -> EventsAnswer:
        """Append, and answer after the store has acknowledged."""
        events = request.events
        if self._histories.store is not None:
            check_actions(self._versions, events)
        with call.slot.suspended():
            done = await self._histories.append(request.user, events, request.idempotency_key)
        self._recent.add(request.user.tenant, events)
        return EventsAnswer(
            num_events=done.num_events,
            sorted_events=done.num_late,
            stages_s={"store": time.monotonic() - call.arrived_at},
        )

    async def stop(self) -> None:
        """Do nothing, since the store is closed elsewhere."""


def check_actions(versions: Versions, events: Events) -> None:
    """Check that the ranker, if there is one, has the actions.

    Raises:
        Unprocessable: an action is unknown.
    """
    if versions.rankers is None or not len(events):
        return
    last = len(versions.rankers.current.model.actions) - 1
    if not 0 <= smallest(events.actions) <= largest(events.actions) <= last:
        raise Unprocessable(
            f"events.actions: indices must be 0 to {last}, the last action of the model"
        )


class IngestJob:
    """Writes all valid entries in one call of the store, which commits them in groups."""

    def __init__(self, versions: Versions, histories: Histories, recent: RecentItems) -> None:
        self._versions = versions
        self._histories = histories
        self._recent = recent

    async def run(self, request: IngestRequest, call: Call) -> IngestAnswer:
        """Write, and answer after the store has acknowledged.

        Raises:
            Unprocessable: there is no store.
            StoreFailed: the store failed for all users.
        """
        results: list[Written | NpuGrError | None] = [None] * len(request.writes)
        good: dict[int, Write] = {}
        replaced: set[UserKey] = set()
        for place, one in enumerate(request.writes):
            try:
                good[place] = self._checked(one, replaced)
            except RequestError as error:
                results[place] = error
        with call.slot.suspended():
            written = await self._histories.write_many(list(good.values()))
        for place, result in zip(good, written, strict=True):
            results[place] = result
            if isinstance(result, Written) and result.num_added:
                self._recent.add(request.tenant, good[place].events)
        return IngestAnswer(
            results=tuple(one for one in results if one is not None),
            stages_s={"store": time.monotonic() - call.arrived_at},
        )

    def _checked(self, one: Write | RequestError, replaced: set[UserKey]) -> Write:
        """Return a valid entry, and add the user of a replacement to `replaced`."""
        if isinstance(one, RequestError):
            raise one
        if one.mode is Mode.REPLACE:
            if one.user in replaced:
                raise Unprocessable(
                    "user_id: repeated in this call; a replace must have all events of its user"
                )
            replaced.add(one.user)
        if one.mode is not Mode.APPEND and one.key is not None:
            raise Unprocessable(f"idempotency_key: only for the mode append, not for {one.mode}")
        check_actions(self._versions, one.events)
        return one

    async def stop(self) -> None:
        """Do nothing, since the store is closed elsewhere."""


class EraseJob:
    """Erases a user, and overwrites free pages with the user's KV.

    The answer names the places that still have bytes of the user.
    """

    def __init__(
        self, versions: Versions, histories: Histories, vectors: ServedVectors | None
    ) -> None:
        self._versions = versions
        self._histories = histories
        self._vectors = vectors

    async def run(self, request: EraseRequest, call: Call) -> EraseAnswer:
        """Erase, history first, so that a concurrent rank cannot encode it again.

        Raises:
            StoreFailed: the store failed; the memory of this instance has erased the user.
            PoolFailed: the pool behind that memory may still have the user.
        """
        try:
            is_overwritten = await self._histories.erase(request.user)
        finally:
            stored_at = time.monotonic()
            if self._versions.shadow is not None:
                await self._versions.shadow.forget(request.user)
            failed: NpuGrError | None = None
            for version in self._versions.all():
                try:
                    await version.relay.erase(request.user)
                except NpuGrError as error:  # the others erase the user all the same
                    failed = error
            if failed is not None:
                raise failed
        return EraseAnswer(
            pending=self._pending(request.user, is_overwritten),
            stages_s={"store": stored_at - call.arrived_at, "tiers": time.monotonic() - stored_at},
        )

    def _pending(self, user: UserKey, is_overwritten: bool) -> tuple[str, ...]:
        knows = self._vectors is not None and self._vectors.knows(user)
        return (() if is_overwritten else (STORE,)) + ((VECTORS,) if knows else ())

    async def stop(self) -> None:
        """Do nothing, since tiers and store are stopped elsewhere."""
