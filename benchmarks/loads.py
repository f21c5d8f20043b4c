"""The loads of `python -m benchmarks door`, and the run of one of them.

    warm up | 8 clients | the load | 8 clients again
    .4 s      .6 s        seconds    1.5 s

A run is one run of the client against one server. The clients after the load start when it ends,
and show when the server is back to normal. All loads come from many tenants, and every request has
its own time budget.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.loadgen import BIN_S, ClientReport, LoadStream, Pause, StreamCounts, drive
from benchmarks.servers import Server

CLIENTS = 8  # clients of the reference
WARM_S = 0.4
BEFORE_S = 0.6
AFTER_S = 1.5
REFERENCE_S = 0.8
POOL = 512  # connections of an open loop

CLOSED = (4, 16, 64, 256)  # clients
BURSTS = (8, 16, 24)  # ranks at once
BURST_SHARE = 0.25  # share of the capacity
PLANNED = 0.8  # share of the capacity that is called 1x: the planned load
SLOWED = (0.4, 0.6)  # share of a core that remains next to a busy process
MOST_NEIGHBOURS = 4
HOT_CLIENTS = 16
SMALL_PER_S = 20.0
WINDOW = 4  # number of usual bins after which a server is back to normal
LEVEL = 0.7  # share of the usual answers within the SLO; allows for noise of a shared machine
SHARE = 0.9  # relative to the usual share within the SLO


class Bodies(NamedTuple):
    """Files of requests."""

    all: Path  # many tenants
    hot: Path  # one tenant
    small: Path  # another tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load of `size` clients (closed), ranks at once (bursts) or capacities (poisson)."""

    name: str
    group: str  # one of `door.PARTS`
    mode: str  # closed | bursts | poisson
    size: float
    seconds: float
    pause_s: float = 0.0  # pause of the instance, in the middle
    is_slow: bool = False  # the instance's core is slowed to a half

    @property
    def clients(self) -> int:
        """Number of clients of the reference; not more than the load has."""
        return min(CLIENTS, int(self.size)) if self.mode == "closed" else CLIENTS

    def streams(self, bodies: Bodies, capacity_per_s: float) -> list[LoadStream]:
        """Return the client's streams; times begin with the load.

        Args:
            bodies: Files with the bodies of the ranks.
            capacity_per_s: Ranks a second of the reference.
        """
        mode = {
            "name": "load",
            "bodies": bodies.all,
            "to_s": self.seconds,
            "mode": self.mode,
            "connections": POOL,
        }
        match self.mode:
            case "closed":
                mode |= {"connections": int(self.size)}
            case "poisson":
                mode |= {"rate_per_s": self.size * capacity_per_s}
            case _:
                every_s = self.size / (BURST_SHARE * capacity_per_s)
                mode |= {"burst_size": int(self.size), "every_s": every_s}
        if self.group != "fair":
            return [LoadStream(**mode)]  # type: ignore[arg-type]
        small = LoadStream(
            name="load",
            mode="bursts",
            bodies=bodies.small,
            to_s=self.seconds,
            connections=16,
            burst_size=1,
            every_s=1 / SMALL_PER_S,
        )
        hot = LoadStream(
            name="hot", mode="closed", bodies=bodies.hot, to_s=self.seconds, connections=HOT_CLIENTS
        )
        return [small, hot]


def loads(seconds: float) -> list[Load]:
    """List all loads.

    Args:
        seconds: Duration of each load.
    """

    def load(name: str, group: str, mode: str, size: float, **more: float | bool) -> Load:
        return Load(name=name, group=group, mode=mode, size=size, **{"seconds": seconds, **more})  # type: ignore[arg-type]

    return [
        load("1x", "poisson", "poisson", PLANNED),
        *(
            load(f"{count} clients that retry immediately", "closed", "closed", count)
            for count in CLOSED
        ),
        load("3x", "poisson", "poisson", 3.0),
        load("10x", "poisson", "poisson", 10.0),
        load("3x on half a core", "slow", "poisson", 3.0, is_slow=True),
        *(load(f"bursts of {count}", "bursts", "bursts", count) for count in BURSTS),
        load(
            f"20/s of a tenant next to {HOT_CLIENTS} hot clients",
            "fair",
            "closed",
            2.0,
            seconds=2 * seconds,
        ),
        load("pause of .1 s, 4 clients", "pause", "closed", 4, pause_s=0.1),
        load(
            "pause of 1 s at 1x",
            "pause",
            "poisson",
            PLANNED,
            pause_s=1.0,
            seconds=max(seconds, 3.0) + 1.0,
        ),
    ]


class Usual(NamedTuple):
    """The results of some clients under normal conditions."""

    good: float  # answers within the SLO, per bin
    share: float  # share of requests answered within the SLO


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load on one server."""

    load: Load
    capacity_per_s: float  # mean of the reference before and after
    reference_cpu_s: float  # CPU time of a rank of the reference
    main: StreamCounts
    client: ClientReport
    normal_after_s: float  # from the end of the pause, or of the load; inf = never
    slowed: float = 1.0  # capacity of the slowed core relative to the whole core

    @property
    def ratio(self) -> float:
        """Answers within the SLO, relative to the capacity."""
        return self.main.good_per_s / self.capacity_per_s

    @property
    def late_share(self) -> float:
        """Share of late answers."""
        return self.main.late / max(self.main.answered, 1)

    @property
    def cpu_s(self) -> float:
        """CPU time of a rank, of all of the server's processes."""
        answered = sum(one.answered for one in self.client.streams if one.name in ("load", "hot"))
        return self.main.server_cpu_s / max(answered, 1)

    @property
    def worst_second(self) -> float:
        """Answers within the SLO in the worst second of the load, relative to the mean second."""
        per_second = round(1 / BIN_S)
        bins = [row[0] for row in self.main.bins[: round(self.load.seconds / BIN_S)]]
        sums = [
            sum(bins[at : at + per_second])
            for at in range(0, len(bins) - per_second + 1, per_second)
        ]
        mean = sum(sums) / len(sums) if sums else 0.0
        return min(sums) / mean if mean else 0.0


def reference(
    server: Server, bodies: Bodies, clients: int, goal_s: float, seed: int
) -> StreamCounts:
    """Run closed clients on an otherwise idle server.

    Args:
        server: Server without admission.
        bodies: Files with the bodies of the ranks.
        clients: Number of clients.
        goal_s: SLO of an answer.
        seed: Random seed of the order of the ranks.
    """
    ends_s = WARM_S + REFERENCE_S
    stream = LoadStream(
        name="load",
        mode="closed",
        bodies=bodies.all,
        from_s=WARM_S,
        to_s=ends_s,
        connections=clients,
    )
    streams = [stream.moved("warm", 0.0, WARM_S), stream]
    return drive(server.port, streams, watch=server.pids, seed=seed, goal_s=goal_s).stream("load")


def run(
    server: Server, load: Load, bodies: Bodies, capacity_per_s: float, goal_s: float, seed: int
) -> tuple[ClientReport, float]:
    """Run one load, with some closed clients before and after.

    Args:
        server: Server without other clients.
        load: The load.
        bodies: Files with the bodies of the ranks.
        capacity_per_s: Capacity, which sets the rates.
        goal_s: SLO of an answer.
        seed: Random seed of the arrivals.

    Returns:
        The client's report, and the seconds from the end of the pause, or of the load, until the
        server was back to normal.
    """
    begins_s = WARM_S + BEFORE_S
    ends_s = begins_s + load.seconds
    clients = LoadStream(
        name="before",
        mode="closed",
        bodies=bodies.all,
        from_s=WARM_S,
        to_s=begins_s,
        connections=load.clients,
    )
    streams = [
        clients.moved("warm", 0.0, WARM_S),
        clients,
        *(one.moved(one.name, begins_s, ends_s) for one in load.streams(bodies, capacity_per_s)),
        clients.moved("after", ends_s, ends_s + AFTER_S),
    ]
    pause_at_s = (load.seconds - load.pause_s) / 2
    pause = None
    if load.pause_s:
        pause = Pause(pid=server.pids[0], at_s=begins_s + pause_at_s, for_s=load.pause_s)
    report = drive(server.port, streams, watch=server.pids, pause=pause, seed=seed, goal_s=goal_s)
    usual, bins = report.stream("before").bins, report.stream("after").bins
    if load.pause_s:
        main = report.stream("load").bins
        usual = main[: int(pause_at_s / BIN_S)]
        bins = main[round((pause_at_s + load.pause_s) / BIN_S) :]
    return report, normal_at_s(bins, usual_of(usual))


def usual_of(bins: Sequence[Sequence[int]]) -> Usual:
    """Return the mean of bins, except empty ones: the last bins of a stream may be empty."""
    good = sum(row[0] for row in bins)
    return Usual(good / max(sum(any(row) for row in bins), 1), good / max(sum(map(sum, bins)), 1))


def normal_at_s(bins: Sequence[Sequence[int]], usual: Usual) -> float:
    """Find when a server is back to normal: the first of `WINDOW` usual bins.

    Args:
        bins: Tables of 50 ms each; the first column is the answers within the SLO.
        usual: Results of the same clients under normal conditions.

    Returns:
        Seconds from the first bin; inf = never.
    """
    if not usual.good:
        return float("inf")
    for at in range(len(bins) - WINDOW + 1):
        window = bins[at : at + WINDOW]
        good = sum(row[0] for row in window)
        if (
            window[0][0]
            and good >= LEVEL * usual.good * WINDOW
            and good >= SHARE * usual.share * sum(map(sum, window))
        ):
            return at * BIN_S
    return float("inf")


# ---- a core of half the speed


@contextmanager
def on_one_core(*servers: Server) -> Iterator[int | None]:
    """Pin instances to one core, and the client and all proxies to the others.

    Yields the core; None = the machine has only one.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield None
        return
    core, others = cores[0], cores[1:]
    try:
        os.sched_setaffinity(0, others)
        for server in servers:
            for number, process in enumerate(server.processes):
                pin(process.pids, [core] if number == 0 else others)
        yield core
    finally:
        os.sched_setaffinity(0, cores)
        for server in servers:
            pin(server.pids, cores)


def pin(pids: Sequence[int], cores: Sequence[int]) -> None:
    """Pin every thread of some processes to these cores."""
    for pid in pids:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), cores)


@contextmanager
def neighbours(core: int, count: int) -> Iterator[None]:
    """Keep a core busy with `count` more processes."""
    made = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)
    ]
    try:
        for process in made:
            os.sched_setaffinity(process.pid, [core])
        time.sleep(0.1)
        yield
    finally:
        for process in made:
            process.kill()
            process.wait()
