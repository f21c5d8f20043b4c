"""Two costs that `npu-gr bench door` measures by CPU time: a core's ranks at an equal P99, and one refusal.

**A refusal**, with nearly nothing served: `HEAVY_CLIENTS` ask for the scores of `HEAVY_CANDIDATES` candidates, which
fill every place and keep the device busy for many objectives, while the event loop is nearly idle. Then ordinary ranks
come beside them and are refused. What the event loop's thread takes more than before, less what the few served ordinary
ranks take at the reference, is the refusals' cost. With admission off nothing is refused and there is no cost to tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from npu_gr.bench.door_client import LoadStream, StreamCounts, drive
from npu_gr.bench.door_servers import Server

CLIENTS = (1, 2, 4, 8, 16, 32, 64)  # of closed loops, until the P99 is over the goal
HEAVY_CLIENTS = 8
HEAVY_CANDIDATES = 10_000
PROBE_PER_S = 1_500.0
LEAST_REFUSED = 200  # of a probe; fewer say nothing
ALONE_S = 1.0


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
        seconds: with the ordinary ranks, and without.
        seed: of arrivals.

    Returns:
        The cost; None = too few were refused to tell.
    """
    reference = LoadStream(name="reference", mode="closed", bodies=bodies, from_s=0.3, to_s=1.3, connections=8)
    usual = drive(server.port, [reference.moved("warm", 0.0, 0.3), reference], watch=server.pids).stream("reference")
    rank_s = usual.main_thread_cpu_s / max(usual.in_time + usual.late, 1)
    begins_s = ALONE_S + seconds
    hog = LoadStream(name="heavy", mode="closed", bodies=heavy, to_s=ALONE_S, connections=HEAVY_CLIENTS)
    probe = LoadStream(
        name="probe",
        mode="poisson",
        bodies=bodies,
        from_s=begins_s,
        to_s=begins_s + seconds,
        connections=256,
        rate_per_s=PROBE_PER_S,
    )
    report = drive(
        server.port,
        [hog, hog.moved("alone", ALONE_S, begins_s), hog.moved("both", begins_s, begins_s + seconds), probe],
        watch=server.pids,
        seed=seed,
        deadline_s=2.0,
    )
    alone = report.stream("alone")
    both = report.stream("both")
    asked = report.stream("probe")
    refused = asked.refused + both.refused - alone.refused
    if refused < LEAST_REFUSED:
        return None
    more_s = both.main_thread_cpu_s - alone.main_thread_cpu_s - _served(asked) * rank_s
    return RefusalCost(
        max(more_s, 0.0) / refused,
        (asked.refused + both.refused) / seconds,
        (_served(asked) + _served(both)) / seconds,
    )


def _served(counts: StreamCounts) -> int:
    return counts.in_time + counts.late
