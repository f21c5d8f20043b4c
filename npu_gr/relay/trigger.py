"""Whether to pre-infer a prefix: arithmetic on metadata. The caller counts the verdict.

    at risk    queue_delay + T_full(n, c) + residual > B_rank - margin       only these need a relay
    rate       Q_inst = min(L_max / T_life, q_m_fraction * Q_m)              a token bucket, by Little's law
    load       pre-infers and reloads running at once
    footprint  bytes are reserved before the work is queued                  live bytes <= r1 * M always

Source: RelayGR (arXiv:2601.01712), sequence-aware trigger; symbols and units as `relaygr.md` 2.3 reads them.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

import msgspec

from npu_gr.core.request import Verdict


class TriggerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a signal leads to work."""

    policy: Literal["at_risk", "always"] = "at_risk"  # always: whatever is long enough, if there is room
    min_prefix_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64  # shorter ones are never relayed
    max_inflight: Annotated[int, msgspec.Meta(ge=1)] = 8  # pre-infers and reloads running at once
    rank_budget_s: Annotated[float, msgspec.Meta(gt=0)] | None = None  # B_rank; None = slo.rank_s
    margin_s: Annotated[float, msgspec.Meta(ge=0)] = 0.005  # of it for all but queue and device
    num_candidates: Annotated[int, msgspec.Meta(ge=0)] = 200  # c of a signal that does not say
    q_m_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None  # Q_m, by `npu-gr calibrate`; None = no bound
    q_m_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    burst_s: Annotated[float, msgspec.Meta(gt=0)] = 0.5  # the bucket holds so many seconds of its rate


class Headroom(NamedTuple):
    """What is left on this instance."""

    inflight: int  # pre-infers and reloads now running
    available_bytes: int  # of the HBM budget, free or evictable
    needed_bytes: int  # by this prefix


class Forecast(NamedTuple):
    """What the rank would take without a relay, in seconds."""

    queue_s: float  # work that is waiting for the device now
    full_s: float  # T_full(n, c)
    residual_s: float  # what T_full has been short by lately, a high quantile


def at_risk(forecast: Forecast, budget_s: float, margin_s: float) -> bool:
    """Whether the rank would be late by a full inference."""
    return forecast.queue_s + forecast.full_s + forecast.residual_s > budget_s - margin_s


def live_limit(hbm_bytes: int, kv_p99_bytes: int) -> int:
    """L_max: prefixes alive at once, from r1 * M and the P99 of their size in whole pages."""
    return hbm_bytes // kv_p99_bytes


def admitted_rate(l_max: int, t_life_s: float, q_m_per_s: float | None) -> float:
    """Q_inst in pre-infers a second: the footprint's bound by Little's law, and the load's."""
    return min(l_max / t_life_s, math.inf if q_m_per_s is None else q_m_per_s)


def fleet_rate(special_fraction: float, num_instances: int, q_inst_per_s: float) -> float:
    """Q_admit = r2 * N * Q_inst."""
    return special_fraction * num_instances * q_inst_per_s


class TokenBucket:
    """At most `rate_per_s` takes a second, `burst` of them at once."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self.rate_per_s, self.burst = rate_per_s, max(burst, 1.0)
        self._level, self._at_s = self.burst, -math.inf

    def take(self, now_at: float) -> bool:
        """One, if there is one."""
        if self._at_s > -math.inf:
            self._level = min(self.burst, self._level + (now_at - self._at_s) * self.rate_per_s)
        self._at_s = now_at
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True


def decide(
    prefix_tokens: int,
    forecast: Forecast,
    headroom: Headroom,
    config: TriggerConfig,
    bucket: TokenBucket | None,
    now_at: float,
) -> Verdict:
    """PREINFER, or the first reason against it: risk, load, footprint, rate, in this order.

    The bucket comes last, so that only what is admitted takes from it.
    """
    if prefix_tokens < config.min_prefix_tokens:
        return Verdict.SKIP_NOT_AT_RISK
    budget_s = config.rank_budget_s if config.policy == "at_risk" else None
    if budget_s is not None and not at_risk(forecast, budget_s, config.margin_s):
        return Verdict.SKIP_NOT_AT_RISK
    if headroom.inflight >= config.max_inflight:
        return Verdict.SKIP_LOAD
    if headroom.needed_bytes > headroom.available_bytes:
        return Verdict.SKIP_FOOTPRINT
    if bucket is not None and not bucket.take(now_at):
        return Verdict.SKIP_RATE
    return Verdict.PREINFER


def reload_pays(copy_s: float, compute_s: float, budget_s: float) -> bool:
    """Whether a copy from DRAM beats computing the prefix again, and fits the budget."""
    return copy_s <= compute_s and copy_s <= budget_s
