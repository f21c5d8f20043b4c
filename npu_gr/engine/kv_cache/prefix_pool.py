"""Prefix KV in HBM: pages are reserved, then published with a prefix, then leased by its readers.

The pool is a sliding window in time, not an LRU cache. An entry lives until its rank, or for
`t_life_s`; the trigger keeps the sum of the live entries within the budget. A later signal renews
an entry.

    RESERVED --publish--> LIVE <--lease, renew / last lease ends--> EVICTABLE --evicted--> DROPPED
       |                   |           (ranked or expired)                                    ^
       +--abandon, drop----+----drop, or a tenant within its share needs the room-------------+

While there is too little room for all tenants, they share the pages by weight (`core.shares`):

    a tenant within its share   takes free pages, then those of tenants over their share: first
                                entries whose rank is overdue, then those ranked or expired, then
                                those that still wait for a rank
    a tenant over its share     takes free pages, then ranked or expired entries of tenants over
                                their share
    a tenant that wastes        may have fewer pages waiting for ranks, in proportion to the part
                                of its signals that a rank followed

Spare entries, of work that no client waits for, take free pages and each other's only, and make
room before all others, for every tenant.

Source: RelayGR (arXiv:2601.01712), in-HBM relay-race inference. See `docs/relay.md`.
Invariants, checked after every step by tests/engine/kv_cache/test_prefix_pool.py:
  I1  every page is free, reserved, or held by an entry: exactly one of the three; the sum is the
      budget
  I2  a leased entry is never evicted; one that waits for its rank is evicted only if its tenant is
      over its share, and for a tenant that is not
  I3  an entry can be found only after it was published
  I4  entry.leases == number of open `with pool.lease(entry)` blocks
  I5  a spare reservation evicts spare entries only; no other entry is evicted while an evictable
      spare one is left

Not thread-safe: for the event loop only. Every method is O(1) amortised in the number of users, and
O(tenants) where room must be made.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, ValuesView
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import NamedTuple

from npu_gr.core.errors import PoolExhausted
from npu_gr.core.shares import Account, Shares
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageAllocator, PageRun
from npu_gr.engine.kv_cache.tier import PageTier, PrefixKey, TierEntry

# A tenant's credit is the part of its share that may wait for ranks while others want room.
CREDIT = 1 / 8  # of a new tenant
LEAST_CREDIT = 1 / 64  # of a tenant whose signals are never followed by a rank
CREDIT_WEIGHT = 1 / 16  # of the latest prefix in the moving average of ranked prefixes


class EntryState(Enum):
    """The state of an entry."""

    RESERVED = auto()  # being written; cannot be found
    LIVE = auto()  # waiting for its rank, or leased
    EVICTABLE = auto()  # ranked or expired, and not leased: readable until its pages are needed
    DROPPED = auto()  # cannot be found; its pages are free once its writer or last reader is done


class PrefixEntry(TierEntry):
    """One prefix in HBM."""

    __slots__ = (
        "awaits_rank",
        "consumed",
        "evictable_number",
        "holding",
        "is_signalled",
        "is_wasted",
        "state",
        "waits_since_at",
    )

    def __init__(
        self,
        key: PrefixKey,
        num_tokens: int,
        runs: tuple[PageRun, ...],
        holding: _Holding,
        is_signalled: bool,
    ) -> None:
        super().__init__(key, num_tokens, runs, holding)
        self.holding = holding
        self.state = EntryState.RESERVED
        self.consumed = False  # a rank has used it
        self.is_signalled = is_signalled  # made for a rank that will come, not for one that waits
        # Not expired, and no rank has used it since it was reserved or renewed.
        self.awaits_rank = True
        # When it began to wait: published, or renewed after a rank or its expiry.
        self.waits_since_at = 0.0
        self.is_wasted = False  # counted as wasted, since its rank is overdue
        self.evictable_number = 0  # rises with the time at which it became evictable
        if is_signalled:
            holding.awaiting_pages += self.num_pages


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

    def oldest(self) -> PrefixEntry | None:
        return next(iter(self._entries.values()), None)


class _Holding(Account):
    """The pages that one tenant holds."""

    __slots__ = ("awaiting_pages", "evictable", "ranked_ratio", "waiting")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.waiting = _Group()  # LIVE and not leased
        self.evictable = _Group()
        self.awaiting_pages = 0  # of signalled entries that no rank has used, written or not
        self.ranked_ratio = CREDIT  # moving average: part of the signalled prefixes with a rank

    def observe(self, *, is_ranked: bool) -> None:
        self.ranked_ratio += CREDIT_WEIGHT * (is_ranked - self.ranked_ratio)

    @property
    def credit(self) -> float:
        return max(self.ranked_ratio, LEAST_CREDIT)


class Room(NamedTuple):
    """The pages that a tenant can get."""

    num_pages: int  # a lower bound, exact up to the pages that the prefix needs
    is_at_share: bool  # the tenant has its share, and other tenants want the rest


class _TenantRoom:
    """How many pages a tenant may have, and which entries make room (see the module docstring)."""

    def __init__(self, shares: Shares[_Holding], pages: PageAllocator, waits: _RankWaits) -> None:
        self.spare = _Holding("")  # does not affect shares
        self._shares = shares
        self._pages = pages
        self._waits = waits

    def of(self, holding: _Holding, need: int, *, is_signalled: bool) -> Room:
        """Return what a tenant can get for a prefix of `need` pages."""
        if holding is self.spare:
            return Room(self._free(), is_at_share=False)
        ratios = self._shares.ratios()
        is_shared = len(ratios) > 1
        share = ratios.get(holding, 0.0) * self._pages.num_pages
        awaiting = holding.awaiting_pages
        if is_signalled and is_shared and awaiting and awaiting + need > share * holding.credit:
            return Room(0, is_at_share=True)
        within = self._is_within(holding, need, ratios)
        num_pages = self._free()
        if num_pages < need:
            accounts = self._shares.accounts
            num_pages += sum(
                self._obtainable(other, holding, ratios, within=within) for other in accounts
            )
        return Room(num_pages, is_at_share=is_shared and not within)

    def victims(self, holding: _Holding, need: int) -> Iterator[PrefixEntry]:
        """Yield the entries to drop until `need` pages are free; the caller drops each."""
        while self._pages.num_free < need and (spare := self.spare.evictable.oldest()) is not None:
            yield spare
        ratios = self._shares.ratios()
        within = self._is_within(holding, need, ratios)
        while self._pages.num_free < need:
            yield self._victim(holding, ratios, within=within)

    def _free(self) -> int:
        return self._pages.num_free + self.spare.evictable.num_pages

    def _is_within(self, holding: _Holding, need: int, ratios: dict[_Holding, float]) -> bool:
        """Return whether a tenant stays within its share with `need` more pages.

        Its first prefix always does.
        """
        if holding in (self._shares.own_work, self.spare):
            return False
        return not holding.held or holding.held + need <= ratios[holding] * self._pages.num_pages

    def _over(self, other: _Holding, ratios: dict[_Holding, float]) -> int:
        """Count the pages that a tenant holds over its share."""
        return max(0, math.ceil(other.held - ratios.get(other, 0.0) * self._pages.num_pages))

    def _obtainable(
        self, other: _Holding, taker: _Holding, ratios: dict[_Holding, float], *, within: bool
    ) -> int:
        if other is taker or taker is self._shares.own_work:
            return other.evictable.num_pages
        over = self._over(other, ratios)
        return min(over, other.evictable.num_pages + (other.waiting.num_pages if within else 0))

    def _victim(
        self, taker: _Holding, ratios: dict[_Holding, float], *, within: bool
    ) -> PrefixEntry:
        found: list[tuple[int, float, int, PrefixEntry]] = []
        for number, other in enumerate(self._shares.accounts):
            if (
                other is not taker
                and taker is not self._shares.own_work
                and not self._over(other, ratios)
            ):
                continue
            if (entry := other.evictable.oldest()) is not None:
                is_last = within and len(ratios) > 1 and other is taker
                found.append((3 if is_last else 1, entry.evictable_number, number, entry))
            if within and other is not taker and (entry := other.waiting.oldest()) is not None:
                found.append(
                    (0 if self._waits.is_overdue(entry) else 2, entry.waits_since_at, number, entry)
                )
        return min(found)[-1]


class _RankWaits:
    """The published entries that wait for a rank: when they expire, and which count as wasted."""

    def __init__(self, t_life_s: float, clock: Callable[[], float]) -> None:
        self.t_life_s = t_life_s
        self.usual_s = t_life_s  # P99 of the time to a rank: an entry without one is overdue
        self._clock = clock
        # FIFO by expiry. After `t_life_s` is lowered the order is stale: entries may expire late,
        # but never early.
        self.expiring: dict[PrefixEntry, None] = {}
        # Signalled entries that are not yet overdue, and since when they wait; oldest first.
        self._not_overdue: deque[tuple[float, PrefixEntry]] = deque()

    def begin(self, entry: PrefixEntry) -> None:
        """Start the wait of an entry for its rank."""
        entry.waits_since_at = self._clock()
        entry.is_wasted = False
        if entry.is_signalled:
            self._not_overdue.append((entry.waits_since_at, entry))
        self.extend(entry)

    def extend(self, entry: PrefixEntry) -> None:
        """Let an entry expire `t_life_s` from now."""
        self.expiring.pop(entry, None)  # it is absent if it expired while it was leased
        entry.expires_at = self._clock() + self.t_life_s
        self.expiring[entry] = None

    def end(self, entry: PrefixEntry) -> None:
        """End the wait: a rank has used the entry, or none will."""
        if entry.awaits_rank and entry.is_signalled:
            entry.holding.awaiting_pages -= entry.num_pages
        entry.awaits_rank = False

    def is_overdue(self, entry: PrefixEntry) -> bool:
        """Return whether an entry has waited for longer than ranks usually take."""
        return self._clock() - entry.waits_since_at >= self.usual_s

    def ended(self) -> Iterator[PrefixEntry]:
        """Count overdue entries as wasted, and yield those that have expired."""
        now_at = self._clock()
        while self._not_overdue and now_at - self._not_overdue[0][0] >= self.usual_s:
            waits_since_at, entry = self._not_overdue.popleft()
            if entry.awaits_rank and entry.waits_since_at == waits_since_at:
                entry.is_wasted = True
                entry.holding.observe(is_ranked=False)
        while self.expiring and (entry := next(iter(self.expiring))).expires_at <= now_at:
            del self.expiring[entry]
            yield entry


class _Leased(AbstractContextManager[PrefixEntry]):
    """The context in which a block reads an entry."""

    __slots__ = ("_consume", "_entry", "_pool")

    def __init__(self, pool: PrefixPool, entry: PrefixEntry, consume: bool) -> None:
        self._pool = pool
        self._entry = entry
        self._consume = consume

    def __enter__(self) -> PrefixEntry:
        entry = self._entry
        assert entry.state in (EntryState.LIVE, EntryState.EVICTABLE)
        if entry.state is EntryState.EVICTABLE:
            entry.state = EntryState.LIVE
            entry.holding.evictable.remove(entry)
        elif not entry.leases:
            entry.holding.waiting.remove(entry)
        self._pool.shares.asked(entry.holding)
        entry.leases += 1
        # from now on, a signal renews the entry for the next rank
        if self._consume and entry.awaits_rank:
            if entry.is_signalled:
                entry.holding.observe(is_ranked=True)
            self._pool.waits.end(entry)
        return entry

    def __exit__(self, *_: object) -> None:
        entry = self._entry
        entry.leases -= 1
        entry.consumed |= self._consume
        if not entry.leases:
            self._pool._unleased(entry)


class PrefixPool(PageTier[PrefixEntry]):
    """Prefix entries over the pages of one HBM arena.

    free + reserved + live + evictable bytes == budget.
    """

    def __init__(
        self, arena: KVArena, budget_bytes: int, t_life_s: float, clock: Callable[[], float]
    ) -> None:
        """Start with every page free.

        Args:
            arena: Memory of the pages.
            budget_bytes: Bytes of it to use, rounded down to whole pages.
            t_life_s: Seconds that a published entry waits for its rank.
            clock: Monotonic clock, in seconds.

        Raises:
            ValueError: the budget is less than one page.
        """
        num_pages = min(budget_bytes // arena.layout.page_bytes, arena.num_pages)
        if num_pages < 1:
            raise ValueError(
                f"budget_bytes: {budget_bytes} is less than one page of "
                f"{arena.layout.page_bytes} bytes"
            )
        super().__init__(arena, num_pages, clock)
        self.waits = _RankWaits(t_life_s, clock)
        self.shares: Shares[_Holding] = Shares(_Holding, clock)
        self._tenant_room = _TenantRoom(self.shares, self._pages, self.waits)
        self._reserved = _Group()
        self._numbers = itertools.count(1)
        self.on_evict: Callable[[PrefixEntry], None] = lambda _entry: None

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the entries that are being written."""
        return self._reserved.num_pages * self.arena.layout.page_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the entries that are readable until their room is needed."""
        self._expire()
        holdings = (*self.shares.accounts, self._tenant_room.spare)
        pages = sum(holding.evictable.num_pages for holding in holdings)
        return pages * self.arena.layout.page_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of all other entries.

        They wait for a rank, are leased (dropped or not), or are being overwritten.
        """
        return self.budget_bytes - self.free_bytes - self.reserved_bytes - self.evictable_bytes

    # ---- filling entries

    def room(self, tenant: str, num_tokens: int) -> Room:
        """Return how many pages a tenant can get for a prefix of `num_tokens` that it signals."""
        self._expire()
        return self._tenant_room.of(
            self.shares.asking(tenant), self.arena.layout.pages(num_tokens), is_signalled=True
        )

    def reserve(
        self,
        key: PrefixKey,
        num_tokens: int,
        *,
        is_signalled: bool = False,
        is_own: bool = False,
        is_spare: bool = False,
    ) -> PrefixEntry:
        """Take pages for a prefix that is about to be computed or copied.

        The entry cannot be found until `publish`. The caller must end the reservation with
        `publish` or `abandon`, whatever happens.

        Args:
            key: Key of the prefix; no other reservation may have it.
            num_tokens: Length of the prefix.
            is_signalled: True for a rank that will come, False for one that waits now.
            is_own: True for work of the instance itself, which may evict ranked and expired entries
                of every tenant.
            is_spare: True for work that no client waits for: its entry makes room before all
                others, and it evicts none but spare entries.

        Raises:
            PoolExhausted: this tenant cannot get that much room; nothing was evicted.
        """
        assert key not in self._reserved, "a key has at most one prefill job"
        need = self.arena.layout.pages(num_tokens)
        self._expire()
        if is_spare:
            holding = self._tenant_room.spare
        else:
            holding = self.shares.own_work if is_own else self.shares.asking(key.user.tenant)
        room = self._tenant_room.of(holding, need, is_signalled=is_signalled)
        if need > room.num_pages:
            raise PoolExhausted(
                f"need {need} pages, {self._pages.num_free} of {self._pages.num_pages} are free "
                f"and {self.evictable_bytes // self.arena.layout.page_bytes} can be evicted"
                + (", but other tenants want room too" if room.is_at_share else "")
            )
        if (before := self._found.get(key)) is not None:
            self.drop(before)
        for victim in self._tenant_room.victims(holding, need):
            self._drop(victim)
            self.on_evict(victim)
        entry = PrefixEntry(key, num_tokens, self._pages.allocate(need), holding, is_signalled)
        self._reserved.add(entry)
        self._users.add(entry)
        return entry

    def publish(self, entry: PrefixEntry) -> bool:
        """Make a completely written entry findable, for at least `t_life_s`.

        Args:
            entry: Result of `reserve`.

        Returns:
            False if the entry was dropped in the meantime, because its user was erased; its pages
            are freed.
        """
        if entry.state is EntryState.DROPPED:
            self.abandon(entry)
            return False
        self._reserved.remove(entry)
        entry.is_published = True
        entry.state = EntryState.LIVE
        entry.holding.waiting.add(entry)
        self._found[entry.key] = entry
        self.waits.begin(entry)
        return True

    def renew(self, entry: PrefixEntry) -> None:
        """Let an entry wait for one more rank, for `t_life_s` from now.

        Args:
            entry: Result of `get` or `find`, with no await in between.
        """
        self.shares.asked(entry.holding)
        if entry.state is EntryState.EVICTABLE:
            entry.state = EntryState.LIVE
            entry.holding.evictable.remove(entry)
            entry.holding.waiting.add(entry)
        if entry.awaits_rank:
            if entry.is_signalled and self.waits.is_overdue(entry):
                entry.holding.observe(is_ranked=False)
            self.waits.extend(entry)
            return
        entry.awaits_rank = entry.is_signalled = True
        entry.holding.awaiting_pages += entry.num_pages
        self.waits.begin(entry)

    def abandon(self, entry: PrefixEntry) -> None:
        """Free the pages of an unfinished entry; does nothing to a published one."""
        if entry.is_published or not entry.is_held:
            return
        self.drop(entry)  # does nothing if it was dropped while it was being written
        self._give_back(entry)

    # ---- use

    def is_reserved(self, key: PrefixKey) -> bool:
        """Return whether a prefix with this key is being written now."""
        return key in self._reserved

    def lease(self, entry: PrefixEntry, *, consume: bool) -> AbstractContextManager[PrefixEntry]:
        """Keep the entry's pages while the block reads them.

        Args:
            entry: Result of `get` or `find`, with no await in between.
            consume: True if the block is the entry's rank, after which the entry may be evicted.
        """
        return _Leased(self, entry, consume)

    def _unleased(self, entry: PrefixEntry) -> None:
        """Handle the end of the last lease."""
        if entry.state is EntryState.DROPPED:
            self._give_back(entry)
        elif entry.awaits_rank and entry.expires_at > self._clock():
            entry.holding.waiting.add(entry)
        else:
            self.waits.end(entry)
            entry.state = EntryState.EVICTABLE
            entry.evictable_number = next(self._numbers)
            entry.holding.evictable.add(entry)

    def _expire(self) -> None:
        """Make the expired entries evictable, except leased ones."""
        for entry in self.waits.ended():
            if entry.state is EntryState.LIVE and not entry.leases:
                entry.holding.waiting.remove(entry)
                self._unleased(entry)

    def drop(self, entry: PrefixEntry) -> None:
        """Make an entry unfindable, and free its pages once its writer or last reader is done.

        A signalled entry that no rank has used, e.g. because a longer prefix of its user replaces
        it, counts as wasted.
        """
        if (
            entry.state is EntryState.LIVE
            and entry.is_signalled
            and entry.awaits_rank
            and not entry.is_wasted
        ):
            entry.holding.observe(is_ranked=False)
        self._drop(entry)

    def _drop(self, entry: PrefixEntry) -> None:
        before = entry.state
        if before is EntryState.DROPPED:
            return
        if before is EntryState.EVICTABLE:
            entry.holding.evictable.remove(entry)
        elif before is EntryState.LIVE and not entry.leases:
            entry.holding.waiting.remove(entry)
        self.waits.end(entry)
        self.waits.expiring.pop(entry, None)
        entry.state = EntryState.DROPPED
        self._users.remove(entry)
        if before is EntryState.RESERVED:
            self._reserved.remove(entry)
            return  # the writer still calls `publish` or `abandon`
        del self._found[entry.key]
        if not entry.leases:
            self._give_back(entry)


def by_use(pool: PrefixPool) -> list[PrefixEntry]:
    """List the complete entries: those that wait for a rank, then the latest used first."""
    return sorted(
        pool._found.values(),
        key=lambda entry: (entry.state is EntryState.LIVE, entry.evictable_number),
        reverse=True,
    )


def evict_last(pool: PrefixPool, entry: PrefixEntry) -> None:
    """Evict an entry after all that are evictable now."""
    if entry.state is EntryState.EVICTABLE:
        entry.holding.evictable.remove(entry)
        entry.evictable_number = next(pool._numbers)
        entry.holding.evictable.add(entry)
