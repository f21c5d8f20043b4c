"""Contextual features: what public code has of a user in front of the history, a token each or all in one.

A token is a linear layer, or an MLP, of the row of the feature's value. It is folded into the rows: what a token is
without a value is in `user_token`, and what the value adds is its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npu_gr.core.feature_schema.schema import MOST_WHOLE, Feature
from npu_gr.model.imported.source import ForeignCheckpoint


class Contextual(NamedTuple):
    """One feature."""

    feature: Feature  # of the user
    rows: Tensor  # [num_rows, d] of its table, in the order of `Feature.num_rows`; of what is missing last


def numbered(source: ForeignCheckpoint, name: str, table: Tensor, missing: Tensor | None = None) -> Contextual:
    """Make a feature whose values are the numbers of its table's rows.

    Args:
        source: where a table that is too long is noted.
        name: of the feature.
        table: [n, d].
        missing: [d] of no value; None = zeros.
    """
    if len(table) > MOST_WHOLE:
        source.refuse(f"contextual feature {name}: {len(table)} rows, the limit is {MOST_WHOLE}")
        table = table[:1]
    feature = Feature(name=name, of="user", kind="number", num_buckets=len(table))
    last = table.new_zeros(table.shape[1]) if missing is None else missing
    return Contextual(feature, torch.cat([table, last[None]]))


def folded(
    features: Sequence[Contextual], weights: Sequence[Tensor] | Tensor, biases: Tensor, scale: float
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fold linear layers into the rows of features.

    Args:
        features: in the order of their tokens.
        weights: [features, d, dim] of each one's layer.
        biases: [tokens, dim]: as many as features, or one, and then the features are one token.
        scale: of embeddings.

    Returns:
        Settings of `HSTUConfig`, and tensors of the model.
    """
    rows = [one.rows @ weight * scale for one, weight in zip(features, weights, strict=True)]
    is_each = len(biases) == len(features)
    settings = {"features": tuple(one.feature for one in features), "user_tokens": "each" if is_each else "sum"}
    padding = biases.new_zeros(1, biases.shape[1])
    tensors = {
        "features.user.codes.weight": torch.cat([*rows, padding]),
        "user_token": biases * scale if is_each else biases[0] * scale,
    }
    return settings, tensors
