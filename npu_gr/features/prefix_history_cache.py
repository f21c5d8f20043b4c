"""The cache of histories that callers may continue by a delta: fingerprint -> events.

When its bytes exceed the capacity, the least recently used history is evicted.
"""

from __future__ import annotations

from collections import OrderedDict

from npu_gr.core.request import Events, UserKey


class PrefixHistoryCache:
    """Holds at most `capacity_bytes` of events. Every operation is O(1) in the number of users."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._events: OrderedDict[tuple[UserKey, str], Events] = OrderedDict()
        self._by_user: dict[UserKey, set[str]] = {}
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
            return
        size = _bytes(events)
        if size > self._capacity_bytes:
            return
        # a copy: a slice would keep alive, uncounted, the longer history that it was cut from
        self._events[key] = Events.make(events.items, events.actions, events.timestamps)
        self._by_user.setdefault(user, set()).add(fingerprint)
        self.bytes_used += size
        while self.bytes_used > self._capacity_bytes:
            self._drop(next(iter(self._events)))

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

    def _drop(self, key: tuple[UserKey, str]) -> None:
        user, fingerprint = key
        self.bytes_used -= _bytes(self._events.pop(key))
        known = self._by_user[user]
        known.discard(fingerprint)
        if not known:
            del self._by_user[user]


def _bytes(events: Events) -> int:
    return events.items.nbytes + events.actions.nbytes + events.timestamps.nbytes + 512  # and the objects around them
