"""npu-gr erase-check: whether anything of a user who was erased is left."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from npu_gr.cli.options import API_KEY, AS_JSON, CONFIG, FILE, SET, load_config

if TYPE_CHECKING:
    from npu_gr.tools.erase_check import Searched


@click.command("erase-check")
@click.argument("user")
@click.option("--tenant", default="", help="Of the user.")
@CONFIG
@SET
@click.option("--logs", multiple=True, type=FILE, help="A file with log lines; repeat it.")
@click.option("--url", "urls", multiple=True, help="Admin address of an instance; repeat it.")
@click.option("--router", "routers", multiple=True, help="Admin address of a router; repeat it.")
@AS_JSON
@API_KEY
def erase_check(
    user: str,
    tenant: str,
    config_path: Path,
    overrides: tuple[str, ...],
    logs: tuple[Path, ...],
    urls: tuple[str, ...],
    routers: tuple[str, ...],
    as_json: bool,
    api_key: str | None,
) -> None:
    """Search the files of an instance, logs, and the memory of processes for USER, who was erased.

    Run it where the files are. It says where something is left, never what. Exit code: 0 = nothing was found, 1 =
    something was, 2 = nothing was found, but a place could not be searched.
    """
    import msgspec

    from npu_gr.core.history import UserKey
    from npu_gr.tools.erase_check import exit_code, search_files, search_memory, search_redis

    config = load_config(config_path, overrides)
    key = UserKey(tenant, user)

    async def search() -> list[Searched]:
        found = await asyncio.to_thread(search_files, config, key, logs)
        if config.features.kind == "redis":
            found += await search_redis(config.features, key)
        return found + await search_memory(key, urls, routers, api_key)

    found = asyncio.run(search())
    code = exit_code(found)
    if as_json:
        click.echo(msgspec.json.encode({"exit_code": code, "places": found}))
    else:
        for one in found:
            click.echo(f"{one.verdict:<12}  {one.place:<10}  {one.what}" + (f"  ({one.note})" if one.note else ""))
    sys.exit(code)
