"""Requests that wait, tenants in turn: each tenant gets device time in proportion to its weight.

Within a tenant the request that is due first goes first. Among the tenants the one goes first that has had the least
time over its weight; a tenant that was not waiting begins level with the one that was served last. So a tenant that
asks for little waits for the requests in progress and hardly ever for another tenant's queue.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import KeysView, Mapping, Set
from typing import Protocol

from npu_gr.core.shares import name_of


class Waiting(Protocol):
    """What waits. The first three are fixed while it waits, the others are the queue's."""

    tenant: str
    wanted_at: float  # the instant at which its answer is due
    cost_s: float  # seconds of the instance that it will take
    queue: str  # the tenant's name, or that which the tenants beyond `MAX_TENANTS` share
    is_gone: bool  # it is not waiting any more, and its place in the queue will be skipped


class _Tenant:
    """The queue of one tenant."""

    __slots__ = ("cost_s", "heap", "latest_at", "virtual_s", "weight")

    def __init__(self, weight: float, virtual_s: float) -> None:
        self.weight = weight
        self.virtual_s = virtual_s  # time that it has had, over its weight
        self.heap: list[tuple[float, int, Waiting]] = []
        self.cost_s = 0.0  # of all that waits
        self.latest_at = float("-inf")  # when the last of them is due

    def before_s(self, wanted_at: float) -> float:
        """Seconds of its own work that go before a request that is due at `wanted_at`."""
        if wanted_at >= self.latest_at:
            return self.cost_s
        return sum(waiting.cost_s for at, _, waiting in self.heap if at <= wanted_at and not waiting.is_gone)


class Turns:
    """A queue of requests of equal importance.

    Invariant: `cost_s` is the sum over the requests that wait and are not gone.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Nothing waits yet.

        Args:
            weights: of tenants; all others have 1.
        """
        self.weights = weights
        self.cost_s = 0.0
        self._tenants: dict[str, _Tenant] = {}
        self._virtual_s = 0.0  # at which the request that was served last began
        self._numbers = itertools.count()  # of two that are due at the same instant, the first goes first
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def ahead_s(self, tenant: str, wanted_at: float) -> float:
        """Estimate the seconds of work that would go before a request that came now.

        Args:
            tenant: of the request.
            wanted_at: when it is due.
        """
        if not self._waiting:
            return 0.0
        own = self._tenants.get(self._queue_of(tenant))
        if own is None:
            start_s = self._virtual_s
            ahead_s = 0.0
        else:
            ahead_s = own.before_s(wanted_at)
            start_s = own.virtual_s + ahead_s / own.weight
        for other in self._tenants.values():
            if other is not own and other.virtual_s < start_s:
                ahead_s += min(other.cost_s, (start_s - other.virtual_s) * other.weight)
        return ahead_s

    def push(self, waiting: Waiting) -> None:
        """Let a request wait."""
        name = waiting.queue = self._queue_of(waiting.tenant)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self.weights.get(name, 1.0), self._virtual_s)
        heapq.heappush(tenant.heap, (waiting.wanted_at, next(self._numbers), waiting))
        tenant.latest_at = max(tenant.latest_at, waiting.wanted_at)
        tenant.cost_s += waiting.cost_s
        self.cost_s += waiting.cost_s
        self._waiting += 1

    @property
    def queues(self) -> KeysView[str]:
        """The names of the queues in which something waits."""
        return self._tenants.keys()

    def head(self, over: Set[str] = frozenset(), without: Set[str] = frozenset()) -> Waiting | None:
        """Say which request goes next; None = nothing waits in a queue that may go.

        Args:
            over: queues that go behind the others.
            without: queues that may not go at all.
        """
        if len(self._tenants) == 1 and not without:
            return next(iter(self._tenants.values())).heap[0][2]
        may_go = [(name, one) for name, one in self._tenants.items() if name not in without]
        if not may_go:
            return None
        within = [one for name, one in may_go if name not in over]
        return min(within or [one for _, one in may_go], key=_virtual_s).heap[0][2]

    def take(self, waiting: Waiting) -> None:
        """Take the head out, because it is served: its tenant has had its turn."""
        tenant = self._tenants[waiting.queue]
        self._virtual_s = tenant.virtual_s
        tenant.virtual_s += waiting.cost_s / tenant.weight
        self.drop(waiting)

    def drop(self, waiting: Waiting) -> None:
        """Take a request out that will not be served; its tenant has not had a turn."""
        tenant = self._tenants[waiting.queue]
        waiting.is_gone = True
        tenant.cost_s -= waiting.cost_s
        self.cost_s -= waiting.cost_s
        self._waiting -= 1
        while tenant.heap and tenant.heap[0][2].is_gone:
            heapq.heappop(tenant.heap)
        if not tenant.heap:
            del self._tenants[waiting.queue]
        if not self._waiting:
            self.cost_s = 0.0  # what rounding left

    def heads(self) -> list[Waiting]:
        """List the request of each tenant that goes first among its own."""
        return [tenant.heap[0][2] for tenant in self._tenants.values()]

    def counts(self) -> dict[str, int]:
        """Count what waits in each queue, by its name."""
        return {
            name: sum(not waiting.is_gone for _, _, waiting in tenant.heap) for name, tenant in self._tenants.items()
        }

    def _queue_of(self, tenant: str) -> str:
        return name_of(tenant, self.weights, self._tenants)


def _virtual_s(tenant: _Tenant) -> float:
    return tenant.virtual_s
