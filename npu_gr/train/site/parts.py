"""Train the models of a site, each in a process of its own, and write their folders."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from npu_gr.dataset.files import Dataset, read_dataset
from npu_gr.history_store.interactions import ItemValues
from npu_gr.model.hf_files import version
from npu_gr.model.weights import Checkpoint, load, save
from npu_gr.train.data import TESTED, Split
from npu_gr.train.generate.publish import publish, start_at
from npu_gr.train.generate.train import SPLIT, TrainedGenerator, both_codes, train_generator
from npu_gr.train.generate.warm import GeneratorStarts, KnownItems
from npu_gr.train.options import CONFIGURATION, warm
from npu_gr.train.rank.options import Task
from npu_gr.train.rank.train import RankerCodes, train_rank
from npu_gr.train.rank.warm import RankerStart, known_codes
from npu_gr.train.resume import TrainingStates
from npu_gr.train.retrieve import TrainedRetriever, train_retriever
from npu_gr.train.shared_baselines import SharedBaselines
from npu_gr.train.site.configuration import PartName, SiteOptions
from npu_gr.train.site.report import (
    Figure,
    PartReport,
    generator_figures,
    ranker_figures,
    ranker_words,
    vectors_figures,
    warning_of,
    warning_of_ranker,
)
from npu_gr.train.site.verdict import keep as keep_ranks
from npu_gr.train.steps import TrainingProgress
from npu_gr.vector_search.vectors import save as save_vectors

EVALUATED = "evaluated"  # subfolder of a model's folder, for the evaluated model
Show = Callable[[TrainingProgress], None]


class _Trained(NamedTuple):
    version: str
    measured_on: str
    figures: tuple[Figure, ...]
    warning: str
    words: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()
    code_count: tuple[int, ...] = ()
    node_count: tuple[int, ...] = ()


class Start(NamedTuple):
    """A model to train on with new events, in `WARM_EPOCHS` of the epochs."""

    site: Path  # folder of the site
    version: str  # of the model
    code_count: tuple[int, ...]  # of a generator: codes of each level


class Part(NamedTuple):
    """One model of a site."""

    options: Callable[[SiteOptions], object]  # the options that decide the model
    # trains it, and writes a folder
    train: Callable[[Dataset, SiteOptions, Path, Show, TrainingStates, Start | None], _Trained]


def train_part(
    name: PartName,
    data: Path,
    options: SiteOptions,
    folder: Path,
    made_from: str,
    start: Start | None,
    show: Show,
) -> PartReport:
    """Train one model of a site.

    Args:
        name: Name of the model.
        data: Folder of the dataset.
        options: Options of the site.
        folder: Folder to write the model to.
        made_from: Digest of everything that decides the model.
        start: Model to train on; None = train from random weights.
        show: Callback with the progress.

    Raises:
        DataError: the data cannot be trained on.
        ConfigError: the options do not make a model.
    """
    began_at = time.perf_counter()
    dataset = read_dataset(data)
    dataset.names.save(folder)  # first, because a version covers all files of the folder
    states = TrainingStates(folder.with_name(f"{name}.states"), f"{made_from} {start}")
    trained = PARTS[name].train(dataset, options, folder, show, states, start)
    states.remove()
    return PartReport(
        made_from=made_from,
        version=trained.version,
        measured_on=trained.measured_on,
        num_events=len(dataset.interactions()),
        took_s=time.perf_counter() - began_at,
        cpu_s=time.process_time(),  # the process trains this model alone
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        figures=trained.figures,
        words=trained.words,
        warning=trained.warning,
        started_from="" if start is None else start.version,
        tasks=trained.tasks,
        code_count=trained.code_count,
        node_count=trained.node_count,
    )


def _ranker(
    dataset: Dataset,
    options: SiteOptions,
    folder: Path,
    show: Show,
    states: TrainingStates,
    before: Start | None,
) -> _Trained:
    def keep(checkpoint: Checkpoint) -> None:
        dataset.names.save(folder / EVALUATED)
        save(checkpoint, folder / EVALUATED)

    interactions, features = dataset.interactions(), dataset.item_features()
    # Codes come from co-occurrence, which a new item does not have. With item features, the ranker
    # predicts new items better without codes: see docs/history/README.md.
    codes: RankerCodes | None = None
    start: RankerStart | None = None
    own = options.rank
    if before is not None:
        own = msgspec.structs.replace(own, epochs=warm(own.epochs))
        ranker = before.site / "ranker"
        start = RankerStart(load(ranker / EVALUATED), load(ranker))
    if not features:
        known: tuple[KnownItems | None, KnownItems | None] = (None, None)
        if start is not None:
            known = known_codes(start.evaluated), known_codes(start.served)
        show(TrainingProgress("ranker: codes of the items", 0, 1))
        codes = RankerCodes(*both_codes(interactions, features, options.generate, known))
    rank = SharedBaselines(folder.parent)
    checkpoint, found = train_rank(
        interactions, features, own, show, keep, codes, states, start, rank
    )
    what = (
        f"AUC of {found.num_evaluated:,} later events, HR and NDCG of the next item of "
        f"{found.num_next:,} users"
    )
    measured_on = _stands(found.split, found.num_trained, what)
    made = save(checkpoint, folder)
    keep_ranks(found, interactions.user_names, folder / EVALUATED)
    return _Trained(
        made,
        measured_on,
        ranker_figures(found),
        warning_of_ranker(found),
        ranker_words(found),
        found.chosen_tasks,
    )


def _generator(
    dataset: Dataset,
    options: SiteOptions,
    folder: Path,
    show: Show,
    states: TrainingStates,
    before: Start | None,
) -> _Trained:
    features = dataset.item_features()

    def keep(trained: TrainedGenerator) -> None:
        dataset.names.save(folder / EVALUATED)
        _publish(trained, features, options, folder / EVALUATED)

    own, start = options.generate, None
    if before is not None:
        epochs = warm(own.epochs)
        every = min(own.validate_every, epochs)
        own = msgspec.structs.replace(own, epochs=epochs, validate_every=every)
        folders = before.site / "generator" / EVALUATED, before.site / "generator"
        count = before.code_count or own.code_count
        start = GeneratorStarts(*(start_at(one, count) for one in folders))
    rank = SharedBaselines(folder.parent)
    trained = train_generator(
        dataset.interactions(), features, own, None, show, keep, states, start, rank
    )
    _publish(trained, features, options, folder)
    report = trained.report
    what = f"of {report.own.num_users:,} users"
    measured_on = _stands(SPLIT, report.num_trained, what)
    return _Trained(
        version(folder),
        measured_on,
        generator_figures(report),
        warning_of(report.comparison()),
        code_count=own.code_count,
        node_count=() if trained.codes.given is None else trained.codes.code_count,
    )


def _vectors(
    dataset: Dataset,
    options: SiteOptions,
    folder: Path,
    show: Show,
    _states: TrainingStates,
    _before: Start | None,
) -> _Trained:
    def keep(trained: TrainedRetriever) -> None:
        dataset.names.save(folder / EVALUATED)
        save_vectors(trained.vectors, folder / EVALUATED)

    rank = SharedBaselines(folder.parent)
    trained = train_retriever(
        dataset.interactions(), options.retrieve, show, evaluated=keep, rank=rank
    )
    report = trained.report
    measured_on = _stands(SPLIT, report.num_trained, f"of {report.own.num_users:,} users")
    made = save_vectors(trained.vectors, folder)
    return _Trained(made, measured_on, vectors_figures(report), warning_of(report.comparison()))


def _publish(
    trained: TrainedGenerator, features: Sequence[ItemValues], options: SiteOptions, folder: Path
) -> None:
    publish(trained, features, options.generate, folder)
    (folder / CONFIGURATION).unlink()  # the site has one that serves all models


def _of_codes(options: SiteOptions) -> object:
    """Return the options that decide the semantic IDs, which the ranker reads too."""
    generate = options.generate
    return generate.seed, generate.code_count, generate.vector_dim


def _stands(split: Split, num_trained: int, what: str) -> str:
    return f"{TESTED[split]}, {what}; trained on {num_trained:,} older events"


PARTS: dict[PartName, Part] = {
    "generator": Part(lambda options: options.generate, _generator),
    "ranker": Part(lambda options: (options.rank, _of_codes(options)), _ranker),
    "vectors": Part(lambda options: options.retrieve, _vectors),
}
"""The models, the one with the longest training first."""


def parts_of(options: SiteOptions) -> dict[PartName, Part]:
    """Return the models that a site has: all but those that it does without."""
    return {name: part for name, part in PARTS.items() if name not in options.without}
