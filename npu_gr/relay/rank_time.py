"""The time that one rank has, and what fits into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from npu_gr.engine.cost import CostModel
from npu_gr.relay.config import RelayConfig


class DeviceEstimates(Protocol):
    """What an `Encoder` predicts of its device."""

    @property
    def cost(self) -> CostModel:
        """Predicts the seconds of a pass."""
        ...

    @property
    def queue_s(self) -> float:
        """Seconds that a request arriving now would wait for the device."""
        ...

    @property
    def objective_s(self) -> float:
        """SLO objective of a request in seconds from its arrival."""
        ...


class RankTime(msgspec.Struct, frozen=True):
    """One rank of a history of `num_tokens` tokens, to be done by `deadline_at`.

    `margin_s` of the settings is kept back everywhere, for what follows the device.
    """

    config: RelayConfig
    engine: DeviceEstimates
    clock: Callable[[], float]
    num_tokens: int
    num_candidates: int
    deadline_at: float

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, less the margin."""
        return self.deadline_at - self.clock() - self.config.margin_s

    @property
    def device_s(self) -> float:
        """Seconds that the device may take for the rank if it joins the queue now."""
        return self.left_s - self.engine.queue_s

    @property
    def patience_s(self) -> float:
        """Seconds to wait for a producer: as long as a full inference can still follow.

        If there is no time for one anyway, the rank waits until its deadline.
        """
        left_s = self.deadline_at - self.clock()
        # Kept back: the pass that does without the prefix, what follows it, and waking up late.
        without_s = self.engine.cost.full_s(self.num_tokens, self.num_candidates) + 2 * self.config.margin_s
        return max(left_s - (without_s if left_s > without_s else self.config.margin_s), 0.0)

    @property
    def order_at(self) -> float:
        """The rank's place in the queue, and that of the work it waits for: its objective, not its deadline."""
        return min(self.deadline_at, self.clock() + self.engine.objective_s)

    @property
    def first_token(self) -> int:
        """0, or where the newest tokens begin that a full inference can still score in time."""
        if not self.config.degrade or not self.num_tokens:
            return 0
        safe = self.engine.cost.safe_tokens(self.num_tokens, self.num_candidates, self.device_s)
        return self.num_tokens - safe

    def is_enough_from(self, encoded_tokens: int) -> bool:
        """Return whether the rank can encode the rest of the history, behind `encoded_tokens`, in time."""
        rest = self.num_tokens - encoded_tokens
        return self.engine.cost.pass_s(rest, encoded_tokens, self.num_candidates) <= self.device_s
