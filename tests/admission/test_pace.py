"""The pace follows departures within a busy fraction of a second, and no single pause moves it far."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.admission.pace import Pace


def learnt(seconds: float, samples: int = 500) -> Pace:
    pace = Pace(1.0)
    for _ in range(samples):
        pace.observe(seconds)
    return pace


def test_the_first_samples_replace_the_guess() -> None:
    pace = Pace(1.0)
    for _ in range(16):
        pace.observe(0.001)
    assert pace.seconds < 0.07
    assert learnt(0.001).seconds == pytest.approx(0.001, rel=0.03)


def test_a_pause_moves_it_by_a_quarter_and_sixty_answers_undo_it() -> None:
    pace = learnt(0.001)
    pace.observe(0.110)
    assert 0.00115 < pace.seconds < 0.00127
    for _ in range(60):
        pace.observe(0.001)
    assert pace.seconds == pytest.approx(0.001, rel=0.05)


def test_it_counts_what_other_threads_take_of_the_core() -> None:
    pace = learnt(0.0004)
    seen = []
    for _ in range(100):
        pace.observe(0.006)  # the process stood still
        for _ in range(39):
            pace.observe(0.0004)
            seen.append(pace.seconds)
    assert sum(seen) / len(seen) == pytest.approx((0.006 + 39 * 0.0004) / 40, rel=0.1)


def test_a_pause_moves_a_fast_pace_by_a_quarter_at_most() -> None:
    for seconds in (0.0001, 0.0002, 0.0003, 0.0006):
        pace = learnt(seconds, 5000)
        pace.observe(0.110)
        assert 1.1 * seconds < pace.seconds < 1.25 * seconds


def test_a_passes_departures_come_together_and_count_as_their_mean() -> None:
    pace = Pace(0.001)
    for _ in range(100):
        for gap_s in (0.004, 0.0, 0.0, 0.0):
            pace.observe(gap_s)
    assert pace.seconds == pytest.approx(0.001, rel=0.1)


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=200))
def test_it_stays_between_nothing_and_the_largest_sample(gaps_s: list[float]) -> None:
    pace = Pace(0.001)
    for gap_s in gaps_s:
        pace.observe(gap_s)
        assert 0.0 <= pace.seconds <= max(0.001, *gaps_s)
