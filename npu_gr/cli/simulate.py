"""npu-gr simulate [run | fit-users | fit-device] and plan.

Each command imports what it needs when it runs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from npu_gr.cli.options import (
    API_KEY,
    AS_JSON,
    CONFIG,
    FILE,
    SET,
    RunByDefault,
    load_config,
    wide_console,
)
from npu_gr.core.errors import ConfigError

if TYPE_CHECKING:
    import msgspec

    from npu_gr.simulate.config import SimulateConfig
    from npu_gr.simulate.users import TrafficRequest

    S = TypeVar("S", bound=msgspec.Struct)


@click.group(cls=RunByDefault, short_help="Predict a fleet on a virtual clock.")
def simulate() -> None:
    """Predict a fleet on a virtual clock (`run`, the default command), or fit its models."""


@simulate.command("run", short_help="Simulate instances behind the router.")
@click.option(
    "--config",
    "config_path",
    required=True,
    type=FILE,
    help="YAML settings; see configs/simulate.yaml.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one setting, e.g. qps=2000.",
)
@click.option(
    "--log",
    type=FILE,
    help="Simulate the traffic of a query log instead of that of the user model.",
)
@click.option(
    "--signal-lead-ms",
    default=50.0,
    show_default=True,
    help="With --log: time between a signal and its rank, if the log has no signals.",
)
@click.option(
    "--calibration", type=FILE, help="File of `npu-gr calibrate`; replaces the costs in --config."
)
@click.option(
    "--capacity", is_flag=True, help="Find the smallest number of instances that meets the SLO."
)
@click.option("--out", type=FILE, help="Write simulation.json into this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def run_command(
    config_path: Path,
    overrides: tuple[str, ...],
    log: Path | None,
    signal_lead_ms: float,
    calibration: Path | None,
    capacity: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Simulate instances behind a router: cache hits, SLO attainment, wasted prefills, capacity."""
    import msgspec

    from npu_gr.core.settings import load
    from npu_gr.simulate.config import DeviceProfile, SimulateConfig, calibrated
    from npu_gr.simulate.fleet import FleetResult, as_dict, render, search
    from npu_gr.simulate.fleet import simulate as play

    # an overloaded fleet fails often; the result counts it
    logging.getLogger("npu_gr.relay").setLevel(logging.ERROR)
    config = load(config_path, SimulateConfig, overrides)
    if calibration is not None:
        config = calibrated(config, calibration)
    profile = _section(config.device, DeviceProfile)
    traffic = _traffic(config, log, signal_lead_ms)

    def run(instances: int) -> FleetResult:
        return play(msgspec.structs.replace(config, instances=instances), profile, traffic())

    found = search(config, profile, traffic, run) if capacity else None
    runs = [run(config.instances)] if found is None else [one for _, one in found.tried]
    settings = msgspec.to_builtins(msgspec.structs.replace(config, device=profile))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "simulation.json").write_text(
            json.dumps(as_dict(runs, found, settings), indent=2) + "\n"
        )
        click.echo(f"report in {out}", err=True)
    if as_json:
        click.echo(json.dumps(as_dict(runs, found, settings), indent=2))
    else:
        wide_console(150).print(render(runs, found))


def _traffic(
    config: SimulateConfig, log: Path | None, signal_lead_ms: float
) -> Callable[[], Iterator[TrafficRequest]]:
    from npu_gr.replay.files import QueryLog
    from npu_gr.replay.plan import ReplayOptions
    from npu_gr.simulate.config import UsersConfig
    from npu_gr.simulate.fit import requests_of
    from npu_gr.simulate.users import signals_and_ranks, visits

    if log is not None:
        options = ReplayOptions(
            base_url="http://simulated",
            rate=config.qps,
            signal_lead_s=signal_lead_ms * 1e-3,
            seed=config.seed,
        )
        return lambda: iter(requests_of(QueryLog(log), options))
    if config.users is None:
        raise ConfigError("users: is required without --log")
    users = _section(config.users, UsersConfig)
    return lambda: signals_and_ranks(
        visits(users, config.qps, config.duration_s, config.seed), users.candidates
    )


def _section(given: S | str, kind: type[S]) -> S:
    """Return a section, or read it from the file that it names."""
    from npu_gr.core.settings import load

    return load(Path(given), kind) if isinstance(given, str) else given


@simulate.command("fit-users", short_help="Fit the user model to a query log.")
@click.argument("log", type=FILE)
@click.option(
    "--num-users",
    type=click.IntRange(1),
    help="Size of the population; default: the number of users in LOG.",
)
@click.option(
    "--out", required=True, type=FILE, help="Write YAML for the key `users` into this file."
)
def fit_users_command(log: Path, num_users: int | None, out: Path) -> None:
    """Fit the user model to a query LOG: popularity, return times, history lengths and growth."""
    from npu_gr.replay.files import QueryLog
    from npu_gr.simulate.config import write
    from npu_gr.simulate.fit import fit_users

    write(fit_users(QueryLog(log), num_users), out)
    click.echo(out.read_text(), nl=False)


@simulate.command("fit-device", short_help="Fit a device's profile to a running instance.")
@click.argument("log", type=FILE)
@click.option(
    "--url",
    "base_url",
    default="http://127.0.0.1:8080",
    show_default=True,
    help="An instance without other traffic.",
)
@click.option(
    "--rate",
    default=10.0,
    show_default=True,
    help="Ranks a second; so low that ranks do not overlap on the device.",
)
@click.option(
    "--limit",
    default=1000,
    show_default=True,
    type=click.IntRange(60),
    help="Replay at most this number of records.",
)
@click.option(
    "--warmup",
    "warmup_s",
    default=3.0,
    show_default=True,
    help="Leave the first seconds out of the fit.",
)
@click.option(
    "--kv-token-bytes",
    required=True,
    type=click.IntRange(2),
    help="KV bytes per token, all layers.",
)
@click.option(
    "--copy-bytes-per-s",
    required=True,
    type=float,
    help="Bandwidth from DRAM to HBM in bytes/s; the service logs it at its start.",
)
@click.option(
    "--max-history-tokens",
    default=16_384,
    show_default=True,
    help="Longest history that the model reads.",
)
@click.option(
    "--out", required=True, type=FILE, help="Write YAML for the key `device` into this file."
)
@API_KEY
def fit_device_command(
    log: Path,
    out: Path,
    kv_token_bytes: int,
    copy_bytes_per_s: float,
    max_history_tokens: int,
    **played: Any,
) -> None:
    """Replay a query LOG slowly against an instance, and fit its device profile to the answers."""
    import uvloop

    from npu_gr.replay.files import QueryLog
    from npu_gr.replay.plan import ReplayOptions
    from npu_gr.simulate.config import write
    from npu_gr.simulate.fit import fit_device, measure

    options = ReplayOptions(signal_lead_s=0.05, **played)
    ranks, signals_s = uvloop.run(measure(QueryLog(log), options))
    profile = fit_device(
        ranks,
        signals_s,
        kv_token_bytes=kv_token_bytes,
        copy_bytes_per_s=copy_bytes_per_s,
        max_history_tokens=max_history_tokens,
    )
    write(profile, out)
    click.echo(f"fitted to {len(ranks)} ranks; written to {out}")


@click.command(short_help="Size HBM, DRAM and pool for your users.")
@CONFIG
@SET
@click.option("--log", type=FILE, help="Query log: who comes back when, with how long a history.")
@click.option("--users", "users_path", type=FILE, help="Instead: model of `simulate fit-users`.")
@click.option("--qps", type=float, help="Ranks a second of the fleet; default: those of the log.")
@click.option(
    "--duration-s", default=3600.0, show_default=True, help="With --users: time that is drawn."
)
@click.option(
    "--sample-ratio",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="With --log: share of the users that the log has.",
)
@click.option(
    "--signal-lead-ms",
    default=50.0,
    show_default=True,
    help="With --log: time from signal to rank if the log has no signals; 0 = there are none.",
)
@click.option(
    "--hits",
    default=0.9,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share to find of the prefixes that unlimited memory would find.",
)
@click.option(
    "--busy",
    default=0.6,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the time that a device may work.",
)
@AS_JSON
def plan(
    config_path: Path,
    overrides: tuple[str, ...],
    log: Path | None,
    users_path: Path | None,
    qps: float | None,
    duration_s: float,
    sample_ratio: float,
    signal_lead_ms: float,
    hits: float,
    busy: float,
    as_json: bool,
) -> None:
    """Say how much HBM, DRAM and pool a fleet needs, how many instances, and what binds first.

    Needs the result of `npu-gr calibrate` next to the configuration.
    """
    import msgspec

    from npu_gr.core.settings import load
    from npu_gr.model.weights import config_of
    from npu_gr.replay.files import QueryLog
    from npu_gr.replay.plan import ReplayOptions
    from npu_gr.simulate.config import UsersConfig
    from npu_gr.simulate.fit import requests_of
    from npu_gr.simulate.memory import visits_of
    from npu_gr.tools.plan import drawn, layout_of, make_plan, render, settings

    config = load_config(config_path, overrides)
    layout = layout_of(config)
    if log is not None:
        options = ReplayOptions(
            base_url="http://planned",
            signal_lead_s=signal_lead_ms * 1e-3 if signal_lead_ms else None,
        )
        traffic = list(requests_of(QueryLog(log), options))
    elif users_path is not None and qps is not None:
        traffic, sample_ratio = drawn(load(users_path, UsersConfig), qps, duration_s)
    else:
        raise ConfigError("plan: give --log, or --users with --qps")
    shape = config_of(Path(config.checkpoint or ""))
    found = make_plan(
        config,
        layout,
        visits_of(
            traffic,
            config.service.max_history_tokens or shape.max_history_tokens,
            config.service.cut_step_tokens,
            shape.tokens_per_event,
        ),
        rate_per_s=qps,
        sample_ratio=sample_ratio,
        hits=hits,
        busy=busy,
    )
    if as_json:
        shown = {**msgspec.to_builtins(found), "kv_cache": settings(found)}
        click.echo(json.dumps(shown, indent=2))
    else:
        wide_console().print(render(found))
