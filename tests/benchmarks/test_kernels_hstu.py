"""The bench checks before it times, and its naive baseline computes what the reference does without a bias."""

from __future__ import annotations

import pytest
import torch

from benchmarks import kernels_hstu, rank
from benchmarks.kernels_hstu import NaiveCachedBackend
from npu_gr.backend.calls import BiasTables, HstuCall
from npu_gr.backend.cpu.library import supported
from npu_gr.backend.reference import ReferenceBackend

_config = rank.config


def test_the_naive_path_is_the_reference_without_bias() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 2, 8).unbind(0)
    past = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    bias, times = BiasTables(torch.zeros(2, 2), torch.zeros(2, 64)), torch.arange(9)
    call = HstuCall(q, k, v, [past], times, bias, 0.3, query_time=9)
    torch.testing.assert_close(NaiveCachedBackend().hstu_targets(call), ReferenceBackend().hstu_targets(call))


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported():
        pytest.skip("no kernels")
    monkeypatch.setattr(kernels_hstu, "LENGTHS", (70,))
    monkeypatch.setattr(kernels_hstu, "CANDIDATES", (5,))
    monkeypatch.setattr(rank, "config", lambda: _config(num_layers=2, dim=32))
    found = list(kernels_hstu.lines("", seed=0, budget_s=0.0))
    assert len(found) == 2 * (3 + 1)  # dtypes x (pack_kv, prefill, rank, request)
    for line in found:
        assert line.floor is not None
        assert line.of_floor is not None
        assert line.of_floor > 0
        assert line.ratio == pytest.approx(line.baseline_value / line.ours)
    monkeypatch.setattr(kernels_hstu, "TOLERANCE", dict.fromkeys(kernels_hstu.DTYPES, -1.0))
    with pytest.raises(AssertionError):
        list(kernels_hstu.lines("", seed=0, budget_s=0.0))
