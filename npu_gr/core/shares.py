"""Shares of one resource: what each tenant holds, and what it may hold while others want some too.

A tenant *wants* the resource for `WANTS_S` after it last asked. The share of a tenant that wants is
in proportion to its weight among all that want; that of any other tenant is nothing. So a tenant
alone may have everything, and what a tenant left behind goes to those that came after it.

Invariant: at most `MAX_TENANTS` tenants, and those that have a weight by name, have an account of
their own; all others share one. So invented tenants cost no memory, and together they get what one
tenant gets.

`TokenBucket` limits a rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, ValuesView
from functools import cached_property
from typing import Generic, TypeVar

# that have an account at a time; those beyond share one, if they have no weight by name
MAX_TENANTS = 64
OTHERS = "\0others"  # the name of what they share; no tenant can have it
WANTS_S = 60.0  # a tenant wants a resource for so long after it last asked
# between two looks for accounts that nobody needs; with many tenants every request would look at
# all
TIDY_S = 1.0


class Account:
    """One tenant's part of one resource."""

    __slots__ = ("asked_at", "held", "name")

    def __init__(self, name: str) -> None:
        self.name = name  # of the tenant, or `OTHERS`
        self.asked_at = float("-inf")
        self.held = 0  # in the unit of the resource


A = TypeVar("A", bound=Account)


def name_of(tenant: str, named: Mapping[str, object], known: Mapping[str, object]) -> str:
    """Say under which name a tenant is kept: its own, as long as there is room, or `OTHERS`.

    Args:
        tenant: any.
        named: always have their own.
        known: that have an entry now.
    """
    return tenant if tenant in known or tenant in named or len(known) < MAX_TENANTS else OTHERS


class Shares(Generic[A]):
    """The accounts of the tenants of one resource.

    Every method takes at most one look at each account.
    """

    def __init__(self, make: Callable[[str], A], clock: Callable[[], float]) -> None:
        """No tenant has asked yet.

        Args:
            make: an account, by its name.
            clock: seconds that never go back.
        """
        self.weights: Mapping[str, float] = {}  # of tenants; all others have 1
        self._make = make
        self._clock = clock
        self._accounts: dict[str, A] = {}
        self._tidied_at = -math.inf

    @cached_property
    def own_work(self) -> A:
        """The account of the instance's own work: it has no share, and no tenant's share is smaller for it."""
        return self._make("")

    @property
    def accounts(self) -> ValuesView[A]:
        """The accounts of all that want or hold something, and maybe of some that did."""
        return self._accounts.values()

    def asking(self, tenant: str) -> A:
        """Return the account of a tenant that asks for some now."""
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
        """Note that a tenant uses what it holds: it wants it."""
        account.asked_at = self._clock()

    def weight(self, account: A) -> float:
        """Weigh a tenant."""
        return self.weights.get(account.name, 1.0)

    def ratios(self) -> dict[A, float]:
        """Compute the share of every tenant that wants, as a part of 1. A tenant that is not there has none."""
        now_at = self._clock()
        weights = {
            account: self.weight(account)
            for account in self.accounts
            if self._wants(account, now_at)
        }
        total = sum(weights.values())
        return {account: weight / total for account, weight in weights.items()}

    def is_over(self, account: A, ratios: dict[A, float], capacity: int) -> bool:
        """Whether a tenant holds more than its share of so much."""
        return account.held > ratios.get(account, 0.0) * capacity

    @staticmethod
    def _wants(account: A, now_at: float) -> bool:
        return now_at - account.asked_at < WANTS_S


class TokenBucket:
    """Limits a rate to `rate_per_s` takes a second, of which `burst` may come at once."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        """Begin full.

        Args:
            rate_per_s: tokens that come in.
            burst: tokens that it holds at most; less than 1 is 1, else nobody could ever take one.
        """
        self.rate_per_s = rate_per_s
        self.burst = max(burst, 1.0)
        self._level = self.burst
        self._filled_at = -math.inf  # no take yet

    def take(self, now_at: float) -> bool:
        """Take one token at an instant of any clock that never goes back.

        Returns False if there is none.
        """
        if self._filled_at > -math.inf:
            self._level = min(
                self.burst, self._level + (now_at - self._filled_at) * self.rate_per_s
            )
        self._filled_at = now_at
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True
