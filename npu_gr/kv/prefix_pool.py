"""Prefix KV in HBM: reserve pages before the work, publish the prefix after it, lease the pages while they are read.

The pool is a sliding window in time, not an LRU cache. An entry lives from its production to its rank, or for
`t_life_s`; admission keeps the sum of the living entries within the budget.

    RESERVED ----publish----> LIVE <----lease / last lease released---> EVICTABLE ---room is needed--> DROPPED
       |                       |        (consumed or expired)                                            ^
       +--abandon, drop--------+-----------------drop----------------------------------------------------+

Source: RelayGR (arXiv:2601.01712), in-HBM relay-race inference. See `docs/relay.md`.
Invariants, checked after every step by tests/kv/test_prefix_pool.py:
  I1  every page is free, reserved, or held by an entry: exactly one of the three; the sum is the budget
  I2  a leased entry, and an entry that is neither consumed nor expired, is never evicted
  I3  an entry can be found only after it was published
  I4  entry.leases == number of `with pool.lease(entry)` blocks now open

All methods are for one thread (the event loop's). They take O(1) amortised, whatever the number of users.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, ValuesView
from contextlib import contextmanager
from enum import Enum, auto

from npu_gr.core.errors import PoolExhausted
from npu_gr.core.request import I64
from npu_gr.kv.arena import KVArena
from npu_gr.kv.keys import PrefixKey
from npu_gr.kv.layout import PageRun
from npu_gr.kv.tier import PageTier, TierEntry


class EntryState(Enum):
    """Where an entry is in its life."""

    RESERVED = auto()  # being written; cannot be found
    LIVE = auto()  # waiting for its rank, or leased
    EVICTABLE = auto()  # consumed or expired, and not leased: readable until its pages are needed
    DROPPED = auto()  # cannot be found; its pages are free, or will be when its writer or last reader is done


class PrefixEntry(TierEntry):
    """One prefix in HBM."""

    __slots__ = ("consumed", "state")

    def __init__(self, key: PrefixKey, num_tokens: int, runs: tuple[PageRun, ...]) -> None:
        super().__init__(key, num_tokens, runs)
        self.state = EntryState.RESERVED
        self.consumed = False  # a rank has used it


class _Group:
    """Entries by key, oldest first, and the number of their pages."""

    def __init__(self) -> None:
        self.num_pages = 0
        self._entries: dict[PrefixKey, PrefixEntry] = {}

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._entries

    def add(self, entry: PrefixEntry) -> None:
        self._entries[entry.key] = entry
        self.num_pages += entry.num_pages

    def remove(self, entry: PrefixEntry) -> None:
        del self._entries[entry.key]
        self.num_pages -= entry.num_pages

    def values(self) -> ValuesView[PrefixEntry]:
        return self._entries.values()


class PrefixPool(PageTier[PrefixEntry]):
    """Prefix entries over the pages of one HBM arena. free + reserved + live + evictable bytes == budget."""

    def __init__(self, arena: KVArena, budget_bytes: int, t_life_s: float, clock: Callable[[], float]) -> None:
        """Start with every page free.

        Args:
            arena: the memory.
            budget_bytes: how much of it to use, in whole pages.
            t_life_s: how long a published entry waits for its rank; it may be changed at any time.
            clock: instants for expiry.

        Raises:
            ValueError: the budget is less than one page.
        """
        num_pages = min(budget_bytes // arena.layout.page_bytes, arena.num_pages)
        if num_pages < 1:
            raise ValueError(f"budget_bytes: {budget_bytes} is less than one page of {arena.layout.page_bytes} bytes")
        super().__init__(arena, num_pages, clock)
        self.t_life_s = t_life_s
        self._published: dict[PrefixKey, PrefixEntry] = {}
        self._reserved = _Group()
        self._evictable = _Group()
        # FIFO by expiry. After `t_life_s` is lowered the order is stale: entries may expire late, never early.
        self._expiring: deque[PrefixEntry] = deque()
        self.on_evict: Callable[[PrefixEntry], None] = lambda _entry: None

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the entries that are being written."""
        return self._reserved.num_pages * self.arena.layout.page_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the entries that can still be read, and are given up as soon as room is needed."""
        self._expire()
        return self._evictable.num_pages * self.arena.layout.page_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the entries that wait for their rank, are leased, are dropped but leased, or are overwritten."""
        return self.budget_bytes - self.free_bytes - self.reserved_bytes - self.evictable_bytes

    def __len__(self) -> int:
        return len(self._published)

    # ---- production

    def reserve(self, key: PrefixKey, num_tokens: int) -> PrefixEntry:
        """Take pages for a prefix that is about to be computed or copied. It is invisible until `publish`.

        The caller must end the reservation with `publish` or `abandon`, whatever happens.

        Args:
            key: no other reservation may have it.
            num_tokens: length of the prefix.

        Raises:
            PoolExhausted: evicting every consumed or expired entry would not make enough room; nothing was evicted.
        """
        assert key not in self._reserved, "one producer a key"
        need = self.arena.layout.pages(num_tokens)
        self._expire()
        if need > self._pages.num_free + self._evictable.num_pages:
            raise PoolExhausted(
                f"need {need} pages, {self._pages.num_free} of {self._pages.num_pages} are free "
                f"and {self._evictable.num_pages} can be evicted"
            )
        if (before := self._published.get(key)) is not None:
            self.drop(before)
        while self._pages.num_free < need:
            oldest = next(iter(self._evictable.values()))
            self.drop(oldest)
            self.on_evict(oldest)
        entry = PrefixEntry(key, num_tokens, self._pages.allocate(need))
        self._reserved.add(entry)
        self._users.add(entry)
        return entry

    def publish(self, entry: PrefixEntry, timestamps: I64) -> bool:
        """Make a completely written entry visible, for at least `t_life_s`.

        Args:
            entry: as `reserve` returned it.
            timestamps: [num_tokens] unix seconds of its tokens.

        Returns:
            False if the entry was dropped meanwhile (its user asked to be forgotten): its pages go back.
        """
        assert len(timestamps) == entry.num_tokens
        if entry.state is EntryState.DROPPED:
            self.abandon(entry)
            return False
        self._reserved.remove(entry)
        entry.timestamps = timestamps
        entry.state = EntryState.LIVE
        entry.expires_at = self._clock() + self.t_life_s
        self._published[entry.key] = entry
        self._expiring.append(entry)
        return True

    def abandon(self, entry: PrefixEntry) -> None:
        """Give the pages of an unfinished entry back. Nothing happens to an entry that was published."""
        if entry.is_published or not entry.is_held:
            return
        self.drop(entry)  # or it was dropped while it was being written
        self._give_back(entry)

    # ---- use

    def get(self, key: PrefixKey) -> PrefixEntry | None:
        """Find the published entry with this key."""
        return self._published.get(key)

    def is_reserved(self, key: PrefixKey) -> bool:
        """Return whether a prefix with this key is being written now."""
        return key in self._reserved

    @contextmanager
    def lease(self, entry: PrefixEntry, *, consume: bool) -> Iterator[PrefixEntry]:
        """Keep the entry's pages while the block reads them.

        Args:
            entry: as `get` or `find` returned it, with no await in between.
            consume: the block is the entry's rank; afterwards its pages may go to other prefixes.
        """
        assert entry.state in (EntryState.LIVE, EntryState.EVICTABLE)
        if entry.state is EntryState.EVICTABLE:
            self._evictable.remove(entry)
            entry.state = EntryState.LIVE
        entry.leases += 1
        try:
            yield entry
        finally:
            entry.leases -= 1
            entry.consumed |= consume
            if not entry.leases:
                self._unleased(entry)

    def _unleased(self, entry: PrefixEntry) -> None:
        if entry.state is EntryState.DROPPED:
            self._give_back(entry)
        elif entry.consumed or entry.expires_at <= self._clock():
            entry.state = EntryState.EVICTABLE
            self._evictable.add(entry)

    def _expire(self) -> None:
        """Make the entries evictable whose time is up, except those that are leased."""
        now_at = self._clock()
        while self._expiring and self._expiring[0].expires_at <= now_at:
            entry = self._expiring.popleft()
            if entry.state is EntryState.LIVE and not entry.leases:
                self._unleased(entry)

    def drop(self, entry: PrefixEntry) -> None:
        """Make an entry unfindable. Its pages go back at once, or when its writer or its last reader is done."""
        before = entry.state
        if before is EntryState.DROPPED:
            return
        entry.state = EntryState.DROPPED
        self._users.remove(entry)
        if before is EntryState.RESERVED:
            self._reserved.remove(entry)
            return  # the writer still calls `publish` or `abandon`
        del self._published[entry.key]
        if before is EntryState.EVICTABLE:
            self._evictable.remove(entry)
        if not entry.leases:
            self._give_back(entry)

    def check(self) -> None:
        """Assert I1 to I3 over the whole pool. For tests: it looks at every entry."""
        self._pages.check()
        held = [*self._published.values(), *self._reserved.values()]
        pages = [page for entry in held for first, count in entry.runs for page in range(first, first + count)]
        assert len(pages) == len(set(pages)), "a page in two places"
        assert len(pages) <= self._pages.num_pages - self._pages.num_free
        for entry in held:
            assert sum(run.num_pages for run in entry.runs) == entry.num_pages
            assert entry.is_held
        assert all(entry.state is EntryState.RESERVED for entry in self._reserved.values())
        assert all(entry.is_published for entry in self._published.values())
        assert self._reserved.num_pages == sum(e.num_pages for e in self._reserved.values())
        assert self._evictable.num_pages == sum(e.num_pages for e in self._evictable.values())
        for entry in self._evictable.values():
            assert entry.state is EntryState.EVICTABLE
            assert not entry.leases
            assert entry.consumed or entry.expires_at <= self._clock()
        assert self.free_bytes + self.reserved_bytes + self.live_bytes + self.evictable_bytes == self.budget_bytes
        assert self.live_bytes >= 0
