"""Decoders in Hugging Face folders: the map from their tensors to our parameters.

`hf_files.py` reads and writes the files; `hf_config.py` the configuration, with the families.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from npu_gr.model import hf_config, hf_files
from npu_gr.model.decoder import Decoder, DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def read_config(folder: Path) -> DecoderConfig:
    """Read the decoder's configuration; see `hf_files.read_config`."""
    return hf_files.read_config(folder, FORMAT)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Read a decoder's checkpoint in `dtype`, onto the CPU; see `hf_files.load`."""
    return hf_files.load(folder, dtype, FORMAT)


def save(model: Decoder, folder: Path) -> None:
    """Write a decoder's checkpoint; see `hf_files.save`."""
    keys = hf_config.keys_of(model.config, str(model.dtype).removeprefix("torch."))
    hf_files.save(keys, tensor_places(model), folder)


def _sizes(config: DecoderConfig) -> Mapping[str, int]:
    num_experts = config.experts.num_experts if config.experts else 0
    return {"num_hidden_layers": config.num_layers, "num_experts": num_experts}


def _copies(config: DecoderConfig) -> Mapping[str, str]:
    return {HEAD: EMBEDDING} if config.tied_head else {}


def tensor_places(model: Decoder) -> dict[str, Tensor]:
    """Map each name in the checkpoint to the part of our parameter that it fills.

    Our parameters join q, k, v, and gate, up.
    """
    config = model.config
    state = model.state_dict()
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    places = {EMBEDDING: state["embedding.weight"], "model.norm.weight": state["norm.weight"]}
    if not config.tied_head:
        places[HEAD] = state["head.weight"]
    for layer in range(config.num_layers):
        ours = f"layers.{layer}."
        theirs = f"model.layers.{layer}."
        attention = theirs + "self_attn."
        mlp = theirs + "mlp."
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = state[ours + "qkv." + kind].split([q_width, kv_width, kv_width])
            places.update(
                {
                    f"{attention}{name}_proj.{kind}": part
                    for name, part in zip("qkv", parts, strict=True)
                }
            )
        if config.experts is None or layer in config.experts.dense_layers:
            places |= _mlp(mlp, state[ours + "gate_up.weight"], state[ours + "down.weight"])
        else:
            places[mlp + "gate.weight"] = state[ours + "experts.router.weight"]
            each = zip(state[ours + "experts.gate_up"], state[ours + "experts.down"], strict=True)
            for expert, (gate_up, down) in enumerate(each):
                places |= _mlp(f"{mlp}experts.{expert}.", gate_up, down)
        if config.out_bias:
            places[attention + "o_proj.bias"] = state[ours + "out.bias"]
        places |= {
            attention + "o_proj.weight": state[ours + "out.weight"],
            theirs + "input_layernorm.weight": state[ours + "norm_in.weight"],
            theirs + "post_attention_layernorm.weight": state[ours + "norm_mlp.weight"],
        }
        if config.qk_norm:
            places[attention + "q_norm.weight"] = state[ours + "norm_q.weight"]
            places[attention + "k_norm.weight"] = state[ours + "norm_k.weight"]
    return places


def _mlp(at: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    gate, up = gate_up.chunk(2)
    return {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up, f"{at}down_proj.weight": down}


FORMAT = hf_files.Format(
    decode=hf_config.decode, sizes=_sizes, make=Decoder, places=tensor_places, copies=_copies
)
