"""Fair queueing between tenants: each tenant gets service in proportion to its weight.

Within a tenant the request with the earliest deadline goes first. Among tenants the one with the
least service / weight (its virtual time) goes first; a tenant that starts to wait begins at the
virtual time of the request served last. So a tenant with little traffic waits for the requests in
progress and hardly ever for another tenant's queue.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, KeysView, Mapping, Set
from typing import Generic, Protocol, TypeVar

from npu_gr.core.shares import WANTS_S, Account, Shares, name_of


class Queued(Protocol):
    """A queued request. The queue sets `queue` and `is_gone`; the others stay as they are."""

    tenant: str
    due_at: float  # instant of its deadline
    cost_s: float  # its estimated service time
    queue: str  # the tenant's name, or the name that tenants beyond `MAX_TENANTS` share
    is_gone: bool  # no longer queued; its heap entry is skipped


W = TypeVar("W", bound=Queued)


class _TenantQueue(Generic[W]):
    """The queue of one tenant."""

    __slots__ = ("cost_s", "heap", "latest_at", "virtual_s", "weight")

    def __init__(self, weight: float, virtual_s: float) -> None:
        self.weight = weight
        self.virtual_s = virtual_s  # service received / weight
        self.heap: list[tuple[float, int, W]] = []
        self.cost_s = 0.0  # sum over the queued requests
        self.latest_at = float("-inf")  # the latest `due_at` of the queued requests

    def before_s(self, due_at: float) -> float:
        """Sum the seconds of the tenant's own work that is due no later than `due_at`."""
        if due_at >= self.latest_at:
            return self.cost_s
        return sum(
            queued.cost_s for at, _, queued in self.heap if at <= due_at and not queued.is_gone
        )


class FairQueue(Generic[W]):
    """A queue of requests of the same priority.

    Invariant: `cost_s` is the sum over the queued requests that are not gone.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Start empty.

        Args:
            weights: Tenant -> weight; all others have 1.
        """
        self.weights = weights
        self.cost_s = 0.0
        self._tenants: dict[str, _TenantQueue[W]] = {}
        self._virtual_s = 0.0  # virtual time at which the request served last began
        # breaks ties between equal deadlines: first come, first served
        self._numbers = itertools.count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def names(self) -> KeysView[str]:
        """Names of the tenants with queued requests."""
        return self._tenants.keys()

    def ahead_s(self, tenant: str, due_at: float) -> float:
        """Estimate the seconds of work in front of a tenant's request that arrives now."""
        if not self._waiting:
            return 0.0
        own = self._tenants.get(self._queue_of(tenant))
        start_s = self._virtual_s
        ahead_s = 0.0
        if own is not None:
            ahead_s = own.before_s(due_at)
            start_s = own.virtual_s + ahead_s / own.weight
        for other in self._tenants.values():
            if other is not own and other.virtual_s < start_s:
                ahead_s += min(other.cost_s, (start_s - other.virtual_s) * other.weight)
        return ahead_s

    def push(self, queued: W) -> None:
        """Add a request."""
        name = queued.queue = self._queue_of(queued.tenant)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _TenantQueue(
                self.weights.get(name, 1.0), self._virtual_s
            )
        heapq.heappush(tenant.heap, (queued.due_at, next(self._numbers), queued))
        tenant.latest_at = max(tenant.latest_at, queued.due_at)
        tenant.cost_s += queued.cost_s
        self.cost_s += queued.cost_s
        self._waiting += 1

    def head(self, over: Set[str] = frozenset(), without: Set[str] = frozenset()) -> W | None:
        """Return the next request; None = no tenant that may go has one.

        Args:
            over: Tenants that go after all others.
            without: Tenants that may not go at all.
        """
        may_go = [
            (name in over, one.virtual_s, name)
            for name, one in self._tenants.items()
            if name not in without
        ]
        return self._tenants[min(may_go)[2]].heap[0][2] if may_go else None

    def heads(self) -> list[W]:
        """List the first request of each tenant."""
        return [tenant.heap[0][2] for tenant in self._tenants.values()]

    def take(self, queued: W) -> None:
        """Remove a request that is served, and charge its cost to its tenant."""
        tenant = self._tenants[queued.queue]
        self._virtual_s = tenant.virtual_s
        tenant.virtual_s += queued.cost_s / tenant.weight
        self.drop(queued)

    def drop(self, queued: W) -> None:
        """Remove a request that will not be served; its tenant is not charged."""
        tenant = self._tenants[queued.queue]
        queued.is_gone = True
        tenant.cost_s -= queued.cost_s
        self.cost_s -= queued.cost_s
        self._waiting -= 1
        while tenant.heap and tenant.heap[0][2].is_gone:
            heapq.heappop(tenant.heap)
        if not tenant.heap:
            del self._tenants[queued.queue]
        if not self._waiting:
            self.cost_s = 0.0  # clears rounding errors

    def _queue_of(self, tenant: str) -> str:
        return name_of(tenant, self.weights, self._tenants)


# Tenants compete while the newest requests of two of them are no older than this.
TOGETHER_S = 1.0
# Device passes whose requests one tenant may hold while tenants compete. With 1 a tenant lost a
# sixth of its throughput, with 2 the other tenants wait.
MAX_PASSES = 1.5
# Signals that one request to the device earns: the request may come late, or its signal be resent.
EARNED = 2.0
MAX_CREDIT = 64.0  # signals; also the initial credit of a tenant
# Fraction of the event loop's time for signals without earned credit, all tenants together.
UNEARNED_SHARE = 0.02
_NO_TENANTS: Set[str] = frozenset()


class PriorityQueue(Generic[W]):
    """One fair queue per priority, served in order; priority 0 goes first."""

    def __init__(
        self, num_priorities: int, weights: Mapping[str, float], clock: Callable[[], float]
    ) -> None:
        """Start empty.

        Args:
            num_priorities: Number of queues.
            weights: Tenant -> weight; all others have 1.
            clock: Monotonic clock in seconds.
        """
        self._queues = [FairQueue[W](weights) for _ in range(num_priorities)]
        self._clock = clock
        self._waiting = 0
        self._since_at: float | None = None  # when it became non-empty; None = it is empty

    def __len__(self) -> int:
        return self._waiting

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Use other weights from now on."""
        for queue in self._queues:
            queue.weights = weights

    def stood_s(self) -> float:
        """Return the seconds since the queue became non-empty; 0 = it is empty."""
        return 0.0 if self._since_at is None else self._clock() - self._since_at

    def is_any_before(self, priority: int) -> bool:
        """Whether a request of this or a higher priority is queued."""
        return self._waiting > 0 and any(map(len, self._queues[: priority + 1]))

    def ahead_s(self, priority: int, tenant: str, due_at: float) -> float:
        """Estimate the seconds of queued work in front of a request that arrives now."""
        if not self._waiting:
            return 0.0
        before_s = sum(queue.cost_s for queue in self._queues[:priority])
        return before_s + self._queues[priority].ahead_s(tenant, due_at)

    def push(self, queued: W, priority: int) -> None:
        """Add a request."""
        self._queues[priority].push(queued)
        self._waiting += 1
        if self._since_at is None:
            self._since_at = self._clock()

    def first(self, over: Callable[[Set[str]], Set[str]], without: Set[str]) -> W | None:
        """Return the next request; None = none may go.

        Only the first non-empty queue is looked at: a lower priority must not take the places that
        a full tenant of a higher one is waiting for.

        Args:
            over: Maps the names of the waiting tenants to those that go after all others.
            without: Tenants that may not go at all.
        """
        for queue in self._queues:
            if not len(queue):
                continue
            return queue.head(over(queue.names) if len(queue.names) > 1 else _NO_TENANTS, without)
        return None

    def heads(self) -> list[W]:
        """List the first request of each tenant in each queue."""
        return [head for queue in self._queues for head in queue.heads()]

    def take(self, queued: W, priority: int) -> None:
        """Remove a request that is served."""
        self._queues[priority].take(queued)
        self._removed()

    def drop(self, queued: W, priority: int) -> None:
        """Remove a request that will not be served."""
        self._queues[priority].drop(queued)
        self._removed()

    def _removed(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._since_at = None


class Holder:
    """The permits of one tenant."""

    __slots__ = ("active", "admitted", "name")

    def __init__(self, name: str) -> None:
        self.name = name  # the tenant's, or the name that tenants beyond `MAX_TENANTS` share
        self.admitted = 0  # permits, suspended ones included
        self.active = 0  # permits that are not suspended


class _SignalCredit(Account):
    """The number of signals that one tenant may still send."""

    __slots__ = ("filled_at", "left")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.left = MAX_CREDIT
        self.filled_at: float | None = None  # no signal yet


class Tenants:
    """Permits and signal credit of the tenants, and their limits while they compete.

    Event loop only.
    """

    def __init__(
        self, weights: Mapping[str, float], pass_requests: int, clock: Callable[[], float]
    ) -> None:
        """Start without tenants.

        Args:
            weights: Tenant -> weight; all others have 1.
            pass_requests: Number of requests that fill one device pass.
            clock: Monotonic clock in seconds.
        """
        self.weights = weights  # a new value takes effect at once
        self._pass_requests = pass_requests
        self._clock = clock
        self._holders: dict[str, Holder] = {}
        self._last: str | None = None  # the tenant of the newest request
        self._mixed_at = float("-inf")  # when the tenant last differed from the one before
        self._credit = Shares(_SignalCredit, clock)

    # ---- arrivals

    def saw(self, tenant: str) -> None:
        """Note that a request of a tenant arrived."""
        if tenant != self._last:
            if self._last is not None:
                self._mixed_at = self._clock()
            self._last = tenant

    def are_sharing(self) -> bool:
        """Whether requests of several tenants arrived within the last `WANTS_S`."""
        return self._clock() - self._mixed_at < WANTS_S

    def take_signal(self, tenant: str, service_s: float) -> bool:
        """Take one signal from a tenant's credit.

        Args:
            tenant: Sender of the signal.
            service_s: Service time of a signal in seconds.

        Returns:
            False: the credit is spent while other tenants share the instance.
        """
        if not self.are_sharing():
            return True
        credit = self._credit.asking(tenant)
        now_at = self._clock()
        if credit.filled_at is not None:
            unearned_per_s = UNEARNED_SHARE / service_s / len(self._credit.accounts)
            credit.left = min(
                credit.left + unearned_per_s * (now_at - credit.filled_at), MAX_CREDIT
            )
        credit.filled_at = now_at
        if credit.left < 1.0:
            return False
        credit.left -= 1.0
        return True

    # ---- permits

    def admitted(self, tenant: str, *, uses_device: bool) -> Holder:
        """Count one more active permit of a tenant; a request to the device earns signals.

        Returns:
            The tenant's holder: pass it to `left`. The caller adjusts `active` while the permit is
            suspended.
        """
        name = name_of(tenant, self.weights, self._holders)
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = Holder(name)
        holder.admitted += 1
        holder.active += 1
        if uses_device and self.are_sharing():
            credit = self._credit.asking(tenant)
            credit.left = min(credit.left + EARNED, MAX_CREDIT)
        return holder

    def left(self, holder: Holder) -> None:
        """Count one active permit less."""
        holder.active -= 1
        holder.admitted -= 1
        if not holder.admitted:
            del self._holders[holder.name]

    # ---- limits while tenants compete

    def is_full(self, tenant: str) -> bool:
        """Whether a tenant has as many active permits as it may while tenants compete."""
        if not self._holders or not self._ask_together():
            return False
        holder = self._holders.get(name_of(tenant, self.weights, self._holders))
        return holder is not None and holder.active >= self._max_active(holder.name)

    def full(self) -> Set[str]:
        """Return the names of the tenants that are full."""
        if not self._ask_together():
            return _NO_TENANTS
        return {
            name
            for name, holder in self._holders.items()
            if holder.active >= self._max_active(name)
        }

    def over_their_share(self, waiting: Set[str], num: int, *, of_permits: bool) -> Set[str]:
        """Return the names of the tenants that hold more than their weighted share.

        Args:
            waiting: Tenants with queued requests; they have a share too.
            num: Number of permits that all tenants hold together.
            of_permits: Compare all permits; False = the active ones only.
        """
        total = sum([self.weights.get(name, 1.0) for name in self._holders.keys() | waiting])
        over = set()
        for name, holder in self._holders.items():
            held = holder.admitted if of_permits else holder.active
            if held * total > self.weights.get(name, 1.0) * num:
                over.add(name)
        return over

    def _ask_together(self) -> bool:
        return self._clock() - self._mixed_at < TOGETHER_S

    def _max_active(self, name: str) -> float:
        """Compute a tenant's largest number of active permits while tenants compete."""
        return MAX_PASSES * self._pass_requests * self.weights.get(name, 1.0)
