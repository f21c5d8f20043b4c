"""Every op has a line, on whatever device; the results are checked first."""

from __future__ import annotations

import pytest

from benchmarks import kernels_device


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in {
        "COPY_BYTES": 1 << 12, "WIDTHS": (3,), "CODES": 20, "LENGTHS": (9,), "CANDIDATES": 4, "PROMPT": 9, "BEAMS": 3,
    }.items():  # fmt: skip
        monkeypatch.setattr(kernels_device, name, small)
    found = list(kernels_device.lines("cpu", seed=0, seconds=0.0))
    assert [line.case.split()[0] for line in found] == ["beam_topk", "hstu_causal", "hstu_targets", "beam_attention"]
    assert all(line.ours > 0 and line.floor and line.of_floor for line in found)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_device, "TOLERANCE", -1.0)
    monkeypatch.setattr(kernels_device, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(kernels_device, "WIDTHS", (3,))
    with pytest.raises(AssertionError, match="beam_topk"):
        list(kernels_device.lines("cpu", seed=0, seconds=0.0))
