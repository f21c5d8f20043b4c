"""The trigger decides whether a signal leads to a pre-infer, by arithmetic on metadata. The caller counts the verdict.

    at risk    queue_delay + T_full(n, c) + residual > B_rank - margin    only such ranks need a prefix
    load       pre-infers and reloads at once <= max_inflight
    footprint  the prefix fits into HBM                                   so live bytes <= r1 * M always
    rate       Q_inst = min(L_max / T_life, q_m_fraction * Q_m)           token buckets; L_max / T_life: Little's law

The last three are shared by the tenants (`core.shares`): where one of them is used up, those who have less than their
share get some of it, and those who have it are told so.

    n, c    history tokens, candidates           B_rank  time budget of a rank, seconds
    T_full  seconds of a full inference          T_life  seconds from a signal to the end of its rank, P99
    M, r1   bytes of HBM, share for prefixes     L_max   prefixes alive at once
    Q_m     pre-infers a second that the device completes when it does nothing else

Source: RelayGR (arXiv:2601.01712), sequence-aware trigger; the symbols are the paper's, the units are our reading.
`docs/relay.md` tells the life of a signal.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec

from npu_gr.core.request import Verdict
from npu_gr.core.settings import Count, Positive, Seconds, SecondsOrZero


class TriggerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which signals lead to a pre-infer."""

    policy: Literal["at_risk", "always"] = "at_risk"  # always: every prefix that is long enough, if there is room
    min_prefix_tokens: Count = 64  # shorter prefixes are never produced
    max_inflight: Count = 8  # pre-infers and reloads at once
    rank_budget_s: Seconds | None = None  # B_rank; None = slo.rank_s
    margin_s: SecondsOrZero = 0.005  # part of B_rank for everything but queue and device
    num_candidates: Annotated[int, msgspec.Meta(ge=0)] = 200  # c, for a signal that does not say
    q_m_per_s: Positive | None = None  # Q_m, measured by `npu-gr calibrate`; None = no limit on the rate
    q_m_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8  # share of Q_m that pre-infers may take
    burst_s: Seconds = 0.5  # the bucket holds this many seconds of its rate


class AtShare(NamedTuple):
    """Of what the tenant has its share already, while others want the rest."""

    inflight: bool = False
    bytes: bool = False
    rate: bool = False


class Headroom(NamedTuple):
    """The load and the room of this instance, as one tenant finds them."""

    inflight: int  # pre-infers and reloads at work that need not give way to this one
    available_bytes: int  # of the HBM budget: free, or it can be made free for this tenant
    needed_bytes: int  # of this prefix
    at_share: AtShare = AtShare()


class Bucket(Protocol):
    """The pre-infers a second that a tenant may have."""

    def take(self, tenant: str) -> bool:
        """Take one, if there is one."""
        ...


class Forecast(NamedTuple):
    """Seconds that the rank would take without a prefix."""

    queue_s: float  # for the work that waits for the device now
    full_s: float  # T_full(n, c), less what is cached already
    residual_s: float  # P90 of (actual - predicted) seconds of recent full passes


def at_risk(forecast: Forecast, budget_s: float, margin_s: float) -> bool:
    """Return whether a full inference would make the rank late.

    Args:
        forecast: of the full inference.
        budget_s: B_rank.
        margin_s: part of the budget for everything but queue and device.
    """
    return forecast.queue_s + forecast.full_s + forecast.residual_s > budget_s - margin_s


def live_limit(hbm_bytes: int, kv_p99_bytes: int) -> int:
    """Return L_max, the prefixes alive at once: r1 * M over the P99 of their size in whole pages."""
    return hbm_bytes // kv_p99_bytes


def admitted_rate(l_max: int, t_life_s: float, q_m_per_s: float | None) -> float:
    """Return Q_inst in pre-infers a second: the lower of the limits by memory and by the device.

    Args:
        l_max: prefixes alive at once.
        t_life_s: T_life.
        q_m_per_s: the share of Q_m that pre-infers may take; None = no limit by the device.
    """
    return min(l_max / t_life_s, math.inf if q_m_per_s is None else q_m_per_s)


def decide(
    prefix_tokens: int,
    forecast: Forecast,
    headroom: Headroom,
    config: TriggerConfig,
    bucket: Bucket | None,
    tenant: str,
) -> Verdict:
    """Return PREINFER, or the first reason against it: risk, load, footprint, rate, in this order.

    SKIP_SHARE stands for the last three where the tenant has its share.

    The bucket comes last, so that only a pre-infer that is admitted takes a token.

    Args:
        prefix_tokens: length of the prefix.
        forecast: of its rank without a prefix.
        headroom: of this instance.
        config: thresholds.
        bucket: the rate limit; None = no limit.
        tenant: who signals.
    """
    if prefix_tokens < config.min_prefix_tokens:
        return Verdict.SKIP_NOT_AT_RISK
    budget_s = config.rank_budget_s if config.policy == "at_risk" else None
    if budget_s is not None and not at_risk(forecast, budget_s, config.margin_s):
        return Verdict.SKIP_NOT_AT_RISK
    if headroom.inflight >= config.max_inflight:
        return Verdict.SKIP_SHARE if headroom.at_share.inflight else Verdict.SKIP_LOAD
    if headroom.needed_bytes > headroom.available_bytes:
        return Verdict.SKIP_SHARE if headroom.at_share.bytes else Verdict.SKIP_FOOTPRINT
    if bucket is not None and not bucket.take(tenant):
        return Verdict.SKIP_SHARE if headroom.at_share.rate else Verdict.SKIP_RATE
    return Verdict.PREINFER


def reload_pays(copy_s: float, compute_s: float, budget_s: float) -> bool:
    """Return whether a copy from DRAM is not slower than computing the prefix again, and within the budget."""
    return copy_s <= compute_s and copy_s <= budget_s
