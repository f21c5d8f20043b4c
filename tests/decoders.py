"""Tiny random Hugging Face decoders, and the KV that tests keep for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from npu_gr.backend.base import Backend, Slab
from npu_gr.model.decoder import Decoder
from npu_gr.model.generative import UnsharedKV
from tests.models import CPU

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3 g1": {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 4},
    "qwen3 g2 tied": {"model_type": "qwen3", "head_dim": 10, "tie_word_embeddings": True},
    "qwen3 g4 theta": {
        "model_type": "qwen3",
        "head_dim": 8,
        "num_key_value_heads": 1,
        "rope_theta": 1e6,
    },
    "qwen2 g2": {"model_type": "qwen2"},
    "qwen2 g4 tied": {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama g1 biases": {"model_type": "llama", "num_key_value_heads": 4, "attention_bias": True},
    "llama g2 scaled": {"model_type": "llama", "rope_scaling": LLAMA3_SCALING, "rope_theta": 5e5},
    "llama g2 linear": {
        "model_type": "llama",
        "head_dim": 8,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "mistral g2": {"model_type": "mistral", "head_dim": 10, "sliding_window": None},
    "moe": {"model_type": "qwen3_moe", "head_dim": 10, **EXPERTS, "norm_topk_prob": True},
    "moe with dense layers": {
        "model_type": "qwen3_moe",
        "head_dim": 10,
        **EXPERTS,
        "mlp_only_layers": [1],
    },
}
CONFIGS = {
    "qwen3": Qwen3Config,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen3_moe": Qwen3MoeConfig,
}


def hf_model(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Random weights, biases and norms too, large enough that every part shows in the logits."""
    keys = {**SIZES, **changes}
    rope = {
        "rope_type": "default",
        "rope_theta": keys.pop("rope_theta", 10_000.0),
        **keys.pop("rope_scaling", {}),
    }
    config = CONFIGS[keys.pop("model_type")](**keys, rope_parameters=rope)
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def saved(folder: Path, **changes: Any) -> PreTrainedModel:
    """The model after it was written as a checkpoint."""
    model = hf_model(**changes)
    model.save_pretrained(folder)
    return model


def hf_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """[rows, n, vocabulary] of sequences [rows, n]."""
    with torch.inference_mode():
        logits: Tensor = model(tokens).logits
    return logits


def prompt(num_tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(
        0, SIZES["vocab_size"], (num_tokens,), generator=torch.Generator().manual_seed(seed)
    )


class Prefix:
    """The KV of a prompt, kept as a sink gets it and read back in slabs of any size."""

    def __init__(self, slab_tokens: int = 1 << 30) -> None:
        self.layers: dict[int, Slab] = {}
        self.slab_tokens = slab_tokens

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        before = self.layers.get(layer, (k[:0], v[:0]))
        self.layers[layer] = (torch.cat([before[0], k]), torch.cat([before[1], v]))

    def slabs(self, layer: int) -> list[Slab]:
        k, v = self.layers[layer]
        return list(zip(k.split(self.slab_tokens), v.split(self.slab_tokens), strict=True))


def prefilled(
    model: Decoder, tokens: Tensor, cuts: tuple[int, ...] = (), backend: Backend = CPU
) -> tuple[Prefix, Tensor]:
    """The prompt's KV and its last hidden row, prefilled in as many parts as the cuts make."""
    prefix, hidden = Prefix(), torch.empty(0)
    for start, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        hidden = model.prefill(
            backend, tokens[start:end], start, prefix.slabs if start else None, prefix.write
        )
    return prefix, hidden


class Slots:
    """The unshared KV of `num_rows` beams, filled with NaN: a read before the write shows."""

    def __init__(self, model: Decoder, num_rows: int, num_slots: int) -> None:
        c = model.config
        shape = (c.num_layers, 2, num_rows, num_slots, c.num_kv_heads, c.head_dim)
        self.planes = torch.full(shape, torch.nan, dtype=model.dtype)

    def at(self, step: int, ancestry: Tensor | None = None) -> UnsharedKV:
        planes = self.planes
        return UnsharedKV(
            slabs=lambda layer: (planes[layer, 0], planes[layer, 1]), step=step, ancestry=ancestry
        )

    def fork_(self, parents: Tensor, step: int) -> None:
        """Out of place: the obvious definition."""
        self.planes[:, :, : len(parents), :step] = self.planes[:, :, parents, :step].clone()
