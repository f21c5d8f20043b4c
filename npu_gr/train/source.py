"""What a training reads: the events, the items' features, and what the items are called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from npu_gr.catalogue.names import EMPTY, ItemNames
from npu_gr.core.errors import ConfigError
from npu_gr.dataset import read_log
from npu_gr.features.interactions import Interactions, ItemValues, read_item_features


class TrainingData(NamedTuple):
    """The data of one training."""

    interactions: Interactions
    features: list[ItemValues]
    names: ItemNames  # of a log that is no dataset: none, for its items' ids are their names


def read_training_data(
    log: Path, *, value_column: str = "rating", items: Path | None = None, columns: Sequence[str] = ()
) -> TrainingData:
    """Read a dataset, which brings features and names, or a log with perhaps a file of items.

    Args:
        log: the folder of a dataset, or a file as `read_log` has it.
        value_column: of a file.
        items: RecBole `.item` file; not with a dataset.
        columns: features to use; none at all = every one of a dataset, none of a file.

    Raises:
        DataError: it cannot be read.
        ConfigError: the dataset has no such feature, or an items' file is given beside it.
    """
    interactions = read_log(log, value_column=value_column)
    if not log.is_dir():
        return TrainingData(interactions, read_item_features(items, columns) if items else [], EMPTY)
    if items is not None:
        raise ConfigError(f"--items: the dataset {log} has its own; npu-gr prepare --items reads another file of them")
    from npu_gr.dataset.files import read_dataset

    dataset = read_dataset(log)
    found = {feature.name: feature for feature in dataset.item_features()}
    if missing := [name for name in columns if name not in found]:
        raise ConfigError(f"--item-features: {log} has no {missing[0]!r}; there are {', '.join(found) or 'none'}")
    return TrainingData(interactions, [found[name] for name in columns or found], dataset.names)
