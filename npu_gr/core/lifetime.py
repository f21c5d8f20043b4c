"""How long things live: a version in service, a task beside a block, a block with a deadline.

`Published` holds one thing in service, and the one before it, read without waiting:

    publish(a)      current a   previous -
    publish(b)      current b   previous a
    rollback()      current a   previous b      a second rollback undoes the first
    drop_previous() current a   previous -

Readers take one reference, so they never see half of a change; whoever holds the reference keeps
its value alive. Publishers take turns. Any thread may call any method.

`InUse` counts who uses a version, so that it is stopped once nobody does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from npu_gr.core.errors import DataError, DeadlineExceeded, Unavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Publication(Generic[T]):
    """What is in service at one moment."""

    current: T
    previous: T | None  # what a rollback would serve
    published_at: float  # instant of the clock at which `current` came into service


class Published(Generic[T]):
    """The value in service and the one before it."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is published yet.

        Args:
            name: what the value is, in messages: "the catalogue".
            clock: seconds that never go back.
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
        """What is in service.

        Raises:
            Unavailable: nothing has been published.
        """
        if self._now is None:
            raise Unavailable(f"no version of {self._name} has been published")
        return self._now

    @property
    def current(self) -> T:
        """The value in service.

        Raises:
            Unavailable: nothing has been published.
        """
        now = self._now
        return self.now.current if now is None else now.current

    @property
    def previous(self) -> T | None:
        """The value before it, if it is kept."""
        return None if self._now is None else self._now.previous

    @property
    def age_s(self) -> float:
        """Seconds since the value came into service.

        Raises:
            Unavailable: nothing has been published.
        """
        return self._clock() - self.now.published_at

    def publish(self, value: T) -> None:
        """Put `value` into service and keep the one before it."""
        with self._turn:
            previous = None if self._now is None else self._now.current
            self._now = Publication(value, previous, self._clock())

    def rollback(self) -> None:
        """Put the kept value into service, and keep the one that was in service.

        Raises:
            DataError: no earlier value is kept; nothing was changed.
        """
        with self._turn:
            now = self._now
            if now is None or now.previous is None:
                raise DataError(f"no earlier version of {self._name} is kept")
            self._now = Publication(now.previous, now.current, self._clock())

    def drop_previous(self) -> None:
        """Keep the value in service alone."""
        with self._turn:
            if self._now is not None:
                self._now = Publication(self._now.current, None, self._now.published_at)


class InUse:
    """Count the open `with` blocks. Event loop only."""

    def __init__(self) -> None:
        self._count = 0
        self._freed: asyncio.Event | None = None  # where somebody waits

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
    """Run `work` beside the block; cancel it at the block's end, and wait until it has ended."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def deadline(budget_s: float) -> AsyncIterator[float]:
    """Cancel the block when its time is over.

    The block gets the instant (time.monotonic) at which that is.

    Raises:
        DeadlineExceeded: the budget ran out; the block was cancelled and has unwound.
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
