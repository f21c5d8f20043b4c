"""A share is a part by weight among those that want; alone one may have all.

Invented tenants have one account.
"""

from __future__ import annotations

import pytest

from npu_gr.core.shares import MAX_TENANTS, OTHERS, WANTS_S, Account, Shares
from tests.clock import Clock


def shares() -> tuple[Shares[Account], Clock]:
    clock = Clock()
    return Shares(Account, clock), clock


def test_shares_are_by_weight_among_those_that_want() -> None:
    made, clock = shares()
    made.weights = {"heavy": 3.0}
    light = made.asking("light")
    assert made.ratios() == {light: 1.0}
    heavy = made.asking("heavy")
    assert made.ratios() == {light: 0.25, heavy: 0.75}
    light.held, heavy.held = 30, 70
    assert made.is_over(light, made.ratios(), 100)
    assert not made.is_over(heavy, made.ratios(), 100)
    clock.now_at = WANTS_S / 2
    made.asked(heavy)
    clock.now_at = WANTS_S
    assert made.ratios() == {heavy: 1.0}  # the other has gone
    assert made.is_over(light, made.ratios(), 100)


@pytest.mark.parametrize("named", [{}, {"v": 2.0}])
def test_invented_names_share_one_account_and_a_named_tenant_has_its_own(
    named: dict[str, float],
) -> None:
    made, clock = shares()
    made.weights = named
    accounts = {made.asking(f"made up {n}") for n in range(10_000)}
    assert len(accounts) == MAX_TENANTS + 1
    late = made.asking("v")
    assert (late in accounts) == (not named)
    assert late.name == ("v" if named else OTHERS)
    clock.now_at = WANTS_S
    # those that want nothing and hold nothing are forgotten
    assert made.asking("new").name == "new"
    assert len(made.accounts) == 1
