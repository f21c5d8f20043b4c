"""A rank waits only as long as it can still do without, and computes only what it can finish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.engine.cost import CostModel
from npu_gr.relay.config import RelayConfig
from npu_gr.relay.rank_time import RankTime
from tests.relay.rig import bench

MARGIN_S = 0.01


async def test_what_a_rank_has_time_for() -> None:
    async with bench() as b:
        b.engine.cost = CostModel(0.0, 0.001, 0.0, 0.0, 0.0)  # a millisecond a token
        b.engine.objective_s = 0.05
        config = RelayConfig(margin_s=MARGIN_S)

        def time(deadline_at: float, num_tokens: int = 100) -> RankTime:
            return RankTime(config, b.engine, lambda: 10.0, num_tokens, 1, deadline_at)

        assert time(10.5).left_s == pytest.approx(0.49)
        assert time(10.5).order_at == pytest.approx(10.05)  # its objective
        assert time(10.02).order_at == pytest.approx(10.02)  # or its deadline
        assert time(10.5).patience_s == pytest.approx(0.5 - 0.1 - 2 * MARGIN_S)
        assert time(10.08).patience_s == pytest.approx(0.08 - MARGIN_S)  # no time to do without: until the end
        assert time(9.0).patience_s == 0.0
        assert time(10.5).first_token == 0
        assert time(10.05).first_token == 60  # 40 ms for 40 tokens
        assert time(10.05, num_tokens=0).first_token == 0
        assert time(10.05).is_enough_from(61)
        assert not time(10.05).is_enough_from(50)
        whole = RelayConfig(margin_s=MARGIN_S, degrade=False)
        assert RankTime(whole, b.engine, lambda: 10.0, 100, 1, 10.05).first_token == 0


@given(left=st.floats(0, 2), a1=st.floats(0, 0.01))
def test_after_waiting_there_is_time_to_do_without_or_no_time_was_there(left: float, a1: float) -> None:
    class Idle:
        cost = CostModel(0.0, a1, 0.0, 0.0, 0.0)
        queue_s = 0.0
        objective_s = 1.0

    time = RankTime(RelayConfig(margin_s=MARGIN_S), Idle(), lambda: 0.0, 100, 1, left)
    full_s = Idle.cost.full_s(100, 1) + 2 * MARGIN_S
    if left > full_s:
        assert left - time.patience_s >= full_s - 1e-9
    else:
        assert time.patience_s == max(left - MARGIN_S, 0.0)
