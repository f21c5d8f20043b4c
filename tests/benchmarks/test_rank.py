"""The bench counts the operations that are done, checks before it times, and names its baseline."""

from __future__ import annotations

import pytest
import torch

from benchmarks import rank
from benchmarks.line import timed_in_turn


def test_flops_by_hand() -> None:
    """One layer of width 8, 1 head of 4: candidates cost 5 projections and one pair a key."""
    from npu_gr.model.config import HSTUConfig

    shape = HSTUConfig(num_items=1, actions=("a",), tasks=("t",), dim=8, num_layers=1, num_heads=1, qk_dim=4, v_dim=4)
    row, pair = 2 * 8 * 16 + 2 * 4 * 8, 2 * 8
    assert rank.flops(shape, 10, 3, cached=True) == 3 * row + 3 * 11 * pair
    assert rank.flops(shape, 10, 3, cached=False) == 3 * row + 3 * 11 * pair + 10 * 2 * 8 * 8


def test_the_ratio_grows_with_the_history() -> None:
    shape = rank.config()
    ratios = [rank.flops(shape, n, 100, False) / rank.flops(shape, n, 100, True) for n in (256, 1024, 4096)]
    assert ratios == sorted(ratios)
    assert ratios[0] > 2


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "LENGTHS", (64,))
    monkeypatch.setattr(rank, "CANDIDATES", (5,))
    monkeypatch.setattr(rank, "config", lambda: _small())
    (line,) = rank.lines("cpu", torch.float32, seed=0, budget_s=0.0)
    assert line.baseline == "full inference, same ops"
    assert line.ratio == pytest.approx(line.baseline_value / line.ours)
    assert line.ok == (line.ratio >= line.target)  # type: ignore[operator]
    monkeypatch.setattr(rank, "TOLERANCE", {torch.float32: -1.0})
    with pytest.raises(AssertionError, match="drift"):
        list(rank.lines("cpu", torch.float32, seed=0, budget_s=0.0))


_config = rank.config


def _small() -> object:
    return _config(num_layers=2, dim=32)


def test_functions_take_turns() -> None:
    calls: list[str] = []
    samples = timed_in_turn([lambda: calls.append("a"), lambda: calls.append("b")], 0.0, min_runs=3)
    assert "".join(calls) == "ab" + "ab" * 3
    assert [len(row) for row in samples] == [3, 3]
