"""npu-gr calibrate, doctor, build-ops, dashboards, evaluate and demo: tools around a service."""

from __future__ import annotations

import json
import sys
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

PORT = click.IntRange(1, 65535)


@click.command(short_help="Measure what the trigger must know of this machine.")
@CONFIG
@SET
@click.option("--log", type=FILE, help="A query log: lengths of histories, and time until a rank.")
@click.option("--seconds", default=5.0, show_default=True, help="Measure pre-infers for so long.")
@click.option("--out", type=FILE, help="The file to write; by default CONFIG.calibration.yaml.")
def calibrate(
    config_path: Path,
    overrides: tuple[str, ...],
    log: Path | None,
    seconds: float,
    out: Path | None,
) -> None:
    """Measure what the trigger must know about this machine, which should be idle.

    `serve` reads the file if it lies beside its CONFIG.
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
    click.echo(f"{text}in {path}")


@click.command(short_help="Say which of our ops work on this machine.")
@AS_JSON
@click.option(
    "--backend", default=None, help="The backend that must work; by default whatever is there."
)
@click.option(
    "--hstu-library",
    type=FILE,
    help="Huawei's paged attention, to check it too: the setting of that name.",
)
@click.option(
    "--acceptance",
    is_flag=True,
    help="Run every operator and whole requests too, a process each, and time.",
)
@click.option(
    "--quick", is_flag=True, help="For --acceptance: small shapes in place of a service's."
)
@click.option(
    "--timeout-s",
    default=300.0,
    show_default=True,
    help="For --acceptance: of a step, which is then named.",
)
@click.option(
    "--bundle",
    default="npu_gr-acceptance.tar.gz",
    show_default=True,
    type=FILE,
    help="What to send us.",
)
@click.option("--step", hidden=True, help="Run one step of the acceptance in this process.")
@click.option("--security", is_flag=True, help="Say instead what CONFIG leaves open, and to whom.")
@click.option(
    "--config", "config_path", type=FILE, help="For --security: of an instance, or of a router."
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
    overrides: tuple[str, ...],
) -> None:
    """Say which of our ops work on this machine, and what to do about those that do not.

    Exit code 0 or 1.
    """
    if security:
        _doctor_security(as_json, config_path, overrides)
    from npu_gr.tools import acceptance as steps
    from npu_gr.tools.doctor import examine, is_well

    name: Any = backend or "cpu"
    if step is not None:
        click.echo(json.dumps(steps.run_step(name, step, quick)._asdict()))
        return
    if acceptance:

        def tell(begun: str) -> None:
            click.echo(f"{begun} ...", err=True)

        done = steps.run(name, bundle, timeout_s, quick, tell)
        click.echo(f"in {bundle}", err=True)
    else:
        done = steps.Acceptance(examine(backend, hstu_library), [])  # type: ignore[arg-type]
    click.echo(json.dumps(done.as_dict()) if as_json else done.as_text())
    sys.exit(not is_well(done.findings))


def _doctor_security(
    as_json: bool, config_path: Path | None, overrides: tuple[str, ...]
) -> NoReturn:
    from npu_gr.tools.check_config import table
    from npu_gr.tools.doctor_security import examine, is_closed

    if config_path is None:
        raise click.UsageError("--security needs --config")
    found = examine(config_path, overrides)
    if as_json:
        click.echo(
            json.dumps({"ok": is_closed(found), "ways_in": [way._asdict() for way in found]})
        )
    else:
        click.echo(table(found))
    sys.exit(not is_closed(found))


@click.command()
@click.option(
    "--config", "config_path", type=FILE, help="Take its objectives; by default the defaults."
)
@click.option(
    "--out", default="dashboards", show_default=True, type=FILE, help="Folder to write into."
)
@click.option(
    "--runbooks",
    default="docs/runbooks",
    show_default=True,
    help="Path or URL of the runbooks' pages.",
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
    help="With g++ or clang++, where pip install found no compiler.",
)
@click.option("--ascend", "device", flag_value="ascend", help="On a machine with CANN.")
@click.option(
    "--soc", help="The chip, e.g. ascend910b1; also from SOC_VERSION. npu-smi info names it."
)
@click.option(
    "--out", type=FILE, help="Folder of the library; by default where the backend looks for it."
)
def build_ops(device: str | None, soc: str | None, out: Path | None) -> None:
    """Build the kernels from the sources that ship with this installation. --cpu or --ascend says for what."""
    from npu_gr.tools.build_ops import build_ascend, build_cpu

    if device is None:
        raise click.UsageError("say --cpu or --ascend")
    click.echo(build_cpu(out) if device == "cpu" else build_ascend(out, soc))


@click.command(short_help="Evaluate a running service on users' last events.")
@click.option(
    "--url", default="http://127.0.0.1:8080", show_default=True, help="Of a service with a cascade."
)
@click.option(
    "--admin-url", default="http://127.0.0.1:8081", show_default=True, help="Its admin address."
)
@click.argument("log", required=False, type=FILE)
@click.option(
    "--users", type=click.IntRange(1), help="Ask for so many users only, drawn at random."
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
    """Evaluate a running service: ask for the last event of each user of LOG, of the cascade and of each stage alone.

    Its models must not have seen those events (split leave-one-out). Without LOG: MovieLens-100K.
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
    "--folder", default=".demo", show_default=True, type=FILE, help="For everything it makes."
)
@click.option("--threads", default=2, show_default=True, type=THREAD_COUNT, help="For training.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one option, as train all does.",
)
@click.option("--limit", type=click.IntRange(1), help="Replay only so many records.")
@click.option(
    "--longest",
    type=click.IntRange(1),
    help="Replay only so many users, those with the longest histories.",
)
@click.option(
    "--monitor",
    "is_monitored",
    is_flag=True,
    help="Replay until Ctrl-C, beside Prometheus and dashboards.",
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
    is_monitored: bool,
    **ports: int,
) -> None:
    """Run prepare, train all and serve on MovieLens-100K, replay the users' held-out traffic, and recommend films."""
    from npu_gr.tools.demo import make, run
    from npu_gr.tools.monitor import check_machine, monitor

    if is_monitored:  # before anything is trained
        check_machine({f"--{name.replace('_', '-')}": port for name, port in ports.items()})
    console = wide_console()
    made = make(folder.resolve() if is_monitored else folder, console, overrides, threads)
    if is_monitored:
        run_async(lambda: monitor(made, console, **ports))
    else:
        run_async(lambda: run(made, console, limit, longest))
