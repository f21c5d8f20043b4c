"""The settings of a relay, and the object through which every part of it reads the ones in force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from npu_gr.core.request import Brownout
from npu_gr.core.settings import Count, Seconds, SecondsOrZero
from npu_gr.relay.trigger import TriggerConfig


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prefixes are produced, kept and used."""

    enabled: bool = True
    t_life_s: Seconds = 10.0  # how long a prefix waits for its rank
    keep_full: bool = True  # a full inference publishes the prefix that it computed anyway, if there is room
    degrade: bool = True  # truncate a history whose full inference would miss the deadline
    margin_s: SecondsOrZero = 0.002  # kept back for what follows the device
    max_reloads: Count = 2  # copies from DRAM at once
    max_joiners: Count = 64  # ranks that wait for one producer; a limit against bots
    brownout_tokens: Count = 512  # that a rank without prefix reads when the brown-out truncates
    max_remembered: Count = 100_000  # users whose last signal is remembered


@dataclass(slots=True)
class LiveSettings:
    """The settings in force. A reload and the brown-out change them in place, so nobody keeps a copy."""

    relay: RelayConfig
    trigger: TriggerConfig
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # of the shares of tenants; all others have 1
    brownout: Brownout = Brownout.NONE

    @property
    def produces(self) -> bool:
        """Whether prefixes are produced."""
        return self.relay.enabled and self.brownout < Brownout.NO_RELAY

    @property
    def uses_dram(self) -> bool:
        """Whether prefixes are copied to DRAM and back."""
        return self.brownout < Brownout.NO_DRAM

    @property
    def max_uncached_tokens(self) -> int | None:
        """The most tokens that a rank may compute itself; None = no limit."""
        return self.relay.brownout_tokens if self.brownout >= Brownout.TRUNCATE else None
