"""The lines are there, checked against the reference before they are timed; a missing library is said."""

from __future__ import annotations

import pytest

from benchmarks import kernels, kernels_topk
from npu_gr.backend.cpu.library import supported
from npu_gr.core.errors import ConfigError


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported():
        pytest.skip("no kernels")
    monkeypatch.setattr(kernels_topk, "WIDTHS", (16,))
    monkeypatch.setattr(kernels_topk, "COLD_BYTES", 1)
    monkeypatch.setattr(kernels_topk, "CATALOGUES", (1000, 3000))
    monkeypatch.setattr("benchmarks.roofs._READ_FLOATS", 1 << 12)
    found = list(kernels.lines(supported()[0], seed=0, budget_s=0.0, parts=("roofs", "topk")))
    assert sum(line.case.startswith("roof:") for line in found) >= 2
    assert {line.unit for line in found} == {"GB/s", "GFLOP/s", "ms"}
    assert all(line.ours > 0 and line.ratio > 0 for line in found)
    assert sum("3000 items" in line.case or "items=3000" in line.case for line in found) == 2


def test_a_pass_beside_its_baseline() -> None:
    """What holds the interpreter's lock is a part of the pass."""
    if not supported():
        pytest.skip("no kernels")
    found = list(kernels.lines(supported()[0], seed=0, budget_s=0.0, parts=("pass",)))
    assert len(found) == 6
    for whole, locked in zip(found[::2], found[1::2], strict=True):
        assert 0 < locked.ours < whole.ours == locked.baseline_value


def test_without_kernels_it_says_so() -> None:
    with pytest.raises(ConfigError, match="bench kernels"):
        list(kernels.lines("mmx", seed=0, budget_s=0.0))
