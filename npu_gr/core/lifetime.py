"""Lifetimes: a published version, a background task of a block, work to its end or a deadline.

`Published` has the current value and the previous one, read without locks:

    publish(a)      current a   previous -
    publish(b)      current b   previous a
    rollback()      current a   previous b      a second rollback undoes the first
    drop_previous() current a   previous -

Readers get one reference, so they never see a partial change, and keep the value alive with it.
Writers hold a lock. All methods are thread-safe.

`InUse` counts the users of a version, so that it is stopped after the last one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from npu_gr.core.errors import DataError, DeadlineExceeded, Unavailable
from npu_gr.core.health import STOP_S

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Publication(Generic[T]):
    """A published value with its predecessor."""

    current: T
    previous: T | None  # the value after a rollback
    published_at: float  # time of the clock when `current` was published


class Published(Generic[T]):
    """The current value and the previous one."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without a value.

        Args:
            name: Description in messages: "the catalogue".
            clock: Monotonic seconds.
        """
        self._name = name
        self._clock = clock
        self._turn = threading.Lock()
        self._now: Publication[T] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been published."""
        return self._now is None

    @property
    def now(self) -> Publication[T]:
        """The current publication.

        Raises:
            Unavailable: nothing has been published.
        """
        if self._now is None:
            raise Unavailable(f"no version of {self._name} has been published")
        return self._now

    @property
    def current(self) -> T:
        """The current value.

        Raises:
            Unavailable: nothing has been published.
        """
        now = self._now
        return self.now.current if now is None else now.current

    @property
    def previous(self) -> T | None:
        """The previous value, if any."""
        return None if self._now is None else self._now.previous

    @property
    def age_s(self) -> float:
        """Seconds since the value was published.

        Raises:
            Unavailable: nothing has been published.
        """
        return self._clock() - self.now.published_at

    def publish(self, value: T) -> None:
        """Make `value` the current one, and the current one the previous."""
        with self._turn:
            previous = None if self._now is None else self._now.current
            self._now = Publication(value, previous, self._clock())

    def amend(self, value: T) -> None:
        """Replace the current value by an equivalent one; the previous one and the age stay."""
        with self._turn:
            now = self.now
            self._now = Publication(value, now.previous, now.published_at)

    def rollback(self) -> None:
        """Swap the current and the previous value.

        Raises:
            DataError: there is no previous value; nothing was changed.
        """
        with self._turn:
            now = self._now
            if now is None or now.previous is None:
                raise DataError(f"there is no previous version of {self._name}")
            self._now = Publication(now.previous, now.current, self._clock())

    def drop_previous(self) -> None:
        """Forget the previous value."""
        with self._turn:
            if self._now is not None:
                self._now = Publication(self._now.current, None, self._now.published_at)


class InUse:
    """Counts open `with` blocks. Event loop only."""

    def __init__(self) -> None:
        self._count = 0
        self._freed: asyncio.Event | None = None  # set while a task waits

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count and self._freed is not None:
            self._freed.set()
            self._freed = None

    async def wait_free(self) -> None:
        """Wait until no block is open."""
        while self._count:
            if self._freed is None:
                self._freed = asyncio.Event()
            await self._freed.wait()


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` in the background of the block; cancel and await it at the end."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not be interrupted, and return its result.

    A cancellation of the caller is ignored, so that the caller can complete what it has begun.
    """
    task = asyncio.get_running_loop().create_task(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task failed, and does not come back", exc_info=error)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]], within_s: float = STOP_S) -> None:
    """Cancel tasks, and wait until they end, at most `within_s`; their errors are ignored."""
    waiting = set(tasks)
    for task in waiting:
        task.cancel()
    if waiting:
        done, _ = await asyncio.wait(waiting, timeout=within_s)
        for task in done:
            if not task.cancelled():
                task.exception()  # marks it as retrieved


@asynccontextmanager
async def deadline(budget_s: float) -> AsyncIterator[float]:
    """Cancel the block after `budget_s`; yields the deadline as time.monotonic().

    Raises:
        DeadlineExceeded: the budget ran out, and the block was cancelled.
    """
    at = time.monotonic() + budget_s
    scope = asyncio.timeout(None if budget_s == float("inf") else budget_s)
    try:
        async with scope:
            yield at
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceeded(f"not done within {budget_s * 1e3:.0f} ms") from error


_NOT_BEGUN = object()
# Works whose callers have their answer; the event loop alone would forget a task that waits.
_left_behind: set[asyncio.Task[None]] = set()


async def within(budget_s: float, work: Callable[[float], Coroutine[Any, Any, T]]) -> T:
    """Run `work` within a budget, and return at the deadline in any case.

    At the deadline the work is cancelled. If its end must wait, because a pass on the device uses
    its pages, it ends in a task of its own, and the caller does not wait for that.

    Args:
        budget_s: Seconds.
        work: Coroutine function of the deadline, an instant on time.monotonic().

    Raises:
        DeadlineExceeded: the budget ran out.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    is_past = False

    def expire() -> None:
        nonlocal is_past
        is_past = True
        task.cancel()

    timer = None
    if budget_s < float("inf"):
        timer = asyncio.get_running_loop().call_later(max(budget_s, 0.0), expire)
    try:
        result: T = await _driven(work(time.monotonic() + budget_s), lambda: is_past, _NOT_BEGUN)
        return result
    except asyncio.CancelledError as error:
        if not is_past or task.cancelling() > before + 1:  # cancelled by another
            raise
        raise DeadlineExceeded(f"not done within {budget_s * 1e3:.0f} ms") from error
    finally:
        if timer is not None:
            timer.cancel()
        if is_past:
            task.uncancel()


@types.coroutine
def _driven(work: Any, is_past: Callable[[], bool], awaited: Any) -> Generator[Any, Any, Any]:
    """Run a coroutine step by step, so that another task can go on with it after its deadline.

    A task of its own from the beginning would cost each request a turn of the event loop.

    Args:
        work: The coroutine.
        is_past: Function that returns whether its deadline has passed.
        awaited: The future that it waits for; `_NOT_BEGUN` = it has not begun.
    """
    error: BaseException | None = None
    try:
        while True:
            if awaited is not _NOT_BEGUN:
                try:
                    yield awaited
                except BaseException as raised:  # noqa: BLE001  (passed on to the work)
                    error = raised
            try:
                awaited = work.send(None) if error is None else work.throw(error)
            except StopIteration as end:
                return end.value
            if isinstance(error, asyncio.CancelledError) and is_past():
                task = asyncio.get_running_loop().create_task(_left(work, awaited))
                _left_behind.add(task)
                task.add_done_callback(_left_behind.discard)
                raise DeadlineExceeded("the device was not done with the request at its deadline")
            error = None
    finally:
        error = None  # its traceback holds this frame: a cycle would wait for the collector


async def _left(work: Any, awaited: Any) -> None:
    with suppress(Exception, asyncio.CancelledError):  # its caller has an answer already
        await _driven(work, lambda: False, awaited)
