"""Steps go up soon and down late, one at a time, and never flap."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.request import Brownout
from npu_gr.relay.brownout import BrownoutConfig, BrownoutControl

CONFIG = BrownoutConfig(high=1.0, low=0.3, rise_s=0.25, fall_s=2.0)


def run(control: BrownoutControl, pressure: float, from_s: float, for_s: float) -> list[Brownout]:
    return [control.observe(pressure, from_s + n * 0.05) for n in range(round(for_s / 0.05) + 1)]


def test_up_soon_and_down_late() -> None:
    control = BrownoutControl(CONFIG)
    assert run(control, 5.0, 0.0, 0.2)[-1] is Brownout.NONE
    assert run(control, 5.0, 0.25, 1.0)[-1] is Brownout.TRUNCATE
    assert run(control, 0.5, 2.0, 60.0)[-1] is Brownout.TRUNCATE  # between the two it stays
    steps = run(control, 0.0, 100.0, 6.5)
    assert steps[-1] is Brownout.NONE
    assert all(after in (before, before - 1) for before, after in pairwise(steps))
    assert steps.index(Brownout.NO_RELAY) == 40


def test_a_short_peak_changes_nothing() -> None:
    control = BrownoutControl(CONFIG)
    for second in range(20):
        run(control, 9.0, second, 0.2)
        assert run(control, 0.9, second + 0.25, 0.5)[-1] is Brownout.NONE


def test_it_has_a_ceiling_and_a_switch() -> None:
    assert run(BrownoutControl(BrownoutConfig(max_step=2)), 9.0, 0.0, 10.0)[-1] is Brownout.NO_RELAY
    assert run(BrownoutControl(BrownoutConfig(enabled=False)), 9.0, 0.0, 10.0)[-1] is Brownout.NONE
    with pytest.raises(ValueError, match=r"low: 2.0 is not below high: 0.4"):
        BrownoutConfig(low=2.0)


@given(pressures=st.lists(st.floats(0, 3), max_size=200))
def test_one_step_at_a_time(pressures: list[float]) -> None:
    control, before = BrownoutControl(CONFIG), Brownout.NONE
    for number, pressure in enumerate(pressures):
        step = control.observe(pressure, number * 0.1)
        assert abs(step - before) <= 1
        assert step <= before or pressure >= CONFIG.high
        assert step >= before or pressure <= CONFIG.low
        before = step
