"""Queued requests, tenants in turn: each tenant gets service in proportion to its weight.

Within a tenant the request that is due first goes first. Among the tenants the one goes first that
has had the least service over its weight; a tenant that was not waiting begins level with the one
that was served last. So a tenant that asks for little waits for the requests in progress and hardly
ever for another tenant's queue.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, KeysView, Mapping, Set
from typing import Generic, Protocol, TypeVar

from npu_gr.core.shares import WANTS_S, Account, Shares, name_of


class Queued(Protocol):
    """What waits. The first three are fixed while it waits, the others are the queue's."""

    tenant: str
    due_at: float  # the instant at which its answer is due
    cost_s: float  # seconds of the instance that it will take
    queue: str  # the tenant's name, or that which the tenants beyond `MAX_TENANTS` share
    is_gone: bool  # it is not waiting any more, and its place in the heap will be skipped


W = TypeVar("W", bound=Queued)


class _TenantQueue(Generic[W]):
    """The queue of one tenant."""

    __slots__ = ("cost_s", "heap", "latest_at", "virtual_s", "weight")

    def __init__(self, weight: float, virtual_s: float) -> None:
        self.weight = weight
        self.virtual_s = virtual_s  # service that it has had, over its weight
        self.heap: list[tuple[float, int, W]] = []
        self.cost_s = 0.0  # of all that waits
        self.latest_at = float("-inf")  # when the last of them is due

    def before_s(self, due_at: float) -> float:
        """Seconds of its own work that go before a request that is due at `due_at`."""
        if due_at >= self.latest_at:
            return self.cost_s
        return sum(
            queued.cost_s for at, _, queued in self.heap if at <= due_at and not queued.is_gone
        )


class FairQueue(Generic[W]):
    """A queue of requests of equal importance.

    Invariant: `cost_s` is the sum over the requests that wait and are not gone.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Start empty.

        Args:
            weights: of tenants; all others have 1.
        """
        self.weights = weights
        self.cost_s = 0.0
        self._tenants: dict[str, _TenantQueue[W]] = {}
        self._virtual_s = 0.0  # at which the request that was served last began
        # of two that are due at the same instant, the first goes first
        self._numbers = itertools.count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def names(self) -> KeysView[str]:
        """The tenants for which something waits."""
        return self._tenants.keys()

    def ahead_s(self, tenant: str, due_at: float) -> float:
        """Estimate the seconds of work that would go before a request of a tenant that came now."""
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
        """Return the request that goes next; None = nothing waits for a tenant that may go.

        Args:
            over: tenants that go behind the others.
            without: tenants that may not go at all.
        """
        may_go = [
            (name in over, one.virtual_s, name)
            for name, one in self._tenants.items()
            if name not in without
        ]
        return self._tenants[min(may_go)[2]].heap[0][2] if may_go else None

    def heads(self) -> list[W]:
        """List the request of each tenant that goes first among its own."""
        return [tenant.heap[0][2] for tenant in self._tenants.values()]

    def take(self, queued: W) -> None:
        """Remove a request that is served: its tenant has had its turn."""
        tenant = self._tenants[queued.queue]
        self._virtual_s = tenant.virtual_s
        tenant.virtual_s += queued.cost_s / tenant.weight
        self.drop(queued)

    def drop(self, queued: W) -> None:
        """Remove a request that will not be served; its tenant has not had a turn."""
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
            self.cost_s = 0.0  # what rounding left

    def _queue_of(self, tenant: str) -> str:
        return name_of(tenant, self.weights, self._tenants)


# tenants ask at the same time while the newest requests of two of them are no older
TOGETHER_S = 1.0
MAX_PASSES = 1.5  # of the device; with 1 a tenant lost a sixth of its rate, with 2 the others wait
# signals that one request to the device earns: it may come late, or its signal may be sent again
EARNED = 2.0
MAX_CREDIT = 64.0  # signals; what a tenant begins with
UNEARNED_SHARE = 0.02  # of the event loop, for signals that nobody has earned, all tenants together
_NOBODY: Set[str] = frozenset()


class PriorityQueue(Generic[W]):
    """Fair queues one behind the other, by importance; 0 goes first."""

    def __init__(
        self, num_priorities: int, weights: Mapping[str, float], clock: Callable[[], float]
    ) -> None:
        """Start empty.

        Args:
            num_priorities: of them.
            weights: of tenants; all others have 1.
            clock: seconds that never go back.
        """
        self._queues = [FairQueue[W](weights) for _ in range(num_priorities)]
        self._clock = clock
        self._waiting = 0
        self._since_at: float | None = None  # since when it has not been empty

    def __len__(self) -> int:
        return self._waiting

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Use other weights from now on."""
        for queue in self._queues:
            queue.weights = weights

    def stood_s(self) -> float:
        """Seconds for which it has not been empty."""
        return 0.0 if self._since_at is None else self._clock() - self._since_at

    def is_anybody_before(self, priority: int) -> bool:
        """Whether something waits that is as important, or more."""
        return self._waiting > 0 and any(map(len, self._queues[: priority + 1]))

    def ahead_s(self, priority: int, tenant: str, due_at: float) -> float:
        """Estimate the seconds of work that would go before a request that came now."""
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
        """Return the request that goes next; None = nothing waits that may go.

        Args:
            over: of the tenants that wait, names those that go behind the others.
            without: tenants that may not go; what is less important must not take what they may not
                have.
        """
        for queue in self._queues:
            if not len(queue):
                continue
            return queue.head(over(queue.names) if len(queue.names) > 1 else _NOBODY, without)
        return None

    def heads(self) -> list[W]:
        """List the request of each tenant that goes first among its own, of every importance."""
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
    """What one tenant holds."""

    __slots__ = ("active", "admitted", "name")

    def __init__(self, name: str) -> None:
        self.name = name  # of the tenant, or that which the tenants beyond `MAX_TENANTS` share
        self.admitted = 0  # permits
        self.active = 0  # permits that are not suspended


class _SignalCredit(Account):
    """The signals that one tenant may still send."""

    __slots__ = ("filled_at", "left")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.left = MAX_CREDIT
        self.filled_at: float | None = None  # no signal yet


class Tenants:
    """Who holds how much, and who asks. Event loop only."""

    def __init__(
        self, weights: Mapping[str, float], pass_requests: int, clock: Callable[[], float]
    ) -> None:
        """Start without tenants.

        Args:
            weights: of tenants; all others have 1.
            pass_requests: that fill a pass of the device.
            clock: seconds that never go back.
        """
        self.weights = weights  # others take effect at once
        self._pass_requests = pass_requests
        self._clock = clock
        self._holders: dict[str, Holder] = {}
        self._last: str | None = None  # who asked last
        self._mixed_at = float("-inf")  # when the tenant that asked was another than the one before
        self._credit = Shares(_SignalCredit, clock)

    # ---- asking

    def saw(self, tenant: str) -> None:
        """Note that a tenant asks."""
        if tenant != self._last:
            if self._last is not None:
                self._mixed_at = self._clock()
            self._last = tenant

    def are_sharing(self) -> bool:
        """Whether several tenants have asked within `WANTS_S`."""
        return self._clock() - self._mixed_at < WANTS_S

    def take_signal(self, tenant: str, service_s: float) -> bool:
        """Take one signal of a tenant's credit; False = it has none left, and others share the instance.

        Args:
            tenant: that signals.
            service_s: seconds that a signal takes.
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

    # ---- holding

    def admitted(self, tenant: str, *, uses_device: bool) -> Holder:
        """Count one more permit of a tenant, active; a request to the device earns signals.

        Returns:
            its holder, for `left`, and for the count of the active while a permit is suspended.
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
        """Count one permit less, which was active."""
        holder.active -= 1
        holder.admitted -= 1
        if not holder.admitted:
            del self._holders[holder.name]

    # ---- what each may hold

    def is_full(self, tenant: str) -> bool:
        """Whether a tenant has all the places that it may have while others ask."""
        if not self._holders or not self._ask_together():
            return False
        holder = self._holders.get(name_of(tenant, self.weights, self._holders))
        return holder is not None and holder.active >= self._max_active(holder.name)

    def full(self) -> Set[str]:
        """Name all tenants that are full."""
        if not self._ask_together():
            return _NOBODY
        return {
            name
            for name, holder in self._holders.items()
            if holder.active >= self._max_active(name)
        }

    def over_their_share(self, waiting: Set[str], num: int, *, of_permits: bool) -> Set[str]:
        """Name the tenants that hold more than their share.

        Args:
            waiting: names of those that wait; they have a share, too.
            num: that all tenants hold together.
            of_permits: of the permits, as where the last one is about to go; else of the active
                ones.
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
        """Places of a tenant while others ask; a fraction counts as one."""
        return MAX_PASSES * self._pass_requests * self.weights.get(name, 1.0)
