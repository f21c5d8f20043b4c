"""Reading another project's checkpoint folder, and what all conversions share.

A conversion takes the tensors that it knows by name, and the settings. At the end one error lists
the tensors that nothing took and everything that was rejected: nothing is dropped in silence.

Meta's DLRM form of HSTU and its descendants have in common their layers, MLPs that become rows of
tables, and contextual features: tokens of the user in front of the history, one a feature or one
for all. Such a token is a linear layer, or an MLP, of the row of the feature's value. It is folded
into the rows: the bias goes to `user_token`, and each value's contribution is its row.

Source: the public code of generative-recommenders,
`modules/{stu,preprocessors,action_encoder,postprocessors}.py`.
"""

from __future__ import annotations

import ast
import pickle
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.functional import layer_norm, linear

from npu_gr.core.arrays import I64
from npu_gr.core.errors import CheckpointError
from npu_gr.core.feature_schema.schema import MOST_WHOLE, Feature
from npu_gr.model.config import HSTUConfig, TimePeriod
from npu_gr.model.hstu import HSTU

# keys under which programs save a state dict
STATE_KEYS = ("model_state_dict", "dense_dict", "sparse_dict", "state_dict", "model")
# prefixes that modules around the model put before the tensors' names
WRAPPERS = ("module.", "_orig_mod.", "_dmp_wrapped_module.")


class ForeignCheckpoint:
    """One checkpoint of another project, while it is converted."""

    def __init__(
        self, name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
    ) -> None:
        """Begin a conversion.

        Args:
            name: Name of the checkpoint in error messages.
            tensors: Weights by name.
            settings: Configuration by key; absent keys have the project's default.
        """
        self.name = name
        self.tensors = dict(tensors)
        self.settings = dict(settings)
        self.problems: list[str] = []
        self.notes: list[str] = []

    def setting(self, key: str, default: Any) -> Any:
        """Read one setting."""
        return self.settings.get(key, default)

    def reject(self, problem: str) -> None:
        """Add a problem to the error that `finish` raises."""
        self.problems.append(problem)

    def only(self, key: str, allowed: Iterable[Any], default: Any) -> Any:
        """Read a setting that converts only if its value is allowed.

        Any other value is rejected, and the first allowed one returned.
        """
        allowed = list(allowed)
        value = self.setting(key, default)
        if value in allowed:
            return value
        self.reject(f"{key} = {value!r}: only {' or '.join(map(repr, allowed))} converts")
        return allowed[0]

    def take(self, name: str, *shape: int) -> Tensor:
        """Take a tensor, in fp32.

        Args:
            name: Name of the tensor.
            shape: Required shape; -1 = any size.

        Returns:
            The tensor; if it is missing or invalid, which is rejected, zeros of the required shape
            (size 1 for -1).
        """
        found = self.tensors.pop(name, None)
        if found is None:
            self.reject(f"missing tensor {name}")
        elif not found.is_floating_point() or not bool(torch.isfinite(found).all()):
            self.reject(f"{name}: not floating-point numbers, or NaN or infinity among them")
        elif shape and (
            len(shape) != found.ndim
            or any(w not in (-1, n) for w, n in zip(shape, found.shape, strict=True))
        ):
            self.reject(
                f"{name}: shape {list(found.shape)}, the configuration asks for {list(shape)}"
            )
        else:
            # a copy, since what a product rounds depends on where its tensors begin in memory, and
            # unchanged rows of two imports must be equal
            return found.detach().to(torch.float32, copy=True)
        return torch.zeros([max(1, size) for size in shape])

    def drop(self, *, prefix: str = "", suffix: str = "") -> None:
        """Ignore tensors that follow from the configuration, or that were folded into others."""
        self.tensors = {
            n: t
            for n, t in self.tensors.items()
            if not (n.startswith(prefix) and n.endswith(suffix))
        }

    def finish(self) -> None:
        """Check that everything converted.

        Raises:
            CheckpointError: A tensor was not taken, or something was rejected.
        """
        unknown = [f"unexpected tensor {name}" for name in sorted(self.tensors)]
        if problems := self.problems + unknown:
            more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
            lines = "\n  ".join(problems[:20] + more)
            raise CheckpointError(f"{self.name} does not convert:\n  {lines}")


def read_tensors(folder: Path, *, is_trusted: bool = False) -> dict[str, Tensor]:
    """Read the tensors of a folder.

    Formats: safetensors, files of torch.save, and torch's distributed checkpoints.

    Args:
        folder: Folder with one checkpoint.
        is_trusted: Read distributed checkpoints, whose metadata is a pickle: reading it may run
            its author's code.

    Raises:
        CheckpointError: There are no weights, or a file cannot be read.
    """
    found: dict[str, Tensor] = {}
    weights = sorted(path for path in folder.rglob("*") if path.is_file() and is_weights(path))
    parts = [path.parent for path in sorted(folder.rglob(".metadata"))]
    if not weights and not parts:
        raise CheckpointError(
            f"{folder}: no weights: neither .safetensors, nor a file of torch.save, nor .metadata"
        )
    if parts and not is_trusted:
        raise CheckpointError(
            f"{parts[0]}/.metadata is a pickle: reading it may run its author's code; pass "
            "--trusted if you trust it"
        )
    for path in [*weights, *parts]:
        for name, tensor in (_read_distributed(path) if path in parts else _read(path)).items():
            if name in found:
                raise CheckpointError(
                    f"{folder}: tensor {name} is in several files: leave one checkpoint in the "
                    "folder"
                )
            found[name] = tensor
    return found


def is_weights(path: Path) -> bool:
    """Return whether a file has weights: a .safetensors, or a ZIP of torch.save with any name."""
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
        raise CheckpointError(
            f"{path}: cannot be read: {str(error).partition(chr(10))[0]}"
        ) from error
    for key in STATE_KEYS:
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: no state dict")
    return unwrapped({name: value for name, value in state.items() if isinstance(value, Tensor)})


def _read_distributed(folder: Path) -> dict[str, Tensor]:
    """Read a checkpoint that several processes wrote, and join its parts."""
    with tempfile.TemporaryDirectory() as scratch:
        joined = Path(scratch, "joined.pt")
        try:
            dcp_to_torch_save(folder, joined)
        # damaged files make it raise exceptions of any type; CheckpointException is a BaseException
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"{folder}: cannot be read: {str(error).strip().splitlines()[-1]}"
            ) from error
        return _read(joined)


def unwrapped(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of modules around the model from the tensors' names."""
    found = {}
    for name, tensor in state.items():
        own = name
        while wrapper := next((w for w in WRAPPERS if own.startswith(w)), ""):
            own = own.removeprefix(wrapper)
        found[own] = tensor
    return found


def read_gin(folder: Path) -> dict[str, Any]:
    """Read the bindings `scope.key = literal` of a folder's gin file; {} if it has none.

    Raises:
        CheckpointError: There are several gin files, or a value is no literal.
    """
    files = sorted(folder.rglob("*.gin"))
    if len(files) > 1:
        raise CheckpointError(
            f"{folder}: several gin files: {', '.join(path.name for path in files)}"
        )
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
            if equals and value.count("[") + value.count("(") + value.count("{") > sum(
                map(value.count, "])}")
            ):
                continue  # the value continues in the next line
            # a reference to a function or a macro: no setting of a model
            if "@" in value or "%" in value:
                pending = ""
                continue
            raise CheckpointError(f"{files[0]}: line {number}: not a literal: {pending}") from error
    return found


class GivenNames(NamedTuple):
    """Names that a checkpoint of another project does not contain.

    Empty = numbers, or the project's own names.
    """

    item_ids: I64 | None = None  # [num_items] external id of each row, each once
    actions: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()


class Converted(NamedTuple):
    """A ranker in our form."""

    model: HSTU
    item_ids: I64  # [num_items]
    notes: list[str]  # what was changed or left out, for the user


def filled(
    source: ForeignCheckpoint, config: HSTUConfig, tensors: dict[str, Tensor], item_ids: I64
) -> Converted:
    """Build the model.

    Args:
        source: Checkpoint whose tensors have all been taken.
        config: Configuration of the model.
        tensors: The model's tensors by our names; absent biases are zero, absent norms are the
            identity.
        item_ids: External id of each item row.

    Raises:
        CheckpointError: Something did not convert.
    """
    source.finish()
    model = HSTU(config)
    state = model.state_dict()
    for name, place in state.items():
        if name in tensors:
            place.copy_(tensors[name])
        else:
            assert "norm" in name or name.endswith(".bias") or name == "action.weight", name
            place.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    assert tensors.keys() <= state.keys(), tensors.keys() - state.keys()
    return Converted(model.eval().requires_grad_(False), item_ids, source.notes)


def named_items(source: ForeignCheckpoint, names: GivenNames, num_items: int, first_id: int) -> I64:
    """Return the given ids of items, or numbers from `first_id` on."""
    if names.item_ids is None:
        source.notes.append(f"items are numbers, {first_id} to {first_id + num_items - 1}")
        return np.arange(first_id, first_id + num_items)
    if len(names.item_ids) != num_items:
        raise CheckpointError(
            f"item ids: {len(names.item_ids)}, and the checkpoint has {num_items} items"
        )
    return names.item_ids


def named(
    source: ForeignCheckpoint, what: str, given: tuple[str, ...], default: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the given names, or the default ones; a wrong number is noted."""
    if given and len(given) != len(default):
        source.reject(f"{what}: {len(given)} names, and the checkpoint has {len(default)}")
        return default
    return given or default


def per_head_to_kind(weight: Tensor, num_heads: int, widths: list[int]) -> Tensor:
    """Bring rows laid out head by head, [H, u | v | q | k], into our order [U | V | Q | K].

    Args:
        weight: [H * sum(widths), ...].
        num_heads: H.
        widths: Widths of U, V, Q and K in one head.
    """
    by_head = weight.view(num_heads, sum(widths), *weight.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in by_head.split(widths, dim=1)])


class Contextual(NamedTuple):
    """A contextual feature and its table."""

    feature: Feature  # a feature of users
    rows: Tensor  # [num_rows, d] in the order of `Feature.num_rows`; last: a missing value


def numbered(
    source: ForeignCheckpoint, name: str, table: Tensor, missing: Tensor | None = None
) -> Contextual:
    """Make a feature whose values are the numbers of its table's rows.

    Args:
        source: Rejects a table that is too long.
        name: Name of the feature.
        table: [n, d].
        missing: [d] row of a missing value; None = zeros.
    """
    if len(table) > MOST_WHOLE:
        source.reject(f"contextual feature {name}: {len(table)} rows, the limit is {MOST_WHOLE}")
        table = table[:1]
    feature = Feature(name=name, of="user", kind="number", num_buckets=len(table))
    last = table.new_zeros(table.shape[1]) if missing is None else missing
    return Contextual(feature, torch.cat([table, last[None]]))


def folded(
    features: Sequence[Contextual], weights: Sequence[Tensor] | Tensor, biases: Tensor, scale: float
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fold linear layers into the rows of features.

    Args:
        features: Features in the order of their tokens.
        weights: [features, d, dim] linear layer of each feature.
        biases: [tokens, dim]: one a feature, or one, if all features are one token.
        scale: Factor of embeddings.

    Returns:
        Settings of `HSTUConfig`, and tensors of the model.
    """
    rows = [one.rows @ weight * scale for one, weight in zip(features, weights, strict=True)]
    is_each = len(biases) == len(features)
    settings = {
        "features": tuple(one.feature for one in features),
        "user_tokens": "each" if is_each else "sum",
    }
    padding = biases.new_zeros(1, biases.shape[1])
    tensors = {
        "features.user.codes.weight": torch.cat([*rows, padding]),
        "user_token": biases * scale if is_each else biases[0] * scale,
    }
    return settings, tensors


MAX_ACTION_BITS = 8  # every set of actions is a row of a table: 2^8 rows
EPS = 1e-5  # epsilon of norms outside the layers


def gated_mlp(source: ForeignCheckpoint, at: str, rows: Tensor) -> Tensor:
    """Take a gated MLP and apply it to rows: linear, norm gate, linear, layer norm."""
    first = source.take(f"{at}0.weight", -1, rows.shape[1])
    x = linear(rows, first, source.take(f"{at}0.bias", len(first)))
    gate = source.take(f"{at}1.weight", len(first)), source.take(f"{at}1.bias", len(first))
    x = x * layer_norm(x, x.shape[-1:], *gate, EPS).sigmoid()
    second = source.take(f"{at}2.weight", -1, len(first))
    x = linear(x, second, source.take(f"{at}2.bias", len(second)))
    norm = source.take(f"{at}3.weight", len(second)), source.take(f"{at}3.bias", len(second))
    return layer_norm(x, x.shape[-1:], *norm, EPS)


def action_sets(
    source: ForeignCheckpoint, at: str, mlp: str, dim: int
) -> tuple[tuple[str, ...], Tensor]:
    """Name every set of actions by the sum of its weights, and compute its row.

    The last row is a candidate's.

    Args:
        source: The checkpoint.
        at: Prefix of the encoder's tensors.
        mlp: Prefix of the tensors of the MLP behind the encoder.
        dim: Width of a row.
    """
    weights = source.tensors.pop(
        f"{at}_combined_action_weights", torch.tensor([], dtype=torch.int64)
    ).tolist()
    bits = len(weights)
    if not bits:
        source.reject("no action encoder: events of one kind only do not convert")
        return ("0",), torch.zeros(2, dim)
    if (
        bits > MAX_ACTION_BITS
        or len({w.bit_count() for w in weights}) != 1
        or len(set(weights)) != bits
    ):
        source.reject(f"action_weights = {weights}: up to {MAX_ACTION_BITS} powers of two convert")
        return ("0",), torch.zeros(2, dim)
    table = source.take(f"{at}_action_embedding_table", bits, -1)
    shown = source.take(f"{at}_target_action_embedding_table", 1, table.numel())
    masks = (torch.arange(2**bits)[:, None] >> torch.arange(bits)) & 1  # [sets, bits]
    rows = torch.cat([(masks[:, :, None] * table).flatten(1), shown])
    names = tuple(
        str(sum(w for w, on in zip(weights, mask, strict=True) if on)) for mask in masks.tolist()
    )
    return names, gated_mlp(source, mlp, rows)


def clocks(
    source: ForeignCheckpoint, at: str, dim: int, tensors: dict[str, Tensor]
) -> tuple[TimePeriod, ...]:
    """Take the periods of the request's time that the final rows read, if there are any."""
    if f"{at}_period_units" not in source.tensors:
        return ()
    units = source.take(f"{at}_period_units", 1, -1).flatten().tolist()
    counts = source.take(f"{at}_units_per_period", 1, len(units)).flatten().tolist()
    tensors["clock.linear.weight"] = source.take(
        f"{at}_time_feature_combiner.weight", dim, dim + 2 * len(units)
    )
    tensors["clock.linear.bias"] = source.take(f"{at}_time_feature_combiner.bias", dim)
    return tuple(
        TimePeriod(unit_s=int(u), num_units=int(n)) for u, n in zip(units, counts, strict=True)
    )


def stu_layer(
    source: ForeignCheckpoint,
    theirs: str,
    ours: str,
    dim: int,
    heads: int,
    qk_dim: int,
    v_dim: int,
    is_per_head: bool,
) -> dict[str, Tensor]:
    """Take the tensors of one layer."""
    rows = 2 * heads * (v_dim + qk_dim)
    norm = heads if is_per_head else heads * v_dim
    return {
        ours + "uvqk.weight": source.take(f"{theirs}_uvqk_weight", dim, rows).T,
        ours + "uvqk.bias": source.take(f"{theirs}_uvqk_beta", rows),
        ours + "norm_in.weight": source.take(f"{theirs}_input_norm_weight", dim),
        ours + "norm_in.bias": source.take(f"{theirs}_input_norm_bias", dim),
        ours + "out.weight": source.take(f"{theirs}_output_weight", 3 * heads * v_dim, dim).T,
        ours + "norm_attention.weight": source.take(f"{theirs}_output_norm_weight", norm),
        ours + "norm_attention.bias": source.take(f"{theirs}_output_norm_bias", norm),
    }
