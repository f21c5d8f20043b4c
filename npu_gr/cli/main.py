"""npu-gr: the group of all commands.

Each command group has a module; commands import what they need when they run.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from npu_gr import __version__
from npu_gr.cli.data import erase_check, kafka_ingest, load, store
from npu_gr.cli.delta import delta
from npu_gr.cli.fleet import fleet
from npu_gr.cli.keys import keys
from npu_gr.cli.nightly import nightly
from npu_gr.cli.options import CALLING_TLS
from npu_gr.cli.prepare import prepare
from npu_gr.cli.replay import record, replay
from npu_gr.cli.rollback import rollback
from npu_gr.cli.serve import check_config, config, route, serve
from npu_gr.cli.shadow import shadow
from npu_gr.cli.shard import shard
from npu_gr.cli.simulate import plan, simulate
from npu_gr.cli.tools import build_ops, calibrate, dashboards, demo, doctor, evaluate
from npu_gr.cli.train import import_, train
from npu_gr.core import renamed
from npu_gr.core.errors import NpuGrError
from npu_gr.core.logs import close_logs, set_up_logs
from npu_gr.core.process import set_up_process

# Removed commands -> what replaces them; docs/upgrading.md has the same rows.
GONE = {
    "bench": "python -m benchmarks NAME, from a checkout",
    "bundle": "curl -o bundle.tar.gz ADMIN/debug/bundle",
    "config schema": "npu-gr config [KIND] --schema",
    "config reference": "npu-gr config --reference",
    "import hstu": "npu-gr import FOLDER",
    "init": "npu-gr config > serve.yaml; each trainer writes one that serves its model",
    "monitor": "npu-gr demo --monitor",
    "proto": "the Open Inference Protocol's own .proto file",
    "replay convert access-log": "npu-gr replay convert sql: DuckDB reads the log, "
    "docs/own-data.md has queries",
    "replay convert ratings": "npu-gr replay convert sql, a query for DuckDB; npu-gr demo replays "
    "ratings",
    "replay convert log": "zstd and gzip pack and unpack a log; npu-gr replay reads both",
    "record purge": "npu-gr record --purge FOLDER",
    "record run": "npu-gr record",
    "store check": "npu-gr store WHERE",
    "store repair": "npu-gr store PATH --repair NEW",
}


class _Group(click.Group):
    """Turns NpuGrError, and a missing torch, into one line on stderr and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands as they are added: first the way from a log to a service."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; a removed one is an error that names its replacement.

        An old name of a command works with a warning.
        """
        if (new := renamed.COMMANDS.get(args[0])) is not None:
            click.echo(
                f"npu-gr {args[0]} is now npu-gr {new}; the old name works until npu_gr "
                f"{renamed.UNTIL}",
                err=True,
            )
            args = [new, *args[1:]]
        for name in (" ".join(args[:3]), " ".join(args[:2]), args[0]):
            if name in GONE:
                raise click.UsageError(f"npu-gr {name} was removed; use: {GONE[name]}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NpuGrError as error:
            close_logs()  # flush, so that earlier log lines come before the error
            click.echo(f"npu-gr: {error}", err=True)
            sys.exit(2)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "torch":
                raise
            close_logs()
            click.echo(
                f"npu-gr: {ctx.invoked_subcommand} needs torch: pip install 'npu_gr[serve]'",
                err=True,
            )
            sys.exit(2)


@click.group(cls=_Group)
@click.version_option(__version__)
@click.option(
    "--log-level", default="INFO", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"])
)
@CALLING_TLS
def main(log_level: str, **calling: str | None) -> None:
    """Generative recommendation under a P99 deadline."""
    os.environ.update({name.upper(): value for name, value in calling.items() if value is not None})
    set_up_process()  # before torch loads
    set_up_logs(log_level)


for _command in (
    *(demo, prepare, train, serve, nightly, rollback, delta, shadow, shard, load, evaluate),
    *(check_config, config, keys, doctor, dashboards, calibrate, import_),
    *(route, fleet, kafka_ingest, store, erase_check, record, replay, simulate, plan, build_ops),
):
    main.add_command(_command)
