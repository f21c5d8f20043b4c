"""npu-gr prepare: a company's log into a dataset."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from npu_gr.cli.options import FILE, names_of


@click.command(short_help="Make a dataset of a company's log.")
@click.argument("log", type=FILE)
@click.option(
    "--out",
    required=True,
    type=FILE,
    help="Folder of the dataset; one that is there is replaced at the end.",
)
@click.option("--user", default="", metavar="COLUMN", help="Who did it; guessed by its name.")
@click.option("--item", default="", metavar="COLUMN", help="With which item; guessed by its name.")
@click.option(
    "--time", default="", metavar="COLUMN", help="When; guessed by its name, or by its type."
)
@click.option(
    "--event",
    default="",
    metavar="COLUMN",
    help="What was done (view, purchase); guessed, or `none`.",
)
@click.option(
    "--value",
    default="",
    metavar="COLUMN",
    help="How much (rating, dwell time); guessed, or `none`.",
)
@click.option(
    "--items", type=FILE, help="File with titles and features of items, in any of the formats."
)
@click.option(
    "--items-key", default="", metavar="COLUMN", help="Its column with the item; guessed."
)
@click.option(
    "--title", default="", metavar="COLUMN", help="Its column with the title; guessed, or `none`."
)
@click.option(
    "--features",
    callback=names_of,
    metavar="COLUMNS",
    help="Its features, comma-separated; else all.",
)
@click.option("--users", type=FILE, help="File with features of users, in any of the formats.")
@click.option(
    "--users-key", default="", metavar="COLUMN", help="Its column with the user; guessed."
)
@click.option(
    "--user-features",
    callback=names_of,
    metavar="COLUMNS",
    help="Its features, comma-separated; else all.",
)
@click.option(
    "--event-features",
    callback=names_of,
    metavar="COLUMNS",
    help="Of LOG: what happened, as watch_time.",
)
@click.option(
    "--request-features",
    callback=names_of,
    metavar="COLUMNS",
    help="Of LOG: known when it asks, as device.",
)
@click.option(
    "--cross-features",
    callback=names_of,
    metavar="COLUMNS",
    help="Of LOG: of user and item, as affinity.",
)
@click.option(
    "--format",
    type=click.Choice(("csv", "tsv", "parquet", "jsonl", "json", "atomic")),
    help="Of LOG.",
)
@click.option(
    "--columns", callback=names_of, metavar="COLUMNS", help="Of a CSV or TSV without a header."
)
@click.option(
    "--time-unit", type=click.Choice(("s", "ms", "us", "ns", "iso")), help="Recognised otherwise."
)
@click.option(
    "--time-format", default="", metavar="FORMAT", help="As strptime has it, e.g. '%d.%m.%Y %H:%M'."
)
@click.option("--no-time", is_flag=True, help="No column says when; rows are in time order.")
@click.option(
    "--buckets",
    "num_buckets",
    default=10,
    show_default=True,
    type=click.IntRange(2, 100),
    help="Of a continuous value.",
)
@click.option("--keep-duplicates", is_flag=True, help="Keep rows that are equal in everything.")
@click.option(
    "--max-rejected",
    "max_rejected_ratio",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Most rows that may be unusable.",
)
@click.option(
    "--memory",
    "memory_mb",
    type=click.IntRange(min=100),
    metavar="MB",
    help="For DuckDB; else 100 to 512 by LOG's size.",
)
def prepare(
    log: Path, out: Path, items: Path | None, users: Path | None, no_time: bool, **told: Any
) -> None:
    """Make a dataset of a LOG of events, for `train all` and `load`.

    LOG is CSV, TSV, Parquet, JSON (lines, a list, or {"user": [item, ...]}) or a RecBole atomic
    file, also packed (.gz, .zst, .bz2). Columns and times are guessed, and what was guessed is
    printed. A feature is a column's name, or name:kind with one of the kinds category, hashed and
    number.
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

    from npu_gr.dataset.build import prepare as work
    from npu_gr.dataset.build import summary
    from npu_gr.dataset.options import PrepareOptions

    given = {name: value for name, value in told.items() if value is not None}
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

        prepared = work(log, out, options, items=items, users=users, on_stage=show)
    click.echo(summary(prepared.manifest, out))
    click.echo(
        f"\nnext: {shlex.join(['npu-gr', 'train', 'all', str(out), '--out', str(out.parent)])}"
    )
