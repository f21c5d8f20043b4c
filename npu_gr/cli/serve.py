"""npu-gr serve, route, check-config and config: instances, routers and their configuration."""

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
    """Start an instance.

    SIGTERM drains and stops it, SIGHUP reloads the configuration, SIGUSR1 logs stacks.
    """
    from npu_gr.server.access_log import lines_to_stdout
    from npu_gr.server.run import check_ports
    from npu_gr.service.app import run

    config = load_config(config_path, overrides)
    check_ports(config.server)
    lines_to_stdout()
    _serve(lambda: run(config, read=lambda: load_config(config_path, overrides), owns_process=True))


@click.command(short_help="Run HAProxy in front of the instances.")
@CONFIG
@SET
@click.option(
    "--print", "prints", is_flag=True, help="Print the configuration for HAProxy, and exit."
)
def route(config_path: Path, overrides: tuple[str, ...], prints: bool) -> None:
    """Run HAProxy in front of the instances; it routes by user, so ranks follow their signals.

    SIGTERM drains and stops it.
    """
    from npu_gr.route.process import rendered, run

    if prints:
        click.echo(asyncio.run(rendered(config_path, overrides)), nl=False)
        return
    _serve(lambda: run(config_path, overrides))


@click.command("check-config", short_help="Check a configuration and the files it names.")
@CONFIG
@SET
@click.option(
    "--syntax-only",
    is_flag=True,
    help="Do not open the files it names.",
)
@click.option(
    "--other-machine",
    is_flag=True,
    help="It is for another machine: do not compare sizes with this one.",
)
def check_config(
    config_path: Path, overrides: tuple[str, ...], syntax_only: bool, other_machine: bool
) -> None:
    """Check the configuration of an instance or a router, and the files and addresses it names.

    Memory and threads of an instance must fit on this machine.

    Prints all values, defaults included, with the source of each value that is no default; then, on
    standard error, the findings. Exit code: 0 = correct, 1 = something it names cannot be used, 2 =
    the configuration itself is invalid.
    """
    from npu_gr.tools.check_config import examine, is_well, read, shown, table

    config = read(config_path, overrides)
    click.echo(shown(config, config_path, overrides), nl=False)
    if syntax_only:
        return
    found = examine(config, is_here=not other_machine)
    click.echo(table(found), err=True)
    if not is_well(found):
        click.echo(f"relative paths are relative to {Path.cwd()}", err=True)
        sys.exit(1)


@click.command(short_help="Print an example configuration, or its schema.")
@click.argument("kind", default="instance", type=click.Choice(["instance", "router", "simulation"]))
@click.option(
    "--schema",
    "what",
    flag_value="schema",
    help="Print the JSON Schema instead, for editors and CI.",
)
@click.option(
    "--reference", "what", flag_value="reference", help="Print docs/configuration.md instead."
)
def config(kind: str, what: str | None) -> None:
    """Print an example configuration with every key and its meaning: npu-gr config > serve.yaml.

    Its first line names the schema, so that editors complete and check it.
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
    """Run a server's coroutine, with frozen imports, and its stacks logged at SIGUSR1.

    If the coroutine returns true, something hangs, and the process ends at once.
    """
    from npu_gr.core.process import end_now, freeze_imports
    from npu_gr.server.debug.stacks import logged_on_signal

    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        if await work():
            end_now()  # a thread that hangs would not let it end

    freeze_imports()
    with logged_on_signal(loops):
        run_async(main)
