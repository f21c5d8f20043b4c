"""npu-gr calibrate, doctor, dashboards, bundle, judge, demo and monitor: tools around a service."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from npu_gr.cli.options import API_KEY, AS_JSON, CONFIG, FILE, SET, THREAD_COUNT, load_config, run_async
from npu_gr.core.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from rich.console import Console

DEMO_FOLDER = click.option("--folder", default=".demo", show_default=True, type=FILE, help="For everything it makes.")
DEMO_THREADS = click.option("--threads", default=2, show_default=True, type=THREAD_COUNT, help="For training.")
DEMO_SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override one training option, as train all does."
)
PORT = click.IntRange(1, 65535)


@click.command()
@CONFIG
@SET
@click.option("--log", type=FILE, help="A query log: lengths of histories, and time until a rank.")
@click.option("--seconds", default=5.0, show_default=True, help="Measure pre-infers for so long.")
@click.option("--out", type=FILE, help="The file to write; by default CONFIG.calibration.yaml.")
def calibrate(
    config_path: Path, overrides: tuple[str, ...], log: Path | None, seconds: float, out: Path | None
) -> None:
    """Measure what the trigger must know about this machine, which should be idle.

    `serve` reads the file if it lies beside its CONFIG.
    """
    import msgspec
    import torch
    import yaml

    from npu_gr.relay.calibration import beside
    from npu_gr.replay.files import read
    from npu_gr.tools.calibrate import LogTraffic, traffic
    from npu_gr.tools.calibrate import calibrate as work

    config = load_config(config_path, overrides)
    torch.set_num_threads(config.threads)
    found = run_async(lambda: work(config, traffic(read(log)) if log else LogTraffic(None, None), seconds))
    text = yaml.safe_dump(msgspec.to_builtins(found), sort_keys=False)
    path = out or beside(config_path)
    path.write_text(text)
    click.echo(f"{text}in {path}")


@click.command()
@AS_JSON
@click.option("--backend", default=None, help="The backend that must work; by default whatever is there.")
@click.option("--hstu-library", type=FILE, help="Huawei's paged attention, to check it too: the setting of that name.")
@click.option("--acceptance", is_flag=True, help="Run every operator and whole requests too, a process each, and time.")
@click.option("--quick", is_flag=True, help="For --acceptance: small shapes in place of a service's.")
@click.option("--timeout-s", default=300.0, show_default=True, help="For --acceptance: of a step, which is then named.")
@click.option("--msprof", is_flag=True, help="For --acceptance: profile each operator with CANN's msprof.")
@click.option("--bundle", default="npu_gr-acceptance.tar.gz", show_default=True, type=FILE, help="What to send us.")
@click.option("--step", hidden=True, help="Run one step of the acceptance in this process.")
@click.option("--security", is_flag=True, help="Say instead what CONFIG leaves open, and to whom.")
@click.option("--config", "config_path", type=FILE, help="For --security: of an instance, or of a router.")
@SET
def doctor(
    as_json: bool,
    backend: str | None,
    hstu_library: Path | None,
    acceptance: bool,
    quick: bool,
    timeout_s: float,
    msprof: bool,
    bundle: Path,
    step: str | None,
    security: bool,
    config_path: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Say which of our ops work on this machine, and what to do about those that do not. Exit code 0 or 1."""
    if security:
        _doctor_security(as_json, config_path, overrides)
    from npu_gr.tools import acceptance_run, acceptance_steps
    from npu_gr.tools.doctor import examine, is_well

    name: Any = backend or "cpu"
    if step is not None:
        click.echo(json.dumps(acceptance_steps.run(name, step, quick)._asdict()))
        return
    if acceptance:

        def tell(begun: str) -> None:
            click.echo(f"{begun} ...", err=True)

        done = acceptance_run.run(name, bundle, timeout_s, quick, msprof, tell)
        click.echo(f"in {bundle}", err=True)
    else:
        done = acceptance_run.Acceptance(examine(backend, hstu_library), [])  # type: ignore[arg-type]
    click.echo(json.dumps(done.as_dict()) if as_json else done.as_text())
    sys.exit(not is_well(done.findings))


def _doctor_security(as_json: bool, config_path: Path | None, overrides: tuple[str, ...]) -> NoReturn:
    from npu_gr.tools.doctor_security import examine, is_closed
    from npu_gr.tools.findings import table

    if config_path is None:
        raise click.UsageError("--security needs --config")
    found = examine(config_path, overrides)
    if as_json:
        click.echo(json.dumps({"ok": is_closed(found), "ways_in": [way._asdict() for way in found]}))
    else:
        click.echo(table(found))
    sys.exit(not is_closed(found))


@click.command()
@click.option("--config", "config_path", type=FILE, help="Take its objectives; by default the defaults.")
@click.option("--out", default="dashboards", show_default=True, type=FILE, help="Folder to write into.")
@click.option("--runbooks", default="docs/runbooks", show_default=True, help="Path or URL of the runbooks' pages.")
def dashboards(config_path: Path | None, out: Path, runbooks: str) -> None:
    """Write the Grafana dashboards and the Prometheus rules."""
    from npu_gr.metrics.dashboards import write
    from npu_gr.service.config import SLOConfig

    objectives = (SLOConfig() if config_path is None else load_config(config_path, ()).slo).objectives()
    for path in write(out, objectives, runbooks):
        click.echo(path)


@click.command()
@click.option("--url", default="http://127.0.0.1:8081", show_default=True, help="Of an instance's or a router's admin.")
@click.option("--out", default="npu_gr-bundle.tar.gz", show_default=True, type=FILE, help="File to write.")
@API_KEY
def bundle(url: str, out: Path, api_key: str | None) -> None:
    """Fetch what a report of a fault needs: configuration, versions, metrics, stacks, newest requests and log lines."""
    import shutil
    import urllib.request
    from urllib.error import URLError

    from npu_gr.access.calling import calling_context, calling_headers

    headers = calling_headers(api_key)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {url}: expected http://host:port or https://host")
    asked = urllib.request.Request(f"{url.rstrip('/')}/debug/bundle", headers=headers)  # noqa: S310  (checked above)
    part = out.with_name(f"{out.name}.part")
    try:
        opened = urllib.request.urlopen(asked, timeout=60, context=calling_context())  # noqa: S310  # nosec B310
        with opened as answer, part.open("wb") as file:
            shutil.copyfileobj(answer, file)
        part.replace(out)
    except (URLError, OSError, ValueError) as error:
        part.unlink(missing_ok=True)
        raise Unavailable(f"no bundle from {url}: {error}") from error
    click.echo(out)


@click.command()
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="Of a service with a cascade.")
@click.option("--admin-url", default="http://127.0.0.1:8081", show_default=True, help="Its admin address.")
@click.argument("log", required=False, type=FILE)
@click.option("--users", type=click.IntRange(1), help="Ask for so many users only, drawn at random.")
@click.option("--choose", is_flag=True, help="Instead try every set of sources in every order, and name the best.")
@click.option("--write", "written", type=FILE, help="With --choose: put it into this configuration.")
@API_KEY
@AS_JSON
def judge(
    url: str,
    admin_url: str,
    log: Path | None,
    users: int | None,
    choose: bool,
    written: Path | None,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Evaluate a running service: ask for the last event of each user of LOG, of the cascade and of each stage alone.

    Its models must not have seen those events (split leave-one-out). Without LOG: MovieLens-100K. With --choose, half
    of the users choose the sources and the order, and the others judge them.
    """
    import numpy as np
    from rich.console import Console

    from npu_gr.dataset import read_log
    from npu_gr.features.interactions import movielens_100k
    from npu_gr.tools.choose_cascade import choose_over_http, write
    from npu_gr.tools.evaluate_service import evaluate
    from npu_gr.train.data import to_train_on
    from npu_gr.train.next_event import next_events

    async def work() -> None:
        events = read_log(log or movielens_100k())
        known = to_train_on(events.users, events.timestamps, "leave-one-out")
        cases = next_events(events, known, users)
        if choose:
            choice = await choose_over_http(url, admin_url, cases, api_key=api_key)
            click.echo(json.dumps(choice.as_dict()) if as_json else "\n".join(choice.lines()))
            if written is not None:
                click.echo(write(choice, written), err=as_json)
            return
        found = await evaluate(url, admin_url, cases, np.unique(events.items).tolist(), api_key=api_key)
        click.echo(json.dumps(found.as_dict())) if as_json else Console().print(found.table())

    if written is not None and not choose:
        raise click.UsageError("--write goes with --choose")
    run_async(work)


@click.command()
@DEMO_FOLDER
@DEMO_THREADS
@DEMO_SET
@click.option("--limit", type=click.IntRange(1), help="Replay only so many records.")
@click.option("--longest", type=click.IntRange(1), help="Replay only so many users, those with the longest histories.")
def demo(folder: Path, threads: int, overrides: tuple[str, ...], limit: int | None, longest: int | None) -> None:
    """Run prepare, train all and serve on MovieLens-100K, replay the users' held-out traffic, and recommend films."""
    from npu_gr.tools.demo import make, run

    console = _wide_console()
    made = make(folder, console, overrides, threads)
    run_async(lambda: run(made, console, limit, longest))


@click.command()
@DEMO_FOLDER
@click.option("--port", default=8080, show_default=True, type=PORT)
@click.option("--admin-port", default=8081, show_default=True, type=PORT)
@click.option("--prometheus-port", default=9090, show_default=True, type=PORT)
@DEMO_THREADS
@DEMO_SET
def monitor(
    folder: Path, port: int, admin_port: int, prometheus_port: int, threads: int, overrides: tuple[str, ...]
) -> None:
    """Serve the demo's models under replay until Ctrl-C, beside a Prometheus and with dashboards to open."""
    from npu_gr.tools.demo import make
    from npu_gr.tools.monitor import check_machine, run

    # before anything is trained
    check_machine({"--port": port, "--admin-port": admin_port, "--prometheus-port": prometheus_port})
    console = _wide_console()
    made = make(folder.resolve(), console, overrides, threads)
    run_async(lambda: run(made, console, port, admin_port, prometheus_port))


def _wide_console() -> Console:
    """A console for tables, which are not squeezed where the width is unknown."""
    from rich.console import Console

    return Console(width=max(110, Console().width))
