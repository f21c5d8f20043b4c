"""Signals that a tenant has earned: whoever ranks may signal before, and whoever only signals may do so now and then.

A signal costs the event loop about a millisecond whatever it decides, and a rank that comes meanwhile waits for it. So
where tenants share an instance, one that signals and never ranks would slow down the ranks of all others, however few
prefixes it gets. Its signals are refused before they are parsed.
"""

from __future__ import annotations

from collections.abc import Callable

from npu_gr.core.shares import Account, Shares

SIGNALS = 2.0  # that one request to the device earns: it may come late, or its signal may be sent again
MOST = 64.0  # that may be saved up; what a tenant begins with
SHARE = 0.02  # of the event loop, for signals that nobody has earned, all tenants together


class _Earner(Account):
    """What one tenant has left."""

    __slots__ = ("filled_at", "left")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.left = MOST
        self.filled_at: float | None = None  # no signal yet


class EarnedSignals:
    """The signals that each tenant may send. Memory is bounded as `Shares` says."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nobody has signalled yet.

        Args:
            clock: seconds that never go back.
        """
        self._clock = clock
        self._tenants = Shares(_Earner, clock)

    def earn(self, tenant: str, num: int = 1) -> None:
        """Note that so many requests of the tenant to the device were let in."""
        account = self._tenants.asking(tenant)
        account.left = min(account.left + SIGNALS * num, MOST)

    def take(self, tenant: str, pace_s: float) -> bool:
        """Take one signal; False = the tenant has none left.

        Args:
            tenant: that signals.
            pace_s: seconds that a signal takes.
        """
        account = self._tenants.asking(tenant)
        now_at = self._clock()
        if account.filled_at is not None:
            unearned_per_s = SHARE / pace_s / len(self._tenants.accounts)
            account.left = min(account.left + unearned_per_s * (now_at - account.filled_at), MOST)
        account.filled_at = now_at
        if account.left < 1.0:
            return False
        account.left -= 1.0
        return True
