"""npu-gr fleet: changes at every instance of a router, and instances on a Ray cluster."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

import click

from npu_gr.cli.options import API_KEY, CONFIG, FILE, SET, load_config

if TYPE_CHECKING:
    from npu_gr.route.fan_out import Answered, Change

_TENANT = click.option(
    "--tenant", default="", help="Tenant of the user, if the key is for all tenants."
)
_RELOADS = {
    "models": "/v1/models/reload",
    "catalog": "/v1/catalog/reload",
    "match": "/v1/match/reload",
}
ROLLBACKS = {what: path.replace("/reload", "/rollback") for what, path in _RELOADS.items()}
_ROUTER = click.option(
    "--config", "config_path", required=True, type=FILE, help="YAML configuration of the router."
)


@click.group()
def fleet() -> None:
    """Change every instance of a router, or run instances on Ray."""


def _shared(command: Callable[..., None]) -> Callable[..., None]:
    return _ROUTER(SET(API_KEY(command)))


@fleet.command(short_help="Erase a user at every instance.")
@click.argument("user")
@_TENANT
@_shared
def erase(
    user: str, tenant: str, config_path: Path, overrides: tuple[str, ...], api_key: str | None
) -> None:
    """Erase USER at every instance.

    Exit code 1: an instance did not do it; its name is printed; repeat the command.
    """
    from npu_gr.core.kinds import ERASE

    query = f"?{urlencode({'tenant': tenant})}" if tenant else ""
    path = ERASE.path.replace("{user_id}", quote(user, safe="").replace(".", "%2E"))
    _change_all(config_path, overrides, api_key, ERASE.method, path + query)


@fleet.command(short_help="Change items of the catalogue at every instance.")
@click.argument("file", type=FILE)
@_shared
def items(file: Path, config_path: Path, overrides: tuple[str, ...], api_key: str | None) -> None:
    """Change items of the catalogue at every instance.

    FILE is the body of POST /v1/catalog/items.
    """
    _change_all(config_path, overrides, api_key, "POST", "/v1/catalog/items", file.read_bytes())


@fleet.command(short_help="Reload models, catalogue or vectors at every instance.")
@click.argument("what", type=click.Choice(list(_RELOADS)))
@_shared
def reload(what: str, config_path: Path, overrides: tuple[str, ...], api_key: str | None) -> None:
    """Reload the models, the catalogue or the vectors at every instance."""
    _change_all(config_path, overrides, api_key, "POST", _RELOADS[what])


@fleet.command(short_help="Roll back models, catalogue or vectors at every instance.")
@click.argument("what", type=click.Choice(list(ROLLBACKS)))
@_shared
def rollback(what: str, config_path: Path, overrides: tuple[str, ...], api_key: str | None) -> None:
    """Serve the previous version of the models, the catalogue or the vectors at every instance.

    A second rollback undoes the first, so do not repeat it for an instance that has done it.
    """
    _change_all(config_path, overrides, api_key, "POST", ROLLBACKS[what])


def _change_all(
    config_path: Path,
    overrides: tuple[str, ...],
    api_key: str | None,
    method: str,
    target: str,
    body: bytes = b"",
) -> None:
    """Send a change to every instance, and print the answers."""
    from npu_gr.core.calling import calling_headers
    from npu_gr.route.fan_out import Change, missing

    headers = calling_headers(api_key) | ({"Content-Type": "application/json"} if body else {})
    change = Change(method, target, headers, body)
    answers = asyncio.run(_ask(config_path, overrides, change))
    for name, answer in sorted(answers.items()):
        click.echo(f"{name}  {answer.status or '-'}  {answer.text.strip()[:200]}")
    left = missing(answers)
    if left or not answers:
        remedy = "repeat the command" if change.is_repeatable else "call those instances themselves"
        click.echo(f"not done at {', '.join(left) or 'any instance'}; {remedy}", err=True)
        sys.exit(1)


async def _ask(
    config_path: Path, overrides: tuple[str, ...], change: Change
) -> dict[str, Answered]:
    from npu_gr.route.config import load
    from npu_gr.route.discovery import find
    from npu_gr.route.fan_out import InstanceCalls, ask_all

    config = load(config_path, overrides)
    return await ask_all(
        InstanceCalls(config), await find(config.discovery), change, config.max_budget_s / 3
    )


@fleet.command("ray", short_help="Run instances on a Ray cluster.")
@CONFIG
@SET
@click.option(
    "--instances",
    required=True,
    type=click.IntRange(1),
    help="Smallest number of instances; each takes one device.",
)
@click.option(
    "--max-instances", type=click.IntRange(1), help="Largest number of instances, for autoscaling."
)
@click.option(
    "--resource", default="CPU", show_default=True, type=click.Choice(["NPU", "GPU", "CPU"])
)
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

    RAY_ADDRESS names the cluster; without it, a local one is started.
    """
    from npu_gr.route.ray_serve import RayOptions, deploy

    config = load_config(config_path, overrides)
    deploy(config, RayOptions(instances, max_instances or instances, resource, host, port))
