"""A fleet of simulated instances behind the router's placement, on the virtual clock.

The search for the fewest instances that meet the SLO starts at a computed lower bound, doubles
until the SLO is met, and then bisects.
"""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from npu_gr.core.kinds import RANK, SIGNAL
from npu_gr.core.request import Outcome
from npu_gr.metrics.slo import Counts, Promise, Result, evaluate
from npu_gr.route.placement import How, Member, Ring, bound, place
from npu_gr.simulate import clock
from npu_gr.simulate.config import DeviceProfile, SimulateConfig
from npu_gr.simulate.instance import RankResult, SimulatedInstance
from npu_gr.simulate.pool import SimulatedPool
from npu_gr.simulate.users import TrafficRequest

PERCENTILES = (50, 90, 99, 99.9)
MOST = 1000  # instances
_SAMPLE = 2000  # number of ranks from which the lower bound is computed
_COLUMNS = (
    "instances", "within SLO", "P50 ms", "P99 ms", "HBM hits", "joined", "DRAM hits",
    "cached tokens", "prefills", "wasted", "device busy",
)  # fmt: skip
_STATUS = {"": 200, "Overloaded": 429, "DeadlineExceeded": 504, "TimeoutError": 504}


@dataclass(slots=True, kw_only=True)
class FleetResult:
    """The figures of one run. Only requests after the warm-up count."""

    instances: int
    simulated: int  # number of instances that were simulated
    slo_s: float
    counted_s: float = 0.0
    num_ranks: int = 0
    results: Counter[Result] = field(default_factory=Counter)
    # outcomes of ranks, or names of their errors
    outcomes: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)  # verdicts of signals, or "rejected"
    how: Counter[str] = field(default_factory=Counter)  # reasons of the ranks' placement
    latencies_s: array[float] = field(default_factory=lambda: array("d"))  # answered ranks
    history_tokens: int = 0
    prefix_tokens: int = 0
    num_produced: int = 0  # prefills and reloads after signals
    num_wasted: int = 0  # prefills and reloads that no rank used
    fetches: Counter[str] = field(default_factory=Counter)  # from the pool, by outcome
    busy_ratio: float = 0.0  # share of time that the devices work, mean
    busiest_ratio: float = 0.0  # share of time that the busiest device works

    @property
    def attainment_ratio(self) -> float:
        """Share of all ranks that were answered within the SLO."""
        return self.results[Result.GOOD] / self.num_ranks if self.num_ranks else 1.0

    @property
    def wasted_ratio(self) -> float:
        """Share of prefills that no rank used."""
        return self.num_wasted / self.num_produced if self.num_produced else 0.0

    def hit_ratio(self, *outcomes: Outcome) -> float:
        """Return the share of all ranks that had one of these outcomes."""
        return (
            sum(self.outcomes[outcome] for outcome in outcomes) / self.num_ranks
            if self.num_ranks
            else 0.0
        )

    def latency_s(self, percent: float) -> float:
        """Return a percentile of the answered ranks' latency; NaN if there were none."""
        if not self.latencies_s:
            return float("nan")
        return float(np.percentile(np.frombuffer(self.latencies_s), percent, method="higher"))

    def promises(self) -> dict[str, float]:
        """Return the attainment of each promise of `metrics.slo`."""
        counts = Counts(*(self.results[result] for result in Result))
        return {promise.value: counts.attainment(promise) for promise in Promise}

    def as_dict(self) -> dict[str, Any]:
        """Return plain types for JSON."""
        hits = (Outcome.HBM_HIT, Outcome.JOINED, Outcome.DRAM_HIT)
        return {
            "instances": self.instances,
            "simulated_instances": self.simulated,
            "counted_s": self.counted_s,
            "ranks": self.num_ranks,
            "slo_s": self.slo_s,
            "attainment_ratio": self.attainment_ratio,
            "promises": self.promises(),
            "latency_ms": {f"P{p:g}": self.latency_s(p) * 1e3 for p in PERCENTILES},
            "hit_ratio": {
                "any": self.hit_ratio(*hits),
                **{hit.value: self.hit_ratio(hit) for hit in hits},
            },
            "prefix_tokens_ratio": self.prefix_tokens / max(self.history_tokens, 1),
            "outcomes": dict(self.outcomes.most_common()),
            "verdicts": dict(self.verdicts.most_common()),
            "routed": dict(self.how.most_common()),
            "pre_infers": self.num_produced,
            "wasted_pre_infers": self.num_wasted,
            "wasted_ratio": self.wasted_ratio,
            "pool_fetches": dict(self.fetches.most_common()),
            "device_busy_ratio": {"mean": self.busy_ratio, "highest": self.busiest_ratio},
        }


class Fleet:
    """The instances of one run. Create it inside the virtual loop."""

    def __init__(self, config: SimulateConfig, profile: DeviceProfile) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        names = [f"gr-{number}" for number in range(config.instances)]
        self.ring = Ring(map(Member, names))
        self._in_flight = Counter(dict.fromkeys(names, 0))
        simulated = min(config.sampled_instances or len(names), len(names))
        chosen = random.Random(config.seed).sample(names, simulated)  # noqa: S311  (a sample)
        self.pool = None if config.pool is None else SimulatedPool(config.pool)
        self.instances = {
            name: SimulatedInstance(config, profile, name, self.pool) for name in sorted(chosen)
        }
        self._is_sampled = simulated < len(names)
        self._tasks: set[asyncio.Task[None]] = set()
        # user -> instance of a signal whose rank has not come yet
        self._signalled: dict[str, str] = {}
        self.result = FleetResult(instances=len(names), simulated=simulated, slo_s=config.slo_s)

    async def run(self, traffic: Iterable[TrafficRequest]) -> FleetResult:
        """Send all requests, and wait until every one has ended."""
        for instance in self.instances.values():
            instance.start()
        forgetting = self._loop.call_at(self._config.warmup_s, self._warmed_up)
        for request in traffic:
            if request.due_at >= self._config.duration_s:
                break
            if self._is_sampled and self.ring.owner(request.user.encode()) not in self.instances:
                continue
            if request.due_at > self._loop.time():
                await asyncio.sleep(request.due_at - self._loop.time())
            play = {SIGNAL.name: self._signal, RANK.name: self._rank}[request.kind]
            task = self._loop.create_task(play(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        forgetting.cancel()
        ended_at = self._loop.time()
        self._count_devices(ended_at)
        while self._tasks:
            await asyncio.gather(*self._tasks)
        for instance in self.instances.values():
            await instance.stop()
        return self.result

    def _warmed_up(self) -> None:
        for instance in self.instances.values():
            instance.forget_counts()

    def _count_devices(self, ended_at: float) -> None:
        result = self.result
        result.counted_s = max(ended_at - self._config.warmup_s, 0.0)
        streams = self._config.scheduler.streams
        busy = [
            one.busy_s / max(result.counted_s, 1e-9) / streams for one in self.instances.values()
        ]
        result.busy_ratio = sum(busy) / len(busy)
        result.busiest_ratio = max(busy)
        result.num_produced = sum(one.num_produced for one in self.instances.values())
        result.num_wasted = sum(one.num_wasted for one in self.instances.values())
        for one in self.instances.values():
            result.fetches.update(one.fetches)

    async def _signal(self, request: TrafficRequest) -> None:
        has_room = self._has_room if self._config.load_factor else None
        there = place(
            self.ring, request.user.encode(), self._in_flight.__contains__, has_room=has_room
        )
        assert there is not None  # all are up
        self._signalled[request.user] = there.name
        self._in_flight[there.name] += 1
        try:
            verdict = await self.instances[there.name].signal(request)
        finally:
            self._in_flight[there.name] -= 1
        if request.due_at >= self._config.warmup_s:
            self.result.verdicts[verdict.value if verdict else "rejected"] += 1

    async def _rank(self, request: TrafficRequest) -> None:
        signalled = self._signalled.pop(request.user, None)
        there = place(self.ring, request.user.encode(), self._in_flight.__contains__, signalled)
        assert there is not None
        self._in_flight[there.name] += 1
        try:
            ranked = await self.instances[there.name].rank(request)
        finally:
            self._in_flight[there.name] -= 1
        if request.due_at >= self._config.warmup_s:
            self._count(request, ranked, there.how)

    def _has_room(self, name: str) -> bool:
        most = bound(self._in_flight.total(), 1.0, len(self._in_flight), self._config.load_factor)
        return self._in_flight[name] < most

    def _count(self, request: TrafficRequest, ranked: RankResult, how: How) -> None:
        result = self.result
        result.num_ranks += 1
        outcome = ranked.outcome.value if ranked.outcome is not None else ranked.error
        result.outcomes[outcome] += 1
        result.how[how] += 1
        result.history_tokens += request.num_tokens
        result.prefix_tokens += ranked.prefix_tokens
        evaluated = evaluate(_STATUS.get(ranked.error, 500), ranked.latency_s, result.slo_s)
        if evaluated is not None:
            result.results[evaluated] += 1
        if ranked.outcome is not None:
            result.latencies_s.append(ranked.latency_s)


def simulate(
    config: SimulateConfig, profile: DeviceProfile, traffic: Iterator[TrafficRequest]
) -> FleetResult:
    """Simulate one run from start to end on a virtual clock.

    Args:
        config: Settings of the run.
        profile: Device profile of each instance.
        traffic: Requests in time order.
    """

    async def work() -> FleetResult:
        return await Fleet(config, profile).run(traffic)

    return clock.run(work())


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of a capacity search."""

    qps: float
    target_ratio: float
    needed: int | None  # instances; None = more than `MOST`
    at_least: int  # lower bound of the instances, see the function `at_least`
    tried: list[tuple[int, FleetResult]]  # (instances, result), in the order of the search


def at_least(
    traffic: Iterable[TrafficRequest], qps: float, profile: DeviceProfile, streams: int
) -> int:
    """Compute a lower bound of the instances from the device time of ranks.

    It assumes that every rank hits its whole prefix, and shares a pass.

    Args:
        traffic: Requests whose first `_SAMPLE` ranks are read.
        qps: Ranks a second of the whole fleet.
        profile: Device profile of an instance.
        streams: Concurrent passes of an instance.

    Returns:
        The number of instances, at most `MOST`.
    """
    cost = profile.cost
    seconds = 0.0
    number = 0
    for request in islice((request for request in traffic if request.kind == RANK.name), _SAMPLE):
        cached = min(request.num_tokens, profile.max_history_tokens)
        seconds += cost.pass_s(0, cached, request.num_candidates) - cost.a0
        number += 1
    return min(MOST, max(1, math.ceil(qps * seconds / max(number, 1) / streams)))


def search(
    config: SimulateConfig,
    profile: DeviceProfile,
    traffic: Callable[[], Iterator[TrafficRequest]],
    play: Callable[[int], FleetResult],
) -> Capacity:
    """Find the fewest instances with which `config.target_ratio` of the ranks meet the SLO.

    Args:
        config: Settings of the simulation; `instances` is ignored.
        profile: Device profile of an instance.
        traffic: Function that restarts the traffic.
        play: Function that simulates a fleet of the given size.
    """
    low = at_least(traffic(), config.qps, profile, config.scheduler.streams)
    tried: list[tuple[int, FleetResult]] = []

    def holds(instances: int) -> bool:
        result = play(instances)
        tried.append((instances, result))
        return result.attainment_ratio >= config.target_ratio

    def found(needed: int | None) -> Capacity:
        return Capacity(
            qps=config.qps,
            target_ratio=config.target_ratio,
            needed=needed,
            at_least=low,
            tried=tried,
        )

    bad = low - 1
    good = low
    while not holds(good):
        if good == MOST:
            return found(None)
        bad = good
        good = min(2 * good, MOST)
    while good - bad > 1:
        middle = (bad + good) // 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return found(good)


def row(found: FleetResult) -> list[str]:
    """Format the cells of one run."""
    sampled = "" if found.simulated == found.instances else f" ({found.simulated} simulated)"
    return [
        f"{found.instances}{sampled}",
        f"{found.attainment_ratio:.2%}",
        f"{found.latency_s(50) * 1e3:.2f}",
        f"{found.latency_s(99) * 1e3:.2f}",
        f"{found.hit_ratio(Outcome.HBM_HIT):.1%}",
        f"{found.hit_ratio(Outcome.JOINED):.1%}",
        f"{found.hit_ratio(Outcome.DRAM_HIT):.1%}",
        f"{found.prefix_tokens / max(found.history_tokens, 1):.1%}",
        f"{found.num_produced}",
        f"{found.wasted_ratio:.1%}",
        f"{found.busy_ratio:.0%}, at most {found.busiest_ratio:.0%}",
    ]


def answer(capacity: Capacity) -> str:
    """Describe the result of a capacity search in one sentence."""
    needed = (
        "more than 1,000 instances" if capacity.needed is None else f"{capacity.needed} instances"
    )
    return (
        f"{capacity.qps:g} ranks/s with {capacity.target_ratio:.1%} within the SLO need {needed}; "
        f"device time alone needs {capacity.at_least}"
    )


def render(found: Sequence[FleetResult], capacity: Capacity | None) -> Group:
    """Make the tables for the terminal; the second one is of the last run."""
    runs = Table(*_COLUMNS, title="Simulation, not a measurement")
    for one in found:
        runs.add_row(*row(one))
    facts = Table(show_header=False)
    for key, value in _facts(found[-1]):
        facts.add_row(key, value)
    return Group(runs, facts, *([answer(capacity)] if capacity else []))


def as_dict(
    found: Sequence[FleetResult], capacity: Capacity | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return plain types for JSON.

    Args:
        found: Result of each run.
        capacity: Result of the capacity search; None = there was none.
        settings: Settings of the simulation, as plain types.
    """
    table: dict[str, Any] = {"settings": settings, "runs": [one.as_dict() for one in found]}
    if capacity is not None:
        table["capacity"] = {
            "qps": capacity.qps,
            "target_ratio": capacity.target_ratio,
            "instances": capacity.needed,
            "device_time_needs": capacity.at_least,
        }
    return table


def _facts(found: FleetResult) -> list[tuple[str, str]]:
    def counts(values: dict[str, int]) -> str:
        return ", ".join(f"{key} {value}" for key, value in values.items()) or "none"

    return [
        ("ranks counted", f"{found.num_ranks} in {found.counted_s:.1f} virtual seconds"),
        ("outcomes", counts(dict(found.outcomes.most_common()))),
        ("signals", counts(dict(found.verdicts.most_common()))),
        ("routed", counts({str(key): value for key, value in found.how.most_common()})),
        ("prefills that no rank used", f"{found.num_wasted} of {found.num_produced}"),
        ("fetches from the pool", counts(dict(found.fetches.most_common()))),
    ]
