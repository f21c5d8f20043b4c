"""Semantic IDs for items that are added after training, from the centroids that training saved.

    vector   made of the item's features, as in training for an item without history: a part of
             unit length for each feature, then normalised as a whole
    codes    level by level the centroid nearest to the residual, among those with a free semantic
             ID below them: so a new item never shares a semantic ID

They are in a file `centroids.safetensors` in the folder of the catalogue. There is none if the
codes were not made by centroids.

Source: residual quantisation of items, as in TIGER (arXiv:2305.05065).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from npu_gr.catalogue.records import Features
from npu_gr.catalogue.trie import Trie
from npu_gr.core.arrays import F32
from npu_gr.core.errors import CatalogueError, DataError
from npu_gr.core.feature_schema.values import name_of, plain_name
from npu_gr.core.served import NewItem

FILE = "centroids.safetensors"
_NOTES = "npu_gr.centroids"  # key of the file's metadata


class CodedFeature(NamedTuple):
    """A side feature of which vectors are made, and its values in the order of their columns."""

    name: str
    values: list[str]


class _Notes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = 1
    features: list[CodedFeature]


@dataclass(frozen=True, slots=True, eq=False)
class Centroids:
    """The centroids of each level, and the features of a vector. L = levels, d = its width."""

    levels: tuple[F32, ...]  # L x [codes, d]
    # the last columns of a vector; the first ones describe an item's neighbours
    features: tuple[CodedFeature, ...]

    def __post_init__(self) -> None:
        """Check shapes and values.

        Raises:
            ValueError: a shape or a value is wrong.
        """
        widths = {level.shape[1] for level in self.levels if level.ndim == 2}
        if (
            not self.levels
            or len(widths) != 1
            or any(level.ndim != 2 or not len(level) for level in self.levels)
        ):
            raise ValueError("levels: need [codes, d] of one d each")
        if not all(np.isfinite(level).all() for level in self.levels):
            raise ValueError("levels: need finite numbers")
        if self._num_coded > widths.pop():
            raise ValueError("features: more values than a vector has columns")

    @property
    def _num_coded(self) -> int:
        return sum(len(feature.values) for feature in self.features)

    @property
    def code_count(self) -> tuple[int, ...]:
        """Codes of each level."""
        return tuple(len(level) for level in self.levels)

    def vector(self, features: Features) -> F32:
        """Make the vector [d] of an item without neighbours; zeros if no value is known."""
        made = np.zeros(self.levels[0].shape[1], np.float32)
        place = len(made) - self._num_coded
        for feature in self.features:
            given = features.get(feature.name, [])
            values = given if isinstance(given, list) else [given]
            names = {name_of(value, feature.values) for value in values}
            known = [at for at, value in enumerate(feature.values) if plain_name(value) in names]
            if known:
                made[place + np.array(known)] = len(known) ** -0.5
            place += len(feature.values)
        length = float(np.linalg.norm(made))
        return made / np.float32(length) if length else made

    def save(self, folder: Path) -> None:
        """Write the file. Raises OSError."""
        notes = msgspec.json.encode(_Notes(features=list(self.features))).decode()
        tensors = {
            f"levels.{number}": np.ascontiguousarray(level)
            for number, level in enumerate(self.levels)
        }
        try:
            save_file(tensors, folder / FILE, {_NOTES: notes})
        except SafetensorError as error:
            raise OSError(str(error)) from error

    @classmethod
    def load(cls, folder: Path) -> Centroids | None:
        """Read the file; None = there is none.

        Raises:
            DataError: it is damaged, or of another format.
        """
        path = folder / FILE
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                notes = msgspec.json.decode((file.metadata() or {}).get(_NOTES, "{}"), type=_Notes)
                levels = tuple(
                    file.get_tensor(f"levels.{number}") for number in range(len(file.keys()))
                )
            if notes.format != 1 or any(level.dtype != np.float32 for level in levels):
                raise ValueError("is not of this version")
            return cls(levels, tuple(notes.features))
        except (OSError, SafetensorError, msgspec.MsgspecError, ValueError) as error:
            raise DataError(f"{path}: {error}") from error


class SidMaker:
    """Makes semantic IDs for the items of one change, and remembers them."""

    def __init__(self, trie: Trie, centroids: Centroids | None) -> None:
        """Begin a change.

        Args:
            trie: Trie of the current version; its semantic IDs are taken.
            centroids: Centroids of the catalogue; None = there are none.
        """
        self._trie = trie
        self._centroids = centroids
        # prefix -> number of semantic IDs of this change with that prefix
        self._given: dict[tuple[int, ...], int] = {}

    def all_of(self, items: Sequence[NewItem]) -> list[tuple[int, ...]]:
        """Return the semantic ID of each item: its own, or else a new one.

        Raises:
            CatalogueError: as `make`.
        """
        for item in items:
            self.take(item.sid)
        return [item.sid or self.make(row, item.features) for row, item in enumerate(items)]

    def take(self, sid: tuple[int, ...]) -> tuple[int, ...]:
        """Mark a semantic ID as taken, and return it."""
        for level in range(len(sid)):
            self._given[sid[: level + 1]] = self._given.get(sid[: level + 1], 0) + 1
        return sid

    def make(self, row: int, features: Features) -> tuple[int, ...]:
        """Make a semantic ID for an item.

        Args:
            row: Index of the item in the change, for messages.
            features: Features of the item.

        Raises:
            CatalogueError: there are no centroids, no value of a coded feature is known, or no
                semantic ID is free.
        """
        centroids = self._centroids
        if centroids is None:
            raise CatalogueError(
                f"add[{row}].sid: is missing, and there is no {FILE} in the folder of the "
                "catalogue to make it"
            )
        if centroids.code_count != self._trie.codebooks.code_count:
            raise CatalogueError(
                f"add[{row}].sid: is missing, and {FILE} has {centroids.code_count} codes, the "
                f"catalogue {self._trie.codebooks.code_count}"
            )
        rest = centroids.vector(features)
        if not rest.any():
            names = ", ".join(feature.name for feature in centroids.features) or "none"
            raise CatalogueError(
                f"add[{row}].features: give a known value of at least one of {names}, of which a "
                "semantic ID is made; or give a sid"
            )
        sid: list[int] = []
        for level, table in enumerate(centroids.levels):
            room = prod(centroids.code_count[level + 1 :])
            nearest = np.argsort(np.square(rest - table).sum(1), kind="stable").tolist()
            free = (code for code in nearest if self._num_taken((*sid, code)) < room)
            code = next(free, None)
            if code is None:
                raise CatalogueError(f"add[{row}].sid: is missing, and every semantic ID is taken")
            sid.append(code)
            rest = rest - table[code]
        return self.take(tuple(sid))

    def _num_taken(self, prefix: tuple[int, ...]) -> int:
        """Count the semantic IDs with a prefix, in the trie and in this change."""
        trie, given = self._trie, self._given.get(prefix, 0)
        state = 0
        for level, code in enumerate(prefix):
            first, last = int(trie.indptr[level][state]), int(trie.indptr[level][state + 1])
            state = first + int(np.searchsorted(trie.token[level][first:last], code))
            if state == last or int(trie.token[level][state]) != code:
                return given
        low, high = state, state + 1
        for level in range(len(prefix), trie.num_levels):
            low, high = int(trie.indptr[level][low]), int(trie.indptr[level][high])
        return given + high - low
