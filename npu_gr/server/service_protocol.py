"""`ServiceProtocol`: the interface that HTTP calls. `npu_gr.service.service.Service` implements it."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar

from npu_gr.admission.door import Door, Slot
from npu_gr.core.kinds import A, Kind, Q
from npu_gr.core.names import ActionNames
from npu_gr.core.request import I64, CatalogueChange, CatalogueInfo, ModelInfo, UserKey, VectorsInfo

I_co = TypeVar("I_co", covariant=True)


class PublishedAdmin(Protocol[I_co]):
    """Something that is served in versions: show the version, read the file again, go back to the one before."""

    def info(self) -> I_co:
        """The version that is served."""
        ...

    async def reload(self) -> I_co:
        """Read the file again and serve it; requests in progress keep their version. Raises Unprocessable."""
        ...

    async def rollback(self) -> I_co:
        """Serve the version before. Raises Unprocessable where none is kept."""
        ...


class CatalogueAdmin(PublishedAdmin[CatalogueInfo], Protocol):
    """The catalogue that `generate` serves."""

    async def update(self, change: CatalogueChange) -> CatalogueInfo:
        """Add, withdraw and restore items of the version that is served. Raises Unprocessable."""
        ...


class Names(Protocol):
    """What callers call actions and items, by the versions in service."""

    @property
    def unsorted_history(self) -> Literal["refuse", "sort"]:
        """What becomes of a history whose rows run backwards in time."""
        ...

    def actions(self, version: str | None) -> ActionNames | None:
        """Return the actions of a version of the ranker; None = this instance has no ranker.

        Args:
            version: None = the current one.

        Raises:
            NotFound: the version is not served.
        """
        ...

    def items(self, ids: I64) -> list[str | int]:
        """Name each item: [n] -> n names; an item that no table knows is named by its id."""
        ...

    def titles(self, ids: I64) -> list[str | None]:
        """Return the title of each item: [n] -> n titles, None where it has none."""
        ...


class ServiceProtocol(Protocol):
    """A service that HTTP can stand in front of.

    Every method may raise what `core/errors.py` lists, and may be cancelled: it then releases what it holds.
    """

    def models(self) -> list[ModelInfo]:
        """List the models that are served, the default first."""
        ...

    def is_ready(self) -> tuple[bool, str]:
        """Say whether new work is welcome, and if not, why: starting, draining, device failed."""
        ...

    def effective_config(self) -> dict[str, Any]:
        """Return the whole configuration in force: plain types only, no secrets."""
        ...

    def knows(self, user: UserKey) -> dict[str, bool]:
        """Say of each memory of this process whether the user can be found in it."""
        ...

    @property
    def names(self) -> Names:
        """Names of actions and items."""
        ...

    @property
    def door(self) -> Door:
        """Admission control; HTTP asks it before a request is parsed."""
        ...

    async def serve(self, kind: Kind[Q, A], request: Q, budget_s: float, slot: Slot | None = None) -> A:
        """Answer one request from start to end.

        Args:
            kind: an entry of `KINDS`.
            request: of `kind.request`.
            budget_s: seconds that the caller grants, from now on.
            slot: that the door gave; the caller leaves it. None = the service asks the door itself.

        Raises:
            NotFound: this instance does not serve the kind. Overloaded. DeadlineExceeded: `budget_s` is over.
        """
        ...

    async def reload_models(self) -> list[ModelInfo]:
        """Read the configuration file again and serve what it says; requests in progress keep their version."""
        ...

    @property
    def catalogue(self) -> CatalogueAdmin:
        """Raises NotFound where this instance does not generate."""
        ...

    @property
    def vectors(self) -> PublishedAdmin[VectorsInfo]:
        """Raises NotFound where this instance does not match."""
        ...
