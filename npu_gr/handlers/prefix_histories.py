"""The history of a request, and a cache of the histories of answers by fingerprint.

Clients may continue each by a delta. The newest one of a user replaces the store's if that fails.
Beyond the capacity, the least recently used histories of tenants over their share are evicted
(`core/shares.py`).
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.columns import OneRow
from npu_gr.core.history import Events, UserFeaturesOrigin, UserKey
from npu_gr.core.shares import Account, Shares
from npu_gr.history_store.store import NO_ITEMS


class KnownHistory(NamedTuple):
    """The newest events of a user, and the user features of the request."""

    events: Events
    first_index: int  # of the first event in the user's full history
    # [n] items of all older events, oldest first; None = the store has them
    older_items: I64 | None = NO_ITEMS
    user_features: OneRow | None = None


class _Holding(Account):
    """The cached bytes of one tenant."""

    __slots__ = ("used",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # least recently used first, see `_use`
        self.used: OrderedDict[tuple[UserKey, str], int] = OrderedDict()


class PrefixHistoryCache:
    """An LRU cache of at most `capacity_bytes`; operations are O(1) in the number of users."""

    def __init__(self, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity_bytes = capacity_bytes
        self._shares: Shares[_Holding] = Shares(_Holding, clock)
        self._numbers = itertools.count()
        self._histories: dict[tuple[UserKey, str], tuple[KnownHistory, _Holding]] = {}
        self._by_user: dict[UserKey, dict[str, None]] = {}  # user -> fingerprints, newest last
        self.bytes_used = 0

    def remember(self, user: UserKey, fingerprint: str, history: KnownHistory) -> None:
        """Cache a copy of a history, unless it exceeds the capacity.

        Args:
            user: The user.
            fingerprint: Base of later deltas.
            history: The newest events.
        """
        key = (user, fingerprint)
        if key in self._histories:
            self._use(key)
            known = self._by_user[user]
            known[fingerprint] = known.pop(fingerprint)
            return
        self._keep(key, history)

    def last_known(self, user: UserKey) -> KnownHistory | None:
        """Return the newest cached history of a user, if any."""
        if user not in self._by_user:
            return None
        return self._use((user, next(reversed(self._by_user[user]))))

    def newest(self, user: UserKey) -> KnownHistory | None:
        """Return the newest cached history of a user, which stays as old as it is."""
        if user not in self._by_user:
            return None
        return self._histories[user, next(reversed(self._by_user[user]))][0]

    def knows(self, user: UserKey) -> bool:
        """Whether a history of the user is cached."""
        return user in self._by_user

    def newest_user(self) -> UserKey | None:
        """Return the user who was cached last, if any is."""
        return next(reversed(self._by_user), None)

    def find(self, user: UserKey, fingerprint: str) -> KnownHistory | None:
        """Return the cached history with a fingerprint, if any."""
        key = (user, fingerprint)
        return self._use(key) if key in self._histories else None

    def resize(self, capacity_bytes: int, tenant_weights: Mapping[str, float]) -> None:
        """Change the capacity and the weights of tenants (default 1), and evict if necessary."""
        self._capacity_bytes = capacity_bytes
        self._shares.weights = tenant_weights
        self._evict()

    def forget(self, user: UserKey) -> None:
        """Remove all histories of a user."""
        for fingerprint in list(self._by_user.get(user, ())):
            self._drop((user, fingerprint))

    def _keep(self, key: tuple[UserKey, str], history: KnownHistory) -> None:
        events = history.events
        size = _bytes(history)
        if size > self._capacity_bytes:
            return
        user, fingerprint = key
        holding = self._shares.asking(user.tenant)
        older = None if history.older_items is None else history.older_items.copy()
        self._histories[key] = history._replace(events=events.copy(), older_items=older), holding
        self._use(key)
        self._by_user.setdefault(user, {})[fingerprint] = None
        holding.held += size
        self.bytes_used += size
        self._evict()

    def _use(self, key: tuple[UserKey, str]) -> KnownHistory:
        """Mark a history as most recently used, with an ascending number."""
        history, holding = self._histories[key]
        holding.used[key] = next(self._numbers)
        holding.used.move_to_end(key)
        self._shares.asked(holding)
        return history

    def _evict(self) -> None:
        """Evict the least recently used histories of tenants over their share."""
        while self.bytes_used > self._capacity_bytes:
            ratios = self._shares.ratios()
            over = [
                one
                for one in self._shares.accounts
                if self._shares.is_over(one, ratios, self._capacity_bytes)
            ]
            # the sum is over the capacity, so at least one tenant is over its share
            oldest = (next(iter(holding.used.items())) for holding in over)
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
    older = 0 if history.older_items is None else history.older_items.nbytes
    return history.events.nbytes + older + of_user + 512  # including objects


class UserHistory(msgspec.Struct, frozen=True, eq=False):
    """The history of a request, from the request, a delta or the store."""

    events: Events  # oldest first, including unknown items
    first_index: int  # of the first event in the user's full history
    # as many as the current models read, which is what a delta needs
    newest: KnownHistory
    # [n] items of all events, oldest first; without those before `events` if they were not read
    all_items: I64
    fingerprint: str  # of the newest events, independent of their source
    user_features: OneRow | None = None
    # origin of the user features, if they were fetched
    features_origin: UserFeaturesOrigin | None = None

    @classmethod
    def of(
        cls,
        events: Events,
        first_index: int,
        window_events: int,
        user_features: OneRow | None = None,
        features_origin: UserFeaturesOrigin | None = None,
        older_items: I64 | None = NO_ITEMS,
    ) -> UserHistory:
        """Make a history and its fingerprint.

        Args:
            events: Events, oldest first.
            first_index: Index of the first event in the user's full history.
            window_events: Number of newest events that the current models read.
            user_features: User features, a part of the prefix.
            features_origin: Origin of fetched user features. A delta on this history fetches them
                again if their source failed.
            older_items: [n] items of the events before `events`; None = the store has them.
        """
        beyond = max(0, len(events) - window_events)
        is_degraded = features_origin is not None and features_origin.fault is not None
        cached = None if is_degraded else user_features
        all_items = events.items
        if older_items is not None and len(older_items):
            all_items = np.concatenate([older_items, all_items])
        in_window = events[beyond:] if beyond else events
        before = None if older_items is None else all_items[: len(all_items) - len(in_window)]
        newest = KnownHistory(in_window, first_index + beyond, before, cached)
        fingerprint = newest.events.fingerprint(newest.first_index)
        if user_features:
            of_user = msgspec.msgpack.encode(sorted(user_features.items()))
            fingerprint = xxhash.xxh3_128_hexdigest(fingerprint.encode() + of_user)
        return cls(
            events, first_index, newest, all_items, fingerprint, user_features, features_origin
        )

    @property
    def plain_fingerprint(self) -> str:
        """`Events.fingerprint` of all events, if the history has nothing else; else ""."""
        is_full = self.newest.events is self.events and not self.newest.first_index
        return (
            self.fingerprint if is_full and not (self.user_features or self.events.features) else ""
        )
