"""A row of the embedded store's table `chunks`: up to `CHUNK` events that follow one another, with their features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from npu_gr.core.history import Events
from npu_gr.features.base import EVENT, unpack
from npu_gr.features.checksum import check_row, damaged, row_sum
from npu_gr.features.event_features import load_runs, unpack_runs

CHUNK = 256  # events


class Chunk(NamedTuple):
    """A row of `chunks`, without its user."""

    chunk: int
    data: Any  # EVENT records
    features: Any  # runs of `event_features`, places counted from the chunk's first event; None = no event has any
    sum: int | None  # None = the row is older than the sums

    @classmethod
    def make(cls, key: bytes, chunk: int, data: bytes, features: bytes | None) -> Chunk:
        """Make a row of this user."""
        return cls(chunk, data, features, row_sum(key, chunk, data, *([] if features is None else [features])))

    def check(self, key: bytes, num_events: int | None) -> None:
        """Check that the row is whole.

        Args:
            key: of the user.
            num_events: that it must have; None = unknown.

        Raises:
            StoreFailed: it is damaged.
        """
        data, features = self.data, self.features
        if not isinstance(data, bytes) or len(data) % EVENT.itemsize:
            raise damaged("a part is cut")
        if num_events is not None and len(data) != num_events * EVENT.itemsize:
            raise damaged(f"a part has {len(data) // EVENT.itemsize} events and should have {num_events}")
        if not isinstance(features, bytes | None):
            raise damaged("features of its events make no sense")
        check_row(self.sum, key, self.chunk, data, *([] if features is None else [features]))


def events_of(rows: Sequence[Chunk], skip: int = 0) -> Events:
    """Read the events of chunks, but for the first `skip` of them.

    Raises:
        StoreFailed: their features make no sense.
    """
    events = unpack(b"".join(row.data for row in rows))[skip:]
    runs = []
    begin = -skip
    for row in rows:
        runs += [run._replace(start=run.start + begin) for run in load_runs(row.features)]
        begin += len(row.data) // EVENT.itemsize
    return replace(events, features=unpack_runs(runs, len(events))) if runs else events
