"""`npu-gr train all`: make a site, the folder that an instance serves, from a dataset.

    dataset -> generator, ranker and vectors, trained at the same time
            -> popular.txt, serve.yaml, README.md, report.json
            -> all staged files are moved into place

A model that an earlier or interrupted run made from the same dataset and options is reused, and the
training of one that was interrupted goes on.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeGuard

import msgspec
import numpy as np
from rich.console import Console

from npu_gr import __version__
from npu_gr.core.errors import ConfigError, DataError, NpuGrError
from npu_gr.core.progress import heartbeat, in_words
from npu_gr.core.request import SourceName
from npu_gr.core.settings import override
from npu_gr.dataset.files import Dataset, read_dataset
from npu_gr.history_store.interactions import Interactions
from npu_gr.model.blend import DECAY, load_blend
from npu_gr.service.config import load
from npu_gr.train.baselines import DecayedTransitions, Markov, OwnHistory
from npu_gr.train.cascade import (
    TOP,
    NextEventCase,
    choosing_half,
    hides_seen,
    next_events,
    repeat_ratio,
)
from npu_gr.train.data import to_train_on
from npu_gr.train.metrics import F64, hit_ratio, ndcg
from npu_gr.train.options import curl, serve
from npu_gr.train.site.choose import (
    choose_for_site,
    configured_way,
    other_cases,
    selection_cases,
)
from npu_gr.train.site.configuration import (
    EVALUATED_CONFIG,
    PRESETS,
    SERVE,
    PartName,
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
from npu_gr.train.site.like import OldSite, options_like
from npu_gr.train.site.metrics_log import MetricsLine, metrics_log
from npu_gr.train.site.parts import EVALUATED, PARTS, Start, parts_of, train_part
from npu_gr.train.site.report import SOURCE_OF, PartReport, SiteCascade, SiteReport
from npu_gr.train.site.side_by_side import Training, side_by_side
from npu_gr.train.site.tensorboard_log import tensorboard_log
from npu_gr.train.site.verdict import NextItemTest, verdict_of, verdict_of_ranker
from npu_gr.train.steps import training_progress

AskService = Callable[[Path, Sequence[str], Sequence[NextEventCase]], F64]


class TrainedSite(NamedTuple):
    """A trained site before it replaces the one in service."""

    site: Path
    config: Path  # configuration of the new evaluated models
    overrides: Sequence[str]  # of that configuration, while they are staged
    log: Interactions
    is_new: bool  # whether a model was trained; else only the other files are written


class _Command(NamedTuple):
    """The command that makes a site."""

    text: str
    preset: str
    overrides: tuple[str, ...]


REPEATS_OF = 10_000  # most users whose last events say how many are repeats
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
    accept: Callable[[TrainedSite], None] = lambda _: None,
    like: Path | None = None,
    *,
    trains_on: bool = False,
    tensorboard: Path | None = None,
) -> SiteReport:
    """Train every model of a site, and write its folder. The history store does not change.

    Args:
        data: Folder of a dataset.
        site: Folder to write.
        overrides: `section.key=value` of `SiteOptions`.
        num_threads: Threads of all trainings together.
        console: Terminal for progress and figures.
        preset: Name in `PRESETS` of the options that `overrides` does not set.
        ask: Starts a service of a configuration with overrides, and returns the rank of each
            held-out event's item in `recommend`, from 0; inf = not answered. They are compared with
            the figure by which the cascade was chosen, and give the verdict.
        accept: Callback before the new models replace those in service; its error keeps these.
        like: Folder of a site whose actions, tasks, features and codes keep their meaning.
        trains_on: Whether the models in service are trained on, in fewer epochs, instead of anew.
        tensorboard: Folder for TensorBoard, which gets the curves too.

    Raises:
        ConfigError: an option is wrong, another process makes this site, or the dataset has more
            than `rank.memory_events` events.
        DataError: the dataset cannot be read or trained on, or the folder cannot be written. The
            site in service stays as it was.
    """
    dataset = read_dataset(data)
    num_events, num_users = dataset.manifest["events"], dataset.manifest["users"]
    by_size = options_for(len(dataset.names), PRESETS[preset], num_events, num_users)
    options = override(by_size, overrides)
    if num_events > (most := options.rank.memory_events):
        raise ConfigError(
            f"{data}: has {num_events:,} events, and train all holds at most {most:,} in memory, "
            "in each training. If they fit, raise rank.memory_events by --set; else use npu-gr "
            "train rank and npu-gr train generate, which read them from files"
        )
    # a site that is like itself keeps models whose data have not changed
    is_own = like is not None and like.resolve() == site.resolve()
    text = train_command(data, site, preset, overrides, num_threads, None if is_own else like)
    command = _Command(text, preset, tuple(overrides))
    with SiteFolder.opened(site) as folder:
        deciding = options
        if like is not None:
            is_set = any(text.startswith("generate.code_count") for text in overrides)
            options = options_like(OldSite.read(like), dataset, options, is_code_count_set=is_set)
            deciding = deciding if is_own else options
        made_from = _digests(data, deciding)
        with tensorboard_log(tensorboard) as also:
            chosen = (num_threads, console, also)
            parts = _train(folder, data, options, made_from, *chosen, trains_on=trains_on)
        if made_from != _digests(data, deciding):
            for name in PARTS:
                folder.discard(name)
            raise DataError(f"{data}: was changed during the training; run the command again")
        with heartbeat(console.print, "choosing the sources and the order of recommend"):
            report = _finish(folder, data, command, dataset, options, parts, console, ask, accept)
    console.print(report.table())
    for line in report.words():
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    for warning in report.warnings():
        console.print(warning, soft_wrap=True, markup=False, highlight=False)
    return report


def train_command(
    data: Path,
    site: Path,
    preset: str,
    overrides: Sequence[str],
    num_threads: int,
    like: Path | None = None,
) -> str:
    """Write the shell command that makes the same site again; arguments as in `train_site`."""
    sets = [part for text in overrides for part in ("--set", text)]
    words = ["npu-gr", "train", "all", str(data), "--out", str(site), "--preset", preset]
    words += ["--like", str(like)] if like else []
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
        for name, part in parts_of(options).items()
    }


def _train(
    folder: SiteFolder,
    data: Path,
    options: SiteOptions,
    made_from: dict[PartName, str],
    num_threads: int,
    console: Console,
    also: Callable[[MetricsLine], None],
    *,
    trains_on: bool,
) -> dict[PartName, PartReport]:
    """Train the models that cannot be reused; `trains_on` as in `train_site`."""
    served = folder.report()
    parts: dict[PartName, PartReport] = {}
    trainings: list[Training[PartReport]] = []
    for left_out in options.without:
        folder.discard(left_out)  # perhaps an interrupted run with it has begun
        if (folder.place / left_out).exists():
            console.print(
                f"{folder.place / left_out}: no longer trained or served; delete it when no "
                "configuration names it"
            )
    for name in made_from:
        staged = folder.finished(name)
        live = served.parts.get(name) if served and (folder.place / name).is_dir() else None
        can_start = trains_on and live is not None and name != "vectors"  # those are counted
        start = None
        if live is not None and can_start:
            start = Start(folder.place, live.version, live.code_count)
        if _is_same(live, made_from[name], trains_on=trains_on):
            folder.discard(name)
            parts[name] = live
        elif _is_same(staged, made_from[name], trains_on=trains_on):
            parts[name] = staged
        else:
            work = partial(
                train_part, name, data, options, folder.begin(name), made_from[name], start
            )
            trainings.append(Training(name, work))
            continue
        console.print(
            f"{name}: reusing version {parts[name].version}, made from the same dataset and options"
        )

    def done(name: str, report: PartReport) -> None:
        folder.finish(name, report)
        parts[name] = report  # type: ignore[index]
        before = f", trained on from {report.started_from}" if report.started_from else ""
        console.print(
            f"{name}: version {report.version}{before}, in {report.took_s:.0f} s "
            f"({report.cpu_s:.0f} CPU seconds, at most {report.peak_bytes / 1e9:.1f} GB)"
        )

    if trainings:
        names = ", ".join(training.name for training in trainings)
        at_once = max(1, min(len(trainings), num_threads))
        took_s = sum(one.took_s for one in served.parts.values()) / at_once if served else 0.0
        last = f"; the last time took about {in_words(took_s)}" if took_s else ""
        console.print(
            f"training {names}, {at_once} at a time: each is trained, evaluated, and trained again "
            f"on all events; then the sources and the order of recommend are chosen{last}",
            soft_wrap=True,
        )
        goes_on = any(folder.finished(name) is not None for name in made_from)
        with (
            training_progress(console) as show,
            metrics_log(folder.place, show, goes_on=goes_on, also=also) as write,
        ):
            side_by_side(trainings, num_threads, write, done)
    return {name: parts[name] for name in made_from}


def _is_same(
    report: PartReport | None, made_from: str, *, trains_on: bool
) -> TypeGuard[PartReport]:
    """Whether a model can be reused; one that was trained on is not what `train all` makes."""
    return (
        report is not None
        and report.made_from == made_from
        and (trains_on or not report.started_from)
    )


def _finish(
    folder: SiteFolder,
    data: Path,
    command: _Command,
    dataset: Dataset,
    options: SiteOptions,
    parts: dict[PartName, PartReport],
    console: Console,
    ask: AskService | None,
    accept: Callable[[TrainedSite], None],
) -> SiteReport:
    """Write all files but the models, and move everything into place."""
    site = folder.place
    served = folder.report()
    log = dataset.interactions()
    made_by = command.text
    cascade = _cascade(folder, made_by, log, options, parts, served)
    features = dataset.manifest["features"]
    attribute = next((one["name"] for one in features if one["kind"] == "one"), "brand")
    of_site = partial(configuration, site, made_by, options, cascade, node_count=_nodes(parts))
    configured = of_site(attribute=attribute).encode()
    evaluated = of_site(is_evaluated=True).encode()
    for name, text in ((SERVE, configured), (EVALUATED_CONFIG, evaluated)):
        # check that the configuration loads, before it gets into service
        load(folder.write(name, text))
    if ask is not None and cascade is not (served.cascade if served else None):
        cascade = _compared(folder, log, options, cascade, ask)
    made = [name for name in PARTS if (folder.staged / name).exists()]
    config = folder.staged / EVALUATED_CONFIG
    accept(TrainedSite(site, config, _staged_models(folder, options), log, bool(made)))
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
        preset=command.preset,
        overrides=command.overrides,
        num_events=len(log),
        num_users=len(log.user_names),
        num_items=len(dataset.names),
        parts={str(name): part for name, part in parts.items()},
        cascade=cascade,
        written={SERVE: was_written or "" if is_changed else digest(configured.decode())},
    )
    found = examples(log, dataset.names, dataset.item_features())
    folder.write(README, readme(site, report, found).encode())
    folder.write(REPORT, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    folder.put_in_place(
        [*made, POPULAR, NEW_SERVE if is_changed else SERVE, EVALUATED_CONFIG, README, REPORT]
    )
    return report


def _nodes(parts: dict[PartName, PartReport]) -> tuple[int, ...]:
    return parts["generator"].node_count if "generator" in parts else ()


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
    unavailable = [SOURCE_OF[name] for name in options.without]
    sources = {name: num for name, num in sources.items() if name not in unavailable}
    most = [options.selection_users, options.max_candidates]
    numbers = msgspec.json.encode([list(sources.items()), *most]).decode()
    made_from = digest(
        __version__, numbers, *(part.made_from + part.started_from for part in parts.values())
    )
    if served is not None and served.cascade is not None and served.cascade.made_from == made_from:
        return served.cascade
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    cases = next_events(log, known, REPEATS_OF)
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
        configuration(
            folder.place, made_by, options, usual, node_count=_nodes(parts), is_evaluated=True
        ).encode(),
    )
    tested = _tested(folder)
    try:
        choice = choose_for_site(
            path, _staged_models(folder, options), log, sources, options.selection_users, tested
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
    ranker = _evaluated_models(folder)["ranker"]
    if choice is not None and choice.seen:
        excludes = choice.seen["recommend"].excludes
    test = NextItemTest.read(ranker, exclude_seen=excludes)
    if choice is None:
        blend = load_blend(ranker)
        decay = DECAY if blend is None else blend.decay
        return usual if test is None else _without_choice(usual, sources, test, decay)
    users = selection_cases(log, options.selection_users, tested)
    evaluates = np.flatnonzero(~choosing_half(len(choice.places)))
    return msgspec.structs.replace(
        usual,
        verdict=None
        if test is None
        else verdict_of([users[row] for row in evaluates], choice.places[evaluates], test),
        sources={name: sources[name] for name in choice.way.sources},
        order=choice.way.order,
        words=tuple(choice.lines()),
        exclude_seen=excludes,
        excludes={kind: one.excludes for kind, one in choice.seen.items()},
        hr_at_10=choice.hr_of_all,
    )


def _without_choice(
    usual: SiteCascade, sources: Mapping[SourceName, int], test: NextItemTest, decay: float
) -> SiteCascade:
    """Serve the ranker if it beats the baselines, else the strongest source that counts events.

    `decay` is that of the ranker's transitions.
    """
    # source -> the baseline that ranks by the same counts
    baselines: dict[SourceName, str] = {
        "history": OwnHistory.name,
        "transitions": DecayedTransitions.name if decay else Markov.name,
        "neighbours": "ItemKNN",
    }
    verdict = verdict_of_ranker(test)
    rows = np.arange(len(test.users))
    simple = {
        source: test.ranks[name]
        for source, name in baselines.items()
        # it finds what the user had, and nothing else
        if name in test.ranks and not (usual.exclude_seen and source == "history")
    }
    if verdict.is_better or not len(rows) or not simple:
        return msgspec.structs.replace(usual, verdict=verdict)
    best = max(simple, key=lambda source: ndcg(simple[source], TOP))
    words = (
        f"recommend uses {best} alone, the best of the simple orders that can be served: too few "
        "users to choose a cascade, and no model is shown to beat the baselines"
    )
    return msgspec.structs.replace(
        usual,
        sources={best: sources[best]},
        order="retrieval",
        words=(*usual.words, words),
        verdict=verdict_of_ranker(test, best),
    )


def _seen_words(ratio: float) -> str:
    return (
        f"recommend and generate also answer items that the user had, since {ratio:.0%} of the "
        "held-out events are repeats; exclude_seen: true in a request or in serve.yaml leaves "
        "them out"
    )


def _staged_models(folder: SiteFolder, options: SiteOptions) -> list[str]:
    """Return the overrides of a configuration that serve the evaluated models before they move."""
    lies = _evaluated_models(folder)
    generator = lies["generator"]
    overrides: dict[PartName, list[str]] = {
        "ranker": [f"checkpoint={lies['ranker']}"],
        "generator": [
            f"generate.checkpoint={generator}",
            f"generate.catalogue={generator / 'items.jsonl'}",
        ],
        "vectors": [f"match.vectors={lies['vectors']}"],
    }
    return [text for name in parts_of(options) for text in overrides[name]]


def _evaluated_models(folder: SiteFolder) -> dict[PartName, Path]:
    """Return the folders of the evaluated models, the staged ones first."""
    made = {name: folder.staged / name for name in PARTS if (folder.staged / name).exists()}
    return {name: made.get(name, folder.place / name) / EVALUATED for name in PARTS}


def _tested(folder: SiteFolder) -> Sequence[str]:
    """Name the users for whom the ranker's training has ranked the next items by the baselines."""
    test = NextItemTest.read(_evaluated_models(folder)["ranker"], exclude_seen=True)
    return () if test is None else test.users


def _compared(
    folder: SiteFolder,
    log: Interactions,
    options: SiteOptions,
    cascade: SiteCascade,
    ask: AskService,
) -> SiteCascade:
    """Serve the evaluated models as configured, and compare their HR@10 with the chosen one.

    The verdict is that of what is served, for all tested users but those who chose.

    Raises:
        DataError: They differ by more than `MOST_DIFFERENCE`.
    """
    if cascade.hr_at_10 is None:
        return cascade
    tested = _tested(folder)
    cases = selection_cases(log, options.selection_users, tested)
    others = other_cases(log, tested, cases)
    ranks = ask(
        folder.staged / EVALUATED_CONFIG, _staged_models(folder, options), [*cases, *others]
    )
    found = hit_ratio(ranks[: len(cases)], TOP)
    text = (
        f"recommend over HTTP, as configured: HR@10 {found:.3f} of {len(cases):,} held-out events"
    )
    if abs(found - cascade.hr_at_10) > MOST_DIFFERENCE:
        raise DataError(
            f"{text}, but it was chosen with {cascade.hr_at_10:.3f}; what is measured is not what "
            "is served, so the site was not replaced"
        )
    words = (*cascade.words, f"{text} (chosen with {cascade.hr_at_10:.3f})")
    test = NextItemTest.read(_evaluated_models(folder)["ranker"], exclude_seen=cascade.exclude_seen)
    verdict = cascade.verdict
    if test is not None:
        rows = [*np.flatnonzero(~choosing_half(len(cases))), *range(len(cases), len(ranks))]
        asked = [*cases, *others]
        verdict = verdict_of([asked[row] for row in rows], ranks[rows], test)
    return msgspec.structs.replace(cascade, words=words, verdict=verdict)


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
