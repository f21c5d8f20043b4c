"""bench twin's second part: the kernels run, and the model follows from what they did."""

from __future__ import annotations

import shutil

import pytest

from npu_gr.bench import hstu_model
from npu_gr.bench.ascend_twin import Twin

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here: the CPU twin cannot be built")


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hstu_model, "CHUNK_TOKENS", 64)
    found = list(hstu_model.lines(seed=0, history=128, suffix=5, candidates=33))
    assert [line.case for line in found] == [
        f"{name}, 8 layers, {column}"
        for name in ("rank 33 of 133 tokens", "prefill 128 in chunks of 64")
        for column in ("autofuse", "calibrated")
    ]
    for line in found:
        assert line.unit == "ms (model)"
        assert line.ok == (line.ours <= line.baseline_value)
        assert 0 < line.ours < line.baseline_value, "small passes are cheap"
    rank, prefill = found[0], found[2]
    assert rank.host_ms == pytest.approx((0.4, 0.8)), "10 launches of 8 layers, at 5 and at 10 us"
    assert prefill.host_ms == pytest.approx((0.8, 1.6)), "two chunks"


def test_what_moves_is_what_must() -> None:
    """Of a rank: scores in and out once, keys and values out of pages and into the workspace."""
    layer = hstu_model.counted(Twin(), 600, 0, 40, seed=0, cores=4)
    alive = 640 // 256 * 256 + 256  # of the last block of keys the queries see some
    assert layer.scores.total["mte3_bytes"] == 4 * 40 * layer.key_slots * 2
    scores_in = layer.scores.total["mte2_bytes"] - 4 * 40 * alive * 2
    assert 0 <= scores_in < 100_000, "times, tables and windows are little beside"
    cells = layer.key_slots * 4 * 64 * 2 * 2
    assert layer.rows.total["mte3_bytes"] == cells + 2 * 40 * 4 * 64 * 2, "k and v with their zeros, q and u"
