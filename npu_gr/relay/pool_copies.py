"""Copies of prefixes in the pool behind the DRAM tier, for instances that come after this one.

    a prefix was copied to DRAM  -->  put: the newest first, one at a time
    a signal finds no prefix     -->  fetch into DRAM, from where a reload brings it to HBM
    a user is erased             -->  erased in the pool, too

No request waits for the pool. A fetch that takes longer than computing the prefix is given up, and
the prefix is computed. Nothing that the pool returns, or fails to, is an error of a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, Protocol, TypeVar

from npu_gr.core.errors import ResourceError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Fetched
from npu_gr.engine.kv_cache.prefix_store import (
    PoolFailed,
    PoolMiss,
    PrefixStore,
    StoredPrefix,
    pack,
    unpack,
    user_name,
    value_name,
    write,
)
from npu_gr.engine.kv_cache.tier import DramEntry, DramStore, PrefixKey
from npu_gr.relay.background import BackgroundTasks
from npu_gr.relay.encoder import P

log = logging.getLogger(__name__)

R = TypeVar("R")

CALLS = 4  # calls to the pool at a time, those given up but not ended among them
MOST_WAITING = 4096  # prefixes that wait to be put; the oldest is dropped first
RETRY_S = 5.0  # after a failure; also how old a bad bandwidth may be before it is measured again
ERASE_S = 1.0  # an erase that takes longer has failed
NEW_WEIGHT = 1 / 4  # of the latest fetch in the moving average of the bandwidth


class PoolCalls(Protocol):
    """Calls to a pool for one model version, each of which ends by itself.

    The futures raise `PoolFailed`; `get` raises `PoolMiss`, too.
    """

    def put(self, copy: DramEntry) -> asyncio.Future[object]:
        """Keep a leased copy in the place of the user's earlier one."""
        ...

    def get(self, user: UserKey) -> asyncio.Future[StoredPrefix]:
        """Return the checked value of a user."""
        ...

    def write(self, stored: StoredPrefix, copy: DramEntry) -> asyncio.Future[object]:
        """Write the pages of a value into a reserved entry."""
        ...

    def erase(self, user: UserKey) -> asyncio.Future[object]:
        """Remove all values of a user."""
        ...

    def stop(self) -> None:
        """Start no more calls."""
        ...


class StoreCalls:
    """Calls to a store, in threads."""

    def __init__(self, store: PrefixStore, dram: DramStore, version: str) -> None:
        self._store = store
        self._dram = dram
        self._version = version
        self._threads = ThreadPoolExecutor(CALLS, "kv-pool")

    def _call(self, work: Callable[[], R]) -> asyncio.Future[R]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def put(self, copy: DramEntry) -> asyncio.Future[object]:
        """Pack the pages of a copy, and put them."""
        key = copy.key
        ttl_s = self._dram.ttl_s
        arena = self._dram.arena

        def work() -> object:
            value = pack(arena, copy.runs, key, copy.num_tokens, time.time() + ttl_s)
            name = value_name(key.user, key.model_version, key.layout_id)
            return self._store.put(name, value, ttl_s)  # type: ignore[func-returns-value]

        return self._call(work)

    def get(self, user: UserKey) -> asyncio.Future[StoredPrefix]:
        """Get and check a value."""
        layout = self._dram.arena.layout
        name = value_name(user, self._version, layout.layout_id)

        def work() -> StoredPrefix:
            value = self._store.get(name)
            if value is None:
                raise PoolMiss(Fetched.ABSENT)
            return unpack(value, name, layout, time.time())

        return self._call(work)

    def write(self, stored: StoredPrefix, copy: DramEntry) -> asyncio.Future[object]:
        """Write pages into the DRAM tier's arena."""
        return self._call(partial(write, stored, self._dram.arena, copy.runs))

    def erase(self, user: UserKey) -> asyncio.Future[object]:
        """Remove all values of a user."""
        return self._call(partial(self._store.erase, user_name(user)))

    def stop(self) -> None:
        """Start no more calls. Those that run end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class PoolCopies(Generic[P]):
    """Puts, fetches and erases prefixes of one model version. Event loop only."""

    def __init__(
        self,
        dram: DramStore,
        calls: PoolCalls,
        version: str,
        background: BackgroundTasks,
        clock: Callable[[], float],
    ) -> None:
        self._dram = dram
        self._pool = calls
        self._version = version
        self._background = background
        self._clock = clock
        self._calls = 0
        self._waiting: dict[PrefixKey, DramEntry] = {}  # to be put, oldest first
        self._put_task: asyncio.Task[None] | None = None
        self._putting: tuple[UserKey, asyncio.Future[None]] | None = None
        self._fetching: dict[UserKey, asyncio.Task[None]] = {}
        self._closed_until = 0.0
        self._bytes_per_s: float | None = None
        self._measured_at = 0.0
        # Called with the outcome of each fetch that was tried or declined.
        self.on_fetch: Callable[[Fetched], None] = lambda _outcome: None
        # Called with the end of each put.
        self.on_put: Callable[[bool], None] = lambda _is_kept: None

    def _counted(self, future: asyncio.Future[R]) -> asyncio.Future[R]:
        """Count a call until it ends."""
        self._calls += 1
        future.add_done_callback(self._called)
        return future

    def _called(self, future: asyncio.Future[R]) -> None:
        self._calls -= 1
        if not future.cancelled() and isinstance(future.exception(), PoolFailed):
            self._closed_until = self._clock() + RETRY_S

    # ---- put

    def put(self, copy: DramEntry) -> None:
        """Put a complete copy of this version in DRAM into the pool, behind newer ones."""
        self._waiting.pop(copy.key, None)
        self._waiting[copy.key] = copy
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
        if self._put_task is None or self._put_task.done():
            self._put_task = self._background.start("pool", self._put_all)

    async def _put_all(self) -> None:
        while self._waiting and self._closed_until <= self._clock():
            key, copy = self._waiting.popitem()
            if not copy.is_dropped and self._dram.get(key) is copy:
                await self._put(copy)
        self._waiting.clear()  # after a failure: they lie in DRAM, and are put with their next use

    async def _put(self, copy: DramEntry) -> None:
        lease = self._dram.lease(copy)
        lease.__enter__()
        future = self._counted(self._pool.put(copy))
        # The call reads the pages to its end, also if this task is cancelled.
        future.add_done_callback(lambda _: lease.__exit__(None, None, None))
        ended = asyncio.get_running_loop().create_future()
        self._putting = copy.key.user, ended
        try:
            await asyncio.wait({future})
        finally:
            self._putting = None
            ended.set_result(None)
        error = future.exception()
        self.on_put(error is None)
        if error is not None:
            log.debug("a prefix was not put into the pool: %s", error)

    # ---- fetch

    def is_fetching(self, user: UserKey) -> bool:
        """Return whether a fetch of the user's prefix runs."""
        return user in self._fetching

    def fetch(self, user: UserKey, tokens: P, compute_s: float, then: Callable[[], object]) -> bool:
        """Start to bring the longest usable prefix of a history into DRAM.

        Args:
            user: User of the history.
            tokens: The whole history.
            compute_s: Seconds that computing the prefix takes; a fetch must take less.
            then: Called once it has ended, whatever it led to, but not if the user was erased.

        Returns:
            False if it does not pay, or cannot be tried now.
        """
        declined = self._declined(self._dram.arena.layout.bytes(len(tokens)), compute_s)
        if declined is not None:
            self.on_fetch(declined)
            return False

        async def work() -> None:
            outcome = await self._fetch(user, tokens, compute_s)
            self.on_fetch(outcome)
            del self._fetching[user]
            then()

        task = self._fetching[user] = self._background.start("pool", work)
        task.add_done_callback(
            lambda task: self._fetching.pop(user) if self._fetching.get(user) is task else None
        )
        return True

    def _declined(self, num_bytes: int, compute_s: float) -> Fetched | None:
        now = self._clock()
        if now < self._closed_until:
            return Fetched.FAILED
        # One call is kept for erasing a user, one for putting.
        if self._calls >= CALLS - 1:
            return Fetched.BUSY
        is_known = self._bytes_per_s is not None and now - self._measured_at < RETRY_S
        if is_known and num_bytes / (self._bytes_per_s or 1.0) >= compute_s:
            return Fetched.SLOWER
        return None

    async def _fetch(self, user: UserKey, tokens: P, compute_s: float) -> Fetched:
        layout = self._dram.arena.layout
        began_at = self._clock()
        future = self._counted(self._pool.get(user))
        await asyncio.wait({future}, timeout=compute_s)
        took_s = max(self._clock() - began_at, 1e-6)
        if not future.done():
            self._measured(layout.bytes(len(tokens)) / took_s)
            return Fetched.TIMEOUT
        error = future.exception()
        if error is not None:
            return error.reason if isinstance(error, PoolMiss) else Fetched.FAILED
        stored = future.result()
        self._measured(layout.bytes(stored.num_tokens) / took_s)
        if (
            stored.num_tokens > len(tokens)
            or tokens.fingerprint(stored.num_tokens) != stored.fingerprint
        ):
            return Fetched.MISMATCH
        key = PrefixKey(user, self._version, layout.layout_id, stored.fingerprint)
        try:
            copy = self._dram.reserve(key, stored.num_tokens)
        except ResourceError:
            return Fetched.NO_ROOM
        writing = self._counted(self._pool.write(stored, copy))
        try:
            await asyncio.wait({writing})
        except BaseException:
            # The call writes the pages to its end.
            writing.add_done_callback(lambda _: self._dram.abandon(copy))
            raise
        if writing.exception() is not None:
            self._dram.abandon(copy)
            return Fetched.FAILED
        self._dram.commit(copy)
        return Fetched.HIT

    def _measured(self, bytes_per_s: float) -> None:
        before = self._bytes_per_s
        self._bytes_per_s = (
            bytes_per_s if before is None else before + NEW_WEIGHT * (bytes_per_s - before)
        )
        self._measured_at = self._clock()

    # ---- erase and stop

    async def erase(self, user: UserKey) -> None:
        """Erase a user in the pool; what is on its way there or from there, too.

        Raises:
            PoolFailed: the pool did not say within a second that it has erased the user.
        """
        if (task := self._fetching.get(user)) is not None:
            task.cancel()
        self._waiting = {key: one for key, one in self._waiting.items() if key.user != user}
        ends_at = self._clock() + ERASE_S
        if self._putting is not None and self._putting[0] == user:
            await asyncio.wait({self._putting[1]}, timeout=ERASE_S)
        future = self._counted(self._pool.erase(user))
        await asyncio.wait({future}, timeout=max(0.0, ends_at - self._clock()))
        if not future.done():
            raise PoolFailed(f"kv_cache.pool: the erase took longer than {ERASE_S:g} s")
        future.result()

    def stop(self) -> None:
        """Start no more calls. Those that run end by themselves."""
        self._pool.stop()
