"""What another project's checkpoint folder holds, and what all conversions share.

A conversion takes what it knows of the tensors by name and the settings; at the end whatever is
left is named, with everything that was rejected before, in one error: nothing is dropped in
silence.

Meta's DLRM form of HSTU and what descends from it have layers in common, MLPs that become rows, and
contextual features: a token each of the user in front of the history, or all in one. Such a token
is a linear layer, or an MLP, of the row of the feature's value. It is folded into the rows: what a
token is without a value is in `user_token`, and what the value adds is its row.

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

STATE_KEYS = (
    "model_state_dict",
    "dense_dict",
    "sparse_dict",
    "state_dict",
    "model",
)  # under which programs save a state dict
# in front of names, of modules around the model
WRAPPERS = ("module.", "_orig_mod.", "_dmp_wrapped_module.")


class ForeignCheckpoint:
    """One checkpoint of another project, while it is converted."""

    def __init__(
        self, name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
    ) -> None:
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

    def reject(self, problem: str) -> None:
        """Note something that does not convert."""
        self.problems.append(problem)

    def only(self, key: str, allowed: Iterable[Any], default: Any) -> Any:
        """Read a setting of which some values convert.

        Another is noted, and the first allowed one returned.
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
            name: of it.
            shape: that it must have; -1 = any size.

        Returns:
            The tensor; zeros of the wanted shape (1 for any) where it is missing or other, which is
            noted.
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
            return found.detach().float()
        return torch.zeros([max(1, size) for size in shape])

    def drop(self, *, prefix: str = "", suffix: str = "") -> None:
        """Leave out tensors whose values follow from the configuration, or that others hold by now."""
        self.tensors = {
            n: t
            for n, t in self.tensors.items()
            if not (n.startswith(prefix) and n.endswith(suffix))
        }

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
        is_trusted: read distributed checkpoints, whose metadata are a pickle: reading it may run
            its author's code.

    Raises:
        CheckpointError: there is none, or one cannot be read.
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
    """Read a checkpoint that several processes wrote, whole."""
    with tempfile.TemporaryDirectory() as scratch:
        joined = Path(scratch, "joined.pt")
        try:
            dcp_to_torch_save(folder, joined)
        except (
            Exception,
            CheckpointException,
        ) as error:  # it raises whatever its files make it stumble over
            raise CheckpointError(
                f"{folder}: cannot be read: {str(error).strip().splitlines()[-1]}"
            ) from error
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
                continue  # goes on in the next line
            # a reference to a function or a macro: no setting of a model
            if "@" in value or "%" in value:
                pending = ""
                continue
            raise CheckpointError(f"{files[0]}: line {number}: not a literal: {pending}") from error
    return found


class GivenNames(NamedTuple):
    """What a checkpoint of another project does not say of itself.

    Empty = numbers, or the project's own words.
    """

    item_ids: I64 | None = None  # [num_items] external id of each row, each once
    actions: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()


class Converted(NamedTuple):
    """A ranker in our form."""

    model: HSTU
    item_ids: I64  # [num_items]
    notes: list[str]  # what became of things that a reader of the source would look for


def filled(
    source: ForeignCheckpoint, config: HSTUConfig, tensors: dict[str, Tensor], item_ids: I64
) -> Converted:
    """Make the model.

    Args:
        source: everything of it is taken by now.
        config: the model's.
        tensors: of the model by our names; biases that are absent are zero, norms that are absent
            change nothing.
        item_ids: external id of each item row.

    Raises:
        CheckpointError: something of the source did not convert.
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
        widths: of U, V, Q and K in one head.
    """
    by_head = weight.view(num_heads, sum(widths), *weight.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in by_head.split(widths, dim=1)])


class Contextual(NamedTuple):
    """One feature."""

    feature: Feature  # of the user
    # [num_rows, d] of its table, in the order of `Feature.num_rows`; of what is missing last
    rows: Tensor


def numbered(
    source: ForeignCheckpoint, name: str, table: Tensor, missing: Tensor | None = None
) -> Contextual:
    """Make a feature whose values are the numbers of its table's rows.

    Args:
        source: where a table that is too long is noted.
        name: of the feature.
        table: [n, d].
        missing: [d] of no value; None = zeros.
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
        features: in the order of their tokens.
        weights: [features, d, dim] of each one's layer.
        biases: [tokens, dim]: as many as features, or one, and then the features are one token.
        scale: of embeddings.

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


MAX_ACTION_BITS = 8  # sets of actions are rows of a table, 2^8
EPS = 1e-5  # of norms outside the layers


def gated_mlp(source: ForeignCheckpoint, at: str, rows: Tensor) -> Tensor:
    """Take an MLP of two linear layers, a norm gate between and a norm behind, and give its results for rows."""
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
        source: has them.
        at: of the encoder.
        mlp: of the MLP behind it.
        dim: of a row.
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
    """Take the clocks of the last rows, if there are any."""
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
