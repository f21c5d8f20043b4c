"""Lifetimes: a published version, a task of a block, work to the end, a block with a deadline.

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
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from npu_gr.core.errors import DataError, DeadlineExceeded, Unavailable

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
