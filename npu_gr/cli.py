"""npu-gr: serve | train | load | replay | bench | check-config | demo. Commands import what they need, late."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from npu_gr import __version__
from npu_gr.errors import NpuGrError

if TYPE_CHECKING:
    from npu_gr.config import Config

CONFIG = click.option(
    "--config", "config_path", required=True, type=click.Path(path_type=Path), help="YAML configuration."
)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one setting, e.g. kv.hbm_bytes=1000000.",
)


class _Group(click.Group):
    """Turns an error of ours into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NpuGrError as error:
            click.echo(f"npu-gr: {error}", err=True)
            sys.exit(2)


@click.group(cls=_Group)
@click.version_option(__version__)
@click.option("--log-level", default="INFO", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]))
def main(log_level: str) -> None:
    """Generative recommendation under a P99 deadline."""
    # before torch loads: a thread that waits must not spin beside the event loop
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _run(work: Callable[[], Any]) -> Any:
    import uvloop

    return uvloop.run(work())


def _load(config_path: Path, overrides: tuple[str, ...]) -> Config:
    from npu_gr.config import load

    return load(config_path, overrides)


@main.command()
@CONFIG
@SET
def serve(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Start one instance; SIGTERM drains and stops it."""
    from npu_gr.app import run

    config = _load(config_path, overrides)
    _run(lambda: run(config))


@main.command("check-config")
@CONFIG
@SET
def check_config(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Validate a configuration and print it whole, defaults included."""
    import yaml

    from npu_gr.config import to_table

    click.echo(yaml.safe_dump(to_table(_load(config_path, overrides)), sort_keys=False), nl=False)


@main.group()
def train() -> None:
    """Train a model from interaction logs."""


@main.command("load")
@CONFIG
@SET
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--tenant", default="", show_default=True)
@click.option("--value-column", default="rating", show_default=True, help="Column with the action's value.")
def load_command(config_path: Path, overrides: tuple[str, ...], log: Path, tenant: str, value_column: str) -> None:
    """Bulk-load an interaction LOG (.inter or .jsonl) into the history store, using the checkpoint's actions."""
    from npu_gr.features.interactions import read_interactions
    from npu_gr.features.load import load_interactions
    from npu_gr.features.store import open_store
    from npu_gr.model.weights import load as load_checkpoint

    config = _load(config_path, overrides)
    values = load_checkpoint(Path(config.checkpoint)).action_values
    interactions = read_interactions(log, value_column=value_column)

    async def work() -> int:
        store = await open_store(config.features)
        if store is None:
            raise click.UsageError("features.kind is none: there is no store to load into")
        try:
            return await load_interactions(
                store, interactions, {value: index for index, value in enumerate(values)}, tenant
            )
        finally:
            await store.close()

    click.echo(f"{asyncio.run(work())} events loaded")


@main.group()
def bench() -> None:
    """Measure; results are checked before anything is timed."""


@bench.command("rank")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=3.0, show_default=True, help="Time a case.")
def bench_rank(as_json: bool, backend: str, dtype: str, threads: int, seed: int, seconds: float) -> None:
    """Cached against full inference, over lengths and numbers of candidates."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from npu_gr.bench.line import environment
    from npu_gr.bench.rank import lines

    torch.set_num_threads(threads)
    found = []
    if as_json:
        click.echo(json.dumps(environment(backend, seed)))
    for line in lines(backend, getattr(torch, dtype), seed, seconds):  # type: ignore[arg-type]
        found.append(line)
        if as_json:
            click.echo(json.dumps(line.as_dict()))
    if not as_json:
        table = Table("case", "full ms", "cached ms", "ratio", "flop ratio", "of it", "ok", title="bench rank")
        for line in found:
            table.add_row(
                line.case,
                f"{line.baseline_value:.1f}",
                f"{line.ours:.2f}",
                f"{line.ratio:.1f}x",
                f"{line.floor:.1f}x",
                f"{line.of_floor:.0%}",
                "yes" if line.ok else "no",
            )
        Console().print(table)
