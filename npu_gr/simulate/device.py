"""One instance's device on the virtual clock: the queue that serves, and passes that take what the profile says.

It is what `relay.Relay` calls an Encoder. Differences to `RankEngine`: no tensors, and time comes from the profile.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from npu_gr.core.errors import DeadlineExceeded, NpuGrError, Overloaded
from npu_gr.core.request import I64
from npu_gr.engine.cost import CostModel
from npu_gr.engine.job import Demand, Job, JobOrder, JobResult, JobStep
from npu_gr.engine.page_jobs import chunks
from npu_gr.engine.quantile import RunningQuantile
from npu_gr.engine.queue import JobQueue, SchedulerConfig
from npu_gr.kv.arena import KVArena
from npu_gr.kv.layout import PageRun
from npu_gr.simulate.config import DeviceProfile

_FASTEST = 0.1  # of the model: noise makes no pass faster than that
_LITTLE_S = 1e-4  # as `engine.PageJobs`
_STAMPS: I64 = np.zeros(1 << 20, np.int64)


class SimulatedPrefix:
    """A history that is only as long as it is; of one user a longer one continues a shorter one."""

    __slots__ = ("_num_tokens", "_start")

    def __init__(self, num_events: int, max_tokens: int, cut_step_tokens: int) -> None:
        """Of a longer history than `max_tokens` the newest, whose start moves in steps."""
        over = max(0, num_events - max_tokens)
        self._start = -(-over // cut_step_tokens) * cut_step_tokens
        self._num_tokens = max(num_events - self._start, 0)

    @property
    def timestamps(self) -> I64:
        """[n] zeros."""
        return _STAMPS[: self._num_tokens]

    def __len__(self) -> int:
        return self._num_tokens

    def fingerprint(self, num_tokens: int) -> str:
        """Where it starts and how long it is."""
        return f"{self._start}+{num_tokens}"


class RankWork(NamedTuple):
    """What a rank's pass computes."""

    new_tokens: int
    cached_tokens: int
    num_candidates: int


class Device:
    """The queue and its passes. `busy_s` is the device's time so far."""

    def __init__(
        self, profile: DeviceProfile, config: SchedulerConfig, objective_s: float, source: random.Random
    ) -> None:
        self._cost, self._profile, self._config, self.objective_s = profile.cost, profile, config, objective_s
        self._late, self._up_to_s = profile.late, [late.up_to_s for late in profile.late]
        self._loop = asyncio.get_running_loop()
        self._queue = JobQueue(config)
        self._source = source
        self._idle, self._is_waiting = config.streams, False
        self._short_s = RunningQuantile(0.9, _LITTLE_S)
        self.busy_s = 0.0
        self._ends_at: list[float] = []  # when the passes that run should end

    # ---- what the relay asks

    @property
    def cost(self) -> CostModel:
        """What a pass takes, by the model."""
        return self._cost

    @property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth between the tiers."""
        return self._profile.copy_bytes_per_s

    @property
    def queue_s(self) -> float:
        """As `Scheduler.wait_s`, of a rank."""
        now_at = self._loop.time()
        running_s = 0.0 if self._idle else max(0.0, min(self._ends_at) - now_at)
        return running_s + self._queue.ahead_s(now_at + self.objective_s) / self._config.streams

    @property
    def pressure(self) -> float:
        """As `Scheduler.pressure`."""
        return self._queue.pressure / self._config.streams

    @property
    def residual_s(self) -> float:
        """As `PageJobs.residual_s`."""
        return self._short_s.value

    async def prefill(
        self,
        tokens: SimulatedPrefix,
        keep: tuple[PageRun, ...],
        deadline_at: float,
        order: JobOrder,
        first_token: int = 0,
    ) -> int:
        """As `RankEngine.prefill`: chunk after chunk."""
        parts = list(chunks(first_token, len(tokens), self._config.prefill_chunk_tokens))
        takes_s = [self._cost.pass_s(stop - start, start, 0) for start, stop in parts]
        job = self._job([JobStep(self._noisy_s(each_s), each_s) for each_s in takes_s], deadline_at, order, True)
        if order.is_cancelled_at_step:
            return first_token

        def changed() -> None:
            if not order.is_cancelled_at_step:
                self._queue.hasten(job, order.order_at)
            elif self._queue.withdraw(job):
                future, job.tag = job.tag, None
                future.set_result((0.0, 0))

        with order.applied(changed):
            await self._submit(job)
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
        """As `PageJobs.copy`: the bytes over the bandwidth."""
        took_s = self._profile.copy_host_s + target.layout.bytes(num_tokens) / self._profile.copy_bytes_per_s
        order = JobOrder(deadline_at) if order is None else order
        job = self._job([JobStep(self._noisy_s(took_s), 0.0)], deadline_at, order, preemptible)
        with order.applied(lambda: self._queue.hasten(job, order.order_at)):
            await self._submit(job)

    def zero(self, arena: KVArena, runs: Sequence[PageRun]) -> asyncio.Future[JobResult[None]]:
        """As `PageJobs.zero`; takes no time here."""
        future: asyncio.Future[JobResult[None]] = self._loop.create_future()
        future.set_result(JobResult(None, 0.0, 0.0, 1))
        return future

    async def rank(self, work: RankWork, deadline_at: float, arrived_at: float) -> float:
        """As `RankEngine.rank`; the seconds on the device."""
        expected_s = self._cost.pass_s(*work)
        job = Job(
            run=_nothing,
            work=work,
            kind="rank",
            shares=True,
            demand=Demand(work.new_tokens, work.num_candidates),
            deadline_at=deadline_at,
            order_at=arrived_at + self.objective_s,
            arrived_at=arrived_at,
            objective_s=self.objective_s,
            estimate_s=expected_s,
        )
        took_s, batch_size = await self._submit(job)
        if not work.cached_tokens and batch_size == 1:
            self._short_s.observe(max(took_s - expected_s, _LITTLE_S))
        return took_s

    def _job(self, steps: Sequence[JobStep], deadline_at: float, order: JobOrder, preemptible: bool) -> Job:
        """As of `Scheduler`; a step's work is how long it takes here."""
        return Job(
            run=_nothing,
            work=steps[0].work,
            estimate_s=steps[0].estimate_s,
            rest=steps[1:],
            deadline_at=deadline_at,
            order_at=order.order_at,
            arrived_at=order.arrived_at,
            preemptible=preemptible,
        )

    # ---- the queue

    async def _submit(self, job: Job) -> tuple[float, int]:
        future: asyncio.Future[tuple[float, int]] = self._loop.create_future()
        job.tag = future
        shed = self._queue.put(job, self._loop.time())
        if shed is not None:
            _fail(shed, Overloaded("dropped to make room for a request"))
        self._begin()
        try:
            return await future
        except asyncio.CancelledError:
            if not self._queue.withdraw(job) and job.tag is not None:  # a pass that runs ends before its pages go
                ended = job.tag = self._loop.create_future()
                await ended
            raise

    def _begin(self) -> None:
        while self._idle and len(self._queue):
            taken = self._queue.take(self._loop.time())
            for job in taken.expired:
                _fail(job, DeadlineExceeded("the deadline passed while waiting for the device"))
            if not taken.jobs:
                if taken.wait_s is not None and not self._is_waiting:
                    self._is_waiting = True
                    self._loop.call_later(taken.wait_s, self._ask_again)
                return
            took_s, expected_s = self._pass_s(taken.jobs), sum(job.estimate_s for job in taken.jobs)
            self._idle -= 1
            ends_at = self._loop.time() + expected_s * self._queue.slowdown.value
            self._ends_at.append(ends_at)
            self._loop.call_later(took_s, self._end, taken.jobs, took_s, expected_s, ends_at)

    def _ask_again(self) -> None:
        self._is_waiting = False
        self._begin()

    def _pass_s(self, jobs: list[Job]) -> float:
        first = jobs[0].work
        if not isinstance(first, RankWork):
            return float(first)  # a chunk or a copy
        # what is shared is paid for once
        seconds = sum(self._cost.pass_s(*job.work) for job in jobs) - (len(jobs) - 1) * self._cost.a0
        return self._noisy_s(seconds)

    def _noisy_s(self, seconds: float) -> float:
        late = self._late[min(bisect_left(self._up_to_s, seconds), len(self._late) - 1)]
        return seconds * max(1 + self._source.choice(late.ratios), _FASTEST)

    def _end(self, jobs: list[Job], took_s: float, expected_s: float, ends_at: float) -> None:
        self._idle += 1
        self._ends_at.remove(ends_at)
        self._queue.slowdown.observe(expected_s, took_s)
        self.busy_s += took_s
        for job in jobs:
            if self._queue.put_next_step(job, self._loop.time()):
                continue
            future, job.tag = job.tag, None
            if not future.done():
                future.set_result((took_s, len(jobs)))
        self._begin()


def _fail(job: Job, error: NpuGrError) -> None:
    future, job.tag = job.tag, None
    if not future.done():
        future.set_exception(error)


def _nothing(_: Sequence[Any]) -> Sequence[Any]:
    raise AssertionError("a simulated job has no work")
