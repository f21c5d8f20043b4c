"""The device threads, and the queue in front of them.

The event loop submits and awaits; only the threads touch tensor values. Each takes a pass from the queue (`queue.py`
decides which), runs it to its end and delivers the results. With several streams several passes run at once, over
one copy of the weights.

Invariants:
  S1  every submitted job ends exactly once: a result, an error, or dropped because nobody waits any more
  S2  a job whose deadline has passed, or whose waiter is gone, costs no device time
  S3  a submitter that is cancelled goes on only when its job will not run, or has run: what the job reads and writes
      (leases, pages) is the submitter's to hold, and stays held as long as the device touches it
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from npu_gr.core.errors import DeadlineExceeded, DeviceError, NpuGrError, Overloaded, Unavailable
from npu_gr.engine.queue import Demand, Job, JobQueue, SchedulerConfig, Step

T = TypeVar("T")
log = logging.getLogger(__name__)

Run = Callable[[Sequence[Any]], Sequence[Any]]


class BatchWork(Protocol):
    """Work that can share a pass with others of its kind."""

    @property
    def demand(self) -> Demand:
        """What it adds to the pass."""
        ...


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A job's result and where its time went."""

    value: T
    queue_s: float
    device_s: float
    batch_size: int = 1
    steps: int = 1  # of a sequence, that ran


class Urgency:
    """When something is wanted, which may become earlier while it waits or runs in parts, or not at all."""

    def __init__(self, order_at: float, arrived_at: float | None = None) -> None:
        """`arrived_at`: when it was first wanted, for what runs in parts; None = each part counts by itself."""
        self.order_at, self.arrived_at, self.is_cut = order_at, arrived_at, False
        self._on_change: Callable[[], None] | None = None

    def hasten(self, order_at: float) -> None:
        """Wanted by then at the latest."""
        if order_at < self.order_at:
            self.order_at = order_at
            if self._on_change is not None:
                self._on_change()

    def cut(self) -> None:
        """A sequence ends with the step that runs, without an error."""
        self.is_cut = True
        if self._on_change is not None:
            self._on_change()

    @contextlib.contextmanager
    def applied(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Tell `on_change` of every change within the block."""
        self._on_change = on_change
        try:
            yield
        finally:
            self._on_change = None


class Scheduler:
    """The queue and its threads."""

    def __init__(
        self, config: SchedulerConfig, stream: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """`stream`: a device thread's own queue of work on the device, for as long as the thread runs."""
        self.config, self._stream = config, stream
        self._queue = JobQueue(config)
        self._changed = threading.Condition()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(n,), name=f"npu_gr-device-{n}", daemon=True)
            for n in range(config.streams)
        ]
        # called on a device thread: requests and rows of a shared pass; what a pass was, and its seconds
        self.on_batch: Callable[[int, int], None] = lambda _requests, _rows: None
        self.on_worked: Callable[[str, float], None] = lambda _kind, _seconds: None
        self.failures_in_a_row = 0
        self._ends_at = [0.0] * config.streams  # when each stream's pass should end; in the past: it has none

    def start(self) -> None:
        """Start the threads. Results are delivered to the running event loop."""
        self._loop = asyncio.get_running_loop()
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """End the threads after the passes in progress; jobs still waiting end with Unavailable."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                await asyncio.to_thread(thread.join)
        with self._changed:
            left = self._queue.drain()
        for job in left:
            self._deliver(job, Unavailable("the instance is stopping"))

    @property
    def depth(self) -> int:
        """Jobs waiting."""
        return len(self._queue)

    def wait_s(self, objective_s: float) -> float:
        """How long a request that comes now would wait for the device: for what runs, and what goes before it.

        By estimates, and by how far passes have been from theirs lately.

        Args:
            objective_s: it should be done so long from now, which is its place in the queue.
        """
        with self._changed:
            now_at = time.monotonic()
            ahead_s = self._queue.ahead_s(now_at + min(objective_s, self.config.aging_s))
            running_s = max(0.0, min(self._ends_at) - now_at)
        return running_s + ahead_s / self.config.streams

    @property
    def pressure(self) -> float:
        """Work that waits for the device, each request's part in objectives of its own kind."""
        return self._queue.pressure / self.config.streams

    async def call(
        self,
        function: Callable[[], T],
        deadline_at: float,
        order_at: float | Urgency | None = None,
        *,
        takes_s: float = 0.0,
        is_sheddable: bool = False,
        kind: str = "other",
    ) -> Done[T]:
        """Run `function` on a device thread, alone; else as `sequence`."""
        one = Step(function, takes_s)
        job = self._job([one], deadline_at, order_at, is_sheddable, kind)
        if not isinstance(order_at, Urgency):
            return await self._submit(job)
        with order_at.applied(lambda: self._hasten(job, order_at.order_at)):
            return await self._submit(job)

    async def sequence(
        self,
        steps: Sequence[Step],
        deadline_at: float,
        urgency: Urgency,
        *,
        is_sheddable: bool = False,
        kind: str = "other",
    ) -> Done[Any]:
        """Run functions on device threads, each alone and after the one before; what is more urgent comes between.

        Args:
            steps: at least one; their works read and write tensors and must not touch the event loop.
            deadline_at: instant on time.monotonic(); what has not begun by then is dropped.
            urgency: its place in the queue; if it is cut, what has not begun does not run.
            is_sheddable: it may be refused later, to make room for one that is not.
            kind: for the metric of the device's time: prefill, generate, copy, other.

        Returns:
            of the last step that ran, and how many did.

        Raises:
            Overloaded: the queue is full. DeadlineExceeded. DeviceError: a function failed.
        """
        job = self._job(steps, deadline_at, urgency, is_sheddable, kind)

        def changed() -> None:
            if urgency.is_cut:
                self._cut(job)
            else:
                self._hasten(job, urgency.order_at)

        if urgency.is_cut:
            return Done(None, 0.0, 0.0, steps=0)
        with urgency.applied(changed):
            return await self._submit(job)

    def _job(
        self,
        steps: Sequence[Step],
        deadline_at: float,
        order_at: float | Urgency | None,
        is_sheddable: bool,
        kind: str,
    ) -> Job:
        return Job(
            run=_each,
            work=steps[0].work,
            takes_s=steps[0].takes_s,
            rest=steps[1:],
            deadline_at=deadline_at,
            order_at=deadline_at
            if order_at is None
            else order_at.order_at
            if isinstance(order_at, Urgency)
            else order_at,
            arrived_at=order_at.arrived_at if isinstance(order_at, Urgency) else None,
            is_sheddable=is_sheddable,
            kind=kind,
        )

    async def batch(
        self,
        work: BatchWork,
        run: Run,
        deadline_at: float,
        *,
        objective_s: float = float("inf"),
        arrived_at: float | None = None,
        takes_s: float = 0.0,
        kind: str = "rank",
    ) -> Done[Any]:
        """Run `work` in a pass that it may share with others of the same `run`; else as `call`.

        Args:
            objective_s: its request should be done so long after it came, which is its place in the queue.
            arrived_at: when the request came; None = now.
            takes_s: an estimate.
        """
        arrived_at = time.monotonic() if arrived_at is None else arrived_at
        return await self._submit(
            Job(
                run=run,
                work=work,
                kind=kind,
                shares=True,
                demand=work.demand,
                deadline_at=deadline_at,
                order_at=arrived_at + objective_s,
                arrived_at=arrived_at,
                objective_s=objective_s,
                takes_s=takes_s,
            )
        )

    def post(self, function: Callable[[], None]) -> asyncio.Future[Done[None]]:
        """Run `function` before every job that waits; it is queued when this returns, and never refused.

        Awaiting the result is optional. Unavailable once the scheduler stops.
        """
        job = Job(run=_each, work=function, order_at=float("-inf"), tag=self._future())
        with self._changed:
            if self._stopping:
                job.tag.set_exception(Unavailable("the instance is stopping"))
            else:
                self._queue.put(job, time.monotonic(), force=True)
                self._changed.notify()
        future: asyncio.Future[Done[None]] = job.tag
        return future

    async def finished(self, wait: Callable[[], None]) -> None:
        """Run `wait` on a thread of its own, for what goes on beside the device threads; S3 holds for it too."""
        future = asyncio.ensure_future(asyncio.to_thread(wait))
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({future})
            raise

    def _future(self) -> asyncio.Future[Done[Any]]:
        assert self._loop is not None, "start() first"
        return self._loop.create_future()

    def _hasten(self, job: Job, order_at: float) -> None:
        with self._changed:
            self._queue.hasten(job, order_at)

    def _cut(self, job: Job) -> None:
        with self._changed:
            is_out = self._queue.withdraw(job)
        if is_out:
            self._deliver(job, Done(None, 0.0, 0.0, steps=job.ran))

    async def _submit(self, job: Job) -> Done[Any]:
        future = job.tag = self._future()
        with self._changed:
            if self._stopping:
                raise Unavailable("the instance is stopping")
            shed = self._queue.put(job, time.monotonic())
            self._changed.notify()
        if shed is not None:
            self._deliver(shed, Overloaded("made room for a request that is not sheddable"))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            with self._changed:
                never_ran = self._queue.withdraw(job)
            while not never_ran and not future.done():  # S3
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({future})
            if future.done() and not future.cancelled():
                future.exception()  # seen: nobody else will
            raise

    def _take(self) -> list[Job]:
        """The next pass; waits for one. Empty = stop."""
        with self._changed:
            while not self._stopping:
                taken = self._queue.take(time.monotonic())
                for job in taken.expired:
                    self._deliver(job, DeadlineExceeded("the deadline passed while waiting for the device"))
                if taken.jobs:
                    return taken.jobs
                self._changed.wait(taken.wait_s)
        return []

    def _work(self, stream: int) -> None:
        with self._stream():
            self._work_off(stream)

    def _work_off(self, stream: int) -> None:
        while jobs := self._take():
            began_at, expected_s = time.monotonic(), sum(job.takes_s for job in jobs)
            self._ends_at[stream] = began_at + expected_s * self._queue.pace.value
            results = self._attempt(jobs)
            took_s = time.monotonic() - began_at
            self._ends_at[stream] = 0.0
            self._queue.pace.observe(expected_s, took_s)
            self.on_worked(jobs[0].kind, took_s)
            if jobs[0].shares:
                self.on_batch(len(jobs), sum(job.demand.tokens + job.demand.rows for job in jobs))
            for job, result in zip(jobs, results, strict=True):
                if isinstance(result, NpuGrError):
                    self._deliver(job, result)
                elif not self._goes_on(job):
                    self._deliver(job, Done(result, began_at - job.submitted_at, took_s, len(jobs), job.ran))

    def _goes_on(self, job: Job) -> bool:
        with self._changed:
            goes_on = self._queue.go_on(job, time.monotonic())
            if goes_on:
                self._changed.notify()
        return goes_on

    def _attempt(self, jobs: list[Job]) -> list[Any]:
        """Results or errors, one a job. A batch that fails is tried again one by one: one bad job is one error."""
        try:
            results = list(jobs[0].run([job.work for job in jobs]))
        except NpuGrError as error:
            if len(jobs) == 1:
                return [error]
        except Exception as error:  # a device thread's top loop
            if len(jobs) == 1:
                self.failures_in_a_row += 1
                log.exception("a device job failed (%d in a row)", self.failures_in_a_row)
                return [DeviceError(f"{type(error).__name__} on the device")]
        else:
            self.failures_in_a_row = 0
            return results
        return [result for job in jobs for result in self._attempt([job])]

    def _deliver(self, job: Job, result: Done[Any] | NpuGrError) -> None:
        future = job.tag

        def finish() -> None:
            if future.done():
                return
            if isinstance(result, NpuGrError):
                future.set_exception(result)
            else:
                future.set_result(result)

        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(finish)
        except RuntimeError:  # the loop is closed: the process is ending and nobody waits
            log.debug("a result came after the event loop closed")


def _each(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    return [function() for function in functions]
