"""Two costs that `npu-gr bench door` measures by CPU time: a core's ranks at an equal P99, and one refusal.

**A refusal**, with little served: `HEAVY_CLIENTS` ask for the scores of `HEAVY_CANDIDATES` candidates. They fill every
place and keep the device busy for many objectives, so nearly all ordinary ranks that come beside them are refused. Of
the time that the event loop's thread takes meanwhile, what it takes for the served ones is left out: an ordinary and a
heavy rank are measured alone before, when nothing is refused. The rest, over the refusals, is the cost of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from npu_gr.bench.door_client import LoadStream, StreamCounts, drive
from npu_gr.bench.door_loads import REFERENCE_CLIENTS
from npu_gr.bench.door_servers import Server

CLIENTS = (1, 2, 4, 8, 16, 32, 64)  # of closed loops, until the P99 is over the goal
HEAVY_CLIENTS = 8
HEAVY_CANDIDATES = 10_000
PROBE_PER_S = 1_500.0
LEAST_REFUSED = 200  # of a probe; fewer say nothing
ALONE_S = 1.0  # of the heavy clients, before the ordinary ranks


class Density(NamedTuple):
    """The best that a server does for a core while 99 of 100 answers are within the goal."""

    ranks_per_core_s: float
    clients: int
    ranks_per_s: float
    p99_ms: float


class RefusalCost(NamedTuple):
    """What one refusal takes of the event loop's thread."""

    cpu_s: float
    refused_per_s: float  # in the probe
    served_per_s: float  # in the probe, heavy ones included


def density(server: Server, bodies: Path, seconds: float, goal_s: float, seed: int) -> Density | None:
    """Raise the number of closed clients until the P99 is over the goal.

    Args:
        server: nobody else asks it.
        bodies: of the ranks.
        seconds: of each number of clients.
        goal_s: of the P99.
        seed: of the order of the ranks.

    Returns:
        The best; None = the P99 of a single client is over the goal.
    """
    best = None
    for clients in CLIENTS:
        stream = LoadStream(
            name="load", mode="closed", bodies=bodies, from_s=0.3, to_s=0.3 + seconds, connections=clients
        )
        warm = LoadStream(name="warm", mode="closed", bodies=bodies, to_s=0.3, connections=clients)
        counts = drive(server.port, [warm, stream], watch=server.pids, seed=seed, goal_s=goal_s).stream("load")
        if counts.answered_ms.p99 > goal_s * 1e3 or counts.due - counts.in_time - counts.late > 0.01 * counts.due:
            break
        answered = counts.in_time + counts.late
        found = Density(answered / counts.server_cpu_s, clients, answered / counts.span_s, counts.answered_ms.p99)
        if best is None or found.ranks_per_core_s > best.ranks_per_core_s:
            best = found
    return best


def refusal_cost(server: Server, heavy: Path, bodies: Path, seconds: float, seed: int) -> RefusalCost | None:
    """Measure a refusal; see the module's text.

    Args:
        server: ours; nobody else asks it.
        heavy: bodies of `HEAVY_CANDIDATES` candidates.
        bodies: of ordinary ranks.
        seconds: of the refusals.
        seed: of arrivals.

    Returns:
        The cost; None = too few were refused to tell.
    """
    rank_s = _loop_s(server, bodies, REFERENCE_CLIENTS)
    heavy_s = _loop_s(server, heavy, 1)
    hog = LoadStream(name="hog", mode="closed", bodies=heavy, to_s=ALONE_S, connections=HEAVY_CLIENTS)
    probe = LoadStream(
        name="probe",
        mode="poisson",
        bodies=bodies,
        from_s=ALONE_S,
        to_s=ALONE_S + seconds,
        connections=256,
        rate_per_s=PROBE_PER_S,
    )
    streams = [hog, hog.moved("heavy", ALONE_S, ALONE_S + seconds), probe]
    report = drive(server.port, streams, watch=server.pids, seed=seed, deadline_s=2.0)
    asked = report.stream("probe")
    hogs = report.stream("heavy")
    refused = asked.refused + hogs.refused
    if refused < LEAST_REFUSED:
        return None
    rest_s = asked.main_thread_cpu_s - _served(asked) * rank_s - _served(hogs) * heavy_s
    return RefusalCost(max(rest_s, 0.0) / refused, refused / seconds, (_served(asked) + _served(hogs)) / seconds)


def _loop_s(server: Server, bodies: Path, clients: int) -> float:
    """Seconds that the event loop's thread takes for one of these ranks, when it serves nothing else."""
    stream = LoadStream(name="load", mode="closed", bodies=bodies, from_s=0.3, to_s=1.3, connections=clients)
    warm = stream.moved("warm", 0.0, 0.3)
    counts = drive(server.port, [warm, stream], watch=server.pids, deadline_s=2.0).stream("load")
    return counts.main_thread_cpu_s / max(_served(counts), 1)


def _served(counts: StreamCounts) -> int:
    return counts.in_time + counts.late
