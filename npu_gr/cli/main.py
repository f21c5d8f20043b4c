"""npu-gr: serve | route | fleet | train | load | replay | simulate | bench | demo ... Commands import late."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from npu_gr import __version__
from npu_gr.cli.bench import bench
from npu_gr.cli.replay import record, replay
from npu_gr.cli.simulate import simulate
from npu_gr.core.errors import NpuGrError
from npu_gr.core.process import set_up_process

if TYPE_CHECKING:
    from npu_gr.service.config import Config

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
    from npu_gr.service.config import load

    return load(config_path, overrides)


@main.command()
@CONFIG
@SET
def serve(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Start one instance; SIGTERM drains and stops it, SIGHUP reads the configuration again."""
    from npu_gr.server.access_log import lines_to_stdout
    from npu_gr.service.app import run

    config = _load(config_path, overrides)
    lines_to_stdout()
    _run(lambda: run(config, read=lambda: _load(config_path, overrides)))


@main.command()
@CONFIG
@SET
def route(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Start the affinity router before many instances; SIGTERM drains and stops it."""
    from npu_gr.core.settings import load
    from npu_gr.router.config import RouterConfig
    from npu_gr.router.run import run

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
        from npu_gr.core.settings import load
        from npu_gr.fleet.balancers import BALANCERS
        from npu_gr.router.config import RouterConfig
        from npu_gr.router.discovery import find

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


@main.command("calibrate")
@CONFIG
@SET
@click.option("--log", type=click.Path(path_type=Path), help="A query log: lengths of histories, time until a rank.")
@click.option("--seconds", default=5.0, show_default=True, help="Of pre-infers.")
@click.option("--out", type=click.Path(path_type=Path), help="The file; CONFIG.calibration.yaml by default.")
def calibrate_command(
    config_path: Path, overrides: tuple[str, ...], log: Path | None, seconds: float, out: Path | None
) -> None:
    """Measure what the trigger needs to know of this idle machine; `serve` reads the file beside its CONFIG."""
    import msgspec
    import torch
    import yaml

    from npu_gr.relay.calibration import beside
    from npu_gr.replay.files import read
    from npu_gr.tools.calibrate import Traffic, calibrate, traffic

    config = _load(config_path, overrides)
    torch.set_num_threads(config.threads)
    found = _run(lambda: calibrate(config, traffic(read(log)) if log else Traffic(None, None), seconds))
    text = yaml.safe_dump(msgspec.to_builtins(found), sort_keys=False)
    path = out or beside(config_path)
    path.write_text(text)
    click.echo(f"{text}in {path}")


@main.command("check-config")
@CONFIG
@SET
def check_config(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Validate a configuration and print it whole, defaults included."""
    import yaml

    from npu_gr.service.config import to_table

    click.echo(yaml.safe_dump(to_table(_load(config_path, overrides)), sort_keys=False), nl=False)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--backend", default=None, help="That must work, as in a configuration; else whatever is there.")
@click.option("--acceptance", is_flag=True, help="Then ranks and generates against the CPU's, and times them.")
def doctor(as_json: bool, backend: str | None, acceptance: bool) -> None:
    """Say what this machine has for our ops, test them, and what to do about what is missing. Exit code 0 or 1."""
    from npu_gr.tools.acceptance import accept, latencies
    from npu_gr.tools.doctor import examine, is_well, table

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
    from npu_gr.metrics.dashboards import write
    from npu_gr.service.config import SLOConfig

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

    from npu_gr.features.interactions import read_interactions, read_item_features
    from npu_gr.model.weights import save
    from npu_gr.tools.demo import training_progress
    from npu_gr.train.rank.train import DEMO, LONG, train_rank

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

    from npu_gr.features.interactions import movielens_100k, read_interactions, read_item_features
    from npu_gr.tools.demo import training_progress
    from npu_gr.train.generate.publish import how_to_serve, prepare, publish
    from npu_gr.train.generate.train import BEAUTY, MOVIELENS, train_generator

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

    from npu_gr.core.errors import ConfigError

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
    from npu_gr.tools.evaluate_service import judge, next_events
    from npu_gr.train.data import to_train_on

    async def work() -> None:
        events = read_interactions(log or movielens_100k())
        known = to_train_on(events.users, events.timestamps, "leave-one-out")
        found = await judge(url, next_events(events, known, users), np.unique(events.items).tolist())
        click.echo(json.dumps(found.as_dict())) if as_json else Console().print(found.table())

    _run(work)


main.add_command(bench)
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

    from npu_gr.train.match.command import run_ablation, run_training
    from npu_gr.train.match.domains import read_domains

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

    from npu_gr.tools.demo import run

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

    from npu_gr.tools.monitor import run

    torch.set_num_threads(threads)
    _run(lambda: run(config_path, folder.resolve(), Console(), port, prometheus_port))
