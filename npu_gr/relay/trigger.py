"""The trigger decides whether a signal leads to a pre-infer, by arithmetic on metadata.

The caller counts the verdict.

    at risk    queue_delay + T_full(n, c) + residual > B_rank - margin    only such ranks need a prefix
    load       pre-infers and reloads at once <= max_inflight
    footprint  the prefix fits into HBM                                   so live bytes <= r1 * M always
    rate       Q_inst = min(L_max / T_life, q_m_fraction * Q_m)           token buckets; L_max / T_life: Little's law

The last three are shared by the tenants (`core.shares`): where one of them is used up, those who
have less than their share get some of it, and those who have it are told so.

    n, c    history tokens, candidates           B_rank  time budget of a rank, seconds
    T_full  seconds of a full inference          T_life  seconds from a signal to the end of its rank, P99
    M, r1   bytes of HBM, share for prefixes     L_max   prefixes alive at once: M * r1 / KV
    KV      P99 of the bytes of a prefix         Q_m     pre-infers a second that the device completes
            in whole pages                               when it does nothing else

`decide` is pure. `RelayMeasurements` measures T_life and KV, and keeps the buckets of `TenantRates`
at the rate that follows.

Source: RelayGR (arXiv:2601.01712), sequence-aware trigger; the symbols are the paper's, the units
are our reading. `docs/relay.md` tells the life of a signal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from npu_gr.core.request import Verdict
from npu_gr.core.shares import Account, Shares
from npu_gr.engine.cost import RunningQuantile
from npu_gr.engine.kv_cache.prefix_pool import PrefixPool
from npu_gr.relay.config import Calibration, LiveSettings, TriggerConfig


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


class _Allowance(Account):
    """The bucket of one tenant."""

    __slots__ = ("level",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.level = 0.0


class TenantRates:
    """Limits the pre-infers of all tenants together to a rate, of which `burst` may come at once.

    Each tenant that wants pre-infers has a bucket of its own, which fills at its share of the rate
    and holds its share of the burst. What runs over goes into one that everybody may take from. So
    a tenant alone has the whole rate, and a tenant within its share finds a token whatever the
    others do. The first token of a tenant is lent by the common bucket.

    Invariant: takes <= burst + rate x time + one for each account, as for a single bucket.
    """

    def __init__(self, rate_per_s: float, burst: float, clock: Callable[[], float]) -> None:
        """Begin full.

        Args:
            rate_per_s: tokens that come in; it may be changed at any time.
            burst: tokens held at most, in all buckets together; less than 1 is 1. It may be changed
                at any time.
            clock: seconds that never go back.
        """
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._clock = clock
        self._shares: Shares[_Allowance] = Shares(self._opened, clock)
        self._common = max(burst, 1.0)
        self._filled_at = clock()

    def _opened(self, name: str) -> _Allowance:
        opened = _Allowance(name)
        opened.level = 1.0
        self._common -= 1.0
        return opened

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Give tenants other weights; all that are not named have 1."""
        self._shares.weights = weights

    def is_shared(self) -> bool:
        """Whether more than one tenant wants pre-infers."""
        return len(self._shares.ratios()) > 1

    def take(self, tenant: str) -> bool:
        """Take one token for a tenant. Returns False if there is none for it."""
        allowance = self._shares.asking(tenant)
        self._fill()
        if allowance.level >= 1.0:
            allowance.level -= 1.0
        elif self._common >= 1.0:
            self._common -= 1.0
        else:
            return False
        return True

    def _fill(self) -> None:
        now_at = self._clock()
        tokens = (now_at - self._filled_at) * self.rate_per_s
        self._filled_at = now_at
        burst = max(self.burst, 1.0)
        ratios = self._shares.ratios()
        for account in self._shares.accounts:
            ratio = ratios.get(account, 0.0)
            level = account.level + tokens * ratio
            account.level = min(level, max(1.0, burst * ratio))
            self._common += level - account.level
        held = sum(account.level for account in self._shares.accounts)
        self._common = min(self._common, max(burst - held, 1.0))


class RelayMeasurements:
    """Running quantiles and the token buckets that they feed."""

    def __init__(
        self,
        settings: LiveSettings,
        pool: PrefixPool,
        calibration: Calibration | None,
        clock: Callable[[], float],
    ) -> None:
        """Start from a calibration, or from guesses that the first samples replace.

        Args:
            settings: Q_m and its fraction, and T_life as a guess.
            pool: its bytes are the HBM budget.
            calibration: measured before; None = start from guesses. It also gives Q_m if the
                settings do not.
            clock: of the buckets.
        """
        self._clock = clock
        self._settings = settings
        self._pool = pool
        self._calibration = calibration
        t_life_s = settings.relay.t_life_s
        kv_bytes = pool.arena.layout.page_bytes
        if calibration is not None:
            t_life_s = calibration.t_life_s
            kv_bytes = pool.arena.layout.bytes(calibration.kv_p99_tokens)
        self.t_life_p99_s = RunningQuantile(0.99, t_life_s, is_measured=calibration is not None)
        self.kv_p99_bytes = RunningQuantile(0.99, kv_bytes, is_measured=calibration is not None)
        self.reconfigure()

    def reconfigure(self) -> None:
        """Start new buckets after the settings have changed. The quantiles stay."""
        self._rates = None
        if self._q_m_per_s is not None:
            self._rates = TenantRates(
                self.q_inst_per_s, self._settings.trigger.burst_s, self._clock
            )
            self._rates.weigh(self._settings.tenant_weights)

    @property
    def _q_m_per_s(self) -> float | None:
        """Q_m as configured, or else as calibrated."""
        if self._settings.trigger.q_m_per_s is None and self._calibration is not None:
            return self._calibration.q_m_per_s
        return self._settings.trigger.q_m_per_s

    @property
    def q_inst_per_s(self) -> float:
        """Q_inst: pre-infers a second to admit, by the measurements so far."""
        q_m = self._q_m_per_s
        l_max = live_limit(self._pool.budget_bytes, max(1, int(self.kv_p99_bytes.value)))
        fraction = self._settings.trigger.q_m_fraction
        return admitted_rate(
            l_max, self.t_life_p99_s.value, None if q_m is None else q_m * fraction
        )

    @property
    def rates(self) -> TenantRates | None:
        """The token buckets at the present Q_inst; None = no Q_m is known, so pre-infers have no rate limit."""
        if self._rates is not None:
            self._rates.rate_per_s = self.q_inst_per_s
            self._rates.burst = self._rates.rate_per_s * self._settings.trigger.burst_s
        return self._rates
