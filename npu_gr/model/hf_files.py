"""Reads and writes Hugging Face checkpoints: `config.json` and `model.safetensors`, or its shards.

This module serves every family; `hf.py` (decoders) and `hf_t5.py` map the tensors. Every shape is
compared before anything is allocated; then each tensor is read once, checked and copied into its
place, so loading needs the memory of the model and of one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from npu_gr.core.errors import CheckpointError
from npu_gr.core.file_permissions import as_public_as
from npu_gr.model.weights import give_memory, shapes_only

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of tensors in the files

C = TypeVar("C")
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format(Generic[C, M]):
    """How one kind of model is stored. `C` is the type of its configuration, `M` of the model."""

    decode: Callable[[bytes], C]  # config.json; ValueError or msgspec.MsgspecError names the key
    # adapts the configuration to the names of the tensors
    fit: Callable[[C, frozenset[str]], C] = lambda config, _names: config
    # key of config.json -> lower bound of the number of tensors, checked before the model is made
    sizes: Callable[[C], Mapping[str, int]]
    make: Callable[[C], M]
    # name in the checkpoint -> the part of our parameter that it fills
    places: Callable[[M], dict[str, Tensor]]
    # optional tensor -> the tensor that it must equal
    copies: Callable[[C], Mapping[str, str]]
    ignored: frozenset[str] = frozenset()  # tensors that are not used


def version(folder: Path) -> str:
    """Hash `config.json` and the weights' files to 16 hex digits, a part of every cache key.

    Raises:
        CheckpointError: A file cannot be read.
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


def read_config(folder: Path, form: Format[C, M]) -> C:
    """Read `config.json`.

    Raises:
        CheckpointError: The file is missing or invalid, or a setting is not served.
    """
    try:
        return form.decode((folder / CONFIG).read_bytes())
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.strerror}: {CONFIG}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: {CONFIG}: {error}") from error


def load(folder: Path, dtype: torch.dtype, form: Format[C, M]) -> M:
    """Read a checkpoint in `dtype`, onto the CPU.

    Raises:
        CheckpointError: A file is missing or corrupt; a tensor is missing, unexpected, not finite
            or of another shape; or the configuration is not served. The message names the file or
            the tensor.
    """
    try:
        config, model = _without_memory(folder, form)
        give_memory(model.to(dtype))
        places = form.places(model)
        copies = form.copies(config)
        twice: dict[str, Tensor] = {}
        for file, name, tensor in _tensors(folder):
            if name in form.ignored:
                continue
            if name in copies:  # some programs save tied tensors twice
                place = twice[name] = torch.empty_like(places[copies[name]])
            else:
                place = places[name]
            _fill(place, tensor[:], f"checkpoint {folder}: {file}: {name}")
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.strerror}: {error.filename}") from error
    for name, tensor in twice.items():
        if not torch.equal(tensor, places[copies[name]]):
            what = f"{name} differs from {copies[name]}"
            raise CheckpointError(f"checkpoint {folder}: {what}, but tie_word_embeddings is true")
    return model.eval().requires_grad_(False)


def examine(folder: Path, form: Format[C, M]) -> C:
    """Check a checkpoint's tensors, in the memory of one of them.

    Raises:
        CheckpointError: As `load`.
    """
    try:
        config = _without_memory(folder, form)[0]
        for file, name, tensor in _tensors(folder):
            if name not in form.ignored:
                _check_values(tensor[:], f"checkpoint {folder}: {file}: {name}")
        return config
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.strerror}: {error.filename}") from error


def _without_memory(folder: Path, form: Format[C, M]) -> tuple[C, M]:
    """Make the model on the meta device, and check that the folder has all its tensors.

    Raises:
        CheckpointError: A tensor is missing, unexpected, too large or of another shape.
    """
    config = read_config(folder, form)
    found = [(file, name, tensor.get_shape()) for file, name, tensor in _tensors(folder)]
    for key, count in form.sizes(config).items():
        if count > len(found):
            raise CheckpointError(
                f"checkpoint {folder}: {key}: {count}, and there are {len(found)} tensors"
            )
    config = form.fit(config, frozenset(name for _, name, _ in found))
    try:
        with shapes_only():
            model = form.make(config)
    except (RuntimeError, TypeError, OverflowError) as error:  # impossible sizes of tensors
        raise CheckpointError(
            f"checkpoint {folder}: {CONFIG}: {str(error).partition(chr(10))[0]}"
        ) from error
    places = form.places(model)
    missing = set(places)
    places |= {name: places[like] for name, like in form.copies(config).items()}
    for file, name, shape in found:
        if name in form.ignored:
            continue
        what = f"checkpoint {folder}: {file}"
        if name not in places:
            raise CheckpointError(f"{what}: unexpected tensor {name}")
        if shape != list(places[name].shape):
            raise CheckpointError(
                f"{what}: {name}: shape {shape}, config.json asks for {list(places[name].shape)}"
            )
        missing.discard(name)
    if missing:
        raise CheckpointError(f"checkpoint {folder}: missing tensors: {_some(missing)}")
    return config, model


def save(keys: Mapping[str, Any], places: Mapping[str, Tensor], folder: Path) -> None:
    """Write a checkpoint, in the dtype of the weights; transformers can read it too.

    Args:
        keys: Content of config.json.
        places: Tensors by name.
        folder: Created if missing.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    tensors = {name: part.detach().clone().contiguous() for name, part in places.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # transformers requires this metadata
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(keys, indent=2) + "\n")
        as_public_as(folder / WEIGHTS, folder / CONFIG)  # safetensors creates files with mode 0600
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder}: cannot be written: {error}") from error


def _check_values(tensor: Tensor, what: str) -> None:
    """Raise CheckpointError if a tensor's dtype or values cannot be served."""
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{what}: dtype {tensor.dtype} is none of {', '.join(map(str, DTYPES))}"
        )
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{what}: NaN or infinity")


def _fill(place: Tensor, tensor: Tensor, what: str) -> None:
    """Copy a tensor into its place; raise CheckpointError if its dtype or values do not fit."""
    _check_values(tensor, what)
    place.copy_(tensor)
    if not torch.isfinite(place).all():
        raise CheckpointError(
            f"{what}: values up to {float(tensor.abs().max()):g} do not fit {place.dtype}"
        )


def _tensors(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield (file, name, slice) of every tensor of the checkpoint; `slice[:]` reads it.

    Raises:
        CheckpointError: A file is missing or corrupt, or the index does not match its files.
    """
    index = None if (folder / WEIGHTS).exists() else _index(folder)
    for file in sorted(set(index.values())) if index else [WEIGHTS]:
        if not (folder / file).is_file():
            raise CheckpointError(f"checkpoint {folder}: no such file: {file}, which {INDEX} names")
        try:
            with safe_open(folder / file, framework="pt") as opened:
                names = set(opened.keys())
                if index and (absent := {name for name, at in index.items() if at == file} - names):
                    raise CheckpointError(
                        f"checkpoint {folder}: {file}: missing tensors: {_some(absent)}"
                    )
                if index and (extra := {name for name in names if index.get(name) != file}):
                    raise CheckpointError(
                        f"checkpoint {folder}: {file}: tensors not in {INDEX}: {_some(extra)}"
                    )
                for name in sorted(names):
                    yield file, name, opened.get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"checkpoint {folder}: {file}: corrupt: {error}") from error


def _index(folder: Path) -> dict[str, str]:
    """Read the map from tensor to file of a sharded checkpoint."""
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
            raise CheckpointError(
                f"checkpoint {folder}: {INDEX}: {file!r} is not a file of this folder"
            )
    return found


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _some(names: set[str]) -> str:
    """Join the first three names, and count the others."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (
        f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    )
