"""What a relay measures of its traffic, and the rate of pre-infers that follows from it.

    T_life   P99 of the seconds from a signal to the end of its rank
    KV       P99 of the bytes of a prefix, in whole pages
    Q_inst   min(L_max / T_life, q_m_fraction * Q_m), with L_max = HBM bytes / KV: pre-infers a second to admit

Source: RelayGR (arXiv:2601.01712), sequence-aware trigger; `trigger.py` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

from npu_gr.engine.kv.prefix_pool import PrefixPool
from npu_gr.engine.quantile import RunningQuantile
from npu_gr.relay.calibration import Calibration
from npu_gr.relay.config import LiveSettings
from npu_gr.relay.rate import TenantRates
from npu_gr.relay.trigger import admitted_rate, live_limit


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
            calibration: measured before; None = start from guesses. It also gives Q_m if the settings do not.
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
            self._rates = TenantRates(self.q_inst_per_s, self._settings.trigger.burst_s, self._clock)
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
        return admitted_rate(l_max, self.t_life_p99_s.value, None if q_m is None else q_m * fraction)

    @property
    def rates(self) -> TenantRates | None:
        """The token buckets at the present Q_inst; None = no Q_m is known, so pre-infers have no rate limit."""
        if self._rates is not None:
            self._rates.rate_per_s = self.q_inst_per_s
            self._rates.burst = self._rates.rate_per_s * self._settings.trigger.burst_s
        return self._rates
