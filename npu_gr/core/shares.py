"""Fair shares of a resource among tenants, by weight.

A tenant is active for `WANTS_S` after its last request. The share of an active tenant is its weight
divided by the weights of all active tenants; that of another tenant is 0. Therefore a single tenant
may use everything, and the share of an inactive tenant goes to the others.

Invariant: at most `MAX_TENANTS` tenants, and those with a configured weight, have an own account;
all others share one. Therefore invented tenant names take no memory, and together get one share.

`TokenBucket` limits a rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, ValuesView
from functools import cached_property
from typing import Generic, TypeVar

# with an own account at a time; further ones without a configured weight share one
MAX_TENANTS = 64
OTHERS = "\0others"  # name of the shared account; no tenant can have it
WANTS_S = 60.0  # time after its last request for which a tenant is active
# minimum time between two removals of unused accounts, each of which scans all accounts
TIDY_S = 1.0


class Account:
    """The account of one tenant for one resource."""

    __slots__ = ("asked_at", "held", "name")

    def __init__(self, name: str) -> None:
        self.name = name  # of the tenant, or `OTHERS`
        self.asked_at = float("-inf")
        self.held = 0  # in the unit of the resource


A = TypeVar("A", bound=Account)


def name_of(tenant: str, named: Mapping[str, object], known: Mapping[str, object]) -> str:
    """Return the account name of a tenant: its own while there is room, else `OTHERS`.

    Args:
        tenant: Name of the tenant.
        named: Tenants that always have an own account.
        known: Tenants with an account.
    """
    return tenant if tenant in known or tenant in named or len(known) < MAX_TENANTS else OTHERS


class Shares(Generic[A]):
    """The accounts of the tenants of one resource; methods take O(accounts)."""

    def __init__(self, make: Callable[[str], A], clock: Callable[[], float]) -> None:
        """Begin without accounts.

        Args:
            make: Constructor of an account from its name.
            clock: Monotonic seconds.
        """
        self.weights: Mapping[str, float] = {}  # by tenant; the default is 1
        self._make = make
        self._clock = clock
        self._accounts: dict[str, A] = {}
        self._tidied_at = -math.inf

    @cached_property
    def own_work(self) -> A:
        """The account of the instance's own work, which does not affect shares."""
        return self._make("")

    @property
    def accounts(self) -> ValuesView[A]:
        """All accounts, also of tenants that were active before."""
        return self._accounts.values()

    def asking(self, tenant: str) -> A:
        """Return the account of a tenant with a new request."""
        now_at = self._clock()
        is_full = len(self._accounts) >= MAX_TENANTS and tenant not in self._accounts
        if is_full and now_at - self._tidied_at >= TIDY_S:
            self._tidied_at = now_at
            self._accounts = {
                name: account
                for name, account in self._accounts.items()
                if account.held or self._wants(account, now_at)
            }
        name = name_of(tenant, self.weights, self._accounts)
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = self._make(name)
        account.asked_at = now_at
        return account

    def asked(self, account: A) -> None:
        """Mark a tenant as active."""
        account.asked_at = self._clock()

    def weight(self, account: A) -> float:
        """Return the weight of a tenant."""
        return self.weights.get(account.name, 1.0)

    def ratios(self) -> dict[A, float]:
        """Compute the share (0 to 1) of each active tenant."""
        now_at = self._clock()
        weights = {
            account: self.weight(account)
            for account in self.accounts
            if self._wants(account, now_at)
        }
        total = sum(weights.values())
        return {account: weight / total for account, weight in weights.items()}

    def is_over(self, account: A, ratios: dict[A, float], capacity: int) -> bool:
        """Whether a tenant holds more than its share of a capacity."""
        return account.held > ratios.get(account, 0.0) * capacity

    @staticmethod
    def _wants(account: A, now_at: float) -> bool:
        return now_at - account.asked_at < WANTS_S


class TokenBucket:
    """Limits a rate to `rate_per_s`, with bursts of up to `burst`."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        """Begin with a full bucket.

        Args:
            rate_per_s: Tokens added per second.
            burst: Capacity, at least 1.
        """
        self.rate_per_s = rate_per_s
        self.burst = max(burst, 1.0)
        self._level = self.burst
        self._filled_at = -math.inf  # no take yet

    def take(self, now_at: float) -> bool:
        """Take a token, at a time of any monotonic clock; False if there is none."""
        if self._filled_at > -math.inf:
            self._level = min(
                self.burst, self._level + (now_at - self._filled_at) * self.rate_per_s
            )
        self._filled_at = now_at
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True
