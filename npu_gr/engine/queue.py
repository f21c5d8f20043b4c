"""What waits for the device, and what runs next. Pure: no thread, no tensor, the caller brings the clock.

Order: the earliest instant first. A request's instant is when it should be done (its objective or deadline), and never
later than `aging_s` after it came, so none starves. What is sheddable comes after every request, until one waits for
it: a pre-infer whose rank was refused must not take the time of those that were not. Pre-infers run one after the
other among themselves: chunk by chunk in turn, all of them would end late.

Jobs of one `run` and bucket share a pass as long as the sum of their demands stays within the limits, and no job in it
becomes late by those that are added; one that does not fit is passed over, not waited for.

Invariants:
  Q1  a job leaves the queue exactly once a step: taken, expired, shed, or withdrawn
  Q2  a pass of more than one job is within every limit
  Q3  never more than `max_queue` jobs wait, not counting those that are `put` with force
  Q4  of two jobs that could both be taken, the one with the earlier instant is
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec

from npu_gr.core.errors import Overloaded
from npu_gr.engine.cost import Pace

Count = Annotated[int, msgspec.Meta(ge=1)]
BEHIND_S = 1e9  # after every instant of a request
SCAN = 64  # waiting jobs looked at to fill a pass


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the queue and of a pass."""

    streams: Count = 1  # passes at once, over one copy of the weights; on a CPU each is a thread
    max_queue: Count = 256  # jobs waiting; the next is refused (429)
    max_batch_requests: Count = 4  # in one pass; more helps only accelerators
    max_batch_tokens: Count = 4096  # history and prompt tokens computed in one pass
    max_batch_rows: Count = 4096  # candidates and beams in one pass
    max_batch_logits: Count = 1 << 25  # beams x vocabulary of a generate; a rank's are few
    max_batch_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # for more of a kind, if the deadline leaves it
    aging_s: Annotated[float, msgspec.Meta(gt=0)] = 2.0  # after so long a job goes before every later one
    prefill_chunk_tokens: Annotated[int, msgspec.Meta(ge=64)] = 512  # the longest that a pre-infer delays a rank


class Demand(NamedTuple):
    """What a job adds to its pass."""

    tokens: int = 0
    rows: int = 0
    logits: int = 0

    def plus(self, other: Demand) -> Demand:
        """Of both."""
        return Demand(self.tokens + other.tokens, self.rows + other.rows, self.logits + other.logits)

    def fits(self, config: SchedulerConfig) -> bool:
        """Within every limit of a pass."""
        return (
            self.tokens <= config.max_batch_tokens
            and self.rows <= config.max_batch_rows
            and self.logits <= config.max_batch_logits
        )


NOTHING = Demand()


class Step(NamedTuple):
    """One pass of a job that runs in several."""

    work: Any
    takes_s: float  # an estimate


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One unit of device work."""

    run: Callable[[Sequence[Any]], Sequence[Any]]  # works of one pass -> a result each
    work: Any = None
    kind: str = "other"  # for the metric of the device's time
    shares: bool = False  # may run with others of the same `run` and bucket
    bucket: int = 0
    demand: Demand = NOTHING
    deadline_at: float = float("inf")
    order_at: float = float("inf")
    takes_s: float = 0.0  # its own estimate; how long before the deadline it must begin
    objective_s: float = float("inf")  # how long its request should take in all
    is_sheddable: bool = False  # makes room for a job that is not, when the queue is full
    rest: Sequence[Step] = ()  # what follows; each is a pass of its own, and others may come between
    ran: int = field(default=0, init=False)  # steps
    arrived_at: float | None = None  # when its request came, if that was before it did
    submitted_at: float = 0.0
    is_waiting: bool = field(default=False, init=False)
    tag: Any = None  # the submitter's


class Taken(NamedTuple):
    """What `take` decided."""

    jobs: list[Job]  # one pass
    expired: list[Job]  # their deadline passed while they waited
    wait_s: float | None  # no jobs: ask again after so long; None = when something changes


class JobQueue:
    """The waiting jobs. One thread at a time."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._heap: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._sheddable: dict[Job, None] = {}  # oldest first
        self._waiting = 0
        self._pressure = 0.0
        self.pace = Pace()  # of the passes; its owner tells it how long they took

    def __len__(self) -> int:
        return self._waiting

    @property
    def pressure(self) -> float:
        """Waiting work in objectives, each job's part in its own; without sheddable ones, which let others pass."""
        return self._pressure * self.pace.value

    def ahead_s(self, order_at: float) -> float:
        """Estimates of the waiting jobs that go before one of this order, together."""
        ahead = (job for at_s, _, job in self._heap if at_s <= order_at and job.is_waiting and at_s == job.order_at)
        return sum(job.takes_s + sum(step.takes_s for step in job.rest) for job in ahead) * self.pace.value

    def put(self, job: Job, now_at: float, *, force: bool = False) -> Job | None:
        """Take a job in.

        Returns:
            the youngest sheddable job, if one had to make room.

        Raises:
            Overloaded: the queue is full, and nothing in it may be shed for this one.
        """
        shed = None
        if not force and self._waiting >= self._config.max_queue:
            if job.is_sheddable or not self._sheddable:
                raise Overloaded(f"{self._waiting} jobs wait for the device, the limit is {self._config.max_queue}")
            shed = next(reversed(self._sheddable))
            self.withdraw(shed)
        job.submitted_at, job.is_waiting = now_at, True
        arrived_at = now_at if job.arrived_at is None else job.arrived_at
        if job.is_sheddable:  # behind every request, the oldest first, unless a request waits for it
            job.order_at = min(job.order_at, arrived_at + BEHIND_S)
        else:
            job.order_at = min(job.order_at, job.deadline_at, arrived_at + self._config.aging_s)
        self._push(job)
        self._waiting += 1
        if job.is_sheddable:
            self._sheddable[job] = None
        else:
            self._pressure += job.takes_s / job.objective_s
        return shed

    def go_on(self, job: Job, now_at: float) -> bool:
        """A step of the job has run: put the next one in; False if that was all.

        At once, so that its place in the order is taken before another job is.
        """
        job.ran += 1
        if not job.rest:
            return False
        (job.work, job.takes_s), *job.rest = job.rest
        self.put(job, now_at, force=True)
        return True

    def withdraw(self, job: Job) -> bool:
        """Take it out, and what would follow; False if it is not waiting: a step that runs is its last."""
        job.rest = ()
        return self._leave(job)

    def _leave(self, job: Job) -> bool:
        if not job.is_waiting:
            return False
        job.is_waiting = False
        self._waiting -= 1
        if job.is_sheddable:
            del self._sheddable[job]
        else:
            self._pressure -= job.takes_s / job.objective_s
        if len(self._sheddable) == self._waiting:
            self._pressure = 0.0  # exactly: rounding must not add up
        return True  # its place in the heap is passed over later

    def hasten(self, job: Job, order_at: float) -> None:
        """Somebody more urgent waits for it now; of one whose step runs, that holds for the steps that follow."""
        if order_at < job.order_at:
            job.order_at = order_at
            if job.is_waiting:
                self._push(job)

    def take(self, now_at: float) -> Taken:
        """The next pass."""
        expired: list[Job] = []
        first = self._pop(now_at, expired)
        if first is None:
            return Taken([], expired, None)
        jobs = [first]
        if first.shares:
            self._fill(jobs, now_at, expired)
            if (wait_s := self._may_wait_s(jobs, now_at)) > 0:
                for job in jobs:
                    self._push(job)
                return Taken([], expired, wait_s)
        for job in jobs:
            self._leave(job)
        return Taken(jobs, expired, None)

    def drain(self) -> list[Job]:
        """Everything that waits, and nothing is left."""
        left = [job for _, _, job in self._heap if self.withdraw(job)]
        self._heap.clear()
        return left

    def _push(self, job: Job) -> None:
        heapq.heappush(self._heap, (job.order_at, next(self._numbers), job))

    def _pop(self, now_at: float, expired: list[Job]) -> Job | None:
        """The first job that still waits and is in time; it stays `is_waiting`, but out of the heap."""
        while self._heap:
            order_at, _, job = heapq.heappop(self._heap)
            if not job.is_waiting or order_at != job.order_at:  # withdrawn, or hastened and pushed again
                continue
            if job.deadline_at <= now_at:
                self.withdraw(job)
                expired.append(job)
                continue
            return job
        return None

    def _fill(self, jobs: list[Job], now_at: float, expired: list[Job]) -> None:
        """Add what may share the pass of `jobs[0]`, in order; what may not goes back."""
        first, total, passed = jobs[0], jobs[0].demand, list[Job]()
        total_s, end_s = first.takes_s, self._end_s(first, now_at)
        while len(jobs) < self._config.max_batch_requests and len(passed) < SCAN:
            job = self._pop(now_at, expired)
            if job is None:
                break
            more = total.plus(job.demand)
            alike = job.shares and job.run == first.run and job.bucket == first.bucket
            ends_at = min(end_s, self._end_s(job, now_at))
            if alike and more.fits(self._config) and total_s + job.takes_s <= ends_at:
                jobs.append(job)
                total, total_s, end_s = more, total_s + job.takes_s, ends_at
            else:
                passed.append(job)
        for job in passed:
            self._push(job)

    def _end_s(self, job: Job, now_at: float) -> float:
        """What a pass may take by its estimates so that the job is in time; one that is late already does not mind."""
        left_s = (job.order_at - now_at) / self.pace.value
        return left_s if job.takes_s <= left_s else float("inf")

    def _may_wait_s(self, jobs: Sequence[Job], now_at: float) -> float:
        if len(jobs) >= self._config.max_batch_requests or not self._config.max_batch_wait_s:
            return 0.0
        patience_s = min(job.submitted_at for job in jobs) + self._config.max_batch_wait_s
        slack_s = min(job.deadline_at - job.takes_s for job in jobs)
        return min(patience_s, slack_s) - now_at
