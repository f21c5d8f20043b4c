"""npu-gr: the group of all commands. One module a command group; commands import what they need, late."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from npu_gr import __version__
from npu_gr.cli.config import config
from npu_gr.cli.consume import consume
from npu_gr.cli.data import load
from npu_gr.cli.erase_check import erase_check
from npu_gr.cli.fleet import fleet
from npu_gr.cli.import_ import import_
from npu_gr.cli.init import build_ops, init
from npu_gr.cli.keys import keys
from npu_gr.cli.one_line import describe
from npu_gr.cli.options import CALLING_TLS
from npu_gr.cli.prepare import prepare
from npu_gr.cli.replay import record, replay
from npu_gr.cli.serve import check_config, route, serve
from npu_gr.cli.simulate import simulate
from npu_gr.cli.store import store
from npu_gr.cli.tools import bundle, calibrate, dashboards, demo, doctor, judge, monitor
from npu_gr.cli.train import train
from npu_gr.core.errors import NpuGrError
from npu_gr.core.logs import close_logs, set_up_logs
from npu_gr.core.process import set_up_process


class _Group(click.Group):
    """Turns an error of ours, and a part that is not installed, into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NpuGrError as error:
            close_logs()  # what was logged before the error stands before it
            click.echo(f"npu-gr: {error}", err=True)
            sys.exit(2)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torch":
                raise
            close_logs()
            click.echo(f"npu-gr: {ctx.invoked_subcommand} needs torch: pip install 'npu_gr[serve]'", err=True)
            sys.exit(2)


@click.group(cls=_Group)
@click.version_option(__version__)
@click.option("--log-level", default="INFO", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]))
@CALLING_TLS
def main(log_level: str, **calling: str | None) -> None:
    """Generative recommendation under a P99 deadline."""
    os.environ.update({name.upper(): value for name, value in calling.items() if value is not None})
    set_up_process()  # before torch loads
    set_up_logs(log_level)


for _command in (
    *(prepare, init, serve, route, check_config, config, keys, fleet),
    *(train, load, import_, consume, store, replay, record, erase_check),
    *(simulate, calibrate, doctor, build_ops),
    *(dashboards, bundle, judge, demo, monitor),
):
    main.add_command(_command)
describe(main)
