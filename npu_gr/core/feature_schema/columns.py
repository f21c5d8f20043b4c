"""Feature values between request and model: `OneRow` of a user or request, `Columns` of rows.

Neither depends on a checkpoint's vocabularies, so a cached history fits the next model too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from npu_gr.core.feature_schema.encode import (
    F32,
    U64,
    Encoded,
    FeatureEncoder,
    as_column,
    has_value,
)
from npu_gr.core.feature_schema.schema import Feature, Of

Value = bool | int | float | str
OneRow = Mapping[str, Value | tuple[Value, ...] | None]
"""Feature -> value or values; None = missing."""

Take = Callable[[Any], Any]
"""Picks rows of an array."""


class Columns(NamedTuple):
    """Features of n events or candidates, as `as_column` makes them.

    An absent feature is missing in every row.
    """

    numbers: Mapping[str, F32] = {}  # [n], NaN = missing
    names: Mapping[str, U64] = {}  # [n, max_values] hashes, 0 = no value

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)

    @property
    def given(self) -> Mapping[str, F32 | U64]:
        """All columns by name.

        If two model versions have a name as number and as category, the category is returned.
        """
        return {**self.numbers, **self.names}

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(column.nbytes for columns in self for column in columns.values())

    def take(self, rows: Any) -> Columns:
        """Select rows by slice, mask or indices."""
        if not self:
            return self
        return Columns(
            {name: column[rows] for name, column in self.numbers.items()},
            {name: column[rows] for name, column in self.names.items()},
        )

    def copy(self) -> Columns:
        """Return a copy that references no other arrays."""
        return Columns(
            {name: column.copy() for name, column in self.numbers.items()},
            {name: column.copy() for name, column in self.names.items()},
        )

    def followed_by(self, newer: Columns, num_rows: int, num_newer: int) -> Columns:
        """Concatenate rows; a feature that only one side has is missing in the other's rows."""
        if not (self or newer):
            return self
        numbers, names = {}, {}
        for name in {**self.numbers, **newer.numbers}:
            parts = [
                columns.get(name, np.full(n, np.nan, np.float32))
                for columns, n in ((self.numbers, num_rows), (newer.numbers, num_newer))
            ]
            numbers[name] = np.concatenate(parts)
        for name in {**self.names, **newer.names}:
            found = [columns.get(name, np.zeros((n, 1), np.uint64)) for columns, n in
                     ((self.names, num_rows), (newer.names, num_newer))]  # fmt: skip
            names[name] = np.concatenate(
                [widened(part, max(one.shape[1] for one in found)) for part in found]
            )
        return Columns(numbers, names)

    def digested(self, update: Callable[[bytes], None]) -> None:
        """Feed all columns with values to a hash, sorted by name.

        Equal values give equal bytes, independent of the width of the column.
        """
        if not self:
            return
        columns: list[tuple[str, Any]] = [*self.numbers.items(), *self.names.items()]
        for name, column in sorted(columns, key=lambda named: named[0]):
            if column.ndim == 1:
                is_missing = np.isnan(column)
                column = (
                    np.where(is_missing, np.float32(np.nan), column) if is_missing.any() else column
                )
            else:
                is_missing = column == 0
                column = column[:, ~is_missing.all(0)]
            if not is_missing.all():
                update(name.encode("utf-8", "surrogatepass"))
                update(np.ascontiguousarray(column).tobytes())


NO_COLUMNS = Columns()


def widened(hashes: U64, width: int) -> U64:
    """Pad the columns of hashes with "no value" to at least `width`."""
    return (
        hashes
        if hashes.shape[1] >= width
        else np.pad(hashes, ((0, 0), (0, width - hashes.shape[1])))
    )


def as_columns(
    features: Mapping[str, Feature], columns: Mapping[str, Any], num_rows: int
) -> Columns:
    """Validate columns of values, and convert them to `Columns`.

    Raises ValueError, as `FeatureEncoder.encode`.
    """
    numbers: dict[str, F32] = {}
    names: dict[str, U64] = {}
    for name, values in columns.items():
        feature = known(features, name)
        column: Any = as_column(feature, values, num_rows)
        if has_value(column):
            (numbers if feature.kind == "number" else names)[name] = column
    return Columns(numbers, names)


def known(features: Mapping[str, Feature], name: str) -> Feature:
    """Find a feature that a request may have.

    Raises:
        ValueError: the model has no such feature, or the service computes it.
    """
    feature = features.get(name)
    if feature is None:
        there_are = ", ".join(features)
        raise ValueError(
            f"{name[:_SHOWN]}: unknown feature; the model has {there_are[:_LISTED] or 'none'}"
        )
    if feature.computed:
        raise ValueError(
            f"{name}: the service computes this feature ({feature.computed}); do not send it"
        )
    return feature


class ModelFeatures:
    """The features of a model by their scope, each with a lazily made encoder."""

    def __init__(self, features: Sequence[Feature] = (), num_user_tokens: int = 1) -> None:
        """Store the features.

        Args:
            features: Features of the model.
            num_user_tokens: Tokens of the user features, if there are any.
        """
        self.features = tuple(features)
        self.num_user_tokens = (
            num_user_tokens if any(feature.of == "user" for feature in features) else 0
        )

    def _of(self, of: Of) -> FeatureEncoder:
        return FeatureEncoder([feature for feature in self.features if feature.of == of])

    @cached_property
    def user(self) -> FeatureEncoder:
        return self._of("user")

    @cached_property
    def event(self) -> FeatureEncoder:
        return self._of("event")

    @cached_property
    def request(self) -> FeatureEncoder:
        return self._of("request")

    @cached_property
    def cross(self) -> FeatureEncoder:
        return self._of("cross")

    def missing(self, **given: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the features (`of.name`) that are absent or None, without computed ones.

        Args:
            given: Scope -> values by name; other scopes are ignored.
        """
        return tuple(
            f"{feature.of}.{feature.name}"
            for feature in self.features
            if feature.of in given
            and not feature.computed
            and given[feature.of].get(feature.name) is None
        )

    def row(self, encoder: FeatureEncoder, values: OneRow | None) -> Encoded | None:
        """Encode one row; None if the model has no such features.

        Raises ValueError, as `FeatureEncoder.encode`.
        """
        if not encoder.features:
            return None
        return encoder.encode({name: [value] for name, value in (values or {}).items()}, 1)

    def rows(self, encoder: FeatureEncoder, columns: Columns, num_rows: int) -> Encoded | None:
        """Encode n rows; None if the model has no such features.

        Columns of another model version, unknown or of another kind here, are ignored.
        """
        if not encoder.features:
            return None
        fitting: dict[str, Any] = {
            name: column for name, column in columns.numbers.items() if _is_number(encoder, name)
        }
        for name, hashes in columns.names.items():
            feature = encoder.features.get(name)
            if feature is not None and feature.kind != "number":
                fitting[name] = widened(hashes, feature.max_values)[:, : feature.max_values]
        return encoder.encode_columns(fitting, num_rows)


def _is_number(encoder: FeatureEncoder, name: str) -> bool:
    feature = encoder.features.get(name)
    return feature is not None and feature.kind == "number"


_SHOWN = 64  # characters of a name in an error
_LISTED = 200  # characters of the list of features in an error
