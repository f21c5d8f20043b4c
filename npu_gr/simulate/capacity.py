"""The fewest instances that keep the SLO at a rate.

The search starts at a lower bound from arithmetic, doubles until the SLO holds, and then bisects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from npu_gr.core.kinds import RANK
from npu_gr.simulate.config import DeviceProfile, SimulateConfig
from npu_gr.simulate.fleet import FleetResult
from npu_gr.simulate.users import TrafficRequest

MOST = 1000  # instances
_SAMPLE = 2000  # ranks of the traffic from which the lower bound is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of the search."""

    qps: float
    target_ratio: float
    needed: int | None  # instances; None = more than `MOST`
    at_least: int  # instances, by the device time of ranks that always find their prefix
    tried: list[tuple[int, FleetResult]]  # (instances, result), in the order of the search


def at_least(traffic: Iterable[TrafficRequest], qps: float, profile: DeviceProfile, streams: int) -> int:
    """Compute a lower bound: the device time of ranks that always find their prefix and share every pass.

    Args:
        traffic: its first ranks are the sample.
        qps: ranks a second of the whole fleet.
        profile: of the device of one instance.
        streams: passes at once on one instance.

    Returns:
        The number of instances, `MOST` at most.
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
    """Find the fewest instances with which `config.target_ratio` of the ranks keep the SLO.

    Args:
        config: settings of the simulation; its `instances` do not matter.
        profile: of the device of one instance.
        traffic: begins the traffic anew at each call.
        play: simulates a fleet of that many instances.
    """
    low = at_least(traffic(), config.qps, profile, config.scheduler.streams)
    tried: list[tuple[int, FleetResult]] = []

    def holds(instances: int) -> bool:
        result = play(instances)
        tried.append((instances, result))
        return result.attainment_ratio >= config.target_ratio

    def found(needed: int | None) -> Capacity:
        return Capacity(qps=config.qps, target_ratio=config.target_ratio, needed=needed, at_least=low, tried=tried)

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
