"""npu-gr serve, route and check-config: the two kinds of processes, and the configuration of one."""

from __future__ import annotations

import asyncio
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


@click.command()
@CONFIG
@SET
@click.option("--take-over", is_flag=True, help="Take the port over from the router that has it, without a gap.")
def route(config_path: Path, overrides: tuple[str, ...], take_over: bool) -> None:
    """Start the affinity router in front of many instances. SIGTERM drains and stops it, SIGUSR1 logs stacks."""
    from npu_gr.core.settings import load
    from npu_gr.router.config import RouterConfig
    from npu_gr.router.run import run

    config = load(config_path, RouterConfig, overrides)
    _serve(lambda: run(config, takes_over=take_over))


@click.command("check-config")
@CONFIG
@SET
def check_config(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Validate an instance's configuration and print it whole, defaults included."""
    import yaml

    from npu_gr.service.config import to_table

    click.echo(yaml.safe_dump(to_table(load_config(config_path, overrides)), sort_keys=False), nl=False)


def _serve(work: Callable[[], Any]) -> None:
    """Run the coroutine of a process that serves: its imports frozen, its stacks logged at SIGUSR1."""
    from npu_gr.core.garbage import freeze_imports
    from npu_gr.server.debug.stacks import logged_on_signal

    loops: list[asyncio.AbstractEventLoop] = []

    async def known() -> None:
        loops.append(asyncio.get_running_loop())
        await work()

    freeze_imports()
    with logged_on_signal(loops):
        run_async(known)
