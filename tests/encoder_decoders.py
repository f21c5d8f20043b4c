"""Tiny random T5 of Hugging Face transformers, and a prompt encoded by ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from npu_gr.backend.base import Backend, Slab
from npu_gr.core.arrays import I64
from npu_gr.model.generative import BeamStep, Begun, LayerSlabs, UnsharedKV
from npu_gr.model.t5 import T5
from tests.models import CPU

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
UNTIED = {"tie_word_embeddings": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "t5": {},
    "t5 1.1": {"feed_forward_proj": "gated-gelu", **UNTIED},
    "gated silu, tied": {
        "feed_forward_proj": "gated-silu",
        "d_kv": 10,
        "decoder_start_token_id": 5,
    },
    "gelu, its own head": {
        "feed_forward_proj": "gelu",
        "num_layers": 1,
        "num_decoder_layers": 1,
        **UNTIED,
    },
    "as published": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
}


def hf_t5(seed: int = 0, **changes: Any) -> T5ForConditionalGeneration:
    """Random weights, norms and biases too, large enough that every part shows in the logits."""
    config = T5Config(**{**SIZES, **changes})
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = T5ForConditionalGeneration(config)
    if changes.get("tie_word_embeddings") is False:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("norm.weight")
            parameter.normal_(mean=1.0 if is_norm else 0.0, std=1.0 if "relative" in name else 0.2)
    model.train(False)
    return model


def saved(folder: Path, **changes: Any) -> T5ForConditionalGeneration:
    """The model after it was written as a checkpoint."""
    model = hf_t5(**changes)
    model.save_pretrained(folder)
    return model


def hf_logits(model: T5ForConditionalGeneration, prompt: I64, answers: Tensor) -> Tensor:
    """[rows, n, vocabulary] behind each token of answers [rows, n]: whole passes, no cache."""
    tokens = torch.from_numpy(prompt).expand(len(answers), -1)
    with torch.inference_mode():
        logits: Tensor = model(input_ids=tokens, decoder_input_ids=answers, use_cache=False).logits
    return logits


class Encoded:
    """A prompt's KV, as a sink gets it."""

    def __init__(
        self,
        model: T5,
        prompt: I64,
        backend: Backend = CPU,
        run: Callable[[Any], Any] = lambda f: f(),
    ) -> None:
        self.layers: dict[int, Slab] = {}
        self.num_pieces = 0
        for piece in model.encoding(backend, prompt, 0, None, self._write):
            self.num_pieces += 1
            run(piece)
        self.begun: Begun = model.begin(backend, prompt, self.first)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.layers[layer] = (k, v)

    def first(self, num_tokens: int) -> LayerSlabs:
        return partial(self._slabs, num_tokens)

    def _slabs(self, num_tokens: int, layer: int) -> list[Slab]:
        """In two parts: pages need not lie side by side."""
        k, v = (plane[:num_tokens] for plane in self.layers[layer])
        cut = num_tokens // 2
        return [(k[:cut], v[:cut]), (k[cut:], v[cut:])] if cut else [(k, v)]

    def step(self, tokens: Tensor, unshared: UnsharedKV, split: bool = True) -> BeamStep:
        shared = self.first(len(self.layers[0][0]))
        return BeamStep(
            tokens=tokens,
            position=0,
            shared=shared,
            unshared=unshared,
            begun=self.begun.kv,
            split=split,
        )
