"""Rows of a request that run backwards in time: refused, or sorted and counted (`service.unsorted_history`)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from npu_gr.core.arrays import holds_any
from npu_gr.core.errors import Unprocessable
from npu_gr.core.history import Events, HistoryOrigin, HistorySource

OnUnsorted = Literal["refuse", "sort"]


def oldest_first(events: Events, policy: OnUnsorted, field: str, base: int = 0) -> Events:
    """Refuse or sort events that run backwards; of equal times the order stays.

    Args:
        events: as they came.
        policy: what becomes of them.
        field: their name in messages.
        base: so many of them, at the beginning, stand in order, and were there before the request.

    Returns:
        The events. Their origin counts those of the request that stood later than newer ones.

    Raises:
        Unprocessable: they run backwards, and are to be refused; the message has the index in the request.
    """
    times = events.timestamps[max(base - 1, 0) :]
    earlier = times[1:] < times[:-1]
    if not holds_any(earlier):
        return events
    if policy == "refuse":
        at = int(earlier.argmax()) + 1
        index = at - (base > 0)
        last = "" if index else ", the last of base"
        raise Unprocessable(
            f"{field}.timestamps: {times[at]} at index {index} is before {times[at - 1]}{last}: send the oldest event "
            "first, or set service.unsorted_history: sort"
        )
    late = int(np.count_nonzero(times < np.maximum.accumulate(times)))
    order = np.argsort(events.timestamps, kind="stable")
    origin = HistoryOrigin(HistorySource.REQUEST, sorted_events=late)
    return events.take(order).coming_from(origin)
