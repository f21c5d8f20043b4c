"""Start a ranker at the weights of an earlier one, to train it on with new events."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint
from npu_gr.train.generate.warm import KnownItems


class RankerStart(NamedTuple):
    """The rankers to start at."""

    evaluated: Checkpoint  # trained without the held-out events of its time
    served: Checkpoint


def known_codes(old: Checkpoint) -> KnownItems | None:
    """Return the semantic IDs that an earlier ranker reads; None = it reads none."""
    if not old.model.config.item_codes:
        return None
    return KnownItems(old.item_ids, old.model.codes.of_item.numpy().astype(np.int32))


@torch.no_grad()
def start_at(model: HSTU, item_ids: I64, old: Checkpoint) -> None:
    """Copy the weights of an earlier ranker, in place.

    Rows are copied by what they stand for: an item's id, an action's name, a value of a feature. A
    new item's own row is zero where features or codes describe the item. What the earlier ranker
    does not have, or has in another shape, stays as it is.

    Args:
        model: New ranker; its codes, if it has some, are those of `old` for the items of `old`.
        item_ids: int64 [num_items] ids of its items.
        old: Earlier ranker.
    """
    config, before = model.config, old.model.config
    weights = dict(old.model.named_parameters())
    rows = _rows(config, before, item_ids, old.item_ids)
    for name, weight in model.named_parameters():
        was = weights.get(name)
        if name in rows:
            if was is not None and was.shape[1:] == weight.shape[1:]:
                to, of = rows[name]
                weight[to] = was[of]
        elif (
            was is not None and was.shape == weight.shape and _means_the_same(name, config, before)
        ):
            weight.copy_(was)
    if config.item_codes or config.item_features or config.features_of("item"):
        to, _ = rows["item.weight"]
        is_new = torch.ones(len(item_ids), dtype=torch.bool)
        is_new[to] = False
        model.item.weight[is_new] = 0


def _rows(
    config: HSTUConfig, before: HSTUConfig, item_ids: I64, old_ids: I64
) -> dict[str, tuple[Tensor, Tensor]]:
    """Map the tables whose rows have names: table -> new rows, and the old row of each."""
    items = _matched(item_ids.tolist(), old_ids.tolist())
    # the last row stands for no action yet, and for no value
    rows = {
        "item.weight": items,
        "candidate.weight": items,
        "action.weight": _matched([*config.actions, None], [*before.actions, None]),
    }
    values = {one.name: [*one.values, None] for one in before.item_features}
    for at, one in enumerate(config.item_features):
        rows[f"feature.{at}.weight"] = _matched([*one.values, None], values.get(one.name, []))
    return rows


def _matched(new: Sequence[Hashable], old: Sequence[Hashable]) -> tuple[Tensor, Tensor]:
    place = {name: row for row, name in enumerate(old)}
    pairs = [(row, place[name]) for row, name in enumerate(new) if name in place]
    found = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _means_the_same(name: str, config: HSTUConfig, before: HSTUConfig) -> bool:
    """Whether the rows of a table of features, codes or tasks stand for the same in both."""
    if name.startswith("features."):
        return [(one.name, one.values) for one in config.features] == [
            (one.name, one.values) for one in before.features
        ]
    return not name.startswith("head.") or config.tasks == before.tasks
