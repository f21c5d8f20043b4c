"""What is given up under overload, one step after the other, and taken back later than it was given up.

pressure = work that waits for the device, each request's part in objectives of its own kind
up       pressure >= high for rise_s: the next step
down     pressure <= low for fall_s: the step before; low < high and fall_s > rise_s, so it does not flap
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from npu_gr.core.request import Brownout

Positive = Annotated[float, msgspec.Meta(gt=0)]


class BrownoutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When to give up what."""

    enabled: bool = True
    high: Positive = 1.0  # objectives' worth of work that waits for the device
    low: Positive = 0.3
    rise_s: Positive = 0.25
    fall_s: Positive = 2.0
    most: Annotated[int, msgspec.Meta(ge=0, le=4)] = 4  # 1 no DRAM, 2 no relay, 3 truncated ranks, 4 ranks alone

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low: {self.low} is not below high: {self.high}")


class BrownoutControl:
    """The step in force; ask it every few tens of milliseconds."""

    def __init__(self, config: BrownoutConfig) -> None:
        self._config = config
        self.step = Brownout.NONE
        self._high_since_s: float | None = None
        self._low_since_s: float | None = None

    def observe(self, pressure: float, now_at: float) -> Brownout:
        """The step from now on."""
        config = self._config
        self._high_since_s = _since(self._high_since_s, pressure >= config.high, now_at)
        self._low_since_s = _since(self._low_since_s, pressure <= config.low, now_at)
        if not config.enabled:
            return self.step
        if self._high_since_s is not None and now_at - self._high_since_s >= config.rise_s:
            self.step, self._high_since_s = Brownout(min(self.step + 1, config.most)), now_at
        if self._low_since_s is not None and now_at - self._low_since_s >= config.fall_s:
            self.step, self._low_since_s = Brownout(max(self.step - 1, 0)), now_at
        return self.step


def _since(before_s: float | None, holds: bool, now_at: float) -> float | None:
    if not holds:
        return None
    return now_at if before_s is None else before_s
