"""What `PrefixPool` (HBM) and `DramStore` have in common: entries over the pages of one arena.

    free pages --reserve--> an entry that is written --publish | commit--> an entry that can be found
        ^                        | abandon                                    | drop, when nobody reads it
        |                        v                                            v
        +------------------- give back <--------------------------------------+
                                 |
                                 +-- of an erased user: `on_erased` overwrites the pages before they are free

All methods are for one thread (the event loop's). `docs/relay.md` draws the states of a page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from npu_gr.core.arrays import I64
from npu_gr.core.history import UserKey
from npu_gr.core.shares import Account
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.keys import ByUser, PrefixKey
from npu_gr.engine.kv.layout import PageRun
from npu_gr.engine.kv.pages import PageAllocator


class TierEntry:
    """One prefix and the pages that it holds in one tier. `runs` are in token order."""

    __slots__ = (
        "account",
        "expires_at",
        "is_erased",
        "is_held",
        "key",
        "leases",
        "num_pages",
        "num_tokens",
        "runs",
        "timestamps",
    )

    def __init__(self, key: PrefixKey, num_tokens: int, runs: tuple[PageRun, ...], account: Account) -> None:
        self.key = key
        self.account = account  # of its tenant; it counts the pages
        self.num_tokens = num_tokens
        self.runs = runs
        self.num_pages = sum(run.num_pages for run in runs)
        self.timestamps: I64 | None = None  # [num_tokens] unix seconds; None = the prefix is not completely written
        self.leases = 0  # readers now
        self.expires_at = 0.0
        self.is_held = True  # it still has its pages
        self.is_erased = False  # its user asked to be forgotten
        account.held += self.num_pages

    @property
    def is_published(self) -> bool:
        """Whether it was ever completely written and findable."""
        return self.timestamps is not None


E = TypeVar("E", bound=TierEntry)


class PageTier(ABC, Generic[E]):
    """Pages of one arena, and an index of their entries by user."""

    def __init__(self, arena: KVArena, num_pages: int, clock: Callable[[], float]) -> None:
        self.arena = arena
        self._clock = clock
        self._pages = PageAllocator(num_pages)
        self._users: ByUser[E] = ByUser()  # entries that are not dropped, whether they are written or not
        # Called with the pages of an erased user, and a function that makes them free: call it once the pages are
        # overwritten. Without a listener they are free at once.
        self.on_erased: Callable[[tuple[PageRun, ...], Callable[[], None]], None] = lambda _runs, free: free()

    @property
    def budget_bytes(self) -> int:
        """Bytes of all pages."""
        return self._pages.num_pages * self.arena.layout.page_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the pages that no entry holds."""
        return self._pages.num_free * self.arena.layout.page_bytes

    @abstractmethod
    def __len__(self) -> int:
        """Count the entries that can be found."""

    @abstractmethod
    def reserve(self, key: PrefixKey, num_tokens: int, *, is_own: bool = False) -> E:
        """Take pages for a prefix that is about to be written. It cannot be found yet."""

    @abstractmethod
    def abandon(self, entry: E) -> None:
        """Give up an entry whose writer failed. Nothing happens to an entry that was completely written."""

    @abstractmethod
    def get(self, key: PrefixKey) -> E | None:
        """Find the completely written entry with this key."""

    @abstractmethod
    def drop(self, entry: E) -> None:
        """Make an entry unfindable. Its pages go back when its writer or its last reader is done."""

    def find(self, user: UserKey, model_version: str, layout_id: str) -> list[E]:
        """Find a user's completely written entries of one model version and page layout, newest first."""
        return [entry for entry in self._users.matching(user, model_version, layout_id) if self.get(entry.key) is entry]

    def knows(self, user: UserKey) -> bool:
        """Whether there are entries of a user, those being written too."""
        return bool(self._users.of(user))

    def erase_user(self, user: UserKey) -> None:
        """Drop all entries of a user, those being written too. `on_erased` gets their pages as they come back."""
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
