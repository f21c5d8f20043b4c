"""`Names`: what codecs ask the service of the names of actions and items."""

from __future__ import annotations

from typing import Literal, Protocol

from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.names import ActionNames


class Names(Protocol):
    """What callers call actions and items, by the versions in service."""

    @property
    def unsorted_history(self) -> Literal["refuse", "sort"]:
        """What becomes of a history whose rows run backwards in time."""
        ...

    def actions(self, version: str | None) -> ActionNames | None:
        """Return the actions of a version of the ranker; None = actions have no names here.

        Args:
            version: None = the current one.

        Raises:
            NotFound: the version is not served.
        """
        ...

    def features(self, version: str | None) -> ModelFeatures:
        """Return the features of a version of the ranker; without a ranker there are none.

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
