"""The decoder gives transformers' logits, for prefills at once or in chunks and forked beams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gr.backend.base import Backend
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.model import hf
from npu_gr.model.decoder import Decoder, DecoderConfig
from npu_gr.model.generative import BeamStep, UnsharedKV
from tests.decoders import VARIANTS, Prefix, Slots, hf_logits, prefilled, prompt, saved
from tests.models import CPU

REFERENCE = ReferenceBackend()
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
STEPS = [
    (7, None),
    (13, None),
    (13, [0, 0, 3, 5, 5, 5, 6, 9, 9, 10, 12, 12, 12]),
    (5, [2, 12, 0, 7, 7]),
]


def step_of(
    own: torch.Tensor, position: int, prefix: Prefix, unshared: UnsharedKV, split: bool = True
) -> BeamStep:
    return BeamStep(
        tokens=own, position=position, shared=prefix.slabs, unshared=unshared, split=split
    )


def largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


@every_variant
def test_logits_equal_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    theirs, tokens = saved(tmp_path, **variant), prompt(41)
    model = hf.load(tmp_path)
    want = hf_logits(theirs, tokens[None])[0]
    assert want.std() > 0.1
    for backend in (CPU, REFERENCE):
        hidden = model.prefill(backend, tokens, 0, None, None, num_rows=len(tokens))
        assert largest(model.logits(hidden) - want) <= 1e-4


@every_variant
@pytest.mark.parametrize("cuts", [(1,), (20,), (40,), (7, 8, 33)], ids=str)
def test_prefill_in_parts_equals_one(
    tmp_path: Path, variant: dict[str, Any], cuts: tuple[int, ...]
) -> None:
    saved(tmp_path, **variant)
    model, tokens = hf.load(tmp_path), prompt(41)
    whole, want = prefilled(model, tokens)
    parts, got = prefilled(model, tokens, cuts)
    assert largest(got - want) <= 1e-5
    for layer in range(model.config.num_layers):
        for a, b in zip(parts.layers[layer], whole.layers[layer], strict=True):
            assert largest(a - b) <= 1e-5


def test_the_last_rows_are_the_ones_asked_for(tmp_path: Path) -> None:
    saved(tmp_path, **VARIANTS["qwen3 g2 tied"])
    model, tokens = hf.load(tmp_path), prompt(30)
    every = model.prefill(CPU, tokens, 0, None, None, num_rows=30)
    for num_rows in (1, 4, 29):
        got = model.prefill(CPU, tokens, 0, None, None, num_rows=num_rows)
        assert largest(got - every[-num_rows:]) <= 1e-5


@every_variant
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("layout", ["in place", "ancestry"])
def test_beams_step_by_step_equal_whole_sequences(
    tmp_path: Path, variant: dict[str, Any], split: bool, layout: str
) -> None:
    """Beams fork, widen and narrow.

    Every step's logits are those of the sequences that the beams stand for.
    """
    theirs, tokens = saved(tmp_path, **variant), prompt(23)
    model = hf.load(tmp_path)
    for backend in (CPU, REFERENCE):
        got, want = beam_logits(backend, model, theirs, tokens, split, layout)
        assert largest(got - want) <= 1e-4


def beam_logits(
    backend: Backend, model: Decoder, theirs: Any, tokens: torch.Tensor, split: bool, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    prefix, _ = prefilled(model, tokens, backend=backend)
    prefix.slab_tokens = 8
    slots = Slots(model, num_rows=13, num_slots=len(STEPS))
    sequences = tokens.expand(STEPS[0][0], -1)
    ancestry = torch.empty(0, STEPS[0][0], dtype=torch.int64)
    got, want = [], []
    for step, (rows, parents) in enumerate(STEPS):
        # the second step widens 7 beams to 13
        chosen = torch.arange(rows) % len(sequences) if parents is None else torch.tensor(parents)
        own = prompt(rows, seed=step)
        sequences = torch.cat([sequences[chosen], own[:, None]], dim=1)
        ancestry = torch.cat([ancestry[:, chosen], torch.arange(rows)[None]])
        if layout == "in place":
            slots.fork_(chosen, step)
        unshared = slots.at(step, ancestry if layout == "ancestry" else None)
        hidden = model.decode(backend, [step_of(own, len(tokens) + step, prefix, unshared, split)])
        got.append(model.logits(hidden))
        want.append(hf_logits(theirs, sequences)[:, -1])
    return torch.cat(got), torch.cat(want)


def test_layouts_are_bit_equal(tmp_path: Path) -> None:
    """The same keys in the same order: moving them or looking them up rounds alike."""
    theirs, tokens = saved(tmp_path, **VARIANTS["qwen3 g1"]), prompt(23)
    model = hf.load(tmp_path)
    for split in (True, False):
        moved, _ = beam_logits(CPU, model, theirs, tokens, split, "in place")
        looked_up, _ = beam_logits(CPU, model, theirs, tokens, split, "ancestry")
        assert torch.equal(moved, looked_up)


@every_variant
def test_a_token_range_is_a_slice_of_the_logits(tmp_path: Path, variant: dict[str, Any]) -> None:
    saved(tmp_path, **variant)
    model = hf.load(tmp_path)
    _, hidden = prefilled(model, prompt(9))
    whole = model.logits(hidden)
    assert whole.shape == (1, 97)
    assert whole.dtype == torch.float32
    for first, end in ((0, 97), (32, 64), (96, 97), (5, 5)):
        assert torch.allclose(model.logits(hidden, (first, end)), whole[:, first:end], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near(tmp_path: Path, dtype: torch.dtype) -> None:
    """KV and logits in the model's dtype are close to those of the fp32 model."""
    saved(tmp_path, **VARIANTS["qwen3 g2 tied"])
    model, tokens = hf.load(tmp_path, dtype), prompt(64)
    exact = hf.load(tmp_path, dtype).float()
    prefix, hidden = prefilled(model, tokens, (30,))
    _, want = prefilled(exact, tokens)
    assert prefix.layers[0][0].dtype == dtype
    got, wanted = model.logits(hidden), exact.logits(want)
    assert got.dtype == dtype
    assert largest(got - wanted) <= 0.1 * float(wanted.std())
    slots, sharp = Slots(model, 5, 1), Slots(exact, 5, 1)
    exact_prefix, _ = prefilled(exact, tokens)
    own = prompt(5, seed=3)
    got = model.logits(model.decode(CPU, [step_of(own, 64, prefix, slots.at(0))]))
    wanted = exact.logits(exact.decode(CPU, [step_of(own, 64, exact_prefix, sharp.at(0))]))
    assert largest(got - wanted) <= 0.1 * float(wanted.std())


def test_decode_writes_its_slot_alone(tmp_path: Path) -> None:
    saved(tmp_path, **VARIANTS["qwen2 g2"])
    model, tokens = hf.load(tmp_path), prompt(11)
    prefix, _ = prefilled(model, tokens)
    slots = Slots(model, num_rows=6, num_slots=3)
    slots.planes[:, :, :, 0] = 0.5
    model.decode(CPU, [step_of(prompt(4), 12, prefix, slots.at(1))])
    assert slots.planes[:, :, :4, 1].isfinite().all()
    assert slots.planes[:, :, 4:, 1].isnan().all()
    assert slots.planes[:, :, :, 2].isnan().all()
    assert (slots.planes[:, :, :, 0] == 0.5).all()


def test_beams_without_a_prompt_see_their_own_tokens(tmp_path: Path) -> None:
    theirs = saved(tmp_path, **VARIANTS["qwen3 g4 theta"])
    model, own = hf.load(tmp_path), prompt(3)
    slots, empty = Slots(model, 3, 1), Prefix()
    for layer in range(model.config.num_layers):
        none = torch.empty(0, model.config.num_kv_heads, model.config.head_dim)
        empty.write(layer, none, none)
    for split in (True, False):
        hidden = model.decode(CPU, [step_of(own, 0, empty, slots.at(0), split)])
        assert largest(model.logits(hidden) - hf_logits(theirs, own[:, None])[:, 0]) <= 1e-4


@pytest.mark.parametrize(("field", "value"), [("num_kv_heads", 3), ("head_dim", 7)])
def test_an_impossible_shape_is_rejected(field: str, value: int) -> None:
    fields: dict[str, Any] = {
        "vocab_size": 10,
        "dim": 8,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "mlp_dim": 8,
        "max_tokens": 16,
        "rope_theta": 1e4,
        "norm_eps": 1e-6,
        "qk_norm": True,
        "qkv_bias": False,
        "tied_head": False,
    }
    assert DecoderConfig(**fields).head_dim == 4
    with pytest.raises(ValueError, match=field):
        DecoderConfig(**{**fields, field: value})
