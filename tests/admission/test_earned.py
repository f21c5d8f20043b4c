"""Whoever ranks may signal; whoever only signals gets a small part of the event loop, however many names it invents."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.admission.earned import MOST, SHARE, SIGNALS, EarnedSignals
from tests.clock import Clock

PACE_S = 0.001


def test_a_tenant_that_ranks_as_often_as_it_signals_is_never_refused() -> None:
    clock = Clock()
    earned = EarnedSignals(clock)
    for _ in range(10_000):
        assert earned.take("shop", PACE_S)
        earned.earn("shop")


@settings(deadline=None, max_examples=20)
@given(num_tenants=st.integers(1, 200), rate_per_s=st.sampled_from([200, 2000, 20_000]))
def test_floods_of_all_tenants_together_take_their_share_of_the_loop(num_tenants: int, rate_per_s: int) -> None:
    clock = Clock()
    earned = EarnedSignals(clock)
    for number in range(64):  # what tenants begin with, of all accounts that there may be
        for _ in range(int(MOST)):
            earned.take(f"t{number}", PACE_S)
    for _ in range(int(MOST)):
        earned.take("shared", PACE_S)
    taken = 0
    for number in range(rate_per_s * 2):
        clock.now_at += 1 / rate_per_s
        taken += earned.take(f"t{number % num_tenants}", PACE_S)
    assert taken <= SHARE / PACE_S * 2 * 1.1 + 65


def test_what_is_saved_is_bounded() -> None:
    clock = Clock()
    earned = EarnedSignals(clock)
    for _ in range(1000):
        earned.earn("shop")
    assert sum(earned.take("shop", 1e9) for _ in range(1000)) == MOST


def test_a_rank_earns_signals_for_its_own_tenant_alone() -> None:
    earned = EarnedSignals(Clock())
    for tenant in ("shop", "bank"):
        while earned.take(tenant, 1e9):
            pass
    earned.earn("shop")
    assert sum(earned.take("shop", 1e9) for _ in range(10)) == SIGNALS
    assert not earned.take("bank", 1e9)
