"""The trigger decides whether a signal leads to a prefill, by arithmetic on metadata.

    at risk    queue_delay + T_full(n, c) + residual > B_rank - margin
               only a rank that would be late without a prefix needs one
    load       running prefills and reloads <= max_inflight
    footprint  the prefix fits into HBM, so live bytes <= r1 * M always
    rate       Q_inst = min(L_max / T_life, q_m_fraction * Q_m), by token buckets
               L_max / T_life is Little's law

The tenants share the last three (`core.shares`). Where one of them is used up, a tenant below its
share still gets some, and a tenant at its share gets SKIP_SHARE.

    n, c    history tokens, candidates      B_rank  time budget of a rank, seconds
    T_full  seconds of a full inference     T_life  P99 of seconds from a signal to its rank's end
    M, r1   bytes of HBM, prefixes' share   L_max   prefixes alive at once: M * r1 / KV
    KV      P99 of the bytes of a prefix,   Q_m     prefills a second that the device completes
            in whole pages                          when it does nothing else

`decide` is pure. `RelayMeasurements` measures T_life and KV, and sets the rate of `TenantRates`.

Source: RelayGR (arXiv:2601.01712), sequence-aware trigger; the symbols are the paper's, the units
are our reading. `docs/relay.md` follows a signal from beginning to end.
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
    """Which resources the tenant has its share of, while other tenants want the rest."""

    inflight: bool = False
    bytes: bool = False
    rate: bool = False


class Headroom(NamedTuple):
    """The load of this instance and the room in HBM, from the point of view of one tenant."""

    inflight: int  # running prefills and reloads, less the one that would give way
    available_bytes: int  # part of the HBM budget that is free or can be freed for this tenant
    needed_bytes: int  # size of this prefix
    at_share: AtShare = AtShare()


class Bucket(Protocol):
    """Limits the prefills of a tenant to a rate."""

    def take(self, tenant: str) -> bool:
        """Take a token; return False if there is none."""
        ...


class Forecast(NamedTuple):
    """Predicted seconds of the rank without a prefix."""

    queue_s: float  # for the work that waits for the device now
    full_s: float  # T_full(n, c), less the part that is cached already
    residual_s: float  # P90 of (actual - predicted) seconds of recent full passes


def at_risk(forecast: Forecast, budget_s: float, margin_s: float) -> bool:
    """Return whether a full inference would make the rank late.

    Args:
        forecast: Predicted seconds of the full inference.
        budget_s: B_rank.
        margin_s: part of the budget for everything but queue and device.
    """
    return forecast.queue_s + forecast.full_s + forecast.residual_s > budget_s - margin_s


def live_limit(hbm_bytes: int, kv_p99_bytes: int) -> int:
    """Return L_max, the most prefixes alive at a time: r1 * M / KV."""
    return hbm_bytes // kv_p99_bytes


def admitted_rate(l_max: int, t_life_s: float, q_m_per_s: float | None) -> float:
    """Return Q_inst in prefills a second: the lower of the limits by memory and by the device.

    Args:
        l_max: Most prefixes alive at a time.
        t_life_s: T_life.
        q_m_per_s: Part of Q_m that prefills may take; None = no limit by the device.
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

    For a tenant at its share, SKIP_SHARE replaces the last three reasons. The caller counts the
    verdict.

    Args:
        prefix_tokens: Length of the prefix.
        forecast: Predicted seconds of its rank without a prefix.
        headroom: Load and room of this instance.
        config: Thresholds.
        bucket: Rate limit; None = no limit. Asked last, so that only an admitted prefill takes a
            token.
        tenant: Tenant that sent the signal.
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
    """Return whether a copy from DRAM is within the budget and not slower than a prefill."""
    return copy_s <= compute_s and copy_s <= budget_s


class _Allowance(Account):
    """The token bucket of one tenant."""

    __slots__ = ("level",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.level = 0.0


class TenantRates:
    """Limits the prefills of all tenants together to a rate, with bursts of up to `burst`.

    Each tenant that wants prefills has its own bucket, which fills at its share of the rate and
    holds its share of the burst. Overflow goes into a common bucket for all tenants. So a tenant
    alone has the whole rate, and a tenant within its share always finds a token. A new bucket
    starts with one token out of the common bucket.

    Invariant: tokens taken <= burst + rate x time + one for each account.
    """

    def __init__(self, rate_per_s: float, burst: float, clock: Callable[[], float]) -> None:
        """Start with a full common bucket.

        Args:
            rate_per_s: Tokens added a second; may be changed at any time.
            burst: Most tokens in all buckets together, at least 1; may be changed at any time.
            clock: Monotonic clock, in seconds.
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
        """Set the weights of the tenants' shares; a tenant without one has weight 1."""
        self._shares.weights = weights

    def is_shared(self) -> bool:
        """Whether more than one tenant wants prefills."""
        return len(self._shares.ratios()) > 1

    def take(self, tenant: str) -> bool:
        """Take one token for a tenant; return False if there is none for it."""
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
            settings: Live settings: Q_m and its fraction, and `t_life_s` as the first guess.
            pool: HBM tier, whose size is the HBM budget.
            calibration: Earlier measurements, and Q_m where the settings have none; None = start
                from guesses.
            clock: Monotonic clock of the buckets, in seconds.
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
        """Q_inst: prefills a second to admit, from the measurements so far."""
        q_m = self._q_m_per_s
        l_max = live_limit(self._pool.budget_bytes, max(1, int(self.kv_p99_bytes.value)))
        fraction = self._settings.trigger.q_m_fraction
        return admitted_rate(
            l_max, self.t_life_p99_s.value, None if q_m is None else q_m * fraction
        )

    @property
    def rates(self) -> TenantRates | None:
        """The token buckets at the current Q_inst; None = no Q_m is known, so no rate limit."""
        if self._rates is not None:
            self._rates.rate_per_s = self.q_inst_per_s
            self._rates.burst = self._rates.rate_per_s * self._settings.trigger.burst_s
        return self._rates
