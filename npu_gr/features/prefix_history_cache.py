"""The cache of histories: those that callers may continue by a delta, and what was last read from the store.

The former are found by their fingerprint; the newest of both kinds is the last known history of its user, which stands
in where the store fails. When the bytes exceed the capacity, the least recently used history is evicted.
"""

from __future__ import annotations

from collections import OrderedDict

from npu_gr.core.request import Events, UserKey
from npu_gr.features.base import StoredHistory

STORED = ""  # in the place of a fingerprint: read from the store


class PrefixHistoryCache:
    """Holds at most `capacity_bytes` of events. Every operation is O(1) in the number of users."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._events: OrderedDict[tuple[UserKey, str], Events] = OrderedDict()
        self._first_index: dict[UserKey, int] = {}  # of what was read from the store
        self._by_user: dict[UserKey, dict[str, None]] = {}  # user -> fingerprints, the newest last
        self.bytes_used = 0

    def remember(self, user: UserKey, fingerprint: str, events: Events) -> None:
        """Keep a copy of a history; one that alone exceeds the capacity is not kept.

        Args:
            user: whose history it is.
            fingerprint: of `events`; what a delta names as its base.
            events: the history from its first event on.
        """
        key = (user, fingerprint)
        if key in self._events:
            self._events.move_to_end(key)
            known = self._by_user[user]
            known[fingerprint] = known.pop(fingerprint)
            return
        self._keep(key, events)

    def remember_stored(self, user: UserKey, stored: StoredHistory) -> None:
        """Keep a copy of what the store has of a user, in the place of what it had before."""
        key = (user, STORED)
        if key in self._events:
            ends_at = stored.first_index + len(stored.events)
            known = self._events[key]
            if self._first_index[user] + len(known) == ends_at and len(known) >= len(stored.events):
                self._events.move_to_end(key)  # nothing new
                self._by_user[user][STORED] = self._by_user[user].pop(STORED)
                return
            self._drop(key)
        self._keep(key, stored.events)
        if key in self._events:
            self._first_index[user] = stored.first_index

    def last_known(self, user: UserKey) -> StoredHistory | None:
        """The newest history of a user that is cached; None if none is."""
        if user not in self._by_user:
            return None
        fingerprint = next(reversed(self._by_user[user]))
        self._events.move_to_end((user, fingerprint))
        first_index = self._first_index[user] if fingerprint == STORED else 0
        return StoredHistory(self._events[user, fingerprint], first_index)

    def knows(self, user: UserKey) -> bool:
        """Whether anything of the user is cached."""
        return user in self._by_user

    def find(self, user: UserKey, fingerprint: str) -> Events | None:
        """The history with this fingerprint; None if it is not cached (any more)."""
        key = (user, fingerprint)
        if key not in self._events:
            return None
        self._events.move_to_end(key)
        return self._events[key]

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity, and evict what is over it."""
        self._capacity_bytes = capacity_bytes
        while self.bytes_used > self._capacity_bytes:
            self._drop(next(iter(self._events)))

    def forget(self, user: UserKey) -> None:
        """Drop everything of one user."""
        for fingerprint in list(self._by_user.get(user, ())):
            self._drop((user, fingerprint))

    def _keep(self, key: tuple[UserKey, str], events: Events) -> None:
        size = _bytes(events)
        if size > self._capacity_bytes:
            return
        # a copy: a slice would keep alive, uncounted, the longer history that it was cut from
        self._events[key] = Events.make(events.items, events.actions, events.timestamps)
        user, fingerprint = key
        self._by_user.setdefault(user, {})[fingerprint] = None
        self.bytes_used += size
        while self.bytes_used > self._capacity_bytes:
            self._drop(next(iter(self._events)))

    def _drop(self, key: tuple[UserKey, str]) -> None:
        user, fingerprint = key
        self.bytes_used -= _bytes(self._events.pop(key))
        if fingerprint == STORED:
            self._first_index.pop(user, None)
        known = self._by_user[user]
        known.pop(fingerprint, None)
        if not known:
            del self._by_user[user]


def _bytes(events: Events) -> int:
    return events.items.nbytes + events.actions.nbytes + events.timestamps.nbytes + 512  # and the objects around them
