"""`npu-gr train all`: make a site, the folder that an instance serves, from a dataset.

    dataset -> generator, ranker and vectors, trained at the same time
            -> popular.txt, serve.yaml, README.md, report.json
            -> all staged files are moved into place

A model that an earlier or interrupted run made from the same dataset and options is reused.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from npu_gr import __version__
from npu_gr.core.errors import DataError, NpuGrError
from npu_gr.core.progress import heartbeat
from npu_gr.core.request import SourceName
from npu_gr.core.settings import override
from npu_gr.dataset.files import Dataset, read_dataset
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.model.hf_files import version
from npu_gr.model.weights import Checkpoint, save
from npu_gr.service.config import load
from npu_gr.train.cascade import NextEventCase, hides_seen, next_events, repeat_ratio
from npu_gr.train.data import TESTED, Split, to_train_on
from npu_gr.train.generate.publish import publish
from npu_gr.train.generate.train import SPLIT, TrainedGenerator, both_codes, train_generator
from npu_gr.train.options import CONFIGURATION, curl, serve
from npu_gr.train.rank.train import RankerCodes, train_rank
from npu_gr.train.retrieve import TrainedRetriever, train_retriever
from npu_gr.train.site.choose import choose_for_site, configured_way, selection_cases
from npu_gr.train.site.configuration import (
    EVALUATED_CONFIG,
    PRESETS,
    SERVE,
    SiteOptions,
    configuration,
    options_for,
)
from npu_gr.train.site.folder import (
    REPORT,
    SiteFolder,
    digest,
    digest_of_files,
    examples,
    known_user,
    readme,
)
from npu_gr.train.site.report import (
    Figure,
    PartReport,
    SiteCascade,
    SiteReport,
    generator_figures,
    ranker_figures,
    ranker_words,
    vectors_figures,
    warning_of,
    warning_of_ranker,
)
from npu_gr.train.site.side_by_side import Training, side_by_side
from npu_gr.train.steps import TrainingProgress, training_progress
from npu_gr.vector_search.vectors import save as save_vectors

AskService = Callable[[Path, Sequence[str], Sequence[NextEventCase]], float]
MOST_DIFFERENCE = 0.01  # of HR@10 as served, and as chosen
NEW_SERVE = "serve.new.yaml"  # written instead of `serve.yaml` if an operator has changed that
POPULAR = "popular.txt"
README = "README.md"


def train_site(
    data: Path,
    site: Path,
    overrides: Sequence[str],
    num_threads: int,
    console: Console,
    preset: str = "full",
    ask: AskService | None = None,
) -> SiteReport:
    """Train every model of a site, and write its folder. The history store does not change.

    Args:
        data: Folder of a dataset.
        site: Folder to write.
        overrides: `section.key=value` of `SiteOptions`.
        num_threads: Threads of all trainings together.
        console: Terminal for progress and figures.
        preset: Name in `PRESETS` of the options that `overrides` does not set.
        ask: Starts a service of a configuration with overrides, and returns HR@10 of `recommend`
            for held-out events; compared with the figure by which the cascade was chosen.

    Raises:
        ConfigError: an option is wrong, or another process makes this site.
        DataError: the dataset cannot be read or trained on, or the folder cannot be written. The
            site in service stays as it was.
    """
    dataset = read_dataset(data)
    options = override(options_for(len(dataset.names), PRESETS[preset]), overrides)
    made_by = train_command(data, site, preset, overrides, num_threads)
    with SiteFolder.opened(site) as folder:
        made_from = _digests(data, options)
        parts = _train(folder, data, options, made_from, num_threads, console)
        if made_from != _digests(data, options):
            for name in PARTS:
                folder.discard(name)
            raise DataError(f"{data}: was changed during the training; run the command again")
        with heartbeat(console.print, "choosing the sources and the order of recommend"):
            report = _finish(folder, data, made_by, dataset, options, parts, console, ask)
    console.print(report.table())
    for line in report.words():
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for warning in report.warnings():
        console.print(warning, soft_wrap=True, markup=False, highlight=False)
    return report


def train_command(
    data: Path, site: Path, preset: str, overrides: Sequence[str], num_threads: int
) -> str:
    """Write the shell command that makes the same site again; arguments as in `train_site`."""
    sets = [part for text in overrides for part in ("--set", text)]
    words = ["npu-gr", "train", "all", str(data), "--out", str(site), "--preset", preset]
    return shlex.join([*words, *sets, "--threads", str(num_threads)])


def next_commands(data: Path, site: Path) -> str:
    """Write the commands that serve a site, and recommend for a user of its dataset."""
    dataset = read_dataset(data)
    found = examples(dataset.interactions(), dataset.names)
    return f"""serve with: {serve(site / SERVE)}
{curl("/v1/recommend", known_user(found))}
{site / README} has more example calls"""


def _digests(data: Path, options: SiteOptions) -> dict[PartName, str]:
    """Return a digest of everything that decides each model."""
    events = digest_of_files(data, "*.parquet")
    actions = read_dataset(data).manifest["actions"]  # the events hold action numbers, not names
    names = msgspec.json.encode([actions["kind"], actions["names"]]).decode()
    return {
        name: digest(
            __version__, events, names, msgspec.json.encode(part.options(options)).decode()
        )
        for name, part in PARTS.items()
    }


def _train(
    folder: SiteFolder,
    data: Path,
    options: SiteOptions,
    made_from: dict[PartName, str],
    num_threads: int,
    console: Console,
) -> dict[PartName, PartReport]:
    """Train the models that cannot be reused."""
    served = folder.report()
    parts: dict[PartName, PartReport] = {}
    trainings: list[Training[PartReport]] = []
    for name in PARTS:
        staged = folder.finished(name)
        live = served.parts.get(name) if served and (folder.place / name).is_dir() else None
        if live is not None and live.made_from == made_from[name]:
            folder.discard(name)
            parts[name] = live
        elif staged is not None and staged.made_from == made_from[name]:
            parts[name] = staged
        else:
            work = partial(train_part, name, data, options, folder.begin(name), made_from[name])
            trainings.append(Training(name, work))
            continue
        console.print(
            f"{name}: reusing version {parts[name].version}, made from the same dataset and options"
        )

    def done(name: str, report: PartReport) -> None:
        folder.finish(name, report)
        parts[name] = report  # type: ignore[index]
        console.print(f"{name}: version {report.version}, in {report.took_s:.0f} s")

    with training_progress(console) as show:
        side_by_side(trainings, num_threads, show, done)
    return {name: parts[name] for name in PARTS}


def _finish(
    folder: SiteFolder,
    data: Path,
    made_by: str,
    dataset: Dataset,
    options: SiteOptions,
    parts: dict[PartName, PartReport],
    console: Console,
    ask: AskService | None,
) -> SiteReport:
    """Write all files but the models, and move everything into place."""
    site = folder.place
    served = folder.report()
    log = dataset.interactions()
    cascade = _cascade(folder, made_by, log, options, parts, served)
    configured = configuration(site, made_by, options, cascade).encode()
    evaluated = configuration(site, made_by, options, cascade, is_evaluated=True).encode()
    for name, text in ((SERVE, configured), (EVALUATED_CONFIG, evaluated)):
        # check that the configuration loads, before it gets into service
        load(folder.write(name, text))
    if ask is not None and cascade is not (served.cascade if served else None):
        cascade = _compared(folder, log, options, cascade, ask)
    folder.write(POPULAR, _popular(dataset, options.num_popular).encode())
    was_written = served.written.get(SERVE) if served else None
    is_changed = _is_changed(site / SERVE, was_written)
    if is_changed:
        (folder.staged / SERVE).rename(folder.staged / NEW_SERVE)
        console.print(
            f"{site / SERVE} has changes that were not made by this command, so it is kept; the "
            f"new configuration is {site / NEW_SERVE}"
        )
    report = SiteReport(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        dataset=str(data),
        made_by=made_by,
        num_events=len(log),
        num_users=len(log.user_names),
        num_items=len(dataset.names),
        parts={str(name): part for name, part in parts.items()},
        cascade=cascade,
        written={SERVE: was_written or "" if is_changed else digest(configured.decode())},
    )
    folder.write(README, readme(site, report, examples(log, dataset.names)).encode())
    folder.write(REPORT, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    made = [name for name in PARTS if (folder.staged / name).exists()]
    folder.put_in_place(
        [*made, POPULAR, NEW_SERVE if is_changed else SERVE, EVALUATED_CONFIG, README, REPORT]
    )
    return report


def _cascade(
    folder: SiteFolder,
    made_by: str,
    log: Interactions,
    options: SiteOptions,
    parts: dict[PartName, PartReport],
    served: SiteReport | None,
) -> SiteCascade:
    """Choose the sources and the order of `recommend` with the evaluated models.

    An earlier choice by the same models and options is reused.
    """
    sources: dict[SourceName, int] = {
        "shared_encoder": options.num_retrieved,
        "transitions": options.num_transitions,
        "neighbours": options.num_neighbours,
        "history": options.num_own,
        "generate": options.num_generated,
        "match": options.num_matched,
    }
    most = [options.selection_users, options.max_candidates]
    numbers = msgspec.json.encode([list(sources.items()), *most]).decode()
    made_from = digest(__version__, numbers, *(part.made_from for part in parts.values()))
    if served is not None and served.cascade is not None and served.cascade.made_from == made_from:
        return served.cascade
    cases = next_events(log, to_train_on(log.users, log.timestamps, "leave-one-out"))
    excludes = hides_seen(cases)
    way = configured_way(list(sources), exclude_seen=excludes)
    usual = SiteCascade(
        made_from=made_from,
        sources={name: sources[name] for name in way.sources},
        order=way.order,
        exclude_seen=excludes,
        repeat_ratio=repeat_ratio(cases),
        words=() if excludes else (_seen_words(repeat_ratio(cases)),),
    )
    path = folder.write(
        EVALUATED_CONFIG,
        configuration(folder.place, made_by, options, usual, is_evaluated=True).encode(),
    )
    try:
        choice = choose_for_site(
            path, _staged_models(folder), log, sources, options.selection_users
        )
    except NpuGrError as error:  # the ranker's own sources can be served all the same
        return msgspec.structs.replace(
            usual,
            words=(
                *usual.words,
                "WARNING: the sources and the order of recommend could not be chosen, so it uses "
                f"the ranker's own sources: {error}",
            ),
        )
    if choice is None:
        return usual
    return msgspec.structs.replace(
        usual,
        sources={name: sources[name] for name in choice.way.sources},
        order=choice.way.order,
        words=tuple(choice.lines()),
        exclude_seen=choice.seen["recommend"].excludes if choice.seen else excludes,
        excludes={kind: one.excludes for kind, one in choice.seen.items()},
        hr_at_10=choice.hr_of_all,
    )


def _seen_words(ratio: float) -> str:
    return (
        f"recommend and generate also answer items that the user had, since {ratio:.0%} of the "
        "held-out events are repeats; exclude_seen: true in a request or in serve.yaml leaves "
        "them out"
    )


def _staged_models(folder: SiteFolder) -> list[str]:
    """Return the overrides of a configuration that serve the evaluated models before they move."""
    made = {name: folder.staged / name for name in PARTS if (folder.staged / name).exists()}
    lies = {name: made.get(name, folder.place / name) / "evaluated" for name in PARTS}
    return [
        f"checkpoint={lies['ranker']}",
        f"generate.checkpoint={lies['generator']}",
        f"generate.catalogue={lies['generator'] / 'items.jsonl'}",
        f"match.vectors={lies['vectors']}",
    ]


def _compared(
    folder: SiteFolder,
    log: Interactions,
    options: SiteOptions,
    cascade: SiteCascade,
    ask: AskService,
) -> SiteCascade:
    """Serve the evaluated models as configured, and compare their HR@10 with the chosen one.

    Raises:
        DataError: They differ by more than `MOST_DIFFERENCE`.
    """
    if cascade.hr_at_10 is None:
        return cascade
    cases = selection_cases(log, options.selection_users)
    found = ask(folder.staged / EVALUATED_CONFIG, _staged_models(folder), cases)
    text = (
        f"recommend over HTTP, as configured: HR@10 {found:.3f} of {len(cases):,} held-out events"
    )
    if abs(found - cascade.hr_at_10) > MOST_DIFFERENCE:
        raise DataError(
            f"{text}, but it was chosen with {cascade.hr_at_10:.3f}; what is measured is not what "
            "is served, so the site was not replaced"
        )
    words = (*cascade.words, f"{text} (chosen with {cascade.hr_at_10:.3f})")
    return msgspec.structs.replace(cascade, words=words)


def _is_changed(path: Path, was_written: str | None) -> bool:
    """Whether a file exists and differs from what an earlier run wrote."""
    try:
        return digest(path.read_text()) != was_written
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from error


def _popular(dataset: Dataset, num_popular: int) -> str:
    """List the names of the most popular items, one per line; ties go to the smaller id."""
    items, counts = np.unique(dataset.interactions().items, return_counts=True)
    best = items[np.argsort(-counts, kind="stable")][:num_popular]
    names = [str(name) for name in dataset.names.names(best)]
    # skip names with line breaks or surrounding blanks, which a line cannot hold
    return "".join(f"{name}\n" for name in names if name.strip().splitlines() == [name])


EVALUATED = "evaluated"  # subfolder of a model's folder, for the evaluated model
PartName = Literal["ranker", "generator", "vectors"]
Show = Callable[[TrainingProgress], None]


class _Trained(NamedTuple):
    version: str
    measured_on: str
    figures: tuple[Figure, ...]
    warning: str
    words: tuple[str, ...] = ()


class Part(NamedTuple):
    """One model of a site."""

    options: Callable[[SiteOptions], object]  # the options that decide the model
    train: Callable[[Dataset, SiteOptions, Path, Show], _Trained]  # trains it, and writes a folder


def train_part(
    name: PartName, data: Path, options: SiteOptions, folder: Path, made_from: str, show: Show
) -> PartReport:
    """Train one model of a site.

    Args:
        name: Name of the model.
        data: Folder of the dataset.
        options: Options of the site.
        folder: Folder to write the model to.
        made_from: Digest of everything that decides the model.
        show: Callback with the progress.

    Raises:
        DataError: the data cannot be trained on.
        ConfigError: the options do not make a model.
    """
    began_at = time.perf_counter()
    dataset = read_dataset(data)
    dataset.names.save(folder)  # first, because a version covers all files of the folder
    trained = PARTS[name].train(dataset, options, folder, show)
    return PartReport(
        made_from=made_from,
        version=trained.version,
        measured_on=trained.measured_on,
        num_events=len(dataset.interactions()),
        took_s=time.perf_counter() - began_at,
        figures=trained.figures,
        words=trained.words,
        warning=trained.warning,
    )


def _ranker(dataset: Dataset, options: SiteOptions, folder: Path, show: Show) -> _Trained:
    def keep(checkpoint: Checkpoint) -> None:
        dataset.names.save(folder / EVALUATED)
        save(checkpoint, folder / EVALUATED)

    interactions, features = dataset.interactions(), dataset.item_features()
    # Codes come from co-occurrence, which a new item does not have. With item features, the ranker
    # predicts new items better without codes: see docs/history/README.md.
    codes = None if features else RankerCodes(*both_codes(interactions, features, options.generate))
    checkpoint, found = train_rank(interactions, features, options.rank, show, keep, codes)
    what = (
        f"AUC of {found.num_evaluated:,} later events, HR and NDCG of the next item of "
        f"{found.num_next:,} users"
    )
    measured_on = _stands(found.split, found.num_trained, what)
    made = save(checkpoint, folder)
    return _Trained(
        made, measured_on, ranker_figures(found), warning_of_ranker(found), ranker_words(found)
    )


def _generator(dataset: Dataset, options: SiteOptions, folder: Path, show: Show) -> _Trained:
    features = dataset.item_features()

    def keep(trained: TrainedGenerator) -> None:
        dataset.names.save(folder / EVALUATED)
        _publish(trained, features, options, folder / EVALUATED)

    trained = train_generator(dataset.interactions(), features, options.generate, None, show, keep)
    _publish(trained, features, options, folder)
    report = trained.report
    what = f"of {report.own.num_users:,} users"
    measured_on = _stands(SPLIT, report.num_trained, what)
    return _Trained(
        version(folder), measured_on, generator_figures(report), warning_of(report.comparison())
    )


def _vectors(dataset: Dataset, options: SiteOptions, folder: Path, show: Show) -> _Trained:
    def keep(trained: TrainedRetriever) -> None:
        dataset.names.save(folder / EVALUATED)
        save_vectors(trained.vectors, folder / EVALUATED)

    trained = train_retriever(dataset.interactions(), options.retrieve, show, evaluated=keep)
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
