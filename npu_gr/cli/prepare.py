"""npu-gr prepare: convert your log to a dataset."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from npu_gr.cli.options import FILE, names_of


@click.command(short_help="Convert your log to a dataset.")
@click.argument("log")
@click.option(
    "--out", type=FILE, help="Folder of the dataset; an existing dataset is replaced at the end."
)
@click.option(
    "--add-to",
    type=FILE,
    metavar="FOLDER",
    help="Dataset to add LOG to, with the columns and options of its first log.",
)
@click.option(
    "--merge",
    "is_merge",
    is_flag=True,
    help="LOG is a pattern of datasets, each with all events of its users: merge them.",
)
@click.option(
    "--on",
    "engine",
    type=click.Choice(("ray",)),
    help="Prepare LOG, Parquet files, on the Ray cluster of RAY_ADDRESS; default: here.",
)
@click.option(
    "--user",
    default="",
    metavar="COLUMN[,COLUMN]",
    help="Column with the user, or several: the first that is set; default: guessed by name.",
)
@click.option(
    "--item", default="", metavar="COLUMN", help="Column with the item; default: guessed by name."
)
@click.option(
    "--time",
    default="",
    metavar="COLUMN",
    help="Column with the time; default: guessed by name or type.",
)
@click.option(
    "--event",
    default="",
    metavar="COLUMN",
    help="Column with the action (view, purchase), or `none`; default: guessed.",
)
@click.option(
    "--value",
    default="",
    metavar="COLUMN",
    help="Column with a rating or dwell time, or `none`; default: guessed.",
)
@click.option(
    "--items", type=FILE, help="File with titles and features of items, in any format of LOG."
)
@click.option(
    "--items-key",
    default="",
    metavar="COLUMN",
    help="Column of --items with the item; default: guessed.",
)
@click.option(
    "--title",
    default="",
    metavar="COLUMN",
    help="Column of --items with the title, or `none`; default: guessed.",
)
@click.option(
    "--features",
    callback=names_of,
    metavar="COLUMNS",
    help="Columns of --items to use as features, comma-separated; default: all.",
)
@click.option("--users", type=FILE, help="File with features of users, in any format of LOG.")
@click.option(
    "--users-key",
    default="",
    metavar="COLUMN",
    help="Column of --users with the user; default: guessed.",
)
@click.option(
    "--user-features",
    callback=names_of,
    metavar="COLUMNS",
    help="Columns of --users to use as features, comma-separated; default: all.",
)
@click.option(
    "--event-features",
    callback=names_of,
    metavar="COLUMNS",
    help="Columns of LOG known after the event, such as watch_time.",
)
@click.option(
    "--request-features",
    callback=names_of,
    metavar="COLUMNS",
    help="Columns of LOG known at the request, such as device.",
)
@click.option(
    "--cross-features",
    callback=names_of,
    metavar="COLUMNS",
    help="Columns of LOG about a user-item pair, such as affinity.",
)
@click.option(
    "--positive",
    multiple=True,
    metavar="CONDITION",
    help="Rows that are behaviours, such as 'click=1'; others are impressions. `none`: all are.",
)
@click.option(
    "--position",
    default="",
    metavar="COLUMN",
    help="Column with the place of a shown item, or `none`; default: guessed.",
)
@click.option(
    "--drop",
    multiple=True,
    metavar="CONDITION",
    help="Rows to leave out, such as 'status in (CANCELLED, RETURNED)'. `none`: leave out none.",
)
@click.option(
    "--where", multiple=True, metavar="CONDITION", help="Rows to use, such as 'country=DE'."
)
@click.option(
    "--like",
    default="",
    metavar="FOLDER",
    help="Dataset whose actions and items keep their ids; default: the one that --out replaces.",
)
@click.option(
    "--strict", is_flag=True, help="Fail where the checks at the end find something implausible."
)
@click.option(
    "--format",
    type=click.Choice(
        (
            *("csv", "tsv", "parquet", "jsonl", "json", "atomic", "feather", "orc"),
            *("sqlite", "lists"),
        )
    ),
    help="Format of LOG; default: by its name.",
)
@click.option(
    "--encoding",
    default="",
    metavar="NAME",
    help="Encoding of text files; default: UTF-8, or Windows-1252 by its letters.",
)
@click.option(
    "--columns",
    callback=names_of,
    metavar="COLUMNS",
    help="Names of the columns of a CSV or TSV without a header.",
)
@click.option(
    "--time-unit",
    type=click.Choice(("s", "ms", "us", "ns", "iso")),
    help="Unit of the times; default: recognised.",
)
@click.option(
    "--time-format",
    default="",
    metavar="FORMAT",
    help="Format of the times for strptime, e.g. '%d.%m.%Y %H:%M'.",
)
@click.option("--no-time", is_flag=True, help="LOG has no times; its rows are in time order.")
@click.option(
    "--buckets",
    "num_buckets",
    default=10,
    show_default=True,
    type=click.IntRange(2, 100),
    help="Number of buckets of a continuous value.",
)
@click.option(
    "--keep-duplicates", is_flag=True, help="Keep rows that are equal in all columns used."
)
@click.option(
    "--max-rejected",
    "max_rejected_ratio",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Fail if more than this fraction of the rows is rejected.",
)
@click.option(
    "--memory",
    "memory_mb",
    type=click.IntRange(min=100),
    metavar="MB",
    help="Memory limit of DuckDB; default: 100 to 512 by LOG's size.",
)
def prepare(
    log: str,
    out: Path | None,
    add_to: Path | None,
    items: Path | None,
    users: Path | None,
    no_time: bool,
    is_merge: bool,
    engine: str | None,
    **settings: Any,
) -> None:
    """Convert a LOG of events to a dataset for `train all` and `load`.

    LOG is CSV, TSV, Parquet, JSON (lines, a list, or {"user": [item, ...]}) or a RecBole atomic
    file, optionally compressed (.gz, .zst, .bz2). Columns and the format of times are guessed, and
    the guesses are printed. A feature is a column's name, or name:kind, where kind is category,
    hashed or number.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskID,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    from npu_gr.dataset.build import add
    from npu_gr.dataset.build import prepare as work
    from npu_gr.dataset.merged import merge
    from npu_gr.dataset.options import PrepareOptions
    from npu_gr.dataset.summary import summary

    folder = out or add_to
    if folder is None or (out and add_to):
        raise click.UsageError("give one of --out and --add-to")
    if is_merge:
        _check_merge(click.get_current_context())
    if engine and add_to:
        raise click.UsageError("--on: a log that is added is prepared here; give --out")
    given = {name: value for name, value in settings.items() if value is not None}
    options = PrepareOptions(has_time=not no_time, **given)
    console = Console(stderr=True)
    bar_columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *bar_columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, ratio: float) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0)
            bars.update(tasks[stage], completed=ratio)

        if is_merge:
            prepared = merge(log, folder, options, on_stage=show)
        elif engine:
            from npu_gr.dataset.on_ray import prepare_on_ray

            prepared = prepare_on_ray(log, folder, options, items=items, users=users, on_stage=show)
        else:
            run = work if add_to is None else add
            prepared = run(log, folder, options, items=items, users=users, on_stage=show)
    click.echo(summary(prepared.manifest, folder))
    if add_to is not None:
        return
    command = ["npu-gr", "train", "all", str(folder), "--out", str(folder.parent)]
    click.echo(f"\nnext: {shlex.join(command)}")


def _check_merge(context: click.Context) -> None:
    """Reject options that only the parts of a merge can follow."""
    for name in context.params:
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in ("log", "out", "is_merge", "like", "strict", "memory_mb"):
            option = next(one.opts[0] for one in context.command.params if one.name == name)
            raise click.UsageError(f"{option}: give it when the parts are prepared, not at --merge")
