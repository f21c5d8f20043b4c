"""The fewest instances that keep the SLO at a rate: doubled from the arithmetic's lower bound, then halved between."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from npu_gr.simulate.config import DeviceProfile, SimulateConfig
from npu_gr.simulate.fleet import Outcomes
from npu_gr.simulate.users import Ask

MOST = 1000  # instances
_LOOKED_AT = 2000  # requests of the traffic for the lower bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the search found."""

    qps: float
    target_ratio: float
    needed: int | None  # None = more than `MOST`
    at_least: int  # by the device time of ranks whose prefix is always there
    tried: list[tuple[int, Outcomes]]  # in the order of the search


def at_least(traffic: Iterable[Ask], qps: float, profile: DeviceProfile, streams: int) -> int:
    """Instances without which not even ranks whose prefix is there find device time, alone in their passes or not."""
    cost, seconds, number = profile.cost, 0.0, 0
    for ask in islice((ask for ask in traffic if ask.kind == "rank"), _LOOKED_AT):
        held = min(ask.num_tokens, profile.max_history_tokens)
        seconds, number = seconds + cost.pass_s(0, held, ask.num_candidates) - cost.a0, number + 1
    return min(MOST, max(1, math.ceil(qps * seconds / max(number, 1) / streams)))


def search(
    config: SimulateConfig,
    profile: DeviceProfile,
    traffic: Callable[[], Iterator[Ask]],
    play: Callable[[int], Outcomes],
) -> Capacity:
    """Find it.

    Args:
        traffic: begins it anew.
        play: simulates so many instances.
    """
    low = at_least(traffic(), config.qps, profile, config.scheduler.streams)
    tried: list[tuple[int, Outcomes]] = []

    def holds(instances: int) -> bool:
        found = play(instances)
        tried.append((instances, found))
        return found.attainment_ratio >= config.target_ratio

    bad, good = low - 1, low
    while not holds(good):
        if good == MOST:
            return Capacity(qps=config.qps, target_ratio=config.target_ratio, needed=None, at_least=low, tried=tried)
        bad, good = good, min(2 * good, MOST)
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if holds(middle) else (middle, good)
    return Capacity(qps=config.qps, target_ratio=config.target_ratio, needed=good, at_least=low, tried=tried)
