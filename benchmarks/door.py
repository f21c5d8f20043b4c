"""`python -m benchmarks door`: HTTP goodput under load, with HAProxy and without.

Real server processes with the shipped configuration, and a client in C. Goodput counts the answers
within the rank's SLO, by the client's clock, from the instant the request was due. The arms run
every load in turn; between any two of them runs the reference: 8 clients on the same instance
without admission and proxy. The mean of the reference before and after is the capacity, which sets
the rates.

    behind HAProxy       an instance behind HAProxy with the file of `npu-gr route`
    alone                the instance without a proxy
    the code of before   with --before: an older checkout, its native libraries built

    closed    clients that send the next request immediately, also after a 429
    poisson   1x (.8 of the capacity, the planned load), 3x and 10x
    slow      3x, while other processes take half of the instance's core; compared with the
              reference on that core
    bursts    a quarter of the capacity, in bursts
    fair      a tenant of 20/s while another tenant floods the instance
    pause     the instance's process is stopped; time until it is back to normal
    density   ranks a core at an equal P99, compared with FastAPI and the same model
    fleet     one of three instances killed, frozen, joining, rolled, reloaded (`door_fleet.py`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import door_fleet, door_lines
from benchmarks.door_lines import ALONE, BEFORE, BEHIND, Density
from benchmarks.frame import (
    COUNT,
    FILE,
    SEED,
    SET,
    SHIPPED_CONFIG,
    Line,
    only,
    option,
    tell,
    timed_for,
)
from benchmarks.loadgen import LoadStream, StreamCounts, compiled, drive
from benchmarks.loads import (
    MOST_NEIGHBOURS,
    SLOWED,
    Bodies,
    Load,
    Run,
    loads,
    neighbours,
    on_one_core,
    reference,
    run,
)
from benchmarks.servers import (
    ADMISSION_OFF,
    Server,
    Traffic,
    behind,
    check,
    fastapi,
    has_fastapi,
    hit_ratio,
    instance,
    place_checkpoint,
    proxy,
    running,
    write_bodies,
)
from npu_gr.core.errors import ConfigError
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.service.config import load as load_config

PARTS = ("closed", "poisson", "slow", "bursts", "fair", "pause", "density", "fleet")
ALONE_RUNS = ("closed", "poisson", "pause")
OPTIONS = (
    SHIPPED_CONFIG,
    option("--checkpoint", type=FILE, help="By default an untrained model of the demo's shape."),
    option(
        "--before",
        type=FILE,
        help="A checkout of older code, its native libraries built: one more arm.",
    ),
    timed_for(4.0, "Seconds of each load; 60 for a long run."),
    option(
        "--repeats", default=3, type=COUNT, help="Repetitions of every load; the median counts."
    ),
    only(PARTS),
    SET,
    SEED,
)
BUDGETS_MS = (100.0, 1000.0)  # range of the requests' random budgets
PATIENT_MS = (500.0, 1000.0)  # the same for a fleet: enough for a retry on another instance
TENANTS = 256
CHECKED = 4  # number of bodies whose scores are checked
DENSITY_CLIENTS = (1, 2, 4, 8, 16, 32, 64)
DENSITY_S = 1.5


def lines(
    config: Path,
    checkpoint: Path | None,
    before: Path | None,
    seconds: float,
    repeats: int,
    parts: Sequence[str],
    overrides: tuple[str, ...],
    seed: int,
) -> Iterator[Line]:
    """Start the servers, check their answers, then run load after load.

    Args:
        config: Configuration file of the instances.
        checkpoint: Checkpoint of a ranker; None = an untrained one.
        before: Checkout of older code; None = without this arm.
        seconds: Duration of each load.
        repeats: Number of repetitions of all loads.
        parts: Subset of `PARTS`.
        overrides: Overridden settings of every instance.
        seed: Random seed.

    Raises:
        AssertionError: A server's scores are wrong; nothing was timed.
        ConfigError: A file or a program is missing, or the client cannot be compiled.
        Unavailable: A server does not start.
    """
    compiled()
    goal_s = load_config(config, overrides).slo.objective_s("rank")
    chosen = [load for load in loads(seconds) if load.group in parts]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="npu-gr-door-")))
        checkpoint = place_checkpoint(checkpoint, folder / "checkpoint", seed)
        model = load_checkpoint(checkpoint)
        traffic = Traffic(num_tenants=TENANTS)
        ranks = traffic.bodies(model, "", seed)
        bodies = Bodies(
            write_bodies(folder / "all", ranks, BUDGETS_MS),
            write_bodies(folder / "hot", traffic.bodies(model, "hot", seed + 1, "hot"), BUDGETS_MS),
            write_bodies(
                folder / "small", traffic.bodies(model, "small", seed + 2, "small")[:32], BUDGETS_MS
            ),
        )
        if chosen or "density" in parts:
            with ExitStack() as servers:
                bench = _Bench(
                    servers, folder, config, checkpoint, overrides, before, bodies, goal_s, seed
                )
                bench.check(ranks)
                repeated = [list(bench.run_all(chosen)) for _ in range(repeats)]
                yield from door_lines.of_repeats(repeated)
                if "density" in parts:
                    yield from bench.density(repeats)
        if "fleet" in parts:
            yield from door_fleet.lines(
                checkpoint,
                folder,
                overrides,
                write_bodies(folder / "patient", ranks, PATIENT_MS),
                goal_s,
                seed,
            )


class _Bench:
    """The running servers of all arms."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        config: Path,
        checkpoint: Path,
        overrides: tuple[str, ...],
        before: Path | None,
        bodies: Bodies,
        goal_s: float,
        seed: int,
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._checkpoint = checkpoint
        self._bodies = bodies
        self._goal_s = goal_s
        self._seed = seed
        self._num_runs = 0

        def started(name: str, *more: str) -> Server:
            one = instance(name, checkpoint, folder, (*overrides, *more), config)
            return stack.enter_context(running(name, one))

        self._plain = started("plain", *ADMISSION_OFF)
        inner = behind("behind", checkpoint, folder, overrides, config)
        self._arms = {
            BEHIND: stack.enter_context(running(BEHIND, inner, proxy("proxy", [inner], folder))),
            ALONE: started("alone"),
        }
        if before is not None:
            old = instance("before", checkpoint, folder, root=before.absolute())
            self._arms[BEFORE] = stack.enter_context(running(BEFORE, old))

    def check(self, ranks: Sequence[dict[str, object]]) -> None:
        """Compare all servers' scores with the reference model, and warm their caches."""
        for name, server in {"plain": self._plain, **self._arms}.items():
            check(server, self._checkpoint, ranks[:CHECKED])
            tell(
                "door",
                f"{name}: {hit_ratio(server, ranks, self._seed):.0%} of the prefixes found in HBM",
            )

    def run_all(self, chosen: Sequence[Load]) -> Iterator[Line]:
        """Run every load on its arms in turn."""
        for load in chosen:
            self._num_runs += 1
            names = [name for name in self._arms if name != ALONE or load.group in ALONE_RUNS]
            if self._num_runs % 2:
                names.reverse()
            rows = self._slow(load, names) if load.is_slow else self._in_turn(load, names)
            for name in self._arms:
                if name in rows:
                    yield from door_lines.of_run(name, rows[name])

    def _in_turn(self, load: Load, names: Sequence[str], slowed: float = 1.0) -> dict[str, Run]:
        """Run one load on its arms, with the reference before, between and after them."""
        found = {}
        earlier = self._reference(load)
        for name in names:
            capacity_per_s = earlier.answered / earlier.span_s
            report, normal_s = run(
                self._arms[name],
                load,
                self._bodies,
                capacity_per_s,
                self._goal_s,
                self._seed + self._num_runs,
            )
            later = self._reference(load)
            answered = earlier.answered + later.answered
            found[name] = Run(
                load=load,
                capacity_per_s=answered / (earlier.span_s + later.span_s),
                reference_cpu_s=(earlier.server_cpu_s + later.server_cpu_s) / answered,
                main=report.stream("load"),
                client=report,
                normal_after_s=normal_s,
                slowed=slowed,
            )
            earlier = later
            tell("door", f"{load.name}, {name}: {door_lines.summary(found[name])}")
        return found

    def _slow(self, load: Load, names: Sequence[str]) -> dict[str, Run]:
        """Run one load while other processes take half of the instances' core."""
        servers = [self._plain, *(self._arms[name] for name in names)]
        with on_one_core(*servers) as core:
            if core is None:
                tell("door", f"{load.name}: skipped, this machine has one core")
                return {}
            undisturbed = self._reference(load)
            for count in range(1, MOST_NEIGHBOURS + 1):
                with neighbours(core, count):
                    slowed = self._reference(load).answered / undisturbed.answered
                    if slowed <= SLOWED[1] or count == MOST_NEIGHBOURS:
                        tell(
                            "door",
                            f"{load.name}: {count} neighbours leave {slowed:.2f} of the capacity",
                        )
                        return self._in_turn(load, names, slowed)
        raise AssertionError("the last count returns")

    def _reference(self, load: Load) -> StreamCounts:
        found = reference(self._plain, self._bodies, load.clients, self._goal_s, self._seed)
        if not found.answered:
            raise ConfigError(
                f"bench door: the plain instance answers none of {load.clients} clients"
            )
        return found

    def density(self, repeats: int) -> Iterator[Line]:
        """Measure ranks a core of our arms and of FastAPI, in turn."""
        servers = dict(self._arms)
        if has_fastapi():
            name = door_lines.FASTAPI
            servers[name] = self._stack.enter_context(
                running(name, fastapi(self._checkpoint, self._folder))
            )
        else:
            tell("door", "FastAPI is not installed (pip install 'npu_gr[bench]'): it is skipped")
        found: dict[str, list[Density]] = {name: [] for name in servers}
        for _ in range(repeats):
            for name, server in servers.items():
                best = density(server, self._bodies.all, self._goal_s, self._seed)
                found[name].append(best)
                tell("door", f"ranks a core, {name}: {best}")
        yield from door_lines.of_density(found, self._goal_s)


def density(server: Server, bodies: Path, goal_s: float, seed: int) -> Density:
    """Raise the number of closed clients until the P99 is over the goal.

    Args:
        server: Server without other clients.
        bodies: File with the bodies of the ranks.
        goal_s: Largest P99.
        seed: Random seed of the order of the ranks.

    Returns:
        The best result; 0 ranks = the P99 of a single client is over the goal.
    """
    best = Density(0.0, 0, 0.0, float("inf"))
    for clients in DENSITY_CLIENTS:
        ends_s = 0.3 + DENSITY_S
        stream = LoadStream(
            name="load", mode="closed", bodies=bodies, from_s=0.3, to_s=ends_s, connections=clients
        )
        streams = [stream.moved("warm", 0.0, 0.3), stream]
        counts = drive(server.port, streams, watch=server.pids, seed=seed, goal_s=goal_s).stream(
            "load"
        )
        if (
            counts.answered_ms.p99 > goal_s * 1e3
            or counts.due - counts.answered > 0.01 * counts.due
        ):
            break
        per_core = counts.answered / counts.server_cpu_s
        best = max(
            best,
            Density(per_core, clients, counts.answered / counts.span_s, counts.answered_ms.p99),
        )
    return best
