"""The jobs that wait for the device, and which of them form the next pass.

Pure: no tensor, no clock.

A job is a unit of device work. Its submitter may change its order while it waits or runs:

    submitter --Job--> JobQueue --pass--> device thread --JobResult--> submitter
        |                  ^
        +---JobOrder-------+

**ScoreBlend.** The job with the earliest `order_at` runs first. A request's `order_at` is the
instant by which it should be done (its objective, or its deadline), and never later than `aging_s`
after it arrived: no request starves. A request whose tenant has less than its share of what waits
and of the newest pass runs as if it were due when it came: it is behind the pass that runs, and not
behind another tenant's queue.

**Preemptible jobs** (prefills, copies to DRAM) run only when no request is queued, the oldest
first. When a request starts to wait for one, `hasten` gives that job the request's own order. So a
prefill whose rank was rejected takes no time from the ranks that were admitted. Prefills run one
after the other, not chunk by chunk in turn, because in turn all of them would end late.

**Passes.** Jobs with one `run` function may share a pass, as long as the sum of their demands is
within the limits and no job in the pass becomes late by the jobs added to it. A job that does not
fit is passed over; nobody waits for it. A request that goes first for its tenant's share has only
others like it in its pass: it would wait for whatever a tenant with more than that put beside it.

Invariants, held by tests/engine/test_queue.py:
  Q1  a job leaves the queue exactly once a step: it is taken, expires, is shed, or is withdrawn
  Q2  a pass of more than one job is within every limit
  Q3  at most `max_queue` jobs wait, not counting those that were `put` with force
  Q4  of two jobs that could both be taken, the one with the earlier `order_at` is
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

# takes the works of one pass, returns one result for each
BatchFn = Callable[[Sequence[Any]], Sequence[Any]]


class Demand(NamedTuple):
    """How much a job adds to its pass."""

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
    """One unit of device work, in the queue's own terms."""

    run: BatchFn
    work: Any = None  # of the current step
    kind: str = "other"  # label of the device-time metric
    shares: bool = False  # may share a pass with other jobs of the same `run`
    # limit of such a pass; None = `SchedulerConfig.max_batch_requests`
    max_requests: int | None = None
    demand: Demand = NOTHING
    deadline_at: float = float("inf")  # it is dropped if it has not begun by then
    order_at: float = float("inf")  # the earliest runs first
    estimate_s: float = 0.0  # device seconds of the current step
    objective_s: float = float("inf")  # of its request, from arrival to answer
    tenant: str = ""  # of its request
    # waits behind every request; a full queue drops it to make room for one
    preemptible: bool = False
    # later steps; each is a pass of its own, and other jobs may run in between
    rest: Sequence[JobStep] = ()
    ran: int = 0  # steps that have run
    arrived_at: float | None = None  # of its request; None = when the job is put
    submitted_at: float = 0.0
    is_waiting: bool = False
    is_ahead: bool = False  # its tenant had less than its share when it was put
    tag: Any = None  # the submitter's
    has_ended: bool = False  # set on the event loop: the device has let go of it
    let_go: Any = None  # a future of a submitter that was cancelled before that


class JobResult(msgspec.Struct, Generic[T], frozen=True):
    """A job's result and where its time went."""

    value: T
    queue_s: float
    device_s: float
    batch_size: int = 1  # jobs of its pass
    steps: int = 1  # of a sequence, that ran


class JobOrder:
    """A job's mutable place in the queue: it can be raised (`hasten`), or stopped after the running step.

    One order may serve several jobs in turn: a prefill that extends another prefix copies that one
    first.
    """

    def __init__(self, order_at: float, arrived_at: float | None = None) -> None:
        """The job is to be done by `order_at`.

        Args:
            order_at: the job's rank in the queue, an instant on time.monotonic(); infinity = when
                nothing else waits.
            arrived_at: the instant at which it was first wanted, from which aging counts; None =
                each job, and each step of a sequence, counts from its own submission.
        """
        self.order_at = order_at
        self.arrived_at = arrived_at
        self.is_cancelled_at_step = False
        self._on_change: Callable[[], None] | None = None

    def hasten(self, order_at: float) -> None:
        """Raise the order to `order_at`. A later instant than the present one changes nothing."""
        if order_at < self.order_at:
            self.order_at = order_at
            self._changed()

    def cancel_at_step(self) -> None:
        """End a sequence, without an error, after the step that runs.

        Steps that have not begun do not run.
        """
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


# Added to the `order_at` of a preemptible job. Clocks count seconds since boot, so this is later
# than every request.
BEHIND_S = 1e9
# Waiting jobs looked at to fill one pass. It bounds the time that a device thread holds the queue's
# lock.
SCAN = 64


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the queue and of one pass."""

    streams: Count = 1  # passes at once, over one copy of the weights; on a CPU each is a thread
    max_queue: Count = 256  # jobs waiting; the next one is rejected (429)
    max_batch_requests: Count = 4  # in one pass; more helps only accelerators
    max_batch_tokens: Count = 4096  # history and prompt tokens computed in one pass
    max_batch_rows: Count = 4096  # candidates and beams in one pass
    max_batch_logits: Count = 1 << 25  # beams x vocabulary of a generate; a rank's are few
    max_batch_wait_s: SecondsOrZero = 0.0  # for more of a kind, if the deadline leaves it
    aging_s: Seconds = 2.0  # a job this old goes before every job that came later
    # the longest that a pre-infer delays a rank
    prefill_chunk_tokens: Annotated[int, msgspec.Meta(ge=64)] = 512


class NextPass(NamedTuple):
    """The decision of `JobQueue.take`."""

    jobs: list[Job]  # of one pass
    expired: list[Job]  # their deadline passed while they waited
    # no jobs: ask again after this many seconds; None = when the queue changes
    wait_s: float | None


def _fits(demand: Demand, config: SchedulerConfig) -> bool:
    """Return whether a pass with this demand is within every limit."""
    return (
        demand.tokens <= config.max_batch_tokens
        and demand.rows <= config.max_batch_rows
        and demand.logits <= config.max_batch_logits
    )


class _Batch:
    """A pass being put together: its jobs, their demand, and by when it must end."""

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
        """Add a job if it may share the pass and makes no job of it late.

        Returns whether it did.
        """
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
        """Estimated seconds that the pass may take so that `job` is in time.

        No limit for a job that is late anyhow.
        """
        left_s = (job.order_at - self._now_at) / self._slowdown
        return left_s if job.estimate_s <= left_s else float("inf")

    def may_wait_s(self) -> float:
        """Seconds to wait for more jobs: within `max_batch_wait_s`, and only as long as no deadline is at risk."""
        if self.is_full or not self._config.max_batch_wait_s:
            return 0.0
        patient_until_at = (
            min(job.submitted_at for job in self.jobs) + self._config.max_batch_wait_s
        )
        latest_start_at = min(job.deadline_at - job.estimate_s for job in self.jobs)
        return min(patient_until_at, latest_start_at) - self._now_at


class _Shares:
    """How much of the queue and of the newest pass each tenant has.

    The newest pass counts, since a queue is often empty while a tenant has all of the device.
    """

    def __init__(self) -> None:
        self.weights: Mapping[str, float] = {}  # of tenants; all others have 1
        # requests of the newest pass; a tenant that has none has no entry
        self.newest: Counter[str] = Counter()
        self._held: Counter[str] = Counter()  # requests that wait, likewise

    def change(self, tenant: str, by: int) -> None:
        """Count a request that comes or goes."""
        self._held[tenant] += by
        if not self._held[tenant]:
            del self._held[tenant]

    def is_under(self, tenant: str) -> bool:
        """Whether a tenant would hold less than its share of what waits and of the newest pass, with one more."""
        names = self._held.keys() | self.newest.keys() | {tenant}
        if len(names) == 1:
            return False
        total = sum([self.weights.get(name, 1.0) for name in names])
        held = self._held.get(tenant, 0) + self.newest.get(tenant, 0) + 1
        return held * total < self.weights.get(tenant, 1.0) * (
            self._held.total() + self.newest.total() + 1
        )


class JobQueue:
    """A heap of waiting jobs by `order_at`.

    Any thread may call every method; a lock guards each call.

    A job that leaves early, or is hastened, leaves its old place in the heap behind; `_pop` skips
    such places.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._lock = threading.RLock()
        self._heap: list[tuple[float, int, Job]] = []
        # of equal `order_at`, the job that was put first goes first
        self._numbers = itertools.count()
        self._preemptible: dict[Job, None] = {}  # oldest first
        self._waiting = 0
        self.shares = _Shares()
        self._pressure = 0.0
        self.slowdown = SlowdownEwma()  # of passes; whoever runs them reports how long they took

    def __len__(self) -> int:
        return self._waiting

    @property
    def pressure(self) -> float:
        """Sum over the waiting requests of (estimated device seconds / objective seconds of the request).

        Preemptible jobs do not count: they let every request pass.
        """
        return self._pressure * self.slowdown.value

    def ahead_s(self, order_at: float) -> float:
        """Estimated device seconds of the waiting jobs that would run before a job of this order."""
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
        """Take a job in.

        Args:
            job: it gets its final `order_at` here.
            now_at: the clock.
            force: take it in even if the queue is full.

        Returns:
            the last of the preemptible jobs, if it had to make room: that of the tenant with the
            most before it.

        Raises:
            Overloaded: the queue is full, and no job in it may be shed for this one.
        """
        with self._lock:
            return self._put(job, now_at, force)

    def _put(self, job: Job, now_at: float, force: bool) -> Job | None:
        arrived_at = now_at if job.arrived_at is None else job.arrived_at
        if job.preemptible:  # behind every request, the oldest first, unless a request waits for it
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
        """Put a job back for its next step. Returns False if the step that ran was its last.

        Call it before the next `take`, so that a later job does not overtake this one.
        """
        job.ran += 1
        if not job.rest:
            return False
        (job.work, job.estimate_s), *job.rest = job.rest
        self.put(job, now_at, force=True)
        return True

    def withdraw(self, job: Job) -> bool:
        """Take a job out, and its later steps.

        Returns False if it is not waiting: the step that runs is its last.
        """
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
            self._pressure = 0.0  # exactly: rounding errors must not add up
        return True

    def hasten(self, job: Job, order_at: float) -> None:
        """Move a job forward because something more urgent waits for it.

        If a step of it runs, the later steps move.
        """
        with self._lock:
            if order_at < job.order_at:
                job.order_at = order_at
                if job.is_waiting:
                    self._push(job)

    def take(self, now_at: float) -> NextPass:
        """Decide on the next pass, and take its jobs out."""
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
        """Add the waiting jobs that may share the pass, in their order; the others go back."""
        passed_over: list[Job] = []
        while not batch.is_full and len(passed_over) < SCAN:
            job = self._pop(now_at, expired)
            if job is None:
                break
            if not batch.add(job):
                passed_over.append(job)
        for job in passed_over:
            self._push(job)

    def drain(self) -> list[Job]:
        """Take every waiting job out."""
        with self._lock:
            left = [job for _, _, job in self._heap if self.withdraw(job)]
            self._heap.clear()
        return left

    def _push(self, job: Job) -> None:
        heapq.heappush(self._heap, (job.order_at, next(self._numbers), job))

    def _pop(self, now_at: float, expired: list[Job]) -> Job | None:
        """Take the first job out of the heap that still waits and is in time.

        It stays `is_waiting`.
        """
        while self._heap:
            order_at, _, job = heapq.heappop(self._heap)
            # withdrawn, or hastened and pushed again
            if not job.is_waiting or order_at != job.order_at:
                continue
            if job.deadline_at <= now_at:
                self.withdraw(job)
                expired.append(job)
                continue
            return job
        return None
