"""Training computes the same rows as prefill, for every sequence of a padded batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npu_gr.model import hf
from npu_gr.train.generate.nodes import encode, next_logits, start
from tests.decoders import VARIANTS, hf_logits, saved
from tests.models import CPU


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_and_prefill_agree(variant: str, tmp_path: Path) -> None:
    theirs = saved(tmp_path, **VARIANTS[variant])
    model = hf.load(tmp_path)
    tokens = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(0))
    rows = encode(model, tokens)
    torch.testing.assert_close(
        next_logits(model, rows), hf_logits(theirs, tokens), atol=1e-4, rtol=1e-4
    )
    for sequence, got in zip(tokens, rows, strict=True):
        want = model.prefill(CPU, sequence[:13], 0, None, None, num_rows=13)
        torch.testing.assert_close(got[:13], want, atol=1e-4, rtol=1e-4)


def test_dropout_changes_rows_and_keeps_their_mean(tmp_path: Path) -> None:
    saved(tmp_path, **VARIANTS["qwen3 g2 tied"])
    model = hf.load(tmp_path)
    tokens = torch.arange(12)[None]
    torch.manual_seed(0)
    assert not torch.equal(encode(model, tokens, 0.5), encode(model, tokens, 0.5))
    assert torch.equal(encode(model, tokens), encode(model, tokens))


def test_fresh_weights_are_seeded_and_small_where_they_add_up(tmp_path: Path) -> None:
    saved(tmp_path, **VARIANTS["qwen2 g2"])
    model = hf.load(tmp_path)
    states = []
    for seed in (0, 0, 1):
        start(model, torch.Generator().manual_seed(seed))
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["embedding.weight"], states[2]["embedding.weight"])
    assert (states[0]["norm.weight"] == 1).all()
    assert (states[0]["layers.0.qkv.bias"] == 0).all()
    assert states[0]["layers.0.down.weight"].std() < states[0]["layers.0.qkv.weight"].std() / 2
