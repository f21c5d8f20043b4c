"""Bulkhead and circuit breaker for a dependency (history store, feature source).

Requests wait for the dependency for a bounded time only.

    call ─> breaker ─> place (max_calls, max_queue) ─> history store or feature source
              │            │                             │ longer than the limit: store_slow
              └ open       └ none free: store_busy       └ fails: store_unavailable,
                                                           disk_full, entry_corrupt

After failures the circuit breaker rejects calls at once; a probe now and then tests whether the
dependency works again:

    closed ── failures in a row, or half of the newest calls ──> open ── retry_s ──> one probe
      ▲                                                           ▲                    │
      │                                                           └────── it fails ────┤
      └──────────────────────────── it succeeds ───────────────────────────────────────┘

Calls that began while the breaker was closed do not count once it is open: only a probe shows the
present state.

A store has one lane for reads and one for appends and erasures: neither waits for the other, and a
full disk, which fails every append, stops no read. If the caller is cancelled or the limit passes,
the call goes on and keeps its place until the store has ended it. So a store that hangs holds
`max_calls` calls, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from npu_gr.core.errors import RequestError, StoreFailed, StoreFault, Unprocessable
from npu_gr.core.health import Worker, limit_s
from npu_gr.core.history import Events, StoreHealth, UserKey, Write, Written
from npu_gr.core.logs import ThrottledLog
from npu_gr.history_store.store import (
    FeatureStoreConfig,
    HistoryConfig,
    HistoryStore,
    StoredHistory,
)

NEWEST = 20  # the breaker also opens if half of so many latest calls have failed


class StoreBreaker:
    """Circuit breaker. Each call that it permits must be reported once, with its era."""

    def __init__(self, max_failures: int, retry_s: float, clock: Callable[[], float]) -> None:
        """Start closed.

        Args:
            max_failures: Number of failures in a row that opens the breaker.
            retry_s: Seconds from a failure to the next probe.
            clock: Monotonic clock, in seconds.
        """
        self._max_failures = max_failures
        self._retry_s = retry_s
        self._clock = clock
        self._newest: deque[bool] = deque(maxlen=max(NEWEST, max_failures))  # True = failed
        self._in_a_row = 0
        self._retry_at: float | None = None  # None = closed
        self._is_probing = False
        self._era = 0  # counts how often it opened or closed

    @property
    def is_open(self) -> bool:
        """Whether the breaker rejects all calls but probes."""
        return self._retry_at is not None

    def enter(self) -> int | None:
        """Permit a call and return its era, or return None to reject it."""
        if self._retry_at is not None:
            if self._is_probing or self._clock() < self._retry_at:
                return None
            self._is_probing = True
        return self._era

    def succeeded(self, era: int) -> bool:
        """Report that a call of this era succeeded; return True if that closed the breaker."""
        if era != self._era:
            return False
        if self._retry_at is not None:
            self._turn(None)
            return True
        self._in_a_row = 0
        self._newest.append(False)
        return False

    def failed(self, era: int) -> bool:
        """Report that a call of this era failed; return True if that opened the breaker."""
        if era != self._era:
            return False
        if self._retry_at is not None:
            self._retry_at = self._clock() + self._retry_s
            self._is_probing = False
            return False
        self._in_a_row += 1
        self._newest.append(True)
        half = len(self._newest) == self._newest.maxlen and sum(self._newest) * 2 >= len(
            self._newest
        )
        if self._in_a_row < self._max_failures and not half:
            return False
        self._turn(self._clock() + self._retry_s)
        return True

    def trip(self) -> None:
        """Open it, because the dependency is known to fail."""
        if self._retry_at is None:
            self._turn(self._clock() + self._retry_s)

    def given_up(self, era: int) -> None:
        """Report that a call of this era was not made, or tells nothing about the dependency."""
        if era == self._era:
            self._is_probing = False

    def _turn(self, retry_at: float | None) -> None:
        self._retry_at = retry_at
        self._is_probing = False
        self._in_a_row = 0
        self._newest.clear()
        self._era += 1


log = logging.getLogger(__name__)
T = TypeVar("T")

OK = "ok"
REJECTED = "rejected"  # the breaker is open
LOG_EVERY_S = 1.0


class StoreObserver(Protocol):
    """Receives the result of each call of a store, for metrics."""

    def called(self, operation: str, result: str, took_s: float) -> None:
        """Count a call.

        Args:
            operation: append, read or erase.
            result: "ok", "rejected", or the value of a `StoreFault`.
            took_s: Seconds that the call took, so at most the lane's time limit.
        """
        ...


@dataclass(slots=True, eq=False)
class _Call:
    """One call, which is reported once: at its end or at its time limit."""

    operation: str
    began_at: float
    era: int
    answer: asyncio.Future[Any]
    is_reported: bool = False


class Lane:
    """Limits the calls of one kind: how many run, how many wait, and for how long.

    Event loop only.
    """

    def __init__(
        self,
        name: str,
        config: HistoryConfig | FeatureStoreConfig,
        limit_s: float,
        observer: StoreObserver,
        clock: Callable[[], float],
        of: str = "the history store",
    ) -> None:
        """Start with a closed breaker.

        Args:
            name: Name of the lane, for the log.
            config: Limits of the calls and of the breaker.
            limit_s: Time limit of one call in seconds, including the wait for a place.
            observer: Receives the result of each call.
            clock: Monotonic clock, in seconds.
            of: Name of the dependency, for messages.
        """
        self._name = name
        self._of = of
        self._limit_s = limit_s
        self._max_calls = config.max_calls
        self._max_queue = config.max_queue
        self._observer = observer
        self._clock = clock
        self._places = asyncio.Semaphore(config.max_calls)
        self._breaker = StoreBreaker(config.max_failures, config.retry_s, clock)
        self._retry_s = config.retry_s
        self._cause = ""  # message of the latest failure
        self._fault = StoreFault.UNAVAILABLE
        self._faults = ThrottledLog(log, LOG_EVERY_S, clock)
        self.waiting = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.worker = Worker()  # calls that the dependency has not ended

    @property
    def num_calls(self) -> int:
        """Number of calls that the dependency has not ended."""
        return len(self.tasks)

    @property
    def is_open(self) -> bool:
        """Whether the breaker rejects calls."""
        return self._breaker.is_open

    def trip(self, cause: StoreFailed) -> None:
        """Open the breaker, because a call outside of the lane has failed."""
        self._cause, self._fault = str(cause), cause.fault
        self._breaker.trip()

    async def call(self, operation: str, work: Callable[[], Awaitable[T]]) -> T:
        """Make a call. If the caller is cancelled, a call that has begun goes on.

        Args:
            operation: append, read or erase.
            work: Coroutine function that calls the dependency.

        Raises:
            StoreFailed: the dependency failed or took too long, no place became free within the
                limit, or the breaker is open.
        """
        era = self._breaker.enter()
        if era is None:
            self._observer.called(operation, REJECTED, 0.0)
            raise StoreFailed(
                f"{self._cause}; it is tried again every {self._retry_s * 1e3:.0f} ms", self._fault
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        call = _Call(operation, self._clock(), era, answer)
        try:
            await self._take_place(call)
        except BaseException:
            self._breaker.given_up(era)
            raise
        timer = loop.call_later(
            self._limit_s - (self._clock() - call.began_at), self._overdue, call
        )
        task = loop.create_task(self._work(call, work, timer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return await answer

    async def _take_place(self, call: _Call) -> None:
        if not self._places.locked():
            await self._places.acquire()  # returns at once
            return
        if self.waiting >= self._max_queue:
            raise self._busy(
                call, f"{self.waiting} calls wait for it, and max_queue is {self._max_queue}"
            )
        self.waiting += 1
        try:
            async with asyncio.timeout(self._limit_s):
                await self._places.acquire()
        except TimeoutError as error:
            text = (
                f"{self._max_calls} calls are being made, and none ended within "
                f"{self._limit_s * 1e3:.0f} ms"
            )
            raise self._busy(call, text) from error
        finally:
            self.waiting -= 1

    def _busy(self, call: _Call, text: str) -> StoreFailed:
        took_s = self._clock() - call.began_at
        self._observer.called(call.operation, StoreFault.BUSY, took_s)
        self._faults.warning("", f"{self._of} is busy: {self._name} {text}")
        return StoreFailed(f"{self._of} is busy: {text}", StoreFault.BUSY)

    async def _work(
        self, call: _Call, work: Callable[[], Awaitable[Any]], timer: asyncio.TimerHandle
    ) -> None:
        """Make the call, free its place, and report it unless its limit has passed."""
        error: Exception | None = None
        value: Any = None
        try:
            with self.worker.busy(limit_s(self._limit_s)):
                value = await work()
        except asyncio.CancelledError:  # the store is being closed
            error = StoreFailed(f"{self._of} is closed")
        except Exception as raised:  # noqa: BLE001  (passed on to the caller)
            error = raised
        finally:
            self._places.release()
            timer.cancel()
        self._report(call, error)
        if not call.answer.done():
            if error is None:
                call.answer.set_result(value)
            else:
                call.answer.set_exception(error)

    def _overdue(self, call: _Call, is_second: bool = False) -> None:
        """End the wait for a call whose limit has passed."""
        late_s = self._clock() - call.began_at - self._limit_s
        if late_s > self._limit_s / 4 and not is_second:
            # The event loop was blocked, so it may not have read the answer yet: wait once more.
            asyncio.get_running_loop().call_later(
                min(late_s, self._limit_s), self._overdue, call, True
            )
            return
        text = f"{self._of} did not answer within {self._limit_s * 1e3:.0f} ms"
        error = StoreFailed(text, StoreFault.SLOW)
        self._report(call, error)
        if not call.answer.done():
            call.answer.set_exception(error)

    def _report(self, call: _Call, error: Exception | None) -> None:
        """Report a call to the metrics and to the breaker.

        A damaged entry or a bad request is no failure of the dependency: the breaker counts it as a
        success.
        """
        if call.is_reported:
            return
        call.is_reported = True
        took_s = self._clock() - call.began_at
        fault = error.fault if isinstance(error, StoreFailed) else StoreFault.UNAVAILABLE
        is_ok = error is None or isinstance(error, RequestError)
        self._observer.called(call.operation, OK if is_ok else fault.value, took_s)
        if not is_ok:
            self._faults.warning("", f"{call.operation}: {error}")
        if is_ok or fault is StoreFault.CORRUPT:
            if self._breaker.succeeded(call.era):
                log.warning("%s works again: %s", self._of, self._name)
        else:
            self._cause = str(error)
            self._fault = fault
            if self._breaker.failed(call.era):
                log.error(
                    "%s fails: %s are rejected at once until it works again: %s",
                    self._of,
                    self._name,
                    error,
                )


class GuardedStore:
    """A `HistoryStore` that calls another one through bulkheads."""

    def __init__(
        self,
        store: HistoryStore,
        config: HistoryConfig,
        observer: StoreObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guard a store, which is closed with this one.

        Args:
            store: The store to call.
            config: Limits of its calls.
            observer: Receives the result of each call.
            clock: Monotonic clock, in seconds.
        """
        self._store = store
        self._kind = config.kind
        # A slow read is no failure: who waits for it decides how long (`Histories`).
        longest_read_s = max(config.timeout_s, config.read_timeout_s)
        self.reads = Lane("reads", config, longest_read_s, observer, clock)
        self.writes = Lane("appends and erasures", config, config.timeout_s, observer, clock)

    @property
    def kind(self) -> str:
        """Embedded or redis."""
        return self._kind

    @property
    def health(self) -> StoreHealth:
        """Health of the store itself."""
        return self._store.health

    def trip(self, cause: StoreFailed) -> None:
        """Open both breakers, because the store has failed at the start."""
        for lane in (self.reads, self.writes):
            lane.trip(cause)

    async def append(self, user: UserKey, events: Events, key: str | None = None) -> Written:
        return await self.writes.call("append", lambda: self._store.append(user, events, key))

    async def write_many(
        self, batch: Sequence[Write]
    ) -> list[Written | StoreFailed | Unprocessable]:
        return await self.writes.call("append", lambda: self._store.write_many(batch))

    async def read(self, user: UserKey, last: int, all_items: bool = False) -> StoredHistory:
        return await self.reads.call("read", lambda: self._store.read(user, last, all_items))

    async def actions(self) -> tuple[str, ...]:
        return await self.reads.call("read", lambda: self._store.actions())

    async def name_actions(self, names: Sequence[str]) -> tuple[str, ...]:
        return await self.writes.call("append", lambda: self._store.name_actions(names))

    async def item_key(self, mine: str) -> str:
        return await self.writes.call("append", lambda: self._store.item_key(mine))

    async def erase(self, user: UserKey) -> bool:
        return await self.writes.call("erase", lambda: self._store.erase(user))

    async def close(self) -> None:
        """Close the store, and cancel the calls that it has not ended."""
        await self._store.close()
        for task in (tasks := [*self.reads.tasks, *self.writes.tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
