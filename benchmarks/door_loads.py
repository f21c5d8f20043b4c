"""The loads of `python -m benchmarks door`, and one run of one of them.

    warm up | reference: 8 closed clients | the load | reference again
    .5 s      .6 s                          seconds    1 s, of which the last .6 s count

Everything is one run of the client against one server, so what the machine does meanwhile happens to load and reference
alike. The second reference begins the instant the load ends: it also shows when the server is normal again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.door_client import BIN_S, ClientReport, LoadStream, Pause, StreamCounts, drive
from benchmarks.door_servers import Server

REFERENCE_CLIENTS = 8
WARM_S = 0.5
BEFORE_S = 0.6
AFTER_S = 1.0
POOL = 512  # connections of an open loop

CLOSED = (4, 16, 64, 256)  # clients
BURSTS = (8, 16, 24, 32)  # ranks at once
BURST_SHARE = 0.25  # of the capacity
POISSON = (1.0, 3.0, 10.0)  # of the capacity
PAUSE_CLIENTS = 4
PAUSE_TIMES = 5.0  # the capacity, in an open loop: a pause fills all its connections
PAUSE_S = 0.110  # what a full garbage collection took
STANDSTILL_TIMES = (5.0, 10.0)  # the capacity; all callers have given up when it is over, and connect anew
STANDSTILL_S = 1.5  # longer than the client's patience
STANDSTILL_AT_S = 1.0
HOT_CLIENTS = 16
SMALL_PER_S = 20.0
LEAST_FAIR_S = 12.0  # so that a P99 is not the worst of 80
NORMAL_S = 0.25  # after a pause or an overload
NORMAL_AGAIN_S = 1.0  # after a standstill: as long as the client waits
WINDOW = 4  # bins that must be as usual to call a server normal
LEVEL = 0.7  # of the usual answers in time; noise of a shared machine
SHARE = 0.9  # of the usual share in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent between the two references. Times of its streams begin with it."""

    name: str
    group: str  # closed | bursts | poisson | pause | fair
    size: float  # clients, ranks at once or multiples of the capacity
    seconds: float
    streams: tuple[LoadStream, ...]
    pause_at_s: float | None = None  # the server is stopped then
    pause_s: float = PAUSE_S
    normal_s: float = NORMAL_S  # it should be normal again so soon


class Usual(NamedTuple):
    """What some clients get in a normal time."""

    good: float  # answers in time, in a bin
    share: float  # of the answers, refusals and losses

    def better(self, other: Usual) -> Usual:
        """The better of both, each by itself."""
        return Usual(max(self.good, other.good), max(self.share, other.share))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """One load on one server."""

    load: Load
    before_per_s: float  # answers in time, of the reference
    after_per_s: float
    main: StreamCounts
    client: ClientReport
    usual: Usual  # before the pause, or before the load
    bins: Sequence[Sequence[int]]  # of the same clients: after the pause, or after the load

    @property
    def reference_per_s(self) -> float:
        """The mean of both references."""
        return (self.before_per_s + self.after_per_s) / 2

    @property
    def refused_per_s(self) -> float:
        """Refusals of all streams of the load, a second."""
        return sum(self.client.stream(stream.name).refused for stream in self.load.streams) / self.load.seconds

    def normal_after_s(self, usual: Usual) -> float:
        """Seconds from the end of the pause, or of the load, until the server is normal; inf = not seen."""
        return normal_at_s(self.bins, usual)

    @property
    def worst_second(self) -> float:
        """The fewest answers in time in a whole second of the load, as a share of the mean second."""
        per_second = round(1 / BIN_S)
        bins = [row[0] for row in self.main.bins[: round(self.load.seconds / BIN_S)]]
        sums = [sum(bins[at : at + per_second]) for at in range(0, len(bins) - per_second + 1, per_second)]
        mean = sum(sums) / len(sums) if sums else 0.0
        return min(sums) / mean if mean else 0.0


def loads(bodies: Path, hot: Path, small: Path, capacity_per_s: float, seconds: float, long_s: float) -> list[Load]:
    """All loads.

    Args:
        bodies: of the users that come again and again.
        hot, small: of two tenants.
        capacity_per_s: ranks that the server answers in time at its best.
        seconds: of most loads.
        long_s: of Poisson arrivals.
    """
    made = [
        Load(
            name=f"closed loop of {count}",
            group="closed",
            size=count,
            seconds=seconds,
            streams=(LoadStream(name="load", mode="closed", bodies=bodies, to_s=seconds, connections=count),),
        )
        for count in CLOSED
    ]
    for count in BURSTS:
        every_s = count / (BURST_SHARE * capacity_per_s)
        stream = LoadStream(
            name="load",
            mode="bursts",
            bodies=bodies,
            to_s=seconds,
            connections=4 * count,
            burst_size=count,
            every_s=every_s,
        )
        name = f"{count} at once every {every_s * 1e3:.0f} ms"
        made.append(Load(name=name, group="bursts", size=count, seconds=seconds, streams=(stream,)))
    for times in POISSON:
        rate = times * capacity_per_s
        stream = LoadStream(name="load", mode="poisson", bodies=bodies, to_s=long_s, connections=POOL, rate_per_s=rate)
        name = f"Poisson {times:g}x, {rate:.0f}/s"
        made.append(Load(name=name, group="poisson", size=times, seconds=long_s, streams=(stream,)))
    few = LoadStream(name="load", mode="closed", bodies=bodies, to_s=seconds, connections=PAUSE_CLIENTS)
    rate = PAUSE_TIMES * capacity_per_s
    many = LoadStream(name="load", mode="poisson", bodies=bodies, to_s=seconds, connections=POOL, rate_per_s=rate)
    for size, where, stream in ((PAUSE_CLIENTS, "", few), (PAUSE_TIMES, f" at {PAUSE_TIMES:g}x", many)):
        name = f"pause of {PAUSE_S * 1e3:.0f} ms{where}"
        made.append(
            Load(name=name, group="pause", size=size, seconds=seconds, streams=(stream,), pause_at_s=seconds / 2)
        )
    still_s = STANDSTILL_AT_S + STANDSTILL_S + max(2.0, seconds - STANDSTILL_AT_S)
    for times in STANDSTILL_TIMES:
        rate = times * capacity_per_s
        most = LoadStream(name="load", mode="poisson", bodies=bodies, to_s=still_s, connections=POOL, rate_per_s=rate)
        made.append(
            Load(
                name=f"standstill of {STANDSTILL_S:g} s at {times:g}x, {rate:.0f}/s",
                group="pause",
                size=times,
                seconds=still_s,
                streams=(most,),
                pause_at_s=STANDSTILL_AT_S,
                pause_s=STANDSTILL_S,
                normal_s=NORMAL_AGAIN_S,
            )
        )
    fair_s = max(seconds, LEAST_FAIR_S)
    tenant = LoadStream(
        name="load", mode="bursts", bodies=small, to_s=fair_s, connections=16, burst_size=1, every_s=1 / SMALL_PER_S
    )
    crowd = LoadStream(name="hot", mode="closed", bodies=hot, to_s=fair_s, connections=HOT_CLIENTS)
    for name, streams in (("quiet", (tenant,)), (f"beside {HOT_CLIENTS} hot clients", (tenant, crowd))):
        made.append(
            Load(name=f"small tenant, {name}", group="fair", size=len(streams), seconds=fair_s, streams=streams)
        )
    return made


def run(server: Server, load: Load, bodies: Path, goal_s: float, seed: int) -> LoadRun:
    """Run one load between two references.

    Args:
        server: nobody else asks it.
        load: what is sent.
        bodies: of the references.
        goal_s: an answer is in time within it.
        seed: of arrivals.
    """
    begins_s = WARM_S + BEFORE_S
    ends_s = begins_s + load.seconds
    reference = LoadStream(
        name="before", mode="closed", bodies=bodies, from_s=WARM_S, to_s=begins_s, connections=REFERENCE_CLIENTS
    )
    streams = [
        reference.moved("warm", 0.0, WARM_S),
        reference,
        *(stream.moved(stream.name, begins_s + stream.from_s, begins_s + stream.to_s) for stream in load.streams),
        reference.moved("after", ends_s, ends_s + AFTER_S),
    ]
    pause = None
    if load.pause_at_s is not None:
        pause = Pause(pid=server.pids[0], at_s=begins_s + load.pause_at_s, for_s=load.pause_s)
    report = drive(server.port, streams, watch=server.pids, pause=pause, seed=seed, goal_s=goal_s)
    before = report.stream("before")
    after = report.stream("after")
    main = report.stream("load")
    usual_bins = before.bins
    bins = after.bins
    if load.pause_at_s is not None:
        pause_bin = round(load.pause_at_s / BIN_S)
        usual_bins = main.bins[:pause_bin]
        bins = main.bins[pause_bin + round(load.pause_s / BIN_S) :]
    return LoadRun(
        load=load,
        before_per_s=before.good_per_s,
        after_per_s=good_per_s(after, AFTER_S - BEFORE_S, AFTER_S),
        main=main,
        client=report,
        usual=usual_of(usual_bins),
        bins=bins,
    )


def good_per_s(counts: StreamCounts, from_s: float, to_s: float) -> float:
    """Answers in time, a second, of the requests that were due in a part of a stream.

    Args:
        counts: of the stream.
        from_s, to_s: the part, since the stream began.
    """
    bins = counts.bins[round(from_s / BIN_S) : round(to_s / BIN_S)]
    return sum(row[0] for row in bins) / (to_s - from_s)


def usual_of(bins: Sequence[Sequence[int]]) -> Usual:
    """The mean of such bins; empty ones do not count, since a stream's last may be."""
    good = sum(row[0] for row in bins)
    return Usual(good / max(sum(any(row) for row in bins), 1), good / max(sum(map(sum, bins)), 1))


def normal_at_s(bins: Sequence[Sequence[int]], usual: Usual) -> float:
    """When a server is as usual: the beginning of the first bin that is, and stays so for `WINDOW` bins.

    Args:
        bins: 50 ms each, from the instant in question; in each the answers in time come first.
        usual: of the same clients in a normal time.

    Returns:
        Seconds; inf = not within the bins, or nothing was usual.
    """
    if not usual.good:
        return float("inf")
    for at in range(len(bins) - WINDOW + 1):
        window = bins[at : at + WINDOW]
        good = sum(row[0] for row in window)
        if window[0][0] and good >= LEVEL * usual.good * WINDOW and good >= SHARE * usual.share * sum(map(sum, window)):
            return at * BIN_S
    return float("inf")
