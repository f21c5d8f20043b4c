"""npu-gr: serve | route | fleet | train | load | replay | simulate | bench | demo ... Commands import late."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from npu_gr import __version__
from npu_gr.errors import NpuGrError
from npu_gr.process import set_up_process
from npu_gr.replay.commands import record, replay
from npu_gr.simulate.commands import simulate

if TYPE_CHECKING:
    from npu_gr.bench.line import Line
    from npu_gr.config import Config

T = TypeVar("T")

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
    set_up_process()  # before torch loads
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
    """Start one instance; SIGTERM drains and stops it, SIGHUP reads the configuration again."""
    from npu_gr.app import run
    from npu_gr.server.journal import lines_to_stdout

    config = _load(config_path, overrides)
    lines_to_stdout()
    _run(lambda: run(config, read=lambda: _load(config_path, overrides)))


@main.command()
@CONFIG
@SET
def route(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Start the affinity router before many instances; SIGTERM drains and stops it."""
    from npu_gr.router.config import RouterConfig
    from npu_gr.router.run import run
    from npu_gr.settings import load

    config = load(config_path, RouterConfig, overrides)
    _run(lambda: run(config))


@main.group()
def fleet() -> None:
    """The router's placement in infrastructure that is there already."""


def _balancer(name: str, about: str) -> None:
    @fleet.command(name, help=about)
    @CONFIG
    @SET
    def command(config_path: Path, overrides: tuple[str, ...]) -> None:
        from npu_gr.fleet.balancers import BALANCERS
        from npu_gr.router.config import RouterConfig
        from npu_gr.router.discovery import find
        from npu_gr.settings import load

        config = load(config_path, RouterConfig, overrides)
        click.echo(BALANCERS[name](config, asyncio.run(find(config.discovery))), nl=False)


_balancer("envoy", "Print Envoy's configuration (JSON): MAGLEV on the user header.")
_balancer("haproxy", "Print HAProxy's configuration: strict consistent hashing on the user header.")
_balancer("nginx", "Print nginx.conf: strict consistent hashing on the user header, passive checks only.")


@fleet.command("ray")
@CONFIG
@SET
@click.option("--instances", required=True, type=click.IntRange(1), help="At least; one a device.")
@click.option("--max-instances", type=click.IntRange(1), help="Autoscale up to so many.")
@click.option("--resource", default="CPU", show_default=True, type=click.Choice(["NPU", "GPU", "CPU"]))
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8090, show_default=True)
def fleet_ray(
    config_path: Path,
    overrides: tuple[str, ...],
    instances: int,
    max_instances: int | None,
    resource: str,
    host: str,
    port: int,
) -> None:
    """Run instances on a Ray cluster (RAY_ADDRESS, else a local one), requests routed by user, until stopped."""
    from npu_gr.fleet.ray_serve import RayOptions, deploy

    config = _load(config_path, overrides)
    deploy(config, RayOptions(instances, max_instances or instances, resource, host, port))


@main.command("check-config")
@CONFIG
@SET
def check_config(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Validate a configuration and print it whole, defaults included."""
    import yaml

    from npu_gr.config import to_table

    click.echo(yaml.safe_dump(to_table(_load(config_path, overrides)), sort_keys=False), nl=False)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--backend", default=None, help="That must work, as in a configuration; else whatever is there.")
@click.option("--acceptance", is_flag=True, help="Then ranks and generates against the CPU's, and times them.")
def doctor(as_json: bool, backend: str | None, acceptance: bool) -> None:
    """Say what this machine has for our ops, test them, and what to do about what is missing. Exit code 0 or 1."""
    from npu_gr.acceptance import accept, latencies
    from npu_gr.backend.doctor import examine, is_well, table

    checks = examine(backend)  # type: ignore[arg-type]
    times = []
    if acceptance and is_well(checks):
        checks += accept(backend or "cpu")  # type: ignore[arg-type]
        times = latencies(backend or "cpu")  # type: ignore[arg-type]
    if as_json:
        answer = {
            "ok": is_well(checks),
            "checks": [c._asdict() for c in checks],
            "latency": [t._asdict() for t in times],
        }
        click.echo(json.dumps(answer))
    else:
        click.echo(table(checks))
        for time in times:
            click.echo(f"{time.name:32} {time.p50_ms:9.3f} ms p50 {time.p90_ms:9.3f} ms p90")
    sys.exit(not is_well(checks))


@main.command("dashboards")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="For its objectives; else the defaults.")
@click.option("--out", default="dashboards", show_default=True, type=click.Path(path_type=Path))
@click.option("--runbooks", default="docs/runbooks", show_default=True, help="Path or URL of the runbooks' pages.")
def dashboards_command(config_path: Path | None, out: Path, runbooks: str) -> None:
    """Write the Grafana dashboards and the Prometheus rules."""
    from npu_gr.config import SLOConfig
    from npu_gr.metrics.dashboards import write

    objectives = (SLOConfig() if config_path is None else _load(config_path, ()).slo).objectives()
    for path in write(out, objectives, runbooks):
        click.echo(path)


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


@bench.command("kernels")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--isa", default="", help="Instruction set; the best of this CPU by default.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="Time a case.")
@click.option("--only", type=click.Choice(["roofs", "topk", "hstu"]), help="One part.")
@click.option("--device", default="cpu", show_default=True, help="Or another backend: its ops against torch's there.")
def bench_kernels(as_json: bool, isa: str, seed: int, seconds: float, only: str | None, device: str) -> None:
    """Native CPU kernels on one thread: against what the CPU can do at most, torch ops and a naive cached path."""
    import torch

    from npu_gr.bench import kernels_device
    from npu_gr.bench.kernels import PARTS, lines

    if device != "cpu":
        _show(kernels_device.lines(device, seed, seconds), device, seed, as_json)  # type: ignore[arg-type]
        return
    torch.set_num_threads(1)
    parts = tuple(part for part in PARTS if only in (None, part))
    _show(lines(isa, seed, seconds, parts), "cpu", seed, as_json)


@bench.command("wire")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=1.0, show_default=True, help="Time a case.")
def bench_wire(as_json: bool, seed: int, seconds: float) -> None:
    """Reading a rank's body: raw columns against lists of numbers."""
    from npu_gr.bench.wire import lines

    _show(lines(seed, seconds), "cpu", seed, as_json)


@bench.command("metrics")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="Time a case.")
def bench_metrics(as_json: bool, seed: int, seconds: float) -> None:
    """What counting, tracing and logging add to a rank, in CPU time."""
    import torch

    from npu_gr.bench.metrics import lines

    torch.set_num_threads(1)
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


@bench.command("router")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=10.0, show_default=True)
def bench_router(as_json: bool, seed: int, seconds: float) -> None:
    """What the router adds to a call, and Envoy in the same run where it is installed."""
    from npu_gr.bench.router import lines

    _show(lines(seed, seconds), "cpu", seed, as_json)


@bench.command("twin")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--seed", default=0, show_default=True)
def bench_twin(as_json: bool, seed: int) -> None:
    """Ascend masked_topk on the CPU twin: instructions and bytes counted, time modelled. Not a measurement."""
    from rich.console import Console

    from npu_gr.bench.twin import lines, table

    if as_json:
        _show(lines(seed), "CPU twin of the Ascend 910B", seed, as_json)
    else:
        Console(width=max(120, Console().width)).print(table(lines(seed)))


@bench.command("cascade")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--lengths", default="1024,2048", show_default=True, help="Tokens of a history, comma-separated.")
@click.option("--layers", default=3, show_default=True, type=click.IntRange(1))
@click.option("--count", default=15, show_default=True, type=click.IntRange(3), help="Requests an arm.")
def bench_cascade(as_json: bool, backend: str, threads: int, seed: int, lengths: str, layers: int, count: int) -> None:
    """A recommend end to end, with and without the relay."""
    import torch

    from npu_gr.bench.cascade import lines

    torch.set_num_threads(threads)
    tokens = [int(part) for part in lengths.split(",")]
    _show(lines(backend, tokens, layers, count, seed), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("relay")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--lengths", default="1024,2048", show_default=True, help="Tokens of a history, comma-separated.")
@click.option("--candidates", default="100", show_default=True, help="Of a rank, comma-separated.")
@click.option("--layers", default=3, show_default=True, type=click.IntRange(2))
@click.option("--dim", default=256, show_default=True, help="Of the model; a multiple of 64.")
@click.option("--count", default=100, show_default=True, type=click.IntRange(1), help="Requests a run at most.")
@click.option("--seconds", default=10.0, show_default=True, help="A run at most, but for its first 40 requests.")
@click.option("--trace", type=click.Path(path_type=Path), help="A Mooncake trace: whose returns an arm follows.")
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
    seconds: float,
    trace: Path | None,
) -> None:
    """Traffic within the objective, and length of history, with and without a relay: minutes a shape."""
    import torch

    from npu_gr.bench.relay import lines
    from npu_gr.bench.relay_rig import Shape

    torch.set_num_threads(threads)
    tokens, rows = ([int(part) for part in text.split(",")] for text in (lengths, candidates))
    shapes = [Shape(n, c, layers, dim) for n in tokens for c in rows]
    _show(lines(backend, shapes, count, seconds, seed, trace), backend, seed, as_json)  # type: ignore[arg-type]


@bench.command("match")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--items", default=1_000_000, show_default=True, type=click.IntRange(1000), help="Of the catalogue.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="Time a batch size.")
def bench_match(as_json: bool, items: int, seed: int, seconds: float) -> None:
    """Exact top-k over all items against numpy and faiss, on one thread; recall of the approximate index."""
    import os

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before numpy loads: no other way holds for every BLAS
    import torch

    from npu_gr.bench.match import lines

    torch.set_num_threads(1)
    _show(lines(items, seed, seconds), "cpu", seed, as_json)


@bench.command("match-train")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--edges", default=1_000_000, show_default=True, type=click.IntRange(1000), help="Of both domains.")
@click.option("--steps", default=4, show_default=True, type=click.IntRange(2), help="Of each stage that are timed.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
def bench_match_train(as_json: bool, edges: int, steps: int, threads: int, seed: int) -> None:
    """What training on so many edges costs: CPU minutes and memory."""
    import torch

    from npu_gr.bench.match_train import lines

    torch.set_num_threads(threads)
    _show(lines(edges, steps, seed), "cpu", seed, as_json)


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
    table = Table(Column("case", overflow="fold"), *numbers, box=box.SIMPLE)
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
    import torch
    from rich.console import Console

    from npu_gr.demo import training_progress
    from npu_gr.features.interactions import read_interactions, read_item_features
    from npu_gr.model.weights import save
    from npu_gr.train.rank import DEMO, LONG, train_rank

    torch.set_num_threads(threads)
    options = _overridden({"demo": DEMO, "long": LONG}[preset], overrides)
    columns = [name for name in item_features.split(",") if name]
    features = read_item_features(items, columns) if items else []
    console = Console()
    with training_progress(console) as show:
        checkpoint, evaluation = train_rank(read_interactions(log, value_column=value_column), features, options, show)
    console.print(evaluation.table())
    click.echo(f"checkpoint {save(checkpoint, out)} in {out}")


@train.command("generate")
@click.argument("log", required=False, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder that the service starts from.")
@click.option(
    "--codes", type=click.Path(path_type=Path), help='Ready-made: a catalogue, or JSON {"item": [code, ...]}.'
)
@click.option("--items", type=click.Path(path_type=Path), help="RecBole .item file with side features.")
@click.option("--item-features", default="", help="Its columns, comma-separated.")
@click.option("--preset", default="movielens", show_default=True, type=click.Choice(["movielens", "beauty"]))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one training option.")
@click.option("--value-column", default="rating", show_default=True, help="Column with the action's value.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
def train_generate_command(
    log: Path | None,
    out: Path,
    codes: Path | None,
    items: Path | None,
    item_features: str,
    preset: str,
    overrides: tuple[str, ...],
    value_column: str,
    threads: int,
) -> None:
    """Train a semantic-ID generator on an interaction LOG and print its figures beside the baselines'.

    LOG is .inter, .jsonl, or .json {"user": [item, ...]}; without it, MovieLens-100K of the package recbole.
    """
    import torch
    from rich.console import Console

    from npu_gr.demo import training_progress
    from npu_gr.features.interactions import movielens_100k, read_interactions, read_item_features
    from npu_gr.train.generate import BEAUTY, MOVIELENS, train_generator
    from npu_gr.train.publish import how_to_serve, prepare, publish

    torch.set_num_threads(threads)
    options = _overridden({"movielens": MOVIELENS, "beauty": BEAUTY}[preset], overrides)
    interactions = read_interactions(log or movielens_100k(), value_column=value_column)
    columns = [name for name in item_features.split(",") if name]
    features = read_item_features(items, columns) if items else []
    prepare(out)
    console = Console()
    with training_progress(console) as show:
        trained = train_generator(interactions, features, options, codes, show)
    console.print(trained.report.table())
    click.echo(how_to_serve(publish(trained, features, options, out), trained))


def _overridden(preset: T, overrides: tuple[str, ...]) -> T:
    """Training options with some of their values replaced."""
    import msgspec
    import yaml

    from npu_gr.errors import ConfigError

    table = msgspec.to_builtins(preset)
    for override in overrides:
        key, _, value = override.partition("=")
        table[key] = yaml.safe_load(value)
    try:
        return msgspec.convert(table, type(preset))
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set: {error}") from error


@main.command("judge")
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="Of a service with a cascade.")
@click.argument("log", required=False, type=click.Path(path_type=Path))
@click.option("--users", type=click.IntRange(1), help="Only so many, drawn at random.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def judge_command(url: str, log: Path | None, users: int | None, as_json: bool) -> None:
    """Ask a running service for the last event of each user of LOG: the cascade beside each stage alone.

    Its models must not have seen those events (split leave-one-out). Without LOG, MovieLens-100K.
    """
    import numpy as np
    from rich.console import Console

    from npu_gr.features.interactions import movielens_100k, read_interactions
    from npu_gr.judge import judge, next_events
    from npu_gr.train.data import to_train_on

    async def work() -> None:
        events = read_interactions(log or movielens_100k())
        known = to_train_on(events.users, events.timestamps, "leave-one-out")
        found = await judge(url, next_events(events, known, users), np.unique(events.items).tolist())
        click.echo(json.dumps(found.as_dict())) if as_json else Console().print(found.table())

    _run(work)


main.add_command(replay)
main.add_command(record)
main.add_command(simulate)


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


@main.command()
@click.option("--config", "config_path", default="configs/cpu.yaml", show_default=True, type=click.Path(path_type=Path))
@click.option("--folder", default=".demo", show_default=True, type=click.Path(path_type=Path))
@click.option("--port", default=8080, show_default=True, type=click.IntRange(1, 65535))
@click.option("--prometheus-port", default=9090, show_default=True, type=click.IntRange(1, 65535))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1), help="For training.")
def monitor(config_path: Path, folder: Path, port: int, prometheus_port: int, threads: int) -> None:
    """Serve the demo's model under replay, with a Prometheus and the dashboards to open; until Ctrl-C."""
    import torch
    from rich.console import Console

    from npu_gr.monitor import run

    torch.set_num_threads(threads)
    _run(lambda: run(config_path, folder.resolve(), Console(), port, prometheus_port))
