"""npu-gr serve, route, check-config and config: the two kinds of processes, and the configuration of one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from npu_gr.cli.options import CONFIG, SET, load_config, run_async


@click.command()
@CONFIG
@SET
def serve(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Start one instance. SIGTERM drains and stops it, SIGHUP reads the configuration again, SIGUSR1 logs stacks."""
    from npu_gr.server.access_log import lines_to_stdout
    from npu_gr.service.app import run

    config = load_config(config_path, overrides)
    lines_to_stdout()
    _serve(lambda: run(config, read=lambda: load_config(config_path, overrides)))


@click.command(short_help="Run HAProxy in front of the instances.")
@CONFIG
@SET
@click.option(
    "--print", "prints", is_flag=True, help="Print HAProxy's file as it would be written, and end."
)
def route(config_path: Path, overrides: tuple[str, ...], prints: bool) -> None:
    """Run HAProxy in front of the instances: by user, a rank where its signal went.

    SIGTERM drains and stops it.
    """
    from npu_gr.route.process import run, shown

    if prints:
        click.echo(asyncio.run(shown(config_path, overrides)), nl=False)
        return
    _serve(lambda: run(config_path, overrides))


@click.command("check-config", short_help="Check a configuration and all that it names.")
@CONFIG
@SET
@click.option(
    "--syntax-only",
    is_flag=True,
    help="Open nothing that it names: for machines without the files.",
)
def check_config(config_path: Path, overrides: tuple[str, ...], syntax_only: bool) -> None:
    """Check the configuration of an instance or a router, and everything that it names.

    Prints it whole, defaults included, and where each other value came from; then, on standard
    error, what was found. Exit code 0, or 1: a start would reject something that it names, or 2:
    the configuration itself is wrong.
    """
    from npu_gr.tools.check_config import examine, is_well, read, shown, table

    config = read(config_path, overrides)
    click.echo(shown(config, config_path, overrides), nl=False)
    if syntax_only:
        return
    found = examine(config)
    click.echo(table(found), err=True)
    if not is_well(found):
        click.echo(f"relative paths begin at {Path.cwd()}", err=True)
        sys.exit(1)


@click.command(short_help="Print a configuration to begin with, or its schema.")
@click.argument("kind", default="instance", type=click.Choice(["instance", "router", "simulation"]))
@click.option(
    "--schema",
    "what",
    flag_value="schema",
    help="Print its JSON Schema instead, for editors and for CI.",
)
@click.option(
    "--reference", "what", flag_value="reference", help="Print docs/configuration.md instead."
)
def config(kind: str, what: str | None) -> None:
    """Print a configuration of KIND with every key and its meaning: npu-gr config > serve.yaml.

    Its first line names the schema, by which editors complete and check it.
    """
    from npu_gr.tools import config_docs

    if what == "reference":
        click.echo(config_docs.reference(), nl=False)
    else:
        click.echo(
            config_docs.schema_text(kind) if what == "schema" else config_docs.example(kind),
            nl=False,
        )


def _serve(work: Callable[[], Any]) -> None:
    """Run the coroutine of a process that serves: its imports frozen, its stacks logged at SIGUSR1."""
    from npu_gr.core.process import freeze_imports
    from npu_gr.server.debug.stacks import logged_on_signal

    loops: list[asyncio.AbstractEventLoop] = []

    async def known() -> None:
        loops.append(asyncio.get_running_loop())
        await work()

    freeze_imports()
    with logged_on_signal(loops):
        run_async(known)
