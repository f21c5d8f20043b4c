"""The device threads and the queue that they share. The rest of the product calls `scheduler.py`.

Each thread takes a pass from the queue, runs it to its end, and looks for the next one before it
delivers the results to the event loop: so an idle thread delivers as its last act before it sleeps,
and leaves the interpreter to the loop that it has just woken.

Idle threads are woken at the end of a turn of the event loop, once for all jobs of the turn. A
thread that wakes before waits for the interpreter anyway, for the loop has it, and takes from the
pass what the turn would still have added.

A busy loop gives the interpreter up at each of its system calls, and has it again before a device
thread is awake. So a device thread asks for it, as Python's threads do after a `SWITCH_S` in which
nobody else had it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from typing import Any, Self, TypeVar

from npu_gr.core.errors import (
    DeadlineExceeded,
    DeviceError,
    NpuGrError,
    Overloaded,
    Rejection,
    Unavailable,
)
from npu_gr.engine.queue import Job, JobQueue, JobResult, NextPass, SchedulerConfig

T = TypeVar("T")


class PromptFuture(asyncio.Future[T]):
    """A future whose waiter goes on within the call that ends it, not in the next turn of the event loop.

    A future of asyncio wakes who waits for it in the next turn, which under load takes as long as
    all that others have begun meanwhile. What ends a job on the device is a turn by itself already,
    so its waiter need not wait for one more.

        job ends --> `end`: result --> the waiter's task goes on, up to what it waits for next

    Only the first waiter is woken so; others, and all of a future that is cancelled, are woken as
    asyncio does it. Event loop only, as every future.
    """

    _waiter: tuple[Callable[[Any], object], Context | None] | None = None

    def add_done_callback(
        self, fn: Callable[[Self], object], /, *, context: Context | None = None
    ) -> None:
        if self._waiter is None and not self.done():
            self._waiter = (fn, context)
        else:
            super().add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[Self], object], /) -> int:
        if self._waiter is not None and self._waiter[0] == fn:
            self._waiter = None
            return 1 + super().remove_done_callback(fn)
        return super().remove_done_callback(fn)

    def cancel(self, msg: Any = None) -> bool:
        if not super().cancel(msg):
            return False
        if self._waiter is not None:
            fn, context = self._waiter
            self._waiter = None
            super().add_done_callback(fn, context=context)  # which calls it soon
        return True

    def end(self, result: T | BaseException) -> None:
        """Set the result or the error, and let the waiter go on.

        Not within a task: it would be within another.
        """
        if isinstance(result, BaseException):
            self.set_exception(result)
        else:
            self.set_result(result)
        if self._waiter is not None:
            fn, context = self._waiter
            self._waiter = None
            if context is None:
                fn(self)
            else:
                context.run(fn, self)


log = logging.getLogger(__name__)

Ended = tuple[Job, JobResult[Any] | NpuGrError]
# At three times what an instance can do, 1,450 ranks/s are in time with Python's 5 ms, and 1,570
# with this. With 0.1 ms as many are, but more are late: the loop is interrupted in each of its
# turns.
SWITCH_S = 5e-4
LATE = "the deadline passed while waiting for the device"
_STOPPING = "the instance is stopping"


class Streams:
    """One queue, and what runs its passes.

    A job's `tag` is the asyncio future that gets its result.

    `DeviceThreads` run them on a device; the simulator lets virtual time pass instead.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        """Nothing runs yet.

        Args:
            config: limits of the queue and of a pass.
            clock: in seconds; a job's instants are its.
        """
        self.queue = JobQueue(config)
        # Called after each pass with its jobs and the seconds it took, on the thread that ran it.
        # Failures are logged.
        self.on_pass: Callable[[list[Job], float], None] = lambda _jobs, _took_s: None
        self.failures_in_a_row = 0
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        # by estimate; in the past: the stream is idle
        self._pass_ends_at = [float("-inf")] * config.streams

    def start(self) -> None:
        """Begin to run passes. Results go to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        """Let the passes that run end. Jobs that still wait end with Unavailable."""
        self._stopping = True
        self._deliver([(job, Unavailable(_STOPPING)) for job in self.queue.drain()])

    def submit(self, job: Job, *, force: bool = False) -> asyncio.Future[JobResult[Any]]:
        """Queue a job. Call it on the event loop.

        Args:
            job: its `tag` is set here.
            force: queue it even if the queue is full.

        Raises:
            Overloaded: the queue is full. Unavailable: the streams are stopping.
        """
        assert self._loop is not None, "start() first"
        future: PromptFuture[JobResult[Any]] = PromptFuture(loop=self._loop)
        job.tag = future
        if self._stopping:
            raise Unavailable(_STOPPING)
        shed = self.queue.put(job, self._clock(), force=force)
        self._submitted()
        if shed is not None:
            self._deliver(
                [(shed, Overloaded("dropped to make room for a request", reason=Rejection.SHED))]
            )
        return future

    def _submitted(self) -> None:
        """See to it that a job that was just queued runs."""
        raise NotImplementedError

    def cancel_at_step(self, job: Job) -> None:
        """End a job after the step that runs; at once, with what has run, if it waits."""
        if self.queue.withdraw(job):
            self._deliver([(job, JobResult(None, 0.0, 0.0, steps=job.ran))])

    def wait_s(self, within_s: float) -> float:
        """Estimate how long a request that comes now would wait: for a stream, and for the jobs that go before it.

        Args:
            within_s: the request's order counts from now on by so many seconds.
        """
        now_at = self._clock()
        running_s = max(0.0, min(self._pass_ends_at) - now_at)
        return running_s + self.queue.ahead_s(now_at + within_s) / len(self._pass_ends_at)

    def _begin(self, stream: int, jobs: list[Job]) -> tuple[float, float]:
        """Note that a pass begins on a stream. Returns when, and its estimated seconds."""
        began_at = self._clock()
        expected_s = sum([job.estimate_s for job in jobs])
        self._pass_ends_at[stream] = began_at + expected_s * self.queue.slowdown.value
        return began_at, expected_s

    def _end(
        self,
        stream: int,
        jobs: list[Job],
        results: Sequence[Any],
        began_at: float,
        expected_s: float,
    ) -> list[Ended]:
        """Note that a pass has ended, and queue the next steps of its jobs.

        Returns the jobs that have none.
        """
        now_at = self._clock()
        took_s = now_at - began_at
        self._pass_ends_at[stream] = float("-inf")
        self.queue.slowdown.observe(expected_s, took_s)
        try:
            self.on_pass(jobs, took_s)
        except Exception:  # as in `_attempt`
            log.exception("a pass could not be noted")
        ended: list[Ended] = []
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, NpuGrError):
                ended.append((job, result))
            elif not self.queue.put_next_step(job, now_at):
                ended.append(
                    (
                        job,
                        JobResult(result, began_at - job.submitted_at, took_s, len(jobs), job.ran),
                    )
                )
        return ended

    def _deliver(self, ended: list[Ended]) -> None:
        """Hand the ends of jobs to the event loop: all of a pass in one wake-up, which costs more than they do."""
        if not ended:
            return
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(finish, ended)
        except (
            RuntimeError
        ):  # the loop is closed: the process is ending, and nobody waits for the result
            log.debug("a result came after the event loop closed")


class DeviceThreads(Streams):
    """A thread a stream. Idle ones sleep, and whoever takes a sleeping thread's bell out of `_idle` rings it."""

    def __init__(
        self, config: SchedulerConfig, stream: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Make the threads; they do not run yet.

        Args:
            config: limits of the queue and of a pass.
            stream: enters a thread's own stream of work on the device, for as long as the thread
                runs.
        """
        super().__init__(config, time.monotonic)
        self._stream = stream
        # of `_idle`; whoever has it may ask the queue, whose lock is another
        self._lock = threading.Lock()
        self._idle: list[threading.Lock] = []
        self._untold = 0  # jobs of this turn of the event loop, of which idle threads do not know
        self._threads = [
            threading.Thread(target=self._work, args=(n,), name=f"npu_gr-device-{n}", daemon=True)
            for n in range(config.streams)
        ]

    def start(self) -> None:
        super().start()
        sys.setswitchinterval(SWITCH_S)  # of the process
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        self._stopping = True
        self._ring(len(self._threads))
        for thread in self._threads:
            if thread.ident is not None:
                await asyncio.to_thread(thread.join)
        await super().stop()

    def _submitted(self) -> None:
        assert self._loop is not None
        if not self._untold:
            self._loop.call_soon(self._tell)
        self._untold += 1

    def _tell(self) -> None:
        untold, self._untold = self._untold, 0
        self._ring(untold)

    def _ring(self, num: int) -> None:
        """Wake so many of the threads that sleep."""
        with self._lock:
            bells, self._idle = self._idle[:num], self._idle[num:]
        for bell in bells:
            bell.release()

    # ---- a device thread

    def _work(self, stream: int) -> None:
        bell = threading.Lock()
        bell.acquire()
        ended: list[Ended] = []
        with self._stream():
            while (taken := self._take(bell)) is not None:
                self._deliver(ended + [(job, DeadlineExceeded(LATE)) for job in taken.expired])
                if taken.jobs:
                    ended = self._run_pass(stream, taken.jobs)
                else:
                    ended = []
                    self._sleep(bell, taken.wait_s)
        self._deliver(ended)

    def _take(self, bell: threading.Lock) -> NextPass | None:
        """Take the next pass, or be counted among those that sleep. None = stop."""
        with self._lock:
            if self._stopping:
                return None
            taken = self.queue.take(self._clock())
            if not taken.jobs:
                self._idle.append(bell)
            return taken

    def _sleep(self, bell: threading.Lock, wait_s: float | None) -> None:
        """Wait until somebody rings, or so many seconds."""
        if bell.acquire(timeout=-1 if wait_s is None else wait_s):
            return
        with self._lock:
            if bell in self._idle:
                self._idle.remove(bell)
                return
        bell.acquire()  # somebody has taken it out, and rings it now

    def _run_pass(self, stream: int, jobs: list[Job]) -> list[Ended]:
        began_at, expected_s = self._begin(stream, jobs)
        ended = self._end(stream, jobs, self._attempt(jobs), began_at, expected_s)
        if len(ended) < len(jobs):
            self._ring(len(jobs) - len(ended))
        return ended

    def _attempt(self, jobs: list[Job]) -> list[Any]:
        """Run a pass. Returns a result or an error for each job.

        If a pass of several jobs fails, each runs again by itself: one bad job is one error, not a
        failed pass.
        """
        try:
            results = list(jobs[0].run([job.work for job in jobs]))
            if len(results) != len(jobs):
                raise RuntimeError(f"{len(results)} results of {len(jobs)} jobs")
        except NpuGrError as error:
            if len(jobs) == 1:
                return [error]
        except Exception as error:  # the top of a device thread: it must outlive every job
            if len(jobs) == 1:
                self.failures_in_a_row += 1
                log.exception("a device job failed (%d in a row)", self.failures_in_a_row)
                return [DeviceError(f"{type(error).__name__} on the device")]
        else:
            self.failures_in_a_row = 0
            return results
        return [result for job in jobs for result in self._attempt([job])]


def finish(ended: list[Ended]) -> None:
    """End the futures of jobs, on the event loop and within no task."""
    left = iter(ended)
    try:
        for job, result in left:
            future: PromptFuture[Any] = job.tag
            job.has_ended = True
            if not future.done():
                future.end(result)
            elif (
                job.let_go is not None
            ):  # its submitter was cancelled, and waits until the device has let go of it
                job.let_go.set_result(None)
    finally:
        # the process is told to end: those who still wait must not wait for ever
        if rest := list(left):
            asyncio.get_running_loop().call_soon(finish, rest)
