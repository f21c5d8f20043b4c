"""The trigger is pure: one cause a verdict, in a fixed order, and monotone in what is left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from npu_gr.relay.trigger import Headroom, TriggerConfig, decide, reload_pays
from npu_gr.request import Verdict

CONFIG = TriggerConfig(min_prefix_tokens=10, max_inflight=2)


def test_one_cause_each() -> None:
    roomy = Headroom(inflight=0, available_bytes=100, needed_bytes=100)
    assert decide(10, roomy, CONFIG) is Verdict.PREINFER
    assert decide(9, roomy, CONFIG) is Verdict.SKIP_NOT_AT_RISK
    assert decide(10, roomy._replace(inflight=2), CONFIG) is Verdict.SKIP_LOAD
    assert decide(10, roomy._replace(available_bytes=99), CONFIG) is Verdict.SKIP_FOOTPRINT


@given(tokens=st.integers(0, 30), inflight=st.integers(0, 4), free=st.integers(0, 50), need=st.integers(0, 50))
def test_more_room_never_takes_a_yes_back(tokens: int, inflight: int, free: int, need: int) -> None:
    if decide(tokens, Headroom(inflight, free, need), CONFIG) is Verdict.PREINFER:
        assert decide(tokens + 1, Headroom(max(0, inflight - 1), free + 1, need), CONFIG) is Verdict.PREINFER


@given(copy=st.floats(0, 1), compute=st.floats(0, 1), budget=st.floats(-1, 1))
def test_a_reload_never_costs_more_than_it_saves(copy: float, compute: float, budget: float) -> None:
    assert reload_pays(copy, compute, budget) == (copy <= compute and copy <= budget)
