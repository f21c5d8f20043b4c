"""Who gets how much of the instance, how long a process waits for its next start, and what keys owe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.bucket import TokenBucket
from npu_gr.front.backoff import FIRST_S, MOST_S, WELL_S, Backoff, Deaths
from npu_gr.front.credit import LEAST, WorkerDemand, slots

WINDOWS = {"rank": 40, "generate": 10}
TENANTS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 200), max_size=3)


def wanted(num: int, **tenants: int) -> WorkerDemand:
    return WorkerDemand({"rank": num} if num else {}, tenants)


def test_while_the_window_is_not_full_nobody_is_bounded() -> None:
    assert slots([wanted(20, a=20), wanted(20, a=20)], WINDOWS, {}) == [{}, {}]
    assert slots([wanted(1000, a=1000), wanted(0)], WINDOWS, {}) == [{}, {}]  # whoever is alone has everything


def test_workers_share_by_demand() -> None:
    shares = slots([wanted(75, a=75), wanted(25, a=25)], WINDOWS, {})
    assert [one["rank"] for one in shares] == [30, 10]
    assert [one["generate"] for one in shares] == [8, LEAST]


def test_a_tenant_at_one_worker_is_not_pushed_out_by_one_at_many() -> None:
    hot = [wanted(100, hot=100), wanted(100, hot=100), wanted(30, small=30)]
    assert [one["rank"] for one in slots(hot, WINDOWS, {})] == [10, 10, 20]
    assert [one["rank"] for one in slots(hot, WINDOWS, {"small": 3.0})] == [5, 5, 30]


@given(st.lists(TENANTS, min_size=1, max_size=5), st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10)))
def test_nobody_has_nothing_and_together_they_have_the_window(
    workers: list[dict[str, int]], weights: dict[str, float]
) -> None:
    shares = slots([wanted(sum(one.values()), **one) for one in workers], WINDOWS, weights)
    for one in shares:
        assert all(num >= LEAST for num in one.values())
    if any(shares):
        total = sum(one["rank"] for one in shares)
        assert WINDOWS["rank"] <= total <= WINDOWS["rank"] + len(workers) * (LEAST + 1)


def test_backoff_doubles_and_a_long_life_forgives() -> None:
    backoff = Backoff()
    waits = [backoff.after(0.5) for _ in range(8)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, MOST_S, MOST_S]
    assert backoff.after(WELL_S) == FIRST_S


def test_three_deaths_in_ten_seconds_are_many() -> None:
    deaths = Deaths()
    for at in (0.0, 5.0):
        deaths.add(at)
        assert not deaths.are_many(at)
    deaths.add(9.0)
    assert deaths.are_many(9.0)
    assert not deaths.are_many(10.0)
    deaths.add(15.1)
    assert not deaths.are_many(15.1)


def test_what_a_key_spent_elsewhere_is_owed_here() -> None:
    bucket = TokenBucket(rate_per_s=10.0, burst=10.0)
    assert bucket.take(0.0)
    bucket.owe(9)
    assert not bucket.take(0.0)
    bucket.owe(100)  # no more than a second's worth is owed
    assert not bucket.take(1.0)
    assert bucket.take(1.2)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_rate_holds_over_several_processes(num_workers: int) -> None:
    """Every process lets in what it can and tells the others 20 times a second: together they keep to the rate."""
    buckets = [TokenBucket(rate_per_s=100.0, burst=100.0) for _ in range(num_workers)]
    taken = 0
    unsaid = [0] * num_workers
    for tick in range(10_000):  # ten seconds, 1,000 requests a second at each process
        now_at = tick * 1e-3
        for place, bucket in enumerate(buckets):
            if bucket.take(now_at):
                taken += 1
                unsaid[place] += 1
        if tick % 50 == 0:
            for place, bucket in enumerate(buckets):
                bucket.owe(sum(unsaid) - unsaid[place])
            unsaid = [0] * num_workers
    assert 900 <= taken <= 1100 + 100 * num_workers  # the rate, and a burst at each
