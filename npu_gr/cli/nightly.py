"""npu-gr nightly: new days into a site that is in service."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from npu_gr.cli.data import load
from npu_gr.cli.options import API_KEY, FILE, SET, load_config, run_async, wide_console
from npu_gr.cli.train import BELOW_BASELINE, NOT_LOADED, TENSORBOARD, THREADS
from npu_gr.core.errors import NpuGrError


@click.command(short_help="Train a site with new days, and serve it if no worse.")
@click.argument("site", type=FILE)
@click.argument("logs", nargs=-1)
@click.option("--force", is_flag=True, help="Serve the new models even if they are worse.")
@click.option(
    "--undo", is_flag=True, help="Instead put the newest kept version back, and reload it."
)
@click.option(
    "--anew", is_flag=True, help="Train from random weights, not on from the models in service."
)
@SET
@API_KEY
@THREADS
@TENSORBOARD
@click.pass_context
def nightly(
    context: click.Context,
    site: Path,
    logs: tuple[str, ...],
    force: bool,
    undo: bool,
    anew: bool,
    overrides: tuple[str, ...],
    api_key: str | None,
    threads: int,
    tensorboard: Path | None,
) -> None:
    """Add LOGS to the dataset of SITE, train its models again, and serve them if they are no worse.

    SITE is a folder of npu-gr train all; LOGS are files, folders or patterns, as for npu-gr prepare
    --add-to. The running instance of SITE/serve.yaml reloads, and gets the new events; give the
    same --set as npu-gr serve has. The three versions before stay in SITE/versions. After an
    interruption, repeat the command. Exit code: 0 = the new models are in place, 2 = failed,
    nothing changed, 3 = in place, but the instance did not reload or the events were not loaded,
    4 = rejected, because they are worse.
    """
    from npu_gr.dataset.files import read_dataset
    from npu_gr.tools.nightly import Worse, reload, restore
    from npu_gr.tools.nightly import nightly as work
    from npu_gr.train.site.configuration import SERVE
    from npu_gr.train.site.loaded import not_loaded, note_loaded

    console = wide_console()
    data = None
    if undo:
        click.echo(f"{restore(site)} is in place again")
    else:
        try:
            report = work(
                site, logs, threads, console, force=force, anew=anew, tensorboard=tensorboard
            )
        except Worse as error:
            click.echo(f"{error}; the dataset has the new events", err=True)
            sys.exit(BELOW_BASELINE)
        data = Path(report.dataset)
        if report.verdict is not None:
            click.echo(report.verdict.text)
    config = load_config(site / SERVE, overrides)
    try:
        run_async(lambda: reload(config.server, api_key, console))
        if data is not None:
            event_files = read_dataset(data).event_files
            files = not_loaded(site, config.history_store, event_files)
            if files != []:
                config_path = site / SERVE
                context.invoke(
                    load,
                    config_path=config_path,
                    overrides=overrides,
                    log=data,
                    api_key=api_key,
                    files=files,
                )
                note_loaded(site, config.history_store, event_files)
    except (NpuGrError, OSError, click.ClickException) as error:
        click.echo(
            f"the new models are in place, but not everything serves them: {error}", err=True
        )
        sys.exit(NOT_LOADED)
