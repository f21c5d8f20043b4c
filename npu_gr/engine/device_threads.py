"""The device threads and the queue that they share. Other packages use `scheduler.py`.

A thread takes a pass from the queue, runs it, and takes the next pass before it delivers the
results to the event loop. So a thread that finds no next pass delivers just before it sleeps, and
then leaves the interpreter lock (GIL) to the loop that it has woken.

Idle threads are woken once at the end of a turn of the event loop, for all jobs of that turn. Woken
earlier, a thread would wait for the GIL, which the loop holds, and its pass would miss the jobs
that the rest of the turn submits.

A busy loop releases the GIL in each system call, but takes it back before a device thread is awake.
So the switch interval is lowered to `SWITCH_S`, after which a waiting thread forces a release.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
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
from npu_gr.core.health import COMPILE_S, STOP_S, UNKNOWN_S, Worker, limit_s
from npu_gr.engine.queue import Job, JobQueue, JobResult, NextPass, SchedulerConfig

T = TypeVar("T")


class PromptFuture(asyncio.Future[T]):
    """A future that resumes its waiter within `end`, not in the next turn of the event loop.

    An asyncio future resumes its waiter in the next turn, which under load comes after all other
    callbacks that are ready. `end` is called by a callback of its own, so the waiter can run there.

        job ends --> `end`: result --> the waiter's task runs up to its next await

    Only the first waiter is resumed like this; other waiters, and all waiters of a cancelled
    future, are resumed as by asyncio. Event loop only, as every future.
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
            super().add_done_callback(fn, context=context)  # schedules it for the next turn
        return True

    def end(self, result: T | BaseException) -> None:
        """Set the result or the error, and resume the waiter.

        Must not be called within a task, since one task cannot run within another.
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
# Measured at three times the load that an instance sustains: 1,450 ranks/s within the SLO with
# Python's default of 5 ms, 1,570 with this. With 0.1 ms it is also 1,570, but more ranks are late,
# since the loop is interrupted in every turn.
SWITCH_S = 5e-4
LATE = "the deadline passed while waiting for the device"
OUT_OF_MEMORY = (
    "the device is out of memory: lower kv_cache.hbm_bytes, generate.hbm_bytes, "
    "generate.beam_bytes or scheduler.max_batch_requests"
)
_STOPPING = "the instance is stopping"


class Streams:
    """A queue and the streams that run its passes.

    `DeviceThreads` runs them on a device; the simulator lets virtual time pass instead. The `tag`
    of a job is the asyncio future of its result.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        """Start with an empty queue.

        Args:
            config: limits of the queue and of a pass.
            clock: Clock of all instants of the jobs, in seconds.
        """
        self.queue = JobQueue(config)
        # Called after each pass, on its thread, with the jobs and the seconds it took. Its failures
        # are logged.
        self.on_pass: Callable[[list[Job], float], None] = lambda _jobs, _took_s: None
        self.failures_in_a_row = 0
        self.workers: list[Worker] = []  # of each device thread
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        # Estimated end of each stream's pass; an instant in the past = the stream is idle.
        self._pass_ends_at = [float("-inf")] * config.streams

    def start(self) -> None:
        """Begin to run passes. Results go to the current event loop."""
        self._loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        """Let running passes end. Jobs that still wait end with Unavailable."""
        self._stopping = True
        self._deliver([(job, Unavailable(_STOPPING)) for job in self.queue.drain()])

    def submit(self, job: Job, *, force: bool = False) -> asyncio.Future[JobResult[Any]]:
        """Queue a job. Call it on the event loop.

        Args:
            job: Job to queue; this sets its `tag`.
            force: queue it even if the queue is full.

        Raises:
            Overloaded: the queue is full.
            Unavailable: the streams are stopping.
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
        """Make sure that a stream will take the job that was just queued."""
        raise NotImplementedError

    def cancel_at_step(self, job: Job) -> None:
        """End a job after its running step, or at once if it waits."""
        if self.queue.withdraw(job):
            self._deliver([(job, JobResult(None, 0.0, 0.0, steps=job.ran))])

    @property
    def is_idle(self) -> bool:
        """Whether no stream runs a pass."""
        return all(ends_at == float("-inf") for ends_at in self._pass_ends_at)

    def wait_s(self, within_s: float) -> float:
        """Estimate the seconds that a request arriving now would wait for a free stream.

        Args:
            within_s: SLO objective of the request in seconds, which sets the jobs that go first.
        """
        now_at = self._clock()
        running_s = max(0.0, min(self._pass_ends_at) - now_at)
        return running_s + self.queue.ahead_s(now_at + within_s) / len(self._pass_ends_at)

    def _begin(self, stream: int, jobs: list[Job]) -> tuple[float, float]:
        """Record the start of a pass on a stream. Returns its instant and its estimated seconds."""
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
        """Record the end of a pass, and queue the next steps of its jobs.

        Returns the jobs without a next step, with their results.
        """
        now_at = self._clock()
        took_s = now_at - began_at
        self._pass_ends_at[stream] = float("-inf")
        self.queue.slowdown.observe(expected_s, took_s)
        try:
            self.on_pass(jobs, took_s)
        except Exception:  # a device thread must outlive it, as in `_attempt`
            log.exception("the callback on_pass failed")
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
        """Deliver results to the event loop, all of a pass with one wake-up, which is expensive."""
        if not ended:
            return
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(finish, ended)
        except RuntimeError:  # the loop is closed: the process is ending, and nothing waits
            log.debug("a result came after the event loop closed")


class DeviceThreads(Streams):
    """One thread for each stream.

    An idle thread puts its bell (a lock) into `_idle` and sleeps on it. The code that takes a bell
    out of `_idle` must ring it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        stream: Callable[[], AbstractContextManager[None]],
        release: Callable[[], None],
    ) -> None:
        """Make the threads; `start` starts them.

        Args:
            config: limits of the queue and of a pass.
            stream: Factory of the context that a thread stays in, which selects its own stream of
                the device.
            release: Returns unused memory to the device, after a pass found too little.
        """
        super().__init__(config, time.monotonic)
        self._stream = stream
        self._release = release
        # Guards `_idle`. Code that holds it may call the queue, which has its own lock.
        self._lock = threading.Lock()
        self._idle: list[threading.Lock] = []
        self._unannounced = 0  # jobs of this turn of the event loop; no thread was woken for them
        self.workers = [Worker() for _ in range(config.streams)]
        self._running: list[list[Job]] = [[] for _ in range(config.streams)]
        self._threads = [
            threading.Thread(target=self._work, args=(n,), name=f"npu_gr-device-{n}", daemon=True)
            for n in range(config.streams)
        ]

    def start(self) -> None:
        super().start()
        sys.setswitchinterval(SWITCH_S)  # applies to the whole process
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        """End the threads; the jobs of a pass that does not return end with Unavailable."""
        self._stopping = True
        self._ring(len(self._threads))
        give_up_at = time.monotonic() + STOP_S
        for thread, jobs in zip(self._threads, self._running, strict=True):
            if thread.ident is None:
                continue
            await asyncio.to_thread(thread.join, max(0.0, give_up_at - time.monotonic()))
            if thread.is_alive():
                log.error("%s did not end: its pass does not return", thread.name)
                self._deliver([(job, Unavailable(_STOPPING)) for job in jobs])
        await super().stop()

    def _submitted(self) -> None:
        assert self._loop is not None
        if not self._unannounced:
            self._loop.call_soon(self._announce)
        self._unannounced += 1

    def _announce(self) -> None:
        num, self._unannounced = self._unannounced, 0
        self._ring(num)

    def _ring(self, num: int) -> None:
        """Wake up to `num` sleeping threads."""
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
        """Take the next pass, or else add the bell to the idle ones. None = stop."""
        with self._lock:
            if self._stopping:
                return None
            taken = self.queue.take(self._clock())
            if not taken.jobs:
                self._idle.append(bell)
            return taken

    def _sleep(self, bell: threading.Lock, wait_s: float | None) -> None:
        """Sleep until the bell rings, at most `wait_s` seconds."""
        if bell.acquire(timeout=-1 if wait_s is None else wait_s):
            return
        with self._lock:
            if bell in self._idle:
                self._idle.remove(bell)
                return
        bell.acquire()  # another thread has just taken it out of `_idle`, and will ring it

    def _run_pass(self, stream: int, jobs: list[Job]) -> list[Ended]:
        self._running[stream] = jobs
        began_at, expected_s = self._begin(stream, jobs)
        results = self._attempt(jobs, self.workers[stream])
        ended = self._end(stream, jobs, results, began_at, expected_s)
        self._running[stream] = []
        if len(ended) < len(jobs):
            self._ring(len(jobs) - len(ended))
        return ended

    def _attempt(self, jobs: list[Job], worker: Worker, *, is_again: bool = False) -> list[Any]:
        """Run a pass. Returns a result or an error for each job.

        If a pass of several jobs fails, each job runs again by itself, so that one bad job does not
        fail the others. A job that finds too little memory runs again once, after the unused memory
        is returned.
        """
        try:
            dead_s = COMPILE_S if any(job.may_compile for job in jobs) else 0.0
            with worker.busy(pass_limit_s(jobs), dead_s):
                results = list(jobs[0].run([job.work for job in jobs]))
            if len(results) != len(jobs):
                raise RuntimeError(f"the pass returned {len(results)} results for {len(jobs)} jobs")
        except NpuGrError as error:
            if len(jobs) == 1:
                return [error]
        except Exception as error:  # a device thread must outlive every job
            is_short = _is_out_of_memory(error)
            if len(jobs) == 1 and (is_again or not is_short):
                self.failures_in_a_row += 1
                log.exception("a device job failed (%d in a row)", self.failures_in_a_row)
                why = OUT_OF_MEMORY if is_short else f"{type(error).__name__} on the device"
                return [DeviceError(why)]
        else:
            self.failures_in_a_row = 0
            return results
        is_alone = len(jobs) == 1
        if is_alone:
            log.warning("%s; unused memory is returned, and the job runs again", OUT_OF_MEMORY)
            with suppress(RuntimeError):  # of a device that is broken: the job will say so
                self._release()
        return [
            result for job in jobs for result in self._attempt([job], worker, is_again=is_alone)
        ]


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether a device had too little memory; an NPU raises a RuntimeError for it."""
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)


def pass_limit_s(jobs: Sequence[Job]) -> float:
    """Return the seconds after which a pass of these jobs is late."""
    estimates_s = [0.0 if job.may_compile else job.estimate_s for job in jobs]
    return limit_s(sum(estimates_s)) if all(estimates_s) else UNKNOWN_S


def finish(ended: list[Ended]) -> None:
    """Resolve the futures of jobs. Call it on the event loop, outside of any task."""
    left = iter(ended)
    try:
        for job, result in left:
            future: PromptFuture[Any] = job.tag
            job.has_ended = True
            if not future.done():
                future.end(result)
            # its cancelled submitter waits for the device to end
            elif job.let_go is not None and not job.let_go.done():
                job.let_go.set_result(None)
    finally:
        # A waiter has raised SystemExit or KeyboardInterrupt: resolve the other futures too.
        if rest := list(left):
            asyncio.get_running_loop().call_soon(finish, rest)
