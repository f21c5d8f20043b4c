"""Prefix KV in HBM: reserve pages before the work, publish the prefix after it, lease the pages while they are read.

The pool is a sliding window in time, not an LRU cache. An entry lives from its production to its
rank, or for `t_life_s`; admission keeps the sum of the living entries within the budget. A later
signal renews an entry.

    RESERVED ----publish----> LIVE <----lease, renew / last lease released---> EVICTABLE ---room is needed--> DROPPED
       |                       |            (ranked or expired)                                                 ^
       +--abandon, drop--------+-------drop, or a tenant within its share needs the room------------------------+

Tenants share the pages by weight (`core.shares`), but only while the room is too small for all that
want some:

    a tenant within its share    takes what is free, then from tenants over their share: what waits for a rank that
                                 hardly ever comes so late, what has been ranked or has expired,
                                 what waits at all
    a tenant over its share      takes what is free, and what has been ranked or has expired of tenants over their share
    a tenant that wastes         may have the less waiting for ranks, the fewer of its signals were followed by one

Source: RelayGR (arXiv:2601.01712), in-HBM relay-race inference. See `docs/relay.md`.
Invariants, checked after every step by tests/engine/kv_cache/test_prefix_pool.py:
  I1  every page is free, reserved, or held by an entry: exactly one of the three; the sum is the budget
  I2  a leased entry is never evicted; an entry that waits for its rank is so only if its tenant is over its share, for
      a tenant that is not
  I3  an entry can be found only after it was published
  I4  entry.leases == number of `with pool.lease(entry)` blocks now open

All methods are for one thread (the event loop's). They take O(1) amortised, whatever the number of
users; where room must be made, O(tenants).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, ValuesView
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import NamedTuple

from npu_gr.core.arrays import I64
from npu_gr.core.errors import PoolExhausted
from npu_gr.core.shares import Account, Shares
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageAllocator, PageRun
from npu_gr.engine.kv_cache.tier import PageTier, PrefixKey, TierEntry

# of its share, that a tenant nobody knows yet may have waiting for ranks, while others want room
CREDIT = 1 / 8
LEAST_CREDIT = 1 / 64  # that one keeps whose signals are never followed by a rank
CREDIT_WEIGHT = 1 / 16  # of one more prefix in the ratio of those that were ranked


class EntryState(Enum):
    """Where an entry is in its life."""

    RESERVED = auto()  # being written; cannot be found
    LIVE = auto()  # waiting for its rank, or leased
    EVICTABLE = auto()  # ranked or expired, and not leased: readable until its pages are needed
    # cannot be found; its pages are free, or will be when its writer or last reader is done
    DROPPED = auto()


class PrefixEntry(TierEntry):
    """One prefix in HBM."""

    __slots__ = (
        "awaits_rank",
        "consumed",
        "evictable_number",
        "holding",
        "is_evaluated",
        "is_signalled",
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
        self.is_signalled = is_signalled  # for a rank to come, not for one that is there
        # no rank has used it since it was reserved or renewed, and its time is not up
        self.awaits_rank = True
        # since when it has been published and awaited a rank; a renewal before is none
        self.waits_since_at = 0.0
        self.is_evaluated = False  # its rank is late: it counts as wasted
        # of two evictable entries, the one with the smaller number has been so for longer
        self.evictable_number = 0
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
    """What one tenant has of the pool, in pages."""

    __slots__ = ("awaiting_pages", "evictable", "ranked_ratio", "waiting")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.waiting = _Group()  # LIVE and not leased
        self.evictable = _Group()
        self.awaiting_pages = 0  # signalled, being written or written, and no rank has come
        # of the prefixes that it signalled, those that were ranked; the latest count most
        self.ranked_ratio = CREDIT

    def evaluate(self, *, is_ranked: bool) -> None:
        self.ranked_ratio += CREDIT_WEIGHT * (is_ranked - self.ranked_ratio)

    @property
    def credit(self) -> float:
        return max(self.ranked_ratio, LEAST_CREDIT)


class Room(NamedTuple):
    """What a tenant can get."""

    num_pages: int  # at least so many, if the prefix needs so many
    is_at_share: bool  # it has its share, and others want the rest


class _TenantRoom:
    """Who may have how many pages, and whose entry makes room: the table in the text at the top."""

    def __init__(self, shares: Shares[_Holding], pages: PageAllocator, waits: _RankWaits) -> None:
        self._shares = shares
        self._pages = pages
        self._waits = waits

    def of(self, holding: _Holding, need: int, *, is_signalled: bool) -> Room:
        """Say how much a tenant can get for a prefix of so many pages."""
        ratios = self._shares.ratios()
        is_shared = len(ratios) > 1
        share = ratios.get(holding, 0.0) * self._pages.num_pages
        awaiting = holding.awaiting_pages
        if is_signalled and is_shared and awaiting and awaiting + need > share * holding.credit:
            return Room(0, is_at_share=True)
        within = self._is_within(holding, need, ratios)
        num_pages = self._pages.num_free
        if num_pages < need:
            accounts = self._shares.accounts
            num_pages += sum(
                self._obtainable(other, holding, ratios, within=within) for other in accounts
            )
        return Room(num_pages, is_at_share=is_shared and not within)

    def victims(self, holding: _Holding, need: int) -> Iterator[PrefixEntry]:
        """Yield the entries that make room, until so many pages are free; the caller drops each."""
        ratios = self._shares.ratios()
        within = self._is_within(holding, need, ratios)
        while self._pages.num_free < need:
            yield self._victim(holding, ratios, within=within)

    def _is_within(self, holding: _Holding, need: int, ratios: dict[_Holding, float]) -> bool:
        """Whether a tenant stays within its share with so many pages more.

        Its first prefix always is.
        """
        if holding is self._shares.own_work:
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
    """The published entries that await a rank: until when each does, and which tenants' prefixes nobody ranked."""

    def __init__(self, t_life_s: float, clock: Callable[[], float]) -> None:
        self.t_life_s = t_life_s
        self.usual_s = t_life_s  # hardly any rank comes later than that after its signal
        self._clock = clock
        # FIFO by expiry. After `t_life_s` is lowered the order is stale: entries may expire late,
        # never early.
        self.expiring: dict[PrefixEntry, None] = {}
        # signalled; since when it waits, oldest first
        self._unjudged: deque[tuple[float, PrefixEntry]] = deque()

    def begin(self, entry: PrefixEntry) -> None:
        """Let an entry begin to wait for a rank."""
        entry.waits_since_at = self._clock()
        entry.is_evaluated = False
        if entry.is_signalled:
            self._unjudged.append((entry.waits_since_at, entry))
        self.extend(entry)

    def extend(self, entry: PrefixEntry) -> None:
        """Let an entry wait for `t_life_s` from now."""
        self.expiring.pop(entry, None)  # it is not there if its time was up while it was leased
        entry.expires_at = self._clock() + self.t_life_s
        self.expiring[entry] = None

    def end(self, entry: PrefixEntry) -> None:
        """A rank has come, or none will."""
        if entry.awaits_rank and entry.is_signalled:
            entry.holding.awaiting_pages -= entry.num_pages
        entry.awaits_rank = False

    def is_overdue(self, entry: PrefixEntry) -> bool:
        """Whether an entry waits for longer than hardly any rank takes."""
        return self._clock() - entry.waits_since_at >= self.usual_s

    def ended(self) -> Iterator[PrefixEntry]:
        """Evaluator what nobody ranked in the usual time, and yield the entries whose time is up."""
        now_at = self._clock()
        while self._unjudged and now_at - self._unjudged[0][0] >= self.usual_s:
            waits_since_at, entry = self._unjudged.popleft()
            if entry.awaits_rank and entry.waits_since_at == waits_since_at:
                entry.is_evaluated = True
                entry.holding.evaluate(is_ranked=False)
        while self.expiring and (entry := next(iter(self.expiring))).expires_at <= now_at:
            del self.expiring[entry]
            yield entry


class _Leased(AbstractContextManager[PrefixEntry]):
    """A block that reads an entry."""

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
        # a signal that comes while this rank runs is for the next one
        if self._consume and entry.awaits_rank:
            if entry.is_signalled:
                entry.holding.evaluate(is_ranked=True)
            self._pool.waits.end(entry)
        return entry

    def __exit__(self, *_: object) -> None:
        entry = self._entry
        entry.leases -= 1
        entry.consumed |= self._consume
        if not entry.leases:
            self._pool._unleased(entry)


class PrefixPool(PageTier[PrefixEntry]):
    """Prefix entries over the pages of one HBM arena. free + reserved + live + evictable bytes == budget."""

    def __init__(
        self, arena: KVArena, budget_bytes: int, t_life_s: float, clock: Callable[[], float]
    ) -> None:
        """Start with every page free.

        Args:
            arena: the memory.
            budget_bytes: how much of it to use, in whole pages.
            t_life_s: how long a published entry waits for its rank.
            clock: instants for expiry.

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
        """Bytes of the entries that can still be read, and are given up as soon as room is needed."""
        self._expire()
        pages = sum(holding.evictable.num_pages for holding in self.shares.accounts)
        return pages * self.arena.layout.page_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the entries that wait for their rank, are leased, are dropped but leased, or are overwritten."""
        return self.budget_bytes - self.free_bytes - self.reserved_bytes - self.evictable_bytes

    # ---- production

    def room(self, tenant: str, num_tokens: int) -> Room:
        """Say how much of the pool a tenant can get for a prefix that it signals.

        Args:
            tenant: who asks.
            num_tokens: length of the prefix.
        """
        self._expire()
        return self._tenant_room.of(
            self.shares.asking(tenant), self.arena.layout.pages(num_tokens), is_signalled=True
        )

    def reserve(
        self, key: PrefixKey, num_tokens: int, *, is_signalled: bool = False, is_own: bool = False
    ) -> PrefixEntry:
        """Take pages for a prefix that is about to be computed or copied.

        It is invisible until `publish`.

        The caller must end the reservation with `publish` or `abandon`, whatever happens.

        Args:
            key: no other reservation may have it.
            num_tokens: length of the prefix.
            is_signalled: for a rank to come, not for one that is there.
            is_own: work of the instance itself; it takes what no rank waits for, of any tenant.

        Raises:
            PoolExhausted: there is no such room for this tenant; nothing was evicted.
        """
        assert key not in self._reserved, "one producer a key"
        need = self.arena.layout.pages(num_tokens)
        self._expire()
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

    def publish(self, entry: PrefixEntry, timestamps: I64) -> bool:
        """Make a completely written entry visible, for at least `t_life_s`.

        Args:
            entry: as `reserve` returned it.
            timestamps: [num_tokens] unix seconds of its tokens.

        Returns:
            False if the entry was dropped meanwhile (its user asked to be forgotten): its pages go
            back.
        """
        assert len(timestamps) == entry.num_tokens
        if entry.state is EntryState.DROPPED:
            self.abandon(entry)
            return False
        self._reserved.remove(entry)
        entry.timestamps = timestamps
        entry.state = EntryState.LIVE
        entry.holding.waiting.add(entry)
        self._found[entry.key] = entry
        self.waits.begin(entry)
        return True

    def renew(self, entry: PrefixEntry) -> None:
        """Let an entry wait for one more rank, for `t_life_s` from now.

        Args:
            entry: as `get` or `find` returned it, with no await in between.
        """
        self.shares.asked(entry.holding)
        if entry.state is EntryState.EVICTABLE:
            entry.state = EntryState.LIVE
            entry.holding.evictable.remove(entry)
            entry.holding.waiting.add(entry)
        if entry.awaits_rank:
            if entry.is_signalled and self.waits.is_overdue(entry):
                entry.holding.evaluate(is_ranked=False)
            self.waits.extend(entry)
            return
        entry.awaits_rank = entry.is_signalled = True
        entry.holding.awaiting_pages += entry.num_pages
        self.waits.begin(entry)

    def abandon(self, entry: PrefixEntry) -> None:
        """Give the pages of an unfinished entry back.

        Nothing happens to an entry that was published.
        """
        if entry.is_published or not entry.is_held:
            return
        self.drop(entry)  # or it was dropped while it was being written
        self._give_back(entry)

    # ---- use

    def is_reserved(self, key: PrefixKey) -> bool:
        """Return whether a prefix with this key is being written now."""
        return key in self._reserved

    def lease(self, entry: PrefixEntry, *, consume: bool) -> AbstractContextManager[PrefixEntry]:
        """Keep the entry's pages while the block reads them.

        Args:
            entry: as `get` or `find` returned it, with no await in between.
            consume: the block is the entry's rank; afterwards its pages may go to other prefixes.
        """
        return _Leased(self, entry, consume)

    def _unleased(self, entry: PrefixEntry) -> None:
        """No block reads the entry any more."""
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
        """Make the entries evictable whose time is up, except those that are leased."""
        for entry in self.waits.ended():
            if entry.state is EntryState.LIVE and not entry.leases:
                entry.holding.waiting.remove(entry)
                self._unleased(entry)

    def drop(self, entry: PrefixEntry) -> None:
        """Make an entry unfindable.

        Its pages go back at once, or when its writer or its last reader is done.

        One that was signalled, and gives way to a longer one of its user before its rank came,
        counts as wasted.
        """
        if (
            entry.state is EntryState.LIVE
            and entry.is_signalled
            and entry.awaits_rank
            and not entry.is_evaluated
        ):
            entry.holding.evaluate(is_ranked=False)
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
