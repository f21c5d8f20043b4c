"""The DRAM tier: copies of used prefixes for users who come back. LRU with a TTL, under a byte cap.

Source: RelayGR (arXiv:2601.01712), memory-aware expander.
Invariants:
  D1  every page is free or held by exactly one entry; the arena is the byte cap
  D2  an entry can be found only once its copy is complete
  D3  a leased entry is never evicted
  D4  a page's epoch changes each time it is handed out, so a reader can tell that its pages were not
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from npu_gr.core.errors import PoolExhausted, StaleEntry
from npu_gr.core.request import I64, UserKey
from npu_gr.kv.arena import KVArena
from npu_gr.kv.keys import ByUser, PrefixKey
from npu_gr.kv.layout import Run
from npu_gr.kv.pages import PageAllocator


class DramEntry:
    """One copy. `timestamps` is None until it is complete."""

    __slots__ = (
        "epoch",
        "expires_at",
        "is_dropped",
        "is_erased",
        "is_held",
        "key",
        "leases",
        "num_tokens",
        "runs",
        "timestamps",
    )

    def __init__(self, key: PrefixKey, num_tokens: int, runs: tuple[Run, ...], epoch: int) -> None:
        self.key, self.num_tokens, self.runs, self.epoch = key, num_tokens, runs, epoch
        self.timestamps: I64 | None = None  # [num_tokens] unix seconds
        self.leases = 0
        self.expires_at = 0.0
        self.is_held = True  # its pages are its own
        self.is_dropped = False  # cannot be found any more
        self.is_erased = False  # its user asked to be forgotten


class DramStore:
    """Entries over the pages of a host arena. One thread (the event loop's)."""

    def __init__(
        self, arena: KVArena, *, ttl_s: float, ttl_jitter_ratio: float, seed: int, clock: Callable[[], float]
    ) -> None:
        self.arena, self._ttl_s, self._jitter, self._clock = arena, ttl_s, ttl_jitter_ratio, clock
        self._random = random.Random(seed)
        self._pages = PageAllocator(arena.num_pages)
        self._epochs = np.zeros(arena.num_pages, np.int64)
        self._epoch = 0
        self._complete: OrderedDict[PrefixKey, DramEntry] = OrderedDict()  # least recently used first
        self._users: ByUser[DramEntry] = ByUser()  # incomplete ones too
        # pages of a user to be forgotten, and what makes them free: to be called once they are overwritten
        self.on_erased: Callable[[tuple[Run, ...], Callable[[], None]], None] = lambda _runs, free: free()

    @property
    def budget_bytes(self) -> int:
        """All pages."""
        return self.arena.num_pages * self.arena.layout.page_bytes

    @property
    def free_bytes(self) -> int:
        """Held by nobody."""
        return self._pages.num_free * self.arena.layout.page_bytes

    @property
    def live_bytes(self) -> int:
        """Held by entries."""
        return self.budget_bytes - self.free_bytes

    def __len__(self) -> int:
        return len(self._complete)

    def reserve(self, key: PrefixKey, num_tokens: int) -> DramEntry:
        """Pages for a copy; least recently used entries make room.

        Raises:
            PoolExhausted: what is not leased or being written is too little; nothing more was evicted than needed.
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
        """The copy is complete: it can be found for its TTL. One that was dropped meanwhile cannot."""
        if entry.is_dropped:
            self.abandon(entry)
            return
        if (before := self._complete.get(entry.key)) is not None:
            self.drop(before)
        entry.timestamps = timestamps
        self._touch(entry)

    def abandon(self, entry: DramEntry) -> None:
        """The copy failed: the pages go back. Nothing happens to one that is complete."""
        if entry.timestamps is None and entry.is_held:
            if not entry.is_dropped:
                self._users.remove(entry)
                entry.is_dropped = True
            self._give_back(entry)

    def get(self, key: PrefixKey) -> DramEntry | None:
        """The complete, unexpired entry of that key."""
        entry = self._complete.get(key)
        if entry is not None and entry.expires_at <= self._clock() and not entry.leases:
            self.drop(entry)
            return None
        return entry

    def find(self, user: UserKey, model_version: str, layout_id: str) -> list[DramEntry]:
        """The user's complete, unexpired entries for one model and layout, newest first."""
        keys = [entry.key for entry in self._users.matching(user, model_version, layout_id)]
        return [entry for key in keys if (entry := self.get(key)) is not None]

    @contextmanager
    def lease(self, entry: DramEntry) -> Iterator[DramEntry]:
        """Keep the entry while the block copies it; using it renews its TTL."""
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
        """Assure that the entry's pages were not handed out again; call before and after reading them.

        Raises:
            StaleEntry: they were.
        """
        for first, count in entry.runs:
            if not (self._epochs[first : first + count] == entry.epoch).all():
                raise StaleEntry("the DRAM copy was overwritten while it was read")

    def drop(self, entry: DramEntry) -> None:
        """Unfindable at once; its pages go back, when its last reader or its writer is done if it has any."""
        if entry.is_dropped:
            return
        entry.is_dropped = True
        self._users.remove(entry)
        if entry.timestamps is None:
            return  # `commit` or `abandon` is still to come
        del self._complete[entry.key]
        if not entry.leases:
            self._give_back(entry)

    def erase_user(self, user: UserKey) -> None:
        """Drop everything of one user, copies in progress too; `on_erased` gets their pages, and frees them."""
        for entry in self._users.of(user):
            entry.is_erased = True
            self.drop(entry)

    def _touch(self, entry: DramEntry) -> None:
        jitter = 1.0 + self._jitter * (2.0 * self._random.random() - 1.0)
        entry.expires_at = self._clock() + self._ttl_s * jitter
        self._complete[entry.key] = entry
        self._complete.move_to_end(entry.key)

    def _give_back(self, entry: DramEntry) -> None:
        entry.is_held = False
        if entry.is_erased:
            self.on_erased(entry.runs, partial(self._pages.free, entry.runs))
        else:
            self._pages.free(entry.runs)

    def check(self) -> None:
        """Assert D1 and D2; for tests, it looks at every entry."""
        self._pages.check()
        pages = [p for e in self._complete.values() for first, n in e.runs for p in range(first, first + n)]
        assert len(pages) == len(set(pages))
        assert len(pages) <= self.arena.num_pages - self._pages.num_free
        for entry in self._complete.values():
            assert entry.is_held
            assert entry.timestamps is not None
            self.verify(entry)
