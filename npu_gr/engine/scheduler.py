"""One device thread, and the queue in front of it: earliest deadline first, ranks batched together.

The event loop submits and awaits; only the thread touches tensor values, one job or batch at a time, in the order it
takes them. That order is what lets the tiers hand pages on at once: whoever writes to a page that was just given
back is queued behind whoever still reads it.

Invariants:
  S1  every submitted job ends exactly once: a result, an error, or dropped because nobody waits any more
  S2  a job whose deadline has passed, or whose waiter is gone, costs no device time
  S3  never more than `max_queue` jobs wait
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec

from npu_gr.errors import DeadlineExceeded, DeviceError, NpuGrError, Overloaded, Unavailable

T = TypeVar("T")
log = logging.getLogger(__name__)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the queue and of a batch."""

    max_queue: Annotated[int, msgspec.Meta(ge=1)] = 256  # jobs waiting; the next is refused (429)
    max_batch_requests: Annotated[int, msgspec.Meta(ge=1)] = 4  # ranks in one pass; more helps only accelerators
    max_batch_rows: Annotated[int, msgspec.Meta(ge=1)] = 4096  # history and candidate rows in one pass


class BatchWork(Protocol):
    """Work that can share a pass with others of its kind."""

    @property
    def num_rows(self) -> int:
        """Rows that it adds to the pass."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A job's result and where its time went."""

    value: T
    queue_s: float
    device_s: float


class _Job:
    __slots__ = ("batch", "call", "deadline_s", "future", "submitted_s", "taken", "work")

    def __init__(
        self,
        call: Callable[[], Any] | None,
        batch: BatchWork | None,
        deadline_s: float,
        future: asyncio.Future[Done[Any]],
        work: str = "other",
    ) -> None:
        self.call, self.batch, self.deadline_s, self.future, self.work = call, batch, deadline_s, future, work
        self.submitted_s = time.monotonic()
        self.taken = False


class Scheduler:
    """The queue and the thread. `run_batch` scores several works in one pass; it runs on the thread."""

    def __init__(self, config: SchedulerConfig, run_batch: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._config, self._run_batch = config, run_batch
        self._heap: list[tuple[float, int, _Job]] = []
        self._numbers = itertools.count()
        self._waiting = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="npu_gr-device", daemon=True)
        # called on the device thread: requests and rows of a batch; what a pass was, and its seconds
        self.on_batch: Callable[[int, int], None] = lambda _requests, _rows: None
        self.on_worked: Callable[[str, float], None] = lambda _work, _seconds: None
        self.failures_in_a_row = 0

    def start(self) -> None:
        """Start the thread. Results are delivered to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the pass in progress; jobs still waiting end with Unavailable."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        with self._changed:
            left, self._heap, self._waiting = self._heap, [], 0
        for _, _, job in left:
            if not job.future.done():
                job.future.set_exception(Unavailable("the instance is stopping"))

    @property
    def depth(self) -> int:
        """Jobs waiting."""
        return self._waiting

    async def call(
        self, function: Callable[[], T], deadline_s: float, order_s: float | None = None, work: str = "other"
    ) -> Done[T]:
        """Run `function` on the device thread, alone.

        Args:
            function: reads and writes tensors; must not touch the event loop.
            deadline_s: instant on time.monotonic(); it is dropped if it has not begun by then.
            order_s: its place in the queue, as if its deadline were this instant; None = its deadline.
            work: what it is, for the metric of the device's time: rank, prefill, generate, copy, other.

        Raises:
            Overloaded: the queue is full. DeadlineExceeded. DeviceError: the function failed.
        """
        return await self._submit(_Job(function, None, deadline_s, self._future(), work), order_s)

    async def batch(self, work: BatchWork, deadline_s: float) -> Done[Any]:
        """Run `work` in a pass that it may share with others; as `call`."""
        return await self._submit(_Job(None, work, deadline_s, self._future(), "rank"), None)

    def post(self, function: Callable[[], None]) -> asyncio.Future[Done[None]]:
        """Run `function` before every job that waits; it is queued when this returns, and never refused.

        Awaiting the result is optional. Unavailable once the scheduler stops.
        """
        job = _Job(function, None, float("inf"), self._future())
        with self._changed:
            if self._stopping:
                job.future.set_exception(Unavailable("the instance is stopping"))
            else:
                heapq.heappush(self._heap, (float("-inf"), next(self._numbers), job))
                self._waiting += 1
                self._changed.notify()
        return job.future

    def _future(self) -> asyncio.Future[Done[Any]]:
        assert self._loop is not None, "start() first"
        return self._loop.create_future()

    async def _submit(self, job: _Job, order_s: float | None) -> Done[Any]:
        with self._changed:
            if self._stopping:
                raise Unavailable("the instance is stopping")
            if self._waiting >= self._config.max_queue:
                raise Overloaded(f"{self._waiting} jobs wait for the device, the limit is {self._config.max_queue}")
            order_s = job.deadline_s if order_s is None else order_s
            heapq.heappush(self._heap, (order_s, next(self._numbers), job))
            self._waiting += 1
            self._changed.notify()
        return await job.future

    def _take(self) -> list[_Job]:
        """The next job, or a batch of ranks; waits for one. Empty = stop."""
        with self._changed:
            while not self._heap and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return []
            taken: list[_Job] = []
            rows = 0
            while self._heap and len(taken) < self._config.max_batch_requests:
                job = self._heap[0][2]
                if taken and (job.batch is None or rows + job.batch.num_rows > self._config.max_batch_rows):
                    break
                heapq.heappop(self._heap)
                self._waiting -= 1
                if job.future.cancelled():
                    continue
                if job.deadline_s <= time.monotonic():
                    self._deliver(job, DeadlineExceeded("the deadline passed while waiting for the device"))
                    continue
                taken.append(job)
                if job.batch is None:
                    break
                rows += job.batch.num_rows
            return taken or [_NOTHING]

    def _work(self) -> None:
        while jobs := self._take():
            if jobs[0] is _NOTHING:
                continue
            began_s = time.monotonic()
            results = self._attempt(jobs)
            took_s = time.monotonic() - began_s
            self.on_worked(jobs[0].work, took_s)
            if jobs[0].batch is not None:
                self.on_batch(len(jobs), sum(job.batch.num_rows for job in jobs if job.batch is not None))
            for job, result in zip(jobs, results, strict=True):
                if isinstance(result, NpuGrError):
                    self._deliver(job, result)
                else:
                    self._deliver(job, Done(result, began_s - job.submitted_s, took_s))

    def _attempt(self, jobs: list[_Job]) -> list[Any]:
        """Results or errors, one a job. A batch that fails is tried again one by one: one bad job is one error."""
        try:
            if jobs[0].batch is not None:
                results = list(self._run_batch([job.batch for job in jobs]))
            else:
                assert jobs[0].call is not None
                results = [jobs[0].call()]
        except NpuGrError as error:
            if len(jobs) == 1:
                return [error]
        except Exception as error:  # the device thread's top loop
            if len(jobs) == 1:
                self.failures_in_a_row += 1
                log.exception("a device job failed (%d in a row)", self.failures_in_a_row)
                return [DeviceError(f"{type(error).__name__} on the device")]
        else:
            self.failures_in_a_row = 0
            return results
        return [result for job in jobs for result in self._attempt([job])]

    def _deliver(self, job: _Job, result: Done[Any] | NpuGrError) -> None:
        def finish() -> None:
            if job.future.done():  # nobody waits any more
                return
            if isinstance(result, NpuGrError):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)

        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(finish)
        except RuntimeError:  # the loop is closed: the process is ending and nobody waits
            log.debug("a result came after the event loop closed")


_NOTHING: Any = object()
