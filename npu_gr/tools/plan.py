"""`npu-gr plan`: how much HBM, DRAM and pool some users need, and how many instances.

    traffic       a query log, or a model of the users: who comes back when, with how long a history
    hits          the tiers' own rules, replayed at many sizes (`simulate/memory.py`)
    device time   the cost model and the bandwidth of `npu-gr calibrate`
    HBM           what waits for a rank at a time (Little's law), and what keeps copies below
                  `COPIES` of the device's time
    DRAM          the least that finds `hits` of the prefixes that unlimited memory would find
    TTL, pool     the least that loses no more than `TTL_LOSES` of the hits; what the tiers hold of
                  each user, once

Everything is of a steady fleet: users do not change their instance, and no request
waits. Whether the P99 holds is another question: `npu-gr simulate --capacity`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Group
from rich.table import Table

from npu_gr.backend.choose import choose
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.memory import size_text
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.model.weights import config_of
from npu_gr.relay.config import Calibration
from npu_gr.relay.trigger import admitted_rate, live_limit
from npu_gr.service.build import kv_layout
from npu_gr.service.config import Config
from npu_gr.simulate.config import UsersConfig
from npu_gr.simulate.memory import MemoryHits, Rules, TierSizes, Visit, replayed
from npu_gr.simulate.users import TrafficRequest, signals_and_ranks, visits

COPIES = 0.05  # share of the device's time
TTL_LOSES = 0.01  # of the hits
TTLS_S = (60.0, 300.0, 600.0, 1800.0, 3600.0, 3 * 3600.0, 24 * 3600.0)
MOST_VISITS = 100_000  # drawn of a model; of more users a share is drawn
LEAST_RANKS = 100
STEP = math.sqrt(2)  # between two sizes that are tried
WINDOW, FIRST = 256, 32  # tokens of the attention window with which a ranker is compared
_MIB = 1 << 20
# names of limits
DEVICE = "device time"
HBM = "HBM for prefixes that wait, as configured"


class UserBytes(msgspec.Struct, frozen=True):
    """What a user takes in one form of the cache."""

    name: str
    median_bytes: int
    p99_bytes: int


class HitPoint(msgspec.Struct, frozen=True):
    """The share of ranks whose prefix is found in so much memory of the whole fleet."""

    num_bytes: int
    ratio: float


class Limit(msgspec.Struct, frozen=True):
    """The ranks a second at which one instance is at a limit."""

    name: str
    rate_per_s: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan. TierSizes of tiers are those of one instance."""

    rate_per_s: float  # ranks of the fleet
    num_ranks: int  # that were counted
    has_signals: bool
    forms: list[UserBytes]
    curve: list[HitPoint]
    most_ratio: float  # found by unlimited memory
    sources: dict[str, float]  # share of the ranks by where the prefix is found, as planned
    instances: int
    busy_ratio: float  # of each device
    hbm_bytes: int
    dram_bytes: int
    dram_ttl_s: float
    pool_bytes: int  # of the fleet
    pool_bytes_per_s: float  # a fetch of a median prefix that takes longer is given up
    limits: list[Limit]  # the tightest first, with the memory that is configured


def layout_of(config: Config) -> KVLayout:
    """Make the page layout of which the calibration is.

    Raises:
        ConfigError: there is no calibration, or it is of another model, dtype or device.
    """
    if config.checkpoint is None:
        raise ConfigError("checkpoint: not set, but a plan is of a ranker's prefixes")
    if config.calibration is None:
        raise ConfigError("calibration: none; run npu-gr calibrate with this configuration first")
    backend = choose(
        config.backend, config.native, config.hstu_library, config.attention, config.device
    )
    shape = config_of(Path(config.checkpoint))
    wanted = config.calibration.kv_token_bytes
    layouts = [kv_layout(shape, config, one, backend) for one in (torch.bfloat16, torch.float32)]
    for layout in layouts:
        if layout.token_bytes == wanted:
            return layout
    raise ConfigError(
        f"calibration: a token takes {wanted} bytes there, here {layouts[-1].token_bytes}; "
        "calibrate again with this checkpoint and kv_cache.dtype"
    )


def forms(layout: KVLayout, tokens: Sequence[int]) -> list[UserBytes]:
    """Compare forms of the cache by what a user takes, at the median and the P99 of lengths."""
    median, p99 = (int(np.quantile(tokens, q, method="higher")) for q in (0.5, 0.99))
    found = [UserBytes("as configured", layout.bytes(median), layout.bytes(p99))]
    whole = {"window_tokens": 0, "first_tokens": 0}
    ring = {"window_tokens": WINDOW, "first_tokens": FIRST}
    for name, form in (("whole history", whole), (f"window {WINDOW} + {FIRST}", ring)):
        for dtype in ("bfloat16", "int8"):
            one = replace(layout, dtype=dtype, **form)  # type: ignore[arg-type]
            found.append(UserBytes(f"{name}, {dtype}", one.bytes(median), one.bytes(p99)))
    return found


def drawn(
    users: UsersConfig, qps: float, duration_s: float, seed: int = 0
) -> tuple[list[TrafficRequest], float]:
    """Draw the traffic of a model, or of a share of its users.

    Returns:
        The traffic, and the share.
    """
    ratio = min(1.0, MOST_VISITS / (qps * duration_s))
    part = msgspec.structs.replace(users, num_users=max(1, round(users.num_users * ratio)))
    found = visits(part, qps * ratio, duration_s, seed)
    return list(signals_and_ranks(found, users.candidates)), ratio


class _Tried:
    """Replays of one traffic at sizes of the whole fleet."""

    def __init__(self, traffic: Sequence[Visit], rules: Rules, sample_ratio: float) -> None:
        self._traffic = traffic
        self._rules = rules
        self._sample_ratio = sample_ratio
        self.warmup_s = traffic[-1].at / 2

    def at(self, hbm: float, dram: float = 0.0, ttl_s: float = math.inf) -> MemoryHits:
        sizes = TierSizes(hbm * self._sample_ratio, dram * self._sample_ratio)
        return replayed(self._traffic, sizes, self._rules._replace(ttl_s=ttl_s), self.warmup_s)


def make_plan(
    config: Config,
    layout: KVLayout,
    traffic: Sequence[Visit],
    *,
    rate_per_s: float | None = None,
    sample_ratio: float = 1.0,
    hits: float = 0.9,
    busy: float = 0.6,
) -> Plan:
    """Make a plan.

    Args:
        config: Configuration of an instance, with its calibration.
        layout: Pages of its ranker.
        traffic: Signals and ranks in time order; the second half is counted.
        rate_per_s: Ranks a second of the fleet; None = those of the traffic.
        sample_ratio: Share of the users that the traffic has.
        hits: Share to find of the prefixes that unlimited memory would find.
        busy: Share of the time that a device may work.

    Raises:
        DataError: the second half of the traffic has too few ranks.
    """
    calibration = config.calibration
    assert calibration is not None  # the layout is of it
    rules = Rules(
        layout,
        config.relay.t_life_s,
        math.inf,
        config.trigger.min_prefix_tokens,
        calibration.cost,
        calibration.copy_bytes_per_s,
    )
    ranks = [visit for visit in traffic if not visit.is_signal]
    if len(ranks) < 2 * LEAST_RANKS:
        raise DataError(f"plan: the traffic has {len(ranks)} ranks, the least is {2 * LEAST_RANKS}")
    tried = _Tried(traffic, rules, sample_ratio)
    if rate_per_s is None:
        rate_per_s = len(ranks) / max(traffic[-1].at - traffic[0].at, 1e-9) / sample_ratio
    tokens = [visit.num_tokens for visit in ranks]
    p99_bytes = layout.bytes(int(np.quantile(tokens, 0.99, method="higher")))
    has_signals = len(ranks) < len(traffic)
    once = {visit.user: layout.bytes(visit.num_tokens) for visit in ranks}  # the newest
    every = {visit[2:5]: layout.bytes(visit.num_tokens) for visit in ranks}
    most = tried.at(math.inf)
    working = sum(once.values()) / sample_ratio
    least = rate_per_s * calibration.t_life_s * p99_bytes if has_signals else p99_bytes

    hbm = least
    while (found := tried.at(hbm, math.inf)).copy_s > COPIES * found.device_s and hbm < working:
        hbm *= STEP
    dram = 0.0
    if (found := tried.at(hbm)).ratio < hits * most.ratio:
        dram = hbm
        while (found := tried.at(hbm, dram)).ratio < hits * most.ratio:
            dram *= STEP
            if dram > STEP * sum(every.values()) / sample_ratio:
                break
    ttl_s = next(
        (one for one in TTLS_S if tried.at(hbm, dram, one).ratio >= found.ratio - TTL_LOSES),
        TTLS_S[-1],
    )
    num_ranks = found.sources.total()
    if num_ranks < LEAST_RANKS:
        raise DataError(f"plan: {num_ranks} ranks were counted, the least is {LEAST_RANKS}")
    device_s = found.device_s / num_ranks
    limits = _limits(config, calibration, found, has_signals, p99_bytes)
    most_rate = min(
        each.rate_per_s * (busy if each.name == DEVICE else 1.0)
        for each in limits
        if each.name != HBM
    )
    instances = max(1, math.ceil(rate_per_s / most_rate))
    median = int(np.median(tokens))
    return Plan(
        rate_per_s=rate_per_s,
        num_ranks=num_ranks,
        has_signals=has_signals,
        forms=forms(layout, tokens),
        curve=[
            HitPoint(_whole(working / part), tried.at(working / part).ratio)
            for part in (32, 16, 8, 4, 2, 1)
        ],
        most_ratio=most.ratio,
        sources={name: count / num_ranks for name, count in found.sources.most_common()},
        instances=instances,
        busy_ratio=rate_per_s * device_s / instances / config.scheduler.streams,
        hbm_bytes=_whole(hbm / instances),
        dram_bytes=_whole(dram / instances) if dram else 0,
        dram_ttl_s=ttl_s,
        pool_bytes=_whole(min(working, hbm + dram)),
        pool_bytes_per_s=layout.bytes(median) / max(calibration.cost.full_s(median, 0), 1e-9),
        limits=sorted(limits, key=lambda each: each.rate_per_s),
    )


def _limits(
    config: Config, calibration: Calibration, found: MemoryHits, has_signals: bool, p99_bytes: int
) -> list[Limit]:
    num_ranks = found.sources.total()
    limits = [Limit(DEVICE, config.scheduler.streams * num_ranks / max(found.device_s, 1e-9))]
    if found.num_prefills:
        prefills_per_s = calibration.q_m_per_s * config.trigger.q_m_fraction
        limits.append(Limit("prefills (Q_m)", prefills_per_s * num_ranks / found.num_prefills))
    hbm_bytes = config.kv_cache.hbm_bytes
    if has_signals and hbm_bytes != "auto":
        l_max = live_limit(hbm_bytes, p99_bytes)
        limits.append(Limit(HBM, admitted_rate(l_max, calibration.t_life_s, None)))
    return limits


def _whole(num_bytes: float) -> int:
    """Round up to MiB."""
    return math.ceil(num_bytes / _MIB) * _MIB


def settings(plan: Plan) -> dict[str, Any]:
    """Return the section `kv_cache` to write."""
    return {
        "hbm_bytes": plan.hbm_bytes,
        "dram_bytes": plan.dram_bytes,
        "dram_ttl_s": plan.dram_ttl_s,
    }


def render(plan: Plan) -> Group:
    """Make the tables for the terminal."""
    users = Table("a user takes", "median", "P99")
    for form in plan.forms:
        users.add_row(form.name, size_text(form.median_bytes), size_text(form.p99_bytes))
    curve = Table("memory of the fleet, one tier", "prefixes found")
    for point in plan.curve:
        curve.add_row(size_text(point.num_bytes), f"{point.ratio:.1%}")
    curve.add_row("unlimited", f"{plan.most_ratio:.1%}")
    limits = Table("one instance", "ranks a second", title="the first limit is the tightest")
    for limit in plan.limits:
        limits.add_row(limit.name, f"{limit.rate_per_s:,.1f}")
    found = ", ".join(f"{name} {ratio:.1%}" for name, ratio in plan.sources.items())
    lines = [
        f"{plan.rate_per_s:,.1f} ranks a second: {plan.instances} instances, devices busy "
        f"{plan.busy_ratio:.0%}",
        f"of {plan.num_ranks} ranks: {found}",
        f"a pool of {size_text(plan.pool_bytes)} holds what the fleet's tiers hold; a fetch pays "
        f"from {size_text(int(plan.pool_bytes_per_s))} a second",
        "kv_cache:  # of each instance",
        *(f"  {key}: {value}" for key, value in settings(plan).items()),
    ]
    return Group(users, curve, limits, *lines)
