"""What a job is: it answers requests of one kind, once they are admitted."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import msgspec

from npu_gr.core.request import Answer, Request

Q_contra = TypeVar("Q_contra", bound=Request, contravariant=True)
A_co = TypeVar("A_co", bound=Answer, covariant=True)


class HeldSlot(Protocol):
    """The place that a request holds among those being served."""

    def suspended(self) -> AbstractContextManager[None]:
        """Give the place to others while the block waits for something that takes no work of this instance."""
        ...


class HeldPermit(HeldSlot, Protocol):
    """The right to be served; its block gives it back."""

    @property
    def arrived_at(self) -> float:
        """Instant of time.monotonic() at which the request arrived."""
        ...

    def __enter__(self) -> HeldPermit: ...

    def __exit__(self, *_: object) -> None: ...


class ObservedWork(Protocol):
    """What can be read of the requests that are active, waiting and suspended."""

    @property
    def admitted(self) -> int:
        """Permits that are held."""
        ...

    def counts(self, kind: str) -> dict[str, int]:
        """Count a kind's requests by where they are: waiting, inside, outside."""
        ...

    def service_time_s(self, kind: str) -> float:
        """Seconds a request of a kind."""
        ...

    def concurrency_limit(self, kind: str) -> int:
        """Requests of a kind that may be active while no other kind is."""
        ...

    def proxy_limit(self, share: float, at_least: int, at_most: int) -> int:
        """Return how many requests a proxy should send at once: what takes `share` of the objective."""
        ...


class AdmissionControl(Protocol):
    """Admission control, which `npu_gr.server.admission.controller` implements."""

    async def enter(self, kind: str, tenant: str, arrived_at: float, budget_s: float) -> HeldPermit:
        """Wait until a request is admitted. Raises Overloaded."""
        ...

    def would_reject(self, kind: str, tenant: str, arrived_at: float, budget_s: float) -> bool:
        """Whether `enter` would reject the request at once."""
        ...

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        ...

    @property
    def pressure(self) -> float:
        """Queued work over the objectives of its requests."""
        ...

    @property
    def work(self) -> ObservedWork:
        """What is active."""
        ...


class NoSlot:
    """The place of a request that nobody admitted: one inside a cascade, or one that is never rejected."""

    def suspended(self) -> AbstractContextManager[None]:
        """Do nothing: there is no place to give."""
        return nullcontext()


NO_SLOT = NoSlot()


class Call(msgspec.Struct, frozen=True):
    """The times of one request, as instants of time.monotonic(), its place, and whose turn it takes."""

    # its place in the device's queue counts from here, also if its history took long to read
    arrived_at: float
    deadline_at: float  # its answer must be there
    slot: HeldSlot = NO_SLOT
    tenant: str = ""


class KindJob(Protocol[Q_contra, A_co]):
    """The work behind one kind of request. Event loop only."""

    async def run(self, request: Q_contra, call: Call) -> A_co:
        """Answer the request.

        The service has admitted it and cancels the job at the deadline. Whatever the job acquires,
        it releases when it ends in any way.

        Raises:
            NpuGrError: as `core/errors.py` lists.
        """
        ...

    async def stop(self) -> None:
        """End what the job runs in the background."""
        ...
