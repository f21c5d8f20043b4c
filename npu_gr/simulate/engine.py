"""The engine of a simulated instance: no tensors, and time comes from the profile of the device.

The relay sees it as an `Encoder`, like `RankEngine` and `GenerateEngine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from npu_gr.core.arrays import I64
from npu_gr.core.kinds import RANK
from npu_gr.engine.cost import CostModel, RunningQuantile
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.pages import PageRun
from npu_gr.engine.page_jobs import chunks
from npu_gr.engine.queue import Demand, Job, JobOrder, JobResult, JobStep
from npu_gr.simulate.config import DeviceProfile
from npu_gr.simulate.scheduler import PassTimes, RankWork, VirtualScheduler, run_nothing

LEAST_RESIDUAL_S = 1e-4  # as `engine.rank_engine.PageJobs`
_TIMESTAMPS: I64 = np.zeros(1 << 20, np.int64)


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


class SimulatedEngine:
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
        self.objective_s = objective_s
        self.cost: CostModel = profile.cost
        self.copy_bytes_per_s = profile.copy_bytes_per_s
        self._copy_host_s = profile.copy_host_s
        self._scheduler = scheduler
        self._times = times
        self._loop = asyncio.get_running_loop()
        self._residual_s = RunningQuantile(0.9, LEAST_RESIDUAL_S)

    @property
    def queue_s(self) -> float:
        """Seconds that a rank arriving now would wait for the device."""
        return self._scheduler.wait_s(self.objective_s)

    @property
    def residual_s(self) -> float:
        """P90 of (actual - predicted) seconds of recent full passes that shared the device with no other rank."""
        return self._residual_s.value

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
            self._residual_s.observe(max(took_s - expected_s, LEAST_RESIDUAL_S))
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
