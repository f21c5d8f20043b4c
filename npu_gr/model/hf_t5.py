"""T5 in Hugging Face folders (`T5ForConditionalGeneration`): `config.json` and tensors.

A setting that would change the scores and is not served is rejected by name; keys that only concern
training are ignored. Where transformers 4 and 5 read a key differently, we follow 5: the head is
separate if and only if the weights contain it, whatever `tie_word_embeddings` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from npu_gr.model import hf_files
from npu_gr.model.hf_config import reject_experts
from npu_gr.model.t5 import T5, Activation, T5Config

ARCHITECTURE = "T5ForConditionalGeneration"
EMBEDDING = "shared.weight"
HEAD = "lm_head.weight"
BIAS = "SelfAttention.relative_attention_bias.weight"
ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class _HFConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `config.json` that decide the scores; defaults are those of transformers."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int | None = None
    num_heads: int
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"
    dense_act_fn: str | None = None  # overrides the activation in `feed_forward_proj`
    is_gated_act: bool | None = None  # overrides the "gated-" in `feed_forward_proj`
    is_encoder_decoder: bool = True
    decoder_start_token_id: int | None = None
    tie_word_embeddings: bool | None = None
    # transformers 5; None = `tie_word_embeddings` decides, as in transformers 4
    scale_decoder_outputs: bool | None = None
    quantization_config: dict[str, Any] | None = None


def decode(text: bytes) -> T5Config:
    """Parse `config.json`.

    Raises:
        ValueError, msgspec.MsgspecError: It is invalid, or a setting is not served; the message
            names the key.
    """
    keys = msgspec.json.decode(text, type=dict[str, Any])
    reject_experts(keys)
    if keys.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"architectures: {keys.get('architectures')!r} is not [{ARCHITECTURE!r}]")
    found = msgspec.json.decode(text, type=_HFConfig)
    way, _, name = found.feed_forward_proj.rpartition("-")
    if found.feed_forward_proj == "gated-gelu":
        name = "gelu_new"
    name = name if found.dense_act_fn is None else found.dense_act_fn
    rejected = {
        "feed_forward_proj": None if way in ("", "gated") else found.feed_forward_proj,
        "dense_act_fn": None if name in ACTIVATIONS else name,
        "is_encoder_decoder": None if found.is_encoder_decoder else False,
        "quantization_config": found.quantization_config,
    }
    for key, value in rejected.items():
        if value is not None:
            raise ValueError(f"{key}: {value!r} is not served for t5")
    if found.decoder_start_token_id is None:
        raise ValueError(
            "decoder_start_token_id: missing, and every answer of a t5 begins behind it"
        )
    scales = found.tie_word_embeddings is not False
    fields = {
        "vocab_size": found.vocab_size,
        "dim": found.d_model,
        "num_encoder_layers": found.num_layers,
        "num_decoder_layers": found.num_layers
        if found.num_decoder_layers is None
        else found.num_decoder_layers,
        "num_heads": found.num_heads,
        "head_dim": found.d_kv,
        "mlp_dim": found.d_ff,
        "activation": ACTIVATIONS[name],
        "is_gated": way == "gated" if found.is_gated_act is None else found.is_gated_act,
        "num_buckets": found.relative_attention_num_buckets,
        "max_distance": found.relative_attention_max_distance,
        "norm_eps": found.layer_norm_epsilon,
        "start_token": found.decoder_start_token_id,
        "scales_head": scales
        if found.scale_decoder_outputs is None
        else found.scale_decoder_outputs,
    }
    # from a dict, so that msgspec checks the limits of the fields
    return msgspec.convert(fields, T5Config)


def keys_of(config: T5Config, dtype: str) -> dict[str, Any]:
    """Return the keys of `config.json` of a model.

    Args:
        config: Configuration of the model.
        dtype: Dtype of the weights, e.g. "float32".
    """
    name = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "t5",
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "d_model": config.dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": f"gated-{name}" if config.is_gated else name,
        "dense_act_fn": name,
        "is_gated_act": config.is_gated,
        "is_encoder_decoder": True,
        "decoder_start_token_id": config.start_token,
        "tie_word_embeddings": config.tied_head,
        "scale_decoder_outputs": config.scales_head,
        "pad_token_id": 0,
        "eos_token_id": None,  # every token may be a code
    }


def tensor_places(model: T5) -> dict[str, Tensor]:
    """Map each name in the checkpoint to the part of our parameter that it fills.

    Our parameters join q, k, v, and gate, up.
    """
    config = model.config
    state = model.state_dict()
    places = {EMBEDDING: state["embedding.weight"]}
    if not config.tied_head:
        places[HEAD] = state["head.weight"]
    for stack, num_layers in (
        ("encoder", config.num_encoder_layers),
        ("decoder", config.num_decoder_layers),
    ):
        places[f"{stack}.block.0.layer.0.{BIAS}"] = state[f"{stack}_bias"]
        places[f"{stack}.final_layer_norm.weight"] = state[f"{stack}_norm.weight"]
        for layer in range(num_layers):
            ours = f"{stack}.{layer}."
            # a layer's parts are numbered: its own attention, the prompt's, the MLP
            parts = iter(range(3))
            theirs = f"{stack}.block.{layer}.layer.{next(parts)}."
            places |= _parts(f"{theirs}SelfAttention.", ("q", "k", "v"), state[ours + "qkv.weight"])
            places[f"{theirs}SelfAttention.o.weight"] = state[ours + "out.weight"]
            places[f"{theirs}layer_norm.weight"] = state[ours + "norm_in.weight"]
            if stack == "decoder":
                theirs = f"{stack}.block.{layer}.layer.{next(parts)}."
                places[f"{theirs}EncDecAttention.q.weight"] = state[ours + "prompt_q.weight"]
                places |= _parts(
                    f"{theirs}EncDecAttention.", ("k", "v"), state[ours + "prompt_kv.weight"]
                )
                places[f"{theirs}EncDecAttention.o.weight"] = state[ours + "prompt_out.weight"]
                places[f"{theirs}layer_norm.weight"] = state[ours + "norm_prompt.weight"]
            theirs = f"{stack}.block.{layer}.layer.{next(parts)}."
            names = ("wi_0", "wi_1") if config.is_gated else ("wi",)
            places |= _parts(f"{theirs}DenseReluDense.", names, state[ours + "up.weight"])
            places[f"{theirs}DenseReluDense.wo.weight"] = state[ours + "down.weight"]
            places[f"{theirs}layer_norm.weight"] = state[ours + "norm_mlp.weight"]
    return places


def _parts(at: str, names: tuple[str, ...], joined: Tensor) -> dict[str, Tensor]:
    return {
        f"{at}{name}.weight": part
        for name, part in zip(names, joined.chunk(len(names)), strict=True)
    }


def _with_head(config: T5Config, names: frozenset[str]) -> T5Config:
    return msgspec.structs.replace(config, tied_head=HEAD not in names)


def _sizes(config: T5Config) -> Mapping[str, int]:
    return {
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
    }


def _copies(_: T5Config) -> Mapping[str, str]:
    return {f"{stack}.embed_tokens.weight": EMBEDDING for stack in ("encoder", "decoder")}


FORMAT = hf_files.Format(
    decode=decode,
    fit=_with_head,
    sizes=_sizes,
    make=T5,
    places=tensor_places,
    copies=_copies,
    ignored=frozenset({"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"}),
)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> T5:
    """Read a T5 checkpoint in `dtype`, onto the CPU; see `hf_files.load`."""
    return hf_files.load(folder, dtype, FORMAT)


def save(model: T5, folder: Path) -> None:
    """Write a T5 checkpoint; see `hf_files.save`."""
    keys = keys_of(model.config, str(model.dtype).removeprefix("torch."))
    hf_files.save(keys, tensor_places(model), folder)
