"""HBM-resident prefix KV: reserve before the work, publish after it, lease while it is read.

Source: RelayGR (arXiv:2601.01712), in-HBM relay-race inference. The pool is a sliding window in time, not an LRU
cache: an entry lives from its production to its rank or to `t_life_s`, and admission keeps the sum within the budget.

Invariants, checked after every step by tests/kv/test_prefix_pool.py:
  I1  every page is free, reserved, or held by an entry: exactly one of the three; the sum is the budget
  I2  a leased entry, and one that is neither consumed nor expired, is never evicted
  I3  an entry can be found only once it was published
  I4  entry.leases == number of `with pool.lease(entry)` blocks now open

All methods are for one thread (the event loop's) and take O(1) amortised, whatever the number of users.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial

from npu_gr.core.errors import PoolExhausted
from npu_gr.core.request import I64, UserKey
from npu_gr.kv.arena import KVArena
from npu_gr.kv.keys import ByUser, PrefixKey
from npu_gr.kv.layout import Run
from npu_gr.kv.pages import PageAllocator


class State(Enum):
    """Where an entry is in its life."""

    RESERVED = auto()  # being written; cannot be found
    LIVE = auto()  # waiting for its rank, or leased
    EVICTABLE = auto()  # consumed or expired, and not leased: still readable until its pages are needed
    DROPPED = auto()  # cannot be found; its pages are free, or will be when its writer or last reader is done


class PrefixEntry:
    """One prefix. `runs` hold its keys and values in token order."""

    __slots__ = (
        "consumed",
        "expires_at",
        "is_erased",
        "is_held",
        "key",
        "leases",
        "num_pages",
        "num_tokens",
        "runs",
        "state",
        "timestamps",
    )

    def __init__(self, key: PrefixKey, num_tokens: int, runs: tuple[Run, ...], num_pages: int) -> None:
        self.key, self.num_tokens, self.runs, self.num_pages = key, num_tokens, runs, num_pages
        self.timestamps: I64 | None = None  # [num_tokens] unix seconds, from publication on
        self.leases = 0
        self.consumed = False
        self.expires_at = 0.0
        self.state = State.RESERVED
        self.is_held = True  # its pages are its own
        self.is_erased = False  # its user asked to be forgotten

    @property
    def is_published(self) -> bool:
        """Whether it has been made visible, whatever happened to it since."""
        return self.timestamps is not None


class PrefixPool:
    """Entries over the pages of one arena."""

    def __init__(self, arena: KVArena, budget_bytes: int, t_life_s: float, clock: Callable[[], float]) -> None:
        num_pages = min(budget_bytes // arena.layout.page_bytes, arena.num_pages)
        if num_pages < 1:
            raise ValueError(f"budget_bytes: {budget_bytes} is less than one page of {arena.layout.page_bytes} bytes")
        self.arena, self.t_life_s, self._clock = arena, t_life_s, clock
        self._pages = PageAllocator(num_pages)
        self._published: dict[PrefixKey, PrefixEntry] = {}
        self._reserved: dict[PrefixKey, PrefixEntry] = {}
        self._users: ByUser[PrefixEntry] = ByUser()  # reserved and published ones
        # in order of expires_at, but where `t_life_s` was shortened: an entry may go later than it could, not earlier
        self._expiring: deque[PrefixEntry] = deque()
        self._evictable: OrderedDict[PrefixKey, PrefixEntry] = OrderedDict()  # oldest first
        self._reserved_pages = self._evictable_pages = 0
        self.on_evict: Callable[[PrefixEntry], None] = lambda _entry: None
        # pages of a user to be forgotten, and what makes them free: to be called once they are overwritten
        self.on_erased: Callable[[tuple[Run, ...], Callable[[], None]], None] = lambda _runs, free: free()

    # ---- bytes: free + reserved + live + evictable == budget

    @property
    def budget_bytes(self) -> int:
        """All pages."""
        return self._pages.num_pages * self.arena.layout.page_bytes

    @property
    def free_bytes(self) -> int:
        """Held by nobody."""
        return self._pages.num_free * self.arena.layout.page_bytes

    @property
    def reserved_bytes(self) -> int:
        """Being written."""
        return self._reserved_pages * self.arena.layout.page_bytes

    @property
    def evictable_bytes(self) -> int:
        """Readable, but given up as soon as somebody needs the room."""
        self._expire()
        return self._evictable_pages * self.arena.layout.page_bytes

    @property
    def live_bytes(self) -> int:
        """Waiting for their rank, leased, dropped while leased, or being overwritten."""
        return self.budget_bytes - self.free_bytes - self.reserved_bytes - self.evictable_bytes

    def __len__(self) -> int:
        return len(self._published)

    # ---- production

    def reserve(self, key: PrefixKey, num_tokens: int) -> PrefixEntry:
        """Pages for a prefix that somebody is about to compute or copy; not visible before `publish`.

        Raises:
            PoolExhausted: not even evicting every consumed or expired entry would make room; nothing was evicted.
        """
        assert key not in self._reserved, "one producer a key"
        need = self.arena.layout.pages(num_tokens)
        self._expire()
        if need > self._pages.num_free + self._evictable_pages:
            raise PoolExhausted(
                f"need {need} pages, {self._pages.num_free} of {self._pages.num_pages} are free "
                f"and {self._evictable_pages} can be evicted"
            )
        if (before := self._published.get(key)) is not None:
            self.drop(before)
        while self._pages.num_free < need:
            oldest = next(iter(self._evictable.values()))
            self._forget(oldest)
            self.on_evict(oldest)
        entry = PrefixEntry(key, num_tokens, self._pages.allocate(need), need)
        self._reserved[key] = entry
        self._reserved_pages += need
        self._users.add(entry)
        return entry

    def publish(self, entry: PrefixEntry, timestamps: I64) -> bool:
        """The KV is completely written: visible from now on, for at least `t_life_s`.

        Returns:
            False for an entry that was dropped meanwhile (its user asked to be forgotten): its pages go back.
        """
        assert len(timestamps) == entry.num_tokens
        if entry.state is State.DROPPED:
            self.abandon(entry)
            return False
        self._end_reservation(entry)
        entry.timestamps, entry.state = timestamps, State.LIVE
        entry.expires_at = self._clock() + self.t_life_s
        self._published[entry.key] = entry
        self._expiring.append(entry)
        return True

    def abandon(self, entry: PrefixEntry) -> None:
        """The work failed: the pages go back. Nothing happens to an entry that was published."""
        if entry.state is State.RESERVED:
            self._end_reservation(entry)
            self._users.remove(entry)
            self._give_back(entry)
        elif entry.is_held and not entry.is_published:  # dropped while it was being written
            self._give_back(entry)

    @contextmanager
    def fill(self, key: PrefixKey, num_tokens: int, timestamps: I64) -> Iterator[PrefixEntry]:
        """Reserve, let the block write, publish on success, abandon on anything else (cancellation too)."""
        entry = self.reserve(key, num_tokens)
        try:
            yield entry
        except BaseException:
            self.abandon(entry)
            raise
        self.publish(entry, timestamps)

    # ---- use

    def get(self, key: PrefixKey) -> PrefixEntry | None:
        """The published entry of that key."""
        return self._published.get(key)

    def is_reserved(self, key: PrefixKey) -> bool:
        """Whether somebody is writing that prefix now."""
        return key in self._reserved

    def find(self, user: UserKey, model_version: str, layout_id: str) -> list[PrefixEntry]:
        """The user's published entries for one model and layout, newest first."""
        found = self._users.matching(user, model_version, layout_id)
        return [entry for entry in found if entry.state is not State.RESERVED]

    @contextmanager
    def lease(self, entry: PrefixEntry, *, consume: bool) -> Iterator[PrefixEntry]:
        """Keep the entry's pages while the block reads them.

        Args:
            entry: as `get` or `find` gave it, with no await in between.
            consume: the entry's rank is this one; afterwards its pages may go to others.
        """
        assert entry.state in (State.LIVE, State.EVICTABLE)
        if entry.state is State.EVICTABLE:
            del self._evictable[entry.key]
            self._evictable_pages -= entry.num_pages
            entry.state = State.LIVE
        entry.leases += 1
        try:
            yield entry
        finally:
            entry.leases -= 1
            entry.consumed |= consume
            if not entry.leases:
                self._released(entry)

    def _released(self, entry: PrefixEntry) -> None:
        if entry.state is State.DROPPED:
            self._give_back(entry)
        elif entry.consumed or entry.expires_at <= self._clock():
            self._make_evictable(entry)

    # ---- the end of an entry

    def drop(self, entry: PrefixEntry) -> None:
        """Unfindable from now on; the pages go back at once, or when the last reader or the writer is done."""
        if entry.state is State.DROPPED:
            return
        if entry.state is State.RESERVED:
            self._end_reservation(entry)
            self._users.remove(entry)
            entry.state = State.DROPPED
        elif entry.leases:
            self._unindex(entry)
            entry.state = State.DROPPED
        else:
            self._forget(entry)

    def erase_user(self, user: UserKey) -> None:
        """Drop everything of one user; `on_erased` gets their pages, and frees them."""
        for entry in self._users.of(user):
            entry.is_erased = True
            self.drop(entry)

    def _expire(self) -> None:
        """Entries whose time is up become evictable."""
        now_at = self._clock()
        while self._expiring and self._expiring[0].expires_at <= now_at:
            entry = self._expiring.popleft()
            if entry.state is State.LIVE and not entry.leases:
                self._make_evictable(entry)

    def _make_evictable(self, entry: PrefixEntry) -> None:
        entry.state = State.EVICTABLE
        self._evictable[entry.key] = entry
        self._evictable_pages += entry.num_pages

    def _end_reservation(self, entry: PrefixEntry) -> None:
        del self._reserved[entry.key]
        self._reserved_pages -= entry.num_pages

    def _unindex(self, entry: PrefixEntry) -> None:
        del self._published[entry.key]
        self._users.remove(entry)
        if entry.state is State.EVICTABLE:
            del self._evictable[entry.key]
            self._evictable_pages -= entry.num_pages

    def _forget(self, entry: PrefixEntry) -> None:
        self._unindex(entry)
        self._give_back(entry)

    def _give_back(self, entry: PrefixEntry) -> None:
        entry.state, entry.is_held = State.DROPPED, False
        if entry.is_erased:
            self.on_erased(entry.runs, partial(self._pages.free, entry.runs))
        else:
            self._pages.free(entry.runs)

    def check(self) -> None:
        """Assert I1 to I3 over the whole pool; for tests, it looks at every entry."""
        self._pages.check()
        held = [*self._published.values(), *self._reserved.values()]
        pages = [page for entry in held for first, count in entry.runs for page in range(first, first + count)]
        assert len(pages) == len(set(pages)), "a page in two places"
        assert len(pages) <= self._pages.num_pages - self._pages.num_free
        for entry in held:
            assert sum(run.num_pages for run in entry.runs) == entry.num_pages
        assert all(entry.state is State.RESERVED for entry in self._reserved.values())
        assert all(entry.is_published for entry in self._published.values())
        assert self._reserved_pages == sum(e.num_pages for e in self._reserved.values())
        assert self._evictable_pages == sum(e.num_pages for e in self._evictable.values())
        for entry in self._evictable.values():
            assert entry.state is State.EVICTABLE
            assert not entry.leases
            assert entry.consumed or entry.expires_at <= self._clock()
        assert self.free_bytes + self.reserved_bytes + self.live_bytes + self.evictable_bytes == self.budget_bytes
        assert self.live_bytes >= 0
