"""npu-gr serve, route and check-config: the two kinds of processes, and the configuration of one."""

from __future__ import annotations

from pathlib import Path

import click

from npu_gr.cli.options import CONFIG, SET, load_config, run_async


@click.command()
@CONFIG
@SET
def serve(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Start one instance. SIGTERM drains and stops it, SIGHUP reads the configuration again."""
    from npu_gr.server.access_log import lines_to_stdout
    from npu_gr.service.app import run

    config = load_config(config_path, overrides)
    lines_to_stdout()
    run_async(lambda: run(config, read=lambda: load_config(config_path, overrides)))


@click.command()
@CONFIG
@SET
@click.option("--take-over", is_flag=True, help="Take the port over from the router that has it, without a gap.")
def route(config_path: Path, overrides: tuple[str, ...], take_over: bool) -> None:
    """Start the affinity router in front of many instances. SIGTERM drains and stops it."""
    from npu_gr.core.settings import load
    from npu_gr.router.config import RouterConfig
    from npu_gr.router.run import run

    config = load(config_path, RouterConfig, overrides)
    run_async(lambda: run(config, takes_over=take_over))


@click.command("check-config")
@CONFIG
@SET
def check_config(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Validate an instance's configuration and print it whole, defaults included."""
    import yaml

    from npu_gr.service.config import to_table

    click.echo(yaml.safe_dump(to_table(load_config(config_path, overrides)), sort_keys=False), nl=False)
