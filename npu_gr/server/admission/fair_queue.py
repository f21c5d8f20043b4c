"""Queued requests, tenants in turn: each tenant gets service in proportion to its weight.

Within a tenant the request that is due first goes first. Among the tenants the one goes first that has had the least
service over its weight; a tenant that was not waiting begins level with the one that was served last. So a tenant that
asks for little waits for the requests in progress and hardly ever for another tenant's queue.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import KeysView, Mapping, Set
from typing import Generic, Protocol, TypeVar

from npu_gr.core.shares import name_of


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
        return sum(queued.cost_s for at, _, queued in self.heap if at <= due_at and not queued.is_gone)


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
        self._numbers = itertools.count()  # of two that are due at the same instant, the first goes first
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
            tenant = self._tenants[name] = _TenantQueue(self.weights.get(name, 1.0), self._virtual_s)
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
        may_go = [(name in over, one.virtual_s, name) for name, one in self._tenants.items() if name not in without]
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
