"""What a merge adds to a history: of events that are the same, as many as the fuller of the two sides has.

Events are the same by item, action and time. What the store lacks of the features of one that it has is filled in; a
value that it has stays. A second merge of the same events changes nothing, however long ago the first one was: nothing
is remembered for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.columns import Columns, widened
from npu_gr.core.history import Events
from npu_gr.features.base import EVENT, pack


class Merged(NamedTuple):
    """A history after a merge."""

    events: Events  # the newest `max_events` of both, oldest first
    num_added: int  # of them, that were not stored
    num_filled: int  # of the stored ones, that gained features
    is_append: bool  # the added ones are the last of them, and the others are as they are in the store

    @property
    def changes(self) -> bool:
        """Whether it is another history than the stored one."""
        return bool(self.num_added or self.num_filled)


def merge(stored: Events, events: Events, max_events: int) -> Merged:
    """Merge events into a stored history, in time order; of equal times what is stored comes first.

    Args:
        stored: what the store keeps of the user.
        events: what is to be in it, in any order.
        max_events: that the store keeps of a user. What it has given up for newer ones does not come back.
    """
    same = _places(stored, events)
    is_new = same < 0
    stored, num_filled = _filled(stored, events, same)
    if len(stored) >= max_events:
        is_new &= events.timestamps > stored.timestamps.min()
    new = events.take(is_new)
    new = new.take(np.argsort(new.timestamps, kind="stable"))
    if not len(new) or not len(stored) or new.timestamps[0] >= stored.timestamps.max():
        added = new[-max_events:]
        return Merged((stored + added)[-max_events:], len(added), num_filled, is_append=not num_filled)
    both = stored + new
    order = np.argsort(both.timestamps, kind="stable")[-max_events:]
    return Merged(both.take(order), int((order >= len(stored)).sum()), num_filled, is_append=False)


def _places(stored: Events, events: Events) -> I64:
    """Find each event among the stored ones: its place, or -1; the m-th of equal events is the m-th of these there."""
    places = np.full(len(events), -1, np.int64)
    if len(stored):
        known: defaultdict[bytes, deque[int]] = defaultdict(deque)
        for place, row in enumerate(_rows(stored)):
            known[row].append(place)
        for place, row in enumerate(_rows(events)):
            if known.get(row):
                places[place] = known[row].popleft()
    return places


def _filled(stored: Events, events: Events, same: I64) -> tuple[Events, int]:
    """Fill in what the stored events lack of the features of the same events, and count those that gain any."""
    given = events.features
    if not given or not (same >= 0).any():
        return stored, 0
    known = stored.features
    gains = np.zeros(len(stored), np.bool_)
    from_, to = np.flatnonzero(same >= 0), same[same >= 0]
    numbers, names = dict(known.numbers), dict(known.names)
    for name, values in given.numbers.items():
        now = numbers.get(name, np.full(len(stored), np.nan, np.float32))
        gain = np.isnan(now[to]) & ~np.isnan(values[from_])
        numbers[name] = _put(now, to[gain], values[from_[gain]])
        gains[to[gain]] = True
    for name, hashes in given.names.items():
        wide = widened(names.get(name, np.zeros((len(stored), 1), np.uint64)), hashes.shape[1])
        gain = (wide[to] == 0).all(1) & (hashes[from_] != 0).any(1)
        names[name] = _put(wide, to[gain], widened(hashes[from_[gain]], wide.shape[1]))
        gains[to[gain]] = True
    num_filled = int(np.count_nonzero(gains))
    return (replace(stored, features=Columns(numbers, names)) if num_filled else stored), num_filled


def _put(column: Any, places: I64, values: Any) -> Any:
    if not len(places):
        return column
    column = column.copy()
    column[places] = values
    return column


def _rows(events: Events) -> list[bytes]:
    data = pack(events)
    return [data[at : at + EVENT.itemsize] for at in range(0, len(data), EVENT.itemsize)]
