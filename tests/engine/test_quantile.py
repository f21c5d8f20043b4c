"""The running quantile settles where it should, and follows."""

from __future__ import annotations

import numpy as np
import pytest

from npu_gr.engine.cost import RunningQuantile


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9])
def test_it_settles_and_follows(q: float) -> None:
    random = np.random.default_rng(0)
    running = RunningQuantile(q, 5.0, rate=0.02)
    for scale in (1.0, 10.0):
        samples = random.lognormal(0.0, 0.5, 4000) * scale
        for sample in samples:
            running.observe(sample)
        assert running.value == pytest.approx(np.quantile(samples, q), rel=0.15)


def test_the_first_sample_replaces_the_guess() -> None:
    running = RunningQuantile(0.99, 1e6)
    running.observe(0.25)
    assert running.value == 0.25
