"""The common part of both tiers of prefix KV, and the DRAM tier.

`prefix_pool.py` is the HBM tier.

    free pages --reserve--> entry being written --publish, commit--> findable entry
        ^                        | abandon                              | drop, after its last lease
        |                        v                                      v
        +--------------------- freed <----------------------------------+
                                 |
                                 +-- `on_erased` overwrites the pages of an erased user first

The DRAM tier keeps copies of used prefixes for returning users: LRU with a TTL, under a byte limit.
Tenants share the bytes by weight (`core.shares`): copies of tenants over their share, and of the
tenant that needs room, are evicted.

Not thread-safe: for the event loop only. `docs/relay.md` draws the states of a page.

Source: RelayGR (arXiv:2601.01712), memory-aware expander.
Invariants of the DRAM tier, held by tests/engine/kv_cache/test_dram_store.py:
  D1  every page is free or held by exactly one entry; the arena is the byte limit
  D2  an entry can be found only after its copy is complete
  D3  a leased entry is never evicted
  D4  a copy of a tenant within its share is evicted for another copy of that tenant only
  D5  the epoch of a page changes each time the page is allocated, so a reader can detect that its
      pages were reused during the copy
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from npu_gr.core.errors import PoolExhausted, StaleEntry
from npu_gr.core.history import UserKey
from npu_gr.core.shares import Account, Shares
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageAllocator, PageRun


class PrefixKey(NamedTuple):
    """Identifies a prefix.

    A prefix is never used for another key, however little they differ: so no request mixes model
    versions.
    """

    user: UserKey
    model_version: str
    layout_id: str  # `KVLayout.layout_id`
    fingerprint: str  # identifies the tokens


class _Keyed(Protocol):
    @property
    def key(self) -> PrefixKey: ...


Keyed = TypeVar("Keyed", bound=_Keyed)


class ByUser(Generic[Keyed]):
    """The entries of each user, oldest first. A user has few entries, so a list is enough."""

    def __init__(self) -> None:
        self._entries: dict[UserKey, list[Keyed]] = {}

    def add(self, entry: Keyed) -> None:
        """Add an entry."""
        self._entries.setdefault(entry.key.user, []).append(entry)

    def remove(self, entry: Keyed) -> None:
        """Remove an entry that was added."""
        entries = self._entries[entry.key.user]
        entries.remove(entry)
        if not entries:
            del self._entries[entry.key.user]

    def users(self) -> list[UserKey]:
        """Return a new list of the users."""
        return list(self._entries)

    def of(self, user: UserKey) -> list[Keyed]:
        """Return a new list of the user's entries."""
        return list(self._entries.get(user, ()))

    def matching(self, user: UserKey, model_version: str, layout_id: str) -> list[Keyed]:
        """List the user's entries of one model version and page layout, newest first."""
        return [
            entry
            for entry in reversed(self._entries.get(user, ()))
            if entry.key.model_version == model_version and entry.key.layout_id == layout_id
        ]


class TierEntry:
    """One prefix and the pages that it holds in one tier; `runs` are in token order."""

    __slots__ = (
        "account",
        "expires_at",
        "is_erased",
        "is_held",
        "is_published",
        "key",
        "leases",
        "num_pages",
        "num_tokens",
        "runs",
    )

    def __init__(
        self, key: PrefixKey, num_tokens: int, runs: tuple[PageRun, ...], account: Account
    ) -> None:
        self.key = key
        self.account = account  # counts the pages of the tenant
        self.num_tokens = num_tokens
        self.runs = runs
        self.num_pages = sum(run.num_pages for run in runs)
        self.is_published = False  # it is, or was, completely written and findable
        self.leases = 0  # open leases
        self.expires_at = 0.0
        self.is_held = True  # the pages are not freed yet
        self.is_erased = False  # its user was erased
        account.held += self.num_pages


E = TypeVar("E", bound=TierEntry)


class PageTier(ABC, Generic[E]):
    """Pages of one arena, and an index of their entries by user."""

    def __init__(self, arena: KVArena, num_pages: int, clock: Callable[[], float]) -> None:
        self.arena = arena
        self._clock = clock
        self._pages = PageAllocator(num_pages)
        self._found: dict[PrefixKey, E] = {}  # completely written
        # entries that are not dropped, also those being written
        self._users: ByUser[E] = ByUser()
        # Called with the pages of an erased user and a function that frees them, to be called once
        # the pages are overwritten. By default they are freed at once.
        self.on_erased: Callable[[tuple[PageRun, ...], Callable[[], None]], None] = (
            lambda _runs, free: free()
        )

    @property
    def budget_bytes(self) -> int:
        """Bytes of all pages."""
        return self._pages.num_pages * self.arena.layout.page_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the pages that no entry holds."""
        return self._pages.num_free * self.arena.layout.page_bytes

    def __len__(self) -> int:
        """Count the entries that can be found."""
        return len(self._found)

    @abstractmethod
    def reserve(self, key: PrefixKey, num_tokens: int, *, is_own: bool = False) -> E:
        """Take pages for a prefix that is about to be written. It cannot be found yet."""

    @abstractmethod
    def abandon(self, entry: E) -> None:
        """Free an entry whose writer failed; does nothing to a completely written one."""

    def get(self, key: PrefixKey) -> E | None:
        """Find the completely written entry with this key."""
        return self._found.get(key)

    @abstractmethod
    def drop(self, entry: E) -> None:
        """Make an entry unfindable, and free its pages once its writer or last reader is done."""

    def find(self, user: UserKey, model_version: str, layout_id: str) -> list[E]:
        """Find a user's complete entries of one model version and page layout, newest first."""
        return [
            entry
            for entry in self._users.matching(user, model_version, layout_id)
            if self.get(entry.key) is entry
        ]

    def users(self) -> list[UserKey]:
        """List the users who have entries, also ones being written."""
        return self._users.users()

    def knows(self, user: UserKey) -> bool:
        """Return whether the tier has entries of a user, also ones being written."""
        return bool(self._users.of(user))

    def erase_user(self, user: UserKey) -> None:
        """Drop all entries of a user, also ones being written. `on_erased` gets their pages."""
        for entry in self._users.of(user):
            entry.is_erased = True
            self.drop(entry)

    def _give_back(self, entry: E) -> None:
        entry.is_held = False
        entry.account.held -= entry.num_pages
        free = partial(self._pages.free, entry.runs)
        if entry.is_erased:
            self.on_erased(entry.runs, free)
        else:
            free()


class DramEntry(TierEntry):
    """One copy of a prefix."""

    __slots__ = ("epoch", "holding", "is_dropped", "used_number")

    def __init__(
        self,
        key: PrefixKey,
        num_tokens: int,
        runs: tuple[PageRun, ...],
        epoch: int,
        holding: _Holding,
    ) -> None:
        super().__init__(key, num_tokens, runs, holding)
        self.holding = holding
        self.used_number = 0  # rises with each use: the entry with the smallest is the LRU one
        self.epoch = epoch  # of all its pages, until they are reused
        self.is_dropped = False  # it cannot be found any more


class _Holding(Account):
    """The copies that one tenant holds."""

    __slots__ = ("copies",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # complete copies, least recently used first
        self.copies: OrderedDict[PrefixKey, DramEntry] = OrderedDict()

    def least_recent(self) -> DramEntry | None:
        """Return the least recently used copy that is not leased. Few copies are ever leased."""
        return next((entry for entry in self.copies.values() if not entry.leases), None)


class DramStore(PageTier[DramEntry]):
    """Copies of prefixes over the pages of one host arena."""

    def __init__(
        self,
        arena: KVArena,
        *,
        ttl_s: float,
        ttl_jitter_ratio: float,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        """Start with every page free.

        Args:
            arena: Host memory; all of it is used.
            ttl_s: Seconds for which an unused copy is kept.
            ttl_jitter_ratio: Largest random change of a TTL, as a part of it, so that copies made
                together do not expire together.
            seed: Seed of the jitter.
            clock: Monotonic clock, in seconds.
        """
        super().__init__(arena, arena.num_pages, clock)
        self.ttl_s = ttl_s
        self._jitter_ratio = ttl_jitter_ratio
        self._random = random.Random(seed)  # noqa: S311  (jitter)
        self._epochs = np.zeros(arena.num_pages, np.int64)  # of each page
        self._epoch = 0
        self._numbers = itertools.count(1)
        self.shares: Shares[_Holding] = Shares(_Holding, clock)

    @property
    def live_bytes(self) -> int:
        """Bytes of the pages that entries hold."""
        return self.budget_bytes - self.free_bytes

    def reserve(self, key: PrefixKey, num_tokens: int, *, is_own: bool = False) -> DramEntry:
        """Take pages for a copy; least recently used copies are evicted to make room.

        The copy cannot be found until `commit`. The caller must end the reservation with `commit`
        or `abandon`, whatever happens.

        Args:
            key: Key of the prefix.
            num_tokens: Length of the prefix.
            is_own: True for work of the instance itself, which may evict copies of every tenant.

        Raises:
            PoolExhausted: too few pages can be freed for this tenant, since leased copies and
                copies being written stay. Other copies may have been evicted.
        """
        need = self.arena.layout.pages(num_tokens)
        if need > self.arena.num_pages:
            raise PoolExhausted(f"need {need} pages, the DRAM tier has {self.arena.num_pages}")
        holding = self.shares.own_work if is_own else self.shares.asking(key.user.tenant)
        while self._pages.num_free < need and (victim := self._victim(holding)) is not None:
            self.drop(victim)
        self._epoch += 1
        entry = DramEntry(key, num_tokens, self._pages.allocate(need), self._epoch, holding)
        for first, count in entry.runs:
            self._epochs[first : first + count] = self._epoch
        self._users.add(entry)
        return entry

    def _victim(self, taker: _Holding) -> DramEntry | None:
        """Choose the copy to evict for a tenant, or None.

        It is the least recently used copy of all tenants over their share. If no tenant is, it is
        the least recently used copy of the tenant itself.
        """
        ratios = self.shares.ratios()
        is_own_work = taker is self.shares.own_work
        num_pages = self.arena.num_pages
        over = [
            one
            for one in self.shares.accounts
            if is_own_work or self.shares.is_over(one, ratios, num_pages)
        ]
        heads = [entry for holding in over if (entry := holding.least_recent()) is not None]
        return min(heads, key=lambda entry: entry.used_number, default=None) or taker.least_recent()

    def commit(self, entry: DramEntry) -> None:
        """Make a complete copy findable for its TTL, or free it if it was dropped meanwhile.

        Args:
            entry: Result of `reserve`.
        """
        if entry.is_dropped:
            self.abandon(entry)
            return
        if (before := self._found.get(entry.key)) is not None:
            self.drop(before)
        entry.is_published = True
        self._touch(entry)

    def abandon(self, entry: DramEntry) -> None:
        """Free the pages of an incomplete copy; does nothing to a complete one."""
        if entry.is_published or not entry.is_held:
            return
        self.drop(entry)
        self._give_back(entry)

    def get(self, key: PrefixKey) -> DramEntry | None:
        """Find the complete, unexpired copy with this key."""
        entry = self._found.get(key)
        if entry is not None and entry.expires_at <= self._clock() and not entry.leases:
            self.drop(entry)
            return None
        return entry

    @contextmanager
    def lease(self, entry: DramEntry) -> Iterator[DramEntry]:
        """Keep the entry's pages while the block copies them. This restarts its TTL."""
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
        """Check, before and after a copy, that the entry's pages were not reused.

        Raises:
            StaleEntry: they were reused.
        """
        for first, count in entry.runs:
            if not (self._epochs[first : first + count] == entry.epoch).all():
                raise StaleEntry("the DRAM copy was overwritten while it was read")

    def drop(self, entry: DramEntry) -> None:
        """Make an entry unfindable, and free its pages once its writer or last reader is done."""
        if entry.is_dropped:
            return
        entry.is_dropped = True
        self._users.remove(entry)
        if not entry.is_published:
            return  # the writer still calls `commit` or `abandon`
        del self._found[entry.key]
        del entry.holding.copies[entry.key]
        if not entry.leases:
            self._give_back(entry)

    def _touch(self, entry: DramEntry) -> None:
        """Restart the entry's TTL, and make it the most recently used."""
        jitter = 1.0 + self._jitter_ratio * (2.0 * self._random.random() - 1.0)
        entry.expires_at = self._clock() + self.ttl_s * jitter
        entry.used_number = next(self._numbers)
        self._found[entry.key] = entry
        entry.holding.copies[entry.key] = entry
        entry.holding.copies.move_to_end(entry.key)
