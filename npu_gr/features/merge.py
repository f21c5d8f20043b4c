"""What a merge adds to a history: of events that are the same, as many as the fuller of the two sides has.

A second merge of the same events adds nothing, however long ago the first one was: nothing is remembered for it.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.core.history import Events
from npu_gr.features.base import EVENT, pack


class Merged(NamedTuple):
    """A history after a merge."""

    events: Events  # the newest `max_events` of both, oldest first
    num_added: int  # of them, that were not stored
    is_append: bool  # the added ones are the last of them, and the others are in the order of the store


def merge(stored: Events, events: Events, max_events: int) -> Merged:
    """Merge events into a stored history, in time order; of equal times what is stored comes first.

    Args:
        stored: what the store keeps of the user.
        events: what is to be in it, in any order.
        max_events: that the store keeps of a user. What it has given up for newer ones does not come back.
    """
    is_new = _is_missing(stored, events)
    if len(stored) >= max_events:
        is_new &= events.timestamps > stored.timestamps.min()
    new = _select(events, is_new)
    new = _select(new, np.argsort(new.timestamps, kind="stable"))
    if not len(new) or not len(stored) or new.timestamps[0] >= stored.timestamps.max():
        added = new[-max_events:]
        return Merged((stored + added)[-max_events:], len(added), is_append=True)
    both = stored + new
    order = np.argsort(both.timestamps, kind="stable")[-max_events:]
    return Merged(_select(both, order), int((order >= len(stored)).sum()), is_append=False)


def _is_missing(stored: Events, events: Events) -> npt.NDArray[np.bool_]:
    """Whether each event is missing in the store; the m-th of equal events is, if the store has fewer than m."""
    is_missing = np.ones(len(events), np.bool_)
    if len(stored):
        known = Counter(_rows(stored))
        for place, row in enumerate(_rows(events)):
            if known[row] > 0:
                known[row] -= 1
                is_missing[place] = False
    return is_missing


def _rows(events: Events) -> list[bytes]:
    data = pack(events)
    return [data[at : at + EVENT.itemsize] for at in range(0, len(data), EVENT.itemsize)]


def _select(events: Events, places: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Events:
    return events.take(places)
