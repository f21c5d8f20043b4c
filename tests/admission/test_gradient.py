"""The limit finds what a server sustains within the objective, from above and from below."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.admission.gradient import GradientLimit


def load(limit: GradientLimit, service_of_objective: float, offered: int, steps: int = 3000) -> None:
    """A server that works one request after the other: latency is the number in flight times its service time."""
    for _ in range(steps):
        inflight = min(offered, limit.limit)
        limit.observe(inflight * service_of_objective, inflight)


@pytest.mark.parametrize("service", [0.01, 0.05, 0.1])
def test_it_settles_where_latency_is_near_its_share_of_the_objective(service: float) -> None:
    limit = GradientLimit(1, 500)
    load(limit, service, 10_000)
    assert 0.6 <= limit.limit * service <= 1.1
    before = limit.limit
    load(limit, service / 2, 10_000)  # the server got faster
    assert limit.limit > 1.5 * before


def test_unused_it_does_not_grow_and_unhurried_it_does_not_shrink() -> None:
    limit = GradientLimit(1, 100)
    load(limit, 0.1, 3)
    assert limit.limit == 100
    load(limit, 0.1, 1000)
    settled = limit.limit
    load(limit, 0.001, 2)
    assert limit.limit == settled


@given(samples=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1000)), max_size=300))
def test_it_stays_within_its_bounds(samples: list[tuple[float, int]]) -> None:
    limit = GradientLimit(4, 64, window=3)
    for sample, inflight in samples:
        limit.observe(sample, inflight)
        assert 4 <= limit.limit <= 64
