"""The DRAM tier: copies of used prefixes for users who come back. LRU with a TTL, under a byte limit.

Tenants share the bytes by weight (`core.shares`): room is made from those over their share, and from the one that asks.

    reserve --commit--> complete --lease--> copied to HBM, and the TTL starts again
       |                   | TTL, LRU, drop
       +--abandon----------+---> pages go back, when the writer or the last reader is done

Source: RelayGR (arXiv:2601.01712), memory-aware expander. See `docs/relay.md`.
Invariants, held by tests/engine/kv/test_dram_store.py:
  D1  every page is free or held by exactly one entry; the arena is the byte limit
  D2  an entry can be found only after its copy is complete
  D3  a leased entry is never evicted
  D4  a copy of a tenant within its share is evicted for another copy of that tenant only
  D5  the epoch of a page changes each time the page is handed out, so a reader can detect that its pages were reused
      during the copy
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import PoolExhausted, StaleEntry
from npu_gr.core.shares import Account, Shares
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.keys import PrefixKey
from npu_gr.engine.kv.layout import PageRun
from npu_gr.engine.kv.tier import PageTier, TierEntry


class DramEntry(TierEntry):
    """One copy of a prefix."""

    __slots__ = ("epoch", "holding", "is_dropped", "used_number")

    def __init__(
        self, key: PrefixKey, num_tokens: int, runs: tuple[PageRun, ...], epoch: int, holding: _Holding
    ) -> None:
        super().__init__(key, num_tokens, runs, holding)
        self.holding = holding
        self.used_number = 0  # of two entries, the one with the smaller number was used less recently
        self.epoch = epoch  # of all its pages, for as long as they are its own
        self.is_dropped = False  # it cannot be found any more


class _Holding(Account):
    """What one tenant has of the store, in pages."""

    __slots__ = ("copies",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.copies: OrderedDict[PrefixKey, DramEntry] = OrderedDict()  # complete; least recently used first

    def least_recent(self) -> DramEntry | None:
        """The least recently used copy that is not leased; few are."""
        return next((entry for entry in self.copies.values() if not entry.leases), None)


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
        self._complete: dict[PrefixKey, DramEntry] = {}
        self._numbers = itertools.count(1)
        self.shares: Shares[_Holding] = Shares(_Holding, clock)

    @property
    def live_bytes(self) -> int:
        """Bytes of the pages that entries hold."""
        return self.budget_bytes - self.free_bytes

    def __len__(self) -> int:
        return len(self._complete)

    def reserve(self, key: PrefixKey, num_tokens: int, *, is_own: bool = False) -> DramEntry:
        """Take pages for a copy; least recently used entries make room. It is invisible until `commit`.

        The caller must end the reservation with `commit` or `abandon`, whatever happens.

        Args:
            key: of the prefix.
            num_tokens: its length.
            is_own: work of the instance itself; it takes from any tenant.

        Raises:
            PoolExhausted: all pages that this tenant may get, and that are neither leased nor being written, are too
                few; no more entries were evicted than necessary.
        """
        need = self.arena.layout.pages(num_tokens)
        if need > self.arena.num_pages:
            raise PoolExhausted(f"need {need} pages, the DRAM tier has {self.arena.num_pages}")
        holding = self.shares.nobody if is_own else self.shares.asking(key.user.tenant)
        while self._pages.num_free < need and (victim := self._victim(holding)) is not None:
            self.drop(victim)
        self._epoch += 1
        entry = DramEntry(key, num_tokens, self._pages.allocate(need), self._epoch, holding)
        for first, count in entry.runs:
            self._epochs[first : first + count] = self._epoch
        self._users.add(entry)
        return entry

    def _victim(self, taker: _Holding) -> DramEntry | None:
        """Choose the entry that makes room for a tenant: the least recently used of those over their share, or its own.

        A tenant within its share gives up its own only if nobody is over his.
        """
        ratios = self.shares.ratios()
        is_nobody = taker is self.shares.nobody
        num_pages = self.arena.num_pages
        over = [one for one in self.shares.accounts if is_nobody or self.shares.is_over(one, ratios, num_pages)]
        heads = [entry for holding in over if (entry := holding.least_recent()) is not None]
        return min(heads, key=lambda entry: entry.used_number, default=None) or taker.least_recent()

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
        self.shares.asked(entry.holding)
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
        del entry.holding.copies[entry.key]
        if not entry.leases:
            self._give_back(entry)

    def _touch(self, entry: DramEntry) -> None:
        """Start the entry's TTL again, and make it the most recently used."""
        jitter = 1.0 + self._jitter_ratio * (2.0 * self._random.random() - 1.0)
        entry.expires_at = self._clock() + self._ttl_s * jitter
        entry.used_number = next(self._numbers)
        self._complete[entry.key] = entry
        entry.holding.copies[entry.key] = entry
        entry.holding.copies.move_to_end(entry.key)

    def check(self) -> None:
        """Assert D1 and D2, and that tenants hold what their entries do. For tests: it looks at every entry."""
        self._pages.check()
        pages = [p for e in self._complete.values() for first, n in e.runs for p in range(first, first + n)]
        assert len(pages) == len(set(pages))
        assert len(pages) <= self.arena.num_pages - self._pages.num_free
        for entry in self._complete.values():
            assert entry.is_held
            assert entry.is_published
            self.verify(entry)
            assert entry.holding.copies[entry.key] is entry
        assert sum(len(holding.copies) for holding in self.shares.accounts) == len(self._complete)
        assert sum(holding.held for holding in self.shares.accounts) <= self.arena.num_pages - self._pages.num_free
