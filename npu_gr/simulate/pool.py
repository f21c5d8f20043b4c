"""The pool behind the DRAM tiers of a simulated fleet: values with a size and an age, no bytes.

`relay.PoolCopies` decides when to put, fetch and give up, as in an instance.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from npu_gr.core.history import UserKey
from npu_gr.core.request import Fetched
from npu_gr.engine.kv_cache.prefix_store import PoolMiss, StoredPrefix
from npu_gr.engine.kv_cache.tier import DramEntry, DramStore
from npu_gr.simulate.config import PoolProfile


class _Value(NamedTuple):
    prefix: StoredPrefix
    num_bytes: int
    expires_at: float  # instant of the loop


class SimulatedPool:
    """The values of all users. Event loop only.

    Invariant: `held_bytes`, the sum of the values, is at most `profile.num_bytes`.
    """

    def __init__(self, profile: PoolProfile) -> None:
        self.profile = profile
        self.held_bytes = 0
        # the newest value of each user, least recently put or fetched first
        self._values: OrderedDict[UserKey, _Value] = OrderedDict()

    def __len__(self) -> int:
        """Count the values."""
        return len(self._values)

    def put(self, user: UserKey, value: _Value) -> None:
        """Keep a value in the place of the user's earlier one; others are dropped to make room."""
        self.erase(user)
        while self._values and self.held_bytes + value.num_bytes > self.profile.num_bytes:
            self.erase(next(iter(self._values)))
        if value.num_bytes <= self.profile.num_bytes:
            self._values[user] = value
            self.held_bytes += value.num_bytes

    def get(self, user: UserKey, now: float) -> StoredPrefix | Fetched:
        """Return the user's value, or why there is none."""
        value = self._values.get(user)
        if value is None:
            return Fetched.ABSENT
        if value.expires_at <= now:
            return Fetched.EXPIRED
        self._values.move_to_end(user)
        return value.prefix

    def erase(self, user: UserKey) -> None:
        """Remove a user's value."""
        if (value := self._values.pop(user, None)) is not None:
            self.held_bytes -= value.num_bytes


class SimulatedCalls:
    """The calls of one instance, which take virtual time. Create it inside the virtual loop."""

    def __init__(self, pool: SimulatedPool, dram: DramStore) -> None:
        self._pool = pool
        self._dram = dram
        self._loop = asyncio.get_running_loop()

    def _ended(self, num_bytes: int) -> asyncio.Future[object]:
        """Return a future that ends when the bytes have moved."""
        future: asyncio.Future[object] = self._loop.create_future()
        profile = self._pool.profile
        seconds = profile.call_s + num_bytes / profile.bytes_per_s
        self._loop.call_later(seconds, future.set_result, None)
        return future

    def put(self, copy: DramEntry) -> asyncio.Future[object]:
        """Put a copy; others find it when the call has ended."""
        num_bytes = self._dram.arena.layout.bytes(copy.num_tokens)
        prefix = StoredPrefix(copy.key.fingerprint, copy.num_tokens, memoryview(b""))
        future = self._ended(num_bytes)
        value = _Value(prefix, num_bytes, self._loop.time() + self._dram.ttl_s)
        future.add_done_callback(lambda _: self._pool.put(copy.key.user, value))
        return future

    def get(self, user: UserKey) -> asyncio.Future[StoredPrefix]:
        """Fetch a value; a miss takes the fixed part of a call."""
        found = self._pool.get(user, self._loop.time())
        layout = self._dram.arena.layout
        num_bytes = layout.bytes(found.num_tokens) if isinstance(found, StoredPrefix) else 0
        answer: asyncio.Future[StoredPrefix] = self._loop.create_future()

        def answered(_: asyncio.Future[object]) -> None:
            if isinstance(found, StoredPrefix):
                answer.set_result(found)
            else:
                answer.set_exception(PoolMiss(found))

        self._ended(num_bytes).add_done_callback(answered)
        return answer

    def write(self, stored: StoredPrefix, copy: DramEntry) -> asyncio.Future[object]:
        """Write nothing: a simulated page has no bytes."""
        del stored, copy
        return self._ended(0)

    def erase(self, user: UserKey) -> asyncio.Future[object]:
        """Remove a user's value."""
        self._pool.erase(user)
        return self._ended(0)

    def stop(self) -> None:
        """Do nothing: calls that run end by themselves."""
