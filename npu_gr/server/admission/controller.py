"""Admission control: admit, queue or reject a request by the time at which it would be answered.

    arrive --> active (at most a concurrency limit of work) --> leave
       |          ^                 |   ^
       |          |                 v   |
       |--> queued, tenants in turn  suspended: waits for something else than this instance
       |
       '--> rejected (429): it could not be answered in time

    concurrency limit   of each kind: `share` of its objective over its service time (Little's law), so that the active
                        requests delay nobody for long
    service time        seconds a request, learnt from departures (`ServiceTime`)
    queue               kinds by `Kind.priority`; within a priority the tenants take turns (`fair_queue.py`)
    within SLO          now + the work ahead + its own <= arrival + TARGET x what it has: the objective of its kind, or
                        the client's budget if that is smaller. A queued request is checked again at
                        its turn, and every TICK_S

A request that finds a free place is admitted without a forecast: an instance that is nearly idle
rejects nobody, whatever its estimates say. A request of an important kind does not count the active
requests of less important ones.

Invariants:
  D1  a queued request is admitted, rejected or cancelled: exactly one of the three, once
  D2  `active` counts the permits that were given, have not been given back, and are not suspended
  D3  nobody is queued while there is a free place for the first in turn, unless its tenant is full

Sources: Little's law for the limit; CoDel (RFC 8289) for the second target.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import msgspec

from npu_gr.core.errors import Overloaded, Rejection
from npu_gr.core.kinds import KINDS, RANK, Kind, Priority
from npu_gr.core.settings import Count, Positive
from npu_gr.server.admission.fair_queue import Holder, PriorityQueue, Tenants

# whatever the limit is: it fills a pass, and lets an instance with a wrong objective serve
MIN_ACTIVE = 4
# of a kind: more do not make the device faster, but the turns of the event loop longer
MAX_ACTIVE = 64
# active where tenants share: the loop does all active ones before a rank that comes
MAX_SIGNALS = 2
# of the objective: the service time of a kind that uses the device, until it is learnt
GUESS = 0.02
# the service time of the other kinds, until it is learnt: parsing and answering
HOST_GUESS_S = 0.0005
TARGET = 0.95  # of the time that a request has: the rest is for writing the answer
TARGET_BURST = 1.15  # while the queue is younger than STANDING_S: the service time may be stale
TARGET_STANDING = 0.75  # afterwards, so that not every answer is nearly late
STANDING_S = 0.1  # CoDel's interval
TICK_S = 0.004  # between two checks for queued requests that will be late
MESSAGES = {
    Rejection.LATE: "it would not be answered in time: the instance is busy",
    Rejection.SHARE: "the tenant signals far more than it ranks, and others share the instance",
}
_NEVER = -math.inf  # an instant


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `admission`: how much work is admitted at once, and the weights of tenants."""

    enabled: bool = True  # false = nothing is queued or rejected: for comparisons
    # of a kind's objective: that much of its work is active
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.35
    max_inflight: Count = 512  # requests that hold memory at once, suspended ones included
    # of all that tenants share where it is scarce; all others have 1
    tenant_weights: dict[str, Positive] = {}


class ServiceTime:
    """Seconds that an instance takes for one more request of a kind.

    A sample is the time between two departures while there was work in between. So the estimate
    holds whatever bounds the instance, the device or the event loop, and an idle instance learns
    nothing. 32 departures, or 40 ms of them, renew it; one pause moves it by a quarter at most. A
    sample counts as 8 estimates or 8 ms at most: where threads outnumber cores a process stands
    still for some milliseconds some forty times a second, and that belongs to it.
    """

    __slots__ = ("_samples", "seconds")

    def __init__(self, guess_s: float) -> None:
        self.seconds = guess_s
        self._samples = 0

    def observe(self, gap_s: float) -> None:
        """Learn from one departure, `gap_s` seconds after the one before."""
        self._samples += 1
        weight = max(min(1 / 32, self.seconds / 0.04), 1 / (self._samples + 1))
        self.seconds += weight * (min(gap_s, max(8.0 * self.seconds, 0.008)) - self.seconds)


class _Mix:
    """The service time and the objective of the kinds as they come.

    A proxy is told one limit for all of them.
    """

    __slots__ = ("objective_s", "service_time")

    def __init__(self, objective_s: float) -> None:
        self.objective_s = objective_s
        self.service_time = ServiceTime(GUESS * objective_s)

    def observe(self, gap_s: float, objective_s: float) -> None:
        self.service_time.observe(gap_s)
        self.objective_s += (objective_s - self.objective_s) / 32


class QueuedRequest:
    """A request that waits for its turn; `FairQueue` owns `cost_s`, `queue` and `is_gone`."""

    __slots__ = (
        "arrived_at",
        "budget_s",
        "cost_s",
        "due_at",
        "is_gone",
        "kind",
        "permit",
        "queue",
        "tenant",
    )

    def __init__(
        self, kind: str, tenant: str, arrived_at: float, budget_s: float, cost_s: float
    ) -> None:
        self.kind = kind
        self.tenant = tenant
        self.arrived_at = arrived_at
        self.budget_s = budget_s  # from its arrival to its answer
        self.due_at = arrived_at + budget_s
        self.cost_s = cost_s  # its service time
        self.queue = ""
        self.is_gone = False
        self.permit: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()


class Permit:
    """The right to be served.

    Its holder calls `leave` when there is an answer, or when there is none.
    """

    __slots__ = ("_controller", "_holder", "_kind", "arrived_at")

    def __init__(
        self, controller: AdmissionController, kind: KindState, holder: Holder, arrived_at: float
    ) -> None:
        self._controller: AdmissionController | None = controller
        self._kind = kind
        self._holder = holder
        self.arrived_at = arrived_at  # of the request, on the controller's clock

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give the permit back. Calls after the first one do nothing."""
        controller, self._controller = self._controller, None
        if controller is not None:
            controller._left(self._kind, self._holder)

    def outside(self) -> AbstractContextManager[None]:
        """Hold no place while the block waits for something else; come back without a queue."""
        if self._controller is None:
            return nullcontext()
        return _Suspended(self._controller, self._kind, self._holder)


class _Suspended(AbstractContextManager[None]):
    """A block in which a permit holds no place."""

    __slots__ = ("_controller", "_holder", "_kind")

    def __init__(self, controller: AdmissionController, kind: KindState, holder: Holder) -> None:
        self._controller = controller
        self._kind = kind
        self._holder = holder

    def __enter__(self) -> None:
        self._controller._suspend(self._kind, self._holder, 1)

    def __exit__(self, *_: object) -> None:
        self._controller._suspend(self._kind, self._holder, -1)


class KindState:
    """What is known of one kind."""

    __slots__ = (
        "active",
        "kind",
        "max_active",
        "objective_s",
        "priority",
        "service_time",
        "suspended",
        "waiting",
    )

    def __init__(self, kind: Kind[Any, Any], objective_s: float) -> None:
        self.kind = kind
        self.objective_s = objective_s
        self.priority = int(kind.priority)
        # where tenants share
        self.max_active = MAX_SIGNALS if kind.priority is Priority.SIGNAL else math.inf
        self.service_time = ServiceTime(GUESS * objective_s if kind.uses_device else HOST_GUESS_S)
        self.active = 0
        self.suspended = 0
        self.waiting = 0


class ActiveWork:
    """The requests of an instance that are active, and whether one more may be."""

    def __init__(
        self, config: AdmissionConfig, objective_s: Callable[[str], float], batch_requests: int
    ) -> None:
        """Start empty; the arguments are those of the controller."""
        self.config = config
        self.min_active = max(MIN_ACTIVE, batch_requests)
        self._max = max(MAX_ACTIVE, 2 * batch_requests)
        self.kinds = {kind.name: KindState(kind, objective_s(kind.name)) for kind in KINDS.values()}
        self._up_to = [[one for one in self.kinds.values() if one.priority <= p] for p in Priority]
        self._mix = _Mix(objective_s(RANK.name))
        self._departed_at = _NEVER  # the last departure that left work to do
        self.admitted = 0  # permits that are held, active and suspended
        self.active = 0

    def counts(self, kind: str) -> dict[str, int]:
        """Count a kind's requests by where they are: waiting, active, suspended."""
        state = self.kinds[kind]
        return {"waiting": state.waiting, "active": state.active, "suspended": state.suspended}

    def service_time_s(self, kind: str) -> float:
        """Return the service time of a kind, in seconds a request."""
        return self.kinds[kind].service_time.seconds

    def window(self, kind: str) -> int:
        """Return the concurrency limit of a kind while no other kind is active."""
        return int(self.limit(self.kinds[kind]))

    def limit(self, state: KindState) -> float:
        """The concurrency limit of a kind while no other kind is active."""
        fits = self.config.share * state.objective_s / max(state.service_time.seconds, 1e-9)
        return min(max(fits, self.min_active), self._max)

    def proxy_limit(self, share: float, at_least: int, at_most: int) -> int:
        """How many requests a proxy should send at once: what takes `share` of the objective."""
        fits = share * self._mix.objective_s / max(self._mix.service_time.seconds, 1e-9)
        return int(min(max(fits, at_least), at_most))

    def has_room(self, state: KindState, *, are_sharing: bool) -> bool:
        """Whether one more of a kind may be active beside those that are as important, or more."""
        if self.admitted >= self.config.max_inflight:
            return False
        if state.active >= state.max_active and are_sharing:
            return False
        num_active = 0
        used = 1 / self.limit(state)
        for other in self._up_to[state.priority]:
            if other.active:
                num_active += other.active
                used += other.active / self.limit(other)
        return num_active < self.min_active or used <= 1.0 + 1e-9

    def seconds(self, priority: int) -> float:
        """Seconds of active work that is as important, and of one less important request, which may have begun."""
        ahead_s = 0.0
        begun_s = 0.0
        for state in self.kinds.values():
            if state.active and state.priority <= priority:
                ahead_s += state.active * state.service_time.seconds
            elif state.active:
                begun_s = max(begun_s, state.service_time.seconds)
        return ahead_s + begun_s

    def add(self, state: KindState, num: int = 1) -> None:
        """Count one more active request of a kind, or with -1 one less, which goes on later."""
        if not self.active:
            # what departs after an idle time tells nothing of the service time
            self._departed_at = _NEVER
        self.active += num
        state.active += num

    def left(self, state: KindState, now_at: float) -> None:
        """Count a departure, and learn from it."""
        if self._departed_at > _NEVER:
            state.service_time.observe(now_at - self._departed_at)
            self._mix.observe(now_at - self._departed_at, state.objective_s)
        state.active -= 1
        self.active -= 1
        self.admitted -= 1
        self._departed_at = now_at if self.active else _NEVER


class WaitForecast:
    """Says which requests would be answered too late, by the work that is active and the work that waits."""

    def __init__(
        self, work: ActiveWork, queue: PriorityQueue[QueuedRequest], clock: Callable[[], float]
    ) -> None:
        """Look at what is there; the clock is that of the queue."""
        self._work = work
        self._queue = queue
        self._clock = clock

    def is_late_behind(
        self, state: KindState, tenant: str, arrived_at: float, budget_s: float
    ) -> bool:
        """Whether a request that came now would be late behind those that wait."""
        target = TARGET_STANDING if self._queue.stood_s() > STANDING_S else TARGET_BURST
        ahead_s = self._work.seconds(state.priority)
        ahead_s += self._queue.ahead_s(state.priority, tenant, arrived_at + budget_s)
        return self._clock() + ahead_s + state.service_time.seconds > arrived_at + target * budget_s

    def is_late(self, queued: QueuedRequest) -> bool:
        """Whether a queued request would be late even if it were admitted now."""
        done_at = (
            self._clock()
            + self._work.seconds(self._work.kinds[queued.kind].priority)
            + queued.cost_s
        )
        return done_at > queued.arrived_at + TARGET * queued.budget_s


class AdmissionController:
    """Admission control of one instance. Event loop only."""

    def __init__(
        self,
        config: AdmissionConfig,
        objective_s: Callable[[str], float],
        *,
        batch_requests: int = MIN_ACTIVE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty.

        Args:
            config: bounds and weights.
            objective_s: seconds within which a kind, by its name, should be answered.
            batch_requests: of one device pass; this many may always be active.
            clock: seconds that never go back.
        """
        self._config = config
        self._clock = clock
        self.work = ActiveWork(config, objective_s, batch_requests)
        self._queue = PriorityQueue[QueuedRequest](len(Priority), config.tenant_weights, clock)
        self._forecast = WaitForecast(self.work, self._queue, clock)
        self._tenants = Tenants(config.tenant_weights, self.work.min_active, clock)
        self._tick: asyncio.TimerHandle | None = None

    def reconfigure(self, config: AdmissionConfig, objective_s: Callable[[str], float]) -> None:
        """Apply other settings from now on; what was learnt stays."""
        self._config = self.work.config = config
        self._tenants.weights = config.tenant_weights
        self._queue.weigh(config.tenant_weights)
        for state in self.work.kinds.values():
            state.objective_s = objective_s(state.kind.name)

    # ---- for metrics, the brown-out and the proxy

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def pressure(self) -> float:
        """Queued work over the objectives of its requests, once the queue stands; 0 for a burst that passes."""
        if self._queue.stood_s() <= STANDING_S:
            return 0.0
        return sum(
            one.waiting * one.service_time.seconds / one.objective_s
            for one in self.work.kinds.values()
        )

    # ---- arriving

    async def enter(self, kind: str, tenant: str, arrived_at: float, budget_s: float) -> Permit:
        """Wait until the request is admitted.

        Args:
            kind: its name.
            tenant: whose turn it takes.
            arrived_at: instant of its arrival, on the controller's clock.
            budget_s: what the client grants, from then on.

        Raises:
            Overloaded: it could not be answered in time, or its tenant has no signals left.
        """
        state = self.work.kinds[kind]
        budget_s = min(state.objective_s, budget_s)
        self._tenants.saw(tenant)
        if not self._config.enabled:
            return self._admit(state, tenant, arrived_at)
        is_signal = state.priority == Priority.SIGNAL
        if is_signal and not self._tenants.take_signal(tenant, state.service_time.seconds):
            raise _rejection(Rejection.SHARE)
        has_place = self._has_room(state) and not self._tenants.is_full(tenant)
        if has_place and not self._queue.is_anybody_before(state.priority):
            return self._admit(state, tenant, arrived_at)
        if self._forecast.is_late_behind(state, tenant, arrived_at, budget_s):
            raise _rejection(Rejection.LATE)
        queued = QueuedRequest(kind, tenant, arrived_at, budget_s, state.service_time.seconds)
        self._queue.push(queued, state.priority)
        state.waiting += 1
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._check_late)
        if has_place:
            self._serve_next()  # those before it may all be full
        try:
            return await queued.permit
        except asyncio.CancelledError:
            if not queued.is_gone:
                self._remove(queued)
            elif not queued.permit.cancelled() and queued.permit.exception() is None:
                queued.permit.result().leave()  # it was admitted in this very turn
            raise

    def would_reject(self, kind: str, tenant: str, arrived_at: float, budget_s: float) -> bool:
        """Whether `enter` would reject this request at once for its time; nothing changes."""
        state = self.work.kinds[kind]
        if not self._config.enabled or (
            self._has_room(state) and not self._queue.is_anybody_before(state.priority)
        ):
            return False
        return self._forecast.is_late_behind(
            state, tenant, arrived_at, min(state.objective_s, budget_s)
        )

    def _has_room(self, state: KindState) -> bool:
        return self.work.has_room(
            state, are_sharing=self._config.enabled and self._tenants.are_sharing()
        )

    def _admit(self, state: KindState, tenant: str, arrived_at: float) -> Permit:
        holder = self._tenants.admitted(tenant, uses_device=state.kind.uses_device)
        self.work.admitted += 1
        self.work.add(state)
        return Permit(self, state, holder, arrived_at)

    # ---- permits

    def _left(self, state: KindState, holder: Holder) -> None:
        self.work.left(state, self._clock())
        self._tenants.left(holder)
        self._serve_next()

    def _suspend(self, state: KindState, holder: Holder, num: int) -> None:
        """Count a permit as suspended, or with -1 as active again."""
        state.suspended += num
        holder.active -= num
        self.work.add(state, -num)
        if self._queue and num > 0:
            # later, because a block that need not wait at all is back before then
            asyncio.get_running_loop().call_soon(self._serve_next)

    # ---- the queue

    def _serve_next(self) -> None:
        """Admit whoever is first in turn while there is room.

        Reject whoever would be late by now.
        """
        while self._queue:
            queued = self._queue.first(self._over_their_share, self._tenants.full())
            if queued is None or not self._has_room(state := self.work.kinds[queued.kind]):
                return
            is_late = self.work.active >= self.work.min_active and self._forecast.is_late(queued)
            if is_late or queued.permit.cancelled():
                self._reject(queued)
                continue
            self._queue.take(queued, state.priority)
            state.waiting -= 1
            queued.permit.set_result(self._admit(state, queued.tenant, queued.arrived_at))

    def _over_their_share(self, waiting: Set[str]) -> Set[str]:
        # the last one is about to go
        of_permits = self.work.admitted + 1 >= self._config.max_inflight
        num = self.work.admitted if of_permits else self.work.active
        return self._tenants.over_their_share(waiting, num, of_permits=of_permits)

    def _reject(self, queued: QueuedRequest) -> None:
        self._remove(queued)
        if not queued.permit.done():  # else its client has just disconnected
            queued.permit.set_exception(_rejection(Rejection.LATE))

    def _remove(self, queued: QueuedRequest) -> None:
        state = self.work.kinds[queued.kind]
        self._queue.drop(queued, state.priority)
        state.waiting -= 1

    def _check_late(self) -> None:
        """Reject those whose turn will come too late; once more while the queue is not empty."""
        self._tick = None
        while late := [queued for queued in self._queue.heads() if self._forecast.is_late(queued)]:
            for queued in late:
                self._reject(queued)
        self._serve_next()
        if self._queue and self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._check_late)


def _rejection(reason: Rejection) -> Overloaded:
    return Overloaded(MESSAGES[reason], reason=reason)
