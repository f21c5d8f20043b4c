"""The bulkhead in front of whatever an instance calls: its callers wait for a bounded time.

    call ─> breaker ─> place (max_calls, max_queue) ─> the store, or the feature source
              │            │                             │ longer than the limit: store_slow
              └ open       └ none in time: store_busy    └ fails: store_unavailable, disk_full, entry_corrupt

The circuit breaker rejects calls at once after failures, and one now and then tries whether it is
over:

    closed ── failures in a row, or half of the newest ones ──> open ── retry_s ──> one probe
      ▲                                                          ▲                    │
      │                                                          └────── it fails ────┤
      └──────────────────────────── it succeeds ──────────────────────────────────────┘

A call that passed while the breaker was closed does not count once it is open: only a probe says
how things are now.

Reads of a store have a lane of their own, and so have appends and erasures: neither waits for the
other, and a full disk that fails every append stops no read. A caller that gives up, or whose limit
is over, leaves its call behind: the call keeps its place until the store has really ended it. So a
store that hangs holds `max_calls` calls, and nothing else.
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
from npu_gr.core.history import Events, StoreHealth, UserKey, Write, Written
from npu_gr.core.logs import SeldomLog
from npu_gr.history_store.store import (
    FeatureStoreConfig,
    HistoryConfig,
    HistoryStore,
    StoredHistory,
)

NEWEST = 20  # calls, of which half must fail to open a breaker whose calls do not fail in a row


class StoreBreaker:
    """Says whether a call may be made. Each one that may must be reported once, by its pass."""

    def __init__(self, max_failures: int, retry_s: float, clock: Callable[[], float]) -> None:
        """Begin closed.

        Args:
            max_failures: in a row; the last of them opens it.
            retry_s: after a failure, until the next probe.
            clock: seconds that never go back.
        """
        self._max_failures = max_failures
        self._retry_s = retry_s
        self._clock = clock
        self._newest: deque[bool] = deque(maxlen=max(NEWEST, max_failures))  # True = failed
        self._in_a_row = 0
        self._retry_at: float | None = None  # None = closed
        self._is_probing = False
        self._era = 0  # changes whenever it opens or closes

    @property
    def is_open(self) -> bool:
        """Whether calls other than probes are rejected."""
        return self._retry_at is not None

    def enter(self) -> int | None:
        """Return the pass of a call that may be made, or None if it may not."""
        if self._retry_at is not None:
            if self._is_probing or self._clock() < self._retry_at:
                return None
            self._is_probing = True
        return self._era

    def succeeded(self, era: int) -> bool:
        """Report that the call with this pass did its part; True = that closed the breaker."""
        if era != self._era:
            return False
        if self._retry_at is not None:
            self._turn(None)
            return True
        self._in_a_row = 0
        self._newest.append(False)
        return False

    def failed(self, era: int) -> bool:
        """Report that the call with this pass failed or took too long; True = that opened the breaker."""
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

    def given_up(self, era: int) -> None:
        """Report that the call with this pass was not made, or says nothing about the dependency."""
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
    """Counts calls of a store."""

    def called(self, operation: str, result: str, took_s: float) -> None:
        """Count a call.

        Args:
            operation: append, read or erase.
            result: "ok", "rejected", or the value of a `StoreFault`.
            took_s: for the caller; a call that is left behind counts its time limit.
        """
        ...


@dataclass(slots=True, eq=False)
class _Call:
    """One call: it is reported once, at its end or at its time limit."""

    operation: str
    began_at: float
    era: int
    answer: asyncio.Future[Any]
    is_reported: bool = False


class Lane:
    """Calls of one sort: at most so many at once, so many that wait, each for so long.

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
        """Let calls through.

        Args:
            name: in the log.
            config: how many calls, and when the breaker opens.
            limit_s: of one call, the wait for its place included.
            observer: counts.
            clock: seconds that never go back.
            of: what is called, in messages.
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
        self._cause = ""  # of the newest failure
        self._fault = StoreFault.UNAVAILABLE
        self._faults = SeldomLog(log, LOG_EVERY_S, clock)
        self.waiting = 0
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def num_calls(self) -> int:
        """Calls that the store has not ended."""
        return len(self.tasks)

    @property
    def is_open(self) -> bool:
        """Whether the breaker rejects calls."""
        return self._breaker.is_open

    async def call(self, operation: str, work: Callable[[], Awaitable[T]]) -> T:
        """Make a call. If the caller is cancelled, a call that has begun goes on.

        Args:
            operation: append, read or erase.
            work: calls the store.

        Raises:
            StoreFailed: the store failed or took too long, no place was free in time, or the
                breaker is open.
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
            await self._places.acquire()  # does not wait
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
        """Make the call, report it if its limit is not over, and give the place back."""
        error: Exception | None = None
        value: Any = None
        try:
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
        """End the wait for a call whose limit is over."""
        late_s = self._clock() - call.began_at - self._limit_s
        if late_s > self._limit_s / 4 and not is_second:
            # the event loop was blocked, and read no answer meanwhile: that is not the store's
            # fault
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
        """Count the call, and tell the breaker, for which one entry or one request that is wrong is no failure."""
        if call.is_reported:
            return
        call.is_reported = True
        took_s = self._clock() - call.began_at
        fault = error.fault if isinstance(error, StoreFailed) else StoreFault.UNAVAILABLE
        is_its_work = error is None or isinstance(error, RequestError)
        self._observer.called(call.operation, OK if is_its_work else fault.value, took_s)
        if not is_its_work:
            self._faults.warning("", f"{call.operation}: {error}")
        if is_its_work or fault is StoreFault.CORRUPT:
            if self._breaker.succeeded(call.era):
                log.warning("%s works again: %s", self._of, self._name)
        else:
            self._cause = str(error)
            self._fault = fault
            if self._breaker.failed(call.era):
                log.error(
                    "%s fails: %s fail at once until it works again: %s",
                    self._of,
                    self._name,
                    error,
                )


class GuardedStore:
    """A `HistoryStore` in front of another one."""

    def __init__(
        self,
        store: HistoryStore,
        config: HistoryConfig,
        observer: StoreObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guard a store; it is closed with this one.

        Args:
            store: what is called.
            config: limits of its calls.
            observer: counts them.
            clock: seconds that never go back.
        """
        self._store = store
        self._kind = config.kind
        self.reads = Lane("reads", config, config.read_timeout_s, observer, clock)
        self.writes = Lane("appends and erasures", config, config.timeout_s, observer, clock)

    @property
    def kind(self) -> str:
        """Embedded or redis."""
        return self._kind

    @property
    def health(self) -> StoreHealth:
        """What the store says of itself."""
        return self._store.health

    async def append(self, user: UserKey, events: Events, key: str | None = None) -> int:
        return await self.writes.call("append", lambda: self._store.append(user, events, key))

    async def write_many(
        self, batch: Sequence[Write]
    ) -> list[Written | StoreFailed | Unprocessable]:
        return await self.writes.call("append", lambda: self._store.write_many(batch))

    async def read(self, user: UserKey, last: int) -> StoredHistory:
        return await self.reads.call("read", lambda: self._store.read(user, last))

    async def actions(self) -> tuple[str, ...]:
        return await self.reads.call("read", lambda: self._store.actions())

    async def name_actions(self, names: Sequence[str]) -> tuple[str, ...]:
        return await self.writes.call("append", lambda: self._store.name_actions(names))

    async def erase(self, user: UserKey) -> bool:
        return await self.writes.call("erase", lambda: self._store.erase(user))

    async def close(self) -> None:
        """Close the store, and end the calls that it did not end."""
        await self._store.close()
        for task in (tasks := [*self.reads.tasks, *self.writes.tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
