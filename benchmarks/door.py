"""`python -m benchmarks door`: what an instance answers in time over HTTP, under more load than it sustains.

A real server process with the configuration that ships, and a client in C. In time = within the rank's objective, by
the client's clock, from the instant the request was due. Every load runs in turn on the server as configured and on the
same server with admission off, and on one more for each ablation; a reference of 8 closed clients stands around every
load, in the same process. "Best" is the better of that reference and of admission off under the same load. On a machine
that others share a load says little once: `repeats` runs all of them in turn, again and again.

    closed loop   clients that send again at once, also after a 429
    bursts        a quarter of the capacity, in clumps
    poisson       1, 3 and 10 times the capacity; the worst second beside the mean; what refusals take: `door_costs.py`
    pause         the process is stopped for 110 ms, or until all callers have given up; when is it normal again
    fair          a tenant of 20/s beside another's hot clients
    flood         a tenant that floods signals, beside one that signals and ranks: `door_flood.py`
    density       ranks a core at an equal P99, beside FastAPI and LitServe with the same model: `door_costs.py`

Source of the targets: goodput under overload over its peak, as in overload control of interactive services.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import door_lines
from benchmarks.door_client import LoadStream, compiled, drive
from benchmarks.door_costs import Density, RefusalCost, density, refusal_cost
from benchmarks.door_flood import OVERRIDES as FLOODED
from benchmarks.door_flood import run_flood
from benchmarks.door_loads import REFERENCE_CLIENTS, LoadRun, loads, run
from benchmarks.door_servers import (
    ADMISSION_OFF,
    PEERS,
    Server,
    Traffic,
    check,
    hit_ratio,
    missing_peers,
    our_server,
    peer_server,
    place_checkpoint,
    write_bodies,
)
from benchmarks.line import Line
from npu_gr.core.errors import ConfigError
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.service.config import load as load_config

PARTS = ("closed", "bursts", "poisson", "pause", "fair", "flood", "density")
ON = "as configured"
OFF = "admission off"
MOST_LOAD_S = 8.0  # of loads that are not Poisson, also in the long form
CAPACITY_S = 1.5
DENSITY_S = 1.5
CHECKED = 4  # bodies
LEAST_FLOOD_S = 10.0  # so that a P99 has some ranks behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorOptions:
    """What `python -m benchmarks door` is asked for."""

    config: Path  # as it ships
    checkpoint: Path | None  # None: an untrained model is made
    num_layers: int = 2  # of a model that is made
    max_history_tokens: int = 256  # of a model that is made
    traffic: Traffic = field(default_factory=Traffic)
    overrides: tuple[str, ...] = ()  # of every server of ours
    ablations: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name -> overrides of one more server
    parts: Sequence[str] = PARTS
    with_peers: bool = True
    repeats: int = 1  # times that every load runs; what counts is the one with the median ratio
    seconds: float = 4.0  # of Poisson arrivals; of other loads at most `MOST_LOAD_S`
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bodies:
    ranks: Path
    hot: Path
    small: Path


def lines(options: DoorOptions) -> Iterator[Line]:
    """Start the servers, check their answers, then run load after load.

    Raises:
        AssertionError: a server's scores are wrong; nothing was timed.
        ConfigError: a file is missing, or the client cannot be compiled.
        Unavailable: a server does not start.
    """
    compiled()
    goal_s = load_config(options.config, options.overrides).slo.objective_s("rank")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="npu-gr-door-")))
        shape = options.num_layers, options.max_history_tokens, options.seed
        checkpoint = place_checkpoint(options.checkpoint, folder / "checkpoint", *shape)
        model = load_checkpoint(checkpoint)
        traffic = options.traffic
        ranks = traffic.bodies(model, "", options.seed)
        bodies = _Bodies(
            ranks=write_bodies(folder / "ranks", ranks),
            hot=write_bodies(folder / "hot", traffic.bodies(model, "hot", options.seed + 1)),
            small=write_bodies(folder / "small", traffic.bodies(model, "small", options.seed + 2)[:32]),
        )
        if "flood" in options.parts:
            with our_server("flood", options.config, checkpoint, folder, (*options.overrides, *FLOODED)) as server:
                yield from door_lines.of_flood(
                    *run_flood(server, model, traffic, folder, max(options.seconds, LEAST_FLOOD_S), options.seed)
                )
        if set(options.parts) == {"flood"}:
            return
        arms = {ON: (), OFF: ADMISSION_OFF, **options.ablations}
        servers = {}
        for name, overrides in arms.items():
            context = our_server(name, options.config, checkpoint, folder, (*options.overrides, *overrides))
            servers[name] = stack.enter_context(context)
            check(servers[name], checkpoint, ranks[:CHECKED])
        hits = hit_ratio(servers[ON], ranks, options.seed)
        capacity_per_s = max(_capacity(server, bodies.ranks) for server in servers.values())
        _tell(f"capacity {capacity_per_s:.0f} ranks/s with {REFERENCE_CLIENTS} clients, {hits:.0%} found in HBM")
        case = f"L={traffic.history_tokens} M={traffic.num_candidates} hits {hits:.0%}"
        repeats = [_runs(options, servers, bodies, capacity_per_s, goal_s) for _ in range(options.repeats)]
        names = list(options.ablations)
        yield from door_lines.of_repeats([list(door_lines.of_loads(one, case, (ON, OFF), names)) for one in repeats])
        if "poisson" in options.parts:
            yield door_lines.of_refusals(_refusal_cost(repeats), [found[ON] for runs in repeats for found in runs])
        if "density" in options.parts:
            with ExitStack() as peers:
                yield from _density(options, servers, checkpoint, folder, bodies.ranks, ranks[:CHECKED], goal_s, peers)


def parse_ablations(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read `NAME:KEY=VALUE KEY=VALUE` as overrides by name.

    Raises:
        ConfigError: a text has no name or no setting.
    """
    found = {}
    for text in texts:
        name, _, settings = text.partition(":")
        overrides = tuple(settings.split())
        if not name or not overrides or not all("=" in setting for setting in overrides):
            raise ConfigError(f"--ablate: expected NAME:KEY=VALUE ..., got {text!r}")
        found[name] = overrides
    return found


def _capacity(server: Server, bodies: Path) -> float:
    stream = LoadStream(
        name="load", mode="closed", bodies=bodies, from_s=0.5, to_s=0.5 + CAPACITY_S, connections=REFERENCE_CLIENTS
    )
    counts = drive(server.port, [stream.moved("warm", 0.0, 0.5), stream]).stream("load")
    answered = counts.in_time + counts.late
    if not answered:
        raise ConfigError(f"bench door: {server.name} answers none of {REFERENCE_CLIENTS} clients within a second")
    return answered / counts.span_s


def _runs(
    options: DoorOptions, servers: dict[str, Server], bodies: _Bodies, capacity_per_s: float, goal_s: float
) -> list[dict[str, LoadRun]]:
    """Every load on every server of ours: one load after the other, its servers in turn."""
    seconds = min(options.seconds, MOST_LOAD_S)
    found = []
    for number, load in enumerate(
        loads(bodies.ranks, bodies.hot, bodies.small, capacity_per_s, seconds, options.seconds)
    ):
        if load.group not in options.parts:
            continue
        order = list(servers.items())
        if number % 2:
            order.reverse()
        rows = {}
        for name, server in order:
            rows[name] = run(server, load, bodies.ranks, goal_s, options.seed)
            _tell(f"{load.name}, {name}: {rows[name].main.good_per_s:.0f}/s in time")
        found.append(rows)
    return found


def _refusal_cost(repeats: Sequence[list[dict[str, LoadRun]]]) -> RefusalCost | None:
    """The median of what a refusal took between the last two open loops of each time."""
    open_loops = [[found[ON] for found in runs if found[ON].load.group == "poisson"] for runs in repeats]
    costs = [cost for *_, less, more in open_loops if (cost := refusal_cost(less, more)) is not None]
    return sorted(costs)[(len(costs) - 1) // 2] if costs else None


def _density(
    options: DoorOptions,
    servers: dict[str, Server],
    checkpoint: Path,
    folder: Path,
    bodies: Path,
    checked: Sequence[dict[str, object]],
    goal_s: float,
    stack: ExitStack,
) -> Iterator[Line]:
    """Ranks a core of ours and of the peers.

    Args:
        options: as asked.
        servers: ours.
        checkpoint, folder: of the peers, and for their logs.
        bodies: of the ranks; `checked` are some of them.
        checked: whose scores are compared first.
        goal_s: of the P99.
        stack: ends the peers.
    """
    all_servers = {name: servers[name] for name in (ON, OFF)}
    absent = missing_peers() if options.with_peers else list(PEERS)
    for name in PEERS:
        if name in absent:
            _tell(f"{name} is not installed (pip install 'npu_gr[bench]') or was left out: no line of it")
            continue
        all_servers[name] = stack.enter_context(peer_server(name, checkpoint, folder))
        check(all_servers[name], checkpoint, checked)
    found: dict[str, Density | None] = {}
    for name, server in all_servers.items():
        found[name] = density(server, bodies, DENSITY_S, goal_s, options.seed)
        _tell(f"ranks a core, {name}: {found[name]}")
    yield from door_lines.of_density(found, ON, [name for name in PEERS if name in all_servers], goal_s)


def _tell(text: str) -> None:
    """Say on standard error how far the bench is: it runs for minutes."""
    sys.stderr.write(f"bench door: {text}\n")
