"""The settings of a relay, as configured and live, and the measurements of `npu-gr calibrate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from npu_gr.core.request import Brownout
from npu_gr.core.settings import Count, Positive, Seconds, SecondsOrZero, SomeBytes
from npu_gr.engine.cost import CostModel


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prefixes are encoded, kept and used."""

    enabled: bool = True
    t_life_s: Seconds = 10.0  # how long a published prefix waits for its rank
    # a full inference publishes the prefix that it has computed, if there is room
    keep_full: bool = True
    degrade: bool = True  # truncate a history whose full inference would miss the deadline
    margin_s: SecondsOrZero = 0.002  # reserved for the work that follows the device
    max_reloads: Count = 2  # copies from DRAM at a time
    max_joiners: Count = 64  # ranks that wait for one prefill job; a limit against bots
    brownout_tokens: Count = 512  # a rank without a prefix reads these when the brown-out truncates
    max_remembered: Count = 100_000  # users whose last signal is remembered
    # seconds for which a prefix may be used after a delta has changed weights that it has read
    max_stale_s: SecondsOrZero = 0.0


class TriggerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which signals lead to a prefill."""

    # always: every prefix that is long enough, if there is room
    policy: Literal["at_risk", "always"] = "at_risk"
    min_prefix_tokens: Count = 64  # shorter prefixes are never encoded ahead
    max_inflight: Count = 8  # prefills and reloads at a time
    rank_budget_s: Seconds | None = None  # B_rank; None = slo.rank_s
    margin_s: SecondsOrZero = 0.005  # part of B_rank for everything but queue and device
    # c, for a signal that does not say how many
    num_candidates: Annotated[int, msgspec.Meta(ge=0)] = 200
    # Q_m, measured by `npu-gr calibrate`; None = no limit on the rate
    q_m_per_s: Positive | None = None
    # share of Q_m that prefills may take
    q_m_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    burst_s: Seconds = 0.5  # the bucket holds this many seconds of its rate


@dataclass(slots=True)
class LiveSettings:
    """The settings that apply now.

    A reload of the configuration and the brown-out change them in place: do not copy them.
    """

    relay: RelayConfig
    trigger: TriggerConfig
    # for the tenants' shares; a tenant without one has weight 1
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    brownout: Brownout = Brownout.NONE
    # a self-check has found wrong prefixes; until the configuration is read again
    is_switched_off: bool = False

    @property
    def uses_dram(self) -> bool:
        """Whether prefixes are copied to DRAM and back."""
        return self.brownout < Brownout.NO_DRAM

    @property
    def max_uncached_tokens(self) -> int | None:
        """Most history tokens that a rank may compute itself; None = no limit."""
        return self.relay.brownout_tokens if self.brownout >= Brownout.TRUNCATE else None


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of `npu-gr calibrate` for one checkpoint, device and traffic.

    They are kept in a file next to the configuration. The symbols are those of `trigger.py`.
    """

    version: str  # version of the checkpoint
    device: str  # name of the device and its kernels
    cost: CostModel  # coefficients, in seconds
    copy_bytes_per_s: Positive  # bandwidth from DRAM to HBM
    kv_token_bytes: SomeBytes  # keys and values of one token, all layers
    kv_p99_tokens: Count  # P99 of the length of a prefix
    t_life_s: Seconds  # T_life: P99 of the time from a signal to the end of its rank
    # Q_m: prefills of kv_p99_tokens tokens a second, on a device that does nothing else
    q_m_per_s: Positive


def calibration_path(config_path: Path) -> Path:
    """Return the path of the calibration file of a configuration file."""
    return config_path.with_suffix(".calibration.yaml")
