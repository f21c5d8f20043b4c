"""The computed cross features of a model: its schema's, with the item features and actions that they name."""

from __future__ import annotations

from npu_gr.feature_schema.computed import CrossFeatures, ItemValueTable
from npu_gr.model.hstu import HSTU


def cross_features(model: HSTU) -> CrossFeatures:
    """Make what computes the model's cross features; the values of items are the model's own, not a copy.

    Args:
        model: on the host.

    Raises:
        ValueError: a feature names an action or an item feature that the model lacks.
    """
    config = model.config
    tables = {
        feature.name: ItemValueTable(getattr(model, f"feature_ids_{index}").numpy(), feature.num_values)
        for index, feature in enumerate(config.item_features)
    }
    return CrossFeatures(config.features_of("cross"), config.actions, tables)
