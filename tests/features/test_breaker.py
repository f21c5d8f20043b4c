"""A breaker opens after failures, lets one probe through at a time, and closes with the first that succeeds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.features.breaker import NEWEST, StoreBreaker


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[StoreBreaker, Clock]:
    clock = Clock()
    return StoreBreaker(3, 0.1, clock), clock


def passed(breaker: StoreBreaker) -> int:
    era = breaker.enter()
    assert era is not None
    return era


def opened() -> tuple[StoreBreaker, Clock]:
    breaker, clock = made()
    for _ in range(3):
        breaker.failed(passed(breaker))
    assert breaker.is_open
    return breaker, clock


def test_failures_in_a_row_open_it_and_a_success_starts_anew() -> None:
    breaker, _ = made()
    for _ in range(2):
        assert not breaker.failed(passed(breaker))
    breaker.succeeded(passed(breaker))
    for _ in range(2):
        assert not breaker.failed(passed(breaker))
    assert not breaker.is_open
    assert breaker.failed(passed(breaker))
    assert breaker.is_open
    assert breaker.enter() is None


def test_half_of_the_newest_open_it() -> None:
    breaker, _ = made()
    for turn in range(NEWEST):
        assert not breaker.is_open
        (breaker.failed if turn % 2 else breaker.succeeded)(passed(breaker))
    assert breaker.is_open


def test_one_probe_at_a_time_and_a_success_closes_it() -> None:
    breaker, clock = opened()
    clock.now = 0.11
    probe = passed(breaker)
    assert breaker.enter() is None
    assert breaker.succeeded(probe)
    assert not breaker.is_open
    passed(breaker)


def test_a_probe_that_fails_waits_again() -> None:
    breaker, clock = opened()
    clock.now = 0.11
    breaker.failed(passed(breaker))
    clock.now = 0.2
    assert breaker.enter() is None
    clock.now = 0.22
    breaker.given_up(passed(breaker))
    passed(breaker)  # one that was not made leaves its turn to the next


def test_calls_from_before_do_not_count() -> None:
    breaker, clock = made()
    early = [passed(breaker) for _ in range(6)]
    for era in early[:3]:
        breaker.failed(era)
    assert breaker.is_open
    assert not breaker.succeeded(early[3])
    assert breaker.is_open
    clock.now = 0.11
    breaker.succeeded(passed(breaker))
    for era in early[3:]:
        breaker.failed(era)
    assert not breaker.is_open


@pytest.mark.parametrize("works", [True, False])
@settings(deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["enter", "ok", "bad", "give up", "wait"])))
def test_whatever_happens_it_recovers(works: bool, steps: list[str]) -> None:
    """After any history a dependency that works is used again within two calls, and one that fails is not."""
    breaker, clock = made()
    out: list[int] = []
    for step in steps:
        if step == "wait":
            clock.now += 0.06
        elif step == "enter":
            era = breaker.enter()
            if era is not None:
                out.append(era)
        elif out:
            {"ok": breaker.succeeded, "bad": breaker.failed, "give up": breaker.given_up}[step](out.pop())
    for era in out:
        breaker.given_up(era)
    for _ in range(10):
        clock.now += 0.2
        era = breaker.enter()
        assert era is not None
        (breaker.succeeded if works else breaker.failed)(era)
    assert breaker.is_open != works
