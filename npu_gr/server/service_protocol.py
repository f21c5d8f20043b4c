"""`ServiceProtocol`: the interface that HTTP calls.

`npu_gr.handlers.service.Service` implements it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from npu_gr.core.errors import NotTaken
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import A, Kind, Q
from npu_gr.core.names import Names
from npu_gr.core.served import (
    CatalogueChange,
    CatalogueInfo,
    KnownUser,
    LookedUpItems,
    ModelInfo,
    VectorsInfo,
)
from npu_gr.handlers.base import AdmissionControl, HeldPermit, ShadowAdmin

I_co = TypeVar("I_co", covariant=True)


class PublishedAdmin(Protocol[I_co]):
    """Admin operations of something versioned: show, reload from the file, roll back."""

    async def info(self) -> I_co:
        """Describe the served version."""
        ...

    async def reload(self) -> I_co:
        """Read the file again and serve it; requests in progress keep their version.

        Raises Unprocessable where the file cannot be served.
        """
        ...

    async def rollback(self) -> I_co:
        """Serve the previous version. Raises Unprocessable where there is none."""
        ...


class CatalogueAdmin(PublishedAdmin[CatalogueInfo], Protocol):
    """The catalogue that `generate` serves."""

    async def update(self, change: CatalogueChange) -> CatalogueInfo:
        """Add, withdraw and restore items of the served version. Raises Unprocessable."""
        ...


class LookupService(Protocol):
    """What is known of users and items; see `npu_gr.handlers.lookups.Lookups`."""

    async def user(self, user: UserKey, num_events: int) -> KnownUser:
        """Return what is known of a user. Raises NotFound where that is nothing."""
        ...

    def example_user(self) -> UserKey | None:
        """Return a user that the service knows, if any."""
        ...

    async def similar(self, item: int, num_items: int, pairs: Sequence[str]) -> LookedUpItems:
        """Find items like another one. Raises NotFound where nothing knows the item."""
        ...

    async def trending(self, tenant: str, window_s: float, num_items: int) -> LookedUpItems:
        """Find the items with the most events lately."""
        ...


class ServiceProtocol(Protocol):
    """The service behind HTTP and gRPC.

    Every method may raise the errors of `core/errors.py`, and may be cancelled: it then releases
    what it holds.
    """

    shadow: ShadowAdmin  # of the ranker

    def models(self) -> list[ModelInfo]:
        """List the served models, the default first."""
        ...

    def kind_versions(self) -> dict[str, tuple[str, ...]]:
        """Map each served kind to its versions, the current one first; () = it has none."""
        ...

    def is_ready(self) -> tuple[bool, str]:
        """Return whether new work is accepted, and if not, why: starting, draining, failed."""
        ...

    def why_dead(self) -> str:
        """Say what has not moved for so long that only a new process helps; "" = nothing."""
        ...

    async def effective_config(self) -> dict[str, Any]:
        """Return the whole current configuration in plain types, without secrets."""
        ...

    async def knows(self, user: UserKey) -> dict[str, bool]:
        """Map each store and cache of this process to whether it holds data of the user."""
        ...

    @property
    def lookups(self) -> LookupService:
        """What is known of users and items."""
        ...

    @property
    def names(self) -> Names:
        """Names of actions and items."""
        ...

    @property
    def admission(self) -> AdmissionControl:
        """The admission control that HTTP asks before it parses a request."""
        ...

    async def serve(
        self, kind: Kind[Q, A], request: Q, budget_s: float, permit: HeldPermit | None = None
    ) -> A:
        """Answer one request from start to end.

        Args:
            kind: An entry of `KINDS`.
            request: An instance of `kind.request`.
            budget_s: Time limit in seconds from now on.
            permit: Permit of the request, which the caller of this method gives back. None = the
                service asks for admission itself.

        Raises:
            NotFound: This instance does not serve the kind.
            Overloaded: Admission control rejected the request.
            DeadlineExceeded: `budget_s` was over before there was an answer.
        """
        ...

    async def reload_models(self) -> list[ModelInfo]:
        """Read the configuration file again and serve its models.

        Requests in progress keep their version.
        """
        ...

    async def rollback_models(self, delta: int | None = None) -> list[ModelInfo]:
        """Serve the models of before the last reload, or the ranker's weights after a delta.

        Requests in progress keep their version. Raises Unprocessable where there are none.
        """
        ...

    async def add_delta(self, body: bytes) -> list[ModelInfo]:
        """Make a delta of the ranker's weights durable, and serve it.

        Raises:
            Unprocessable: It is damaged, or not the next one of the served ranker.
        """
        ...

    @property
    def catalogue(self) -> CatalogueAdmin:
        """The catalogue; raises NotFound where this instance does not generate."""
        ...

    @property
    def vectors(self) -> PublishedAdmin[VectorsInfo]:
        """The vectors; raises NotFound where this instance does not match."""
        ...


def require_ready(service: ServiceProtocol) -> None:
    """Raise NotTaken with the reason while the instance is not ready."""
    ready, why_not = service.is_ready()
    if not ready:
        raise NotTaken(why_not)
