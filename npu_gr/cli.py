"""npu-gr: serve | train | load | replay | bench | check-config | demo. Commands import what they need, late."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from npu_gr import __version__
from npu_gr.errors import NpuGrError

if TYPE_CHECKING:
    from npu_gr.bench.line import Line
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
    if config.checkpoint is None:
        raise click.UsageError("checkpoint: the configuration names none, so the actions have no values")
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

    from npu_gr.bench.rank import lines

    torch.set_num_threads(threads)
    _show(lines(backend, getattr(torch, dtype), seed, seconds), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("wire")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=1.0, show_default=True, help="Time a case.")
def bench_wire(as_json: bool, seed: int, seconds: float) -> None:
    """Reading a rank's body: raw columns against lists of numbers."""
    from npu_gr.bench.wire import lines

    _show(lines(seed, seconds), "cpu", seed, as_json)


@bench.command("generate")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="Time a beam width.")
@click.option("--transformers/--no-transformers", default=True, help="With that baseline: about a minute more.")
def bench_generate(as_json: bool, backend: str, threads: int, seed: int, seconds: float, transformers: bool) -> None:
    """Semantic-ID beam search against dense search, no prefix cache, and Hugging Face transformers."""
    import torch

    from npu_gr.bench.generate import lines

    torch.set_num_threads(threads)
    _show(lines(backend, seed, seconds, transformers), backend, seed, as_json)  # type: ignore[arg-type]


def _show(lines: Iterable[Line], device: str, seed: int, as_json: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from npu_gr.bench.line import environment

    about, found = environment(device, seed), list(lines) if not as_json else lines
    if as_json:
        click.echo(json.dumps(about))
        for line in found:
            click.echo(json.dumps(line.as_dict()))
        return
    columns = ("baseline", "ours", "ratio", "floor", "of it", "ok")
    numbers = (Column(name, justify="right", no_wrap=True) for name in columns)
    table = Table(Column("case", no_wrap=True), *numbers, box=box.SIMPLE)
    for line in found:
        table.title = f"bench {line.bench}"
        table.add_row(
            line.case,
            f"{line.baseline_value:.3g} {line.unit}",
            f"{line.ours:.3g} {line.unit}",
            f"{line.ratio:.1f}x",
            "" if line.floor is None else f"{line.floor:.1f}x",
            "" if line.of_floor is None else f"{line.of_floor:.0%}",
            "" if line.ok is None else "yes" if line.ok else "no",
        )
    table.caption = f"baseline: {line.baseline}; {about['environment']['machine']}"
    Console(width=max(100, Console().width)).print(table)


@train.command("rank")
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the checkpoint.")
@click.option("--items", type=click.Path(path_type=Path), help="RecBole .item file with side features.")
@click.option("--item-features", default="", help="Its columns, comma-separated.")
@click.option("--preset", default="demo", show_default=True, type=click.Choice(["demo", "long"]))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one training option.")
@click.option("--value-column", default="rating", show_default=True, help="Column with the action's value.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
def train_rank_command(
    log: Path,
    out: Path,
    items: Path | None,
    item_features: str,
    preset: str,
    overrides: tuple[str, ...],
    value_column: str,
    threads: int,
) -> None:
    """Train an HSTU ranker on an interaction LOG (.inter or .jsonl) and print its figures beside the baselines'."""
    import msgspec
    import torch
    import yaml
    from rich.console import Console

    from npu_gr.demo import training_progress
    from npu_gr.errors import ConfigError
    from npu_gr.features.interactions import read_interactions, read_item_features
    from npu_gr.model.weights import save
    from npu_gr.train.rank import DEMO, LONG, TrainOptions, train_rank

    torch.set_num_threads(threads)
    table = msgspec.to_builtins({"demo": DEMO, "long": LONG}[preset])
    for override in overrides:
        key, _, value = override.partition("=")
        table[key] = yaml.safe_load(value)
    try:
        options = msgspec.convert(table, TrainOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set: {error}") from error
    columns = [name for name in item_features.split(",") if name]
    features = read_item_features(items, columns) if items else []
    console = Console()
    with training_progress(console) as show:
        checkpoint, evaluation = train_rank(read_interactions(log, value_column=value_column), features, options, show)
    console.print(evaluation.table())
    click.echo(f"checkpoint {save(checkpoint, out)} in {out}")


@train.command("match")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--test", type=click.Path(path_type=Path), help="Test edges of the target; else one of each user's.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the vectors, or the records.")
@click.option("--preset", default="sccdr", show_default=True, help="sccdr, or another arm of the ablation by name.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one training option.")
@click.option("--density", "densities", multiple=True, type=float, help="Share of the target's edges; repeatable.")
@click.option("--num-validation", default=2000, show_default=True, help="Users to validate on at most.")
@click.option("--ablate", "is_ablation", is_flag=True, help="Every arm on every seed and density; writes the table.")
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Of an ablation.")
@click.option("--user-column", default="user_id", show_default=True)
@click.option("--item-column", default="item_id", show_default=True)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
def train_match_command(
    source: Path,
    target: Path,
    test: Path | None,
    out: Path,
    preset: str,
    overrides: tuple[str, ...],
    densities: tuple[float, ...],
    num_validation: int,
    is_ablation: bool,
    seeds: int,
    user_column: str,
    item_column: str,
    threads: int,
) -> None:
    """Train SCCDR from the interactions of a SOURCE and a TARGET domain that share users.

    Files are TSV (user, item), RecBole atomic files or JSONL. What was interrupted goes on with the same command.
    """
    import torch
    from rich.console import Console

    from npu_gr.matching.command import run_ablation, run_training
    from npu_gr.matching.domains import read_domains

    torch.set_num_threads(threads)
    domains = read_domains(source, target, test, user_column=user_column, item_column=item_column)
    console = Console()
    if is_ablation:
        run_ablation(domains, out, overrides, densities or (0.4, 1.0), seeds, num_validation, console)
    else:
        run_training(domains, out, preset, overrides, (densities or (1.0,))[0], num_validation, console)


@main.command("replay")
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--url", default="http://127.0.0.1:8080", show_default=True)
@click.option("--speed", default=1.0, show_default=True, help="Log seconds a second.")
@click.option("--rate", type=float, help="Ranks a second, instead of the log's times.")
@click.option("--arrival", default="poisson", show_default=True, type=click.Choice(["poisson", "constant"]))
@click.option("--signal-lead-ms", default=50.0, show_default=True, help="Signal this long before its rank.")
@click.option("--no-signals", is_flag=True, help="Send only the signals that the log has.")
@click.option("--limit", type=click.IntRange(1), help="Records, oldest first.")
@click.option("--duration", "duration_s", type=float, help="Seconds of sending.")
@click.option("--timeout-ms", default=1000.0, show_default=True)
@click.option("--slo-ms", default=50.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--api-key", envvar="NPU_GR_API_KEY", help="Also from NPU_GR_API_KEY.")
@click.option("--json", "as_json", is_flag=True)
def replay_command(
    log: Path,
    url: str,
    speed: float,
    rate: float | None,
    arrival: str,
    signal_lead_ms: float,
    no_signals: bool,
    limit: int | None,
    duration_s: float | None,
    timeout_ms: float,
    slo_ms: float,
    seed: int,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Replay a query LOG open loop; latency counts from the time each request was due."""
    from rich.console import Console

    from npu_gr.errors import ConfigError
    from npu_gr.replay.options import ReplayOptions
    from npu_gr.replay.run import replay, stop_on_interrupt

    try:
        options = ReplayOptions(
            base_url=url,
            api_key=api_key,
            speed=speed,
            rate=rate,
            arrival=arrival,  # type: ignore[arg-type]
            signal_lead_s=None if no_signals else signal_lead_ms * 1e-3,
            limit=limit,
            duration_s=duration_s,
            timeout_s=timeout_ms * 1e-3,
            slo_s=slo_ms * 1e-3,
            seed=seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error

    async def work() -> Any:
        with stop_on_interrupt() as stop:
            return await replay(log, options, stop=stop)

    report = _run(work)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        Console().print(report.render())


@main.command()
@click.option("--config", "config_path", default="configs/cpu.yaml", show_default=True, type=click.Path(path_type=Path))
@click.option("--folder", default=".demo", show_default=True, type=click.Path(path_type=Path))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1), help="For training.")
@click.option("--limit", type=click.IntRange(1), help="Replay only so many records.")
def demo(config_path: Path, folder: Path, threads: int, limit: int | None) -> None:
    """Train a ranker on MovieLens-100K, serve it, replay the real users' held-out traffic, report."""
    import torch
    from rich.console import Console

    from npu_gr.demo import run

    torch.set_num_threads(threads)
    _run(lambda: run(config_path, folder, Console(), limit))
