"""Names of actions and items, as callers know them, by the versions that this instance serves."""

from __future__ import annotations

from typing import Literal

from npu_gr.catalogue.item_names import ItemNames, names_of, titles_of
from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.names import ActionNames
from npu_gr.jobs.match import ServedVectors
from npu_gr.jobs.versions import Versions
from npu_gr.service.config import InForce


class ServedNames:
    """The tables of all versions together: an id is one item's, so whichever table has it names it. Event loop only."""

    def __init__(self, settings: InForce, versions: Versions, vectors: ServedVectors | None) -> None:
        """Read the tables where they are served.

        Args:
            settings: in force.
            versions: of ranker and generator.
            vectors: None = the instance does not match.
        """
        self._settings = settings
        self._versions = versions
        self._vectors = vectors

    @property
    def unsorted_history(self) -> Literal["refuse", "sort"]:
        """What becomes of a history whose rows run backwards in time."""
        return self._settings.config.service.unsorted_history

    def actions(self, version: str | None) -> ActionNames | None:
        """Return the actions of a version of the ranker, or without one the generator's; None = they have no names.

        Raises:
            NotFound: the version is not served.
        """
        if self._versions.rankers is not None:
            return self._versions.rankers.find(version).actions
        return self._versions.generator().actions

    def features(self, version: str | None) -> ModelFeatures:
        """Return the features of a version of the ranker; without a ranker there are none.

        Raises:
            NotFound: the version is not served.
        """
        rankers = self._versions.rankers
        return ModelFeatures() if rankers is None else rankers.find(version).features

    def items(self, ids: I64) -> list[str | int]:
        """Name each item: [n] -> n names; an item that no table knows is named by its id."""
        return names_of(self._tables(), ids)

    def titles(self, ids: I64) -> list[str | None]:
        """Return the title of each item: [n] -> n titles, None where it has none."""
        return titles_of(self._tables(), ids)

    def _tables(self) -> list[ItemNames]:
        """List each table once: of the catalogue, of the versions in service, of those before them."""
        tables = [] if self._versions.generators is None else self._versions.generators.current.items.tables()
        vectors = [] if self._vectors is None else self._vectors.kept()
        serving, all_versions = self._versions.current(), self._versions.all()
        tables += [version.names for version in (*serving, *vectors, *all_versions)]
        return list(dict.fromkeys(table for table in tables if len(table)))
