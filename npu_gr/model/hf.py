"""A Hugging Face checkpoint directory as it is: `config.json` and `model.safetensors`, read whole or sharded.

`hf_config.py` reads the configuration, and lists the families. Every shape is compared before anything is allocated;
then each tensor is read once, checked and copied into its place, so loading needs the model's memory and that of one
tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from npu_gr.model import hf_config
from npu_gr.model.decoder import Decoder, DecoderConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of tensors in the files
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


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
        return hf_config.decode((folder / CONFIG).read_bytes())
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.strerror}: {CONFIG}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: {CONFIG}: {error}") from error


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
    if config.experts is not None and config.experts.num_experts > len(found):
        raise CheckpointError(
            f"checkpoint {folder}: num_experts: {config.experts.num_experts}, and there are {len(found)} tensors"
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
    keys = hf_config.keys_of(model.config, str(model.dtype).removeprefix("torch."))
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
