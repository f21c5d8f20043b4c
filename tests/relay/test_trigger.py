"""The trigger is arithmetic: one cause a verdict, in a fixed order, monotone, within its rate.

Together the tenants never exceed the rate; one alone has all of it; one within its share is never
rejected.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.request import Verdict
from npu_gr.core.shares import MAX_TENANTS, WANTS_S, TokenBucket
from npu_gr.relay.config import TriggerConfig
from npu_gr.relay.trigger import (
    AtShare,
    Forecast,
    Headroom,
    TenantRates,
    admitted_rate,
    at_risk,
    decide,
    live_limit,
    reload_pays,
)
from tests.clock import Clock

CONFIG = TriggerConfig(min_prefix_tokens=10, max_inflight=2, rank_budget_s=0.05, margin_s=0.01)
LATE, IN_TIME = Forecast(0.02, 0.03, 0.0), Forecast(0.01, 0.02, 0.005)
ROOMY = Headroom(inflight=0, available_bytes=100, needed_bytes=100)
seconds = st.floats(0, 0.2)


def verdict(
    tokens: int = 10,
    forecast: Forecast = LATE,
    room: Headroom = ROOMY,
    config: TriggerConfig = CONFIG,
) -> Verdict:
    return decide(tokens, forecast, room, config, None, "")


class OneBucket:
    """The same for all tenants."""

    def __init__(self) -> None:
        self.bucket = TokenBucket(1.0, 1.0)

    def take(self, tenant: str) -> bool:
        return self.bucket.take(0.0)


def test_one_cause_each() -> None:
    assert verdict() is Verdict.PREINFER
    assert verdict(9) is Verdict.SKIP_NOT_AT_RISK
    assert verdict(forecast=IN_TIME) is Verdict.SKIP_NOT_AT_RISK
    assert (
        verdict(forecast=IN_TIME, config=TriggerConfig(min_prefix_tokens=10, policy="always"))
        is Verdict.PREINFER
    )
    assert verdict(room=ROOMY._replace(inflight=2)) is Verdict.SKIP_LOAD
    assert verdict(room=ROOMY._replace(available_bytes=99)) is Verdict.SKIP_FOOTPRINT
    empty = OneBucket()
    assert empty.take("")
    assert decide(10, LATE, ROOMY, CONFIG, empty, "") is Verdict.SKIP_RATE


def test_a_tenant_at_its_share_of_what_is_used_up_gets_skip_share() -> None:
    empty = OneBucket()
    assert empty.take("")
    whole = ROOMY._replace(at_share=AtShare(inflight=True, bytes=True, rate=True))
    for room in (whole._replace(inflight=2), whole._replace(available_bytes=99), whole):
        assert decide(10, LATE, room, CONFIG, empty, "") is Verdict.SKIP_SHARE
    assert verdict(room=whole) is Verdict.PREINFER  # a share is no limit where nothing is used up


def test_what_is_rejected_for_another_reason_takes_nothing_from_the_rate() -> None:
    bucket = OneBucket()
    assert decide(10, LATE, ROOMY._replace(inflight=2), CONFIG, bucket, "") is Verdict.SKIP_LOAD
    assert decide(10, LATE, ROOMY, CONFIG, bucket, "") is Verdict.PREINFER


@given(
    tokens=st.integers(0, 30),
    inflight=st.integers(0, 4),
    free=st.integers(0, 50),
    need=st.integers(0, 50),
)
def test_more_room_never_takes_a_yes_back(tokens: int, inflight: int, free: int, need: int) -> None:
    if verdict(tokens, room=Headroom(inflight, free, need)) is Verdict.PREINFER:
        assert (
            verdict(tokens + 1, room=Headroom(max(0, inflight - 1), free + 1, need))
            is Verdict.PREINFER
        )


@given(queue=seconds, full=seconds, residual=seconds, more=seconds)
def test_risk_grows_with_whatever_takes_time(
    queue: float, full: float, residual: float, more: float
) -> None:
    if at_risk(Forecast(queue, full, residual), 0.05, 0.005):
        assert at_risk(Forecast(queue + more, full, residual), 0.05, 0.005)
        assert at_risk(Forecast(queue, full + more, residual), 0.05, 0.005)
        assert at_risk(Forecast(queue, full, residual + more), 0.05, 0.005)


def test_the_paper_s_example() -> None:
    """Half of 64 GiB for psi, 8 layers x 256 x fp32 x 2,048 tokens (arXiv:2601.01712)."""
    l_max = live_limit(32 * 2**30, 32 * 2**20)
    assert l_max == 1024
    assert admitted_rate(l_max, 0.3, None) == pytest.approx(3413, rel=1e-3)
    assert admitted_rate(l_max, 0.3, 200.0) == 200.0


@given(
    hbm=st.integers(1, 10**9),
    kv=st.integers(1, 10**6),
    t_life=st.floats(0.01, 10),
    q_m=st.floats(0.1, 1e4),
)
def test_more_memory_or_smaller_prefixes_never_lower_what_is_admitted(
    hbm: int, kv: int, t_life: float, q_m: float
) -> None:
    rate = admitted_rate(live_limit(hbm, kv), t_life, q_m)
    assert rate <= min(live_limit(hbm, kv) / t_life, q_m)
    assert admitted_rate(live_limit(hbm * 2, kv), t_life, q_m) >= rate
    assert admitted_rate(live_limit(hbm, max(1, kv // 2)), t_life, q_m) >= rate


@given(
    gaps=st.lists(st.floats(0, 1), min_size=1, max_size=200),
    rate=st.floats(0.5, 50),
    burst=st.floats(0, 10),
)
def test_a_bucket_never_gives_more_than_its_rate_and_burst(
    gaps: list[float], rate: float, burst: float
) -> None:
    bucket, now_at, taken = TokenBucket(rate, burst), 0.0, 0
    for gap in gaps:
        now_at += gap
        taken += bucket.take(now_at)
        assert taken <= max(burst, 1.0) + rate * (now_at - gaps[0]) + 1e-6
    assert taken >= 1
    assert not math.isnan(bucket.burst)


@given(copy=st.floats(0, 1), compute=st.floats(0, 1), budget=st.floats(-1, 1))
def test_a_reload_never_costs_more_than_it_saves(
    copy: float, compute: float, budget: float
) -> None:
    assert reload_pays(copy, compute, budget) == (copy <= compute and copy <= budget)


def taken(
    rates: TenantRates, clock: Clock, seconds: float, every_s: dict[str, float]
) -> dict[str, tuple[int, int]]:
    """Let each tenant ask at its pace; returns how often each asked, and how often it got one."""
    counts = dict.fromkeys(every_s, (0, 0))
    due = sorted(
        (n * gap_s, tenant)
        for tenant, gap_s in every_s.items()
        for n in range(int(seconds / gap_s))
    )
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
def test_all_together_never_exceed_the_rate(
    asks: list[tuple[int, float]], rate: float, burst: float
) -> None:
    clock = Clock()
    rates = TenantRates(rate, burst, clock)
    count = 0
    for tenant, after_s in asks:
        clock.now_at += after_s
        count += rates.take(f"t{tenant}")
        assert count <= max(burst, 1.0) + rate * clock.now_at + MAX_TENANTS + 2
