"""The scheduler: submits jobs for the device, and awaits them on the event loop.

`queue.py` orders the jobs, `device_threads.py` runs them.

    call      one function, alone
    sequence  functions one after the other, with more urgent jobs in between (chunks of a prefill)
    batch     work that shares a pass with other work of the same function (ranks, generates)
    post      one function ahead of all waiting jobs (an overwrite of pages)
    alone     one function while no pass runs (a delta of weights)

Only device threads touch tensor values. With several streams, several passes run at a time over one
copy of the weights.

Invariants, held by tests/engine/test_scheduler.py:
  S1  every submitted job ends exactly once: with a result, with an error, or dropped because its
      submitter was cancelled
  S2  a job whose deadline has passed, or whose submitter was cancelled, costs no device time
  S3  a cancelled submitter continues only when its job has run or will not run: so it keeps the
      leases and pages of the job for as long as the device may touch them
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from npu_gr.core.errors import Unavailable
from npu_gr.core.health import UNKNOWN_S, Worker
from npu_gr.engine.device_threads import DeviceThreads, Streams
from npu_gr.engine.queue import BatchFn, Demand, Job, JobOrder, JobResult, JobStep, SchedulerConfig

T = TypeVar("T")


class BatchWork(Protocol):
    """Work that can share a pass with other work."""

    @property
    def demand(self) -> Demand:
        """Size of the work, which counts towards the limits of a pass."""
        ...


class Scheduler:
    """Submits all jobs for one device. Every method is for the event loop."""

    def __init__(
        self,
        config: SchedulerConfig,
        stream: Callable[[], AbstractContextManager[None]] = nullcontext,
        streams: Streams | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Run nothing before `start`.

        Args:
            config: limits of the queue and of a pass.
            stream: Factory of the context that a device thread stays in, which selects its own
                stream of the device.
            streams: Runner of the passes; None = `DeviceThreads`.
            release: Returns unused memory to the device, after a pass found too little.
        """
        self.config = config
        self._streams = DeviceThreads(config, stream, release) if streams is None else streams
        self._streams.on_pass = self._pass_ended
        self._copies = Worker()
        # Without these nothing works: the device threads, and the waits for copies between tiers.
        self.workers = {f"device_{n}": one for n, one in enumerate(self._streams.workers)}
        self.workers["copies"] = self._copies
        # Called on a device thread after each pass that may be shared.
        self.on_batch: Callable[[str, int, int], None] = lambda _kind, _requests, _rows: None
        # Called on a device thread after every pass.
        self.on_worked: Callable[[str, float], None] = lambda _kind, _seconds: None

    def start(self) -> None:
        """Begin to run jobs. Results go to the current event loop."""
        self._streams.start()

    async def stop(self) -> None:
        """Let running passes end. Jobs that still wait end with Unavailable."""
        await self._streams.stop()

    def weigh(self, tenant_weights: Mapping[str, float]) -> None:
        """Set the weights of the tenants' shares of the queue (default 1)."""
        self._streams.queue.shares.weights = tenant_weights

    @property
    def depth(self) -> int:
        """Number of waiting jobs."""
        return len(self._streams.queue)

    @property
    def failures_in_a_row(self) -> int:
        """Jobs that failed on the device since the last one that did not, except `NpuGrError`s."""
        return self._streams.failures_in_a_row

    @property
    def pressure(self) -> float:
        """Queued work of requests in objectives (see `JobQueue.pressure`), for each stream."""
        return self._streams.queue.pressure / self.config.streams

    def wait_s(self, objective_s: float) -> float:
        """Estimate the seconds that a request arriving now would wait for the device.

        It counts the running pass and the jobs that go first, by their estimates times the recent
        slowdown of passes.

        Args:
            objective_s: SLO objective of the request, from arrival to answer, which sets its place
                in the queue.
        """
        return self._streams.wait_s(min(objective_s, self.config.aging_s))

    async def call(
        self,
        function: Callable[[], T],
        deadline_at: float,
        order: JobOrder | None = None,
        *,
        estimate_s: float = 0.0,
        preemptible: bool = False,
        kind: str = "other",
    ) -> JobResult[T]:
        """Run `function` on a device thread, alone.

        Args:
            function: Function that reads and writes tensors; it must not touch the event loop.
            deadline_at: instant on time.monotonic(); a function that has not begun by then is
                dropped.
            order: Place in the queue, which may be hastened while the job waits; None = by the
                deadline.
            estimate_s: Estimated device seconds.
            preemptible: True = it waits behind every request, and a full queue may drop it.
            kind: label of the device-time metric: prefill, generate, copy, match, other.

        Raises:
            Overloaded: the queue is full, or a request took the place of this preemptible job.
            DeadlineExceeded: the job had not begun by its deadline.
            DeviceError: the function failed.
            Unavailable: the scheduler stops.
        """
        order = JobOrder(deadline_at) if order is None else order
        job = _job([JobStep(function, estimate_s)], deadline_at, order, preemptible, kind)
        with order.applied(lambda: self._streams.queue.hasten(job, order.order_at)):
            return await self._submit(job)

    async def sequence(
        self,
        steps: Sequence[JobStep],
        deadline_at: float,
        order: JobOrder,
        *,
        preemptible: bool = False,
        kind: str = "other",
    ) -> JobResult[Any]:
        """Run functions on device threads, one after the other; urgent jobs may run in between.

        Args:
            steps: One or more. Their works read and write tensors, and must not touch the event
                loop.
            deadline_at: instant on time.monotonic(); steps that have not begun by then are dropped.
            order: Place in the queue. If it is cancelled at a step, the sequence ends after the
                step that runs.
            preemptible: True = it waits behind every request, and a full queue may drop it.
            kind: label of the device-time metric.

        Returns:
            The result of the last step that ran, and the number of steps that ran.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError, Unavailable: as `call`.
        """
        if order.is_cancelled_at_step:
            return JobResult(None, 0.0, 0.0, steps=0)
        job = _job(steps, deadline_at, order, preemptible, kind)

        def changed() -> None:
            if order.is_cancelled_at_step:
                self._streams.cancel_at_step(job)
            else:
                self._streams.queue.hasten(job, order.order_at)

        with order.applied(changed):
            return await self._submit(job)

    async def batch(
        self,
        work: BatchWork,
        run: BatchFn,
        deadline_at: float,
        *,
        objective_s: float = float("inf"),
        arrived_at: float | None = None,
        tenant: str = "",
        estimate_s: float = 0.0,
        max_requests: int | None = None,
        kind: str = "rank",
    ) -> JobResult[Any]:
        """Run `work` in a pass that it may share with other work of the same `run`.

        Bound methods of two objects differ, so works of two versions of a model never share a pass.

        Args:
            work: Element of the list that `run` gets.
            run: Computes one result for each work of a pass, on a device thread.
            deadline_at: instant on time.monotonic(); work that has not begun by then is dropped.
            objective_s: SLO objective of the request, from arrival to answer; its place in the
                queue is `arrived_at + objective_s`.
            arrived_at: Instant at which the request arrived, from which aging counts; None = now.
            tenant: Tenant of the request; one below its share of the queue goes first.
            estimate_s: Estimated device seconds of this work alone.
            max_requests: Most works in a pass, the same for every work of one `run`; None =
                `scheduler.max_batch_requests`.
            kind: label of the device-time metric.

        Raises:
            Overloaded, DeadlineExceeded, DeviceError, Unavailable: as `call`.
        """
        arrived_at = time.monotonic() if arrived_at is None else arrived_at
        return await self._submit(
            Job(
                run=run,
                work=work,
                kind=kind,
                shares=True,
                max_requests=max_requests,
                demand=work.demand,
                deadline_at=deadline_at,
                order_at=arrived_at + objective_s,
                arrived_at=arrived_at,
                objective_s=objective_s,
                tenant=tenant,
                estimate_s=estimate_s,
                # every request has a deadline, and the self-test of a new model has none
                may_compile=deadline_at == float("inf"),
            )
        )

    def post(self, function: Callable[[], None]) -> asyncio.Future[JobResult[None]]:
        """Run `function` ahead of all waiting jobs. It is queued at once, and never rejected.

        Returns:
            A future of its end, which need not be awaited; Unavailable if the scheduler stops.
        """
        job = Job(run=_each, work=function, order_at=float("-inf"))
        try:
            return self._streams.submit(job, force=True)
        except Unavailable as error:
            future: asyncio.Future[JobResult[None]] = job.tag
            future.set_exception(error)
            return future

    async def finished(self, wait: Callable[[], None]) -> None:
        """Wait on a separate thread for device work that no device thread waits for; S3 holds.

        Args:
            wait: Function that blocks until the device work has ended.
        """
        future = asyncio.ensure_future(asyncio.to_thread(wait))
        with self._copies.busy(UNKNOWN_S):
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError:
                await _ended(future)
                raise

    async def _submit(self, job: Job) -> JobResult[Any]:
        future = self._streams.submit(job)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled():  # it ended in the same turn of the event loop
                future.exception()  # marks it as retrieved, or asyncio would log it
            elif not self._streams.queue.withdraw(job) and not job.has_ended:
                job.let_go = asyncio.get_running_loop().create_future()
                await _ended(job.let_go)
            raise

    def _pass_ended(self, jobs: list[Job], took_s: float) -> None:
        kind = jobs[0].kind
        self.on_worked(kind, took_s)
        if jobs[0].shares:
            self.on_batch(kind, len(jobs), sum(job.demand.tokens + job.demand.rows for job in jobs))


def is_idle(scheduler: Scheduler) -> bool:
    """Return whether no job waits and no pass runs."""
    return not scheduler.depth and scheduler._streams.is_idle


async def alone(scheduler: Scheduler, function: Callable[[], T], pause: Callable[[], None]) -> T:
    """Run `function` while no pass runs on any stream, ahead of all waiting jobs.

    Every device thread ends its pass and waits, the last one runs the function, and all go on. Once
    it is queued it runs, even if the caller is cancelled. At most one call at a time: two would
    wait for each other's threads.

    Args:
        scheduler: Runs the passes.
        function: Function that may write what passes read.
        pause: Waits on a device thread until its stream has ended its work.

    Raises:
        DeviceError: the function failed, or a thread did not come within `UNKNOWN_S`.
        Unavailable: the scheduler stops.
    """
    result: list[T] = []
    streams = scheduler.config.streams
    barrier = threading.Barrier(streams, lambda: result.append(function()))

    def meet() -> None:
        pause()
        barrier.wait(UNKNOWN_S)

    jobs = [scheduler.post(meet) for _ in range(streams)]
    done = await asyncio.shield(asyncio.gather(*jobs, return_exceptions=True))
    # threads that wait for one that fails get a BrokenBarrierError
    if not result:
        raise next(one for one in done if isinstance(one, BaseException))
    return result[0]


async def _ended(future: asyncio.Future[Any]) -> None:
    """Wait for `future` however often the waiter is cancelled (S3)."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({future})


def _job(
    steps: Sequence[JobStep], deadline_at: float, order: JobOrder, preemptible: bool, kind: str
) -> Job:
    return Job(
        run=_each,
        work=steps[0].work,
        estimate_s=steps[0].estimate_s,
        rest=steps[1:],
        deadline_at=deadline_at,
        order_at=order.order_at,
        arrived_at=order.arrived_at,
        preemptible=preemptible,
        may_compile=order.may_compile,
        kind=kind,
    )


def _each(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    return [function() for function in functions]
