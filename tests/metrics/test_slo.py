"""What a request counts as, and what that leaves of a budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.metrics.slo import LONGEST_S, RATE_S, SLOT_S, Counts, Promise, Result, Rolling, evaluate


@pytest.mark.parametrize(
    ("status", "took_s", "result"),
    [
        (200, 0.05, Result.GOOD),
        (202, 0.0501, Result.SLOW),
        (404, 9.0, None),
        (409, 0.0, None),
        (429, 0.0, Result.FAILED),
        (500, 0.0, Result.FAILED),
        (504, 0.0, Result.FAILED),
        (499, 0.05, None),
        (499, 0.0501, Result.FAILED),  # the client gave up, but it was late by then
    ],
)
def test_evaluate(status: int, took_s: float, result: Result | None) -> None:
    assert evaluate(status, took_s, 0.05) is result


@pytest.mark.parametrize(
    ("status", "has_s", "result"),
    [
        (504, 0.025, Result.FAILED),
        (504, 0.0249, None),  # under half of what the promise is about
        (429, 0.0, None),
        (200, 1e-5, Result.GOOD),
        (500, 1e-5, Result.FAILED),  # broken is broken, whatever the caller grants
        (503, 1e-5, Result.FAILED),
    ],
)
def test_nothing_is_promised_to_a_caller_who_grants_no_time(
    status: int, has_s: float, result: Result | None
) -> None:
    assert evaluate(status, 0.01, 0.05, has_s) is result


def test_the_budget_by_hand() -> None:
    counts = Counts(good=985, slow=5, failed=10)
    assert counts.attainment(Promise.LATENCY) == pytest.approx(985 / 990)
    assert counts.attainment(Promise.AVAILABILITY) == 0.99
    assert counts.budget_remaining(Promise.AVAILABILITY, 0.98) == pytest.approx(0.5)
    assert counts.budget_remaining(Promise.AVAILABILITY, 0.995) == pytest.approx(-1.0)
    assert Counts().attainment(Promise.LATENCY) == 1.0
    assert Counts().budget_remaining(Promise.LATENCY, 0.99) == 1.0


@given(
    gaps=st.lists(st.floats(0, 900), max_size=60),
    window_s=st.sampled_from([SLOT_S, 300.0, LONGEST_S]),
    result=st.sampled_from(list(Result)),
)
def test_a_window_holds_what_came_within_it(
    gaps: list[float], window_s: float, result: Result
) -> None:
    rolling, now_at, came_s = Rolling(), 1e6, list[float]()
    for gap in gaps:
        now_at += gap
        rolling.add(now_at, result)
        came_s.append(now_at)
    first_slot = int((now_at - window_s) // SLOT_S) + 1
    want = sum(s // SLOT_S >= first_slot for s in came_s)
    assert (
        getattr(rolling.over(now_at, window_s), result.value)
        == want
        == sum(rolling.over(now_at, window_s))
    )
    assert sum(rolling.total) == len(gaps)


@pytest.mark.parametrize("for_s", [10.0, 15.0, 48.0, 59.0, 61.0, 300.0, 4000.0])
@pytest.mark.parametrize("idle_s", [0.0, 33.0, 400.0])
def test_a_steady_rate_is_right_from_the_beginning(for_s: float, idle_s: float) -> None:
    """However long nothing came before, and whatever came before that."""
    rolling, now_at = Rolling(), 1e6 + 7
    if idle_s >= RATE_S:
        rolling.add(now_at, Result.GOOD, 1000)
    now_at += idle_s
    for tick in range(round(for_s * 28)):
        rolling.add(now_at + tick / 28, Result.GOOD)
        rolling.add(now_at + tick / 28, Result.FAILED)
    assert rolling.good_per_s(now_at + for_s) == pytest.approx(28, rel=0.01)
    assert rolling.good_per_s(now_at + for_s + 2 * RATE_S) == 0.0


def test_one_request_is_no_rate_of_one_a_second() -> None:
    rolling = Rolling()
    assert rolling.good_per_s(5.0) == 0.0
    rolling.add(5.0, Result.GOOD)
    assert rolling.good_per_s(5.1) == 1 / SLOT_S
