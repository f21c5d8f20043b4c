"""Features of events in Redis: a stream of runs, whose rows carry checksums, because an append cannot read there.

    id `end-0`    the run is of the events before the index `end`, counted over everything the user ever did
    one field     its layout -> its rows, each with a checksum of the user, the layout, the row, and its event's own

So a row that stands beside another event than it came with is found: an instance of an older version, which does not
know the stream, may have put other events there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.errors import StoreFailed
from npu_gr.core.feature_schema.columns import Columns
from npu_gr.core.history import Events
from npu_gr.features.checksum import CHECKED, U64, damaged, mix
from npu_gr.features.event_features import RunLayout, pack_runs, place_rows, places_of, read_layout, read_rows

U32 = npt.NDArray[np.uint32]


class RunGroup(NamedTuple):
    """Runs of one layout, as a script answers them."""

    layout: bytes
    ends: bytes  # index behind the last event of each run, as text, separated by blanks
    sizes: bytes  # bytes of each run, the same
    rows: bytes  # of all of them


def pack_entries(key: bytes, events: Events, records: bytes) -> list[tuple[int, bytes, bytes]]:
    """Pack the features of events as entries of the stream.

    Args:
        key: of the user.
        events: with features.
        records: the CHECKED records of these events.

    Returns:
        Of each run the place behind its last event, its layout, and its rows.
    """
    checks = np.frombuffer(records, CHECKED)["check"]
    entries = []
    for run in pack_runs(events.features, len(events)):
        layout = read_layout(run.layout)
        plain = np.frombuffer(run.rows, layout.dtype)
        rows = np.empty(len(plain), layout.checked)
        for name in layout.dtype.names or ():
            rows[name] = plain[name]
        end = run.start + len(rows)
        rows["check"] = _row_checks(key, run.layout, checks[run.start : end], plain)
        entries.append((end, run.layout, rows.tobytes()))
    return entries


def unpack_groups(key: bytes, groups: Iterable[RunGroup], first_index: int, records: bytes) -> Columns:
    """Read the features of events.

    Args:
        key: of the user.
        groups: of the stream.
        first_index: of the first of these events.
        records: their CHECKED records, which are whole.

    Raises:
        StoreFailed: a row is damaged, or belongs to another event.
    """
    checks = np.frombuffer(records, CHECKED)["check"]
    parts: list[tuple[RunLayout, Any, npt.NDArray[np.int64]]] = []
    for group in groups:
        layout, rows, places = _placed(group, first_index)
        if bad := _num_bad(key, group.layout, layout, checks, rows, places):
            raise damaged(f"{bad} checksums of features are wrong")
        parts.append((layout, rows, places))
    return place_rows(parts, len(checks))


def count_bad_rows(key: bytes, groups: Iterable[RunGroup], first_index: int, records: bytes) -> int:
    """Count the rows of these events that are damaged, as `unpack_groups` would find them."""
    checks = np.frombuffer(records, CHECKED)["check"]
    bad = 0
    for group in groups:
        try:
            layout, rows, places = _placed(group, first_index)
        except StoreFailed:
            bad += 1
        else:
            bad += _num_bad(key, group.layout, layout, checks, rows, places)
    return bad


def _placed(group: RunGroup, first_index: int) -> tuple[RunLayout, Any, npt.NDArray[np.int64]]:
    layout = read_layout(group.layout)
    rows = read_rows(layout.checked, group.rows)
    ends, sizes = (np.array(text.split(), np.int64) for text in (group.ends, group.sizes))
    lengths = sizes // layout.checked.itemsize
    if (lengths * layout.checked.itemsize != sizes).any():
        raise damaged("features of its events are cut")
    return layout, rows, places_of(ends - lengths - first_index, lengths)


def _num_bad(key: bytes, raw: bytes, layout: RunLayout, checks: U32, rows: Any, places: npt.NDArray[np.int64]) -> int:
    """Count the rows whose checksum is wrong; those behind the last event are, those before the first are not read."""
    is_here = (places >= 0) & (places < len(checks))
    here = rows[is_here]
    plain = np.empty(len(here), layout.dtype)
    for name in layout.dtype.names or ():
        plain[name] = here[name]
    is_wrong = here["check"] != _row_checks(key, raw, checks[places[is_here]], plain)
    return int(np.count_nonzero(is_wrong)) + int(np.count_nonzero(places >= len(checks)))


def _row_checks(key: bytes, layout: bytes, checks: U32, rows: Any) -> U32:
    """One check a row, by whole columns: a sum of its words, each times its own odd number, mixed with all the rest."""
    num_bytes = rows.dtype.itemsize
    padded = np.zeros((len(rows), -(-num_bytes // 8) * 8), np.uint8)
    padded[:, :num_bytes] = np.frombuffer(rows.tobytes(), np.uint8).reshape(-1, num_bytes)
    words: U64 = padded.view("<u8")
    odd = mix(np.arange(1, words.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    seed = np.uint64(xxhash.xxh3_64_intdigest(len(key).to_bytes(4, "little") + key + layout))
    mixed = mix((words * odd).sum(1, dtype=np.uint64) ^ seed)
    return (mix(mixed ^ checks.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
