"""A Hugging Face T5 loads unchanged, or the error names the file, key or tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import T5ForConditionalGeneration

from npu_gr.core.errors import CheckpointError
from npu_gr.model import generators, hf_t5
from npu_gr.model.t5 import T5
from tests import decoders
from tests.encoder_decoders import VARIANTS, Encoded, hf_logits, saved
from tests.model.test_hf import reconfigure, reweigh
from tests.model.test_t5 import prompt


def assert_same_logits(folder: Path, theirs: T5ForConditionalGeneration) -> None:
    model, tokens = hf_t5.load(folder), prompt(20)
    want = hf_logits(theirs, tokens, torch.tensor([[model.config.start_token]]))[:, 0]
    torch.testing.assert_close(
        model.logits(Encoded(model, tokens).begun.hidden), want, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_saved_loads_here_and_in_transformers(tmp_path: Path, variant: str) -> None:
    saved(tmp_path / "theirs", **VARIANTS[variant])
    model = hf_t5.load(tmp_path / "theirs")
    hf_t5.save(model, tmp_path / "ours")
    again = hf_t5.load(tmp_path / "ours")
    assert again.config == model.config
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
    assert_same_logits(
        tmp_path / "ours", T5ForConditionalGeneration.from_pretrained(tmp_path / "ours")
    )


def test_the_keys_of_transformers_4_are_read(tmp_path: Path) -> None:
    """Google's T5 1.1: only `tie_word_embeddings` says how the head is scaled."""
    theirs = saved(tmp_path, **VARIANTS["t5 1.1"])
    absent: dict[str, Any] = dict.fromkeys(
        ("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "dtype")
    )
    reconfigure(tmp_path, tie_word_embeddings=False, **absent)
    assert not hf_t5.load(tmp_path).config.scales_head
    assert_same_logits(tmp_path, theirs)
    reconfigure(tmp_path, tie_word_embeddings=None)
    assert hf_t5.load(tmp_path).config.scales_head


def test_embeddings_that_are_saved_twice_must_agree(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    # of the oldest checkpoints
    stray = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

    def more(weights: dict[str, Tensor]) -> None:
        weights["encoder.embed_tokens.weight"] = weights["shared.weight"].clone()
        weights[stray] = torch.ones(8, 4)

    reweigh(tmp_path, more)
    assert_same_logits(tmp_path, theirs)
    reweigh(tmp_path, lambda weights: weights["encoder.embed_tokens.weight"].add_(1))
    with pytest.raises(
        CheckpointError,
        match=r"encoder\.embed_tokens\.weight differs from "
        r"shared\.weight",
    ):
        hf_t5.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5EncoderModel"]}, r"architectures: \['T5EncoderModel'\] is not"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder: False is not served for t5"),
        ({"feed_forward_proj": "double-gelu"}, "feed_forward_proj: 'double-gelu' is not served"),
        ({"dense_act_fn": "tanh"}, "dense_act_fn: 'tanh' is not served"),
        ({"num_experts": 8}, "num_experts: 8: a mixture of experts is served of qwen3_moe only"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id: missing"),
        ({"decoder_start_token_id": 97}, "start_token: 97 is not in the vocabulary of 97"),
        ({"relative_attention_num_buckets": 2}, r"Expected `int` >= 4 - at `\$.num_buckets`"),
        ({"d_model": None}, "missing required field `d_model`"),
        ({"num_layers": 10**9}, "num_layers: 1000000000, and there are"),
        ({"num_decoder_layers": 10**9}, "num_decoder_layers: 1000000000, and there are"),
        ({"num_layers": 3}, r"missing tensors: encoder\.block\.2"),
        ({"d_ff": 41}, r"shape \[40, 24\], config\.json asks for \[41, 24\]"),
        ({"is_gated_act": True}, r"unexpected tensor .*wi\.weight"),
        ({"model_type": "mt5"}, "model_type: 'mt5' is none of .*mistral, t5"),
        ({"model_type": "switch_transformers", "num_experts": 8}, "num_experts: 8"),
    ],
    ids=str,
)
def test_what_is_not_served_is_rejected_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    saved(tmp_path)
    reconfigure(tmp_path, **changes)
    for read in (generators.examine, lambda folder: generators.load(folder, torch.float32)):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path)


def test_a_folder_says_which_model_it_holds(tmp_path: Path) -> None:
    saved(tmp_path / "t5")
    decoders.saved(tmp_path / "decoder", **decoders.VARIANTS["qwen3 g1"])
    assert generators.examine(tmp_path / "t5")[:2] == (97, False)
    assert generators.examine(tmp_path / "decoder")[:2] == (97, True)
    assert isinstance(generators.load(tmp_path / "t5", torch.bfloat16), T5)
    (tmp_path / "t5" / "config.json").write_text("{")
    for folder, message in (
        (
            "t5",
            r"config\.json: Input data was "
            r"truncated",
        ),
        ("none", "No such file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            generators.examine(tmp_path / folder)
