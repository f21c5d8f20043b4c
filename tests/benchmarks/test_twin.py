"""bench twin: the answer is checked, the counts are counts, the model is near the one published time."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks import twin
from benchmarks.ascend_twin import Twin

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here: the CPU twin cannot be built")


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "LENGTHS", (1024, 8192))
    monkeypatch.setattr(twin, "KS", (32,))
    monkeypatch.setattr(twin, "KEPT", (1.0, 0.05))
    found = list(twin.lines(seed=0))
    assert [(line.case, line.baseline) for line in found] == [
        (f"n={n} k=32 kept={kept}", name)
        for n in (1024, 8192)
        for kept in ("100%", "5%")
        for name in ("full sort", "top-k, no filter")
    ]
    for line in found:
        n = int(line.case.split()[0][2:])
        assert line.unit == "us (model)"
        assert line.ratio == pytest.approx(line.baseline_value / line.ours)
        assert line.kernel["mte2_bytes"] == n * 4 + n // 8, "each logit and each bit moves once"
        assert line.kernel["sort32_groups"] <= line.baseline_counts["sort32_groups"] == n / 32
    assert "not measured" in str(twin.table(found).title)
    assert twin.table(found).row_count == 4


def test_a_wrong_answer_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Twin.masked_topk

    def wrong(self: Twin, logits: npt.NDArray[np.float32], *rest: Any, **more: Any) -> object:
        return real(self, -logits, *rest, **more)

    monkeypatch.setattr(Twin, "masked_topk", wrong)
    with pytest.raises(AssertionError, match="masked_topk is wrong"):
        next(twin.lines(seed=0))


def test_the_model_gives_the_published_time() -> None:
    """Of pto-isa's sample: 3.24 us for a row of 1024 on one core of an A3; the model is of that size, no better."""
    assert twin.modelled_us(twin.full_sort(1024, 1000)) == pytest.approx(3.24, rel=0.25)
