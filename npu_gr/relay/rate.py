"""The rate of pre-infers of an instance, shared by its tenants.

Each tenant that wants pre-infers has a bucket of its own, which fills at its share of the rate and holds its share of
the burst. What runs over goes into one that everybody may take from. So a tenant alone has the whole rate, and a tenant
within its share finds a token whatever the others do. The first token of a tenant is lent by the common bucket.

Invariant: takes <= burst + rate x time + one for each account, as for a single bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from npu_gr.core.shares import Account, Shares


class _Allowance(Account):
    """The bucket of one tenant."""

    __slots__ = ("level",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.level = 0.0


class TenantRates:
    """Limits the pre-infers of all tenants together to a rate, of which `burst` may come at once."""

    def __init__(self, rate_per_s: float, burst: float, clock: Callable[[], float]) -> None:
        """Begin full.

        Args:
            rate_per_s: tokens that come in; it may be changed at any time.
            burst: tokens held at most, in all buckets together; less than 1 is 1. It may be changed at any time.
            clock: seconds that never go back.
        """
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._clock = clock
        self._shares: Shares[_Allowance] = Shares(self._opened, clock)
        self._common = max(burst, 1.0)
        self._filled_at = clock()

    def _opened(self, name: str) -> _Allowance:
        opened = _Allowance(name)
        opened.level = 1.0
        self._common -= 1.0
        return opened

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Give tenants other weights; all that are not named have 1."""
        self._shares.weights = weights

    def is_shared(self) -> bool:
        """Whether more than one tenant wants pre-infers."""
        return len(self._shares.ratios()) > 1

    def take(self, tenant: str) -> bool:
        """Take one token for a tenant. Returns False if there is none for it."""
        allowance = self._shares.asking(tenant)
        self._fill()
        if allowance.level >= 1.0:
            allowance.level -= 1.0
        elif self._common >= 1.0:
            self._common -= 1.0
        else:
            return False
        return True

    def _fill(self) -> None:
        now_at = self._clock()
        tokens = (now_at - self._filled_at) * self.rate_per_s
        self._filled_at = now_at
        burst = max(self.burst, 1.0)
        ratios = self._shares.ratios()
        for account in self._shares.accounts:
            ratio = ratios.get(account, 0.0)
            level = account.level + tokens * ratio
            account.level = min(level, max(1.0, burst * ratio))
            self._common += level - account.level
        held = sum(account.level for account in self._shares.accounts)
        self._common = min(self._common, max(burst - held, 1.0))
