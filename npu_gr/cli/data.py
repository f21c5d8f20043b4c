"""npu-gr load: interaction logs into the history store."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from npu_gr.cli.options import API_KEY, FILE, SET, VALUE_COLUMN, load_config

if TYPE_CHECKING:
    from npu_gr.features.load import Loaded

PATIENCE_S = 60.0  # for a service that has no room, or restarts


@click.command()
@click.option("--config", "config_path", type=FILE, help="YAML configuration: whose store is filled.")
@click.option("--url", help="Load through the service at this address instead.")
@SET
@click.argument("log", type=FILE)
@click.option("--tenant", default="", show_default=True, help="Of all users in the log.")
@click.option("--replace", is_flag=True, help="Each user of the log gets exactly the log's events; others stay.")
@VALUE_COLUMN
@API_KEY
def load(
    config_path: Path | None,
    url: str | None,
    overrides: tuple[str, ...],
    log: Path,
    tenant: str,
    replace: bool,
    value_column: str,
    api_key: str | None,
) -> None:
    """Load an interaction LOG into the history store: what is there already is not added again.

    LOG is a file (.inter, .jsonl, .json), or a folder of npu-gr prepare. The model says which actions there are, and
    which features of events are loaded; events that are there already gain those that they lack. If a service has the
    embedded store, the events go through it, at the address of the configuration. What ends in the middle is completed
    by the same command.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from npu_gr.core.history import Mode
    from npu_gr.dataset import read_log
    from npu_gr.features.load import features_loaded, load_interactions
    from npu_gr.tools.ingest import open_target

    config = None if config_path is None else load_config(config_path, overrides)
    interactions = read_log(log, value_column=value_column)
    mode = Mode.REPLACE if replace else Mode.MERGE

    async def work(stack: ExitStack) -> Loaded:
        async with open_target(config, url, api_key, PATIENCE_S) as target:
            found = ", ".join(features_loaded(interactions, target.model.features))
            click.echo(f"loading into {target.about}{found and f'; features of events: {found}'}", err=True)
            columns = (TextColumn("events"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            console = Console(stderr=True)
            bars = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))
            task = bars.add_task("", total=len(interactions))
            return await load_interactions(
                target.store,
                interactions,
                target.model.actions,
                tenant,
                mode,
                lambda num_events: bars.advance(task, num_events),
                target.model.features,
            )

    with ExitStack() as stack:
        done = asyncio.run(work(stack))
    told = f"{done.num_replaced} replaced" if replace else f"{done.num_known} events were already there"
    if done.num_filled:
        told += f", of which {done.num_filled} gained features"
    click.echo(f"{done.num_users} users: {done.num_added} events added, {told}")
