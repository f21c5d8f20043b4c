"""Admission control: admit, queue or reject a request by its predicted finish time.

    arrive --> active (at most a concurrency limit of work) --> leave
       |          ^                 |   ^
       |          |                 v   |
       |--> queued, tenants in turn  suspended: waits for another service, holds no place
       |
       '--> rejected (429): it would miss its SLO

    concurrency limit   per kind: `share` x objective / service time (Little's law), so that active
                        requests delay the next one by a share of its objective at most
    service time        seconds per request, learnt from departures (`ServiceTime`)
    queue               kinds by `Kind.priority`; within a priority, fair between tenants
                        (`fair_queue.py`)
    within SLO          now + work ahead + own service time <= arrival + TARGET x budget, where
                        budget is the smaller of the kind's objective and the client's time limit.
                        A queued request is checked again at its turn, and every TICK_S

A request that finds a free place is admitted without a forecast, so a nearly idle instance rejects
nothing, however wrong its estimates are. The limit of a kind ignores the active requests of kinds
that are less important.

Invariants:
  D1  a queued request is either admitted, rejected or cancelled, exactly once
  D2  `active` counts the permits that are held and not suspended
  D3  no request is queued while there is a free place for the next one, unless its tenant is full

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

# Lower bound of the concurrency limit: it fills a device pass, and an instance whose objective is
# set too small still serves.
MIN_ACTIVE = 4
# Upper bound per kind: more active requests lengthen the event loop's turns without gain on the
# device.
MAX_ACTIVE = 64
# Active signals while tenants share the instance: a rank that arrives waits for all of them.
MAX_SIGNALS = 2
# Service time before the first departures, as a fraction of the objective (kinds on the device) or
# in seconds (the other kinds: parsing and answering).
GUESS = 0.02
HOST_GUESS_S = 0.0005
TARGET = 0.95  # fraction of the budget; the rest is for writing the answer
# While the queue is younger than STANDING_S, accept up to 1.15x the budget: the service-time
# estimate may be stale. After that, stay well below the budget.
TARGET_BURST = 1.15
TARGET_STANDING = 0.75
STANDING_S = 0.1  # CoDel's interval
TICK_S = 0.004  # between two checks of the queue for requests that would miss their SLO
MESSAGES = {
    Rejection.LATE: "overloaded: the request would miss its latency objective or time limit",
    Rejection.SHARE: (
        "the tenant sends far more signals than ranks while other tenants share the instance"
    ),
}
_NEVER = -math.inf  # an instant before all others


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `admission`: how much work is admitted at once, and the weights of tenants."""

    enabled: bool = True  # false = nothing is queued or rejected (for comparisons)
    # fraction of a kind's objective that the work of its active requests may take
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.35
    max_inflight: Count = 512  # admitted requests at once, suspended ones included
    # tenant -> its weight where tenants compete; all others have 1
    tenant_weights: dict[str, Positive] = {}


class ServiceTime:
    """Moving average of the seconds that an instance takes for one more request of a kind.

    A sample is the time between two departures with work in between. The estimate therefore holds
    whether the device or the event loop is the bottleneck, and an idle instance learns nothing. The
    average spans about 32 departures or 40 ms of them, whichever is longer. A sample is cut off at
    8 estimates or 8 ms, whichever is larger: where threads outnumber cores, the scheduler suspends
    a process for some milliseconds some forty times a second, and the average should include that.
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
    """Service time and objective averaged over the kinds of the traffic.

    A proxy gets one limit for all kinds.
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
        self.cost_s = cost_s  # service-time estimate at its arrival
        self.queue = ""
        self.is_gone = False
        self.permit: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()


class Permit:
    """The right to be served; the holder calls `leave` once the request has ended."""

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

    def suspended(self) -> AbstractContextManager[None]:
        """Give up the place while the block waits for another service.

        At the block's end the permit is active again, without queueing.
        """
        if self._controller is None:
            return nullcontext()
        return _Suspended(self._controller, self._kind, self._holder)


class _Suspended(AbstractContextManager[None]):
    """Context manager that suspends a permit."""

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
    """Counts, limits and estimates of one kind."""

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
        # applies while several tenants share the instance
        self.max_active = MAX_SIGNALS if kind.priority is Priority.SIGNAL else math.inf
        self.service_time = ServiceTime(GUESS * objective_s if kind.uses_device else HOST_GUESS_S)
        self.active = 0
        self.suspended = 0
        self.waiting = 0


class ActiveWork:
    """The active requests of an instance, and the concurrency limits."""

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
        """Count a kind's requests by state: waiting, active, suspended."""
        state = self.kinds[kind]
        return {"waiting": state.waiting, "active": state.active, "suspended": state.suspended}

    def service_time_s(self, kind: str) -> float:
        """Return the service-time estimate of a kind, in seconds per request."""
        return self.kinds[kind].service_time.seconds

    def concurrency_limit(self, kind: str) -> int:
        """Return the concurrency limit of a kind while no other kind is active, in requests."""
        return int(self.limit(self.kinds[kind]))

    def limit(self, state: KindState) -> float:
        """Compute the concurrency limit of a kind while no other kind is active."""
        fits = self.config.share * state.objective_s / max(state.service_time.seconds, 1e-9)
        return min(max(fits, self.min_active), self._max)

    def proxy_limit(self, share: float, at_least: int, at_most: int) -> int:
        """Compute how many requests a proxy should send at once.

        Args:
            share: Fraction of the objective that those requests may take together.
            at_least: Smallest answer.
            at_most: Largest answer.
        """
        fits = share * self._mix.objective_s / max(self._mix.service_time.seconds, 1e-9)
        return int(min(max(fits, at_least), at_most))

    def has_room(self, state: KindState, *, are_sharing: bool) -> bool:
        """Whether one more request of a kind may become active.

        Only active requests of the same or a higher priority count. `are_sharing`: several tenants
        share the instance, so `KindState.max_active` applies.
        """
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
        """Estimate the seconds of active work in front of a request of this priority.

        Work of the same or a higher priority counts in full. Of less important work one request
        counts, since it may have begun and is not interrupted.
        """
        ahead_s = 0.0
        begun_s = 0.0
        for state in self.kinds.values():
            if state.active and state.priority <= priority:
                ahead_s += state.active * state.service_time.seconds
            elif state.active:
                begun_s = max(begun_s, state.service_time.seconds)
        return ahead_s + begun_s

    def add(self, state: KindState, num: int = 1) -> None:
        """Count one more active request of a kind; -1 = it is suspended."""
        if not self.active:
            # a departure after idle time is no sample of the service time
            self._departed_at = _NEVER
        self.active += num
        state.active += num

    def left(self, state: KindState, now_at: float) -> None:
        """Count a departure, and update the service-time estimate."""
        if self._departed_at > _NEVER:
            state.service_time.observe(now_at - self._departed_at)
            self._mix.observe(now_at - self._departed_at, state.objective_s)
        state.active -= 1
        self.active -= 1
        self.admitted -= 1
        self._departed_at = now_at if self.active else _NEVER


class WaitForecast:
    """Predicts which requests would miss their SLO, from the active and the queued work."""

    def __init__(
        self, work: ActiveWork, queue: PriorityQueue[QueuedRequest], clock: Callable[[], float]
    ) -> None:
        """Refer to the work and the queue; `clock` is the queue's."""
        self._work = work
        self._queue = queue
        self._clock = clock

    def is_late_behind(
        self, state: KindState, tenant: str, arrived_at: float, budget_s: float
    ) -> bool:
        """Whether a request that arrives now would miss its SLO behind the queued ones."""
        target = TARGET_STANDING if self._queue.stood_s() > STANDING_S else TARGET_BURST
        ahead_s = self._work.seconds(state.priority)
        ahead_s += self._queue.ahead_s(state.priority, tenant, arrived_at + budget_s)
        return self._clock() + ahead_s + state.service_time.seconds > arrived_at + target * budget_s

    def is_late(self, queued: QueuedRequest) -> bool:
        """Whether a queued request would miss its SLO even if it were admitted now."""
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
            config: Section `admission`.
            objective_s: Maps the name of a kind to its latency objective in seconds.
            batch_requests: Requests of one device pass; that many may always be active.
            clock: Monotonic clock in seconds.
        """
        self._config = config
        self._clock = clock
        self.work = ActiveWork(config, objective_s, batch_requests)
        self._queue = PriorityQueue[QueuedRequest](len(Priority), config.tenant_weights, clock)
        self._forecast = WaitForecast(self.work, self._queue, clock)
        self._tenants = Tenants(config.tenant_weights, self.work.min_active, clock)
        self._tick: asyncio.TimerHandle | None = None

    def reconfigure(self, config: AdmissionConfig, objective_s: Callable[[str], float]) -> None:
        """Apply other settings from now on; the learnt service times stay."""
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
        """Queued work in units of the objectives of its requests.

        0 until the queue has stood for STANDING_S, so a short burst has no pressure.
        """
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
            kind: Name of the kind.
            tenant: Tenant that the request counts for; "" = none is named.
            arrived_at: Instant of its arrival, on the controller's clock.
            budget_s: The client's time limit in seconds, counted from `arrived_at`.

        Raises:
            Overloaded: The request would miss its SLO, or the signal credit of its tenant is spent.
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
        if has_place and not self._queue.is_any_before(state.priority):
            return self._admit(state, tenant, arrived_at)
        if self._forecast.is_late_behind(state, tenant, arrived_at, budget_s):
            raise _rejection(Rejection.LATE)
        queued = QueuedRequest(kind, tenant, arrived_at, budget_s, state.service_time.seconds)
        self._queue.push(queued, state.priority)
        state.waiting += 1
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._check_late)
        if has_place:
            self._serve_next()  # the tenants of all requests in front may be full
        try:
            return await queued.permit
        except asyncio.CancelledError:
            if not queued.is_gone:
                self._remove(queued)
            elif not queued.permit.cancelled() and queued.permit.exception() is None:
                queued.permit.result().leave()  # admitted in the same turn of the event loop
            raise

    def would_reject(self, kind: str, tenant: str, arrived_at: float, budget_s: float) -> bool:
        """Whether `enter` would reject this request at once because of its SLO; changes nothing."""
        state = self.work.kinds[kind]
        if not self._config.enabled or (
            self._has_room(state) and not self._queue.is_any_before(state.priority)
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
            # deferred, because a block that need not wait at all ends before then
            asyncio.get_running_loop().call_soon(self._serve_next)

    # ---- the queue

    def _serve_next(self) -> None:
        """Admit queued requests in turn while there is room; reject those that became too late."""
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
        # the last free permit is about to be given
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
        """Reject queued requests that will miss their SLO; repeat while the queue is not empty."""
        self._tick = None
        while late := [queued for queued in self._queue.heads() if self._forecast.is_late(queued)]:
            for queued in late:
                self._reject(queued)
        self._serve_next()
        if self._queue and self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._check_late)


def _rejection(reason: Rejection) -> Overloaded:
    return Overloaded(MESSAGES[reason], reason=reason)
