"""Wrong keys over the rate are held back, a bounded number of them at a time."""

from __future__ import annotations

from npu_gr.server.auth.keys import BURST, HOLD_S, MAX_HELD, RATE_PER_S, Throttle


def test_a_burst_is_answered_at_once_and_the_rest_is_held_back() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0])
    holds = [throttle.hold_s() for _ in range(int(BURST) + 5)]
    assert holds == [0.0] * int(BURST) + [HOLD_S] * 5
    now[0] += 1 / RATE_PER_S
    assert [throttle.hold_s() for _ in range(2)] == [0.0, HOLD_S]


def test_no_more_than_so_many_are_held_at_a_time() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0])
    for _ in range(int(BURST) + MAX_HELD):
        throttle.hold_s()
    assert throttle.hold_s() == 0.0
    now[0] += HOLD_S
    held = [throttle.hold_s() for _ in range(int(RATE_PER_S * HOLD_S) + 1)]
    assert held[-1] == HOLD_S, "those before have left"
