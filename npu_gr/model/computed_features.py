"""The computed cross features of a model: its schema's, with the item features, actions and factors that they name."""

from __future__ import annotations

from npu_gr.core.feature_schema.computed import CrossFeatures, ItemValueTable
from npu_gr.core.feature_schema.factors import ItemFactors
from npu_gr.model.hstu import HSTU


def cross_features(model: HSTU) -> CrossFeatures:
    """Make what computes the model's cross features; the values of items are the model's own, not a copy.

    Args:
        model: of a model on another device than the host they are a copy.

    Raises:
        ValueError: a feature names an action or an item feature that the model lacks.
    """
    config = model.config
    tables = {
        feature.name: ItemValueTable(getattr(model, f"feature_ids_{index}").cpu().numpy(), feature.num_values)
        for index, feature in enumerate(config.item_features)
    }
    factors = None
    if config.has_factors:
        factors = ItemFactors(model.factors_of_items.cpu().numpy(), model.factors_of_actions.cpu().numpy())
    return CrossFeatures(config.features_of("cross"), config.actions, tables, factors)
