"""The `events` job: append behaviours of a user to the history store."""

from __future__ import annotations

import time

from npu_gr.core.arrays import largest, smallest
from npu_gr.core.errors import Unprocessable
from npu_gr.core.history import Events
from npu_gr.core.request import EventsAnswer, EventsRequest
from npu_gr.jobs.base import Call
from npu_gr.jobs.histories import Histories
from npu_gr.jobs.versions import Versions


class EventsJob:
    """Appends to the store; refuses actions that the ranker does not know."""

    def __init__(self, versions: Versions, histories: Histories) -> None:
        self._versions = versions
        self._histories = histories

    async def run(self, request: EventsRequest, call: Call) -> EventsAnswer:
        """Append, and answer once the store has acknowledged."""
        events = request.events
        if self._histories.store is not None:
            check_actions(self._versions, events)
        with call.slot.outside():
            num_events = await self._histories.append(request.user, events, request.idempotency_key)
        return EventsAnswer(
            num_events=num_events,
            sorted_events=events.origin.sorted_events,
            stages_s={"store": time.monotonic() - call.arrived_at},
        )

    async def stop(self) -> None:
        """Do nothing: the store is not the job's."""


def check_actions(versions: Versions, events: Events) -> None:
    """Check that the ranker, if there is one, knows the actions.

    Raises:
        Unprocessable: it does not.
    """
    if versions.rankers is None or not len(events):
        return
    last = len(versions.rankers.current.model.actions) - 1
    if not 0 <= smallest(events.actions) <= largest(events.actions) <= last:
        raise Unprocessable(f"events.actions: an index is over {last}, the last of the model's actions")
