"""Admin operations on catalogue and vectors; errors in files become client errors (422)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from npu_gr.core.errors import ConfigError, DataError, NotFound, Unprocessable
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import GENERATE, MATCH
from npu_gr.core.served import CatalogueChange, CatalogueInfo, DeltaMark, VectorsInfo
from npu_gr.handlers.match import ServedVectors
from npu_gr.handlers.scored_items import CoverageRule
from npu_gr.handlers.served_catalogue import FromDeltas, ServedCatalogue
from npu_gr.handlers.versions import Versions
from npu_gr.metrics.registry.process import Reloaded, ReloadMetrics


class CatalogueOfGenerator:
    """The catalogue of the current generator.

    Methods raise NotFound without a generator, and Unprocessable if the file or change is invalid;
    then the current version stays.
    """

    def __init__(self, versions: Versions, coverage: CoverageRule, metrics: ReloadMetrics) -> None:
        self._versions = versions
        self._coverage = coverage
        self._metrics = metrics

    @property
    def _items(self) -> ServedCatalogue:
        return self._versions.generator().items

    async def info(self) -> CatalogueInfo:
        """Describe the current version."""
        return self._items.info()

    def num_paths(self) -> tuple[int, ...]:
        """Return the number of semantic-ID paths of 1, 2, ... codes."""
        return self._items.num_paths()

    async def reload(self) -> CatalogueInfo:
        """Serve the file as it is now; requests in progress keep their version."""
        items = self._items
        with _unprocessable("catalogue"), self._metrics.attempt(Reloaded.CATALOGUE):
            async with self._coverage.replacing(GENERATE.name) as before:
                return await items.reload(before)

    async def update(self, change: CatalogueChange) -> CatalogueInfo:
        """Add, withdraw and restore items of the current version."""
        with _unprocessable("catalogue"):
            async with self._coverage.replacing(GENERATE.name, is_limited=False) as before:
                return await self._items.update([change], before)

    def delta(self) -> DeltaMark | None:
        """Return the newest delta whose items the catalogue has; None = there is no catalogue."""
        return None if self._versions.generators is None else self._items.changes.delta

    async def follow_deltas(self, changes: Sequence[CatalogueChange], deltas: FromDeltas) -> None:
        """Serve the changes of deltas."""
        with _unprocessable("catalogue"):
            async with self._coverage.replacing(GENERATE.name, is_limited=False) as before:
                await self._items.update(changes, before, deltas)

    async def rollback(self) -> CatalogueInfo:
        """Serve the previous version."""
        with _unprocessable("catalogue"):
            async with self._coverage.replacing(GENERATE.name, is_limited=False) as before:
                info = await self._items.rollback()
                await before(self._items.item_ids)
                return info


class VectorsOfMatch:
    """The current vectors of match.

    Methods raise errors as those of `CatalogueOfGenerator`.
    """

    def __init__(
        self, vectors: ServedVectors | None, coverage: CoverageRule, metrics: ReloadMetrics
    ) -> None:
        self._maybe = vectors
        self._coverage = coverage
        self._metrics = metrics

    @property
    def _vectors(self) -> ServedVectors:
        if self._maybe is None:
            raise NotFound(
                "this instance does not match; add the section `match` to its configuration"
            )
        return self._maybe

    def knows(self, user: UserKey) -> bool:
        """Whether a retained version was trained with the user."""
        return self._maybe is not None and self._maybe.knows(user)

    def versions(self) -> tuple[str, ...]:
        """Return the current version, if the instance matches."""
        return () if self._maybe is None else (self._maybe.info().version,)

    async def info(self) -> VectorsInfo:
        """Describe the current version."""
        return self._vectors.info()

    async def reload(self) -> VectorsInfo:
        """Serve the folder as it is now; requests in progress keep their version."""
        vectors = self._vectors
        with _unprocessable("vectors"), self._metrics.attempt(Reloaded.VECTORS):
            async with self._coverage.replacing(MATCH.name) as before:
                return await vectors.reload(before)

    async def rollback(self) -> VectorsInfo:
        """Serve the previous version."""
        with _unprocessable("vectors"):
            async with self._coverage.replacing(MATCH.name, is_limited=False) as before:
                info = self._vectors.rollback()
                await before(self._vectors.item_ids)
                return info


@contextmanager
def _unprocessable(name: str) -> Iterator[None]:
    try:
        yield
    except (DataError, ConfigError) as error:
        raise Unprocessable(f"{name}: {error}") from error
