"""Bound how long a request may take: `async with Deadline(budget_s) as deadline_at`.

As `asyncio.timeout` does, but one timer of the event loop serves all requests: it stands at the earliest deadline, and
a request that ends in time only says so. A timer for each request costs the loop more than the rest of this.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from types import TracebackType

from npu_gr.core.errors import DeadlineExceeded

_LEAST_SWEEP = 64  # deadlines of requests that have ended, which may lie in the heap


class Deadline:
    """Cancel the block when its time is over; the block gets the instant (time.monotonic) at which that is.

    Raises:
        DeadlineExceeded: the budget ran out; the block was cancelled and has unwound.
    """

    __slots__ = ("_at", "_budget_s", "_cancelling", "_is_over", "_task", "_timer")

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._is_over = False

    async def __aenter__(self) -> float:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[object] | None = task
        self._cancelling = task.cancelling()
        self._at = time.monotonic() + self._budget_s
        self._timer = _timer_of(task.get_loop())
        self._timer.add(self._at, self)
        return self._at

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        self._timer.ended()
        if not self._is_over:
            return
        assert task is not None
        # nobody else has cancelled the task: the cancellation ends here
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise DeadlineExceeded(f"not done within {self._budget_s * 1e3:.0f} ms") from error

    @property
    def is_ended(self) -> bool:
        """Whether the block has been left."""
        return self._task is None

    def expire(self) -> None:
        """Cancel the block, for the timer."""
        if self._task is not None:
            self._is_over = True
            self._task.cancel()


class _Timer:
    """The deadlines of one event loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()
        self._handle: asyncio.TimerHandle | None = None
        self._due_at = float("inf")  # when the handle fires
        self._num_ended = 0  # in the heap, at most

    def add(self, at: float, one: Deadline) -> None:
        heapq.heappush(self._heap, (at, next(self._numbers), one))
        if at < self._due_at:
            self._stand_at(at)

    def ended(self) -> None:
        self._num_ended += 1
        if self._num_ended > _LEAST_SWEEP and 2 * self._num_ended > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].is_ended]
            heapq.heapify(self._heap)
            self._num_ended = 0

    def _stand_at(self, at: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._due_at = at
        self._handle = asyncio.get_running_loop().call_later(max(0.0, at - time.monotonic()), self._fire)

    def _fire(self) -> None:
        self._handle = None
        self._due_at = float("inf")
        now_at = time.monotonic()
        while self._heap and (self._heap[0][0] <= now_at or self._heap[0][2].is_ended):
            heapq.heappop(self._heap)[2].expire()
        if self._heap:
            self._stand_at(self._heap[0][0])


class _OfThread(threading.local):
    """The timer of the event loop that runs on a thread; the next loop's takes its place."""

    loop: asyncio.AbstractEventLoop | None = None
    timer: _Timer


_OF_THREAD = _OfThread()


def _timer_of(loop: asyncio.AbstractEventLoop) -> _Timer:
    if _OF_THREAD.loop is not loop:
        _OF_THREAD.loop = loop
        _OF_THREAD.timer = _Timer()
    return _OF_THREAD.timer
