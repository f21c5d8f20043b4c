"""Admission control of a simulated instance, behind one object: `check`, `admit`, `observe_pressure`.

Nothing else in the simulator touches `npu_gr.admission`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from npu_gr.admission.brownout import BrownoutConfig, BrownoutControl
from npu_gr.admission.gate import Gate
from npu_gr.admission.gradient import GradientLimit
from npu_gr.admission.limiter import Expected, Limiter
from npu_gr.core.errors import Overloaded
from npu_gr.core.kinds import RANK, Kind
from npu_gr.core.request import Brownout
from npu_gr.simulate.config import AdmissionConfig

OBSERVE_S = 0.05  # between two looks at the load


class DeviceLoad(Protocol):
    """What admission control asks the queue of the device."""

    @property
    def pressure(self) -> float:
        """Waiting work in objectives of its requests."""
        ...

    def wait_s(self, objective_s: float) -> float:
        """Forecast how long a request with this objective would wait if it came now."""
        ...


class SimulatedAdmission:
    """Slots, forecasts and brown-out of one instance."""

    def __init__(
        self,
        settings: AdmissionConfig,
        brownout: BrownoutConfig,
        objective_s: Callable[[str], float],
        device: DeviceLoad,
        clock: Callable[[], float],
    ) -> None:
        """Nothing is admitted yet.

        Args:
            settings: bounds of the in-flight limit.
            brownout: when to give up what.
            objective_s: seconds within which a kind, by its name, should be answered.
            device: the queue in front of the device.
            clock: seconds that never go back.
        """
        adaptive = None
        if settings.adaptive:
            least = min(settings.min_inflight, settings.max_inflight)
            adaptive = GradientLimit(least, settings.max_inflight, share=settings.share)
        self._objective_s = objective_s
        self._device = device
        self._limiter = Limiter(settings.max_inflight, adaptive, clock)
        self._gates: defaultdict[str, Gate] = defaultdict(Gate)  # by kind
        self._brownout = BrownoutControl(brownout)

    def check(self, kind: Kind[Any, Any]) -> None:
        """Refuse a request for want of a slot, or by brown-out.

        Raises:
            Overloaded: no slot is free for the kind, or brown-out refuses the kind.
        """
        self._limiter.check(kind.priority)
        if self._brownout.step is Brownout.REJECT and kind.priority.value < RANK.priority.value:
            raise Overloaded(f"overloaded: {kind.plural} are refused, {RANK.plural} come first")

    @contextmanager
    def admit(self, kind: Kind[Any, Any], budget_s: float) -> Iterator[None]:
        """Hold a slot while the block runs; learn from how it ends.

        Args:
            kind: of the request.
            budget_s: seconds that the caller still grants.

        Raises:
            Overloaded: as `check`; or the request would wait for the device longer than its budget or objective allows.
        """
        self.check(kind)
        with self._limiter.admit(kind.priority, self._expected(kind, budget_s) if kind.uses_device else None):
            yield

    def _expected(self, kind: Kind[Any, Any], budget_s: float) -> Expected:
        objective_s = self._objective_s(kind.name)
        expected = Expected(objective_s, self._device.wait_s(objective_s), self._gates[kind.name])
        if expected.wait_s > budget_s:
            raise Overloaded("more work waits for the device than the request has time")
        return expected

    def observe_pressure(self, now_at: float) -> Brownout:
        """Look at the load every `OBSERVE_S` seconds; returns the step of brown-out from now on."""
        return self._brownout.observe(self._device.pressure, now_at)
