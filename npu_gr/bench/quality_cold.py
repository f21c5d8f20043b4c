"""`npu-gr bench quality --only cold`: items that were not in the training, scored by their features and codes alone.

    items      a tenth of them, drawn at random: all their events are taken out of the training
    training   the oldest four fifths of each user's events, and of these the last one is held out for validation
    judged     the newest fifth of each user's events, with everything before each event as its history, cold items
               included: they are known by then, as items are that POST /v1/catalog/items added

The generator and the ranker are trained with the same features and the same semantic IDs, made by residual k-means of
the items' neighbours and features. A cold item has no neighbours: its semantic ID comes of its features.

  AUC like        events with cold items; positive: the value reaches the task's threshold
  AUC chosen      for each event with a cold item, the share of the cold items that the user never had below it
  HR@10           the cold item of the event among the whole catalogue, items of the history left out
  warm AUC        events with the other items, beside a ranker that was trained without row dropout
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from npu_gr.core.arrays import I64
from npu_gr.features.interactions import Interactions, ItemValues
from npu_gr.model.hstu import HSTU
from npu_gr.model.item_rows import NewItems
from npu_gr.train.data import InteractionLog, build_log, to_train_on
from npu_gr.train.generate.codes import ItemCodes, codes_of_new, item_vectors, residual_codes
from npu_gr.train.generate.train import SPLIT, GenerateOptions

COLD_RATIO = 0.1  # of the items
MAX_TARGETS = 1000  # events with cold items behind HR@10


class ColdLog(NamedTuple):
    """A log whose cold items are not trained on. Rows: the trained items, then the cold ones."""

    trained: Interactions
    features: list[ItemValues]  # of the trained items
    judged: InteractionLog  # everything; the newest fifth of each user is judged
    num_trained_items: int
    codes: ItemCodes  # of the trained items
    all_codes: ItemCodes  # of all items
    new: NewItems  # what is known of the cold items


def cold_log(
    interactions: Interactions, features: Sequence[ItemValues], options: GenerateOptions, seed: int
) -> ColdLog:
    """Take a tenth of the items out of a log, and code all of them."""
    item_ids = np.unique(interactions.items)
    random = np.random.default_rng(seed)
    cold = np.sort(random.choice(item_ids, int(COLD_RATIO * len(item_ids)), replace=False))
    older = to_train_on(interactions.users, interactions.timestamps, "user-time")
    trained = interactions[older & ~np.isin(interactions.items, cold)]
    warm_ids = np.unique(trained.items)
    known = np.concatenate([warm_ids, cold])
    everything = interactions[np.isin(interactions.items, known)]
    warm = [_of(feature, warm_ids) for feature in features]

    whole = build_log(trained, [_of(feature, known) for feature in features], SPLIT)  # knows the cold ones by features
    vectors = item_vectors(
        whole.only_trained(SPLIT), features, options.vector_dim, options.company_window, options.seed
    )
    is_cold = np.isin(whole.item_ids, cold)
    uses = np.bincount(whole.items[whole.trained], minlength=whole.num_items)[~is_cold]
    codes = residual_codes(vectors[~is_cold], options.code_count, uses, options.seed)
    new_codes = codes_of_new(codes, vectors[~is_cold], vectors[is_cold])
    return ColdLog(
        trained,
        warm,
        _judged(everything, known),
        len(warm_ids),
        codes,
        replace(codes, sids=np.concatenate([codes.sids, new_codes])),
        NewItems(tuple(_value_ids(_of(f, warm_ids), f, cold) for f in features), new_codes),
    )


def _of(feature: ItemValues, item_ids: I64) -> ItemValues:
    kept = set(item_ids.tolist())
    return ItemValues(feature.name, feature.values, {item: v for item, v in feature.of_item.items() if item in kept})


def _value_ids(trained: ItemValues, feature: ItemValues, item_ids: I64) -> I64:
    """List the values of new items as the ranker's tables have them, which have room for what trained items have."""
    width = max(1, *(len(values) for values in trained.of_item.values()))
    table = np.full((len(item_ids), width), len(feature.values))
    for row, item in enumerate(item_ids.tolist()):
        values = feature.of_item.get(item, [])[:width]
        table[row, : len(values)] = values
    return table


def _judged(interactions: Interactions, item_ids: I64) -> InteractionLog:
    log = build_log(interactions, [], "user-time")
    order = np.argsort(item_ids)
    return replace(log, items=order[np.searchsorted(item_ids[order], log.item_ids[log.items])], item_ids=item_ids)


def with_new_items(model: HSTU, new: NewItems) -> HSTU:
    """Make a model of a ranker and its new items, as one that had been trained with them and learnt nothing of them."""
    count = len(new.codes)
    config = msgspec.structs.replace(model.config, num_items=model.config.num_items + count)
    wide = HSTU(config).cast(model.dtype)
    state = model.state_dict()
    state["item.weight"] = torch.cat([state["item.weight"], torch.zeros(count, config.dim, dtype=model.dtype)])
    for index, values in enumerate(new.features):
        name = f"feature_ids_{index}"
        state[name] = torch.cat([state[name], torch.from_numpy(values)])
    if config.item_codes:
        state["codes.of_item"] = torch.cat([state["codes.of_item"], torch.from_numpy(new.codes)])
    wide.load_state_dict(state)
    wide.eval().freeze_items()
    return wide
