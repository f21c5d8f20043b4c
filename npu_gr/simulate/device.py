"""The device of a simulated instance: the engine and the queue that serve, over passes that take virtual time.

No tensors: how long a pass takes comes from the profile of the device. `VirtualScheduler` stands for
`engine.scheduler.Scheduler`, with the order and the batches of `engine.queue.JobQueue`; the relay sees
`SimulatedEngine` as an `Encoder`, like `RankEngine` and `GenerateEngine`.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DeadlineExceeded, NpuGrError, Overloaded
from npu_gr.core.kinds import RANK
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.pages import PageRun
from npu_gr.engine.page_jobs import PassCosts, chunks
from npu_gr.engine.queue import Demand, Job, JobOrder, JobQueue, JobResult, JobStep, SchedulerConfig
from npu_gr.simulate.config import DeviceProfile

FASTEST = 0.1  # of the time by the cost model: noise makes no pass faster than that
_TIMESTAMPS: I64 = np.zeros(1 << 20, np.int64)


class RankWork(NamedTuple):
    """What the pass of one rank computes."""

    new_tokens: int
    cached_tokens: int
    num_candidates: int


class PassTimes:
    """How long passes take: the cost model of a profile, and its noise."""

    def __init__(self, profile: DeviceProfile, source: random.Random) -> None:
        self._cost = profile.cost
        self._late = profile.late
        self._up_to_s = [late.up_to_s for late in profile.late]
        self._source = source

    def of_ranks(self, works: Sequence[RankWork]) -> float:
        """Draw the seconds of a pass that these ranks share; its fixed part `a0` is paid once."""
        seconds = sum(self._cost.pass_s(*work) for work in works) - (len(works) - 1) * self._cost.a0
        return self.noisy(seconds)

    def noisy(self, seconds: float) -> float:
        """Add noise to the seconds of the cost model; the profile has other noise for short passes than for long."""
        late = self._late[min(bisect_left(self._up_to_s, seconds), len(self._late) - 1)]
        return seconds * max(1 + self._source.choice(late.ratios), FASTEST)


class PassResult(NamedTuple):
    """What a job learns when its last step has run."""

    took_s: float  # of that pass, on the device
    batch_size: int  # jobs in that pass; 0 = the job was cut before its next step began


class VirtualScheduler:
    """The queue and its passes on the virtual clock. Make it inside the virtual loop.

    The work of a job is a `RankWork`, or the seconds that its pass takes (a chunk of a prefill, or a copy).
    """

    def __init__(self, config: SchedulerConfig, times: PassTimes) -> None:
        self.config = config
        self.busy_s = 0.0  # time on the device so far, all streams together
        self._times = times
        self._loop = asyncio.get_running_loop()
        self._queue = JobQueue(config)
        self._idle_streams = config.streams
        self._is_timer_set = False
        self._ends_at: list[float] = []  # of the passes that run, by estimate

    def wait_s(self, objective_s: float) -> float:
        """Forecast how long a request that comes now would wait for the device, as `Scheduler.wait_s` does."""
        now_at = self._loop.time()
        running_s = 0.0 if self._idle_streams else max(0.0, min(self._ends_at) - now_at)
        return running_s + self._queue.ahead_s(now_at + objective_s) / self.config.streams

    @property
    def pressure(self) -> float:
        """Waiting work in objectives of its requests, a stream; as `Scheduler.pressure`."""
        return self._queue.pressure / self.config.streams

    def weigh(self, tenant_weights: Mapping[str, float]) -> None:
        """Set the weights of tenants, as `Scheduler.weigh` does."""
        self._queue.weights = tenant_weights

    async def submit(self, job: Job) -> PassResult:
        """Put a job into the queue and wait until its last step has run.

        Raises:
            Overloaded: the queue is full, or the job made room for another one.
            DeadlineExceeded: the deadline of the job passed while it waited.
        """
        future: asyncio.Future[PassResult] = self._loop.create_future()
        job.tag = future
        shed = self._queue.put(job, self._loop.time())
        if shed is not None:
            _fail(shed, Overloaded("dropped to make room for a request"))
        self._begin_passes()
        try:
            return await future
        except asyncio.CancelledError:
            if not self._queue.withdraw(job) and job.tag is not None:
                # its pass runs: the submitter holds its pages until the pass has ended
                ended = job.tag = self._loop.create_future()
                await ended
            raise

    def hasten(self, job: Job, order_at: float) -> None:
        """Move a job forward in the queue."""
        self._queue.hasten(job, order_at)

    def cut(self, job: Job) -> None:
        """End a job after the step that runs; at once if none does."""
        if self._queue.withdraw(job):
            _finish(job, PassResult(0.0, 0))

    def _begin_passes(self) -> None:
        while self._idle_streams and len(self._queue):
            taken = self._queue.take(self._loop.time())
            for job in taken.expired:
                _fail(job, DeadlineExceeded("the deadline passed while waiting for the device"))
            if not taken.jobs:
                if taken.wait_s is not None and not self._is_timer_set:
                    self._is_timer_set = True
                    self._loop.call_later(taken.wait_s, self._timer_fired)
                return
            took_s = self._draw_s(taken.jobs)
            expected_s = sum(job.estimate_s for job in taken.jobs)
            self._idle_streams -= 1
            ends_at = self._loop.time() + expected_s * self._queue.slowdown.value
            self._ends_at.append(ends_at)
            self._loop.call_later(took_s, self._end_pass, taken.jobs, took_s, expected_s, ends_at)

    def _timer_fired(self) -> None:
        self._is_timer_set = False
        self._begin_passes()

    def _draw_s(self, jobs: Sequence[Job]) -> float:
        works = [job.work for job in jobs]
        return self._times.of_ranks(works) if isinstance(works[0], RankWork) else float(works[0])

    def _end_pass(self, jobs: list[Job], took_s: float, expected_s: float, ends_at: float) -> None:
        self._idle_streams += 1
        self._ends_at.remove(ends_at)
        self._queue.slowdown.observe(expected_s, took_s)
        self.busy_s += took_s
        for job in jobs:
            if not self._queue.put_next_step(job, self._loop.time()):
                _finish(job, PassResult(took_s, len(jobs)))
        self._begin_passes()


def run_nothing(_: Sequence[Any]) -> Sequence[Any]:
    """The `run` of every simulated job: no pass computes anything."""
    raise AssertionError("a simulated job has no work")


def _finish(job: Job, result: PassResult) -> None:
    future, job.tag = job.tag, None
    if not future.done():
        future.set_result(result)


def _fail(job: Job, error: NpuGrError) -> None:
    future, job.tag = job.tag, None
    if not future.done():
        future.set_exception(error)


class SimulatedPrefix:
    """A fake history: it has a length but no tokens. The longer history of a user continues the shorter one."""

    __slots__ = ("_num_tokens", "_start")

    def __init__(self, num_events: int, max_tokens: int, cut_step_tokens: int) -> None:
        """Cut a history as the tokenizer does.

        Args:
            num_events: of the whole history.
            max_tokens: of a longer history only the newest events are kept, so many at most.
            cut_step_tokens: the start of a cut history moves in steps of so many events.
        """
        over = max(0, num_events - max_tokens)
        self._start = -(-over // cut_step_tokens) * cut_step_tokens
        self._num_tokens = max(num_events - self._start, 0)

    @property
    def timestamps(self) -> I64:
        """[n] zeros."""
        return _TIMESTAMPS[: self._num_tokens]

    @property
    def is_divisible(self) -> bool:
        """Always, as of a ranker."""
        return True

    def __len__(self) -> int:
        return self._num_tokens

    def fingerprint(self, num_tokens: int) -> str:
        """Identify a prefix by where it starts and how long it is."""
        return f"{self._start}+{num_tokens}"


class SimulatedEngine(PassCosts):
    """Prefills, copies and ranks as jobs of a virtual scheduler; its methods have the contracts of `RankEngine`'s."""

    def __init__(
        self, profile: DeviceProfile, scheduler: VirtualScheduler, times: PassTimes, objective_s: float
    ) -> None:
        """Nothing runs yet.

        Args:
            profile: of the device.
            scheduler: runs the passes.
            times: draws how long a chunk or a copy takes.
            objective_s: of a rank; its place in the queue.
        """
        super().__init__(scheduler.wait_s)
        self.objective_s = objective_s
        self.cost = profile.cost
        self.copy_bytes_per_s = profile.copy_bytes_per_s
        self._copy_host_s = profile.copy_host_s
        self._scheduler = scheduler
        self._times = times
        self._loop = asyncio.get_running_loop()

    async def prefill(
        self,
        tokens: SimulatedPrefix,
        keep: tuple[PageRun, ...],
        deadline_at: float,
        order: JobOrder,
        first_token: int = 0,
    ) -> int:
        """Encode a prefix chunk by chunk; returns how many of its tokens are encoded now."""
        parts = list(chunks(first_token, len(tokens), self._scheduler.config.prefill_chunk_tokens))
        estimates_s = [self.cost.pass_s(stop - start, start, 0) for start, stop in parts]
        steps = [JobStep(self._times.noisy(seconds), seconds) for seconds in estimates_s]
        job = _job(steps, deadline_at, order, preemptible=True)
        if order.is_cancelled_at_step:
            return first_token

        def changed() -> None:
            if order.is_cancelled_at_step:
                self._scheduler.cut(job)
            else:
                self._scheduler.hasten(job, order.order_at)

        with order.applied(changed):
            await self._scheduler.submit(job)
        return parts[job.ran - 1][1] if job.ran else first_token

    async def copy(
        self,
        source: KVArena,
        source_runs: Sequence[PageRun],
        target: KVArena,
        target_runs: Sequence[PageRun],
        num_tokens: int,
        deadline_at: float,
        order: JobOrder | None = None,
        *,
        preemptible: bool = False,
    ) -> None:
        """Occupy the device for the bytes over the bandwidth, and the fixed part of a copy."""
        seconds = self._copy_host_s + target.layout.bytes(num_tokens) / self.copy_bytes_per_s
        order = JobOrder(deadline_at) if order is None else order
        job = _job([JobStep(self._times.noisy(seconds), 0.0)], deadline_at, order, preemptible)
        with order.applied(lambda: self._scheduler.hasten(job, order.order_at)):
            await self._scheduler.submit(job)

    def zero(self, arena: KVArena, runs: Sequence[PageRun]) -> asyncio.Future[JobResult[None]]:
        """Overwrite pages; takes no time here."""
        future: asyncio.Future[JobResult[None]] = self._loop.create_future()
        future.set_result(JobResult(None, 0.0, 0.0, 1))
        return future

    async def rank(self, work: RankWork, deadline_at: float, arrived_at: float, tenant: str) -> float:
        """Score candidates; returns the seconds of the pass.

        Args:
            work: what the pass computes for this rank.
            deadline_at: instant at which the rank is dropped if it has not begun.
            arrived_at: instant at which its request came.
            tenant: of the request.
        """
        expected_s = self.cost.pass_s(*work)
        job = Job(
            run=run_nothing,
            work=work,
            kind=RANK.name,
            shares=True,
            demand=Demand(work.new_tokens, work.num_candidates),
            deadline_at=deadline_at,
            order_at=arrived_at + self.objective_s,
            arrived_at=arrived_at,
            objective_s=self.objective_s,
            tenant=tenant,
            estimate_s=expected_s,
        )
        took_s, batch_size = await self._scheduler.submit(job)
        if not work.cached_tokens and batch_size == 1:
            self.observe_pass(expected_s, took_s)
        return took_s


def _job(steps: Sequence[JobStep], deadline_at: float, order: JobOrder, preemptible: bool) -> Job:
    """Make a job of steps whose work is how long each takes."""
    return Job(
        run=run_nothing,
        work=steps[0].work,
        estimate_s=steps[0].estimate_s,
        rest=steps[1:],
        deadline_at=deadline_at,
        order_at=order.order_at,
        arrived_at=order.arrived_at,
        preemptible=preemptible,
    )
