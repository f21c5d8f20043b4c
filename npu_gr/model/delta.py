"""A delta: what changed in a ranker's weights from one checkpoint to another of the same shape.

A file `000000000042.delta.safetensors` has, for each changed tensor, either

    NAME@rows, NAME@values    the changed rows, int64 ascending, and their values; or
    NAME                      the whole tensor, where more than half of its rows changed

and in its metadata a manifest and a checksum of everything:

    sequence       number of the delta in its stream: from 1, without gaps, never used twice
    base, result   digests of `model.safetensors` before and after
    architecture   digest of `model` in config.json without its features, and of the action names
    features       digest of the feature schema and of the side features of items
    item_key       key of the ids of named items, hexadecimal
    items          changes of the catalogue, in order: new items with their names and features,
                   withdrawn and restored ones

Applying a delta to the base gives the result bit for bit. It changes no trained item's id, no score
blend and no trained item's name: those come with a new checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.core.durable_files import sync_folder
from npu_gr.core.errors import DeltaError
from npu_gr.core.served import ItemChange
from npu_gr.core.text_format import quoted
from npu_gr.model.config import HSTUConfig, write_keys
from npu_gr.model.weights import ITEM_IDS, CheckpointWeights

FORMAT = 1
SUFFIX = ".delta.safetensors"
_ROWS, _VALUES = "@rows", "@values"
_BLOCK = 1 << 16  # rows that are compared at a time


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a delta says about itself; see the module's docstring."""

    format: int
    sequence: int
    base: str
    result: str
    architecture: str
    features: str
    item_key: str = ""
    made_at: float = 0.0  # unix seconds
    items: tuple[ItemChange, ...] = ()


class TensorChange(NamedTuple):
    """The change of one tensor."""

    rows: I64 | None  # [n] ascending; None = the whole tensor
    values: Tensor  # [n, ...], or the whole tensor


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The content of a delta. Its tensors are mapped from the file, so keep the file."""

    manifest: Manifest
    changes: Mapping[str, TensorChange]

    @property
    def num_rows(self) -> int:
        """Number of rows that change, of all tensors."""
        return sum(len(one.values) if one.values.ndim else 1 for one in self.changes.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return sum(one.values.nbytes for one in self.changes.values())


class ModelIdentity(NamedTuple):
    """What two checkpoints must share for a delta between them."""

    architecture: str
    features: str
    item_key: str

    @classmethod
    def of(cls, model: HSTUConfig, actions: tuple[str, ...], item_key: bytes) -> ModelIdentity:
        """Digest the configuration of a model, the names of its actions and its key of names."""
        keys = write_keys(model)
        features = {name: keys.pop(name, None) for name in ("features", "item_features")}
        return cls(
            _digest({"model": keys, "actions": list(actions)}), _digest(features), item_key.hex()
        )

    def check(self, delta: Manifest) -> None:
        """Check that a delta is of such a model.

        Raises:
            DeltaError: it is of another one; the message says in what.
        """
        for field, words in (
            ("architecture", "another architecture (sizes, layers, tasks or actions)"),
            ("features", "another schema of features"),
            ("item_key", "another key of the items' names"),
        ):
            if getattr(self, field) != getattr(delta, field):
                raise DeltaError(
                    f"delta {delta.sequence}: {field}: it is of a model with {words}; reload a "
                    "whole checkpoint"
                )


def _digest(table: object) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(table, order="sorted"))


def make_delta(
    old: CheckpointWeights,
    new: CheckpointWeights,
    sequence: int,
    item_key: bytes = b"",
    items: Sequence[ItemChange] = (),
) -> Delta:
    """Compare two checkpoints, bit for bit.

    Args:
        old, new: Checkpoints of one shape.
        sequence: Number of the delta.
        item_key: Key of their items' names.
        items: Changes of the catalogue, in order.

    Raises:
        DeltaError: they differ in more than weights; the message names the first difference.
    """
    before, after = (ModelIdentity.of(one.model, one.action_names, item_key) for one in (old, new))
    manifest = Manifest(
        format=FORMAT,
        sequence=sequence,
        base=old.version,
        result=new.version,
        made_at=time.time(),
        items=tuple(items),
        **after._asdict(),
    )
    before.check(manifest)
    if not torch.equal(old.tensors[ITEM_IDS], new.tensors[ITEM_IDS]):
        raise DeltaError(
            f"{ITEM_IDS}: the checkpoints have other items, or others in these rows; train with "
            "the items of the old one, or reload the new one"
        )
    changes = {}
    for name, was in old.tensors.items():
        now = new.tensors[name]
        if was.dtype != now.dtype:
            raise DeltaError(f"{name}: dtype {now.dtype}, the old checkpoint has {was.dtype}")
        if (change := _change(was, now)) is not None:
            changes[name] = change
    return Delta(manifest, changes)


def _change(was: Tensor, now: Tensor) -> TensorChange | None:
    if not was.ndim or len(was) < 2:
        return None if _same(was, now).all() else TensorChange(None, now)
    parts = zip(was.split(_BLOCK), now.split(_BLOCK), strict=True)
    differs = np.concatenate([~_same(a, b) for a, b in parts])
    rows = np.flatnonzero(differs)
    if not len(rows):
        return None
    if 2 * len(rows) > len(was):
        return TensorChange(None, now)
    return TensorChange(rows, now[torch.from_numpy(rows)])


def _same(a: Tensor, b: Tensor) -> npt.NDArray[np.bool_]:
    """Compare the bits of each row, [n, ...] -> [n]."""
    count = len(a) if a.ndim else 1
    equal = _bytes(a).reshape(count, -1) == _bytes(b).reshape(count, -1)
    same: npt.NDArray[np.bool_] = np.all(equal, axis=1)
    return same


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    flat = tensor.contiguous().reshape(-1)
    found: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return found


def apply(delta: Delta, tensors: Mapping[str, Tensor]) -> None:
    """Write a delta into the tensors of its base, in place, in their dtypes.

    Raises:
        DeltaError: as `check_fits`; nothing was changed.
    """
    check_fits(delta, tensors)
    with torch.no_grad():
        for name, (rows, values) in delta.changes.items():
            if rows is None:
                tensors[name].copy_(values)
            else:
                tensors[name][torch.from_numpy(rows)] = values.to(tensors[name].dtype)


def check_fits(delta: Delta, tensors: Mapping[str, Tensor]) -> None:
    """Check that a delta changes these tensors, by values that a model can have.

    Raises:
        DeltaError: it does not; the message names the tensor and the limit.
    """
    for name, (rows, values) in delta.changes.items():
        where = f"delta {delta.manifest.sequence}: {quoted(name)}"
        if name not in tensors:
            raise DeltaError(f"{where}: the model has no such tensor")
        into = tensors[name]
        shape = tuple(into.shape) if rows is None else (len(rows), *into.shape[1:])
        if tuple(values.shape) != shape or values.is_floating_point() != into.is_floating_point():
            raise DeltaError(
                f"{where}: {values.dtype} {list(values.shape)}, the model needs {into.dtype} "
                f"{list(shape)}"
            )
        if rows is not None and not _are_rows(rows, into):
            limit = len(into) if into.ndim else 0
            raise DeltaError(f"{where}: rows must be ascending, each once, and below {limit}")
        if values.is_floating_point() and values.numel() and not _is_finite(values):
            raise DeltaError(f"{where}: a value is not finite")


def _is_finite(values: Tensor) -> bool:
    # the extremes of a tensor with a NaN are NaN; a mask of all values takes 90 times as long
    return bool(torch.stack(values.aminmax()).isfinite().all())


def _are_rows(rows: I64, of: Tensor) -> bool:
    if not len(rows):
        return True
    is_ascending = bool(np.all(np.diff(rows) > 0))
    return of.ndim > 0 and rows[0] >= 0 and rows[-1] < len(of) and is_ascending


def check_indices(delta: Delta, config: HSTUConfig, limits: Mapping[str, Tensor]) -> None:
    """Check that changed indices lie within their tables.

    Args:
        delta: A delta that fits.
        config: Configuration of the model.
        limits: The tables of feature values, by name of the tensor of indices; its rows are the
            limit.

    Raises:
        DeltaError: one does not; the message names the tensor and the limit.
    """
    codes = torch.tensor(config.item_codes)
    for name, (_, values) in delta.changes.items():
        if values.is_floating_point() or not values.numel():
            continue
        most: Tensor | None = None
        if name == "codes.of_item":
            most = codes
        elif name in limits:
            most = torch.tensor(len(limits[name]) - 1)
        if most is None or (values < 0).any() or (values > most).any():
            limit = "none" if most is None else most.tolist()
            raise DeltaError(
                f"delta {delta.manifest.sequence}: {quoted(name)}: indices must be from 0 to "
                f"{limit}"
            )


def file_name(sequence: int) -> str:
    """Return the name of a delta's file; the names sort as the numbers."""
    return f"{sequence:012d}{SUFFIX}"


def write_delta(delta: Delta, path: Path) -> None:
    """Write a delta durably, under a name that nothing has yet.

    Raises:
        DeltaError: the name is taken, or the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for name, (rows, values) in delta.changes.items():
        if rows is None:
            tensors[name] = values.contiguous()
        else:
            tensors[name + _ROWS] = torch.from_numpy(rows)
            tensors[name + _VALUES] = values.contiguous()
    text = msgspec.json.encode(delta.manifest).decode()
    made = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, made, {"delta": text, "checksum": _checksum(text, tensors)})
        os.chmod(made, 0o644)
        publish(made, path)
    except (OSError, SafetensorError) as error:
        raise DeltaError(f"{path}: cannot be written: {error}") from error
    finally:
        made.unlink(missing_ok=True)


def publish(made: Path, path: Path) -> None:
    """Give a complete file its name, durably; a name is never given twice.

    Raises:
        DeltaError: the name is taken.
        OSError: the folder cannot be written.
    """
    with made.open("rb") as file:
        os.fsync(file.fileno())
    try:
        os.link(made, path)
    except FileExistsError:
        raise DeltaError(f"{path}: exists; a sequence number is never used twice") from None
    sync_folder(path.parent)


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name!r} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor).data)
    return digest.hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Read what a delta says about itself, without its checksum.

    Raises:
        DeltaError: the file is no delta.
    """
    return _opened(path)[0]


def read_delta(path: Path, *, is_checked: bool = True) -> Delta:
    """Read and verify a delta; its values are mapped from the file.

    Args:
        path: The file.
        is_checked: False for a file whose checksum this process has compared before.

    Raises:
        DeltaError: it is torn, damaged, or no delta; the message names the file.
    """
    manifest, text, checksum, tensors = _opened(path)
    if is_checked and _checksum(text, tensors) != checksum:
        raise DeltaError(f"{path}: its checksum is wrong: the file is damaged")
    changes = {}
    for name, values in tensors.items():
        if name.endswith(_ROWS):
            own = name.removesuffix(_ROWS)
            if values.dtype != torch.int64 or values.ndim != 1 or own + _VALUES not in tensors:
                raise DeltaError(f"{path}: {quoted(name)}: must be int64 rows with values")
            changes[own] = TensorChange(values.numpy(), tensors[own + _VALUES])
        elif not name.endswith(_VALUES):
            changes[name] = TensorChange(None, values)
        elif name.removesuffix(_VALUES) + _ROWS not in tensors:
            raise DeltaError(f"{path}: {quoted(name)}: has no rows")
    return Delta(manifest, changes)


def _opened(path: Path) -> tuple[Manifest, str, str, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = about["delta"]
        manifest = msgspec.json.decode(text, type=Manifest)
        checksum = about["checksum"]
    except FileNotFoundError:
        raise DeltaError(f"{path}: there is no such file") from None
    except OSError as error:
        raise DeltaError(f"{path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, RuntimeError) as error:  # msgspec's errors are ValueErrors
        raise DeltaError(f"{path}: is torn, or no delta: {error}") from error
    except KeyError as error:
        raise DeltaError(f"{path}: is no delta: its metadata has no {error}") from error
    if manifest.format != FORMAT:
        raise DeltaError(
            f"{path}: its format is {manifest.format}, and this version reads {FORMAT}"
        )
    if manifest.sequence < 1:
        raise DeltaError(f"{path}: sequence: {manifest.sequence}; numbers begin at 1")
    return manifest, text, checksum, tensors
