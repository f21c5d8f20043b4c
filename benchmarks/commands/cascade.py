"""Benches of whole cascades: the relay, a recommend, one trunk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.commands.options import AS_JSON_LINES, BACKEND, SEED, THREADS
from benchmarks.commands.show import show
from npu_gr.cli.options import CONFIG, SET, run_async

if TYPE_CHECKING:
    from benchmarks.line import Line


@click.command("cascade")
@AS_JSON_LINES
@BACKEND
@THREADS
@SEED
@click.option("--lengths", default="1024,2048", show_default=True, help="Tokens of a history, comma-separated.")
@click.option("--layers", default=3, show_default=True, type=click.IntRange(1))
@click.option("--count", default=15, show_default=True, type=click.IntRange(3), help="Requests of each arm.")
def bench_cascade(as_json: bool, backend: str, threads: int, seed: int, lengths: str, layers: int, count: int) -> None:
    """Measure a recommend end to end, with and without the relay."""
    import torch

    from benchmarks.cascade import lines

    torch.set_num_threads(threads)
    tokens = [int(part) for part in lengths.split(",")]
    show(lines(backend, tokens, layers, count, seed), backend, seed, as_json)  # type: ignore[arg-type]


@click.command("trunk")
@CONFIG
@SET
@AS_JSON_LINES
@SEED
@click.option("--lengths", default="128,512,1024", show_default=True, help="Tokens of a history, comma-separated.")
@click.option("--seconds", default=5.0, show_default=True, help="Of each run of the open loop.")
@click.option("--count", default=200, show_default=True, type=click.IntRange(5), help="Lone requests of each kind.")
def bench_trunk(
    config_path: Path,
    overrides: tuple[str, ...],
    as_json: bool,
    seed: int,
    lengths: str,
    seconds: float,
    count: int,
) -> None:
    """Compare a recommend from one trunk with one from two models: CONFIG is a site's, and names both."""
    import torch

    from benchmarks.trunk import lines
    from npu_gr.service.config import load

    async def work() -> list[Line]:
        tokens = [int(part) for part in lengths.split(",")]
        return [line async for line in lines(config_path, overrides, tokens, seconds, count, seed)]

    config = load(config_path, overrides)
    torch.set_num_threads(config.threads)
    show(run_async(work), config.backend, seed, as_json)


@click.command("relay")
@AS_JSON_LINES
@BACKEND
@THREADS
@SEED
@click.option("--lengths", default="1024,2048", show_default=True, help="Tokens of a history, comma-separated.")
@click.option("--candidates", default="100", show_default=True, help="Candidates of a rank, comma-separated.")
@click.option("--layers", default=3, show_default=True, type=click.IntRange(2))
@click.option("--dim", default=256, show_default=True, help="Of the model; a multiple of 64.")
@click.option("--count", default=200, show_default=True, type=click.IntRange(1), help="Requests of each run.")
@click.option(
    "--lowest",
    default=0.1,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="The lowest rate, as a share of what full inference could do.",
)
@click.option("--trace", type=click.Path(path_type=Path), help="A Mooncake trace; one arm follows its returns.")
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(["arms", "longest", "trigger"]),
    help="Run these parts; repeatable.",
)
def bench_relay(
    as_json: bool,
    backend: str,
    threads: int,
    seed: int,
    lengths: str,
    candidates: str,
    layers: int,
    dim: int,
    count: int,
    lowest: float,
    trace: Path | None,
    parts: tuple[str, ...],
) -> None:
    """Measure the rate and the history length that keep the objective, with and without a relay: minutes a shape."""
    import torch

    from benchmarks.relay import PARTS, lines
    from benchmarks.relay_rig import Shape

    torch.set_num_threads(threads)
    tokens, rows = ([int(part) for part in text.split(",")] for text in (lengths, candidates))
    shapes = [Shape(n, c, layers, dim) for n in tokens for c in rows]
    found = lines(backend, shapes, count, lowest, seed, trace, parts or PARTS)  # type: ignore[arg-type]
    show(found, backend, seed, as_json)
