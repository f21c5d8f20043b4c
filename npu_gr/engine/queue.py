"""The queue of jobs that wait for the device, and the choice of the next pass.

It uses no tensor and no clock.

A job is a unit of device work. Its submitter may change its order while it waits or runs:

    submitter --Job--> JobQueue --pass--> device thread --JobResult--> submitter
        |                  ^
        +---JobOrder-------+

**Order.** The job with the earliest `order_at` runs first. A request's `order_at` is the instant of
its objective or its deadline, whichever is earlier, and at most `aging_s` after it arrived: no
request starves. A request of a tenant that has less than its share of the queue and of the newest
pass is due at once (`is_ahead`): it waits for the running pass, but not for another tenant's queue.

**Preemptible jobs** (prefills, copies to DRAM) run only when no request is queued, the oldest
first. When a request starts to wait for one, `hasten` gives that job the request's own order. So a
prefill whose rank was rejected takes no time from the ranks that were admitted. Prefills run one
after the other, since all of them would end late if their chunks took turns.

**Passes.** Jobs with the same `run` function may share a pass, as long as the sum of their demands
is within the limits and no job of the pass becomes late. A job that does not fit is skipped and
delays no other job. A request that is ahead for its tenant's share shares its pass only with others
that are: it would have to wait for larger jobs of other tenants in the same pass.

Invariants, held by tests/engine/test_queue.py:
  Q1  a job leaves the queue exactly once a step: it is taken, expires, is shed, or is withdrawn
  Q2  a pass of more than one job is within every limit
  Q3  at most `max_queue` jobs wait, not counting those that were `put` with force
  Q4  of two jobs that could both be taken, the one with the earlier `order_at` is taken
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec

from npu_gr.core.errors import Overloaded, Rejection
from npu_gr.core.settings import Count, Seconds, SecondsOrZero
from npu_gr.engine.cost import SlowdownEwma

T = TypeVar("T")

# Takes the `work` of each job of a pass, and returns a result for each.
BatchFn = Callable[[Sequence[Any]], Sequence[Any]]


class Demand(NamedTuple):
    """The size of a job, which counts towards the limits of its pass."""

    tokens: int = 0
    rows: int = 0
    logits: int = 0

    def plus(self, other: Demand) -> Demand:
        """Add two demands, field by field."""
        return Demand(
            self.tokens + other.tokens, self.rows + other.rows, self.logits + other.logits
        )


NOTHING = Demand()


class JobStep(NamedTuple):
    """One pass of a job that runs in several."""

    work: Any
    estimate_s: float  # device seconds


class Job(msgspec.Struct, eq=False, kw_only=True):
    """One unit of device work, as the queue sees it."""

    run: BatchFn
    work: Any = None  # argument of the current step
    kind: str = "other"  # label of the device-time metric
    shares: bool = False  # may share a pass with other jobs of the same `run`
    # most jobs of such a pass; None = `SchedulerConfig.max_batch_requests`
    max_requests: int | None = None
    demand: Demand = NOTHING
    deadline_at: float = float("inf")  # it is dropped if it has not begun by then
    order_at: float = float("inf")  # the earliest runs first
    estimate_s: float = 0.0  # device seconds of the current step
    objective_s: float = float("inf")  # SLO objective of the request, from arrival to answer
    tenant: str = ""  # tenant of the request
    # waits behind every request; a full queue drops it to make room for one
    preemptible: bool = False
    may_compile: bool = False  # a first run, which may compile kernels for minutes
    # later steps; each is a pass of its own, and other jobs may run in between
    rest: Sequence[JobStep] = ()
    ran: int = 0  # steps that have run
    arrived_at: float | None = None  # arrival of the request; None = when the job is put
    submitted_at: float = 0.0
    is_waiting: bool = False
    is_ahead: bool = False  # its tenant had less than its share when it was put
    tag: Any = None  # for the submitter's use
    has_ended: bool = False  # the device no longer uses it; set on the event loop
    let_go: Any = None  # future with which a cancelled submitter waits for that


class JobResult(msgspec.Struct, Generic[T], frozen=True):
    """The result of a job, and its times in seconds."""

    value: T
    queue_s: float
    device_s: float
    batch_size: int = 1  # jobs in its pass
    steps: int = 1  # steps of a sequence that ran


class JobOrder:
    """The mutable place of a job in the queue.

    It can be moved forward (`hasten`), or ended after the running step (`cancel_at_step`). One
    order may serve several jobs in turn: a prefill that extends a prefix first copies it.
    """

    def __init__(
        self,
        order_at: float,
        arrived_at: float | None = None,
        *,
        may_compile: bool = False,
        step_tokens: int | None = None,
    ) -> None:
        """Place a job in the queue.

        Args:
            order_at: Instant on time.monotonic() by which it should be done; the earliest runs
                first. Infinity = when nothing else waits.
            arrived_at: Instant of the request, from which aging counts; None = the submission of
                each job, and of each step of a sequence.
            may_compile: Whether its jobs are first runs, which may compile kernels for minutes.
            step_tokens: Most tokens of a step of a ranker's prefill, for which a request may wait;
                None = `SchedulerConfig.prefill_chunk_tokens`.
        """
        self.step_tokens = step_tokens
        self.order_at = order_at
        self.arrived_at = arrived_at
        self.may_compile = may_compile
        self.is_cancelled_at_step = False
        self._on_change: Callable[[], None] | None = None

    def hasten(self, order_at: float) -> None:
        """Move the job forward to `order_at`; does nothing if it is forward of that already."""
        if order_at < self.order_at:
            self.order_at = order_at
            self._changed()

    def cancel_at_step(self) -> None:
        """End a sequence after its running step, without an error."""
        self.is_cancelled_at_step = True
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    @contextlib.contextmanager
    def applied(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Call `on_change` after every change within the block."""
        self._on_change = on_change
        try:
            yield
        finally:
            self._on_change = None


# Added to the arrival of a preemptible job. Clocks count seconds since boot, so the sum is later
# than the order of every request.
BEHIND_S = 1e9
# Most jobs skipped while a pass is filled, to bound the time for which the queue is locked.
SCAN = 64


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the queue and of one pass."""

    streams: Count = 1  # passes at a time, over one copy of the weights; on a CPU each is a thread
    max_queue: Count = 256  # waiting jobs; the next one is rejected (429)
    max_batch_requests: Count = 4  # requests in one pass; more than 4 helps only accelerators
    max_batch_tokens: Count = 4096  # history and prompt tokens computed in one pass
    max_batch_rows: Count = 4096  # candidates and beams in one pass
    max_batch_logits: Count = 1 << 25  # beams x vocabulary of generates; a rank has few
    max_batch_wait_s: SecondsOrZero = 0.0  # wait to fill a pass, if no deadline is at risk
    aging_s: Seconds = 2.0  # a job that has waited so long goes before all later ones
    # tokens of one step of a prefill: a prefill delays a rank by one step at most
    prefill_chunk_tokens: Annotated[int, msgspec.Meta(ge=64)] = 512


class NextPass(NamedTuple):
    """The decision of `JobQueue.take`."""

    jobs: list[Job]  # of one pass
    expired: list[Job]  # their deadline passed while they waited
    # Without jobs: seconds after which to call `take` again; None = when the queue changes.
    wait_s: float | None


def _fits(demand: Demand, config: SchedulerConfig) -> bool:
    """Return whether a pass with this demand is within every limit."""
    return (
        demand.tokens <= config.max_batch_tokens
        and demand.rows <= config.max_batch_rows
        and demand.logits <= config.max_batch_logits
    )


class _Batch:
    """A pass that is being filled: its jobs, their demand, and the time it may take."""

    def __init__(self, first: Job, config: SchedulerConfig, now_at: float, slowdown: float) -> None:
        self.jobs = [first]
        self._config = config
        self._now_at = now_at
        self._slowdown = slowdown
        self._demand = first.demand
        self._estimate_s = first.estimate_s
        self._longest_s = self._may_take_s(first)
        self._max_requests = first.max_requests or config.max_batch_requests

    @property
    def is_full(self) -> bool:
        return len(self.jobs) >= self._max_requests

    def add(self, job: Job) -> bool:
        """Add a job if it may share the pass and makes no job of it late; return whether it did."""
        if self.jobs[0].is_ahead and not job.is_ahead:
            return False
        demand = self._demand.plus(job.demand)
        estimate_s = self._estimate_s + job.estimate_s
        longest_s = min(self._longest_s, self._may_take_s(job))
        shares = job.shares and job.run == self.jobs[0].run
        if not (shares and _fits(demand, self._config) and estimate_s <= longest_s):
            return False
        self.jobs.append(job)
        self._demand = demand
        self._estimate_s = estimate_s
        self._longest_s = longest_s
        return True

    def _may_take_s(self, job: Job) -> float:
        """Return the estimated seconds that the pass may take so that `job` is not late.

        Infinity for a job that would be late even alone.
        """
        left_s = (job.order_at - self._now_at) / self._slowdown
        return left_s if job.estimate_s <= left_s else float("inf")

    def may_wait_s(self) -> float:
        """Return how long to wait for more jobs: at most `max_batch_wait_s`, without a late job."""
        if self.is_full or not self._config.max_batch_wait_s:
            return 0.0
        patient_until_at = (
            min(job.submitted_at for job in self.jobs) + self._config.max_batch_wait_s
        )
        latest_start_at = min(job.deadline_at - job.estimate_s for job in self.jobs)
        return min(patient_until_at, latest_start_at) - self._now_at


class _Shares:
    """The requests of each tenant in the queue and in the newest pass.

    The newest pass counts, since the queue is often empty while one tenant has the whole device.
    """

    def __init__(self) -> None:
        self.weights: Mapping[str, float] = {}  # a tenant without an entry has weight 1
        # Requests of each tenant in the newest pass; a tenant without any has no entry.
        self.newest: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # the same for the queue

    def change(self, tenant: str, by: int) -> None:
        """Count requests that join (`by` > 0) or leave the queue."""
        self._held[tenant] += by
        if not self._held[tenant]:
            del self._held[tenant]

    def is_under(self, tenant: str) -> bool:
        """Return whether a tenant stays below its share with one more request."""
        names = self._held.keys() | self.newest.keys() | {tenant}
        if len(names) == 1:
            return False
        total = sum([self.weights.get(name, 1.0) for name in names])
        held = self._held.get(tenant, 0) + self.newest.get(tenant, 0) + 1
        return held * total < self.weights.get(tenant, 1.0) * (
            self._held.total() + self.newest.total() + 1
        )


class JobQueue:
    """A heap of waiting jobs by `order_at`. Thread-safe.

    The old heap entry of a job that is withdrawn or hastened stays; `_pop` skips it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._lock = threading.RLock()
        self._heap: list[tuple[float, int, Job]] = []
        # Ties of `order_at` are broken by the order of `put`.
        self._numbers = itertools.count()
        self._preemptible: dict[Job, None] = {}  # oldest first
        self._waiting = 0
        self.shares = _Shares()
        self._pressure = 0.0
        self.slowdown = SlowdownEwma()  # of passes, as reported by the streams that run them

    def __len__(self) -> int:
        return self._waiting

    @property
    def pressure(self) -> float:
        """Sum over the waiting requests of (estimated device seconds / SLO objective in seconds).

        Preemptible jobs do not count, since every request goes before them.
        """
        return self._pressure * self.slowdown.value

    def ahead_s(self, order_at: float) -> float:
        """Estimate the device seconds of the waiting jobs that go before a job of this order."""
        with self._lock:
            ahead = (
                job
                for at, _, job in self._heap
                if at <= order_at and job.is_waiting and at == job.order_at
            )
            ahead_s = sum(
                job.estimate_s + sum(step.estimate_s for step in job.rest) for job in ahead
            )
        return ahead_s * self.slowdown.value

    def put(self, job: Job, now_at: float, *, force: bool = False) -> Job | None:
        """Add a job to the queue.

        Args:
            job: Job to add; this sets its final `order_at`.
            now_at: instant of the clock.
            force: add it even if the queue is full.

        Returns:
            The preemptible job that was shed to make room, the last in the queue; else None.

        Raises:
            Overloaded: the queue is full, and no job in it may be shed for this one.
        """
        with self._lock:
            return self._put(job, now_at, force)

    def _put(self, job: Job, now_at: float, force: bool) -> Job | None:
        arrived_at = now_at if job.arrived_at is None else job.arrived_at
        if job.preemptible:  # behind every request unless it is hastened, the oldest first
            job.order_at = min(job.order_at, arrived_at + BEHIND_S)
        else:
            job.order_at = min(job.order_at, job.deadline_at, arrived_at + self._config.aging_s)
            job.is_ahead = self.shares.is_under(job.tenant)
            if job.is_ahead:
                job.order_at = min(job.order_at, arrived_at)
        shed = None
        if not force and self._waiting >= self._config.max_queue:
            shed = max(reversed(self._preemptible), key=lambda each: each.order_at, default=None)
            if shed is None or (job.preemptible and shed.order_at <= job.order_at):
                raise Overloaded(
                    f"{self._waiting} jobs wait for the device, the limit is "
                    f"{self._config.max_queue}",
                    reason=Rejection.QUEUE,
                )
            self.withdraw(shed)
        job.submitted_at = now_at
        job.is_waiting = True
        self._push(job)
        self._waiting += 1
        if job.preemptible:
            self._preemptible[job] = None
        else:
            self.shares.change(job.tenant, 1)
            self._pressure += job.estimate_s / job.objective_s
        return shed

    def put_next_step(self, job: Job, now_at: float) -> bool:
        """Queue the next step of a job; return False if it has none.

        Call it before the next `take`, so that a later job does not overtake this one.
        """
        job.ran += 1
        if not job.rest:
            return False
        (job.work, job.estimate_s), *job.rest = job.rest
        self.put(job, now_at, force=True)
        return True

    def withdraw(self, job: Job) -> bool:
        """Remove a job and its later steps; return False if a step of it runs, which ends it."""
        with self._lock:
            job.rest = ()
            return self._leave(job)

    def _leave(self, job: Job) -> bool:
        if not job.is_waiting:
            return False
        job.is_waiting = False
        self._waiting -= 1
        if job.preemptible:
            del self._preemptible[job]
        else:
            self.shares.change(job.tenant, -1)
            self._pressure -= job.estimate_s / job.objective_s
        if len(self._preemptible) == self._waiting:
            self._pressure = 0.0  # so that rounding errors do not add up
        return True

    def hasten(self, job: Job, order_at: float) -> None:
        """Move a job forward to an earlier `order_at`; if a step of it runs, its later steps."""
        with self._lock:
            if order_at < job.order_at:
                job.order_at = order_at
                if job.is_waiting:
                    self._push(job)

    def take(self, now_at: float) -> NextPass:
        """Choose the next pass, and remove its jobs from the queue."""
        with self._lock:
            expired: list[Job] = []
            first = self._pop(now_at, expired)
            if first is None:
                return NextPass([], expired, None)
            batch = _Batch(first, self._config, now_at, self.slowdown.value)
            if first.shares:
                self._fill(batch, now_at, expired)
                if (wait_s := batch.may_wait_s()) > 0:
                    for job in batch.jobs:
                        self._push(job)
                    return NextPass([], expired, wait_s)
            for job in batch.jobs:
                self._leave(job)
            if not first.preemptible:
                self.shares.newest = Counter([job.tenant for job in batch.jobs])
            return NextPass(batch.jobs, expired, None)

    def _fill(self, batch: _Batch, now_at: float, expired: list[Job]) -> None:
        """Add the waiting jobs that may share the pass, in order of `order_at`."""
        skipped: list[Job] = []
        while not batch.is_full and len(skipped) < SCAN:
            job = self._pop(now_at, expired)
            if job is None:
                break
            if not batch.add(job):
                skipped.append(job)
        for job in skipped:
            self._push(job)

    def drain(self) -> list[Job]:
        """Remove and return all waiting jobs."""
        with self._lock:
            left = [job for _, _, job in self._heap if self.withdraw(job)]
            self._heap.clear()
        return left

    def _push(self, job: Job) -> None:
        heapq.heappush(self._heap, (job.order_at, next(self._numbers), job))

    def _pop(self, now_at: float, expired: list[Job]) -> Job | None:
        """Take the first waiting job out of the heap whose deadline has not passed.

        The job stays `is_waiting`; those whose deadline has passed go to `expired`.
        """
        while self._heap:
            order_at, _, job = heapq.heappop(self._heap)
            # The entry is stale: the job was withdrawn, or hastened and pushed again.
            if not job.is_waiting or order_at != job.order_at:
                continue
            if job.deadline_at <= now_at:
                self.withdraw(job)
                expired.append(job)
                continue
            return job
        return None
