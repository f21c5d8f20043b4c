"""Features in bodies: one value a name of users and requests, one column a name of candidates and events.

A column is a list, in which null is what is missing; or raw little-endian bytes, base64 in JSON: float32 of a number
(NaN = missing), uint64 xxh3-64 of the UTF-8 text of each name (0 = no value; `max_values` of them a row).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from npu_gr.core.errors import Unprocessable
from npu_gr.core.feature_schema.columns import Columns, OneRow, as_columns, known
from npu_gr.core.feature_schema.encode import F32, Values, as_column
from npu_gr.core.feature_schema.schema import MOST_FEATURES, MOST_VALUES, Feature

Text = Annotated[str, msgspec.Meta(max_length=1024)]
FeatureName = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Several = Annotated[list[bool | int | float | Text], msgspec.Meta(max_length=MOST_VALUES)]
Cell = bool | int | float | Text | Several | None  # null = missing
Row = Annotated[dict[FeatureName, Cell], msgspec.Meta(max_length=MOST_FEATURES)]
ColumnMap = Annotated[
    dict[FeatureName, list[Cell] | bytes],
    msgspec.Meta(
        description="Features, each a list with a value a row, or raw little-endian float32 of a number and uint64 "
        "hashes of names (base64 in JSON). At most server.max_feature_values together.",
        max_length=MOST_FEATURES,
        extra={"limit": "max_feature_values", "element_bytes": 4, "most_entries": MOST_FEATURES},
    ),
]


class SignalFeatures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of the user before the signal; a part of the prefix."""

    user: Row | None = None  # absent: those of `base`


class RequestFeatures(SignalFeatures, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of the user, and of this request: hour, page, device."""

    request: Row = msgspec.field(default_factory=dict)


class RankFeatures(RequestFeatures, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of the user, of this request, and of the user with each candidate."""

    cross: ColumnMap = msgspec.field(default_factory=dict)


def parse_row(row: Mapping[str, Cell], features: Mapping[str, Feature], field: str) -> OneRow:
    """Check the features of one user or request. Raises Unprocessable, with the feature and the limit."""
    try:
        for name, value in row.items():
            as_column(known(features, name), [value], 1)
    except ValueError as error:
        raise Unprocessable(f"{field}.{error}") from None
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in row.items()
        if value is not None and value != []
    }


def parse_columns(
    columns: Mapping[str, list[Cell] | bytes], features: Mapping[str, Feature], num_rows: int, field: str
) -> Columns:
    """Read the features of n candidates or events. Raises Unprocessable, with the feature, the row and the limit."""
    if not columns:
        return Columns()
    try:
        if (numbers := _raw_numbers(columns, features, num_rows)) is not None:
            return Columns(numbers)
        return as_columns(
            features, {name: _values(known(features, name), values) for name, values in columns.items()}, num_rows
        )
    except ValueError as error:
        raise Unprocessable(f"{field}.{error}") from None


def _raw_numbers(
    columns: Mapping[str, list[Cell] | bytes], features: Mapping[str, Feature], num_rows: int
) -> Mapping[str, F32] | None:
    """Read columns that are all raw numbers, none of them missing, at once; None = they are something else."""
    for name, values in columns.items():
        feature = features.get(name)
        if feature is None or feature.kind != "number" or feature.computed:
            return None
        if type(values) is not bytes or len(values) != 4 * num_rows:
            return None
    read: F32 = np.frombuffer(b"".join(columns.values()), "<f4").reshape(-1, num_rows)  # type: ignore[arg-type]
    return dict(zip(columns, read, strict=True)) if np.isfinite(read).all() else None


def _values(feature: Feature, values: list[Any] | bytes) -> Values:
    if not isinstance(values, bytes):
        return values
    dtype, width = (np.dtype("<f4"), 1) if feature.kind == "number" else (np.dtype("<u8"), feature.max_values)
    if len(values) % (dtype.itemsize * width):
        raise ValueError(f"{feature.name}: {len(values)} bytes are no whole rows of {width} {dtype.name}")
    read = np.frombuffer(values, dtype)
    return read if feature.kind == "number" else read.reshape(-1, width)
