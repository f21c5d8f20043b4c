"""A T5 gives the logits of Hugging Face transformers, for any form, prompt, step and fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.arrays import I64
from npu_gr.engine.kv_cache.arena import fork_ancestry
from npu_gr.model import hf_t5, t5
from npu_gr.model.generative import UnsharedKV
from npu_gr.model.t5 import T5Config
from tests.encoder_decoders import SIZES, VARIANTS, Encoded, hf_logits, saved
from tests.models import CPU

TORCH = CPUBackend("off")


def prompt(num_tokens: int, seed: int = 1) -> I64:
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], num_tokens)


class Slots:
    """The unshared KV of some beams, full of NaN: what is read before it is written shows."""

    def __init__(self, model: t5.T5, num_rows: int, num_slots: int) -> None:
        num_layers, num_heads, head_dim = model.kv_shape
        shape = (2, num_layers, num_rows, num_slots, num_heads, head_dim)
        self.keys, self.values = torch.full(shape, torch.nan, dtype=model.dtype)

    def at(self, step: int, ancestry: Tensor | None = None) -> UnsharedKV:
        return UnsharedKV(
            slabs=lambda layer: (self.keys[layer], self.values[layer]), step=step, ancestry=ancestry
        )


@pytest.mark.parametrize("backend", [CPU, TORCH], ids=["native", "torch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, variant: str, backend: CPUBackend) -> None:
    """Compare the encoder's output, the first logits, and those of every step of three beams."""
    theirs = saved(tmp_path, **VARIANTS[variant])
    model = hf_t5.load(tmp_path)
    start = model.config.start_token
    for num_tokens in (1, 2, 45):
        tokens = prompt(num_tokens)
        encoded = Encoded(model, tokens, backend)
        with torch.inference_mode():
            hidden = theirs.encoder(torch.from_numpy(tokens)[None]).last_hidden_state[0]
            for layer, (k, v) in encoded.layers.items():
                attention: Any = theirs.get_submodule(
                    f"decoder.block.{layer}.layer.1.EncDecAttention"
                )
                torch.testing.assert_close(k.flatten(1), attention.k(hidden), atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(v.flatten(1), attention.v(hidden), atol=1e-5, rtol=1e-5)
        answers = torch.cat(
            [torch.full((3, 1), start), torch.from_numpy(prompt(12, seed=2)).view(3, 4)], dim=1
        )
        want = hf_logits(theirs, tokens, answers)
        got = model.logits(encoded.begun.hidden).expand(3, -1)
        torch.testing.assert_close(got, want[:, 0], atol=1e-5, rtol=1e-5)
        slots = Slots(model, 5, 4)
        for step in range(4):
            beams = encoded.step(answers[:, step + 1], slots.at(step), split=bool(step % 2))
            hidden = model.decode(backend, [beams])
            torch.testing.assert_close(
                model.logits(hidden), want[:, step + 1], atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (4, 3), (64, 1000)])
def test_buckets_are_those_of_transformers(buckets: int, distance: int) -> None:
    config = t5_config(num_buckets=buckets, max_distance=distance)
    offsets, theirs = np.arange(-1500, 1500), cast(Any, T5Attention)._relative_position_bucket
    both = theirs(torch.from_numpy(offsets), True, buckets, distance)
    assert config.buckets_around(offsets).tolist() == both.tolist()
    before = theirs(torch.from_numpy(offsets), False, buckets, distance)
    assert config.buckets_before(np.maximum(-offsets, 0)).tolist() == before.tolist()


def t5_config(**changes: object) -> T5Config:
    fields: dict[str, object] = {
        "vocab_size": 9, "dim": 8, "num_encoder_layers": 1, "num_decoder_layers": 1,
        "num_heads": 2, "head_dim": 4,
        "mlp_dim": 8, "activation": "relu", "is_gated": False, "num_buckets": 8,
        "max_distance": 20, "norm_eps": 1e-6,
        "start_token": 0, "scales_head": True,
    }  # fmt: skip
    return T5Config(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_buckets": 7}, "num_buckets: 7 is odd"),
        ({"max_distance": 4}, "max_distance: 4 is not over half of num_buckets 8"),
        ({"start_token": 9}, "start_token: 9 is not in the vocabulary of 9"),
    ],
)
def test_a_configuration_without_a_meaning_is_rejected(
    change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        t5_config(**change)


def test_a_long_prompt_is_encoded_by_some_rows_of_a_layer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any pieces it is the same model; no piece makes scores of more rows than it may."""
    saved(tmp_path)
    model, tokens = hf_t5.load(tmp_path), prompt(45)
    whole = Encoded(model, tokens, TORCH)
    assert whole.num_pieces == 1 + 2 + 3
    rows = list[int]()
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, *rest: Tensor, **how: object) -> Tensor:
        rows.append(query.shape[2])
        return attend(query, *rest, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(t5, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(t5, "ROWS", 16)
    cut = Encoded(model, tokens, TORCH)
    assert cut.num_pieces == 1 + 2 * 3 + 3
    assert rows == [16, 16, 13] * 2
    for layer, slab in whole.layers.items():
        torch.testing.assert_close(cut.layers[layer], slab, atol=1e-5, rtol=1e-5)


def test_every_token_of_a_prompt_depends_on_every_other(tmp_path: Path) -> None:
    """Why a shorter prompt's KV is no prefix of a longer one's."""
    saved(tmp_path)
    model, tokens = hf_t5.load(tmp_path), prompt(30)
    shorter, longer = Encoded(model, tokens[:-1]), Encoded(model, tokens)
    assert not model.is_divisible
    assert (shorter.layers[0][0] != longer.layers[0][0][:-1]).flatten(1).any(1).all()


def test_beams_fork_by_rows_or_by_a_table(tmp_path: Path) -> None:
    theirs = saved(tmp_path, **VARIANTS["t5 1.1"])
    model, tokens = hf_t5.load(tmp_path), prompt(20)
    encoded = Encoded(model, tokens)
    chosen = [torch.tensor([3, 7]), torch.tensor([9, 9, 1, 4]), torch.tensor([2, 8, 6])]
    parents = [torch.tensor([0, 0]), torch.tensor([0, 0, 1, 1]), torch.tensor([1, 2, 2])]
    answers, ancestry = torch.zeros(1, 1, dtype=torch.int64), torch.empty(0, 1, dtype=torch.int64)
    tabled, moved = Slots(model, 4, 3), Slots(model, 4, 3)
    for step, (own, parent) in enumerate(zip(chosen, parents, strict=True)):
        answers = torch.cat([answers[parent], own[:, None]], dim=1)
        ancestry = fork_ancestry(ancestry, parent)
        for plane in (moved.keys, moved.values):
            plane[:, : len(parent), :step] = plane[:, parent, :step].clone()
        want = hf_logits(theirs, tokens, answers)[:, -1]
        for unshared in (tabled.at(step, ancestry), moved.at(step)):
            got = model.logits(model.decode(CPU, [encoded.step(own, unshared)]))
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_half_precision_is_near(tmp_path: Path) -> None:
    saved(tmp_path, **VARIANTS["gated silu, tied"])
    exact, half, tokens = hf_t5.load(tmp_path), hf_t5.load(tmp_path, torch.bfloat16), prompt(40)
    want = exact.logits(Encoded(exact, tokens).begun.hidden)
    got = half.logits(Encoded(half, tokens).begun.hidden)
    assert got.dtype == torch.bfloat16
    assert float((got - want).abs().max()) < 0.1 * float(want.std())
