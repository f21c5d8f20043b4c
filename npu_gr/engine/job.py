"""A unit of device work: what it runs, when it should run, and what comes of it.

The submitter may change the order of a job while it waits or runs:

    submitter --Job--> JobQueue --pass--> device thread --JobResult--> submitter
        |                  ^
        +---JobOrder-------+
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")

BatchFn = Callable[[Sequence[Any]], Sequence[Any]]  # takes the works of one pass, returns one result for each


class Demand(NamedTuple):
    """How much a job adds to its pass."""

    tokens: int = 0
    rows: int = 0
    logits: int = 0

    def plus(self, other: Demand) -> Demand:
        """Add two demands, field by field."""
        return Demand(self.tokens + other.tokens, self.rows + other.rows, self.logits + other.logits)


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
    max_requests: int | None = None  # limit of such a pass; None = `SchedulerConfig.max_batch_requests`
    demand: Demand = NOTHING
    deadline_at: float = float("inf")  # it is dropped if it has not begun by then
    order_at: float = float("inf")  # the earliest runs first
    estimate_s: float = 0.0  # device seconds of the current step
    objective_s: float = float("inf")  # of its request, from arrival to answer
    tenant: str = ""  # of its request
    preemptible: bool = False  # waits behind every request; a full queue drops it to make room for one
    rest: Sequence[JobStep] = ()  # later steps; each is a pass of its own, and other jobs may run in between
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

    One order may serve several jobs in turn: a prefill that extends another prefix copies that one first.
    """

    def __init__(self, order_at: float, arrived_at: float | None = None) -> None:
        """The job is to be done by `order_at`.

        Args:
            order_at: the job's rank in the queue, an instant on time.monotonic(); infinity = when nothing else waits.
            arrived_at: the instant at which it was first wanted, from which aging counts; None = each job, and each
                step of a sequence, counts from its own submission.
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
        """End a sequence, without an error, after the step that runs. Steps that have not begun do not run."""
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
