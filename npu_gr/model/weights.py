"""Reads and writes a ranker's checkpoint: `config.json`, `model.safetensors`, `order.safetensors`.

`model.safetensors` has the weights, side features and item ids; `order.safetensors`, optional, the
score blend of a model that also retrieves. Files are written under temporary names and renamed, the
weights first, so a reader never sees a partial file. An old blend is removed first and a new one
written last, so a reader never sees the blend of another model.

`save_sharded` writes a checkpoint for serving, with the vectors of its items in files of their own
(`item_shards.py`) and the rest as here. Its version has the digests of all of them.

Models are first made on the meta device (`shapes_only`), for the names and shapes of their tensors.
Filling a meta tensor makes torch import its compiler: 125,000 objects, .7 s of the start, and 65 ms
in every full garbage collection of the process. `shapes_only` therefore skips the fills.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from npu_gr.core.arrays import I64
from npu_gr.core.errors import CheckpointError
from npu_gr.core.file_permissions import as_public_as
from npu_gr.core.names import value_name
from npu_gr.model.blend import FILE as ORDER
from npu_gr.model.blend import ScoreBlend, load_blend, save_blend
from npu_gr.model.config import HSTUConfig, take_pinned, write_keys
from npu_gr.model.hstu import HSTU
from npu_gr.model.item_shards import (
    ROWS_PER_FILE,
    ItemRows,
    Records,
    RowDtype,
    RowShards,
    encoded,
    write_rows,
)

# functions of `nn.init`, and methods, that fill a tensor at random or with a constant
_FILLS = frozenset(
    name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")
)


class _WithoutValues(TorchFunctionMode):
    """Skips every call that would fill a tensor."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if "out" in named:
            return named["out"]
        if func.__name__ in _FILLS:
            return args[0] if args else named["tensor"]
        return func(*args, **named)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Make all tensors of the block on the meta device, and set no values."""
    with torch.device("meta"), _WithoutValues():
        yield


def give_memory(model: nn.Module) -> None:
    """Replace a model's meta tensors by uninitialised CPU tensors.

    `nn.Module.to_empty` would import torch's compiler.
    """
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            made = torch.empty(weight.shape, dtype=weight.dtype)
            setattr(module, name, nn.Parameter(made, weight.requires_grad))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


WEIGHTS = "model.safetensors"
ITEM_IDS = "catalog.item_ids"
RESIDUALS = "item.weight"  # own rows of items; none in a sharded checkpoint
_BLOCK = 1 << 16  # items whose vectors are computed at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A model with the external ids of its item rows."""

    model: HSTU
    item_ids: I64  # [num_items] external id of each row, each once
    name: str
    version: str = ""  # digest of the weights and the blend; computed when saved
    # value of each action in the interaction log; empty = the log has no values
    action_values: tuple[float, ...] = ()
    # name of each action; empty = its value is its name
    action_names: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)  # results of training
    order: ScoreBlend | None = None  # the score blend of recommend; None = not fitted
    rows: RowShards | None = None  # of a sharded checkpoint, whose model has no item rows


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    name: str
    version: str
    model: HSTUConfig
    action_values: tuple[float, ...] = ()
    action_names: tuple[str, ...] = ()
    metrics: dict[str, float] = {}
    item_rows: ItemRows | None = None  # of a sharded checkpoint

    def parts(self, folder: Path) -> tuple[str, str]:
        """Return the version of the weights that deltas name, and a digest of all else served."""
        order = order_digest(folder)
        if self.item_rows is None:
            return self.version, order
        return self.item_rows.base, self.version + self.item_rows.digest + order


def save(checkpoint: Checkpoint, folder: Path) -> str:
    """Write the checkpoint.

    Returns:
        The checkpoint's version.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    tensors = {
        name: tensor.detach().contiguous().cpu()
        for name, tensor in checkpoint.model.state_dict().items()
    }
    tensors[ITEM_IDS] = torch.from_numpy(checkpoint.item_ids)
    return _save(checkpoint, folder, tensors, None)


def save_sharded(
    checkpoint: Checkpoint, folder: Path, dtype: RowDtype, rows_per_file: int = ROWS_PER_FILE
) -> str:
    """Write a checkpoint for serving whose item rows need not fit in memory.

    Args:
        checkpoint: A checkpoint that was loaded, with its version.
        folder: A folder without a checkpoint.
        dtype: Dtype of the item rows.
        rows_per_file: Number of rows in each file but the last.

    Returns:
        The version of the sharded checkpoint.

    Raises:
        CheckpointError: The model needs every item row at once, a value is not finite, or the
            folder cannot be written or has a checkpoint.
    """
    model = checkpoint.model
    if why := unshardable(model.config):
        raise CheckpointError(f"item rows: {why}")
    rows = torch.arange(model.config.num_items).split(_BLOCK)
    with torch.inference_mode():
        parts = encoded((model.items.embed(part) for part in rows), dtype)
        return save_shards(checkpoint, folder, parts, dtype, rows_per_file)


def save_shards(
    checkpoint: Checkpoint,
    folder: Path,
    records: Iterable[Records],
    dtype: RowDtype,
    rows_per_file: int = ROWS_PER_FILE,
) -> str:
    """Write a sharded checkpoint whose item rows come from elsewhere, in order.

    See `save_sharded`. The model's own item rows are not used; it may have none.
    """
    tensors = {name: tensor.detach() for name, tensor in checkpoint.model.state_dict().items()}
    tensors[RESIDUALS] = tensors[RESIDUALS].new_empty(0, checkpoint.model.config.dim)
    ids, base = checkpoint.item_ids, checkpoint.version
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = write_rows(folder, records, ids, base, dtype, rows_per_file)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from error
    return _save(checkpoint, folder, tensors, made)


def unshardable(config: HSTUConfig) -> str:
    """Return why a model reads every item row at once; "" = it does not."""
    if config.retrieval:
        return "retrieval: the search reads the rows of all items; serve the whole checkpoint"
    if config.head == "product":
        return "head: product has a second table of items, which stays in memory"
    return ""


def _save(
    checkpoint: Checkpoint, folder: Path, tensors: dict[str, Tensor], rows: ItemRows | None
) -> str:
    weights = folder / WEIGHTS
    manifest = folder / "config.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, weights.with_suffix(".tmp"))
        version = digest(weights.with_suffix(".tmp"))
        about = _Manifest(
            format=1,
            name=checkpoint.name,
            version=version,
            model=checkpoint.model.config,
            action_values=checkpoint.action_values,
            action_names=checkpoint.action_names,
            metrics=checkpoint.metrics,
            item_rows=rows,
        )
        table = msgspec.to_builtins(about) | {"model": write_keys(about.model)}
        if rows is None:
            del table["item_rows"]
        text = msgspec.json.encode(table)
        manifest.with_suffix(".tmp").write_bytes(msgspec.json.format(text, indent=2) + b"\n")
        # safetensors creates files with mode 0600
        as_public_as(weights.with_suffix(".tmp"), manifest.with_suffix(".tmp"))
        (folder / ORDER).unlink(missing_ok=True)
        os.replace(weights.with_suffix(".tmp"), weights)
        os.replace(manifest.with_suffix(".tmp"), manifest)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder}: cannot be written: {error}") from error
    if checkpoint.order is not None:
        save_blend(checkpoint.order, folder)
    return combined(*about.parts(folder))


class CheckpointWeights(NamedTuple):
    """The content of `model.safetensors`, and what `config.json` says about it."""

    model: HSTUConfig
    action_names: tuple[str, ...]
    version: str  # digest of the file
    tensors: Mapping[str, Tensor]  # by name, with `ITEM_IDS`; mapped from the file


def read_weights(folder: Path) -> CheckpointWeights:
    """Read the weights of a checkpoint, without making a model.

    Raises:
        CheckpointError: A file is missing or corrupt, or the weights do not fit the configuration.
    """
    about = _checked_manifest(folder)
    _reject_sharded(about, folder)
    tensors = _tensors(folder)
    weights = {name: tensor for name, tensor in tensors.items() if name != ITEM_IDS}
    if misfit := _misfit(about.model, weights):
        raise CheckpointError(f"checkpoint {folder}: weights do not fit config.json: {misfit}")
    if ITEM_IDS not in tensors:
        raise CheckpointError(f"checkpoint {folder}: no tensor {ITEM_IDS}")
    names = about.action_names or tuple(map(value_name, about.action_values))
    return CheckpointWeights(about.model, names, about.version, tensors)


def _tensors(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = load_file(folder / WEIGHTS)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.strerror}: {error.filename}") from error
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    return found


def _reject_sharded(about: _Manifest, folder: Path) -> None:
    if about.item_rows is not None:
        raise CheckpointError(
            f"checkpoint {folder}: is sharded, for serving alone; give the checkpoint that it was "
            f"made from (version {about.item_rows.base})"
        )


def load(folder: Path, *, is_served: bool = False) -> Checkpoint:
    """Read a checkpoint in the dtype in which it was saved.

    Args:
        folder: Its folder.
        is_served: Accept a sharded one; its item rows are opened, and not read.

    Raises:
        CheckpointError: A file is missing or corrupt, or the weights do not fit the configuration.
    """
    about = _checked_manifest(folder)
    if not is_served:
        _reject_sharded(about, folder)
    rows = None
    if about.item_rows is not None:
        if why := unshardable(about.model):
            raise CheckpointError(f"checkpoint {folder}: item_rows: {why}")
        rows = RowShards(folder, about.item_rows, about.model.num_items, about.model.dim)
    tensors = _tensors(folder)
    item_ids = tensors.pop(ITEM_IDS, None)
    if misfit := _misfit(about.model, tensors, is_sharded=rows is not None):
        raise CheckpointError(f"checkpoint {folder}: weights do not fit config.json: {misfit}")
    model = HSTU(about.model, has_item_rows=rows is None)
    model.cast(tensors[RESIDUALS].dtype).load_state_dict(tensors)
    ids = _checked_ids(folder, about.model, item_ids) if rows is None else rows.ids()
    names = about.action_names or tuple(map(value_name, about.action_values))
    if names and (len(names) != len(about.model.actions) or len(set(names)) != len(names)):
        raise CheckpointError(
            f"checkpoint {folder}: action_names: one for each of {len(about.model.actions)} actions"
        )
    blend = load_blend(folder)
    if blend is not None and (misfit := _blend_misfit(about.model, blend)):
        raise CheckpointError(f"checkpoint {folder}: {ORDER} does not fit config.json: {misfit}")
    return Checkpoint(
        model=model.eval(),
        item_ids=ids,
        name=about.name,
        version=combined(*about.parts(folder)),
        action_values=about.action_values,
        action_names=names,
        metrics=about.metrics,
        order=blend,
        rows=rows,
    )


def _checked_ids(folder: Path, config: HSTUConfig, item_ids: Tensor | None) -> I64:
    if item_ids is None or item_ids.shape != (config.num_items,):
        raise CheckpointError(
            f"checkpoint {folder}: {ITEM_IDS} must name all {config.num_items} items"
        )
    ids: I64 = item_ids.numpy().astype(np.int64)
    if len(np.unique(ids)) != len(ids) or (ids < 0).any():
        raise CheckpointError(f"checkpoint {folder}: {ITEM_IDS} must be distinct and not negative")
    return ids


def versions_of(folder: Path) -> tuple[str, str]:
    """Return the version of a checkpoint's weights that deltas name, and a digest of the rest.

    Nothing is loaded; `combined` of both is the version of the checkpoint.

    Raises:
        CheckpointError: A file is missing, or the weights are not those of config.json.
    """
    return _checked_manifest(folder).parts(folder)


def config_of(folder: Path) -> HSTUConfig:
    """Return a checkpoint's configuration, without loading its weights.

    Raises:
        CheckpointError: A file is missing, or the weights are not those of config.json.
    """
    return _checked_manifest(folder).model


def _checked_manifest(folder: Path) -> _Manifest:
    """Read config.json, and compare its digest with the weights.

    Raises:
        CheckpointError: A file is missing or invalid, or the digest is another one.
    """
    try:
        about = _read_manifest(folder / "config.json")
        if digest(folder / WEIGHTS) != about.version:
            raise CheckpointError(
                f"checkpoint {folder}: {WEIGHTS} is not the one that config.json names"
            )
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {error.strerror}: {error.filename}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    return about


def order_digest(folder: Path) -> str:
    """Return the digest of a checkpoint's score blend; "" = it has none."""
    path = folder / ORDER
    return digest(path) if path.exists() else ""


def combined(version: str, rest: str) -> str:
    """Combine the weights' version with a digest of the blend and of item rows, if there is one."""
    return xxhash.xxh3_64((version + rest).encode()).hexdigest() if rest else version


def _blend_misfit(config: HSTUConfig, blend: ScoreBlend) -> str:
    """Return why the blend does not fit the model; empty = it fits."""
    if not config.retrieval:
        return "the model does not retrieve"
    if blend.num_items != config.num_items:
        return f"transitions of {blend.num_items} items, the model has {config.num_items}"
    return (
        ""
        if blend.task in config.tasks
        else f"no task {blend.task!r} among {', '.join(config.tasks)}"
    )


def _misfit(config: HSTUConfig, tensors: dict[str, Tensor], *, is_sharded: bool = False) -> str:
    """Return how the tensors differ from the configuration; empty = they match.

    The model is made on the meta device: the configuration may need more memory than there is.
    """
    if config.num_layers > len(tensors):
        return f"num_layers: {config.num_layers}, and there are {len(tensors)} tensors"
    try:
        with shapes_only():
            wanted = HSTU(config, has_item_rows=not is_sharded).state_dict()
    except (RuntimeError, TypeError, OverflowError) as error:  # impossible sizes of tensors
        return str(error).partition("\n")[0]
    if names := wanted.keys() ^ tensors.keys():
        name = min(names)
        return f"{'no' if name in wanted else 'unexpected'} tensor {name}"
    for name, tensor in tensors.items():
        want = wanted[name]
        if tensor.shape != want.shape:
            return f"{name}: shape {list(tensor.shape)}, config.json asks for {list(want.shape)}"
        if tensor.is_floating_point() != want.is_floating_point():
            return f"{name}: dtype {tensor.dtype}"
    return ""


def _read_manifest(path: Path) -> _Manifest:
    """Decode config.json; check and remove its pinned keys.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no valid config.json (msgspec's errors included), or a pinned key has
            another value.
    """
    keys = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    if isinstance(model := keys.get("model"), dict):
        keys["model"] = take_pinned(model)
    return msgspec.convert(keys, _Manifest)


def digest(path: Path) -> str:
    """Return 16 hex digits (xxh3-64) over a file."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()
