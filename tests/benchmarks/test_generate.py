"""Every baseline finds what ours finds, which the bench checks before it times."""

from __future__ import annotations

import msgspec
import pytest
import torch

from benchmarks import generate, generate_t5
from npu_gr.model.t5 import T5


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = msgspec.structs.replace(
        generate.config(), vocab_size=32, dim=16, num_layers=2, head_dim=8, mlp_dim=32, max_tokens=64
    )
    monkeypatch.setattr(generate, "config", lambda: shape)
    for name, value in {"NUM_CODES": 32, "PROMPT_TOKENS": 20, "NUM_ITEMS": 400, "WIDTHS": (3, 8)}.items():
        monkeypatch.setattr(generate, name, value)


def test_lines(small: None) -> None:
    found = list(generate.lines("cpu", seed=0, budget_s=0.0, with_transformers=True))
    assert [line.baseline for line in found] == ["dense", "no cache", "transformers", "dense", "no cache"]
    for line in found:
        assert line.ratio == pytest.approx(line.baseline_value / line.ours)
        assert line.ok == (None if line.target is None else line.ratio >= line.target)


def test_a_wrong_result_is_not_timed(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = generate.Dense.search

    def wrong(self: generate.Dense, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        leaves, scores = right(self, width)
        return leaves, scores - 0.01

    monkeypatch.setattr(generate.Dense, "search", wrong)
    with pytest.raises(AssertionError, match="width=3: the dense search differs"):
        list(generate.lines("cpu", seed=0, budget_s=0.0, with_transformers=False))


def test_a_t5_is_compared_with_transformers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose constrained beam search finds the same, or nothing is timed."""
    for name, value in {"NUM_CODES": 32, "PROMPT_TOKENS": 40, "NUM_ITEMS": 400, "WIDTHS": (8, 16)}.items():
        monkeypatch.setattr(generate, name, value)
    sizes = {
        "vocab_size": 32,
        "dim": 16,
        "head_dim": 4,
        "mlp_dim": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
    }
    shape = msgspec.structs.replace(generate_t5.config(), **sizes)
    monkeypatch.setattr(generate_t5, "config", lambda: shape)
    found = list(generate_t5.lines("cpu", seed=0, budget_s=0.0, with_transformers=True))
    assert [line.baseline for line in found] == ["no cache", "transformers", "no cache"]
    assert all(line.ours > 0 for line in found)
    monkeypatch.setattr(T5, "logits", lambda self, hidden, *_: hidden.new_zeros(len(hidden), 32))
    with pytest.raises(AssertionError, match="transformers differs by"):
        list(generate_t5.lines("cpu", seed=0, budget_s=0.0, with_transformers=True))
