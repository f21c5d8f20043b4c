"""npu-gr train and import: train each model that an instance serves, or convert a checkpoint."""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from npu_gr.cli.data import load
from npu_gr.cli.options import FILE, THREAD_COUNT, VALUE_COLUMN, load_config, names_of, wide_console
from npu_gr.core.errors import ConfigError, NpuGrError

if TYPE_CHECKING:
    import msgspec

    from npu_gr.history_store.interactions import Interactions, ItemValues
    from npu_gr.train.generate.train import GenerateOptions
    from npu_gr.train.rank.options import TrainOptions
    from npu_gr.train.stored_log import StoredLog

    Presets = Mapping[str, msgspec.Struct]

# a copy of the names in npu_gr.model.convert.families, which loads torch
FAMILIES = ("generative-recommenders", "dlrmv3", "recsys-examples", "torcheasyrec")

NOT_LOADED = 3  # exit code of `train all`
BELOW_BASELINE = 4  # the same, with --fail-below-baseline
LISTED = "Options of the training, with their defaults: --set help"
ITEMS = click.option("--items", type=FILE, help="RecBole .item file with side features.")
ITEM_FEATURES = click.option(
    "--item-features",
    default="",
    callback=names_of,
    help="Columns of --items to use, comma-separated.",
)
THREADS = click.option("--threads", default=2, show_default=True, type=THREAD_COUNT)

TENSORBOARD = click.option(
    "--tensorboard", type=FILE, help="Folder of tensorboard --logdir, for the curves of losses."
)


def _override(
    presets: Callable[[], Mapping[str, msgspec.Struct]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add `--set KEY=VALUE`; `--set help` lists the keys, also without required arguments."""

    def show(context: click.Context, _: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
        if "help" in given:
            from npu_gr.train.options import list_options

            click.echo(list_options(presets()))
            context.exit()
        return given

    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        is_eager=True,
        callback=show,
        help="Override a training option; `--set help` lists them.",
    )


def _rank_presets() -> Mapping[str, TrainOptions]:
    from npu_gr.train.rank.options import PRESETS

    return PRESETS


def _generate_presets() -> Mapping[str, GenerateOptions]:
    from npu_gr.train.generate.train import BEAUTY, BEAUTY_GIVEN, MOVIELENS, QUICK

    return {"movielens": MOVIELENS, "quick": QUICK, "beauty": BEAUTY, "beauty-given": BEAUTY_GIVEN}


def _retrieve_presets() -> Presets:
    from npu_gr.train.retrieve import RetrieveOptions

    return {"retrieve": RetrieveOptions()}


def _site_presets() -> Presets:
    from npu_gr.train.site.configuration import PRESETS

    return PRESETS


def _match_presets() -> Presets:
    from npu_gr.train.match.train import MatchOptions

    return {"sccdr": MatchOptions()}


@click.group()
def train() -> None:
    """Train a model from interaction logs."""


@train.command("all", epilog=LISTED, short_help="Train every model of a dataset, ready to serve.")
@click.argument("data", type=FILE)
@click.option("--out", required=True, type=FILE, help="Folder for the models and serve.yaml.")
@click.option("--preset", default="full", show_default=True, type=click.Choice(["full", "quick"]))
@click.option(
    "--like",
    type=FILE,
    metavar="SITE",
    help="Site whose actions, tasks, features and levels of codes stay, so that its instance can "
    "reload the new one.",
)
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(["generator", "vectors"]),
    help="Do not train or serve this model, e.g. one that recommend was said not to use; "
    "repeatable.",
)
@click.option(
    "--fail-below-baseline",
    is_flag=True,
    help="End with exit code 4 if recommend is not shown to be better than every baseline.",
)
@_override(_site_presets)
@THREADS
@TENSORBOARD
@click.pass_context
def train_all(
    context: click.Context,
    data: Path,
    out: Path,
    preset: str,
    like: Path | None,
    without: tuple[str, ...],
    fail_below_baseline: bool,
    overrides: tuple[str, ...],
    threads: int,
    tensorboard: Path | None,
) -> None:
    """Train every model from DATA, a folder of npu-gr prepare, for npu-gr serve.

    Models are trained in parallel. Finished models are reused if data and options are unchanged, so
    the same command continues after an interruption. The served models are replaced at the end.
    Then DATA is loaded into the history store, as npu-gr load does. The last line is the verdict:
    whether recommend is better than the strongest baseline. Exit code: 0 = trained and loaded, 2 =
    not trained, 3 = trained, but not loaded, 4 = trained and loaded, but not shown to be better
    than every baseline (only with --fail-below-baseline).
    """
    from npu_gr.dataset.files import read_dataset
    from npu_gr.tools.served_quality import served_ranks
    from npu_gr.train.distributed import reject_ranks
    from npu_gr.train.site.configuration import SERVE
    from npu_gr.train.site.loaded import note_loaded
    from npu_gr.train.site.make import next_commands, train_site

    reject_ranks("train all")
    if without:
        overrides += (f"without=[{', '.join(dict.fromkeys(without))}]",)
    try:
        report = train_site(
            data,
            out,
            overrides,
            threads,
            wide_console(),
            preset,
            served_ranks,
            like=like,
            tensorboard=tensorboard,
        )
    except KeyboardInterrupt:
        click.echo(
            "\ninterrupted: finished models are kept; repeat the command to continue. "
            "The served models are unchanged.",
            err=True,
        )
        raise
    try:
        context.invoke(load, config_path=out / SERVE, log=data)
        note_loaded(out, load_config(out / SERVE, ()).history_store, read_dataset(data).event_files)
    except (NpuGrError, OSError, click.ClickException) as error:
        # two results: the models are in place, whatever became of the histories
        click.echo(next_commands(data, out))
        again = shlex.join(["npu-gr", "load", "--config", str(out / SERVE), str(data)])
        click.echo(
            f"\n{out} is trained and can be served, but the events were not loaded into its "
            f"history store: {error}\nload them with: {again}",
            err=True,
        )
        sys.exit(NOT_LOADED)
    click.echo(next_commands(data, out))
    if report.verdict is not None:
        click.echo(f"\n{report.verdict.text}")
    if fail_below_baseline and not (report.verdict and report.verdict.is_better):
        sys.exit(BELOW_BASELINE)


def _instant(_context: click.Context, _option: click.Parameter, given: str | None) -> int | None:
    from datetime import UTC, datetime

    if given is None or given.isdecimal():
        return None if given is None else int(given)
    try:
        at = datetime.fromisoformat(given)
    except ValueError as error:
        raise click.BadParameter(f"{error}; or give unix seconds") from error
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())


@train.command("rank", epilog=LISTED, short_help="Train an HSTU ranker.")
@click.argument("log", type=FILE)
@click.option("--out", required=True, type=FILE, help="Folder of the checkpoint.")
@ITEMS
@ITEM_FEATURES
@click.option(
    "--codes",
    type=FILE,
    help="Semantic IDs of the generator, by which the ranker scores new items.",
)
@click.option("--preset", default="demo", show_default=True, type=click.Choice(["demo", "quick"]))
@click.option(
    "--budget-s",
    default=0.0,
    type=click.FloatRange(min=0),
    help="Seconds to search for better settings on validation data; the option budget_s.",
)
@click.option(
    "--continue",
    "start",
    type=FILE,
    metavar="CHECKPOINT",
    help="Train this one on with the new events of LOG, and write a delta to the result.",
)
@click.option(
    "--since",
    callback=_instant,
    metavar="INSTANT",
    help="With --continue: events from then on are new; an ISO date, UTC, or unix seconds. "
    "Default: all.",
)
@click.option(
    "--deltas",
    type=FILE,
    metavar="FOLDER",
    help="With --continue: folder that gets the next delta. Default: OUT/deltas.",
)
@click.option(
    "--only-items",
    is_flag=True,
    help="With --continue: train the rows of items alone, so that prefixes that read none of the "
    "changed ones stay valid.",
)
@_override(_rank_presets)
@VALUE_COLUMN
@THREADS
def train_rank(
    log: Path,
    out: Path,
    items: Path | None,
    item_features: tuple[str, ...],
    codes: Path | None,
    preset: str,
    budget_s: float,
    start: Path | None,
    since: int | None,
    deltas: Path | None,
    only_items: bool,
    overrides: tuple[str, ...],
    value_column: str,
    threads: int,
) -> None:
    """Train an HSTU ranker, which also retrieves, on LOG, and compare it with baselines.

    LOG is a folder of npu-gr prepare, or a file: .inter, .jsonl or .json. With --continue nothing
    is compared: items, actions, tasks and features stay as they are, the model sees the new events
    for a quarter of the epochs, and a delta leads from the old checkpoint to the new one.
    """
    import torch
    from rich.console import Console

    from npu_gr.core.settings import override
    from npu_gr.train.data import build_log
    from npu_gr.train.distributed import joined
    from npu_gr.train.generate.codes import read_codes
    from npu_gr.train.options import example, next_command, read_items
    from npu_gr.train.rank.train import RankerCodes, publish
    from npu_gr.train.rank.train import train_rank as work
    from npu_gr.train.resume import NO_STATES, kept_states
    from npu_gr.train.steps import training_progress
    from npu_gr.train.stored_log import StoredLog

    torch.set_num_threads(threads)
    options = override(_rank_presets()[preset], [f"budget_s={budget_s}", *overrides])
    if start is not None:
        if items or item_features or codes or budget_s:
            raise click.UsageError(
                "--continue keeps features and codes, and searches nothing: leave out --items, "
                "--item-features, --codes and --budget-s"
            )
        _continue(log, start, since or 0, options, value_column, out, deltas, only_items=only_items)
        return
    if since is not None or deltas or only_items:
        raise click.UsageError("--since, --deltas and --only-items belong to --continue")
    features, names = read_items(log, items, list(item_features))
    with joined() as ranks, ExitStack() as files:
        console = Console(quiet=not ranks.is_first)
        folder = out / f".events-{ranks.rank}"
        data = files.enter_context(
            _events(log, features, options.memory_events, folder, value_column)
        )
        if isinstance(data, StoredLog):
            some = data.sample(data.split(options.split), options.seed)[0]
        else:
            some = build_log(data, features, options.split)
        given = None
        if codes is not None:
            read = read_codes(codes, some.item_ids, some.item_key)
            given = RankerCodes(read, read)
        states = NO_STATES
        if ranks.is_first:
            states = kept_states(out, data, features, codes)
        with training_progress(console) as show:
            checkpoint, evaluation = work(data, features, options, show, codes=given, states=states)
    if not ranks.is_first:
        return
    states.remove()
    console.print(evaluation.table())
    click.echo(evaluation.text())
    click.echo(f"wrote checkpoint {publish(checkpoint, names, out)} to {out}")
    found = example(some, names)
    body = {"user_id": "me", "candidates": found.others, "history": found.history}
    click.echo(next_command(out, "/v1/rank", body))


@contextmanager
def _events(
    log: Path,
    features: list[ItemValues],
    most: int,
    folder: Path,
    value_column: str,
    *,
    leaves_out: bool = False,
) -> Iterator[Interactions | StoredLog]:
    """Read a log, or map a dataset of more than so many events; arguments as `stored`."""
    from npu_gr.dataset import read_log
    from npu_gr.train.store_events import stored

    if not log.is_dir():
        yield read_log(log, value_column=value_column)
        return
    with stored(log, features, most, folder, leaves_out=leaves_out) as on_disk:
        yield on_disk or read_log(log)


def _continue(
    log: Path,
    start: Path,
    since: int,
    options: TrainOptions,
    value_column: str,
    out: Path,
    deltas: Path | None,
    *,
    only_items: bool,
) -> None:
    import msgspec
    from rich.console import Console

    from npu_gr.catalogue.names import EMPTY, ItemNames
    from npu_gr.cli.delta import in_words
    from npu_gr.dataset import read_log
    from npu_gr.model.delta_log import write_next
    from npu_gr.model.weights import load as load_ranker
    from npu_gr.train.distributed import reject_ranks
    from npu_gr.train.options import warm
    from npu_gr.train.rank.continued import continue_ranker
    from npu_gr.train.rank.train import publish
    from npu_gr.train.steps import training_progress

    reject_ranks("train rank --continue")
    names = ItemNames.load(start) or EMPTY
    interactions = read_log(log, value_column=value_column)
    if interactions.item_key != names.key:
        raise ConfigError(
            f"{log}: has another key of item ids than {start}; prepare it with --add-to or --like"
        )
    options = msgspec.structs.replace(options, epochs=warm(options.epochs))
    with training_progress(Console()) as show:
        found = continue_ranker(
            load_ranker(start), interactions, since, options, show, only_items=only_items
        )
    click.echo(
        f"trained on with {found.num_events:,} events of {found.num_items:,} items; "
        f"{found.num_unknown:,} of items that {start} lacks were left out"
    )
    click.echo(f"wrote checkpoint {publish(found.checkpoint, names, out)} to {out}")
    click.echo(in_words(*write_next(deltas or out / "deltas", start, out, names.key)))


@train.command("generate", epilog=LISTED, short_help="Train a semantic-ID generator.")
@click.argument("log", required=False, type=FILE)
@click.option("--out", required=True, type=FILE, help="Folder for the model and its configuration.")
@click.option(
    "--codes", type=FILE, help='Use these codes: a catalogue, or JSON {"item": [code, ...]}.'
)
@ITEMS
@ITEM_FEATURES
@click.option(
    "--preset",
    default="movielens",
    show_default=True,
    type=click.Choice(["movielens", "quick", "beauty", "beauty-given"]),
)
@_override(_generate_presets)
@VALUE_COLUMN
@THREADS
def train_generate(
    log: Path | None,
    out: Path,
    codes: Path | None,
    items: Path | None,
    item_features: tuple[str, ...],
    preset: str,
    overrides: tuple[str, ...],
    value_column: str,
    threads: int,
) -> None:
    """Train a semantic-ID generator on LOG, and compare it with baselines.

    LOG is a folder of npu-gr prepare, or a file: .inter, .jsonl, or .json {"user": [item, ...]}.
    Without LOG: MovieLens-100K of the package recbole.
    """
    import torch
    from rich.console import Console

    from npu_gr.core.settings import override
    from npu_gr.history_store.interactions import movielens_100k
    from npu_gr.train.distributed import joined
    from npu_gr.train.generate.publish import how_to_serve, prepare, publish
    from npu_gr.train.generate.train import train_generator
    from npu_gr.train.options import read_items
    from npu_gr.train.resume import NO_STATES, kept_states
    from npu_gr.train.steps import training_progress

    torch.set_num_threads(threads)
    options = override(_generate_presets()[preset], overrides)
    source = log or movielens_100k()
    features, names = read_items(source, items, list(item_features))
    with joined() as ranks, ExitStack() as files:
        console = Console(quiet=not ranks.is_first)
        folder = out / f".events-{ranks.rank}"
        data = files.enter_context(
            _events(source, features, options.memory_events, folder, value_column, leaves_out=True)
        )
        states = NO_STATES
        if ranks.is_first:
            prepare(out)
            states = kept_states(out, data, features, codes)
        with training_progress(console) as show:
            trained = train_generator(data, features, options, codes, show, states=states)
    if not ranks.is_first:
        return
    states.remove()
    console.print(trained.report.table())
    click.echo(trained.report.text())
    names.save(out)
    click.echo(how_to_serve(publish(trained, features, options, out), trained, names))


@train.command("retrieve", epilog=LISTED)
@click.argument("log", type=FILE)
@click.option("--out", required=True, type=FILE, help="Folder of the vectors.")
@_override(_retrieve_presets)
@click.option("--tenant", default="", show_default=True, help="Tenant of all users in the log.")
@VALUE_COLUMN
@THREADS
def train_retrieve(
    log: Path, out: Path, overrides: tuple[str, ...], tenant: str, value_column: str, threads: int
) -> None:
    """Train vectors for /v1/match on one LOG, and print their quality.

    LOG is a folder of npu-gr prepare, or a file: .inter, .jsonl or .json. The vectors are those of
    item-to-item transitions. For two logs with common users, use `train match`.
    """
    import torch
    from rich.console import Console

    from npu_gr.core.settings import override
    from npu_gr.train.distributed import reject_ranks
    from npu_gr.train.options import how_to_match, read_training_data
    from npu_gr.train.retrieve import RetrieveOptions, train_retriever
    from npu_gr.train.steps import training_progress
    from npu_gr.vector_search.vectors import save

    reject_ranks("train retrieve")
    torch.set_num_threads(threads)
    options = override(RetrieveOptions(), overrides)
    data = read_training_data(log, value_column=value_column)
    console = Console()
    with training_progress(console) as show:
        trained = train_retriever(data.interactions, options, show, tenant)
    console.print(trained.report.table())
    click.echo(trained.report.text())
    data.names.save(out)
    click.echo(f"wrote vectors {save(trained.vectors, out)} to {out}")
    click.echo(how_to_match(out, data.interactions.user_names[0]))


@train.command("match", epilog=LISTED, short_help="Train vectors of two domains that share users.")
@click.argument("source", type=FILE)
@click.argument("target", type=FILE)
@click.option(
    "--test",
    type=FILE,
    help="File with test edges of the target; default: one edge of each user is held out.",
)
@click.option("--out", required=True, type=FILE, help="Folder of the vectors.")
@_override(_match_presets)
@click.option(
    "--density", default=1.0, show_default=True, help="Fraction of the target's edges to train on."
)
@click.option(
    "--num-validation",
    default=2000,
    show_default=True,
    help="Largest number of users to validate on.",
)
@click.option("--user-column", default="user_id", show_default=True)
@click.option("--item-column", default="item_id", show_default=True)
@click.option("--tenant", default="", show_default=True, help="Tenant of all users in the files.")
@click.option("--tenant-column", help="Column with the tenant of each row, instead of --tenant.")
@THREADS
def train_match(
    source: Path,
    target: Path,
    test: Path | None,
    out: Path,
    overrides: tuple[str, ...],
    density: float,
    num_validation: int,
    threads: int,
    **columns: Any,
) -> None:
    """Train SCCDR vectors on the interactions of a SOURCE and a TARGET domain that share users.

    Files are TSV (user, item), RecBole atomic files or JSONL.
    """
    import torch
    from rich.console import Console

    from npu_gr.train.match.domains import read_domains
    from npu_gr.train.match.joined import run_training

    torch.set_num_threads(threads)
    if columns["tenant"] and columns["tenant_column"]:
        raise click.UsageError("--tenant and --tenant-column exclude each other")
    domains = read_domains(source, target, test, **columns)
    run_training(domains, out, overrides, density, num_validation, Console())


def _settings(
    _context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> dict[str, Any]:
    found = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not equals:
            raise click.BadParameter(f"{one!r} must have the form KEY=VALUE")
        try:
            found[key.strip()] = ast.literal_eval(value.strip())
        except (SyntaxError, ValueError):
            found[key.strip()] = value.strip()
    return found


@click.command("import", short_help="Convert a checkpoint that another project trained.")
@click.argument("folder", type=FILE)
@click.option(
    "--from", "family", required=True, type=click.Choice(FAMILIES), help="Project that trained it."
)
@click.option("--out", required=True, type=FILE, help="Folder of the checkpoint.")
@click.option("--name", default="", help="Name of the model; default: that of the folder.")
@click.option(
    "--item-ids",
    type=FILE,
    help="File with the ids of the items in the order of rows, one per line; default: 0, 1, ...",
)
@click.option(
    "--actions",
    default="",
    callback=names_of,
    metavar="NAMES",
    help="Names of the actions, comma-separated.",
)
@click.option(
    "--tasks",
    default="",
    callback=names_of,
    metavar="NAMES",
    help="Names of the tasks, comma-separated.",
)
@click.option(
    "--set",
    "settings",
    callback=_settings,
    multiple=True,
    metavar="KEY=VALUE",
    help="Setting that FOLDER lacks.",
)
@click.option(
    "--dump",
    type=FILE,
    metavar="FOLDER",
    help="Rows that TorchEasyRec's delta_embedding_dump_config wrote after the checkpoint.",
)
@click.option(
    "--trusted",
    is_flag=True,
    help="Read a distributed checkpoint, although it can execute code; only if you trust it.",
)
def import_(
    folder: Path,
    family: str,
    out: Path,
    name: str,
    item_ids: Path | None,
    dump: Path | None,
    trusted: bool,
    **given: Any,
) -> None:
    """Convert FOLDER, with an HSTU checkpoint and its configuration, to a checkpoint for `serve`.

    If a part cannot be converted, the command names it and writes nothing.
    """
    import numpy as np

    from npu_gr.model.convert.families import convert
    from npu_gr.model.convert.source import GivenNames
    from npu_gr.model.weights import Checkpoint, save

    ids = None
    if item_ids is not None:
        try:
            ids = np.array(item_ids.read_text().split(), np.int64)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"--item-ids {item_ids}: must have one whole number per line: {error}"
            ) from error
        if len(np.unique(ids)) != len(ids) or (ids < 0).any():
            raise ConfigError(f"--item-ids {item_ids}: ids must be distinct and not negative")
    made = convert(
        family,
        folder,
        GivenNames(ids, given["actions"], given["tasks"]),
        given["settings"],
        is_trusted=trusted,
        dump=dump,
    )
    shape = made.model.config
    checkpoint = Checkpoint(
        model=made.model,
        item_ids=made.item_ids,
        name=name or folder.resolve().name,
        action_names=shape.actions,
    )
    version = save(checkpoint, out)
    for note in made.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(
        f"{out}: {shape.num_items} items, {shape.num_layers} layers of {shape.num_heads} heads, "
        f"tasks {', '.join(shape.tasks)}, version {version}"
    )
