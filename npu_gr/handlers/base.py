"""The interfaces of handlers, which answer admitted requests, of admission, and of the shadow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import msgspec

from npu_gr.core.errors import NotFound
from npu_gr.core.request import Answer, Request
from npu_gr.core.served import ShadowInfo

Q_contra = TypeVar("Q_contra", bound=Request, contravariant=True)
A_co = TypeVar("A_co", bound=Answer, covariant=True)


class HeldSlot(Protocol):
    """The permit of a request, as its handler sees it."""

    def suspended(self) -> AbstractContextManager[None]:
        """Release the permit while the block waits for something other than this instance."""
        ...


class HeldPermit(HeldSlot, Protocol):
    """The permit of an admitted request; its `with` block releases it."""

    @property
    def arrived_at(self) -> float:
        """Arrival of the request, as time.monotonic()."""
        ...

    def __enter__(self) -> HeldPermit: ...

    def __exit__(self, *_: object) -> None: ...


class ObservedWork(Protocol):
    """Counts of active, waiting and suspended requests."""

    @property
    def admitted(self) -> int:
        """Number of held permits."""
        ...

    def counts(self, kind: str) -> dict[str, int]:
        """Count the requests of a kind by state: waiting, active, suspended."""
        ...

    def service_time_s(self, kind: str) -> float:
        """Return the estimated service time of a kind, in seconds."""
        ...

    def concurrency_limit(self, kind: str) -> int:
        """Return the concurrency limit of a kind while no other kind is active."""
        ...

    def proxy_limit(self, share: float, at_least: int, at_most: int) -> int:
        """Return the concurrency limit for a proxy: what takes `share` of the objective."""
        ...


class AdmissionControl(Protocol):
    """Admission control, implemented by `npu_gr.server.admission.controller`."""

    async def enter(self, kind: str, tenant: str, arrived_at: float, budget_s: float) -> HeldPermit:
        """Wait for a permit. Raises Overloaded."""
        ...

    def would_reject(self, kind: str, tenant: str, arrived_at: float, budget_s: float) -> bool:
        """Whether `enter` would reject the request at once."""
        ...

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        ...

    @property
    def pressure(self) -> float:
        """Queued work divided by the objectives of its requests."""
        ...

    @property
    def work(self) -> ObservedWork:
        """The state of admitted and waiting requests."""
        ...


class NoSlot:
    """The permit of a request without admission: within a cascade, or one that must finish."""

    def suspended(self) -> AbstractContextManager[None]:
        """Do nothing, since there is no permit."""
        return nullcontext()


NO_SLOT = NoSlot()


class Call(msgspec.Struct, frozen=True):
    """Arrival and deadline (time.monotonic()), permit and tenant of a request."""

    # its order in the device's queue counts from here, including the time of reading the history
    arrived_at: float
    deadline_at: float  # for the answer
    slot: HeldSlot = NO_SLOT
    tenant: str = ""


class KindJob(Protocol[Q_contra, A_co]):
    """Handles requests of one kind. Event loop only."""

    async def run(self, request: Q_contra, call: Call) -> A_co:
        """Answer an admitted request.

        The service cancels the call at the deadline; all resources must be released then.

        Raises:
            NpuGrError: as in `core/errors.py`.
        """
        ...

    async def stop(self) -> None:
        """Stop background work."""
        ...


class ShadowAdmin(Protocol):
    """The shadow of the ranker, implemented by `npu_gr.service.shadow`."""

    def info(self) -> ShadowInfo:
        """Describe the shadow and what it showed."""
        ...

    async def open(self, path: str, share: float) -> ShadowInfo:
        """Let the ranker of a folder score a share of the users' ranks. Raises Unprocessable."""
        ...

    async def drop(self) -> ShadowInfo:
        """Free the shadow. Raises NotFound."""
        ...

    async def promote(self) -> ShadowInfo:
        """Serve the shadow. Raises NotFound, Unprocessable, Unavailable."""
        ...


class NoShadow:
    """The shadow of an instance without a ranker: every change is NotFound."""

    def info(self) -> ShadowInfo:
        return ShadowInfo(state="none")

    async def open(self, path: str, share: float) -> ShadowInfo:
        raise self._missing()

    async def drop(self) -> ShadowInfo:
        raise self._missing()

    async def promote(self) -> ShadowInfo:
        raise self._missing()

    @staticmethod
    def _missing() -> NotFound:
        return NotFound("this instance has no ranker, so it takes no shadow")
