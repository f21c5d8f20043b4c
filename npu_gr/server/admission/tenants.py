"""The tenants of an admission controller: what each holds, and what it may do while others ask.

    sharing    several tenants have asked within `WANTS_S`: each signal must be paid by signal credit, which ranks earn
    full       several ask at the same time, and this one fills `MAX_PASSES` of the device by itself: each more of its
               requests would stand between the others and the device, and makes the device hardly faster
    over       the tenant holds more than its share, by weight, among those that hold something or wait

A tenant alone may do everything. The controller acts on what this says; nothing is rejected here.

A signal costs the event loop about a millisecond whatever it decides. So a tenant that signals and never ranks would
slow down the ranks of all others; with signal credit it may signal about twice for each of its ranks.

Invariants:
  T1  there is a holder as long as it holds a permit, and no longer; at most as many as `name_of` has names for
  T2  `active` of a holder is at most its `admitted`; both are 0 when all of its permits are given back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from npu_gr.core.shares import WANTS_S, Account, Shares, name_of

TOGETHER_S = 1.0  # tenants ask at the same time while the newest requests of two of them are no older
MAX_PASSES = 1.5  # of the device; with 1 a tenant lost a sixth of its rate, with 2 the others wait
EARNED = 2.0  # signals that one request to the device earns: it may come late, or its signal may be sent again
MAX_CREDIT = 64.0  # signals; what a tenant begins with
UNEARNED_SHARE = 0.02  # of the event loop, for signals that nobody has earned, all tenants together
_NOBODY: Set[str] = frozenset()


class Holder:
    """What one tenant holds."""

    __slots__ = ("active", "admitted", "name")

    def __init__(self, name: str) -> None:
        self.name = name  # of the tenant, or that which the tenants beyond `MAX_TENANTS` share
        self.admitted = 0  # permits
        self.active = 0  # permits that are not suspended


class _SignalCredit(Account):
    """The signals that one tenant may still send."""

    __slots__ = ("filled_at", "left")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.left = MAX_CREDIT
        self.filled_at: float | None = None  # no signal yet


class Tenants:
    """Who holds how much, and who asks. Event loop only."""

    def __init__(self, weights: Mapping[str, float], pass_requests: int, clock: Callable[[], float]) -> None:
        """Start without tenants.

        Args:
            weights: of tenants; all others have 1.
            pass_requests: that fill a pass of the device.
            clock: seconds that never go back.
        """
        self.weights = weights  # others take effect at once
        self._pass_requests = pass_requests
        self._clock = clock
        self._holders: dict[str, Holder] = {}
        self._last: str | None = None  # who asked last
        self._mixed_at = float("-inf")  # when the tenant that asked was another than the one before
        self._credit = Shares(_SignalCredit, clock)

    # ---- asking

    def saw(self, tenant: str) -> None:
        """Note that a tenant asks."""
        if tenant != self._last:
            if self._last is not None:
                self._mixed_at = self._clock()
            self._last = tenant

    def are_sharing(self) -> bool:
        """Whether several tenants have asked within `WANTS_S`."""
        return self._clock() - self._mixed_at < WANTS_S

    def take_signal(self, tenant: str, service_s: float) -> bool:
        """Take one signal of a tenant's credit; False = it has none left, and others share the instance.

        Args:
            tenant: that signals.
            service_s: seconds that a signal takes.
        """
        if not self.are_sharing():
            return True
        credit = self._credit.asking(tenant)
        now_at = self._clock()
        if credit.filled_at is not None:
            unearned_per_s = UNEARNED_SHARE / service_s / len(self._credit.accounts)
            credit.left = min(credit.left + unearned_per_s * (now_at - credit.filled_at), MAX_CREDIT)
        credit.filled_at = now_at
        if credit.left < 1.0:
            return False
        credit.left -= 1.0
        return True

    # ---- holding

    def admitted(self, tenant: str, *, uses_device: bool) -> Holder:
        """Count one more permit of a tenant, active; a request to the device earns signals.

        Returns:
            its holder, for `left`, and for the count of the active while a permit is suspended.
        """
        name = name_of(tenant, self.weights, self._holders)
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = Holder(name)
        holder.admitted += 1
        holder.active += 1
        if uses_device and self.are_sharing():
            credit = self._credit.asking(tenant)
            credit.left = min(credit.left + EARNED, MAX_CREDIT)
        return holder

    def left(self, holder: Holder) -> None:
        """Count one permit less, which was active."""
        holder.active -= 1
        holder.admitted -= 1
        if not holder.admitted:
            del self._holders[holder.name]

    # ---- what each may hold

    def is_full(self, tenant: str) -> bool:
        """Whether a tenant has all the places that it may have while others ask."""
        if not self._holders or not self._ask_together():
            return False
        holder = self._holders.get(name_of(tenant, self.weights, self._holders))
        return holder is not None and holder.active >= self._max_active(holder.name)

    def full(self) -> Set[str]:
        """Name all tenants that are full."""
        if not self._ask_together():
            return _NOBODY
        return {name for name, holder in self._holders.items() if holder.active >= self._max_active(name)}

    def over_their_share(self, waiting: Set[str], num: int, *, of_permits: bool) -> Set[str]:
        """Name the tenants that hold more than their share.

        Args:
            waiting: names of those that wait; they have a share, too.
            num: that all tenants hold together.
            of_permits: of the permits, as where the last one is about to go; else of the active ones.
        """
        total = sum([self.weights.get(name, 1.0) for name in self._holders.keys() | waiting])
        over = set()
        for name, holder in self._holders.items():
            held = holder.admitted if of_permits else holder.active
            if held * total > self.weights.get(name, 1.0) * num:
                over.add(name)
        return over

    def _ask_together(self) -> bool:
        return self._clock() - self._mixed_at < TOGETHER_S

    def _max_active(self, name: str) -> float:
        """Places of a tenant while others ask; a fraction counts as one."""
        return MAX_PASSES * self._pass_requests * self.weights.get(name, 1.0)
