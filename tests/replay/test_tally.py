"""Sums in constant memory agree with exact ones on the samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.replay.tally import MAX_SLICES, Latency, Point, PooledAuc, Scatter, Slices


def test_latency_percentiles_are_within_a_part_in_1000() -> None:
    seconds = np.random.default_rng(0).lognormal(-5, 1.5, 20_000)
    latency = Latency()
    for value in seconds:
        latency.record(float(value))
    for percent in (50, 95, 99, 99.9):
        exact = np.sort(seconds)[round(percent / 100 * len(seconds)) - 1]
        assert latency.percentile_s(percent) == pytest.approx(exact, rel=1e-3, abs=1e-6)
    points = list(latency.cdf())
    assert points == sorted(points)
    assert points[-1][1] == 1.0
    assert len(latency) == 20_000
    latency.record(1e9)
    assert latency.percentile_s(100) == pytest.approx(3600, rel=1e-3)


@settings(deadline=None, max_examples=100)
@given(
    scores=st.lists(
        st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6, width=32)),
        min_size=1,
        max_size=40,
    ),
    data=st.data(),
)
def test_pooled_auc_is_the_exact_one_of_scores_rounded_to_11_bits(
    scores: list[float], data: st.DataObject
) -> None:
    labels = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    )
    values = np.array(scores)
    pooled = PooledAuc()
    pooled.add(values, labels)
    mantissa, exponent = np.frexp(values.astype(np.float32).astype(np.float64))
    rounded = np.ldexp(np.sign(mantissa) * np.floor(np.abs(mantissa) * 4096 + 0.5) / 4096, exponent)
    small = np.abs(values) < 1e-30  # subnormals lose bits of their own
    if not small[values != 0].any() and labels.any() and not labels.all():
        wins = [
            1.0 if p > n else 0.5 if p == n else 0.0
            for p in rounded[labels]
            for n in rounded[~labels]
        ]
        assert pooled.value() == pytest.approx(np.mean(wins), abs=1e-9)


def test_slices_double_their_width_and_lose_nothing() -> None:
    slices = Slices()
    for i in range(10_000):
        part = slices.at(i * 0.1)
        part.num_due += 1
        part.latency.record(i * 1e-6)
    assert len(slices.slices) <= MAX_SLICES
    assert slices.width_s >= 1000 / MAX_SLICES
    assert (
        sum(part.num_due for part in slices.slices)
        == sum(len(part.latency) for part in slices.slices)
        == 10_000
    )
    width = round(slices.width_s / 0.1)
    assert slices.slices[3].num_due == pytest.approx(width, abs=1)


@settings(deadline=None, max_examples=50)
@given(st.permutations(range(20)), st.integers(1, 8))
def test_a_sample_of_points_is_the_same_in_whatever_order_they_come(
    order: list[int], most: int
) -> None:
    ascending, mixed = Scatter(most), Scatter(most)
    for number in range(20):
        ascending.add(number, Point(number * 0.1, 0.01, "hbm_hit"))
    for number in order:
        mixed.add(number, Point(number * 0.1, 0.01, "hbm_hit"))
    assert mixed.points() == ascending.points()
    assert len(mixed.points()) == most
