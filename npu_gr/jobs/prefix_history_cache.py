"""The cache of histories: those that callers may continue by a delta, and what was last read from the store.

The former are found by their fingerprint; the newest of both kinds is the last known history of its user, which stands
in where the store fails. When the bytes exceed the capacity, the least recently used history is evicted, of the tenants
that have more than their share (`core.shares`).
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from npu_gr.core.feature_schema.columns import OneRow
from npu_gr.core.history import Events, UserKey
from npu_gr.core.shares import Account, Shares
from npu_gr.features.store import StoredHistory


class KnownHistory(NamedTuple):
    """The newest events of a user, and the user's features as a request brought them."""

    events: Events
    first_index: int  # of the first of them, counted over everything the user ever did
    user_features: OneRow | None = None


STORED = ""  # in the place of a fingerprint: read from the store


class _Holding(Account):
    """What one tenant has of the cache, in bytes."""

    __slots__ = ("used",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.used: OrderedDict[tuple[UserKey, str], int] = OrderedDict()  # the least recently used first; see `_use`


class PrefixHistoryCache:
    """Holds at most `capacity_bytes` of events. Every operation is O(1) in the number of users."""

    def __init__(self, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity_bytes = capacity_bytes
        self._shares: Shares[_Holding] = Shares(_Holding, clock)
        self._numbers = itertools.count()
        self._histories: dict[tuple[UserKey, str], tuple[KnownHistory, _Holding]] = {}
        self._by_user: dict[UserKey, dict[str, None]] = {}  # user -> fingerprints, the newest last
        self.bytes_used = 0

    def remember(self, user: UserKey, fingerprint: str, history: KnownHistory) -> None:
        """Keep a copy of a history; one that alone exceeds the capacity is not kept.

        Args:
            user: whose history it is.
            fingerprint: what a delta names as its base.
            history: its newest events.
        """
        key = (user, fingerprint)
        if key in self._histories:
            self._use(key)
            known = self._by_user[user]
            known[fingerprint] = known.pop(fingerprint)
            return
        self._keep(key, history)

    def remember_stored(self, user: UserKey, stored: StoredHistory) -> None:
        """Keep a copy of what the store has of a user, in the place of what it had before."""
        key = (user, STORED)
        if key in self._histories:
            ends_at = stored.first_index + len(stored.events)
            known, _ = self._histories[key]
            if known.first_index + len(known.events) == ends_at and len(known.events) >= len(stored.events):
                self._use(key)  # nothing new
                self._by_user[user][STORED] = self._by_user[user].pop(STORED)
                return
            self._drop(key)
        self._keep(key, KnownHistory(*stored))

    def last_known(self, user: UserKey) -> KnownHistory | None:
        """The newest history of a user that is cached; None if none is."""
        if user not in self._by_user:
            return None
        return self._use((user, next(reversed(self._by_user[user]))))

    def knows(self, user: UserKey) -> bool:
        """Whether anything of the user is cached."""
        return user in self._by_user

    def find(self, user: UserKey, fingerprint: str) -> KnownHistory | None:
        """The history with this fingerprint; None if it is not cached (any more)."""
        key = (user, fingerprint)
        return self._use(key) if key in self._histories else None

    def resize(self, capacity_bytes: int, tenant_weights: Mapping[str, float]) -> None:
        """Change the capacity and the weights of tenants (all others have 1), and evict what is over the capacity."""
        self._capacity_bytes = capacity_bytes
        self._shares.weights = tenant_weights
        self._evict()

    def forget(self, user: UserKey) -> None:
        """Drop everything of one user."""
        for fingerprint in list(self._by_user.get(user, ())):
            self._drop((user, fingerprint))

    def _keep(self, key: tuple[UserKey, str], history: KnownHistory) -> None:
        events = history.events
        size = _bytes(history)
        if size > self._capacity_bytes:
            return
        user, fingerprint = key
        holding = self._shares.asking(user.tenant)
        self._histories[key] = history._replace(events=events.copy()), holding
        self._use(key)
        self._by_user.setdefault(user, {})[fingerprint] = None
        holding.held += size
        self.bytes_used += size
        self._evict()

    def _use(self, key: tuple[UserKey, str]) -> KnownHistory:
        """Make a history the most recently used; of two, the one with the smaller number was used less recently."""
        history, holding = self._histories[key]
        holding.used[key] = next(self._numbers)
        holding.used.move_to_end(key)
        self._shares.asked(holding)
        return history

    def _evict(self) -> None:
        """Drop the least recently used histories of the tenants over their share until the rest fits."""
        while self.bytes_used > self._capacity_bytes:
            ratios = self._shares.ratios()
            over = [one for one in self._shares.accounts if self._shares.is_over(one, ratios, self._capacity_bytes)]
            oldest = (next(iter(holding.used.items())) for holding in over)  # all together are over: so one at least is
            self._drop(min(oldest, key=lambda used: used[1])[0])

    def _drop(self, key: tuple[UserKey, str]) -> None:
        user, fingerprint = key
        history, holding = self._histories.pop(key)
        del holding.used[key]
        holding.held -= _bytes(history)
        self.bytes_used -= _bytes(history)
        known = self._by_user[user]
        known.pop(fingerprint, None)
        if not known:
            del self._by_user[user]


def _bytes(history: KnownHistory) -> int:
    of_user = 100 * len(history.user_features or ())
    return history.events.nbytes + of_user + 512  # and the objects around them
