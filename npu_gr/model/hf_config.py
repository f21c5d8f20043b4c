"""Reads and writes `config.json` of Hugging Face causal language models.

`FAMILIES` lists the models that are served. A setting that would change the scores and is not
served is rejected by name; keys that only concern training are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from npu_gr.model.decoder import DecoderConfig


class Family(NamedTuple):
    """Properties that follow from `model_type` alone."""

    architecture: str
    qk_norm: bool = False
    # None: `attention_bias` decides, for the attention's output too
    qkv_bias: bool | None = False
    has_experts: bool = False
    # default if config.json has none; None = hidden_size / num_attention_heads
    head_dim: int | None = None
    sliding_window: int | None = None  # default if config.json has no such key


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, has_experts=True),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "llama": Family("LlamaForCausalLM", qkv_bias=None),
    "mistral": Family("MistralForCausalLM", sliding_window=4096),
}
KINDS = (*FAMILIES, "t5")  # the last is an encoder-decoder: `hf_t5.py`
MAX_LAYERS = 10_000  # with experts: the dense layers are listed one by one
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
# RoPE scalings that are served: their keys in config.json -> fields of `RopeScaling`.
SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_tokens",
    },
}


class _HFConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `config.json` that decide the scores; defaults are those of transformers."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool | None = None
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rope_theta: float | None = None  # transformers 4
    rope_scaling: dict[str, Any] | None = None  # transformers 4
    rope_parameters: dict[str, Any] | None = None  # transformers 5, instead of both
    partial_rotary_factor: float | None = None
    use_sliding_window: bool = False  # Qwen only
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None  # the same, as transformers 5 writes it
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None

    @property
    def rope(self) -> dict[str, Any]:
        """RoPE's settings in one table; keys of the inner table win, as in transformers."""
        found = dict(self.rope_scaling or self.rope_parameters or {})
        found.setdefault("rope_type", found.pop("type", "default"))
        found.setdefault("rope_theta", 10_000.0 if self.rope_theta is None else self.rope_theta)
        found.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if found["rope_type"] == "llama3":
            found.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        return found


def decode(text: bytes) -> DecoderConfig:
    """Parse `config.json`.

    Raises:
        ValueError, msgspec.MsgspecError: It is invalid, or a setting is not served; the message
            names the key.
    """
    keys = msgspec.json.decode(text, type=dict[str, Any])
    reject_unknown_kind(keys)
    found = msgspec.json.decode(text, type=_HFConfig)
    _reject_unserved(found)
    # from a dict, so that msgspec checks the limits of the fields
    return msgspec.convert(_decoder_fields(found), DecoderConfig)


def reject_unknown_kind(keys: Mapping[str, Any]) -> None:
    """Reject a model of another family, or experts in a family without them.

    Raises:
        ValueError: The message has the key and its value.
    """
    kind = keys.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not family.has_experts:
        reject_experts(keys)
    if family is None:
        raise ValueError(f"model_type: {kind!r} is none of {', '.join(KINDS)}")
    if keys.get("architectures") != [family.architecture]:
        raise ValueError(
            f"architectures: {keys.get('architectures')!r} is not [{family.architecture!r}]"
        )


def reject_experts(keys: Mapping[str, Any]) -> None:
    """Reject a mixture of experts.

    Raises:
        ValueError: The message has the key and its value.
    """
    for key in EXPERT_KEYS:
        if keys.get(key):
            raise ValueError(
                f"{key}: {keys[key]!r}: a mixture of experts is served of qwen3_moe only"
            )


def _reject_unserved(config: _HFConfig) -> None:
    family = FAMILIES[config.model_type]
    rope = config.rope
    bias = config.attention_bias
    turned = rope["partial_rotary_factor"]
    sliding = [kind for kind in config.layer_types or [] if kind != "full_attention"]
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    is_served = rope["rope_type"] in ("default", *SCALINGS) and not nested
    rejected = {
        "use_sliding_window": config.use_sliding_window or None,
        "layer_types": sliding[0] if sliding else None,
        "rope_scaling" if config.rope_scaling else "rope_parameters": None if is_served else rope,
        "partial_rotary_factor": None if turned in (None, 1) else turned,
        "quantization_config": config.quantization_config,
        "hidden_act": config.hidden_act if config.hidden_act != "silu" else None,
        "mlp_bias": config.mlp_bias or None,
        "attention_bias": None if bias is None or family.qkv_bias in (None, bias) else bias,
    }
    for key, value in rejected.items():
        if value is not None:
            raise ValueError(f"{key}: {value!r} is not served for {config.model_type}")
    if missing := [key for key in SCALINGS.get(rope["rope_type"], {}) if key not in rope]:
        raise ValueError(f"rope_parameters: {rope['rope_type']} needs {', '.join(missing)}")


def _decoder_fields(config: _HFConfig) -> dict[str, Any]:
    family = FAMILIES[config.model_type]
    rope = config.rope
    has_bias = bool(config.attention_bias) if family.qkv_bias is None else family.qkv_bias
    scaling = SCALINGS.get(rope["rope_type"])
    kv_heads = config.num_key_value_heads
    width = (
        config.head_dim
        or family.head_dim
        or config.hidden_size // max(config.num_attention_heads, 1)
    )
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_attention_heads if kv_heads is None else kv_heads,
        "head_dim": width,
        "mlp_dim": config.intermediate_size,
        "max_tokens": _max_tokens(config, family),
        "rope_theta": rope["rope_theta"],
        "norm_eps": config.rms_norm_eps,
        "qk_norm": family.qk_norm,
        "qkv_bias": has_bias,
        "tied_head": config.tie_word_embeddings,
        "out_bias": has_bias and family.qkv_bias is None,
        "rope_scaling": scaling
        and {"kind": rope["rope_type"], **{ours: rope[key] for key, ours in scaling.items()}},
        "experts": _experts(config) if family.has_experts else None,
    }


def _max_tokens(config: _HFConfig, family: Family) -> int:
    """Limit prompts to the sliding window: within it, each token sees all tokens before it."""
    if config.model_type.startswith("qwen"):  # a window that is on was rejected
        return config.max_position_embeddings
    window = (
        family.sliding_window if config.sliding_window is msgspec.UNSET else config.sliding_window
    )
    return (
        config.max_position_embeddings
        if window is None
        else min(config.max_position_embeddings, window)
    )


def _experts(config: _HFConfig) -> dict[str, Any] | None:
    if config.decoder_sparse_step < 1:
        raise ValueError(f"decoder_sparse_step: {config.decoder_sparse_step} is below 1")
    if config.num_hidden_layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers: {config.num_hidden_layers} is over {MAX_LAYERS}")
    only = set(config.mlp_only_layers or [])
    step = config.decoder_sparse_step
    dense = tuple(
        index for index in range(config.num_hidden_layers) if index in only or (index + 1) % step
    )
    num_experts = 128 if config.num_experts is None else config.num_experts
    if config.num_local_experts is not None:
        num_experts = config.num_local_experts
    if not num_experts:
        return None
    return {
        "num_experts": num_experts,
        "num_per_token": config.num_experts_per_tok,
        "mlp_dim": config.moe_intermediate_size,
        "normalises": config.norm_topk_prob,
        "dense_layers": dense,
    }


def keys_of(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the keys of `config.json` of a decoder, as the simplest family that computes it.

    Args:
        config: Configuration of the decoder.
        dtype: Dtype of the weights, e.g. "float32".
    """
    if config.qk_norm:
        kind = "qwen3_moe" if config.experts else "qwen3"
    else:
        kind = "qwen2" if config.qkv_bias and not config.out_bias else "llama"
    family = FAMILIES[kind]
    has_bias = config.qkv_bias if family.qkv_bias is None else family.qkv_bias
    assert (config.qkv_bias, bool(config.experts)) == (has_bias, family.has_experts), (
        "none of the families"
    )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope["rope_type"] = config.rope_scaling.kind
        rope |= {
            key: getattr(config.rope_scaling, ours)
            for key, ours in SCALINGS[config.rope_scaling.kind].items()
        }
    keys = {
        "architectures": [family.architecture],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_tokens,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": config.tied_head,
        "rope_theta": config.rope_theta,  # transformers 4
        "rope_scaling": rope if config.rope_scaling else None,
        "rope_parameters": rope,  # transformers 5
        "use_sliding_window": False,
        "bos_token_id": None,  # there are no special tokens: every token is a code
        "eos_token_id": None,
    }
    if config.experts is not None:
        keys |= {
            "num_experts": config.experts.num_experts,
            "num_experts_per_tok": config.experts.num_per_token,
            "moe_intermediate_size": config.experts.mlp_dim,
            "norm_topk_prob": config.experts.normalises,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(config.experts.dense_layers),
        }
    return keys
