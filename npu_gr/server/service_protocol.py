"""What the HTTP door needs from the service behind it. `npu_gr.service.service.Service` is the one that ships."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from npu_gr.core.kinds import A, Kind, Priority, Q
from npu_gr.core.request import (
    CatalogueChange,
    CatalogueInfo,
    Events,
    GenerateAnswer,
    GenerateRequest,
    MatchAnswer,
    MatchRequest,
    ModelInfo,
    RankAnswer,
    RankRequest,
    RecommendAnswer,
    RecommendRequest,
    SignalAnswer,
    SignalRequest,
    UserKey,
    VectorsInfo,
)

I_co = TypeVar("I_co", covariant=True)


class PublishedAdmin(Protocol[I_co]):
    """Versions of something that an instance serves: which one, the file read again, the one before."""

    def info(self) -> I_co:
        """The version that is served."""
        ...

    async def reload(self) -> I_co:
        """Read the file again and serve it; requests in progress keep their version. Raises Unprocessable."""
        ...

    def rollback(self) -> I_co:
        """Serve the version before. Raises Unprocessable where none is kept."""
        ...


class CatalogueAdmin(PublishedAdmin[CatalogueInfo], Protocol):
    """The catalogue that `generate` serves."""

    async def update(self, change: CatalogueChange) -> CatalogueInfo:
        """Add, withdraw and restore items of the version that is served. Raises Unprocessable."""
        ...


class ServiceProtocol(Protocol):
    """What HTTP needs. Every method may raise what `core/errors.py` lists, and cancels cleanly."""

    def models(self) -> list[ModelInfo]:
        """What is being served, the default first."""
        ...

    def is_ready(self) -> tuple[bool, str]:
        """Whether new work is welcome, and in words why not: starting, draining, device failed."""
        ...

    def effective_config(self) -> dict[str, Any]:
        """The whole configuration in force, plain types only, without secrets."""
        ...

    def check_room(self, kind: Kind[Any, Any]) -> None:
        """Refuse a request of this kind before its body is read. Raises Overloaded."""
        ...

    async def serve(self, kind: Kind[Q, A], request: Q, budget_s: float) -> A:
        """Answer one request from start to end.

        Args:
            kind: an entry of `KINDS`.
            request: of `kind.request`.
            budget_s: seconds that the caller grants.

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


class Door(Protocol):
    """One request from start to end; every method may raise what `errors.py` lists, and cancels cleanly."""

    def models(self) -> list[ModelInfo]:
        """What is being served, the default first."""
        ...

    def check_room(self, priority: Priority) -> None:
        """Refuse a request before its body is read. Raises Overloaded."""
        ...

    def is_ready(self) -> tuple[bool, str]:
        """Whether new work is welcome, and in words why not: starting, draining, device failed."""
        ...

    def effective_config(self) -> dict[str, Any]:
        """The whole configuration in force, plain types only, without secrets."""
        ...

    async def signal(self, request: SignalRequest, budget_s: float) -> SignalAnswer:
        """Decide on a pre-infer and start it; returns before it is done."""
        ...

    async def rank(self, request: RankRequest, budget_s: float) -> RankAnswer:
        """Score the candidates. Raises DeadlineExceeded when `budget_s` seconds are over."""
        ...

    async def generate(self, request: GenerateRequest, budget_s: float) -> GenerateAnswer:
        """The best items after a history. Raises NotFound where this instance does not generate."""
        ...

    async def reload_models(self) -> list[ModelInfo]:
        """Read the configuration file again and serve what it says; requests in progress keep their version."""
        ...

    async def match(self, request: MatchRequest, budget_s: float) -> MatchAnswer:
        """The best items for a user by vectors. Raises NotFound where this instance does not match."""
        ...

    def vectors(self) -> VectorsInfo:
        """The vectors that `match` serves."""
        ...

    async def reload_vectors(self) -> VectorsInfo:
        """Read the vectors again and serve them; requests in progress keep theirs."""
        ...

    def rollback_vectors(self) -> VectorsInfo:
        """Serve the version before."""
        ...

    async def recommend(self, request: RecommendRequest, budget_s: float) -> RecommendAnswer:
        """Retrieval and rank in one. Raises NotFound where this instance has no cascade."""
        ...

    def catalogue(self) -> CatalogueInfo:
        """The catalogue that `generate` serves."""
        ...

    async def reload_catalogue(self) -> CatalogueInfo:
        """Read the catalogue again and serve it; requests in progress keep theirs."""
        ...

    async def update_catalogue(self, change: CatalogueChange) -> CatalogueInfo:
        """Add, withdraw and restore items of the version that is served."""
        ...

    def rollback_catalogue(self) -> CatalogueInfo:
        """Serve the version before."""
        ...

    async def append_events(self, user: UserKey, events: Events, budget_s: float) -> int:
        """Append behaviours durably; how many the store now holds for the user."""
        ...

    async def erase_user(self, user: UserKey) -> None:
        """Forget the user: stored behaviours, known prefixes, KV in every tier, running producers too."""
        ...
