"""Admission control: everything that may refuse a request before its work begins. The service and the simulator use it.

    check   before the body is read: is there a slot for this kind, does brown-out refuse this kind
    admit   hold a slot while the block runs; refuse a request that would wait too long for the device
    observe every `OBSERVE_S`: follow the load, and give up what `brownout.py` says

Invariant: no slot is held outside an `admit` block.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import msgspec

from npu_gr.admission.brownout import BrownoutConfig, BrownoutControl
from npu_gr.admission.gate import Gate
from npu_gr.admission.gradient import GradientLimit
from npu_gr.admission.limiter import Expected, Limiter
from npu_gr.core.errors import Overloaded
from npu_gr.core.kinds import RANK, Kind
from npu_gr.core.request import Brownout
from npu_gr.core.settings import Count

OBSERVE_S = 0.05  # between two looks at the load


class DeviceLoad(Protocol):
    """What admission control asks the device's queue."""

    @property
    def pressure(self) -> float:
        """Sum over waiting jobs of estimated device seconds over their kind's objective seconds, a device thread."""
        ...

    def wait_s(self, objective_s: float) -> float:
        """Forecast how many seconds a request with this objective would wait if it came now."""
        ...


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on the requests in flight. An instance has these settings in its section `service`."""

    max_inflight: Count = 512  # requests being served at once; the next gets 429
    min_inflight: Count = 8  # the adaptive limit does not go below
    adaptive: bool = True  # lower the limit by latency, towards `share` of the objective, and refuse by forecast
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7


class Admission:
    """Slots, forecasts and brown-out of one instance. Event loop only."""

    def __init__(
        self,
        config: AdmissionConfig,
        brownout: BrownoutConfig,
        objective_s: Callable[[str], float],
        device: DeviceLoad,
        first: Kind[Any, Any] = RANK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is admitted yet.

        Args:
            config: bounds of the in-flight limit.
            brownout: when to give up what.
            objective_s: seconds within which a kind, by its name, should be answered.
            device: the queue in front of the device.
            first: the kind that this instance is there for; brown-out never refuses it, nor what matters as much.
            clock: seconds that never go back.
        """
        self._config = config
        self._objective_s = objective_s
        self._device = device
        self._first = first
        self.brownout = BrownoutControl(brownout)
        self._gates: defaultdict[str, Gate] = defaultdict(Gate)  # by kind
        self._limiter = Limiter(config.max_inflight, _adaptive(config), clock)

    def reconfigure(
        self, config: AdmissionConfig, brownout: BrownoutConfig, objective_s: Callable[[str], float]
    ) -> None:
        """Apply other settings from now on.

        The adaptive limit starts anew only if its bounds change; brown-out starts anew; what the gates learnt stays.

        Args:
            config, brownout, objective_s: as at the start.
        """
        if config != self._config:
            self._limiter.reconfigure(config.max_inflight, _adaptive(config))
        self._config = config
        self._objective_s = objective_s
        self.brownout = BrownoutControl(brownout)

    @property
    def inflight(self) -> int:
        """Requests that hold a slot."""
        return self._limiter.inflight

    @property
    def limit(self) -> int:
        """The in-flight limit of the settings; the adaptive one may be below it."""
        return self._config.max_inflight

    def check(self, kind: Kind[Any, Any]) -> None:
        """Refuse early what `admit` would refuse for want of a slot; costs nothing.

        Raises:
            Overloaded: the kind's share of the limit is taken, or brown-out refuses the kind.
        """
        if kind.must_finish:
            return
        self._limiter.check(kind.priority)
        if self.brownout.step is Brownout.REJECT and kind.priority.value < self._first.priority.value:
            raise Overloaded(f"overloaded: {kind.plural} are refused, {self._first.plural} come first")

    @contextmanager
    def admit(self, kind: Kind[Any, Any], budget_s: float) -> Iterator[None]:
        """Hold a slot while the block runs; learn from how it ends.

        Args:
            kind: of the request.
            budget_s: what the caller grants.

        Raises:
            Overloaded: as `check`; or the request would wait for the device longer than its budget or its objective
                allows.
        """
        if kind.must_finish:
            yield
            return
        self.check(kind)
        with self._limiter.admit(kind.priority, self._expected(kind, budget_s) if kind.uses_device else None):
            yield

    def _expected(self, kind: Kind[Any, Any], budget_s: float) -> Expected:
        objective_s = self._objective_s(kind.name)
        expected = Expected(objective_s, self._device.wait_s(objective_s), self._gates[kind.name])
        if expected.wait_s > budget_s:
            raise Overloaded(
                f"it would wait {expected.wait_s * 1e3:.0f} ms for the device, it has {budget_s * 1e3:.0f}"
            )
        return expected

    def observe(self, now_at: float) -> Brownout:
        """Look at the load of this moment.

        Returns:
            The brown-out level from now on.
        """
        return self.brownout.observe(self._device.pressure, now_at)


def _adaptive(config: AdmissionConfig) -> GradientLimit | None:
    if not config.adaptive:
        return None
    least = min(config.min_inflight, config.max_inflight)
    return GradientLimit(least, config.max_inflight, share=config.share)
