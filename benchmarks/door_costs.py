"""Two costs that `benchmarks door` measures by CPU time: a core's ranks at an equal P99, and one more refusal.

**A refusal**: of two open loops, one has more refusals than the other. Of the CPU time that all of the server's threads
take more in it, what the ranks take that it answers more, or fewer, is left out: a rank's is that of the references
around both. The rest, over the refusals more, is the cost of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.door_client import LoadStream, StreamCounts, drive
from benchmarks.door_loads import LoadRun
from benchmarks.door_servers import Server

CLIENTS = (1, 2, 4, 8, 16, 32, 64)  # of closed loops, until the P99 is over the goal
LEAST_REFUSED = 200  # more in one load than in the other; fewer say nothing


class Density(NamedTuple):
    """The best that a server does for a core while 99 of 100 answers are within the goal."""

    ranks_per_core_s: float
    clients: int
    ranks_per_s: float
    p99_ms: float


class RefusalCost(NamedTuple):
    """What one more refusal takes of a server."""

    cpu_s: float
    from_per_s: float  # refused in one load
    to_per_s: float  # and in the other


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


def refusal_cost(less: LoadRun, more: LoadRun) -> RefusalCost | None:
    """Measure a refusal; see the module's text.

    Args:
        less, more: open loops on one server.

    Returns:
        The cost; None = too few more are refused to tell, or it would be none.
    """
    num_more = more.main.refused - less.main.refused
    around = [found.client.stream(name) for found in (less, more) for name in ("before", "after")]
    rank_s = sum(counts.server_cpu_s for counts in around) / max(sum(map(_served, around)), 1)
    served_more = _served(more.main) - _served(less.main)
    rest_s = more.main.server_cpu_s - less.main.server_cpu_s - served_more * rank_s
    if num_more < LEAST_REFUSED or rest_s <= 0:
        return None
    return RefusalCost(rest_s / num_more, less.refused_per_s, more.refused_per_s)


def _served(counts: StreamCounts) -> int:
    return counts.in_time + counts.late
