"""A Hugging Face checkpoint directory as it is: `config.json` and `model.safetensors`, read whole or sharded.

Qwen3 and Qwen2 causal language models. A setting that would change the numbers and is not served is refused by its
name; every other key of `config.json` is the trainer's business and passed over. Every shape is compared before
anything is allocated; then each tensor is read once, checked and copied into its place, so loading needs the model's
memory and that of one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from npu_gr.core.errors import CheckpointError
from npu_gr.core.private import as_public_as
from npu_gr.model.decoder import Decoder, DecoderConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of tensors in the files
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


class _HFConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `config.json` that decide the numbers; defaults are those of transformers."""

    model_type: str
    architectures: list[str] | None = None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool | None = None
    tie_word_embeddings: bool = False
    rope_theta: float | None = None  # transformers 4
    rope_scaling: dict[str, Any] | None = None  # transformers 4
    rope_parameters: dict[str, Any] | None = None  # transformers 5: both of them
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None


def version(folder: Path) -> str:
    """16 hex digits over `config.json` and the weights' files: part of every cache key.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = xxhash.xxh3_64()
    for path in sorted([folder / CONFIG, *folder.glob("*.safetensors")]):
        try:
            with path.open("rb") as file:
                while part := file.read(1 << 24):
                    digest.update(part)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
    return digest.hexdigest()


def read_config(folder: Path) -> DecoderConfig:
    """The decoder that `config.json` describes.

    Raises:
        CheckpointError: the file is missing or broken, or asks for something that is not served.
    """
    try:
        text = (folder / CONFIG).read_bytes()
        keys = msgspec.json.decode(text, type=dict[str, Any])
        refuse_unknown_kind(keys)
        found = msgspec.json.decode(text, type=_HFConfig)
        refuse_unserved(found)
        # from a dict, so that msgspec checks the limits of the fields
        return msgspec.convert(_decoder_fields(found), DecoderConfig)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.strerror}: {CONFIG}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: {CONFIG}: {error}") from error


def refuse_unknown_kind(keys: Mapping[str, Any]) -> None:
    """A model of another family, or a mixture of experts.

    Raises:
        ValueError: with the key and its value.
    """
    kind = keys.get("model_type")
    for key in MOE_KEYS:
        if keys.get(key):
            raise ValueError(f"{key}: {keys[key]!r}: a mixture of experts is not served")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type: {kind!r} is none of {', '.join(ARCHITECTURES)}")
    if keys.get("architectures") != [ARCHITECTURES[kind]]:
        raise ValueError(f"architectures: {keys.get('architectures')!r} is not [{ARCHITECTURES[kind]!r}]")


def refuse_unserved(config: _HFConfig) -> None:
    """Settings of the two families that this decoder does not compute.

    Raises:
        ValueError: with the key and its value.
    """
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    bias = config.attention_bias
    scaling = config.rope_scaling or {}
    scaling_type = scaling.get("rope_type", scaling.get("type", "default"))
    sliding = [kind for kind in config.layer_types or [] if kind != "full_attention"]
    refused = {
        "use_sliding_window": config.use_sliding_window or None,
        "layer_types": sliding[0] if sliding else None,
        "rope_scaling": config.rope_scaling if scaling_type != "default" else None,
        "rope_parameters": rope if rope_type != "default" else None,
        "partial_rotary_factor": factor if (factor := rope.get("partial_rotary_factor", 1.0)) != 1.0 else None,
        "quantization_config": config.quantization_config,
        "hidden_act": config.hidden_act if config.hidden_act != "silu" else None,
        "attention_bias": bias if bias is not None and bias != (config.model_type == "qwen2") else None,
    }
    for key, value in refused.items():
        if value is not None:
            raise ValueError(f"{key}: {value!r} is not served for {config.model_type}")


def _decoder_fields(config: _HFConfig) -> dict[str, Any]:
    qwen3 = config.model_type == "qwen3"
    theta = (config.rope_parameters or {}).get("rope_theta", config.rope_theta)
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim or (128 if qwen3 else config.hidden_size // max(config.num_attention_heads, 1)),
        "mlp_dim": config.intermediate_size,
        "max_tokens": config.max_position_embeddings,
        "rope_theta": 10_000.0 if theta is None else theta,
        "norm_eps": config.rms_norm_eps,
        "qk_norm": qwen3,
        "qkv_bias": not qwen3,
        "tied_head": config.tie_word_embeddings,
    }


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Read a checkpoint and compute in `dtype`, on the CPU.

    Raises:
        CheckpointError: a file is missing or corrupt, a tensor is missing, not expected, of another shape or not
            finite, or the configuration is not served. The message names the file or the tensor.
    """
    config = read_config(folder)
    try:
        model = _without_memory(config, folder)
        model.to(dtype).to_empty(device=torch.device("cpu"))
        places = tensor_places(model)
        for file, name, tensor in _tensors(folder):
            if name == HEAD and config.tied_head:  # some save it all the same
                places[HEAD] = torch.empty_like(model.embedding.weight)
            _fill(places[name], tensor[:], f"checkpoint {folder}: {file}: {name}")
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.strerror}: {error.filename}") from error
    if model.config.tied_head and HEAD in places and not torch.equal(places[HEAD], places[EMBEDDING]):
        raise CheckpointError(f"checkpoint {folder}: {HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true")
    return model.eval().requires_grad_(False)


def examine(folder: Path) -> DecoderConfig:
    """Look at a checkpoint without its memory: whether every tensor is there, and of the shape that it must have.

    Raises:
        CheckpointError: as `load`, but for values that are not finite.
    """
    try:
        return _without_memory(read_config(folder), folder).config
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.strerror}: {error.filename}") from error


def _without_memory(config: DecoderConfig, folder: Path) -> Decoder:
    """Make the model of a configuration whose tensors the folder has: nothing is allocated for one that it has not.

    Raises:
        CheckpointError: a tensor is missing, not expected or of another shape, or no tensor can be so large.
    """
    found = [(file, name, tensor.get_shape()) for file, name, tensor in _tensors(folder)]
    if config.num_layers > len(found):
        raise CheckpointError(
            f"checkpoint {folder}: num_hidden_layers: {config.num_layers}, and there are {len(found)} tensors"
        )
    try:
        with torch.device("meta"):
            model = Decoder(config)
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes that no tensor can have
        raise CheckpointError(f"checkpoint {folder}: {CONFIG}: {str(error).partition(chr(10))[0]}") from error
    places = tensor_places(model)
    missing = set(places)
    if config.tied_head:
        places[HEAD] = places[EMBEDDING]
    for file, name, shape in found:
        what = f"checkpoint {folder}: {file}"
        if name not in places:
            raise CheckpointError(f"{what}: unexpected tensor {name}")
        if shape != list(places[name].shape):
            raise CheckpointError(f"{what}: {name}: shape {shape}, config.json asks for {list(places[name].shape)}")
        missing.discard(name)
    if missing:
        raise CheckpointError(f"checkpoint {folder}: missing tensors: {_some(missing)}")
    return model


def save(model: Decoder, folder: Path) -> None:
    """Write a checkpoint that `load`, and transformers, read as it is, in the dtype of the weights.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    config = model.config
    assert config.qk_norm != config.qkv_bias, "neither of the two families"
    kind = "qwen3" if config.qk_norm else "qwen2"
    keys = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
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
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # transformers 5
        "use_sliding_window": False,
        "bos_token_id": None,  # every token is a code
        "eos_token_id": None,
    }
    tensors = {name: part.detach().clone().contiguous() for name, part in tensor_places(model).items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})  # which transformers asks for
        (folder / CONFIG).write_text(json.dumps(keys, indent=2) + "\n")
        as_public_as(folder / WEIGHTS, folder / CONFIG)  # safetensors makes it 0600
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder}: cannot be written: {error}") from error


def tensor_places(model: Decoder) -> dict[str, Tensor]:
    """Name in the checkpoint -> the part of our parameter that it fills; q, k, v and gate, up are joined here."""
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
            places.update({f"{attention}{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)})
        gate, up = state[ours + "gate_up.weight"].chunk(2)
        places |= {
            mlp + "gate_proj.weight": gate,
            mlp + "up_proj.weight": up,
            mlp + "down_proj.weight": state[ours + "down.weight"],
            attention + "o_proj.weight": state[ours + "out.weight"],
            theirs + "input_layernorm.weight": state[ours + "norm_in.weight"],
            theirs + "post_attention_layernorm.weight": state[ours + "norm_mlp.weight"],
        }
        if config.qk_norm:
            places[attention + "q_norm.weight"] = state[ours + "norm_q.weight"]
            places[attention + "k_norm.weight"] = state[ours + "norm_k.weight"]
    return places


def _fill(place: Tensor, tensor: Tensor, what: str) -> None:
    """Copy a tensor into its place, or say why not."""
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{what}: dtype {tensor.dtype} is none of {', '.join(map(str, DTYPES))}")
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{what}: NaN or infinity")
    place.copy_(tensor)
    if not torch.isfinite(place).all():
        raise CheckpointError(f"{what}: values up to {float(tensor.abs().max()):g} do not fit {place.dtype}")


def _tensors(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """(file, name, slice) of every tensor of the checkpoint; `slice[:]` reads it.

    Raises:
        CheckpointError: a file is missing or corrupt, or the index does not fit its files.
    """
    index = None if (folder / WEIGHTS).exists() else _index(folder)
    for file in sorted(set(index.values())) if index else [WEIGHTS]:
        if not (folder / file).is_file():
            raise CheckpointError(f"checkpoint {folder}: no such file: {file}, which {INDEX} names")
        try:
            with safe_open(folder / file, framework="pt") as opened:
                names = set(opened.keys())
                if index and (absent := {name for name, at in index.items() if at == file} - names):
                    raise CheckpointError(f"checkpoint {folder}: {file}: missing tensors: {_some(absent)}")
                if index and (extra := {name for name in names if index.get(name) != file}):
                    raise CheckpointError(f"checkpoint {folder}: {file}: tensors not in {INDEX}: {_some(extra)}")
                for name in sorted(names):
                    yield file, name, opened.get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"checkpoint {folder}: {file}: corrupt: {error}") from error


def _index(folder: Path) -> dict[str, str]:
    """Tensor -> file of a sharded checkpoint."""
    path = folder / INDEX
    if not path.exists():
        raise CheckpointError(f"checkpoint {folder}: no such file: {WEIGHTS} (nor {INDEX})")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"checkpoint {folder}: {INDEX}: {error}") from error
    if not found:
        raise CheckpointError(f"checkpoint {folder}: {INDEX}: weight_map is empty")
    for file in found.values():
        if Path(file).name != file:
            raise CheckpointError(f"checkpoint {folder}: {INDEX}: {file!r} is not a file of this folder")
    return found


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _some(names: set[str]) -> str:
    """The first few names and how many more."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
