"""N instances behind the router's placement, fed with a traffic, on the virtual clock."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npu_gr.core.request import Outcome
from npu_gr.metrics.slo import Counts, Objective, Promise, Result, judge
from npu_gr.router.config import DiscoveryConfig, InstanceConfig, LimitsConfig, PairConfig, RouterConfig
from npu_gr.router.members import Health, How, Members, ring_of
from npu_gr.router.ring import Placement
from npu_gr.simulate import clock
from npu_gr.simulate.config import DeviceProfile, SimulateConfig
from npu_gr.simulate.instance import Served, SimulatedInstance
from npu_gr.simulate.users import Ask

SLICES = 60  # of a run, for the plots
PERCENTILES = (50, 90, 99, 99.9)
_STATUS = {"": 200, "Overloaded": 429, "DeadlineExceeded": 504, "TimeoutError": 504}


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """What a simulation found. Only what came after the warm-up counts."""

    instances: int
    simulated: int  # of them
    slo_s: float
    slice_s: float
    counted_s: float = 0.0
    num_asked: int = 0  # ranks
    results: Counter[Result] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)  # of ranks; or the error
    verdicts: Counter[str] = field(default_factory=Counter)  # of signals; or "refused"
    how: Counter[str] = field(default_factory=Counter)  # what the router went by
    latencies_s: array[float] = field(default_factory=lambda: array("d"))  # of answered ranks
    slices: list[Counter[str]] = field(default_factory=lambda: [Counter() for _ in range(SLICES)])
    history_tokens: int = 0
    prefix_tokens: int = 0
    num_produced: int = 0  # pre-infers and reloads after signals
    num_wasted: int = 0  # of them, those that no rank used
    busy_ratio: float = 0.0  # of the devices, mean
    busiest_ratio: float = 0.0

    @property
    def attainment_ratio(self) -> float:
        """Of all ranks, answered within the SLO."""
        return self.results[Result.GOOD] / self.num_asked if self.num_asked else 1.0

    @property
    def wasted_ratio(self) -> float:
        """Of the pre-infers, those that no rank used."""
        return self.num_wasted / self.num_produced if self.num_produced else 0.0

    def hit_ratio(self, *outcomes: Outcome) -> float:
        """Of all ranks."""
        return sum(self.outcomes[outcome] for outcome in outcomes) / self.num_asked if self.num_asked else 0.0

    def latency_s(self, percent: float) -> float:
        """A percentile; NaN of nothing."""
        if not self.latencies_s:
            return float("nan")
        return float(np.percentile(np.frombuffer(self.latencies_s), percent, method="higher"))

    def promises(self, objective: Objective) -> dict[str, float]:
        """The two attainments of `metrics/slo.py`."""
        counts = Counts(*(self.results[result] for result in Result))
        return {promise.value: counts.attainment(promise) for promise in Promise}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        objective = Objective(kind="rank", threshold_s=self.slo_s)
        hits = (Outcome.HBM_HIT, Outcome.JOINED, Outcome.DRAM_HIT)
        return {
            "instances": self.instances,
            "simulated_instances": self.simulated,
            "counted_s": self.counted_s,
            "ranks": self.num_asked,
            "slo_s": self.slo_s,
            "attainment_ratio": self.attainment_ratio,
            "promises": self.promises(objective),
            "latency_ms": {f"P{p:g}": self.latency_s(p) * 1e3 for p in PERCENTILES},
            "hit_ratio": {"any": self.hit_ratio(*hits), **{hit.value: self.hit_ratio(hit) for hit in hits}},
            "prefix_tokens_ratio": self.prefix_tokens / max(self.history_tokens, 1),
            "outcomes": dict(self.outcomes.most_common()),
            "verdicts": dict(self.verdicts.most_common()),
            "routed": dict(self.how.most_common()),
            "pre_infers": self.num_produced,
            "wasted_pre_infers": self.num_wasted,
            "wasted_ratio": self.wasted_ratio,
            "device_busy_ratio": {"mean": self.busy_ratio, "highest": self.busiest_ratio},
        }


class Fleet:
    """The instances of one run. Make it inside the virtual loop."""

    def __init__(self, config: SimulateConfig, profile: DeviceProfile) -> None:
        self._config, self._loop = config, asyncio.get_running_loop()
        self.members = members(config)
        names = list(self.members.instances)
        kept = min(config.sampled_instances or len(names), len(names))
        chosen = random.Random(config.seed).sample(names, kept)
        self.instances = {name: SimulatedInstance(config, profile, name) for name in sorted(chosen)}
        self._is_sampled = kept < len(names)
        self._tasks: set[asyncio.Task[None]] = set()
        self._placed: dict[str, Placement] = {}  # by signal; the rank brings it
        self.num_ended = 0
        slice_s = (config.duration_s - config.warmup_s) / SLICES
        self.found = Outcomes(instances=len(names), simulated=kept, slo_s=config.slo_s, slice_s=slice_s)

    async def run(self, traffic: Iterable[Ask]) -> Outcomes:
        """Play everything, and wait for its end."""
        for instance in self.instances.values():
            instance.start()
        forgetting = self._loop.call_at(self._config.warmup_s, self._warmed_up)
        for ask in traffic:
            if ask.at_s >= self._config.duration_s:
                break
            if self._is_sampled and self.members.ring.owner(ask.user.encode()) not in self.instances:
                continue
            if ask.at_s > self._loop.time():
                await asyncio.sleep(ask.at_s - self._loop.time())
            task = self._loop.create_task(self._signal(ask) if ask.kind == "signal" else self._rank(ask))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        forgetting.cancel()
        ended_at = self._loop.time()
        self._count_devices(ended_at)
        while self._tasks:
            await asyncio.gather(*self._tasks)
        for instance in self.instances.values():
            await instance.stop()
        return self.found

    def _warmed_up(self) -> None:
        for instance in self.instances.values():
            instance.forget_counts()

    def _count_devices(self, ended_at: float) -> None:
        found = self.found
        found.counted_s = max(ended_at - self._config.warmup_s, 0.0)
        streams = self._config.scheduler.streams
        busy = [one.device.busy_s / max(found.counted_s, 1e-9) / streams for one in self.instances.values()]
        found.busy_ratio, found.busiest_ratio = sum(busy) / len(busy), max(busy)
        found.num_produced = sum(one.num_produced for one in self.instances.values())
        found.num_wasted = sum(one.num_wasted for one in self.instances.values())

    async def _signal(self, ask: Ask) -> None:
        choice, placement = self.members.for_signal(ask.user.encode(), self._loop.time())
        self._placed[ask.user] = placement
        there = choice.instance
        there.in_flight += 1
        try:
            verdict = await self.instances[there.name].signal(ask)
        finally:
            there.in_flight -= 1
        if ask.at_s >= self._config.warmup_s:
            self.found.verdicts[verdict.value if verdict else "refused"] += 1

    async def _rank(self, ask: Ask) -> None:
        brought = self._placed.pop(ask.user, None)
        choice = self.members.for_rank(ask.user.encode(), brought, self._loop.time(), ())
        there = choice.instance
        there.in_flight += 1
        try:
            served = await self.instances[there.name].rank(ask)
        finally:
            there.in_flight -= 1
        self.num_ended += 1
        if ask.at_s >= self._config.warmup_s:
            self._count(ask, served, choice.how)

    def _count(self, ask: Ask, served: Served, how: How) -> None:
        found = self.found
        found.num_asked += 1
        outcome = served.outcome.value if served.outcome is not None else served.error
        found.outcomes[outcome] += 1
        found.how[how] += 1
        found.history_tokens += ask.num_tokens
        found.prefix_tokens += served.prefix_tokens
        result = judge(_STATUS.get(served.error, 500), served.latency_s, found.slo_s)
        if result is not None:
            found.results[result] += 1
        if served.outcome is not None:
            found.latencies_s.append(served.latency_s)
        place = min(int((ask.at_s - self._config.warmup_s) / found.slice_s), SLICES - 1)
        found.slices[place][outcome] += 1
        found.slices[place]["good"] += result is Result.GOOD


def members(config: SimulateConfig) -> Members:
    """The router's view of healthy instances."""
    instances = [
        InstanceConfig(name=f"gr-{number}", host="127.0.0.1", port=1 + number) for number in range(config.instances)
    ]
    router = RouterConfig(
        discovery=DiscoveryConfig(instances=instances),
        limits=LimitsConfig(instance_inflight=1 << 30),
        relay=PairConfig(t_life_s=config.relay.t_life_s, load_factor=config.load_factor),
    )
    found = Members(router, config.seed)
    found.replace(instances, ring_of(instances))
    for instance in found.instances.values():
        instance.health = Health.UP
    return found


def simulate(config: SimulateConfig, profile: DeviceProfile, traffic: Iterator[Ask]) -> Outcomes:
    """One run from start to end."""

    async def work() -> Outcomes:
        return await Fleet(config, profile).run(traffic)

    return clock.run(work())
