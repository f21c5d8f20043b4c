"""Features of stored events: rows of bytes, in runs of consecutive events with the same features.

    layout   msgpack of [[name, width], ...], sorted by name: width 0 = a number, k = up to k names
    rows     for each event float32 for a number, NaN = missing; k uint64 hashes of names, 0 = none

The values are those of `as_column`: they do not depend on a checkpoint's vocabulary, so the next
model can read them too. A feature that all events of a run lack is not in its layout; a feature
that no run has for an event is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from npu_gr.core.arrays import I64, largest
from npu_gr.core.errors import Unprocessable
from npu_gr.core.feature_schema.columns import NO_COLUMNS, Columns, widened
from npu_gr.core.feature_schema.encode import F32, U64
from npu_gr.core.history import Events
from npu_gr.history_store.checksum import check_row, damaged, row_sum
from npu_gr.history_store.store import EVENT, unpack

# Most events of a run, since one event with many values makes all rows of its run wide.
RUN_EVENTS = 256
_LAYOUTS = 256  # size of the cache; there is a layout for each set of features that a model reads


class Run(NamedTuple):
    """Features of consecutive events."""

    start: int  # index of the first event, from an origin that the holder of the run defines
    layout: bytes
    rows: bytes


class RunLayout(NamedTuple):
    """A decoded layout."""

    widths: tuple[tuple[str, int], ...]
    dtype: np.dtype[Any]  # of one row; its fields are named "0", "1", ...
    checked: np.dtype[Any]  # the same, followed by a checksum (see `redis_records.py`)


def check_size(events: Events, max_bytes: int) -> None:
    """Check the bytes that the features take for each event.

    They are 4 bytes a number and 8 bytes a name, with as many names as any of the events has.

    Raises:
        Unprocessable: over `max_bytes`.
    """
    num_bytes = 4 * len(events.features.numbers) + sum(
        8 * _width(one) for one in events.features.names.values()
    )
    if num_bytes > max_bytes:
        raise Unprocessable(
            f"events.features: {num_bytes} bytes an event, the limit is {max_bytes} "
            "(history_store.max_feature_bytes_per_event): 4 a number, 8 a name"
        )


def pack_runs(features: Columns, num_events: int, start: int = 0) -> list[Run]:
    """Pack the features of n events; `start` is the index of the first one."""
    if not features:
        return []
    runs = []
    for begin in range(0, num_events, RUN_EVENTS):
        part = features.take(slice(begin, begin + RUN_EVENTS))
        if (run := _packed(part, min(RUN_EVENTS, num_events - begin), start + begin)) is not None:
            runs.append(run)
    return runs


def _packed(features: Columns, num_events: int, start: int) -> Run | None:
    columns: dict[str, F32 | U64] = {
        name: one for name, one in features.numbers.items() if not np.isnan(one).all()
    }
    columns |= {
        name: one[:, :width] for name, one in features.names.items() if (width := _width(one))
    }
    if not columns:
        return None
    widths = [
        [name, 0 if columns[name].ndim == 1 else columns[name].shape[1]] for name in sorted(columns)
    ]
    layout = msgspec.msgpack.encode(widths)
    rows = np.empty(num_events, read_layout(layout).dtype)
    for place, (name, _) in enumerate(widths):
        rows[str(place)] = columns[str(name)]
    return Run(start, layout, rows.tobytes())


def _width(hashes: U64) -> int:
    """Return the number of columns that are used by any row."""
    return int(np.count_nonzero(hashes.any(0)))


def unpack_runs(runs: Iterable[Run], num_events: int) -> Columns:
    """Read the features of n events.

    Args:
        runs: Packed runs, whose `start` counts from the first of the events; rows of other events
            are ignored.
        num_events: n.

    Raises:
        StoreFailed: a run is damaged.
    """
    by_layout: defaultdict[bytes, list[Run]] = defaultdict(list)
    for run in runs:
        by_layout[run.layout].append(run)
    parts = []
    for raw, alike in by_layout.items():
        layout = read_layout(raw)
        rows = read_rows(layout.dtype, b"".join(run.rows for run in alike))
        starts = np.array([run.start for run in alike])
        lengths = np.array([len(run.rows) // layout.dtype.itemsize for run in alike])
        parts.append((layout, rows, places_of(starts, lengths)))
    return place_rows(parts, num_events)


def read_rows(dtype: np.dtype[Any], data: bytes) -> Any:
    """Read rows. Raises StoreFailed if the last one is incomplete."""
    if len(data) % dtype.itemsize:
        raise damaged("features of its events are incomplete")
    return np.frombuffer(data, dtype)


def places_of(starts: I64, lengths: I64) -> I64:
    """List the indices of the events of runs: starts [runs], lengths [runs] -> [events]."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(int(lengths.sum()))


def place_rows(parts: Iterable[tuple[RunLayout, Any, I64]], num_events: int) -> Columns:
    """Make columns out of rows of features.

    Args:
        parts: A layout, its rows, and the index of each row's event; indices outside of [0, n) are
            ignored.
        num_events: n.
    """
    numbers: dict[str, F32] = {}
    names: dict[str, U64] = {}
    for layout, rows, places in parts:
        is_here = (places >= 0) & (places < num_events)
        rows, here = rows[is_here], places[is_here]
        for place, (name, width) in enumerate(layout.widths):
            if width:
                names[name] = known = widened(
                    names.get(name, np.zeros((num_events, width), np.uint64)), width
                )
                known[here, :width] = rows[str(place)]
            else:
                numbers.setdefault(name, np.full(num_events, np.nan, np.float32))[here] = rows[
                    str(place)
                ]
    return Columns(numbers, names) if numbers or names else NO_COLUMNS


@lru_cache(_LAYOUTS)
def read_layout(layout: bytes) -> RunLayout:
    """Decode a layout.

    Raises:
        StoreFailed: it is damaged.
    """
    try:
        widths = msgspec.msgpack.decode(layout, type=tuple[tuple[str, int], ...])
        fields = [
            (str(place), "<u8", (width,)) if width else (str(place), "<f4")
            for place, (_, width) in enumerate(widths)
        ]
        dtype, checked = np.dtype(fields), np.dtype([*fields, ("check", "<u4")])
    except (msgspec.MsgspecError, ValueError) as error:
        raise damaged("features of its events are invalid") from error
    if not dtype.itemsize:
        raise damaged("features of its events are invalid")
    return RunLayout(widths, dtype, checked)


# ---- runs of one chunk of the embedded store


def join_runs(older: list[Run], newer: list[Run]) -> list[Run]:
    """Append runs to others; adjacent runs with the same layout become one."""
    joined = list(older)
    for run in newer:
        last = joined[-1] if joined else None
        if last is not None and last.layout == run.layout and _end(last) == run.start:
            joined[-1] = last._replace(rows=last.rows + run.rows)
        else:
            joined.append(run)
    return joined


def _end(run: Run) -> int:
    return run.start + len(run.rows) // read_layout(run.layout).dtype.itemsize


def dump_runs(runs: list[Run]) -> bytes | None:
    """Encode runs as bytes; None = there are no runs."""
    return msgspec.msgpack.encode(runs) if runs else None


def load_runs(data: bytes | None) -> list[Run]:
    """Decode the result of `dump_runs`. Raises StoreFailed if it is damaged."""
    if data is None:
        return []
    try:
        return msgspec.msgpack.decode(data, type=list[Run])
    except msgspec.MsgspecError as error:
        raise damaged("features of its events are invalid") from error


CHUNK = 256  # events in a chunk


class Chunk(NamedTuple):
    """A row of the embedded store's table `chunks`, without its user: up to `CHUNK` events."""

    chunk: int  # number of the chunk in the user's history
    data: Any  # EVENT records
    # result of `dump_runs`, whose starts count from the chunk's first event
    features: Any
    sum: int | None  # checksum; None = the row was written before there were checksums

    @property
    def newest(self) -> int:
        """The latest time of its events."""
        return largest(np.frombuffer(self.data, EVENT)["timestamp"])

    @classmethod
    def make(cls, key: bytes, chunk: int, data: bytes, features: bytes | None) -> Chunk:
        """Make a row of the user with this key."""
        return cls(
            chunk,
            data,
            features,
            row_sum(key, chunk, data, *([] if features is None else [features])),
        )

    def check(self, key: bytes, num_events: int | None) -> None:
        """Check that the row is undamaged.

        Args:
            key: Key of the user.
            num_events: Number of events that it must have; None = unknown.

        Raises:
            StoreFailed: it is damaged.
        """
        data, features = self.data, self.features
        if not isinstance(data, bytes) or len(data) % EVENT.itemsize:
            raise damaged("a chunk is incomplete")
        if num_events is not None and len(data) != num_events * EVENT.itemsize:
            raise damaged(
                f"a chunk has {len(data) // EVENT.itemsize} events and should have {num_events}"
            )
        if not isinstance(features, bytes | None):
            raise damaged("features of its events are invalid")
        check_row(self.sum, key, self.chunk, data, *([] if features is None else [features]))


def events_of(rows: Sequence[Chunk], skip: int = 0) -> Events:
    """Read the events of consecutive chunks, without the first `skip` events.

    Raises:
        StoreFailed: their features are damaged.
    """
    events = unpack(b"".join(row.data for row in rows))[skip:]
    runs = []
    begin = -skip
    for row in rows:
        runs += [run._replace(start=run.start + begin) for run in load_runs(row.features)]
        begin += len(row.data) // EVENT.itemsize
    return replace(events, features=unpack_runs(runs, len(events))) if runs else events
