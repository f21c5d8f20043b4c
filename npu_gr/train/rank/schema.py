"""Choose a ranker's features from the trained part of a log, and factorise it for `mf_score`.

Features that the option `features` lists are used as given. Otherwise a column's kind depends on
its values:

    texts      category of the values that at least two users or events have. With more than
               `MAX_CATEGORY` values, hashed into twice as many buckets
    numbers    buckets: one per value if there are few, else with about equally many users or events
               each. Cross features (user and item together) are standardised instead
    computed   numbers, as above. `likes` counts the events, and `rate` is the share of the events,
               that are positives of the first binary task

The cross feature `mf_score` is a matrix factorisation's prediction. The served factors are fitted
to all trained events. Training uses cross-fitting: users are split into folds, and a user's score
comes from factors that were fitted without that user's fold. Otherwise the model would overrate a
score that was fitted to the labels it has to predict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from npu_gr.core.arrays import F32
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.feature_schema.computed import (
    ALL,
    BY,
    OF_TIME,
    CrossFeatures,
    ItemValueTable,
    read_rule,
)
from npu_gr.core.feature_schema.encode import encode
from npu_gr.core.feature_schema.factors import MF_SCORE, ItemFactors
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.feature_schema.values import name_of, number_of
from npu_gr.history_store.interactions import FeatureColumn, ItemValues
from npu_gr.model.hstu import HSTU
from npu_gr.train.baselines import MatrixFactorisation
from npu_gr.train.data import Bools, InteractionLog
from npu_gr.train.metrics import F64
from npu_gr.train.rank.inputs import FoldFactors, LoggedCross
from npu_gr.train.rank.options import Task, TrainOptions, liking_values, positives

NUM_FOLDS = 4


def factorise(
    log: InteractionLog, tasks: Sequence[Task], seed: int
) -> tuple[ItemFactors, FoldFactors]:
    """Factorise the trained events: once for service, and in folds for training.

    Args:
        log: Log with at least one trained event.
        tasks: Tasks of the ranker; the first binary one defines the worth of an action.
        seed: Seed of the factors' start, and of the folds.

    Raises:
        ConfigError: there is no binary task.
    """
    valued = replace(log, action_values=_worth(log, tasks), action_names=())
    fold_of = np.random.default_rng(seed).permutation(log.num_users) % NUM_FOLDS
    folds = [np.where(fold_of == fold, 0, log.num_trained) for fold in range(NUM_FOLDS)]
    folds = [num_trained if num_trained.any() else log.num_trained for num_trained in folds]
    served = _factors(valued, seed)
    return served, FoldFactors(
        tuple(_factors(replace(valued, num_trained=num_trained), seed) for num_trained in folds),
        fold_of,
    )


def deviation(log: InteractionLog, tasks: Sequence[Task]) -> float:
    """Compute the standard deviation of the trained events' worth; 1 if all are equal.

    Raises:
        ConfigError: there is no binary task.
    """
    return float(np.array(_worth(log, tasks))[log.actions[log.trained]].std()) or 1.0


def _worth(log: InteractionLog, tasks: Sequence[Task]) -> tuple[float, ...]:
    liking = next((task for task in tasks if task.is_liking), None)
    if liking is None:
        raise ConfigError(
            f"train: computed {MF_SCORE}: needs a task with at_least or actions, which says which "
            "events are likes"
        )
    return liking_values(log, liking)


def _factors(valued: InteractionLog, seed: int) -> ItemFactors:
    found = MatrixFactorisation(valued, seed)
    return ItemFactors(
        found.items.astype(np.float32),
        (np.array(valued.action_values) - found.mean).astype(np.float32),
    )


MAX_CATEGORY = 1000  # most values of a category; columns with more values are hashed
MAX_BUCKETS = 1 << 17
NUM_BORDERS = 15
# occurrences of a value in a category; rarer values are "unknown", so that "unknown" is trained
_LEAST = 2
_LIKES = "likes"


def choose_features(
    log: InteractionLog,
    item_features: Sequence[ItemValues],
    tasks: Sequence[Task],
    options: TrainOptions,
) -> tuple[Feature, ...]:
    """List the features of a model: those of `options`, or chosen from the trained events.

    Args:
        log: Log whose columns are the features of users and events.
        item_features: Side features of items.
        tasks: Tasks of the model.
        options: `features`, `computed` and `max_history_tokens`.

    Raises:
        DataError: a column has no value in the trained part.
        ConfigError: a computed feature needs a column or a task that does not exist.
    """
    computed = [_computed(text, log, tasks) for text in options.computed]
    if options.features is not None:
        found = [*options.features]
    else:
        found = [_of_column(column, _trained(log, column)) for column in log.columns]
    max_events = options.max_history_tokens - any(feature.of == "user" for feature in found)
    names = {item.name for item in item_features}
    for feature in (*found, *computed):
        by = feature.computed.partition(BY)[2]
        if by and by != ALL and by not in names:
            there = ", ".join(sorted(names)) or "none"
            raise ConfigError(
                f"train: computed {feature.computed}: no item feature {by!r}; there are {there}"
            )
    return (*found, *_with_borders(log, item_features, computed, max_events))


def item_tables(
    log: InteractionLog, item_features: Sequence[ItemValues]
) -> dict[str, ItemValueTable]:
    """Make a table by item row of each side feature that has values."""
    tables = {}
    for feature in item_features:
        if feature.values:
            width = max(1, *(len(values) for values in feature.of_item.values()))
            table = np.full((log.num_items, width), len(feature.values))
            for row, item in enumerate(log.item_ids.tolist()):
                values = feature.of_item.get(item, [])
                table[row, : len(values)] = values
            tables[feature.name] = ItemValueTable(table, len(feature.values))
    return tables


def _trained(log: InteractionLog, column: FeatureColumn) -> Bools:
    """Return which of a column's rows are trained events, or users with trained events."""
    return log.num_trained > 0 if column.of == "user" else log.trained


def _of_column(column: FeatureColumn, trained: Bools) -> Feature:
    if column.is_number:
        numbers = column.values[trained]
        numbers = numbers[~np.isnan(numbers)]
        if not len(numbers):
            raise _empty(column)
        return number_feature(Feature(name=column.name, of=column.of, kind="number"), numbers)
    rows = [_values(value) for value in column.values.tolist()]
    counts = Counter(
        value
        for row, is_trained in zip(rows, trained.tolist(), strict=True)
        if is_trained
        for value in row
    )
    if not counts:
        raise _empty(column)
    shape: dict[str, Any] = {
        "name": column.name,
        "of": column.of,
        "max_values": max(map(len, rows)),
    }
    if column.kind == "hashed" or (not column.kind and len(counts) > MAX_CATEGORY):
        return Feature(kind="hashed", num_buckets=min(MAX_BUCKETS, 2 * len(counts)), **shape)
    often = sorted(value for value, count in counts.items() if count >= _LEAST)
    return Feature(kind="category", values=tuple(often or sorted(counts)), **shape)


def _values(value: str | list[str] | None) -> list[str]:
    names = map(name_of, value if isinstance(value, list) else [value])
    return [name for name in dict.fromkeys(names) if name is not None]


def _empty(column: FeatureColumn) -> DataError:
    return DataError(
        f"feature {column.name} of {column.of}: no value in the trained part of the log; leave the "
        "column out of the dataset, or list the features to use in the option `features`"
    )


def number_feature(feature: Feature, numbers: F32 | F64) -> Feature:
    """Choose the bucket borders of a number, or the scale of a cross feature.

    Args:
        feature: Feature without borders.
        numbers: [n] values in the trained part, without missing ones.

    Returns:
        The feature with borders; a cross feature with mean and scale; a feature with a single
        value unchanged.
    """
    if feature.of == "cross":
        deviation = float(numbers.std()) if len(numbers) else 0.0
        mean = float(numbers.mean()) if len(numbers) else 0.0
        return _replaced(feature, mean=mean, scale=deviation or 1.0)
    values = np.unique(numbers.astype(np.float32))
    if len(values) <= 1:
        return feature
    if len(values) <= NUM_BORDERS + 1:
        borders = (values[1:] + values[:-1]) / 2
    else:
        quantiles = np.quantile(
            numbers, np.arange(1, NUM_BORDERS + 1) / (NUM_BORDERS + 1), method="higher"
        )
        # the lowest value, which is often the most frequent one (0), gets its own bucket
        borders = np.append(quantiles.astype(np.float32), values[1])
        borders = borders[borders > values[0]]
    return _replaced(feature, borders=tuple(np.unique(borders).astype(np.float64).tolist()))


def _replaced(feature: Feature, **changes: Any) -> Feature:
    fields = {name: getattr(feature, name) for name in feature.__struct_fields__}
    return Feature(**(fields | changes))


def _computed(text: str, log: InteractionLog, tasks: Sequence[Task]) -> Feature:
    """Parse one entry of the option `computed`."""
    if text in OF_TIME:
        values = tuple(str(value) for value in range(OF_TIME[text]))
        return Feature(name=text, of="request", kind="category", values=values, computed=text)
    what, by, feature = text.partition(BY)
    computed = f"events{by}{feature}" if what == _LIKES else text
    try:
        rule = read_rule(computed)
    except ValueError as error:
        also = ", ".join((_LIKES, *OF_TIME))
        raise ConfigError(f"train: computed: {error}; or one of {also}") from error
    if rule.what == MF_SCORE:
        return Feature(
            name=text, of="cross", kind="number", computed=text, scale=deviation(log, tasks)
        )
    actions: tuple[str, ...] = ()
    if what == _LIKES or rule.what == "rate":
        liking = next((task for task in tasks if task.is_liking), None)
        if liking is None:
            raise ConfigError(
                f"train: computed {text}: needs a task with at_least or actions, which says which "
                "events are likes"
            )
        is_like = np.zeros(len(log.action_values), np.bool_)
        is_like[np.unique(log.actions[positives(log, liking)])] = True
        actions = tuple(
            name
            for name, liked in zip(log.names_of_actions, is_like.tolist(), strict=True)
            if liked
        )
    return Feature(name=text, of="cross", kind="number", computed=computed, actions=actions)


def _with_borders(
    log: InteractionLog,
    item_features: Sequence[ItemValues],
    computed: Sequence[Feature],
    max_events: int,
) -> list[Feature]:
    """Choose the borders or scales of computed features by the trained events' own items."""
    cross = CrossFeatures(
        [feature for feature in computed if feature.of == "cross" and feature.computed != MF_SCORE],
        log.names_of_actions,
        item_tables(log, item_features),
    )
    own = np.flatnonzero(log.trained)
    columns = (
        LoggedCross(log, cross, max_events).columns(own, log.items[own, None])
        if cross.rules
        else {}
    )
    found = []
    for feature in computed:
        numbers = columns[feature.name].ravel() if feature.name in columns else None
        found.append(
            feature if numbers is None else number_feature(feature, numbers[~np.isnan(numbers)])
        )
    return found


def without_schema_features(
    item_features: Sequence[ItemValues], features: Sequence[Feature]
) -> list[ItemValues]:
    """List the side features that are not in the schema, or by which another one is computed."""
    in_schema = {feature.name for feature in features if feature.of == "item"}
    by = {feature.computed.partition(BY)[2] for feature in features}
    return [one for one in item_features if one.name not in in_schema - by]


def write_item_schema(
    model: HSTU, log: InteractionLog, item_features: Sequence[ItemValues]
) -> None:
    """Write the items' values of the schema's features into the model, by the server's code.

    Raises:
        ConfigError: the items do not have a feature of the schema.
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
            raise ConfigError(
                f"train: features.{feature.name}: no item feature of this name; there are {there}"
            )
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
    """Return an item's number from the items file; the name of a category is parsed."""
    if values.numbers:
        return values.numbers.get(item)
    names = _names(values, item)
    try:
        return number_of(names[0]) if names else None
    except TypeError:
        raise DataError(
            f"features.{values.name}: item {item} has {names[0]!r}, which is not a number"
        ) from None
