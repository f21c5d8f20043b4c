"""Features of items that a schema names: read from the items' data for training, as new items send them later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.feature_schema.computed import BY
from npu_gr.core.feature_schema.encode import encode
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.features.interactions import ItemValues
from npu_gr.model.hstu import HSTU
from npu_gr.train.data import InteractionLog


def beside_schema(item_features: Sequence[ItemValues], features: Sequence[Feature]) -> list[ItemValues]:
    """Leave out what the schema reads itself, unless something is computed by its values."""
    told = {feature.name for feature in features if feature.of == "item"}
    by = {feature.computed.partition(BY)[2] for feature in features}
    return [one for one in item_features if one.name not in told - by]


def write_item_schema(model: HSTU, log: InteractionLog, item_features: Sequence[ItemValues]) -> None:
    """Give the model's items the values of the schema's features, by the server's code.

    Raises:
        ConfigError: the items have no such feature.
        DataError: a value does not fit its feature.
    """
    schema = model.config.features_of("item")
    if not schema:
        return
    found = {one.name: one for one in item_features}
    items = log.item_ids.tolist()
    columns: dict[str, list[Any]] = {}
    for feature in schema:
        if feature.name not in found:
            there = ", ".join(sorted(found)) or "none"
            raise ConfigError(f"train: features.{feature.name}: no item feature of this name; there are {there}")
        read = _number if feature.kind == "number" else _names
        columns[feature.name] = [read(found[feature.name], item) for item in items]
    try:
        encoded = encode(schema, columns, len(items))
    except ValueError as error:
        raise DataError(f"features of item: {error}") from error
    model.item_feature_codes.copy_(torch.from_numpy(encoded.codes))
    model.item_feature_numbers.copy_(torch.from_numpy(encoded.numbers))


def _names(values: ItemValues, item: int) -> list[str]:
    return [values.values[place] for place in values.of_item.get(item, ())]


def _number(values: ItemValues, item: int) -> float | None:
    """Return the number of an item: as the items' file had it; of a category, what its name says."""
    if values.numbers:
        return values.numbers.get(item)
    names = _names(values, item)
    try:
        return float(names[0]) if names else None
    except ValueError:
        raise DataError(f"features.{values.name}: item {item} has {names[0]!r}, which is no number") from None
