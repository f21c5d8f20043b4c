"""What another project's checkpoint folder holds: tensors by name, settings, and all that cannot be converted.

A conversion takes what it knows; at the end whatever is left is named, with everything that was refused before, in one
error: nothing is dropped in silence.
"""

from __future__ import annotations

import ast
import pickle
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from npu_gr.core.errors import CheckpointError

STATE_KEYS = (
    "model_state_dict",
    "dense_dict",
    "sparse_dict",
    "state_dict",
    "model",
)  # under which programs save a state dict
WRAPPERS = ("module.", "_orig_mod.", "_dmp_wrapped_module.")  # in front of names, of modules around the model


class ForeignCheckpoint:
    """One checkpoint of another project, while it is converted."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Begin a conversion.

        Args:
            name: of the checkpoint, for messages.
            tensors: its weights by name.
            settings: its configuration by key; a key that is absent has the project's default.
        """
        self.name = name
        self.tensors = dict(tensors)
        self.settings = dict(settings)
        self.problems: list[str] = []
        self.notes: list[str] = []

    def setting(self, key: str, default: Any) -> Any:
        """Read one setting."""
        return self.settings.get(key, default)

    def refuse(self, problem: str) -> None:
        """Note something that does not convert."""
        self.problems.append(problem)

    def only(self, key: str, allowed: Iterable[Any], default: Any) -> Any:
        """Read a setting of which some values convert; another is noted, and the first allowed one returned."""
        allowed = list(allowed)
        value = self.setting(key, default)
        if value in allowed:
            return value
        self.refuse(f"{key} = {value!r}: only {' or '.join(map(repr, allowed))} converts")
        return allowed[0]

    def take(self, name: str, *shape: int) -> Tensor:
        """Take a tensor, in fp32.

        Args:
            name: of it.
            shape: that it must have; -1 = any size.

        Returns:
            The tensor; zeros of the wanted shape (1 for any) where it is missing or other, which is noted.
        """
        found = self.tensors.pop(name, None)
        if found is None:
            self.refuse(f"missing tensor {name}")
        elif not found.is_floating_point() or not bool(torch.isfinite(found).all()):
            self.refuse(f"{name}: not floating-point numbers, or NaN or infinity among them")
        elif shape and (len(shape) != found.ndim or any(w not in (-1, n) for w, n in zip(shape, found.shape))):  # noqa: B905
            self.refuse(f"{name}: shape {list(found.shape)}, the configuration asks for {list(shape)}")
        else:
            return found.detach().float()
        return torch.zeros([max(1, size) for size in shape])

    def drop(self, *, prefix: str = "", suffix: str = "") -> None:
        """Leave out tensors whose values follow from the configuration, or that others hold by now."""
        self.tensors = {n: t for n, t in self.tensors.items() if not (n.startswith(prefix) and n.endswith(suffix))}

    def finish(self) -> None:
        """Name everything that did not convert.

        Raises:
            CheckpointError: there is something.
        """
        unknown = [f"unexpected tensor {name}" for name in sorted(self.tensors)]
        if problems := self.problems + unknown:
            more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
            lines = "\n  ".join(problems[:20] + more)
            raise CheckpointError(f"{self.name} does not convert:\n  {lines}")


def read_tensors(folder: Path, *, is_trusted: bool = False) -> dict[str, Tensor]:
    """Read the tensors of a folder: safetensors, what torch.save wrote, and torch's distributed checkpoints.

    Args:
        folder: with one checkpoint.
        is_trusted: read distributed checkpoints, whose metadata are a pickle: reading it may run its author's code.

    Raises:
        CheckpointError: there is none, or one cannot be read.
    """
    found: dict[str, Tensor] = {}
    weights = sorted(path for path in folder.rglob("*") if path.is_file() and is_weights(path))
    parts = [path.parent for path in sorted(folder.rglob(".metadata"))]
    if not weights and not parts:
        raise CheckpointError(f"{folder}: no weights: neither .safetensors, nor a file of torch.save, nor .metadata")
    if parts and not is_trusted:
        raise CheckpointError(
            f"{parts[0]}/.metadata is a pickle: reading it may run its author's code; pass --trusted if you trust it"
        )
    for path in [*weights, *parts]:
        for name, tensor in (_read_distributed(path) if path in parts else _read(path)).items():
            if name in found:
                raise CheckpointError(
                    f"{folder}: tensor {name} is in several files: leave one checkpoint in the folder"
                )
            found[name] = tensor
    return found


def is_weights(path: Path) -> bool:
    """Tell whether a file has weights: a .safetensors, or a ZIP as torch.save writes it, whatever its name."""
    if path.suffix in (".safetensors", ".npz", ".gin", ".config", ".distcp"):
        return path.suffix == ".safetensors"
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return unwrapped(load_file(path))
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {str(error).partition(chr(10))[0]}") from error
    for key in STATE_KEYS:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: no state dict")
    return unwrapped({name: value for name, value in state.items() if isinstance(value, Tensor)})


def _read_distributed(folder: Path) -> dict[str, Tensor]:
    """Read a checkpoint that several processes wrote, whole."""
    with tempfile.TemporaryDirectory() as scratch:
        joined = Path(scratch, "joined.pt")
        try:
            dcp_to_torch_save(folder, joined)
        except (Exception, CheckpointException) as error:  # it raises whatever its files make it stumble over
            raise CheckpointError(f"{folder}: cannot be read: {str(error).strip().splitlines()[-1]}") from error
        return _read(joined)


def unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take the names of modules around the model off the tensors' names."""
    found = {}
    for name, tensor in state.items():
        own = name
        while wrapper := next((w for w in WRAPPERS if own.startswith(w)), ""):
            own = own.removeprefix(wrapper)
        found[own] = tensor
    return found


def read_gin(folder: Path) -> dict[str, Any]:
    """Read the bindings `scope.key = literal` of the one gin file of a folder; {} where there is none.

    Raises:
        CheckpointError: there are several files, or a value is no literal.
    """
    files = sorted(folder.rglob("*.gin"))
    if len(files) > 1:
        raise CheckpointError(f"{folder}: several gin files: {', '.join(path.name for path in files)}")
    found: dict[str, Any] = {}
    pending = ""
    for number, line in enumerate(files[0].read_text().splitlines() if files else [], 1):
        pending += line.partition("#")[0].strip()
        if not pending or pending.startswith(("import ", "include ")):
            pending = ""
            continue
        key, equals, value = pending.partition("=")
        try:
            found[key.strip()] = ast.literal_eval(value.strip())
            pending = ""
        except (SyntaxError, ValueError) as error:
            if equals and value.count("[") + value.count("(") + value.count("{") > sum(map(value.count, "])}")):
                continue  # goes on in the next line
            if "@" in value or "%" in value:  # a reference to a function or a macro: no setting of a model
                pending = ""
                continue
            raise CheckpointError(f"{files[0]}: line {number}: not a literal: {pending}") from error
    return found
