"""npu-gr fleet: place requests by user with a load balancer or on a Ray cluster, instead of with our router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from npu_gr.cli.options import CONFIG, SET, load_config


@click.group()
def fleet() -> None:
    """Place requests by user, as the router does, in infrastructure that you have already."""


def _add_balancer(name: str, about: str) -> None:
    @fleet.command(name, help=about)
    @CONFIG
    @SET
    def command(config_path: Path, overrides: tuple[str, ...]) -> None:
        from npu_gr.fleet.balancers import BALANCERS
        from npu_gr.router.config import load
        from npu_gr.router.discovery import find

        config = load(config_path, overrides)
        click.echo(BALANCERS[name](config, asyncio.run(find(config.discovery))), nl=False)


_add_balancer("envoy", "Print Envoy's configuration (JSON): MAGLEV on the user header.")
_add_balancer("haproxy", "Print HAProxy's configuration: strict consistent hashing on the user header.")
_add_balancer("nginx", "Print nginx.conf: strict consistent hashing on the user header, passive checks only.")


@fleet.command("ray")
@CONFIG
@SET
@click.option("--instances", required=True, type=click.IntRange(1), help="At least so many, one a device.")
@click.option("--max-instances", type=click.IntRange(1), help="Autoscale up to so many.")
@click.option("--resource", default="CPU", show_default=True, type=click.Choice(["NPU", "GPU", "CPU"]))
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8090, show_default=True)
def ray(
    config_path: Path,
    overrides: tuple[str, ...],
    instances: int,
    max_instances: int | None,
    resource: str,
    host: str,
    port: int,
) -> None:
    """Run instances on a Ray cluster until stopped, and route requests by user.

    The cluster is that of RAY_ADDRESS; without it, a local one is started.
    """
    from npu_gr.fleet.ray_serve import RayOptions, deploy

    config = load_config(config_path, overrides)
    deploy(config, RayOptions(instances, max_instances or instances, resource, host, port))
