"""Brown-out: under overload give up optional work one level after the other, and restore it more slowly.

    pressure = work that waits for the device over the objectives of its requests
             + work that waits at the door over the objective, as long as it stands there

    pressure >= high for rise_s   one level up
    pressure <= low for fall_s    one level down; low < high and fall_s > rise_s, so the level does not flap

`npu_gr.core.request.Brownout` lists the levels.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from npu_gr.core.request import Brownout
from npu_gr.core.settings import Positive, Seconds

OBSERVE_S = 0.05  # between two looks at the load


class BrownoutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the level goes up and down, and how far."""

    enabled: bool = True
    # pressure: objectives' worth of work that waits; the door lets 0.75 wait at most
    high: Positive = 0.4
    low: Positive = 0.1
    rise_s: Seconds = 0.25
    fall_s: Seconds = 2.0
    max_step: Annotated[int, msgspec.Meta(ge=0, le=3)] = (
        3  # 1 no DRAM, 2 no relay, 3 truncated ranks
    )

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low: {self.low} is not below high: {self.high}")


class BrownoutControl:
    """The level in force. Call `observe` every few tens of milliseconds."""

    def __init__(self, config: BrownoutConfig) -> None:
        self._config = config
        self.step = Brownout.NONE
        self._high_from_at: float | None = None  # since when the pressure is high without a break
        self._low_from_at: float | None = None

    def reconfigure(self, config: BrownoutConfig) -> None:
        """Start anew with other settings."""
        self._config = config
        self.step = Brownout.NONE
        self._high_from_at = None
        self._low_from_at = None

    def observe(self, pressure: float, now_at: float) -> Brownout:
        """Take a reading of the pressure and return the level from now on."""
        config = self._config
        self._high_from_at = _since(self._high_from_at, pressure >= config.high, now_at)
        self._low_from_at = _since(self._low_from_at, pressure <= config.low, now_at)
        if not config.enabled:
            return self.step
        if self._high_from_at is not None and now_at - self._high_from_at >= config.rise_s:
            self.step = Brownout(min(self.step + 1, config.max_step))
            self._high_from_at = now_at
        if self._low_from_at is not None and now_at - self._low_from_at >= config.fall_s:
            self.step = Brownout(max(self.step - 1, 0))
            self._low_from_at = now_at
        return self.step


def _since(from_at: float | None, holds: bool, now_at: float) -> float | None:
    if not holds:
        return None
    return now_at if from_at is None else from_at
