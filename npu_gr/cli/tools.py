"""npu-gr calibrate, doctor, build-ops, dashboards, evaluate and demo: tools around a service."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import click

from npu_gr.cli.options import (
    API_KEY,
    AS_JSON,
    CONFIG,
    FILE,
    SET,
    THREAD_COUNT,
    load_config,
    run_async,
    wide_console,
)
from npu_gr.core.progress import in_words

PORT = click.IntRange(1, 65535)


@click.command(short_help="Measure this machine for the prefill trigger.")
@CONFIG
@SET
@click.option(
    "--log", type=FILE, help="Query log with typical history lengths and delays of ranks."
)
@click.option("--seconds", default=5.0, show_default=True, help="Time to measure prefills.")
@click.option("--out", type=FILE, help="File to write; default: CONFIG.calibration.yaml.")
def calibrate(
    config_path: Path,
    overrides: tuple[str, ...],
    log: Path | None,
    seconds: float,
    out: Path | None,
) -> None:
    """Measure the costs of prefills and copies on this machine, which should be idle.

    `serve` reads the file if it is in the same folder as its configuration.
    """
    import msgspec
    import torch
    import yaml

    from npu_gr.relay.config import calibration_path
    from npu_gr.replay.files import read
    from npu_gr.tools.calibrate import LogTraffic, traffic
    from npu_gr.tools.calibrate import calibrate as work

    config = load_config(config_path, overrides)
    torch.set_num_threads(config.threads)
    found = run_async(
        lambda: work(config, traffic(read(log)) if log else LogTraffic(None, None), seconds)
    )
    text = yaml.safe_dump(msgspec.to_builtins(found), sort_keys=False)
    path = out or calibration_path(config_path)
    path.write_text(text)
    click.echo(f"{text}written to {path}")


@click.command(short_help="Check which kernels work on this machine.")
@AS_JSON
@click.option("--backend", default=None, help="Backend that must work; default: the one found.")
@click.option(
    "--hstu-library",
    type=FILE,
    help="Also check this library of Huawei's paged attention (setting hstu_library).",
)
@click.option(
    "--acceptance",
    is_flag=True,
    help="Also run and time every operator and whole requests, each in its own process.",
)
@click.option("--quick", is_flag=True, help="With --acceptance: use small shapes.")
@click.option(
    "--timeout-s",
    default=300.0,
    show_default=True,
    help="With --acceptance: time limit of each step.",
)
@click.option(
    "--bundle",
    default="npu_gr-acceptance.tar.gz",
    show_default=True,
    type=FILE,
    help="With --acceptance: archive of the results, for a bug report.",
)
@click.option("--step", hidden=True, help="Run one step of the acceptance in this process.")
@click.option(
    "--security", is_flag=True, help="Instead list who can reach what with this configuration."
)
@click.option(
    "--config",
    "config_path",
    type=FILE,
    help="With --security: configuration of an instance or a router.",
)
@click.option(
    "--accept",
    "accepted",
    multiple=True,
    help="With --security: beginning of an open line that does not count for the exit code.",
)
@SET
def doctor(
    as_json: bool,
    backend: str | None,
    hstu_library: Path | None,
    acceptance: bool,
    quick: bool,
    timeout_s: float,
    bundle: Path,
    step: str | None,
    security: bool,
    config_path: Path | None,
    accepted: tuple[str, ...],
    overrides: tuple[str, ...],
) -> None:
    """Check which kernels work on this machine, and print what to do about the others.

    Exit code: 0 = all work, 1 = some do not.
    """
    if security:
        _doctor_security(as_json, config_path, overrides, accepted)
    from npu_gr.tools import acceptance as steps
    from npu_gr.tools.doctor import examine, is_well

    name: Any = backend or "cpu"
    if step is not None:
        click.echo(json.dumps(steps.run_step(name, step, quick)._asdict()))
        return
    if acceptance:

        def show(step: str) -> None:
            click.echo(f"{step} ...", err=True)

        done = steps.run(name, bundle, timeout_s, quick, show)
        click.echo(f"results in {bundle}", err=True)
    else:
        done = steps.Acceptance(examine(backend, hstu_library), [])  # type: ignore[arg-type]
    click.echo(json.dumps(done.as_dict()) if as_json else done.as_text())
    sys.exit(not is_well(done.findings))


def _doctor_security(
    as_json: bool,
    config_path: Path | None,
    overrides: tuple[str, ...],
    accepted: tuple[str, ...],
) -> NoReturn:
    from npu_gr.tools.check_config import table
    from npu_gr.tools.doctor_security import accept, examine, is_closed

    if config_path is None:
        raise click.UsageError("--security needs --config")
    found = accept(examine(config_path, overrides), accepted)
    if as_json:
        click.echo(
            json.dumps({"ok": is_closed(found), "ways_in": [way._asdict() for way in found]})
        )
    else:
        click.echo(table(found))
    sys.exit(not is_closed(found))


@click.command()
@click.option(
    "--config",
    "config_path",
    type=FILE,
    help="Configuration with the objectives; default: the default objectives.",
)
@click.option(
    "--out", default="dashboards", show_default=True, type=FILE, help="Folder to write to."
)
@click.option(
    "--runbooks",
    default="docs/runbooks",
    show_default=True,
    help="Path or URL of the runbooks, for links.",
)
def dashboards(config_path: Path | None, out: Path, runbooks: str) -> None:
    """Write the Grafana dashboards and the Prometheus rules."""
    from npu_gr.metrics.dashboards import write
    from npu_gr.service.config import SLOConfig

    objectives = (
        SLOConfig() if config_path is None else load_config(config_path, ()).slo
    ).objectives()
    for path in write(out, objectives, runbooks):
        click.echo(path)


@click.command("build-ops", short_help="Build the native kernels of a CPU or an Ascend NPU.")
@click.option(
    "--cpu",
    "device",
    flag_value="cpu",
    help="Build for the CPU with g++ or clang++, if pip install found no compiler.",
)
@click.option("--ascend", "device", flag_value="ascend", help="Build for Ascend; needs CANN.")
@click.option(
    "--soc",
    help="Chip, e.g. ascend910b1 (see npu-smi info); default: environment variable SOC_VERSION.",
)
@click.option(
    "--out", type=FILE, help="Folder of the library; default: where the backend looks for it."
)
@click.option("--force", is_flag=True, help="Build with a CANN that is too old, or unknown.")
def build_ops(device: str | None, soc: str | None, out: Path | None, force: bool) -> None:
    """Build the native kernels from the installed sources, for --cpu or --ascend."""
    from npu_gr.tools.build_ops import build_ascend, build_cpu

    if device is None:
        raise click.UsageError("give --cpu or --ascend")
    click.echo(build_cpu(out) if device == "cpu" else build_ascend(out, soc, force))


@click.command(short_help="Evaluate a running service on users' last events.")
@click.option(
    "--url",
    default="http://127.0.0.1:8080",
    show_default=True,
    help="URL of a service with a cascade.",
)
@click.option(
    "--admin-url",
    default="http://127.0.0.1:8081",
    show_default=True,
    help="Admin URL of the service.",
)
@click.argument("log", required=False, type=FILE)
@click.option(
    "--users", type=click.IntRange(1), help="Use this number of users only, drawn at random."
)
@API_KEY
@AS_JSON
def evaluate(
    url: str,
    admin_url: str,
    log: Path | None,
    users: int | None,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Evaluate a running service: predict the last event of each user in LOG.

    Measures the cascade and each stage alone. The models must have been trained without those
    events (split leave-one-out). Without LOG: MovieLens-100K.
    """
    import numpy as np
    from rich.console import Console

    from npu_gr.dataset import read_log
    from npu_gr.history_store.interactions import movielens_100k
    from npu_gr.tools.evaluate import evaluate
    from npu_gr.train.cascade import next_events
    from npu_gr.train.data import to_train_on

    async def work() -> None:
        events = read_log(log or movielens_100k())
        known = to_train_on(events.users, events.timestamps, "leave-one-out")
        cases = next_events(events, known, users)
        found = await evaluate(
            url, admin_url, cases, np.unique(events.items).tolist(), api_key=api_key
        )
        click.echo(json.dumps(found.as_dict())) if as_json else Console().print(found.table())

    run_async(work)


@click.command(short_help="Train, serve and replay MovieLens-100K, and report.")
@click.option(
    "--folder",
    default=".demo",
    show_default=True,
    type=FILE,
    help="Folder for data, models and reports.",
)
@click.option(
    "--threads", default=2, show_default=True, type=THREAD_COUNT, help="Threads for training."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override an option of train all.",
)
@click.option("--limit", type=click.IntRange(1), help="Replay this number of records only.")
@click.option(
    "--longest",
    type=click.IntRange(1),
    help="Replay only this number of users, those with the longest histories.",
)
@click.option(
    "--quick",
    "is_quick",
    is_flag=True,
    help="Train for a minute, recommend films, and stop there.",
)
@click.option(
    "--monitor",
    "is_monitored",
    is_flag=True,
    help="Replay until Ctrl-C, and run Prometheus and dashboards.",
)
@click.option("--port", default=8080, show_default=True, type=PORT, help="With --monitor.")
@click.option("--admin-port", default=8081, show_default=True, type=PORT, help="With --monitor.")
@click.option(
    "--prometheus-port", default=9090, show_default=True, type=PORT, help="With --monitor."
)
def demo(
    folder: Path,
    threads: int,
    overrides: tuple[str, ...],
    limit: int | None,
    longest: int | None,
    is_quick: bool,
    is_monitored: bool,
    **ports: int,
) -> None:
    """Run prepare, train all and serve on MovieLens-100K, replay its traffic, recommend films."""
    from npu_gr.tools.demo import make, run, run_quick
    from npu_gr.tools.monitor import check_machine, monitor

    if is_quick and is_monitored:
        raise click.UsageError("--quick and --monitor exclude each other")
    if is_monitored:  # fail before the training
        check_machine({f"--{name.replace('_', '-')}": port for name, port in ports.items()})
    console = wide_console()
    folder = folder.resolve() if is_monitored else folder
    began_at = time.monotonic()
    made = make(folder, console, overrides, threads, is_quick=is_quick)
    if is_quick:
        run_async(lambda: run_quick(made, console))
        click.echo(f"\nThe quick demo took {in_words(time.monotonic() - began_at)}.")
    elif is_monitored:
        run_async(lambda: monitor(made, console, **ports))
    else:
        run_async(lambda: run(made, console, limit, longest))
