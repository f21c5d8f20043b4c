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

    def outside(self) -> AbstractContextManager[None]:
        """Give the place to others while the block waits for something that takes no work of this instance."""
        ...


class NoSlot:
    """The place of a request that nobody admitted: one inside a cascade, or one that is never refused."""

    def outside(self) -> AbstractContextManager[None]:
        """Do nothing: there is no place to give."""
        return nullcontext()


NO_SLOT = NoSlot()


class Call(msgspec.Struct, frozen=True):
    """The times of one request, as instants of time.monotonic(), its place, and whose turn it takes."""

    arrived_at: float  # its place in the device's queue counts from here, also if its history took long to read
    deadline_at: float  # its answer must be there
    slot: HeldSlot = NO_SLOT
    tenant: str = ""


class KindJob(Protocol[Q_contra, A_co]):
    """The work behind one kind of request. Event loop only."""

    async def run(self, request: Q_contra, call: Call) -> A_co:
        """Answer the request.

        The service has admitted it and cancels the job at the deadline. Whatever the job acquires, it releases when it
        ends in any way.

        Raises:
            NpuGrError: as `core/errors.py` lists.
        """
        ...

    async def stop(self) -> None:
        """End what the job runs in the background."""
        ...
