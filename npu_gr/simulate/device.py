"""The device of a simulated instance: the production scheduler over passes in virtual time.

There are no tensors: the device profile gives the time of a pass. `VirtualStreams` replace the
device threads of the production `Scheduler`; to the relay, `SimulatedEngine` is an `Encoder`, like
`RankEngine`.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from npu_gr.core.errors import DeadlineExceeded
from npu_gr.engine.cost import PassCosts
from npu_gr.engine.device_threads import LATE, Ended, Streams, finish
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.page_jobs import PageCopy, chunks
from npu_gr.engine.queue import Demand, Job, JobOrder, JobResult, JobStep, SchedulerConfig
from npu_gr.engine.scheduler import Scheduler
from npu_gr.simulate.config import DeviceProfile

FASTEST = 0.1  # lower bound of a noisy pass, relative to the cost model


class RankWork(NamedTuple):
    """The work of one rank."""

    new_tokens: int
    cached_tokens: int
    num_candidates: int

    @property
    def demand(self) -> Demand:
        """The rank's share of its pass."""
        return Demand(self.new_tokens, self.num_candidates)


class PassTimes:
    """The time of passes: the cost model of a profile, and its noise."""

    def __init__(self, profile: DeviceProfile, source: random.Random) -> None:
        self._cost = profile.cost
        self._late = profile.late
        self._up_to_s = [late.up_to_s for late in profile.late]
        self._source = source

    def of_ranks(self, works: Sequence[RankWork]) -> float:
        """Draw the seconds of a pass that these ranks share; its fixed cost `a0` counts once."""
        seconds = sum(self._cost.pass_s(*work) for work in works) - (len(works) - 1) * self._cost.a0
        return self.noisy(seconds)

    def noisy(self, seconds: float) -> float:
        """Add the noise of the pass's class to the seconds of the cost model."""
        late = self._late[min(bisect_left(self._up_to_s, seconds), len(self._late) - 1)]
        return seconds * max(1 + self._source.choice(late.ratios), FASTEST)


class VirtualStreams(Streams):
    """Passes that take virtual time and compute nothing. Create it inside the virtual loop.

    The work of a job is a `RankWork`, or a function that returns the seconds of its pass (a chunk
    of a prefill, or a copy).
    """

    def __init__(self, config: SchedulerConfig, times: PassTimes) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(config, loop.time)
        self._loop: asyncio.AbstractEventLoop = loop
        self._times = times
        self._idle = list(range(config.streams))
        self._is_timer_set = False

    def _submitted(self) -> None:
        while self._idle and len(self.queue):
            taken = self.queue.take(self._clock())
            self._deliver([(job, DeadlineExceeded(LATE)) for job in taken.expired])
            if not taken.jobs:
                if taken.wait_s is not None and not self._is_timer_set:
                    self._is_timer_set = True
                    self._loop.call_later(taken.wait_s, self._waited)
                return
            stream = self._idle.pop()
            begun = self._begin(stream, taken.jobs)
            self._loop.call_later(
                self._draw_s(taken.jobs), self._pass_ended, stream, taken.jobs, *begun
            )

    def _waited(self) -> None:
        self._is_timer_set = False
        self._submitted()

    def _draw_s(self, jobs: Sequence[Job]) -> float:
        works = [job.work for job in jobs]
        return self._times.of_ranks(works) if isinstance(works[0], RankWork) else float(works[0]())

    def _pass_ended(self, stream: int, jobs: list[Job], began_at: float, expected_s: float) -> None:
        self._idle.append(stream)
        self._deliver(self._end(stream, jobs, [None] * len(jobs), began_at, expected_s))
        self._submitted()

    def _deliver(self, ended: list[Ended]) -> None:
        if ended:
            self._loop.call_soon(finish, ended)  # on the same thread


class SimulatedPrefix:
    """A history with a length but no tokens; a user's longer history continues the shorter one."""

    __slots__ = ("_num_tokens", "_start")

    def __init__(self, num_events: int, max_tokens: int, cut_step_tokens: int) -> None:
        """Cut a history as the tokenizer does.

        Args:
            num_events: Number of events of the complete history.
            max_tokens: Largest number of newest events that remain.
            cut_step_tokens: Step, in events, of the start of a cut history.
        """
        over = max(0, num_events - max_tokens)
        self._start = -(-over // cut_step_tokens) * cut_step_tokens
        self._num_tokens = max(num_events - self._start, 0)

    @property
    def is_divisible(self) -> bool:
        """Always True, like a ranker's tokens."""
        return True

    def __len__(self) -> int:
        return self._num_tokens

    def earlier(self, since_at: float) -> list[SimulatedPrefix]:
        """Return nothing: simulated weights never change."""
        del since_at
        return []

    def fingerprint(self, num_tokens: int) -> str:
        """Identify a prefix by its start and length."""
        return f"{self._start}+{num_tokens}"


class SimulatedEngine(PassCosts):
    """Runs prefills, copies and ranks on the virtual clock, with the contracts of `RankEngine`."""

    def __init__(
        self, profile: DeviceProfile, scheduler: Scheduler, times: PassTimes, objective_s: float
    ) -> None:
        """Prepare the engine; nothing runs yet.

        Args:
            profile: Profile of the device.
            scheduler: Scheduler over `VirtualStreams`.
            times: Random times of chunks and copies.
            objective_s: Latency objective of a rank, which orders the queue.
        """
        super().__init__(scheduler.wait_s)
        self.objective_s = objective_s
        self.cost = profile.cost
        self.copy_bytes_per_s = profile.copy_bytes_per_s
        self._copy_host_s = profile.copy_host_s
        self._scheduler = scheduler
        self._times = times

    async def prefill(
        self,
        tokens: SimulatedPrefix,
        keep: tuple[PageRun, ...],
        deadline_at: float,
        order: JobOrder,
        first_token: int = 0,
    ) -> int:
        """Encode a prefix chunk by chunk; return the number of its tokens encoded so far."""
        parts = list(chunks(first_token, len(tokens), self._scheduler.config.prefill_chunk_tokens))
        estimates_s = [self.cost.pass_s(stop - start, start, 0) for start, stop in parts]
        steps = [
            JobStep(partial(float, self._times.noisy(seconds)), seconds) for seconds in estimates_s
        ]
        done = await self._scheduler.sequence(
            steps, deadline_at, order, preemptible=True, kind="prefill"
        )
        return parts[done.steps - 1][1] if done.steps else first_token

    async def copy(
        self,
        pages: PageCopy,
        deadline_at: float,
        order: JobOrder | None = None,
        *,
        preemptible: bool = False,
    ) -> None:
        """Occupy the device for a copy: the fixed time plus bytes over bandwidth."""
        seconds = self._copy_host_s + pages.num_bytes / self.copy_bytes_per_s
        await self._scheduler.call(
            partial(float, self._times.noisy(seconds)),
            deadline_at,
            order,
            preemptible=preemptible,
            kind="copy",
        )

    def zero(self, arena: KVArena, runs: Sequence[PageRun]) -> asyncio.Future[JobResult[None]]:
        """Overwrite pages; takes no time here."""
        future: asyncio.Future[JobResult[None]] = asyncio.get_running_loop().create_future()
        future.set_result(JobResult(None, 0.0, 0.0, 1))
        return future

    async def rank(
        self, work: RankWork, deadline_at: float, arrived_at: float, tenant: str
    ) -> float:
        """Score candidates; return the seconds of the pass.

        Args:
            work: Work of the rank.
            deadline_at: Instant at which the rank is dropped if it has not begun.
            arrived_at: Arrival of its request.
            tenant: Tenant of the request.
        """
        expected_s = self.cost.pass_s(*work)
        done = await self._scheduler.batch(
            work,
            run_nothing,
            deadline_at,
            objective_s=self.objective_s,
            arrived_at=arrived_at,
            tenant=tenant,
            estimate_s=expected_s,
        )
        if not work.cached_tokens and done.batch_size == 1:
            self.observe_pass(expected_s, done.device_s)
        return done.device_s


def run_nothing(_: Sequence[Any]) -> Sequence[Any]:
    """Fail: it stands for the `run` of simulated ranks, which is never called."""
    raise AssertionError("a simulated job has no work")
