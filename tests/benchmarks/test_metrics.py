"""The bench checks its counts before it times them, and reports all its cases."""

from __future__ import annotations

import pytest

from benchmarks import metrics


def test_every_case_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SHAPES", ((1, 16, 4),))
    monkeypatch.setattr(metrics, "REPEATS", 2)
    counts, told = metrics.lines(0, 0.0)
    assert counts.case.startswith("counts; ")
    assert counts.target == 100
    assert told.ok is None
    assert 0 < counts.ours < counts.baseline_value * 100


def test_a_wrong_count_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_gr.metrics.registry.requests.RequestMetrics.done", lambda *_: None)
    with pytest.raises(AssertionError):
        next(iter(metrics.lines(0, 0.0)))
