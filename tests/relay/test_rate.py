"""Together the tenants never exceed the rate; one alone has all of it; one within its share is never refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.shares import MAX_TENANTS, WANTS_S
from npu_gr.relay.rate import TenantRates
from tests.clock import Clock


def taken(rates: TenantRates, clock: Clock, seconds: float, every_s: dict[str, float]) -> dict[str, tuple[int, int]]:
    """Let each tenant ask at its pace; returns how often each asked, and how often it got one."""
    counts = dict.fromkeys(every_s, (0, 0))
    due = sorted((n * gap_s, tenant) for tenant, gap_s in every_s.items() for n in range(int(seconds / gap_s)))
    began_at = clock.now_at
    for at, tenant in due:
        clock.now_at = began_at + at
        asked, got = counts[tenant]
        counts[tenant] = asked + 1, got + rates.take(tenant)
    return counts


def test_one_tenant_alone_has_the_whole_rate() -> None:
    clock = Clock()
    rates = TenantRates(50.0, 10.0, clock)
    assert taken(rates, clock, 20.0, {"e": 0.001})["e"][1] == pytest.approx(50.0 * 20 + 10.0, abs=2)
    assert not rates.is_shared()


@pytest.mark.parametrize("gap_s", [0.05, 1.0, 20.0, 2 * WANTS_S])
def test_a_flood_takes_no_token_from_a_tenant_within_its_share(gap_s: float) -> None:
    clock = Clock()
    rates = TenantRates(50.0, 25.0, clock)
    counts = taken(rates, clock, 10 * gap_s + 10.0, {"e": 0.005, "v": gap_s})
    asked, got = counts["v"]
    assert got == asked
    assert counts["e"][1] + got > 0.9 * 50.0 * (10 * gap_s)  # and nothing is left unused


def test_the_rate_is_shared_by_weight() -> None:
    clock = Clock()
    rates = TenantRates(40.0, 4.0, clock)
    rates.weigh({"heavy": 3.0})
    counts = taken(rates, clock, 30.0, {"light": 0.004, "heavy": 0.004})
    assert counts["heavy"][1] / counts["light"][1] == pytest.approx(3.0, rel=0.1)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.floats(0, 0.5)), max_size=200),
    st.floats(0.5, 50),
    st.floats(0, 10),
)
def test_all_together_never_exceed_the_rate(asks: list[tuple[int, float]], rate: float, burst: float) -> None:
    clock = Clock()
    rates = TenantRates(rate, burst, clock)
    count = 0
    for tenant, after_s in asks:
        clock.now_at += after_s
        count += rates.take(f"t{tenant}")
        assert count <= max(burst, 1.0) + rate * clock.now_at + MAX_TENANTS + 2
