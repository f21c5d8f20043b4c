"""The tenants at a door: what each holds, and what it may do while others ask.

    sharing    several tenants have asked within `WANTS_S`: signals must be earned (`earned.py`)
    full       several ask at the same time, and this one fills `PASSES` of the device by itself: each more of its
               requests would stand between the others and the device, and makes the device hardly faster
    over       the tenant holds more than its share, by weight, among those that hold something or wait

A tenant alone may do everything. What a tenant may not do now is for the door to act on; nothing is refused here.

Invariants:
  T1  there is a holder as long as it holds a slot, and no longer; at most as many as `name_of` has names for
  T2  `inside` of a holder is at most its `admitted`; both are 0 when all of its slots are given back
"""

from __future__ import annotations

from collections.abc import Callable, Set

from npu_gr.admission.config import AdmissionConfig
from npu_gr.admission.earned import EarnedSignals
from npu_gr.core.shares import WANTS_S, name_of

MIXED_S = 1.0  # tenants ask at the same time while the newest two requests of different ones are no older
PASSES = 1.5  # of the device, that a tenant may fill then: with 1 it lost a sixth of its rate, with 2 the others wait
_NONE: Set[str] = frozenset()


class Holder:
    """What one tenant holds."""

    __slots__ = ("admitted", "inside", "name")

    def __init__(self, name: str) -> None:
        self.name = name  # of the tenant, or that which the tenants beyond `MAX_TENANTS` share
        self.admitted = 0  # slots
        self.inside = 0  # places: slots that are not outside


class Tenants:
    """Who holds how much, and who asks. Event loop only."""

    def __init__(self, config: AdmissionConfig, pass_requests: int, clock: Callable[[], float]) -> None:
        """Nobody has asked yet.

        Args:
            config: the weights of tenants; with `enabled` false nobody is held to share.
            pass_requests: that fill a pass of the device.
            clock: seconds that never go back.
        """
        self.config = config  # another one takes effect at once
        self._pass_requests = pass_requests
        self._clock = clock
        self._holders: dict[str, Holder] = {}
        self._before: str | None = None  # who asked last
        self._mixed_at = float("-inf")  # when the tenant that asked was another than the one before
        self._earned = EarnedSignals(clock)

    # ---- asking

    def saw(self, tenant: str) -> None:
        """Note that a tenant asks."""
        if tenant != self._before:
            if self._before is not None:
                self._mixed_at = self._clock()
            self._before = tenant

    def are_sharing(self) -> bool:
        """Whether several tenants have asked of late."""
        return self.config.enabled and self._clock() - self._mixed_at < WANTS_S

    def may_signal(self, tenant: str, pace_s: float) -> bool:
        """Take one of the signals that a tenant has earned; False = it has none left, and others share the instance.

        Args:
            tenant: that signals.
            pace_s: seconds that a signal takes.
        """
        return not self.are_sharing() or self._earned.take(tenant, pace_s)

    def earned_elsewhere(self, tenant: str, num: int) -> None:
        """Note that so many requests of a tenant to the device came in at another door."""
        self.saw(tenant)
        self._earned.earn(tenant, num)

    # ---- holding

    def let_in(self, tenant: str, to_device: bool) -> Holder:
        """Count one more slot of a tenant, inside.

        Args:
            tenant: whose request it is.
            to_device: the request uses the device, so it earns signals.

        Returns:
            who holds it, for `left`, and for the count of the places while a request is outside.
        """
        name = name_of(tenant, self.config.tenant_weights, self._holders)
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = Holder(name)
        holder.admitted += 1
        holder.inside += 1
        if to_device and self.are_sharing():
            self._earned.earn(tenant)
        return holder

    def left(self, holder: Holder) -> None:
        """Count one slot less, which was inside."""
        holder.inside -= 1
        holder.admitted -= 1
        if not holder.admitted:
            del self._holders[holder.name]

    def inside(self) -> dict[str, int]:
        """Count the places of each tenant; zeros are left out."""
        return {name: holder.inside for name, holder in self._holders.items() if holder.inside}

    # ---- what each may hold

    def is_full(self, tenant: str) -> bool:
        """Whether a tenant has all the places that it may have while others ask."""
        if not self._holders or not self._ask_together():
            return False
        holder = self._holders.get(name_of(tenant, self.config.tenant_weights, self._holders))
        return holder is not None and holder.inside >= self._most_of(holder.name)

    def full(self) -> Set[str]:
        """Name all that are full."""
        if not self._ask_together():
            return _NONE
        return {name for name, holder in self._holders.items() if holder.inside >= self._most_of(name)}

    def over_their_share(self, waiting: Set[str], num: int, of_slots: bool) -> Set[str]:
        """Name the tenants that hold more than their share.

        Args:
            waiting: names of those that wait; they have a share, too.
            num: that all tenants hold together.
            of_slots: of the slots, as where the last one is about to go; else of the places inside.
        """
        weights = self.config.tenant_weights
        total = sum([weights.get(name, 1.0) for name in self._holders.keys() | waiting])
        over = set()
        for name, holder in self._holders.items():
            held = holder.admitted if of_slots else holder.inside
            if held * total > weights.get(name, 1.0) * num:
                over.add(name)
        return over

    def _ask_together(self) -> bool:
        """Whether several tenants ask at the same time."""
        return self._clock() - self._mixed_at < MIXED_S

    def _most_of(self, name: str) -> float:
        """Places of a tenant while others ask; a fraction counts as one."""
        return PASSES * self._pass_requests * self.config.tenant_weights.get(name, 1.0)
