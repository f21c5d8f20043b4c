"""Item rows of a sharded checkpoint as serving reads them: the hot ones in memory.

    changed rows   of deltas and of new items, all in memory, in order
    hot rows       a set-associative cache of records of a fixed size, on the model's device
    other rows     read from the files, through the kernel's page cache, and then hot

A row has a place in one set of 16. A set whose places are taken gives up the place with the fewest
reads, and all its counts fall by that number, so what was read often long ago leaves in the end
(generalised CLOCK). A row is the same bytes wherever it lies, so a score does not depend on what is
hot.

Invariants: a tag names the row whose record is in its place; a changed row hides its record.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.model.item_shards import RowShards, decode, encode

WAYS = 16  # places of a set
_MOST_READS = 15  # that are counted
_MOST_WAITING = 64  # prefetches; more are left out
_HASH = np.uint64(0x9E3779B97F4A7C15)


class RowReads(NamedTuple):
    """Distinct rows of passes by where they were, and what was read for them; all count up."""

    hits: int = 0
    misses: int = 0  # read from the files
    changed: int = 0
    prefetched: int = 0  # asked of the kernel before their pass
    read_bytes: int = 0


class _Changed(NamedTuple):
    """Rows that are not what the files say. Immutable."""

    rows: I64  # [n] ascending
    records: Tensor  # uint8 [n, record_bytes], on the device


class HotRows:
    """The item rows of one model. Device threads read and write; any thread prefetches."""

    def __init__(
        self, shards: RowShards, num_spare: int, hot_bytes: int, device: torch.device
    ) -> None:
        """Begin with an empty hot set.

        Args:
            shards: The rows.
            num_spare: Number of rows for new items behind them; zeros until they are written.
            hot_bytes: Memory of the hot set, with its tags; at least one set is made.
            device: Device of the model.
        """
        self.num_rows = shards.num_rows + num_spare
        self.reads = RowReads()
        self._shards = shards
        self._device = device
        size = shards.record_bytes
        # a place has its record, a tag and a count; no more places than rows are of use
        wanted = min(hot_bytes // (size + 9), 2 * shards.num_rows + WAYS)
        num_sets = max(1, wanted // WAYS)
        self._records = torch.empty(num_sets * WAYS, size, dtype=torch.uint8, device=device)
        self._tags: I64 = np.full((num_sets, WAYS), -1)
        self._counts = np.zeros((num_sets, WAYS), np.uint8)
        self._changed = _Changed(
            np.empty(0, np.int64), torch.empty(0, size, dtype=torch.uint8, device=device)
        )
        self._lock = threading.Lock()
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)
        self._prefetcher = ThreadPoolExecutor(1, "item-rows")
        weakref.finalize(self, self._prefetcher.shutdown, wait=False)

    @property
    def num_bytes(self) -> int:
        """Memory of the hot set and of the changed rows."""
        changed = self._changed.rows.nbytes + self._changed.records.nbytes
        return self._records.nbytes + self._tags.nbytes + self._counts.nbytes + changed

    def rows(self, rows: Tensor) -> Tensor:
        """Look up vectors: int64 [...] rows -> float32 or bfloat16 [..., dim].

        Raises:
            IndexError: A row is not in the table.
            DeviceError: A file cannot be read.
        """
        wanted, places = np.unique(rows.cpu().numpy(), return_inverse=True)
        if len(wanted) and (wanted[0] < 0 or wanted[-1] >= self.num_rows):
            raise IndexError(
                f"item rows {wanted[0]} to {wanted[-1]}: the table has {self.num_rows}"
            )
        with self._lock:
            records = self._gather(wanted)
        found = decode(records, self._shards.about.dtype)
        back = torch.from_numpy(places.reshape(-1)).to(self._device)
        return found[back].view(*rows.shape, self._shards.dim)

    def _gather(self, wanted: I64) -> Tensor:
        """Return the records of rows [n], ascending, each once."""
        size = self._shards.record_bytes
        records = torch.empty(len(wanted), size, dtype=torch.uint8, device=self._device)
        changed = self._changed
        at, is_changed = _found(changed.rows, wanted)
        if is_changed.any():
            records[self._at(is_changed)] = changed.records[self._at(at[is_changed])]
        is_spare = (wanted >= self._shards.num_rows) & ~is_changed
        if is_spare.any():
            records[self._at(is_spare)] = 0
        stored = np.flatnonzero(~(is_changed | is_spare))
        rows = wanted[stored]
        sets = self._sets(rows)
        ways = self._tags[sets] == rows[:, None]
        is_hot = ways.any(1)
        at_sets, at_ways = sets[is_hot], ways[is_hot].argmax(1)
        records[self._at(stored[is_hot])] = self._records[self._at(at_sets * WAYS + at_ways)]
        counts = self._counts[at_sets, at_ways]
        self._counts[at_sets, at_ways] = counts + (counts < _MOST_READS)
        missing = rows[~is_hot]
        if len(missing):
            read = torch.from_numpy(self._shards.read(missing.tolist())).to(self._device)
            records[self._at(stored[~is_hot])] = read
            self._keep(missing, sets[~is_hot], read)
        so_far = self.reads
        self.reads = so_far._replace(
            hits=so_far.hits + len(at_sets),
            misses=so_far.misses + len(missing),
            changed=so_far.changed + int(is_changed.sum()),
            read_bytes=so_far.read_bytes + len(missing) * size,
        )
        return records

    def _keep(self, rows: I64, sets: I64, records: Tensor) -> None:
        """Make rows hot that are not; of those of one set the first."""
        own, first = np.unique(sets, return_index=True)
        counts = self._counts[own]
        ways = counts.argmin(1)
        counts -= counts.min(1, keepdims=True)
        counts[np.arange(len(own)), ways] = 1
        self._counts[own] = counts
        self._tags[own, ways] = rows[first]
        self._records[self._at(own * WAYS + ways)] = records[self._at(first)]

    def _sets(self, rows: I64) -> I64:
        mixed = (rows.astype(np.uint64) * _HASH) >> np.uint64(32)
        return (mixed % np.uint64(len(self._tags))).astype(np.int64)

    def _at(self, places: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(places).to(self._device)

    def write(self, rows: I64, vectors: Tensor) -> None:
        """Replace vectors [n, dim] of rows, each once, that no pass reads now."""
        order = np.argsort(rows)
        new = encode(vectors, self._shards.about.dtype)[self._at(order)]
        with self._lock:
            left = self._without(rows)
            at = np.searchsorted(left.rows, rows[order])
            made = np.insert(left.rows, at, rows[order])
            records = torch.empty(len(made), new.shape[1], dtype=torch.uint8, device=self._device)
            is_new = np.zeros(len(made), np.bool_)
            is_new[at + np.arange(len(at))] = True
            records[self._at(is_new)] = new
            records[self._at(~is_new)] = left.records
            self._changed = _Changed(made, records)

    def restore(self, rows: I64) -> None:
        """Serve rows as the files have them, again."""
        with self._lock:
            self._changed = self._without(rows)

    def _without(self, rows: I64) -> _Changed:
        changed = self._changed
        stays = ~np.isin(changed.rows, rows)
        return _Changed(changed.rows[stays], changed.records[self._at(stays)])

    def prefetch(self, rows: I64) -> None:
        """Let the kernel read rows ahead of their pass, if they are in no memory. Does not wait."""
        if self._waiting.acquire(blocking=False):
            self._prefetcher.submit(self._prefetch, rows)

    def _prefetch(self, rows: I64) -> None:
        try:
            wanted = np.unique(rows[(rows >= 0) & (rows < self._shards.num_rows)])
            _, is_changed = _found(self._changed.rows, wanted)
            is_hot = (self._tags[self._sets(wanted)] == wanted[:, None]).any(1)
            cold = wanted[~(is_hot | is_changed)].tolist()
            self._shards.advise(cold)
            with self._lock:
                so_far = self.reads
                self.reads = so_far._replace(prefetched=so_far.prefetched + len(cold))
        finally:
            self._waiting.release()


def _found(rows: I64, wanted: I64) -> tuple[I64, npt.NDArray[np.bool_]]:
    """Look up rows in ascending ones: where each is, and whether it is there."""
    at = np.searchsorted(rows, wanted)
    if not len(rows):
        return at, np.zeros(len(wanted), np.bool_)
    at = at.clip(max=len(rows) - 1)
    return at, rows[at] == wanted
