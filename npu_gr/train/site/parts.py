"""The models of a site: each is trained from a dataset into a folder, in whatever process that is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from npu_gr.dataset.files import Dataset, read_dataset
from npu_gr.model.hf import version
from npu_gr.model.weights import save
from npu_gr.train.generate.publish import CONFIGURATION, publish
from npu_gr.train.generate.train import train_generator
from npu_gr.train.rank.train import train_rank
from npu_gr.train.site.options import SiteOptions
from npu_gr.train.site.report import Figure, PartReport, generator_figures, ranker_figures
from npu_gr.train.steps import TrainingProgress

PartName = Literal["ranker", "generator", "vectors"]
Show = Callable[[TrainingProgress], None]


class _Trained(NamedTuple):
    version: str
    measured_on: str
    figures: tuple[Figure, ...]


class Part(NamedTuple):
    """One model of a site."""

    options: Callable[[SiteOptions], msgspec.Struct]  # those that decide it
    train: Callable[[Dataset, SiteOptions, Path, Show], _Trained]  # into a folder


def train_part(
    name: PartName, data: Path, options: SiteOptions, folder: Path, made_from: str, show: Show
) -> PartReport:
    """Train one model of a site.

    Args:
        name: of the model.
        data: folder of the dataset.
        options: of the site.
        folder: to write into.
        made_from: digest of what decides the result.
        show: called with the progress.

    Raises:
        DataError, ConfigError: as the model's training.
    """
    began_at = time.perf_counter()
    dataset = read_dataset(data)
    dataset.names.save(folder)  # first, because a version is one of the whole folder
    trained = PARTS[name].train(dataset, options, folder, show)
    return PartReport(
        made_from=made_from,
        version=trained.version,
        measured_on=trained.measured_on,
        num_events=len(dataset.interactions()),
        took_s=time.perf_counter() - began_at,
        figures=trained.figures,
    )


def _ranker(dataset: Dataset, options: SiteOptions, folder: Path, show: Show) -> _Trained:
    checkpoint, found = train_rank(dataset.interactions(), dataset.item_features(), options.rank, show)
    measured_on = f"{found.num_judged} later events and {found.num_next} next items; split {found.split}"
    return _Trained(save(checkpoint, folder), measured_on, ranker_figures(found))


def _generator(dataset: Dataset, options: SiteOptions, folder: Path, show: Show) -> _Trained:
    features = dataset.item_features()
    trained = train_generator(dataset.interactions(), features, options.generate, None, show)
    publish(trained, features, options.generate, folder)
    (folder / CONFIGURATION).unlink()  # the site has one that serves all models
    measured_on = f"the last event of {trained.report.generator.num_users} users"
    return _Trained(version(folder), measured_on, generator_figures(trained.report))


PARTS: dict[PartName, Part] = {
    "generator": Part(lambda options: options.generate, _generator),
    "ranker": Part(lambda options: options.rank, _ranker),
}
"""The longest training first."""
