"""The DRAM tier: copies of used prefixes for users who come back. LRU with a TTL, under a byte limit.

    reserve --commit--> complete --lease--> copied to HBM, and the TTL starts again
       |                   | TTL, LRU, drop
       +--abandon----------+---> pages go back, when the writer or the last reader is done

Source: RelayGR (arXiv:2601.01712), memory-aware expander. See `docs/relay.md`.
Invariants, held by tests/kv/test_dram_store.py:
  D1  every page is free or held by exactly one entry; the arena is the byte limit
  D2  an entry can be found only after its copy is complete
  D3  a leased entry is never evicted
  D4  the epoch of a page changes each time the page is handed out, so a reader can detect that its pages were reused
      during the copy
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from npu_gr.core.errors import PoolExhausted, StaleEntry
from npu_gr.core.request import I64
from npu_gr.kv.arena import KVArena
from npu_gr.kv.keys import PrefixKey
from npu_gr.kv.layout import PageRun
from npu_gr.kv.tier import PageTier, TierEntry


class DramEntry(TierEntry):
    """One copy of a prefix."""

    __slots__ = ("epoch", "is_dropped")

    def __init__(self, key: PrefixKey, num_tokens: int, runs: tuple[PageRun, ...], epoch: int) -> None:
        super().__init__(key, num_tokens, runs)
        self.epoch = epoch  # of all its pages, for as long as they are its own
        self.is_dropped = False  # it cannot be found any more


class DramStore(PageTier[DramEntry]):
    """Copies over the pages of one host arena."""

    def __init__(
        self, arena: KVArena, *, ttl_s: float, ttl_jitter_ratio: float, seed: int, clock: Callable[[], float]
    ) -> None:
        """Start with every page free.

        Args:
            arena: the memory; all of it is used.
            ttl_s: how long an unused copy is kept.
            ttl_jitter_ratio: each TTL is longer or shorter by up to this share, so that copies made together do not
                expire together.
            seed: of that jitter.
            clock: instants for expiry.
        """
        super().__init__(arena, arena.num_pages, clock)
        self._ttl_s = ttl_s
        self._jitter_ratio = ttl_jitter_ratio
        self._random = random.Random(seed)  # noqa: S311  (jitter)
        self._epochs = np.zeros(arena.num_pages, np.int64)  # of each page
        self._epoch = 0
        self._complete: OrderedDict[PrefixKey, DramEntry] = OrderedDict()  # least recently used first

    @property
    def live_bytes(self) -> int:
        """Bytes of the pages that entries hold."""
        return self.budget_bytes - self.free_bytes

    def __len__(self) -> int:
        return len(self._complete)

    def reserve(self, key: PrefixKey, num_tokens: int) -> DramEntry:
        """Take pages for a copy; least recently used entries make room. It is invisible until `commit`.

        The caller must end the reservation with `commit` or `abandon`, whatever happens.

        Raises:
            PoolExhausted: all pages that are neither leased nor being written are too few; no more entries were
                evicted than necessary.
        """
        need = self.arena.layout.pages(num_tokens)
        if need > self.arena.num_pages:
            raise PoolExhausted(f"need {need} pages, the DRAM tier has {self.arena.num_pages}")
        leased: list[DramEntry] = []
        while self._pages.num_free < need and self._complete:
            _, oldest = self._complete.popitem(last=False)
            if oldest.leases:
                leased.append(oldest)
                continue
            self._users.remove(oldest)
            oldest.is_dropped = True
            self._give_back(oldest)
        for entry in reversed(leased):  # few: at most the reloads in flight
            self._complete[entry.key] = entry
            self._complete.move_to_end(entry.key, last=False)
        self._epoch += 1
        entry = DramEntry(key, num_tokens, self._pages.allocate(need), self._epoch)
        for first, count in entry.runs:
            self._epochs[first : first + count] = self._epoch
        self._users.add(entry)
        return entry

    def commit(self, entry: DramEntry, timestamps: I64) -> None:
        """Make a complete copy findable for its TTL. The pages of a copy that was dropped meanwhile go back.

        Args:
            entry: as `reserve` returned it.
            timestamps: [num_tokens] unix seconds of its tokens.
        """
        if entry.is_dropped:
            self.abandon(entry)
            return
        if (before := self._complete.get(entry.key)) is not None:
            self.drop(before)
        entry.timestamps = timestamps
        self._touch(entry)

    def abandon(self, entry: DramEntry) -> None:
        """Give the pages of an incomplete copy back. Nothing happens to a complete one."""
        if entry.is_published or not entry.is_held:
            return
        self.drop(entry)
        self._give_back(entry)

    def get(self, key: PrefixKey) -> DramEntry | None:
        """Find the complete, unexpired copy with this key."""
        entry = self._complete.get(key)
        if entry is not None and entry.expires_at <= self._clock() and not entry.leases:
            self.drop(entry)
            return None
        return entry

    @contextmanager
    def lease(self, entry: DramEntry) -> Iterator[DramEntry]:
        """Keep the entry's pages while the block copies them. Using an entry starts its TTL again."""
        entry.leases += 1
        try:
            yield entry
        finally:
            entry.leases -= 1
            if not entry.is_dropped:
                self._touch(entry)
            elif not entry.leases and entry.is_held:
                self._give_back(entry)

    def verify(self, entry: DramEntry) -> None:
        """Check that the entry's pages were not handed out again. Call it before and after reading them.

        Raises:
            StaleEntry: they were.
        """
        for first, count in entry.runs:
            if not (self._epochs[first : first + count] == entry.epoch).all():
                raise StaleEntry("the DRAM copy was overwritten while it was read")

    def drop(self, entry: DramEntry) -> None:
        """Make an entry unfindable. Its pages go back at once, or when its writer or its last reader is done."""
        if entry.is_dropped:
            return
        entry.is_dropped = True
        self._users.remove(entry)
        if not entry.is_published:
            return  # the writer still calls `commit` or `abandon`
        del self._complete[entry.key]
        if not entry.leases:
            self._give_back(entry)

    def _touch(self, entry: DramEntry) -> None:
        """Start the entry's TTL again, and make it the most recently used."""
        jitter = 1.0 + self._jitter_ratio * (2.0 * self._random.random() - 1.0)
        entry.expires_at = self._clock() + self._ttl_s * jitter
        self._complete[entry.key] = entry
        self._complete.move_to_end(entry.key)

    def check(self) -> None:
        """Assert D1 and D2. For tests: it looks at every entry."""
        self._pages.check()
        pages = [p for e in self._complete.values() for first, n in e.runs for p in range(first, first + n)]
        assert len(pages) == len(set(pages))
        assert len(pages) <= self.arena.num_pages - self._pages.num_free
        for entry in self._complete.values():
            assert entry.is_held
            assert entry.is_published
            self.verify(entry)
