"""`ServiceProtocol`: the interface that HTTP calls.

`npu_gr.handlers.service.Service` implements it.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from npu_gr.core.errors import NotTaken
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import A, Kind, Q
from npu_gr.core.names import Names
from npu_gr.core.served import CatalogueChange, CatalogueInfo, ModelInfo, VectorsInfo
from npu_gr.handlers.base import AdmissionControl, HeldPermit

I_co = TypeVar("I_co", covariant=True)


class PublishedAdmin(Protocol[I_co]):
    """Something that is served in versions: show the version, read the file again, go back to the one before."""

    async def info(self) -> I_co:
        """The version that is served."""
        ...

    async def reload(self) -> I_co:
        """Read the file again and serve it; requests in progress keep their version.

        Raises Unprocessable.
        """
        ...

    async def rollback(self) -> I_co:
        """Serve the version before. Raises Unprocessable where none is kept."""
        ...


class CatalogueAdmin(PublishedAdmin[CatalogueInfo], Protocol):
    """The catalogue that `generate` serves."""

    async def update(self, change: CatalogueChange) -> CatalogueInfo:
        """Add, withdraw and restore items of the version that is served. Raises Unprocessable."""
        ...


class ServiceProtocol(Protocol):
    """A service that HTTP can stand in front of.

    Every method may raise what `core/errors.py` lists, and may be cancelled: it then releases what
    it holds.
    """

    def models(self) -> list[ModelInfo]:
        """List the models that are served, the default first."""
        ...

    def kind_versions(self) -> dict[str, tuple[str, ...]]:
        """Name the versions of each kind that this instance serves, the current one first; () = it has no versions."""
        ...

    def is_ready(self) -> tuple[bool, str]:
        """Say whether new work is welcome, and if not, why: starting, draining, device failed."""
        ...

    async def effective_config(self) -> dict[str, Any]:
        """Return the whole configuration in force: plain types only, no secrets."""
        ...

    async def knows(self, user: UserKey) -> dict[str, bool]:
        """Say of each memory of this process whether the user can be found in it."""
        ...

    @property
    def names(self) -> Names:
        """Names of actions and items."""
        ...

    @property
    def admission(self) -> AdmissionControl:
        """Admission control; HTTP asks it before a request is parsed."""
        ...

    async def serve(
        self, kind: Kind[Q, A], request: Q, budget_s: float, permit: HeldPermit | None = None
    ) -> A:
        """Answer one request from start to end.

        Args:
            kind: an entry of `KINDS`.
            request: of `kind.request`.
            budget_s: seconds that the caller grants, from now on.
            permit: of the request; its holder leaves it. None = the service asks for admission
                itself.

        Raises:
            NotFound: this instance does not serve the kind. Overloaded. DeadlineExceeded:
                `budget_s` is over.
        """
        ...

    async def reload_models(self) -> list[ModelInfo]:
        """Read the configuration file again and serve what it says.

        Requests in progress keep their version.
        """
        ...

    @property
    def catalogue(self) -> CatalogueAdmin:
        """Raises NotFound where this instance does not generate."""
        ...

    @property
    def vectors(self) -> PublishedAdmin[VectorsInfo]:
        """Raises NotFound where this instance does not match."""
        ...


def require_ready(service: ServiceProtocol) -> None:
    """Raise NotTaken, with the reason, while the instance starts, drains or has failed."""
    ready, why_not = service.is_ready()
    if not ready:
        raise NotTaken(why_not)
