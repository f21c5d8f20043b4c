"""Brown-out: gives up optional work level by level under overload, and restores it more slowly.

    pressure = queued device seconds / SLO objective of the requests that wait for the device
             + queued device seconds / SLO objective of the requests that wait for admission,
               once that queue has stood for longer than a burst

    pressure >= high for rise_s   one level up
    pressure <= low for fall_s    one level down

low < high and fall_s > rise_s, so the level does not flap.

`npu_gr.core.request.Brownout` lists the levels.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from npu_gr.core.request import Brownout
from npu_gr.core.settings import Positive, Seconds

OBSERVE_S = 0.05  # interval between two readings of the pressure


class BrownoutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the level goes up and down, and how far."""

    enabled: bool = True
    # pressure in SLO objectives of queued work; admission lets at most 0.75 wait
    high: Positive = 0.4
    low: Positive = 0.1
    rise_s: Seconds = 0.25
    fall_s: Seconds = 2.0
    # 1 no DRAM, 2 no relay, 3 truncated ranks
    max_step: Annotated[int, msgspec.Meta(ge=0, le=3)] = 3

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low: {self.low} is not below high: {self.high}")


class BrownoutControl:
    """The current level. Call `observe` every `OBSERVE_S`."""

    def __init__(self, config: BrownoutConfig) -> None:
        self._config = config
        self.step = Brownout.NONE
        self._high_from_at: float | None = None  # since when the pressure has been high
        self._low_from_at: float | None = None

    def reconfigure(self, config: BrownoutConfig) -> None:
        """Apply other settings, and restart at level NONE."""
        self._config = config
        self.step = Brownout.NONE
        self._high_from_at = None
        self._low_from_at = None

    def observe(self, pressure: float, now_at: float) -> Brownout:
        """Record a reading of the pressure, and return the new level."""
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
